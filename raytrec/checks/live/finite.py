"""finite: no weight or optimizer state is NaN or infinite."""

from __future__ import annotations

from collections import defaultdict
from math import isfinite

import torch

from raytrec.checks.live.outcome import Check, Outcome, Position, group_by_rarity, read_flat_values
from raytrec.checks.live.registry import check
from raytrec.embeddings.tables import Shard
from raytrec.embeddings.taps import Lookup

SAMPLED_ROWS_PER_SHARD = 4096  # maximum number of rows checked per shard, and per feature of a probed step


@check("finite")
class Finite(Check):
    """Check that no weight or optimizer state is NaN or infinite.

    Every evaluation reads all dense layers, and a different part of each shard of a table. Every value is
    checked before a checkpoint is saved (`checkpoint.save`).
    """

    do = (
        "lower optim.dense.lr or optim.embeddings.lr, set train.max_grad_norm, or check the data of the last "
        "steps; restart with the weights of the last checkpoint: "
        "raytrec train --warm-start RUN optim.embeddings.lr=LOWER"
    )

    def __init__(self, run):
        super().__init__(run)
        self._turn = 0

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names the tensors with values that are not finite.

        This is a collective operation: every rank must call it.
        """
        peers = self.run.peers
        nonfinite = [name for name, size in self.sizes(probed).items() if not isfinite(size)]
        on_ranks = group_by_rarity(peers.objects(nonfinite)) if peers.max_number(bool(nonfinite)) else []
        problems = [f"{name}: a value is NaN or infinite on {where}" for name, where in on_ranks]
        return self.outcome(position.step, problems, "all weights and optimizer state are finite", len(problems), 0)

    @torch.no_grad()
    def sizes(self, probed: bool) -> dict[str, float]:
        """Return max |value| by name for this rank's dense layers and a sample of the rows of its table shards.

        Optimizer state is included. The maximum is NaN if a value is not finite.
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


def sample_weights(run, turn: int, probed: bool) -> list[tuple[str, torch.Tensor]]:
    """Return pairs (name, values) of the dense layers, and of some rows of this rank's shards.

    The rows differ from turn to turn. After a probed step, some of the rows that the step looked up are added.
    Buffers that contain infinity by design are omitted.
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
    sizes = read_flat_values([torch.stack(t.aminmax()).float().abs().amax() for _, t in floats]) if floats else []
    magnitudes: dict[str, float] = {}
    for (name, _), (size,) in zip(floats, sizes, strict=True):
        previous = magnitudes.get(name, 0.0)
        magnitudes[name] = max(size, previous) if isfinite(size + previous) else float("nan")
    return magnitudes


def _sample_looked_up_rows(lookups: list[Lookup]) -> dict[str, list[torch.Tensor]]:
    """Return a sample, for each feature, of the rows of this rank's shards that the probed step looked up, by table."""
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)
    for lookup in lookups:
        if lookup.ids is None:
            continue
        sizes = lookup.ids.lengths().view(len(lookup.tables), -1).sum(1).tolist()
        for table, ids_of_key in zip(lookup.tables, lookup.ids.values().split(sizes), strict=True):
            rows[table].append(ids_of_key[:: max(1, -(-len(ids_of_key) // SAMPLED_ROWS_PER_SHARD))])
    return rows
