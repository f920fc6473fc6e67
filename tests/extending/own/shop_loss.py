"""A loss: the squared hinge of support vector machines."""

from raytrec.tasks.losses import Loss, loss


@loss("hinge")
class Hinge(Loss):
    label_range = (0.0, 1.0)
    metrics = ("auc",)

    def __init__(self, margin: float = 1.0):
        self.margin = margin

    def predict(self, logits_B):
        return logits_B.sigmoid()

    def of_rows(self, logits_B, labels_B):
        return (self.margin - (2 * labels_B - 1) * logits_B).clamp(min=0).square()
