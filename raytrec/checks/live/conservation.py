"""conservation: no id and no row is lost on the way, and all ranks are at the same step."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from raytrec.checks.live.outcome import CHECKPOINT, STEP, Check, Outcome, Position, odd_ones, ranks
from raytrec.checks.live.registry import check

SHOWN = 8  # ranks whose counts are told


@dataclass(frozen=True)
class Look:
    """Counts of one rank since the start (embeddings.taps).

    Attributes:
        sent: ids in its part of the batches, of each feature.
        received: ids that its kernels looked up in sharded tables, of each feature.
        kept: the same, in data-parallel tables.
        rows: rows in its part of the batches.
        rank: whose it is.
    """

    position: Position
    sent: dict[str, int]
    received: dict[str, int]
    kept: dict[str, int]
    rows: int
    rank: int = 0


@dataclass(frozen=True)
class Folded:
    """Counts of several neighbouring ranks.

    Attributes:
        first: the rank that they begin with.
        positions: (step, step of the batch) of each. rows: of each.
        expected_rows: of the first.
        sent, received: feature → ids of all of them; first_received: of each of their first SHOWN.
        differing: feature → (rank, sent, kept) where it kept other ids than it sent.
    """

    first: int
    positions: list[tuple[int, int | None]]
    rows: list[int]
    expected_rows: int | None
    sent: dict[str, int]
    received: dict[str, int]
    first_received: dict[str, list[int]]
    differing: dict[str, list[tuple[int, int, int]]]


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
        return Look(position, sent, received, kept, int(taps.rows), dist.get_rank())

    def fold(self, looks: list[Look | Folded]) -> list[Folded]:
        parts = [look if isinstance(look, Folded) else self._as_folded(look) for look in looks]
        if len(parts) == 1:
            return parts
        first = parts[0]
        folded = Folded(first.first, [], [], first.expected_rows, {}, {}, {}, {})
        for part in parts:
            folded.positions.extend(part.positions)
            folded.rows.extend(part.rows)
            for feature in part.sent:
                folded.sent[feature] = folded.sent.get(feature, 0) + part.sent[feature]
                folded.received[feature] = folded.received.get(feature, 0) + part.received[feature]
                each = folded.first_received.setdefault(feature, [])
                each += part.first_received[feature][: SHOWN - len(each)]
            for feature, found in part.differing.items():
                folded.differing.setdefault(feature, []).extend(found)
        return [folded]

    def _as_folded(self, look: Look) -> Folded:
        tables, kept = self.run.tables, look.kept
        whole = {f for f, spec in self.run.schema.sparse.items() if tables[spec.table].weight.replicated}
        received = {feature: look.received.get(feature, 0) for feature in look.sent}
        return Folded(
            look.rank,
            [(look.position.step, look.position.batch_step)],
            [look.rows],
            look.position.expected_rows,
            look.sent,
            received,
            {feature: [ids] for feature, ids in received.items()},
            {
                feature: [(look.rank, look.sent[feature], kept.get(feature, 0))]
                for feature in sorted(whole)
                if kept.get(feature, 0) != look.sent[feature]
            },
        )

    def judge(self, looks: list[Look | Folded], step: int) -> Outcome:
        (seen,) = self.fold(looks)
        problems = [*_steps(seen), *_rows(seen)]
        for feature, spec in self.run.schema.sparse.items():
            problems += self._ids(feature, spec.table, seen)
        total = sum(seen.sent.values())
        return self.outcome(step, problems, f"{total:,} ids sent, all received", float(len(problems)), 0.0)

    def _ids(self, feature: str, table: str, seen: Folded) -> list[str]:
        """Each id is looked up once for every set of columns that the table is cut into."""
        weight = self.run.tables[table].weight
        where = f"table {table}, feature {feature}"
        if weight.replicated:
            return [
                f"{where}: {sent:,} ids in the batches of rank {rank}, {kept:,} looked up there"
                for rank, sent, kept in seen.differing.get(feature, ())
            ]
        cuts = len({shard.columns.start for shard in weight.shards if len(shard.rows)})
        sent, received = seen.sent[feature] * cuts, seen.received[feature]
        if sent == received:
            return []
        each = ", ".join(f"{ids:,}" for ids in seen.first_received[feature])
        return [f"{where}: {sent:,} ids sent, {received:,} received (ranks from 0: {each})"]


def _steps(seen: Folded) -> list[str]:
    """All ranks at one step, each with the batch of that step."""
    problems = []
    steps = [step for step, _ in seen.positions]
    if odd := odd_ones(steps):
        problems.append(f"{ranks(odd)} has trained {steps[odd[0]]} steps, the others another number")
    for rank, (step, batch_step) in enumerate(seen.positions):
        if batch_step is not None and batch_step != step - 1:
            problems.append(f"rank {rank} trained the batch of step {batch_step} at step {step - 1}")
    return problems


def _rows(seen: Folded) -> list[str]:
    expected, rows = seen.expected_rows, sum(seen.rows)
    if expected is None or rows == expected:
        return []
    each = ", ".join(f"{part:,}" for part in seen.rows[:SHOWN])
    return [f"the batches had {expected:,} rows, the ranks trained {rows:,} (from rank 0: {each})"]
