"""shards and managed_ids: every value of a table is on exactly one rank, or on all, and every id has its own row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist

from raytrec.checks.live.outcome import CHECKPOINT, STEP, Check, Outcome, Position, find_deviating_ranks, format_ranks
from raytrec.checks.live.registry import check
from raytrec.common.formatting import format_count
from raytrec.embeddings.managed.row_map import describe_audit_errors, is_one_to_one
from raytrec.embeddings.tables import Shard, ShardedValues


@check("shards")
class Shards(Check):
    """Check that compares shard maps between ranks, and each shard in the map with the tensor on its rank.

    The parity check verifies that ids also reach the ranks that hold their rows.
    """

    do = (
        "resume the run (raytrec train --resume RUN, or submit its job again); if the check fails again, inspect "
        "plan.tables and the version of torchrec"
    )

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names gaps, overlaps and mismatched shards. Every rank must call this method."""
        # Name of weights or state → (hash of this rank's map of all shards, problems found by this rank).
        local_maps, peers = {}, self.run.peers
        for table in self.run.tables.values():
            for kind, parts in {"weight": table.weight, **table.state}.items():
                local_maps[f"{table.name}'s {kind}"] = (
                    _hash_shard_map(parts),
                    [*_find_gaps(parts), *_find_misfits(parts)],
                )
        is_consistent = peers.is_same_on_all(local_maps) and not any(texts for _, texts in local_maps.values())
        problems = [] if is_consistent else _find_problems(peers.objects(local_maps))
        summary = f"the shards of {format_count(len(self.run.tables), 'table')} and their state contain each row once"
        return self.outcome(position.step, problems, summary, float(len(problems)), 0.0)


@check("managed_ids")
class ManagedIdsCheck(Check):
    """Check that managed ids and rows of their tables are mapped one to one.

    The number of ids over all ranks, and the sum of their rows' hashes, are compared with the expected values
    (embeddings.managed.row_map.is_one_to_one). The free rows are compared between ranks.
    """

    moments = frozenset({STEP, CHECKPOINT})
    do = (
        "resume the run (raytrec train --resume RUN, or submit its job again); if the check fails again, report it "
        "with checks.jsonl of the run folder"
    )

    @classmethod
    def applies(cls, run) -> bool:
        """Return True if the run has tables with managed ids."""
        return bool(run.maps)

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names the problems of each table's map. Every rank must call this method."""
        peers, maps = self.run.peers, self.run.maps
        local_audits = {table: part.audit() for table, part in maps.items()}
        totals = peers.sum(torch.tensor([audit.numbers for audit in local_audits.values()])).tolist()
        parts = zip(local_audits.values(), totals, maps.values(), strict=True)
        is_consistent = all(is_one_to_one(audit, total, part.capacity) for audit, total, part in parts)
        violations: list[str] = []
        if not (peers.is_same_on_all([audit.free for audit in local_audits.values()]) and is_consistent):
            audits = peers.objects(local_audits)
            violations = [
                f"table {table}: {problem}"
                for table, part in maps.items()
                for problem in describe_audit_errors([rank_audits[table] for rank_audits in audits], part.capacity)
            ]
        ids = sum(ids for _, ids, _ in totals)
        summary = f"every managed id has its own row ({format_count(ids, 'id')})"
        return self.outcome(position.step, violations, summary, float(len(violations)), 0.0)


def _find_problems(maps_by_rank: list[dict[str, tuple[str, list[str]]]]) -> list[str]:
    problems = []
    for name in dict.fromkeys(name for maps in maps_by_rank for name in maps):
        reports = [maps.get(name, ("", ["the rank has no such tensor"])) for maps in maps_by_rank]
        if odd := find_deviating_ranks([digest for digest, _ in reports]):
            others = "the other ranks" if len(reports) > 2 else f"rank {1 - odd[0]}"
            problems.append(f"table {name}: the map of shards on {format_ranks(odd)} differs from that on {others}")
        for text in dict.fromkeys(text for _, texts in reports for text in texts):
            where = [rank for rank, (_, texts) in enumerate(reports) if text in texts]
            problems.append(f"table {name}: {text} (found on {format_ranks(where)})")
    return problems


def _hash_shard_map(parts: ShardedValues) -> str:
    where = [
        (-1 if parts.replicated else s.rank, s.rows.start, s.rows.stop, s.columns.start, s.columns.stop)
        for s in parts.shards
    ]
    text = f"{parts.shape} {parts.dtype} {parts.replicated} {sorted(where)}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _find_gaps(parts: ShardedValues) -> Iterator[str]:
    """Yield descriptions of at most two regions that are in no shard or in several shards, or outside the table.

    The boundaries of all shards divide the table into a grid, whose cells are tested.
    """
    width = parts.shape[1] if len(parts.shape) == 2 else 1
    boxes = [(s.rows, s.columns if len(parts.shape) == 2 else range(1)) for s in parts.shards]
    rows = sorted({0, parts.shape[0], *(e for r, _ in boxes for e in (r.start, r.stop))})
    columns = sorted({0, width, *(e for _, c in boxes for e in (c.start, c.stop))})
    at_row, at_column = ({edge: i for i, edge in enumerate(edges)} for edges in (rows, columns))
    count = np.zeros((len(rows) - 1, len(columns) - 1), dtype=np.int64)
    for r, c in boxes:
        count[at_row[r.start] : at_row[r.stop], at_column[c.start] : at_column[c.stop]] += 1
    inside = np.zeros_like(count)
    inside[at_row[0] : at_row[parts.shape[0]], at_column[0] : at_column[width]] = 1
    for row, column in np.argwhere(count != inside)[:2]:
        shards = f"in {count[row, column]} shards" if count[row, column] else "in no shard"
        box = f"rows {rows[row]:,} to {rows[row + 1] - 1:,}"
        if len(columns) > 2:
            box += f", columns {columns[column]} to {columns[column + 1] - 1},"
        yield f"{box} are {shards if inside[row, column] else 'outside the table'}"


def _find_misfits(parts: ShardedValues) -> Iterator[str]:
    """Yield descriptions of this rank's shards whose tensor is missing, or has a different shape or dtype."""
    own_rank = dist.get_rank()
    for shard in parts.shards:
        if shard.rank != own_rank or not len(shard.rows):
            continue
        expected = (len(shard.rows), len(shard.columns))[: len(parts.shape)]
        if shard.values is None:
            yield f"{_format_shard(shard)} is missing on its rank"
        elif tuple(shard.values.shape) != expected or shard.values.dtype != parts.dtype:
            yield (
                f"{_format_shard(shard)} has shape {tuple(shard.values.shape)} and dtype "
                f"{shard.values.dtype} instead of {expected} and {parts.dtype}"
            )


def _format_shard(shard: Shard) -> str:
    return f"the shard at row {shard.rows.start:,} and column {shard.columns.start}"
