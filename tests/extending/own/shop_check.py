"""A live check: here one that fails once, at step 20."""

from raytrec.checks.live.outcome import STEP, Check
from raytrec.checks.live.registry import check


@check("patience")
class Patience(Check):
    moments = frozenset({STEP})
    do = "raytrec train --resume RUN"

    def look(self, position, probed):
        return position.step

    def judge(self, looks, step):
        problems = ["twenty steps are enough"] if looks[0] == 20 else []
        return self.outcome(step, problems, "not there yet", float(looks[0]), 20.0)
