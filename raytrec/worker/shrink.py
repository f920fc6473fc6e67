"""Scales the deep part of a model by held-out rows."""

from __future__ import annotations

from typing import Any

import torch

from raytrec.data.stream import Stream
from raytrec.embeddings.optim import average_of
from raytrec.metrics.selection import Selection
from raytrec.worker.evaluate import Curves, evaluate
from raytrec.worker.progress import shared_figure
from raytrec.worker.step import Step

FACTORS = (1.0, 0.75, 0.5, 0.25, 0.0)


def can_shrink(step: Step) -> bool:
    """Return True if the model has weights `shrunk`, of which train.ema keeps no average."""
    return getattr(step.head.model, "shrunk", None) is not None and average_of(step.optimizer) is None


def evaluate_shrunk(
    step: Step, held: Stream, device: torch.device, selection: Selection, items: Stream | None = None
) -> tuple[dict[str, Any], Curves | None, float]:
    """Evaluate the model with its deep part scaled by the factor that predicts held-out rows best.

    A collective. The weights `shrunk` of the model are multiplied by each of FACTORS; afterwards they are as
    before. Factors are compared by the default metric of early stopping (ne with binary cross-entropy); the
    largest of equally good ones is taken.

    Args:
        held: Rows that are not trained on.
        items: As in evaluate.

    Returns:
        Figures and curves of evaluate, and the factor.
    """
    weight: Any = step.head.model.shrunk
    figure, trained, found = selection.best(None), weight.detach().clone(), []
    for factor in FACTORS:
        shrink(step, factor)
        figures, curves = evaluate(step, held, device, selection, items)
        found.append((figure.loss(shared_figure(figure, figures, device)), figures, curves, factor))
        with torch.no_grad():
            weight.copy_(trained)
    best = found[0]
    for each in found[1:]:  # a comparison with NaN is false: an undefined metric keeps the whole deep part
        best = each if each[0] < best[0] else best
    return best[1:]


def shrink(step: Step, factor: float) -> None:
    """Multiply the weights `shrunk` of the model."""
    with torch.no_grad():
        step.head.model.shrunk.mul_(factor)
