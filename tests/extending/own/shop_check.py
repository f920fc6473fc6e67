"""A live check that fails once, at step 20."""

from raytrec.checks.live.outcome import STEP, Check
from raytrec.checks.live.registry import check


@check("patience")
class Patience(Check):
    moments = frozenset({STEP})
    do = "raytrec train --resume RUN"

    def evaluate(self, position, probed):
        problems = ["twenty steps are enough"] if position.step == 20 else []
        return self.outcome(position.step, problems, "not there yet", float(position.step), 20.0)
