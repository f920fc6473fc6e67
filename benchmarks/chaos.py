"""A run under random faults, compared with an undisturbed run: both must have the same rows and AUC.

    python benchmarks/chaos.py [--faults 28] [--seed 0]

The benchmark starts a Ray cluster of a head and two nodes on this machine. `raytrec train` runs on the cluster
with one or two workers, depending on the number of nodes. faults.py defines faults of processes, nodes, disks
and files; each occurs at a random time after the run has recovered from the previous fault. recorder.py records
the rows of every step. A run that ends by design (process group ended, GCS killed) is resumed by the command
that its message names.

Mounting a tmpfs must be permitted. Writes benchmarks/results/chaos.json; if the benchmark ends early, with --only, or
if few faults were chosen, writes chaos.json in its temporary folder, which is kept after a failure. The exit code is 1
if a row is lost or trained twice, if the AUC differs, if the run does not finish, or if there were too few faults.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from traceback import format_exception
from typing import Annotated

import harness
import typer
from faults import FAULTS, GOES_ON
from nodes import Nodes, small_disk
from outcome import Fault, measure, medians, recovery, show
from planted import EPOCHS, configure, prepare
from recorder import RECORDS, compare
from watched import MOST, Problem, Run

STEPS_EACH = 120  # steps of the run per fault
SECONDS_EACH = 6.0  # intended duration of these steps without restarts, in seconds
LEAST_FAULTS, LARGEST_AUC_DELTA = 20, 1e-3
# Limit for the difference in a step's mean loss until the number of workers first changes: restored state is
# bitwise equal.
LARGEST_LOSS_DELTA = 1e-9
CHANGE_WORKERS = ("node killed", "node added", "node drained", "raylet killed")
OFTEN = "worker killed"  # occurs at least three times, for medians of the durations of recovery


def plan(number: int, rng: random.Random, only: list[str]) -> list[str]:
    """Return `number` kinds of faults: first each kind in random order, and then random kinds.

    In the first part, kinds that keep the number of workers come first. If all kinds are used and `number` is
    at least LEAST_FAULTS, the first part contains OFTEN three times.
    """
    kinds = only or list(FAULTS)
    first = [*kinds, *[OFTEN] * 2] if number >= LEAST_FAULTS and not only else kinds
    first = sorted(rng.sample(first, len(first)), key=lambda kind: kind in CHANGE_WORKERS)
    return (first + rng.choices(kinds, k=max(0, number - len(first))))[:number]


def choose(kinds: list[str], nodes: int) -> str:
    """Remove and return the next kind of fault, or a kind that this number of nodes requires first."""
    if kinds[0] == "node added" and nodes >= MOST:
        return "node killed"
    if kinds[0] == "node drained" and nodes < MOST:
        return "node added"
    return kinds.pop(0)


def undisturbed(run: Run) -> None:
    """Run to the end without faults."""
    run.say("starting the undisturbed run")
    with run.begun():
        run.finish()


def disturbed(run: Run, kinds: list[str], total: int, rng: random.Random, faults: list[Fault]) -> None:
    """Run to the end with faults, and append each fault to `faults`."""
    run.say("starting the run with faults")
    with run.begun():
        run.wait("training", run.settled)
        while kinds:
            left, steps = len(kinds), total - run.attempt().last
            run.pace(min(0.5, max(0.01, SECONDS_EACH * left / max(steps, 1))))
            until = time.time() + rng.uniform(0, 2)
            run.wait("training", lambda until=until: time.time() > until)
            kind = choose(kinds, len(run.nodes.all))
            try:
                faults.append(inject(run, kind, rng))
            except Exception as error:
                error.add_note(f"at fault {len(faults) + 1} ({kind}); {len(kinds)} faults remained")
                raise
        run.pace(0)
        run.finish()


def inject(run: Run, kind: str, rng: random.Random) -> Fault:
    """Cause a fault, wait until the run has recovered, and return the record of the fault."""
    run.say(f"[{kind}]")
    act, event_names = FAULTS[kind]
    step = run.attempt().last
    fault = Fault(kind, act(run, rng), step)
    if kind not in GOES_ON:
        run.wait("training again", lambda: run.since(fault.unix_s))
    run.wait("the maximum number of workers", run.settled)
    measure(run, fault, event_names)
    notice = "–" if fault.notice_s is None else f"{fault.notice_s:.1f} s"
    run.say(f"noticed after {notice}, training after {fault.again_s:.1f} s, {fault.steps_lost} steps lost")
    return fault


def loss_delta(run: Run, calm: Run) -> float:
    """Return the largest difference in a step's loss between the runs until the number of workers changes."""
    changed = min((a.first for a in run.record.look() if a.world != MOST), default=math.inf)
    expected = calm.record.losses()
    return max(abs(loss - expected[s]) for s, loss in run.record.losses().items() if s < changed)


def main(
    faults: Annotated[int, typer.Option(help="Minimum number of faults.")] = 28,
    seed: Annotated[int, typer.Option(help="Seed for the kinds and times of faults.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Use only these kinds (repeatable).")] = None,
    minutes: Annotated[float, typer.Option(help="Time limit of the benchmark in minutes.")] = 40,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the folders of the runs.")] = False,
) -> None:
    """Print the tables; with enough faults and without --only, write benchmarks/results/chaos.json."""
    if unknown := set(only or []) - set(FAULTS):
        raise typer.BadParameter(f"--only {min(unknown)}: choose from {', '.join(FAULTS)}")
    began, rng = time.monotonic(), random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    until, data = began + 60 * minutes, folder / "data"
    os.environ[RECORDS] = str(folder / "records")
    kinds, done = plan(faults, rng, only or []), []
    total = max(len(kinds), 4) * STEPS_EACH // EPOCHS * EPOCHS
    rows = prepare(data, total)
    print(f"{total} steps, {rows:,} rows, {EPOCHS} epochs; all files are in {folder}", flush=True)
    nodes, problem, outcome = Nodes(folder / "ray"), None, {}
    try:
        for _ in range(MOST):
            nodes.add()
        with small_disk(folder / "small", mib=160), small_disk(folder / "disk", mib=64):
            saves = folder / "small" / "checkpoints"
            places = [(folder / "disk" / "run", saves, configure(folder, data, {"min": 1, "max": MOST}))]
            places.append((folder / "calm", folder / "calm-checkpoints", configure(folder, data, MOST)))
            run, calm = (Run(*place, nodes, until) for place in places)
            undisturbed(calm)
            disturbed(run, kinds, total, rng, done)
            auc, expected = (r.result()["eval.auc"] for r in (run, calm))
        outcome = compare(run.record.trained(), calm.record.trained(), rows, EPOCHS)
        outcome["loss_delta_same_workers"] = loss_delta(run, calm)
        outcome |= {"auc": auc, "auc_undisturbed": expected, "auc_delta": abs(auc - expected)}
    except Exception as error:  # store the faults so far after any error
        is_problem = isinstance(error, Problem)
        story = [str(error), *getattr(error, "__notes__", [])] if is_problem else format_exception(error)
        problem = "\n".join(story)
    finally:
        nodes.close()
    seconds = round(time.monotonic() - began)
    show(done, outcome, seconds)
    values = {"faults": len(done), **outcome, "steps": total, "rows": rows, "epochs": EPOCHS, "seed": seed}
    values |= {"cpus": os.cpu_count(), "seconds": seconds, "after_a_killed_worker": recovery(done)}
    values |= {"kinds": medians(done), "list": [asdict(fault) for fault in done]}
    whole = not problem and not only and len(done) >= LEAST_FAULTS
    harness.keep(harness.results_file("chaos") if whole else folder / "chaos.json", values)
    wrong = [k for k in ("rows_lost", "rows_doubled", "steps_with_other_rows") if outcome.get(k)]
    largest = {"auc_delta": LARGEST_AUC_DELTA, "loss_delta_same_workers": LARGEST_LOSS_DELTA}
    wrong += [k for k, limit in largest.items() if outcome.get(k, 0) > limit]
    if problem or wrong:
        print(f"FAILED: {problem or ', '.join(wrong)}\nthe files are in {folder}")
    elif not keep:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(int(bool(problem or wrong or len(done) < min(faults, LEAST_FAULTS))))


if __name__ == "__main__":
    typer.run(main)
