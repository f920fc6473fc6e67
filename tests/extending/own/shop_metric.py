"""A metric: the share of rows on the correct side of 0.5."""

from raytrec.metrics.registry import SumMetric, metric


@metric("right_side", title="accuracy (share of rows)", label="accuracy", better="higher", format="{:.1%}")
class Accuracy(SumMetric):
    @staticmethod
    def sums(outputs):
        right_B = (outputs.predictions > 0.5) == (outputs.labels > 0.5)
        return {"right": (right_B * outputs.weights).sum(), "weight": outputs.weights.sum()}

    @staticmethod
    def figure(sums):
        return sums["right"] / sums["weight"]
