"""What a live check gets, and its outcome."""

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
    """Where this rank is when it checks.

    Attributes:
        step: steps trained.
        batch_step: the step that this rank's last batch belongs to, from 0; None: not known.
        expected_rows: rows over all ranks of the batches trained since the taps were made; None where rows
            may be skipped.
        figures: of the last window of training, the same on all ranks; may be empty.
        ratios: key of each of them that should be 1 → key of the positives that it is of.
        about: at the start: what must be the same on all ranks, as plain values.
    """

    step: int
    batch_step: int | None = None
    expected_rows: int | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    ratios: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckedRun:
    """The run that is checked, as one rank sees it.

    Attributes:
        tables, dense: live values, of checkpoint.state.LogicalState.
        parameters: the dense layers', for their gradients; may be empty.
        unbounded: names of `dense` that are infinite by design.
        maps: table with managed ids → this rank's part of its map.
        peers: the ranks that agree on outcomes.
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
        """The features, and how they are looked up."""
        return resolve_features(self.schema, self.config.model)


class Check:
    """One consistency check, which all ranks evaluate together. How a new one is registered: registry.py.

    Args:
        run: what is checked.

    Attributes:
        name: in the configuration (`checks.NAME`: off, warn or stop) and in records.
        moments: when it is evaluated: START, STEP (after a probed step), CHECKPOINT (before one is written).
        probes: whether it needs steps to be probed (embeddings.taps).
        do: what people can do where it fails.
    """

    name: ClassVar[str] = ""
    moments: ClassVar[frozenset[str]] = frozenset({START, STEP, CHECKPOINT})
    probes: ClassVar[bool] = False
    do: ClassVar[str] = "see what it found in checks.jsonl of the run folder"

    def __init__(self, run: CheckedRun):
        self.run = run

    @classmethod
    def applies(cls, run: CheckedRun) -> bool:
        """Whether this run has something to check."""
        return True

    def prepare(self, batch: Batch) -> None:
        """Before a probed step, with this rank's part of its batch in CPU memory; a collective."""

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """The outcome, the same on all ranks; a collective.

        Ranks agree by sums and maxima of tensors (`run.peers`), however many they are. Only where something
        is wrong do they exchange objects, to name ranks, tables and features.

        Args:
            probed: whether the last step was one that the taps have kept.
        """
        raise NotImplementedError

    def outcome(
        self,
        step: int,
        problems: list[str],
        good: str,
        figure: float | None = None,
        limit: float | None = None,
    ) -> Outcome:
        """Failed where there are problems: its text has the first three."""
        rest = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
        text = "; ".join(problems[:3]) + rest if problems else good
        values = null_nonfinite({"figure": figure, "limit": limit})
        return Outcome(check=self.name, step=step, passed=not problems, text=text, **values)


def ranks(numbers: list[int]) -> str:
    """Ranks in words: rank 1; ranks 0, 2 and 3."""
    words = [str(n) for n in numbers]
    if len(words) == 1:
        return f"rank {words[0]}"
    shown = words if len(words) <= 8 else [*words[:7], f"{len(words) - 7} more"]
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}"


def rarest_first(of_ranks: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """(name, its ranks in words) of what ranks have found by name. What has begun on one rank is soon on all,
    so names of the fewest ranks come first."""
    on: dict[str, list[int]] = defaultdict(list)
    for rank, names in enumerate(of_ranks):
        for name in names:
            on[name].append(rank)
    return [(name, ranks(on[name])) for name in sorted(on, key=lambda name: (len(on[name]), name))]


def differing(found: Mapping[str, Any], peers: Peers) -> list[tuple[str, list[Any], list[int]]]:
    """Of values that should be the same on all ranks and are not: name, the ranks' values, the ranks whose
    value is not the commonest one. A collective; where all are the same, only a hash is exchanged.

    Args:
        found: name → plain value.
    """
    if peers.same(found):
        return []
    of_ranks = peers.objects(found)
    names = dict.fromkeys(name for one in of_ranks for name in one)
    values = {name: [one.get(name) for one in of_ranks] for name in names}
    return [(name, each, odd) for name, each in values.items() if (odd := odd_ones(each))]


def odd_ones(values: list[Any]) -> list[int]:
    """The ranks whose value is not the commonest one; of several, that of the lowest rank."""
    texts = [repr(value) for value in values]  # as Peers.same compares them
    usual = Counter(texts).most_common(1)[0][0]
    return [rank for rank, text in enumerate(texts) if text != usual]


def read(tensors: Sequence[torch.Tensor]) -> list[list[int | float | bool]]:
    """The values of each tensor as plain numbers, flat: one copy to the host, and so one wait, for all.

    They may be of several devices (torch keeps the count of an optimizer's steps in host memory) and dtypes:
    the tensors of each are copied at once.
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
