"""Every row of a dataset once, on any number of ranks."""

from __future__ import annotations

import torch

from raytrec.data.stream import Stream
from raytrec.errors import RunError
from raytrec.train.curves import curves
from raytrec.train.metrics import Sums, exact_auc, gather_to_first
from raytrec.train.step import Step


def evaluate(step: Step, stream: Stream, device: torch.device) -> tuple[dict[str, float | None], dict | None]:
    """Metrics and curves over all rows of the stream's dataset; a collective.

    AUC is exact: logits and labels of all rows are gathered on rank 0 (8 bytes a row).

    Returns:
        rows, skipped_rows (data.on_error), logloss (nats), ne, calibration on every rank; auc on rank 0 (None
        elsewhere, and where labels are not both 0 and 1). And on rank 0 what curves.curves gives.

    Raises:
        RunError: when the ranks together saw more or fewer rows than the dataset has.
    """
    sums, logits, labels = Sums(device), [torch.empty(0, device=device)], [torch.empty(0, device=device)]
    for outputs in step.evaluate(stream.batches()):
        sums.add(outputs)
        real = outputs.weights > 0
        logits.append(outputs.logits[real])
        labels.append(outputs.labels[real])
    figures = sums.reduce()
    skipped = stream.dataset.rows - figures["rows"]
    if skipped < 0 or (skipped and not stream.may_skip):
        raise RunError(
            f"evaluation saw {figures['rows']} rows of {stream.dataset.rows}", where=stream.dataset.uri
        )
    all_logits, all_labels = gather_to_first(torch.cat(logits)), gather_to_first(torch.cat(labels))
    auc = exact_auc(all_logits, all_labels) if all_logits is not None else None
    drawn = curves(all_logits, all_labels) if all_logits is not None else None
    return {"auc": auc, **figures, "skipped_rows": skipped}, drawn
