"""conservation: no id and no row is lost on the way, and all ranks are at the same step."""

from __future__ import annotations

from dataclasses import dataclass

from raytrec.checks.live.outcome import CHECKPOINT, STEP, Check, Outcome, Position, odd_ones, ranks
from raytrec.checks.live.registry import check


@dataclass(frozen=True)
class Look:
    """Counts of one rank since the start (embeddings.taps).

    Attributes:
        sent: ids in its part of the batches, of each feature.
        received: ids that its kernels looked up in sharded tables, of each feature.
        kept: the same, in data-parallel tables.
        rows: rows in its part of the batches.
    """

    position: Position
    sent: dict[str, int]
    received: dict[str, int]
    kept: dict[str, int]
    rows: int


@check("conservation")
class Conservation(Check):
    """Holds what ranks have looked up against what they were asked for, exactly."""

    moments = frozenset({STEP, CHECKPOINT})
    do = (
        "resume from the last checkpoint: raytrec train --resume RUN; if it comes back, look at the network "
        "and at the versions of torchrec and fbgemm"
    )

    def look(self, position: Position, probed: bool) -> Look:
        taps = self.run.taps
        received: dict[str, int] = {}
        kept: dict[str, int] = {}
        for lookup in taps.lookups:
            into = kept if lookup.replicated else received
            for feature, count in zip(lookup.features, lookup.received.tolist(), strict=True):
                into[feature] = into.get(feature, 0) + count
        sent = dict(zip(taps.features, taps.sent.tolist(), strict=True))
        return Look(position, sent, received, kept, int(taps.rows))

    def judge(self, looks: list[Look], step: int) -> Outcome:
        problems = [*_steps(looks), *_rows(looks)]
        for feature, spec in self.run.schema.sparse.items():
            problems += self._ids(feature, spec.table, looks)
        total = sum(sum(look.sent.values()) for look in looks)
        return self.outcome(step, problems, f"{total:,} ids sent, all received", float(len(problems)), 0.0)

    def _ids(self, feature: str, table: str, looks: list[Look]) -> list[str]:
        """Each id is looked up once for every set of columns that the table is cut into."""
        weight = self.run.tables[table].weight
        where = f"table {table}, feature {feature}"
        if weight.replicated:
            return [
                f"{where}: {look.sent[feature]:,} ids in the batches of rank {rank}, "
                f"{look.kept.get(feature, 0):,} looked up there"
                for rank, look in enumerate(looks)
                if look.kept.get(feature, 0) != look.sent[feature]
            ]
        cuts = len({shard.columns.start for shard in weight.shards if len(shard.rows)})
        sent = sum(look.sent[feature] for look in looks) * cuts
        received = sum(look.received.get(feature, 0) for look in looks)
        if sent == received:
            return []
        each = ", ".join(f"{look.received.get(feature, 0):,}" for look in looks[:8])
        return [f"{where}: {sent:,} ids sent, {received:,} received (ranks from 0: {each})"]


def _steps(looks: list[Look]) -> list[str]:
    """All ranks at one step, each with the batch of that step."""
    problems = []
    steps = [look.position.step for look in looks]
    if odd := odd_ones(steps):
        problems.append(f"{ranks(odd)} has trained {steps[odd[0]]} steps, the others another number")
    for rank, look in enumerate(looks):
        batch_step, step = look.position.batch_step, look.position.step
        if batch_step is not None and batch_step != step - 1:
            problems.append(f"rank {rank} trained the batch of step {batch_step} at step {step - 1}")
    return problems


def _rows(looks: list[Look]) -> list[str]:
    expected = looks[0].position.expected_rows
    rows = sum(look.rows for look in looks)
    if expected is None or rows == expected:
        return []
    each = ", ".join(f"{look.rows:,}" for look in looks[:8])
    return [f"the batches had {expected:,} rows, the ranks trained {rows:,} (from rank 0: {each})"]
