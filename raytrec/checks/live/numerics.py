"""numerics: no gradient is NaN or infinite, no norm explodes, predicted rates do not drift from real ones."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import median

import torch
import torch.distributed as dist

from raytrec.checks.live.finite import largest, weights_of
from raytrec.checks.live.outcome import Check, Outcome, Position, ranks
from raytrec.checks.live.readout import read
from raytrec.checks.live.registry import check

GROWTH = 100.0  # times the median of the earlier looks
LEARN = 3  # looks
KEPT = 100  # looks that the median is taken of
# What begins near 0 may grow to this in any run: tables of many rows start with values of 1e-3 and less.
FLOOR = 0.1
DRIFT = 0.75, 1.33  # predicted ÷ real
SIGMAS = 6.0  # a ratio of rates over n positives varies by about 1 ÷ √n by chance
SETTLED = 200  # steps after which rates are compared
DENSE = "dense layers'"


@dataclass(frozen=True)
class Look:
    """What one rank sees.

    Attributes:
        values: name → max |value| of weights.
        squares: after a probed step, name → Σ of the squared gradient.
        ratios: metric → what should be 1 and the positives that it is of; None, where they are not known.
        rank: whose it is; None: that of its place among the looks.
    """

    values: dict[str, float]
    squares: dict[str, float]
    ratios: dict[str, tuple[float | None, float | None]]
    rank: int | None = None


@dataclass(frozen=True)
class Folded:
    """What several ranks see.

    Attributes:
        values: name → the largest of its values, and its rank.
        squares: name → of dense layers (which all ranks have) the largest, of tables the sum.
        bad: name → ranks whose square is not finite.
        ratios: of the first rank.
    """

    values: dict[str, tuple[float, int]]
    squares: dict[str, float]
    bad: dict[str, list[int]]
    ratios: dict[str, tuple[float | None, float | None]]


@check("numerics")
class Numerics(Check):
    """Looks at dense layers whole, and at another part of each shard every time."""

    do = (
        "lower optim.dense.lr or optim.embeddings.lr, set train.max_grad_norm, or check the data of the last "
        "steps; resume from the last checkpoint: raytrec train --resume RUN"
    )

    def __init__(self, run):
        super().__init__(run)
        self._looks = 0
        self._earlier: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))

    @torch.no_grad()
    def look(self, position: Position, probed: bool) -> Look:
        values = largest(weights_of(self.run, self._looks, probed))
        self._looks += 1
        figures = position.figures
        ratios = {key: (figures.get(key), figures.get(counted)) for key, counted in position.ratios.items()}
        squares = self._squares() if probed else {}
        if self.run.config.train.on_nan == "skip" and not all(map(isfinite, squares.values())):
            squares = {}  # of a step that is skipped and counted: it has changed nothing
        return Look(values, squares, ratios, dist.get_rank() if dist.is_initialized() else None)

    def fold(self, looks: list[Look | Folded]) -> list[Folded]:
        parts = [_as_folded(look, place) for place, look in enumerate(looks)]
        if len(parts) == 1:
            return parts
        folded = Folded({}, {}, {}, parts[0].ratios)
        for part in parts:
            for name, value in part.values.items():
                folded.values[name] = max(folded.values.get(name, value), value)
            for name, square in part.squares.items():
                before = folded.squares.get(name, 0.0)
                both = max(before, square) if name.startswith(DENSE) else before + square
                folded.squares[name] = both
            for name, bad in part.bad.items():
                folded.bad.setdefault(name, []).extend(bad)
        return [folded]

    def judge(self, looks: list[Look | Folded], step: int) -> Outcome:
        (seen,) = self.fold(looks)
        problems = _not_finite(seen.bad)
        norm, most = _norm(seen.squares)
        growths = [self._growth("the gradient", norm, 0.0)]
        if growths[0] > GROWTH:
            times = f"{growths[0]:,.0f} × what is usual"
            problems.append(
                f"the norm of the whole gradient is {norm:.3g}, {times}; most of it is that of {most}"
            )
        for name, (size, rank) in seen.values.items():
            growths.append(self._growth(name, size, FLOOR))
            if growths[-1] > GROWTH:
                times = f"{growths[-1]:,.0f} × what is usual"
                problems.append(f"{name}: max |value| is {size:.3g} (on rank {rank}), {times}")
        problems += _drift(seen.ratios) if step >= SETTLED else ()
        good = "all gradients are finite, and all numbers of usual size"
        return self.outcome(step, problems, good, max(growths), GROWTH)

    def _growth(self, name: str, size: float, floor: float) -> float:
        """How many times its usual size something has; 0 while that is being learned."""
        earlier = self._earlier[name]
        usual = max(median(earlier), floor) if len(earlier) >= LEARN else None
        if not size or not isfinite(size):
            return 0.0
        earlier.append(size)
        return size / usual if usual else 0.0

    def _squares(self) -> dict[str, float]:
        """Of dense parameters, and of what the lookups of each table gave."""
        found = [
            (f"{DENSE} {name}", p.grad.square().sum())
            for name, p in self.run.parameters.items()
            if p.grad is not None
        ]
        for lookup in self.run.taps.lookups:
            if lookup.gradient is None:
                continue
            if lookup.by_id:  # of one table
                found.append((f"table {lookup.tables[0]}", lookup.gradient.square().sum()))
            else:
                parts = lookup.gradient.square().sum(0).split(lookup.columns)
                found += [(f"table {t}", part.sum()) for t, part in zip(lookup.tables, parts, strict=True)]
        out: dict[str, float] = defaultdict(float)
        if found:
            for (name, _), (value,) in zip(found, read([v for _, v in found]), strict=True):
                out[name] += value
        return dict(out)


def _as_folded(look: Look | Folded, place: int) -> Folded:
    if isinstance(look, Folded):
        return look
    rank = place if look.rank is None else look.rank
    bad = {name: [rank] for name, square in look.squares.items() if not isfinite(square)}
    return Folded(
        {name: (value, rank) for name, value in look.values.items()}, look.squares, bad, look.ratios
    )


def _not_finite(bad_ranks: dict[str, list[int]]) -> list[str]:
    """What is on the fewest ranks comes first: what has begun on one is soon on all."""
    found = [
        (len(bad), f"{name}: the gradient is NaN or infinite on {ranks(bad)}")
        for name, bad in bad_ranks.items()
    ]
    return [text for _, text in sorted(found, key=lambda pair: pair[0])]


def _norm(squares: dict[str, float]) -> tuple[float, str]:
    """The norm of the gradient of dense layers (which all ranks have) and of all tables together (of which
    each has parts), and what most of it is of. 0 where no step was probed.

    Parts alone may grow a thousandfold where training leaves a plateau.
    """
    if not squares:
        return 0.0, ""
    return sqrt(sum(squares.values())), max(squares, key=squares.get)


def _drift(ratios: dict[str, tuple[float | None, float | None]]) -> Iterator[str]:
    """Ratios of predicted to real rates that are off by more than chance."""
    for key, (ratio, positives) in ratios.items():
        if ratio is None or not positives:
            continue
        by_chance = SIGMAS / sqrt(positives)
        if not DRIFT[0] <= ratio <= DRIFT[1] and abs(ratio - 1) > by_chance:
            task = key.rpartition(".")[0]
            of_task = f" of {task}" if task else ""
            yield f"predicted ÷ real rate{of_task} is {ratio:.3g} over {positives:,.0f} positives"
