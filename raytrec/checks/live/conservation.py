"""conservation: no id or row is lost, and all ranks are at the same step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from raytrec.checks.live.outcome import CHECKPOINT, STEP, Check, Outcome, Position, find_deviating_ranks, format_ranks
from raytrec.checks.live.registry import check
from raytrec.common.formatting import format_count

MAX_SHOWN_RANKS = 8  # maximum number of ranks whose counts are listed in a problem


@dataclass(frozen=True)
class IdCounts:
    """Steps, ids and rows according to one rank; ids and rows are counted since the taps were created.

    Attributes:
        step: Number of training steps completed.
        batch_step: Step of the last batch, counted from 0; None if unknown.
        sent: Feature → number of ids in the rank's part of the batches, as counted by embeddings.taps.Taps.sent.
        looked_up: Feature → number of ids that the rank's kernels looked up, once per column shard.
        rows: Number of rows in the rank's part of the batches.
        expected_rows: Number of rows over all ranks in the batches; None if rows may be skipped.
    """

    step: int
    batch_step: int | None
    sent: dict[str, int]
    looked_up: dict[str, int]
    rows: int
    expected_rows: int | None = None

    @property
    def is_behind(self) -> bool:
        """Return True if the last batch is not that of the last completed step; False if `batch_step` is unknown."""
        return self.batch_step is not None and self.batch_step != self.step - 1


@check("conservation")
class Conservation(Check):
    """Check that no id or row of the batches is lost or duplicated, and that ranks are at the same step."""

    moments = frozenset({STEP, CHECKPOINT})
    do = (
        "resume the run (raytrec train --resume RUN, or submit its job again); if the check fails again, inspect the "
        "network and the versions of torchrec and fbgemm"
    )

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, whose text describes losses and deviating ranks. Every rank must call this method."""
        counts, peers = self._counts(position), self.run.peers
        features = list(self.run.schema.sparse)
        received = [counts.looked_up[feature] for feature in features]
        mismatches = counts.is_behind + sum(self._has_copy_mismatch(feature, counts) for feature in features)
        numbers = [*(counts.sent[feature] for feature in features), *received, counts.rows, mismatches]
        totals = peers.sum(torch.tensor(numbers)).tolist()
        sent, received, (rows, mismatches) = totals[: len(features)], totals[len(features) : -2], totals[-2:]
        lost = [
            feature
            for feature, ids_sent, ids_received in zip(features, sent, received, strict=True)
            if (parts := self._count_lookups(feature)) and ids_received != ids_sent * parts
        ]
        is_consistent = not mismatches and not lost and position.expected_rows in (None, rows)
        problems: list[str] = []
        if not (peers.is_same_on_all((position.step, position.expected_rows)) and is_consistent):
            problems = self._problems(peers.objects(counts), lost)
        summary = f"all ids were received ({format_count(sum(sent), 'id')})"
        return self.outcome(position.step, problems, summary, float(len(problems)), 0.0)

    def _counts(self, position: Position) -> IdCounts:
        taps = self.run.taps
        looked_up = Counter()
        for lookup in taps.lookups:
            for feature, count in zip(lookup.features, lookup.received.tolist(), strict=True):
                looked_up[feature] += count
        sent = dict(zip(taps.features, taps.sent.tolist(), strict=True))
        return IdCounts(position.step, position.batch_step, sent, looked_up, int(taps.rows), position.expected_rows)

    def _has_copy_mismatch(self, feature: str, counts: IdCounts) -> bool:
        """Return True if a rank looked up too many or too few ids in its copy of a replicated table."""
        return not self._count_lookups(feature) and counts.looked_up[feature] != counts.sent[feature]

    def _count_lookups(self, feature: str) -> int:
        """Return the number of column shards of a feature's table, each of which looks up every id; 0 if replicated."""
        weight = self.run.tables[self.run.schema.sparse[feature].table].weight
        return 0 if weight.replicated else len({shard.columns.start for shard in weight.shards if len(shard.rows)})

    def _problems(self, of_ranks: list[IdCounts], lost: list[str]) -> list[str]:
        """Describe lost ids and rows, and deviating steps; ranks that expect different rows are all described."""
        problems, rows = _describe_step_mismatches(of_ranks), [counts.rows for counts in of_ranks]
        for expected in dict.fromkeys(counts.expected_rows for counts in of_ranks):
            if expected not in (None, sum(rows)):
                trained = f"{sum(rows):,} were trained (by rank: {_list_counts(rows)})"
                problems.append(f"the batches have {expected:,} rows, but {trained}")
        for feature, spec in self.run.schema.sparse.items():
            where = f"table {spec.table}, feature {feature}"
            problems += [
                f"{where}: rank {rank} looked up {counts.looked_up[feature]:,} ids, but its batches "
                f"contain {counts.sent[feature]:,}"
                for rank, counts in enumerate(of_ranks)
                if self._has_copy_mismatch(feature, counts)
            ]
            if feature in lost:
                received = [counts.looked_up[feature] for counts in of_ranks]
                sent = sum(counts.sent[feature] for counts in of_ranks) * self._count_lookups(feature)
                by_rank = f"by rank: {_list_counts(received)}"
                problems.append(f"{where}: {sent:,} ids were sent, but {sum(received):,} were received ({by_rank})")
        return problems


def _list_counts(of_ranks: list[int]) -> str:
    return ", ".join(f"{count:,}" for count in of_ranks[:MAX_SHOWN_RANKS]) + ", …" * (len(of_ranks) > MAX_SHOWN_RANKS)


def _describe_step_mismatches(of_ranks: list[IdCounts]) -> list[str]:
    """Describe the ranks that are at a different step, or whose last batch belongs to a different step."""
    problems = []
    steps = [counts.step for counts in of_ranks]
    if odd := find_deviating_ranks(steps):
        usual = next(step for rank, step in enumerate(steps) if rank not in odd)
        different = " or ".join(f"{step:,}" for step in dict.fromkeys(steps[rank] for rank in odd))
        noun = "step" if different == "1" else "steps"
        problems.append(f"{format_ranks(odd)} completed {different} {noun} instead of {usual:,}")
    for rank, counts in enumerate(of_ranks):
        if counts.is_behind:  # in messages, steps are counted from 1
            problems.append(f"rank {rank} trained the batch of step {counts.batch_step + 1} at step {counts.step}")
    return problems
