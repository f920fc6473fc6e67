"""same_environment: configuration, code and libraries are the same on all ranks."""

from __future__ import annotations

from raytrec.checks.live.outcome import START, Check, Outcome, Position, differing, ranks
from raytrec.checks.live.registry import check

VALUE_WIDTH = 60  # characters of a value
NETWORK = "NCCL's network"


@check("same_environment")
class SameEnvironment(Check):
    """Compares the facts that ranks have of themselves, key by key."""

    moments = frozenset({START})
    do = "give every node the same raytrec, the same packages and the same files, and start the run again"

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        problems = []
        for key, values, odd in differing(position.about, self.run.peers):
            usual = next(value for rank, value in enumerate(values) if rank not in odd)
            one, other = _apart(str(values[odd[0]]), str(usual))
            problems.append(f"{key} is {one!r} on {ranks(odd)} and {other!r} on the others")
        good = f"{len(position.about)} facts are the same on all ranks"
        if network := position.about.get(NETWORK):
            good += f"; NCCL's network is {network}"
        return self.outcome(position.step, problems, good, float(len(problems)), 0.0)


def _apart(one: str, other: str) -> tuple[str, str]:
    """The parts of two texts from a little before where they part."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    start = max(0, (min(len(one), len(other)) if same is None else same) - VALUE_WIDTH // 3)
    cut = [
        ("…" if start else "")
        + text[start : start + VALUE_WIDTH]
        + ("…" if len(text) > start + VALUE_WIDTH else "")
        for text in (one, other)
    ]
    return cut[0], cut[1]
