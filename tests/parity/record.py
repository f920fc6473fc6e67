"""Run cases on real ranks, and record the results for benchmarks/results/parity.json."""

import json
from pathlib import Path

from ranks import run_on_ranks

STEPS, FEW_STEPS = 20, 8  # for `make parity`, and for `make test`
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "parity.json"
_outcomes, steps = [], FEW_STEPS


def run_cases(rank, world, cases, steps):
    """Compare all cases on this rank and return the findings of each case as records (on rank 0)."""
    import logging
    import warnings

    import torch

    from raytrec.checks.parity.compare import compare
    from raytrec.worker.build import build_step

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    out = []
    for seed, case in enumerate(cases):
        found = compare(
            build_step, case.config(), case.schema(), torch.device("cpu"), steps=steps, balance=case.balance, seed=seed
        )
        out.append([finding.record() for finding in found])
    return out


def assert_parity(cases, place):
    """Assert that every comparison of every case is within its limit."""
    ranks, hosts = place
    wrong = []
    for case, found in zip(cases, run_on_ranks(ranks, run_cases, cases, steps, hosts=hosts)[0], strict=True):
        assert {f["check"] for f in found} >= {"forward", "gradient", "weights"}
        _outcomes.append((case, found))
        wrong += [f"{case}: {f}" for f in found if not f["passed"]]
    assert not wrong, "\n".join(wrong)


def write():
    """Write the number of cases and failures, and the worst error of each check per group of cases."""
    groups = {}
    for case, found in _outcomes:
        for group in ["all", *(f"{name}: {getattr(case, name)}" for name in case.groups)]:
            entry = groups.setdefault(group, {"cases": 0, "failed": 0})
            entry["cases"] += 1
            entry["failed"] += not all(f["passed"] for f in found)
            for f in found:
                worst, error = entry.get(f["check"], 0.0), f["error"]
                entry[f["check"]] = None if worst is None or error is None else max(worst, error)
    out = {"cases": groups["all"]["cases"], "failed": groups["all"]["failed"], "groups": dict(sorted(groups.items()))}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(out, indent=1) + "\n")
