"""Metrics as sums that add up over steps and ranks; the formulas are TorchRec's."""

from __future__ import annotations

from math import log

import torch
import torch.distributed as dist
from torchrec.metrics.calibration import compute_calibration, get_calibration_states
from torchrec.metrics.ne import compute_logloss, compute_ne, get_ne_states

from raytrec.worker.step import Outputs

ETA = 1e-12  # TorchRec's bound on probabilities inside logarithms
AT_ONCE = 1 << 22  # values of a rank that a gather holds on the device: 16 MiB
AUC_BYTES = 160  # a row, at most: float64, sorted, with torchmetrics' cumulative counts


class Sums:
    """Cross-entropy, rows, labels and predictions, summed in float64 over steps and then over ranks."""

    NAMES = ("cross_entropy_sum", "weighted_num_samples", "pos_labels", "neg_labels")

    def __init__(self, device: torch.device):
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)

    def add(self, outputs: Outputs) -> None:
        """Adds a step of this rank."""
        predictions = torch.sigmoid(outputs.logits)
        ne = get_ne_states(outputs.labels, predictions, outputs.weights, ETA)
        calibration = get_calibration_states(outputs.labels, predictions, outputs.weights)
        parts = [ne[name] for name in self.NAMES] + list(calibration.values())
        self._sums += torch.stack([p.double() for p in parts])

    def total(self) -> list[float]:
        """The sums since the last `reduce` over all ranks, for `resume`; a collective."""
        sums = self._sums.clone()
        dist.all_reduce(sums)
        return sums.tolist()

    def resume(self, total: list[float]) -> None:
        """Goes on from what `total` gave, with any number of ranks."""
        if dist.get_rank() == 0:
            self._sums += torch.tensor(total, dtype=torch.float64, device=self._sums.device)

    def reduce(self) -> dict[str, float]:
        """Figures over all ranks since the last call; a collective. Then starts anew.

        Returns:
            rows; logloss in nats; ne, the cross-entropy ÷ that of always predicting the mean label (He et al.
            2014), NaN where all labels are equal; calibration, the sum of predictions ÷ sum of labels;
            positives, the sum of labels.
        """
        sums = self._sums.clone()
        self._sums.zero_()
        dist.all_reduce(sums)
        ce, rows, positive, negative, predicted, labelled = sums.cpu()
        one_class = float(positive) <= 0 or float(negative) <= 0
        return {
            "rows": round(float(rows)),
            "logloss": float(compute_logloss(ce, positive.clone(), negative, ETA)) * log(2),
            "ne": float("nan") if one_class else float(compute_ne(ce, rows, positive, negative, ETA)),
            "calibration": float(compute_calibration(predicted, labelled)),
            "positives": float(positive),
        }


def gather_to_first(
    values: torch.Tensor, device: torch.device | None = None, at_once: int = AT_ONCE
) -> torch.Tensor | None:
    """All ranks' values, one after the other, on rank 0, where they lay; None elsewhere. A collective.

    Args:
        values: [n] of one dtype; n may differ between ranks.
        device: that they travel over, as NCCL reads no host memory; default: where they lie.
        at_once: values of each rank that are on that device at a time.
    """
    device, world, first = device or values.device, dist.get_world_size(), dist.get_rank() == 0
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(counts, torch.tensor([values.numel()], device=device))
    counts = torch.cat(counts).tolist()
    wholes = [torch.empty(n, dtype=values.dtype, device=values.device) for n in counts] if first else []
    for start in range(0, max(counts), at_once):
        padded = torch.zeros(min(at_once, max(counts) - start), dtype=values.dtype, device=device)
        mine = values[start : start + at_once]
        padded[: mine.numel()] = mine.to(device)
        parts = [torch.empty_like(padded) for _ in counts] if first else None
        dist.gather(padded, parts)
        for whole, part in zip(wholes, parts or [], strict=True):
            there = whole[start : start + at_once]
            there.copy_(part[: there.numel()])
    return torch.cat(wholes) if first else None


def place_for(rows: int, device: torch.device) -> torch.device:
    """Where the AUC of so many rows is computed: on a GPU if half of its free memory is enough."""
    if device.type == "cuda" and rows * AUC_BYTES > torch.cuda.mem_get_info(device)[0] // 2:
        return torch.device("cpu")
    return device


def exact_auc(logits: torch.Tensor, labels: torch.Tensor) -> float | None:
    """Area under the ROC curve, ties counted half; None when labels are not both 0 and 1.

    TorchRec's own AUC ignores ties, so this is torchmetrics'.
    """
    from torchmetrics.functional.classification import binary_auroc

    binary = labels.round()
    if not torch.equal(binary, labels) or binary.min() == binary.max():
        return None
    return float(binary_auroc(torch.sigmoid(logits.double()), binary.long()))
