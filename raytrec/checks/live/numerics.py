"""finite and numerics: weights, state and gradients are finite, and no magnitude or predicted rate is unusual."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import median

import torch

from raytrec.checks.live.outcome import Check, Outcome, Position, group_by_rarity, read_flat_values
from raytrec.checks.live.registry import check
from raytrec.embeddings.tables import Shard
from raytrec.embeddings.taps import Lookup

SAMPLED_ROWS_PER_SHARD = 4096  # maximum number of rows checked per shard, and per feature of a probed step
MAX_GROWTH = 100.0  # largest accepted ratio of a magnitude to its median over earlier evaluations
WARMUP_EVALUATIONS = 3  # evaluations before growth is judged
HISTORY = 100  # evaluations over which the median is taken
# Growth up to this magnitude is never reported, because values of large tables start below 1e-3.
MIN_USUAL_MAGNITUDE = 0.1
RATIO_BOUNDS = 0.75, 1.33  # predicted ÷ actual
MAX_SIGMAS = 6.0  # standard deviations of a ratio of rates, each about 1 ÷ √n for n positives
MIN_RATIO_STEP = 200  # first step at which rates are compared
DENSE = "dense layers'"


@check("finite")
class Finite(Check):
    """Check that no sampled weight or optimizer state is NaN or infinite.

    Every evaluation reads all dense layers and, in turn, at most SAMPLED_ROWS_PER_SHARD rows of each shard of a table.
    After a probed step, weights of rows that the step looked up are added (`sample_weights`). All values are checked
    before a checkpoint is saved (checkpoint/save.py). Buffers that contain NaN or infinity by design are ignored.
    """

    do = (
        "check the data of the last steps, lower optim.dense.lr or optim.embeddings.lr, or set or lower "
        "train.max_grad_norm; start a new run, from the last checkpoint if there is one: "
        "raytrec train --warm-start RUN optim.embeddings.lr=LOWER"
    )

    _turn = 0  # number of earlier evaluations

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names the tensors that are not finite. Every rank must call this method."""
        peers = self.run.peers
        nonfinite = [name for name, size in self.sizes(probed).items() if not isfinite(size)]
        on_ranks = group_by_rarity(peers.objects(nonfinite)) if peers.max_number(bool(nonfinite)) else []
        problems = [f"{name}: a value is NaN or infinite on {where}" for name, where in on_ranks]
        summary = "all sampled weights and optimizer state are finite"
        return self.outcome(position.step, problems, summary, len(problems), 0)

    @torch.no_grad()
    def sizes(self, probed: bool) -> dict[str, float]:
        """Return max |value| by name for this rank's dense layers and a sample of the rows of its table shards.

        Optimizer state is included. The maximum is NaN if a value is not finite. The next call reads another sample.
        """
        weights = sample_weights(self.run, self._turn, probed)
        state = [
            (f"table {table.name}'s {kind}", sample(shard, self._turn))
            for table in self.run.tables.values()
            for kind, parts in table.state.items()
            for shard in parts.local
        ]
        state += [(name, value) for name, value in self.run.dense.items() if not name.endswith("/value")]
        self._turn += 1
        return compute_max_magnitudes([*weights, *state])


@dataclass(frozen=True)
class Sizes:
    """Magnitudes of weights and gradients on one rank, with the same names on all ranks.

    Attributes:
        values: max |value| of weights by name.
        squares: Squared norm of the gradient by name; empty unless the step was probed.
        ratios: Metric → (ratio that should be 1, its number of positives); either is None if unknown.
    """

    values: dict[str, float]
    squares: dict[str, float]
    ratios: dict[str, tuple[float | None, float | None]]


@check("numerics")
class Numerics(Check):
    """Check of the magnitudes of weights and gradients, and of the ratio of predicted to actual rates.

    A magnitude is the largest |value| of a table or of a tensor of the dense layers, or the norm of the whole gradient.
    It must not exceed MAX_GROWTH times its median over up to HISTORY earlier evaluations, of which there must be at
    least WARMUP_EVALUATIONS. For weights, the median counts as at least MIN_USUAL_MAGNITUDE. Every evaluation reads all
    dense layers, and a sample of each shard. Gradients are only checked after probed steps. They must also be finite,
    unless `train.on_nan: skip` has skipped the step. From step MIN_RATIO_STEP, ratios of rates must be within
    RATIO_BOUNDS (`_describe_drift`).
    """

    do = Finite.do

    _turn = 0  # number of earlier evaluations

    def __init__(self, run):
        super().__init__(run)
        self._earlier: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Measure the magnitudes, and return the outcome for all ranks. Every rank must call this method."""
        return self.judge(self.sizes(position, probed), position.step)

    def judge(self, local_sizes: Sizes, step: int) -> Outcome:
        """Return the outcome for all ranks, given the magnitudes on this rank, and record them for later calls.

        This is a collective operation: every rank must call it.

        Args:
            local_sizes: Magnitudes on this rank.
            step: Number of training steps completed.
        """
        values, squares = self._reduce_over_ranks(local_sizes)
        # Only the norm over dense layers and all tables is judged, because the norm of a single part can grow a
        # thousandfold when training leaves a plateau.
        norm, top_part = sqrt(sum(squares.values())), max(squares, key=squares.get, default="")
        growth = self._measure_growth("the gradient", norm, 0.0)
        growths = {name: self._measure_growth(name, size, MIN_USUAL_MAGNITUDE) for name, size in values.items()}
        exploded = [name for name, grown in growths.items() if grown > MAX_GROWTH]
        undefined = [name for name, square in squares.items() if not isfinite(square)]
        by_rank = self.run.peers.objects(local_sizes) if exploded or undefined else []
        bad = [[name for name in undefined if not isfinite(sizes.squares[name])] for sizes in by_rank]
        problems = [f"{name}: the gradient is NaN or infinite on {where}" for name, where in group_by_rarity(bad)]
        if growth > MAX_GROWTH:
            ratio = f"{growth:,.0f} × its usual value"
            problems.append(
                f"the norm of the whole gradient is {norm:.3g}, {ratio}; the largest part is from {top_part}"
            )
        for name in exploded:
            size, rank = max((sizes.values[name], rank) for rank, sizes in enumerate(by_rank))
            problems.append(
                f"{name}: max |value| is {size:.3g} (on rank {rank}), {growths[name]:,.0f} × its usual value"
            )
        problems += _describe_drift(local_sizes.ratios) if step >= MIN_RATIO_STEP else ()
        summary = f"{'all gradients are finite, and ' if squares else ''}no magnitude is unusually large"
        return self.outcome(step, problems, summary, max([growth, *growths.values()]), MAX_GROWTH)

    @torch.no_grad()
    def sizes(self, position: Position, probed: bool) -> Sizes:
        """Return the magnitudes on this rank; the next call reads another sample of each shard."""
        run, figures = self.run, position.figures
        weights = sample_weights(run, self._turn, probed)
        self._turn += 1
        tables = [f"table {name}" for name in run.tables]
        values = dict.fromkeys([*tables, *(name for name, _ in weights)], 0.0) | compute_max_magnitudes(weights)
        squares: dict[str, float] = {}
        if probed:
            squares = dict.fromkeys([*(f"{DENSE} {name}" for name in run.parameters), *tables], 0.0)
            gradients = self._square_gradients()
            # The gradients of a skipped step are ignored, because the step did not change weights.
            if run.config.train.on_nan != "skip" or all(map(isfinite, gradients.values())):
                squares |= gradients
        ratios = {key: (figures.get(key), figures.get(counted)) for key, counted in position.ratios.items()}
        return Sizes(values, squares, ratios)

    def _reduce_over_ranks(self, mine: Sizes) -> tuple[dict[str, float], dict[str, float]]:
        """Combine the magnitudes of all ranks; return (name → maximum of the values, name → combined squares).

        Squares are combined by the maximum for dense layers, which are replicated, and by the sum for tables.
        """
        dense = {name: square for name, square in mine.squares.items() if name.startswith(DENSE)}
        parts = {name: square for name, square in mine.squares.items() if name not in dense}
        largest_of = torch.tensor([*mine.values.values(), *dense.values()], dtype=torch.float64)
        maxima = self.run.peers.max(largest_of.nan_to_num(nan=inf, posinf=inf)).tolist()
        sums = self.run.peers.sum(torch.tensor([*parts.values()], dtype=torch.float64)).tolist()
        values, squares = maxima[: len(mine.values)], [*maxima[len(mine.values) :], *sums]
        return (dict(zip(mine.values, values, strict=True)), dict(zip([*dense, *parts], squares, strict=True)))

    def _measure_growth(self, name: str, size: float, floor: float) -> float:
        """Return the ratio of a magnitude to its usual value, and record a finite magnitude above 0 for later calls.

        The usual value is the median over earlier calls, or `floor` if that is larger. The ratio is 0 if
        there are too few earlier values, or if the magnitude is 0 or not finite.
        """
        earlier = self._earlier[name]
        usual = max(median(earlier), floor) if len(earlier) >= WARMUP_EVALUATIONS else None
        if not size or not isfinite(size):
            return 0.0
        earlier.append(size)
        return size / usual if usual else 0.0

    def _square_gradients(self) -> dict[str, float]:
        """Return the squared gradient norm of each dense parameter and of each table's lookup outputs."""
        terms = [
            (f"{DENSE} {name}", p.grad.square().sum()) for name, p in self.run.parameters.items() if p.grad is not None
        ]
        for lookup in self.run.taps.lookups:
            terms += [(f"table {t.name}", part.square().sum()) for t, _, part in lookup.gradients()]
        totals: dict[str, float] = defaultdict(float)
        for (name, _), (value,) in zip(terms, read_flat_values([v for _, v in terms]), strict=True):
            totals[name] += value
        return dict(totals)


def _describe_drift(ratios: dict[str, tuple[float | None, float | None]]) -> Iterator[str]:
    """Yield a description of each ratio of predicted to actual rates that is outside RATIO_BOUNDS.

    Ratios that chance can explain, i.e. within MAX_SIGMAS standard deviations of 1, are ignored. So are ratios that
    are unknown or have no positives.
    """
    for key, (ratio, positives) in ratios.items():
        if ratio is None or not positives:
            continue
        tolerance = MAX_SIGMAS / sqrt(positives)
        if not RATIO_BOUNDS[0] <= ratio <= RATIO_BOUNDS[1] and abs(ratio - 1) > tolerance:
            task = key.rpartition(".")[0]
            of_task = f" of {task}" if task else ""
            bounds = f"{RATIO_BOUNDS[0]:g} to {RATIO_BOUNDS[1]:g}"
            yield f"predicted ÷ actual rate{of_task} is {ratio:.3g} over {positives:,.0f} positives, not {bounds}"


def sample_weights(run, turn: int, probed: bool) -> list[tuple[str, torch.Tensor]]:
    """Return pairs (name, values) of the weights of some rows of this rank's shards, and of the dense layers.

    All parts of a table have the same name. The rows of shards that are not read completely (see `sample`) differ from
    turn to turn. After a probed step, some of the rows that the step looked up are added. Buffers that contain NaN or
    infinity by design are omitted.
    """
    looked_up = _sample_looked_up_rows(run.taps.lookups) if probed else {}
    named = []
    for table in run.tables.values():
        for shard in (s for s in table.weight.local if len(s.rows)):
            parts = [sample(shard, turn), *map(shard.read, looked_up.get(table.name, ()))]
            named += [(f"table {table.name}", part) for part in parts]
    values = {n: value for n, value in run.dense.items() if n.endswith("/value") and n not in run.unbounded}
    return [*named, *values.items()]


def sample(shard: Shard, turn: int) -> torch.Tensor:
    """Return at most `SAMPLED_ROWS_PER_SHARD` rows of a shard; successive turns cover all rows."""
    stride = max(1, -(-len(shard.rows) // SAMPLED_ROWS_PER_SHARD))
    return shard.read(slice(turn % stride, None, stride))


def compute_max_magnitudes(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, float]:
    """Return max |value| by name; NaN if a value is NaN or infinite.

    Tensors with the same name are combined. Tensors that are empty or not floating-point are omitted.
    """
    floats = [(name, t) for name, t in tensors if t.numel() and t.is_floating_point()]
    # On a CPU, aminmax is many times faster than torch.linalg.vector_norm(t, inf), and also propagates NaN.
    sizes = read_flat_values([torch.stack(t.aminmax()).float().abs().amax() for _, t in floats])
    magnitudes: dict[str, float] = {}
    for (name, _), (size,) in zip(floats, sizes, strict=True):
        previous = magnitudes.get(name, 0.0)
        magnitudes[name] = max(size, previous) if isfinite(size + previous) else float("nan")
    return magnitudes


def _sample_looked_up_rows(lookups: list[Lookup]) -> dict[str, list[torch.Tensor]]:
    """Return table → samples, one per feature, of the rows of this rank's shard that the probed step looked up.

    A sample has at most SAMPLED_ROWS_PER_SHARD rows, int [n], which may repeat.
    """
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)
    for lookup in lookups:
        if lookup.ids is None:
            continue
        sizes = lookup.ids.lengths().view(len(lookup.tables), -1).sum(1).tolist()
        for table, ids_of_key in zip(lookup.tables, lookup.ids.values().split(sizes), strict=True):
            rows[table].append(ids_of_key[:: max(1, -(-len(ids_of_key) // SAMPLED_ROWS_PER_SHARD))])
    return rows
