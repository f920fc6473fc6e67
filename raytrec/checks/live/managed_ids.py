"""managed_ids: ids and rows are mapped one to one."""

from __future__ import annotations

import torch

from raytrec.checks.live.outcome import CHECKPOINT, STEP, Check, CheckedRun, Outcome, Position
from raytrec.checks.live.registry import check
from raytrec.embeddings.managed.row_map import describe_audit_errors, is_one_to_one


@check("managed_ids")
class ManagedIdsCheck(Check):
    """Check that ids and rows are mapped one to one.

    The number of ids over all ranks, and the sum of their rows' hashes, are compared with the expected values.
    """

    moments = frozenset({STEP, CHECKPOINT})
    do = (
        "resume from the last checkpoint: raytrec train --resume RUN; if the check fails again, report it "
        "with checks.jsonl of the run folder"
    )

    @classmethod
    def applies(cls, run: CheckedRun) -> bool:
        """Return True if the run has tables with managed ids."""
        return bool(run.maps)

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names the problems of each table's map.

        This is a collective operation: every rank must call it.
        """
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
        summary = f"each of {ids:,} managed ids has its own row"
        return self.outcome(position.step, violations, summary, float(len(violations)), 0.0)
