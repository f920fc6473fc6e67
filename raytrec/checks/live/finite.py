"""finite: no weight and no optimizer state is NaN or infinite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite

import torch
import torch.distributed as dist

from raytrec.checks.live.outcome import Check, Outcome, Position, ranks
from raytrec.checks.live.readout import read
from raytrec.checks.live.registry import check
from raytrec.embeddings.tables import Shard
from raytrec.embeddings.taps import Lookup

ROWS = 4096  # of a shard that are looked at each time, and of those that a probed step touched


@dataclass(frozen=True)
class Look:
    """What one rank sees: name → max |value|, NaN where one is NaN or infinite.

    Attributes:
        weights: of tables and dense layers. state: of their optimizers.
        rank: whose it is; None: that of its place among the looks.
    """

    weights: dict[str, float]
    state: dict[str, float]
    rank: int | None = None


@dataclass(frozen=True)
class Folded:
    """What several ranks see that is not finite: name → on which of them."""

    weights: dict[str, list[int]]
    state: dict[str, list[int]]


@check("finite")
class Finite(Check):
    """Looks at dense layers whole, and at another part of each shard every time.

    Of what is saved, every value is looked at (`checkpoint.save`).
    """

    do = (
        "lower optim.dense.lr or optim.embeddings.lr, set train.max_grad_norm, or check the data of the last "
        "steps; begin again with the weights of the last checkpoint: "
        "raytrec train --warm-start RUN optim.embeddings.lr=LOWER"
    )

    def __init__(self, run):
        super().__init__(run)
        self._looks = 0

    @torch.no_grad()
    def look(self, position: Position, probed: bool) -> Look:
        weights = weights_of(self.run, self._looks, probed)
        state = [
            (f"table {table.name}'s {kind}", sample(shard, self._looks))
            for table in self.run.tables.values()
            for kind, parts in table.state.items()
            for shard in parts.local
        ]
        state += [(name, value) for name, value in self.run.dense.items() if not name.endswith("/value")]
        self._looks += 1
        return Look(largest(weights), largest(state), dist.get_rank() if dist.is_initialized() else None)

    def fold(self, looks: list[Look | Folded]) -> list[Folded]:
        parts = [look if isinstance(look, Folded) else _bad(look, place) for place, look in enumerate(looks)]
        return [Folded(_joined(p.weights for p in parts), _joined(p.state for p in parts))]

    def judge(self, looks: list[Look | Folded], step: int) -> Outcome:
        (seen,) = self.fold(looks)
        found = [*_not_finite(seen.weights), *_not_finite(seen.state)]
        problems = [text for _, text in sorted(found, key=lambda pair: pair[0])]
        return self.outcome(step, problems, "all weights and optimizer state are finite", len(found), 0)


def weights_of(run, turn: int, probed: bool) -> list[tuple[str, torch.Tensor]]:
    """(name, values) of dense layers, and of some rows of this rank's shards.

    These are others at each turn, and some of those that a probed step has touched.
    """
    touched = _touched(run.taps.lookups) if probed else {}
    found = []
    for table in run.tables.values():
        for shard in (s for s in table.weight.local if len(s.rows)):
            parts = [sample(shard, turn), *map(shard.read, touched.get(table.name, ()))]
            found += [(f"table {table.name}", part) for part in parts]
    values = {n: value for n, value in run.dense.items() if n.endswith("/value") and n not in run.unbounded}
    return [*found, *values.items()]


def sample(shard: Shard, turn: int) -> torch.Tensor:
    """About `ROWS` rows of a shard, over a number of turns all of them."""
    stride = max(1, -(-len(shard.rows) // ROWS))
    return shard.read(slice(turn % stride, None, stride))


def largest(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """name → max |value|; NaN where one is NaN or infinite."""
    some = [(name, t) for name, t in tensors if t.numel() and t.is_floating_point()]
    # Many times faster on CPU than torch.linalg.vector_norm(t, inf), and hands NaN on, too.
    sizes = read([torch.stack(t.aminmax()).float().abs().amax() for _, t in some]) if some else []
    out: dict[str, float] = {}
    for (name, _), (size,) in zip(some, sizes, strict=True):
        before = out.get(name, 0.0)
        out[name] = max(size, before) if isfinite(size + before) else float("nan")
    return out


def _touched(lookups: list[Lookup]) -> dict[str, list[torch.Tensor]]:
    """Table → int64 [n] of each key: some rows of this rank's shard that the probed step has looked up."""
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)
    for lookup in lookups:
        if lookup.ids is None:
            continue
        sizes = lookup.ids.lengths().view(len(lookup.tables), -1).sum(1).tolist()
        for table, of_key in zip(lookup.tables, lookup.ids.values().split(sizes), strict=True):
            rows[table].append(of_key[:: max(1, -(-len(of_key) // ROWS))])
    return rows


def _bad(look: Look, place: int) -> Folded:
    rank = place if look.rank is None else look.rank
    parts = look.weights, look.state
    return Folded(*({name: [rank] for name, size in part.items() if not isfinite(size)} for part in parts))


def _joined(parts: Iterable[dict[str, list[int]]]) -> dict[str, list[int]]:
    joined: dict[str, list[int]] = defaultdict(list)
    for part in parts:
        for name, bad in part.items():
            joined[name] += bad
    return dict(joined)


def _not_finite(bad_ranks: dict[str, list[int]]) -> list[tuple[int, str]]:
    """(on how many ranks, sentence): what has begun on one rank is soon on all."""
    return [
        (len(bad), f"{name}: a value is NaN or infinite on {ranks(bad)}") for name, bad in bad_ranks.items()
    ]
