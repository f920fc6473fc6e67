"""Base class, inputs and outcomes of live checks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from raytrec.common.collectives import Peers
from raytrec.common.formatting import null_nonfinite
from raytrec.common.messages import Outcome
from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.embeddings.managed.row_map import RowMap
from raytrec.embeddings.tables import Table
from raytrec.embeddings.taps import Taps

START, STEP, CHECKPOINT = "start", "step", "checkpoint"


@dataclass(frozen=True)
class Position:
    """Position of this rank in the run when a check is evaluated.

    Attributes:
        step: Number of training steps completed.
        batch_step: Step of this rank's last batch, counted from 0; None if unknown.
        expected_rows: Number of rows over all ranks in the batches trained since the taps were created; None
            if rows may be skipped.
        figures: Metrics of the last training window by key, the same on all ranks; None: undefined; may be empty.
        ratios: Key in `figures` of each ratio that should be 1 → key in `figures` of its number of positives.
        about: Plain values that must be the same on all ranks; empty except at the start.
    """

    step: int
    batch_step: int | None = None
    expected_rows: int | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    ratios: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckedRun:
    """Run to check, as seen by one rank.

    Attributes:
        config: Configuration of the run.
        schema: Schema of the run.
        tables: Live tables by name (checkpoint.state.LogicalState).
        dense: Live values, by name, of dense layers, their optimizer state and averages, and tables' update counts
            (checkpoint.state.LogicalState).
        taps: Taps on lookups and dense layers.
        device: Device of this rank.
        parameters: Parameters of the dense layers, which provide gradients; may be empty.
        unbounded: Names in `dense` of values that contain NaN or infinity by design.
        maps: Table with managed ids → this rank's part of its map.
        peers: Ranks that agree on outcomes.
    """

    config: RunConfig
    schema: Schema
    tables: dict[str, Table]
    dense: dict[str, torch.Tensor]
    taps: Taps
    device: torch.device
    parameters: Mapping[str, nn.Parameter] = field(default_factory=dict)
    unbounded: frozenset[str] = frozenset()
    maps: Mapping[str, RowMap] = field(default_factory=dict)
    peers: Peers = field(default_factory=Peers)

    @cached_property
    def features(self) -> Features:
        """Features of the run, and how each feature is looked up."""
        return resolve_features(self.schema, self.config.model)


class Check:
    """Base class of live checks, which all ranks evaluate together; registry.py shows how to add a check.

    Args:
        run: Run to check.

    Attributes:
        name: Name in the configuration (`checks.NAME`: off, warn or stop) and in records.
        moments: Moments of evaluation: START, STEP (after a probed step) and CHECKPOINT (before a checkpoint
            is written).
        do: Advice for the user after a failure. The word RUN stands for the run folder, and LOWER for a tenth of
            optim.embeddings.lr.
    """

    name: ClassVar[str] = ""
    moments: ClassVar[frozenset[str]] = frozenset({START, STEP, CHECKPOINT})
    do: ClassVar[str] = "see the failed outcome in checks.jsonl of the run folder"

    def __init__(self, run: CheckedRun):
        self.run = run

    @classmethod
    def applies(cls, run: CheckedRun) -> bool:
        """Return True if the check applies to this run; other checks are not evaluated. By default, all apply."""
        return True

    def prepare(self, batch: Batch) -> None:
        """Prepare for a probed step with this rank's batch, in CPU memory. Every rank must call this method."""

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, the same on all ranks.

        This is a collective operation: every rank must call it. Ranks agree through sums and maxima of tensors
        (`run.peers`), whose size does not depend on the number of ranks. They exchange objects only after a failure,
        to name ranks, tables and features.

        Args:
            position: Position of this rank.
            probed: True if the taps have recorded the values of the last step.
        """
        raise NotImplementedError

    def outcome(
        self, step: int, problems: list[str], good: str, figure: float | None = None, limit: float | None = None
    ) -> Outcome:
        """Return the check's outcome, a failure if there are problems.

        Args:
            step: Number of training steps completed.
            problems: Descriptions of problems; the outcome's text lists the first three and the number of others.
            good: Text of the outcome if `problems` is empty.
            figure: Measured value; None if the check measures no value. NaN and infinity become None.
            limit: Largest value that passes; None if there is no limit.
        """
        more_text = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        text = "; ".join(problems[:3]) + more_text if problems else good
        values = null_nonfinite({"figure": figure, "limit": limit})
        return Outcome(check=self.name, step=step, passed=not problems, text=text, **values)


def format_ranks(numbers: list[int]) -> str:
    """Format ranks, of which there must be at least one, as words: "rank 1", "ranks 0, 2 and 3".

    Of more than eight ranks, the first seven and the number of others are listed.
    """
    words = [str(n) for n in numbers]
    if len(words) == 1:
        return f"rank {words[0]}"
    items = words if len(words) <= 8 else [*words[:7], f"{len(words) - 7} more"]
    return f"ranks {', '.join(items[:-1])} and {items[-1]}"


def group_by_rarity(of_ranks: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Return pairs of a name and the ranks that report it, as text, given the names that each rank reports.

    Names reported by the fewest ranks come first. An error that begins on one rank soon spreads to all ranks, so these
    names are closest to the cause.
    """
    on: dict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(of_ranks):
        for name in names:
            on[name].append(rank)
    return [(name, format_ranks(on[name])) for name in sorted(on, key=lambda name: (len(on[name]), name))]


def find_differing(local_values: Mapping[str, Any], peers: Peers) -> list[tuple[str, list[Any], list[int]]]:
    """Find the values that differ between ranks.

    This is a collective operation: every rank must call it. If all values are the same, only a hash is exchanged.

    Args:
        local_values: This rank's plain values by name, compared by their repr.
        peers: Ranks to compare.

    Returns:
        (name, values by rank, deviating ranks) for each value that differs, the same on all ranks. A value that is
        missing on a rank is None.
    """
    if peers.is_same_on_all(local_values):
        return []
    of_ranks = peers.objects(local_values)
    names = dict.fromkeys(name for one in of_ranks for name in one)
    values = {name: [one.get(name) for one in of_ranks] for name in names}
    return [(name, each, odd) for name, each in values.items() if (odd := find_deviating_ranks(each))]


def find_deviating_ranks(values: list[Any]) -> list[int]:
    """Return the ranks whose value is not the most common one; of equally common values, the lowest rank's counts.

    Args:
        values: Value of each rank, at least one; compared by their repr.
    """
    texts = [repr(value) for value in values]  # compared as text, as in Peers.is_same_on_all
    usual = Counter(texts).most_common(1)[0][0]
    return [rank for rank, text in enumerate(texts) if text != usual]


def read_flat_values(tensors: Sequence[torch.Tensor]) -> list[list[int | float | bool]]:
    """Return the values of each tensor as a flat list of Python numbers.

    Tensors with the same device and dtype are copied to the host together, so the host waits once for each of
    these groups. Devices may differ, because torch keeps an optimizer's step count in host memory.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(number)
    out: list[list[int | float | bool]] = [[]] * len(tensors)
    for numbers in groups.values():
        values = torch.cat([tensors[n].detach().reshape(-1) for n in numbers]).tolist()
        start = 0
        for n in numbers:
            out[n] = values[start : start + tensors[n].numel()]
            start += tensors[n].numel()
    return out
