"""Every row of a dataset once, on any number of ranks."""

from __future__ import annotations

from collections import deque

import torch

from raytrec.common.errors import RunError
from raytrec.data.stream import Stream
from raytrec.metrics.roc import curves
from raytrec.metrics.sums import Sums, exact_auc, gather_to_first, place_for
from raytrec.worker.fetch import Fetch
from raytrec.worker.nonfinite import LATE
from raytrec.worker.step import Outputs, Step


def evaluate(step: Step, stream: Stream, device: torch.device) -> tuple[dict[str, float | None], dict | None]:
    """Metrics and curves over all rows of the stream's dataset; a collective.

    AUC is exact: logits and labels of all rows are gathered on rank 0 (8 bytes a row of its host's memory).

    Returns:
        rows, skipped_rows (data.on_error), logloss (nats), ne, calibration on every rank; auc on rank 0 (None
        elsewhere, and where labels are not both 0 and 1). And on rank 0 what curves.curves gives.

    Raises:
        RunError: when the ranks together saw more or fewer rows than the dataset has.
    """
    sums, rows = Sums(device), Rows()
    for outputs in step.evaluate(stream.batches()):
        sums.add(outputs)
        rows.add(outputs)
    figures = sums.reduce()
    skipped = stream.dataset.rows - figures["rows"]
    if skipped < 0 or (skipped and not stream.may_skip):
        raise RunError(
            f"evaluation saw {figures['rows']} rows of {stream.dataset.rows}", where=stream.dataset.uri
        )
    logits, labels = (gather_to_first(values, device) for values in rows.take())
    auc = drawn = None
    if logits is not None:
        place = place_for(len(logits), device)
        logits, labels = logits.to(place), labels.to(place)
        auc, drawn = exact_auc(logits, labels), curves(logits, labels)
    return {"auc": auc, **figures, "skipped_rows": skipped}, drawn


class Rows:
    """Logits and labels of a rank's rows, padding left out, in host memory: a GPU's is for tables.

    They come from the device a few batches late, so that it never runs dry.
    """

    def __init__(self) -> None:
        self._coming: deque[Fetch] = deque()
        self._parts: list[torch.Tensor] = [torch.empty(2, 0)]

    def add(self, outputs: Outputs) -> None:
        """Adds a batch."""
        self._coming.append(Fetch(torch.stack([outputs.logits, outputs.labels, outputs.weights])))
        if len(self._coming) > LATE:
            self._read()

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and labels of all batches, float32 [rows]."""
        while self._coming:
            self._read()
        logits, labels = torch.cat(self._parts, dim=1)
        return logits, labels

    def _read(self) -> None:
        columns_3B = self._coming.popleft().wait()
        self._parts.append(columns_3B[:2, columns_3B[2] > 0])
