"""managed_ids: managed ids and the rows that they have are one to one, over all ranks."""

from __future__ import annotations

from raytrec.checks.live.outcome import CHECKPOINT, STEP, Check, Outcome, Position, Watched
from raytrec.checks.live.registry import check
from raytrec.embeddings.managed.audit import Audit, problems


@check("managed_ids")
class OneToOne(Check):
    """Each rank says how many ids it has, and the sum of the hashes of their rows."""

    moments = frozenset({STEP, CHECKPOINT})
    do = (
        "resume from the last checkpoint: raytrec train --resume RUN; if it fails again, report it with "
        "checks.jsonl of the run folder"
    )

    @classmethod
    def applies(cls, run: Watched) -> bool:
        return bool(run.maps)

    def look(self, position: Position, probed: bool) -> dict[str, Audit]:
        """Table → what this rank knows of its map."""
        return {table: part.audit() for table, part in self.run.maps.items()}

    def fold(self, looks: list[dict[str, Audit]]) -> list[dict[str, Audit]]:
        folded = looks[:1]
        for look in looks[1:]:
            both = {table: audit.joined(look[table]) for table, audit in folded[-1].items()}
            if None in both.values():
                folded.append(look)
            else:
                folded[-1] = both
        return folded

    def judge(self, looks: list[dict[str, Audit]], step: int) -> Outcome:
        wrong = [
            f"table {table}: {problem}"
            for table, part in self.run.maps.items()
            for problem in problems([look[table] for look in looks], part.capacity)
        ]
        ids = sum(audit.ids for look in looks for audit in look.values())
        return self.outcome(step, wrong, f"{ids:,} managed ids have a row each", float(len(wrong)), 0.0)
