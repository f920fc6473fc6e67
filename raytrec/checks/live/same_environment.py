"""same_environment: all ranks have the same configuration, code and libraries."""

from __future__ import annotations

from itertools import takewhile

from raytrec.checks.live.outcome import START, Check, Outcome, Position, find_differing, format_ranks
from raytrec.checks.live.registry import check

MAX_VALUE_CHARS = 60  # maximum number of characters of a value that are shown
NETWORK = "NCCL's network"


@check("same_environment")
class SameEnvironment(Check):
    """Check that compares the ranks' facts, such as the configuration and package versions, key by key."""

    moments = frozenset({START})
    do = "install the same version of raytrec, packages and files on every node, and restart the run"

    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome, which names the facts that differ between ranks.

        This is a collective operation: every rank must call it.
        """
        problems = []
        for key, values, odd in find_differing(position.about, self.run.peers):
            usual = next(value for rank, value in enumerate(values) if rank not in odd)
            odd_text, usual_text = _split_at_difference(str(values[odd[0]]), str(usual))
            problems.append(f"{key} is {odd_text!r} on {format_ranks(odd)} and {usual_text!r} on the other ranks")
        summary = f"{len(position.about)} facts are the same on all ranks"
        if network := position.about.get(NETWORK):
            summary += f"; NCCL's network is {network}"
        return self.outcome(position.step, problems, summary, float(len(problems)), 0.0)


def _split_at_difference(one: str, other: str) -> list[str]:
    """Return the part of each text around the first character at which the texts differ."""
    same = [*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]
    start = max(0, len(same) - MAX_VALUE_CHARS // 3)
    end = start + MAX_VALUE_CHARS
    return ["…" * (start > 0) + text[start:end] + "…" * (len(text) > end) for text in (one, other)]
