"""A run under random faults, against the same run undisturbed: the same rows, the same AUC.

    python benchmarks/chaos.py [--faults 24] [--seed 0]

A Ray cluster of a head and two nodes is started on this machine, and `raytrec train` on it, with one or two
workers, as many as there is room for. faults.py has what then happens to processes, nodes, disk and files, each
at a random moment after the run has got over the last one. recorder.py writes down the rows of every step.

Needs the right to mount a tmpfs. Writes benchmarks/results/chaos.json; exit code 1 if a row is lost or doubled,
the AUC is another one, or the run does not finish.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
import yaml
from faults import FAULTS, GOES_ON, MOST, Nodes, Problem, Run, small_disk
from recorder import compare
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results" / "chaos.json"
BATCH, EPOCHS, TEST_ROWS = 512, 8, 20_000
STEPS_EACH = 250  # of the run, for each fault
SECONDS_EACH = 12.0  # that they should take, so that there is time to grow again
USERS, TAGS = 1000, 50
LARGEST_AUC_DELTA = 1e-3
PARTS = ("notice", "restart", "build and restore", "first step")


@dataclass
class Fault:
    """What happened, and what the run made of it.

    Attributes:
        kind: a key of FAULTS.
        unix_s: when.
        step: the last that had been trained then.
        notice_s: until the run said so in events.jsonl.
        again_s: until the first step of the next worker group (or the next step, where it goes on).
        pause_s: between two steps, around the restart.
        steps_lost: steps that were trained again.
        parts: again_s in pieces, PARTS.
    """

    kind: str
    unix_s: float
    step: int
    notice_s: float | None = None
    again_s: float | None = None
    pause_s: float | None = None
    steps_lost: int = 0
    parts: dict[str, float] = field(default_factory=dict)


def table(rows: int, seed: int, ids: np.ndarray) -> pa.Table:
    """Rows whose label follows from user, tags and price, with some noise."""
    rng = np.random.default_rng(seed)
    user, price = rng.integers(0, USERS, rows), rng.normal(size=rows).astype(np.float32)
    lengths = rng.integers(1, 4, rows)
    ends = np.cumsum(lengths)
    tags = rng.integers(0, TAGS, ends[-1])
    liked = np.add.reduceat(tags % 5 - 2, ends - lengths)
    logit = 0.7 * (user % 5 - 2) + price + 0.3 * liked
    return pa.table(
        {
            "label": (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8),
            "price": price,
            "user": user,
            "tags": pa.ListArray.from_arrays(np.append(0, ends).astype(np.int32), tags),
            "row": ids,
        }
    )


def prepare(folder: Path, steps: int) -> int:
    """Data for so many steps in EPOCHS epochs; how many rows. The last batch of an epoch is a small one."""
    rows = steps // EPOCHS * BATCH - BATCH // 3
    for name, count, ids in (
        ("train", rows, np.arange(rows)),
        ("test", TEST_ROWS, np.full(TEST_ROWS, rows)),  # a row of the table that is never trained
    ):
        (folder / name).mkdir(parents=True)
        whole, part = table(count, len(name), ids), -(-count // 4)
        for i in range(4):
            piece = whole.slice(i * part, part)
            pq.write_table(piece, folder / name / f"part-{i}.parquet", row_group_size=3000)
    schema = {
        "labels": ["label"],
        "dense": ["price"],
        "sparse": {
            "user": {"table": "user"},
            "tags": {"table": "tag", "pooling": "mean"},
            "row": {"table": "row"},
        },
        "tables": {
            "user": {"rows": USERS, "dim": 8},
            "tag": {"rows": TAGS, "dim": 8},
            "row": {"rows": rows + 1, "dim": 8},
        },
    }
    (folder / "schema.yaml").write_text(yaml.safe_dump(schema))
    return rows


def configure(folder: Path, data: Path, workers: int | list[int]) -> Path:
    """The configuration, as a file."""
    values = {
        "data": {
            "train": str(data / "train"),
            "test": str(data / "test"),
            "global_batch_size": BATCH,
            "lanes": 6,
            "buffer_gib": 0.06,
        },
        "model": {"bottom_mlp": [64], "top_mlp": [128, 64]},
        "train": {"epochs": EPOCHS, "log_every_steps": 50},
        "checkpoint": {"every_steps": 25, "keep_last": 2},
        "scaling": {
            "workers": workers,
            "device": "cpu",
            "grow_every_s": 5,
            "hang_s": 20,
            "max_failures": 1000,
        },
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db"},
    }
    path = folder / f"{'fixed' if workers == MOST else 'elastic'}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def plan(number: int, rng: random.Random, only: list[str]) -> list[str]:
    """Kinds in random order: each once, then any; a node comes for each that has gone."""
    kinds = only or list(FAULTS)
    wanted = rng.sample(kinds, len(kinds))
    while len(wanted) < number:
        wanted.append(rng.choice(kinds))
    return wanted[: max(number, len(only))]


def choose(wanted: list[str], nodes: int) -> str:
    """The next kind that can happen with so many nodes; else, the one that makes up for it."""
    impossible = {"node added"} if nodes >= MOST else {"node drained"}
    for i, kind in enumerate(wanted):
        if kind not in impossible:
            return wanted.pop(i)
    wanted.pop()
    return "node killed" if nodes >= MOST else "node added"


def undisturbed(folder: Path, config: Path, nodes: Nodes, until: float) -> Run:
    """The run without faults, to its end."""
    run = Run(folder / "undisturbed", folder / "undisturbed-checkpoints", config, nodes, until)
    run.say("the undisturbed run begins")
    try:
        run.begin()
        _finish(run, 900)
    finally:
        run.kill()
    return run


def disturbed(run: Run, wanted: list[str], total: int, rng: random.Random, faults: list[Fault]) -> None:
    """The run with faults, to its end; `faults` grows while it goes on."""
    run.say("the run under faults begins")
    try:
        run.begin()
        run.wait("training", run.settled)
        while wanted:
            left, steps = len(wanted), total - run.attempt().last
            run.pace(min(0.5, max(0.01, SECONDS_EACH * left / max(steps, 1))))
            until = time.time() + rng.uniform(0, 2)
            run.wait("training", lambda until=until: time.time() > until)
            faults.append(inject(run, choose(wanted, len(run.nodes.all)), rng))
        run.pace(0)
        _finish(run, 900)
    finally:
        run.kill()


def inject(run: Run, kind: str, rng: random.Random) -> Fault:
    """Does it and waits until the run has got over it."""
    run.say(f"[{kind}]")
    act, seen = FAULTS[kind]
    step = run.attempt().last
    fault = Fault(kind, act(run, rng), step)
    if kind not in GOES_ON:
        run.wait("training again", lambda: run.since(fault.unix_s))
    run.wait("as many workers as there is room for", run.settled)
    measure(run, fault, seen)
    notice = "–" if fault.notice_s is None else f"{fault.notice_s:.1f} s"
    run.say(f"noticed after {notice}, training after {fault.again_s:.1f} s, {fault.steps_lost} steps lost")
    return fault


def measure(run: Run, fault: Fault, seen: tuple[str, ...]) -> None:
    """Fills in what became of it."""
    attempts, at = run.record.look(), fault.unix_s
    events = [(e["event"], e["unix_s"] - at) for e in run.events(at)]
    if fault.kind in GOES_ON:
        events = [("saved", e["unix_s"] - at) for e in run.events(at) if e["event"] == "saved" and e["error"]]
        fault.again_s = min(t for a in attempts for t in a.times.values() if t > at) - at
    fault.notice_s = next((after for event, after in events if event in seen), None)
    for before, after in pairwise(attempts):
        if after.began < at:
            continue
        if fault.again_s is None:
            fault.again_s = after.began - at
            fault.pause_s = after.began - max(before.times.values())
        fault.steps_lost += before.last + 1 - after.first
    if fault.kind == "worker killed":
        moments = [
            0.0,
            *(next((t for e, t in events if e == name), 0.0) for name in ("failed", "started", "start")),
        ]
        pieces = np.diff([*moments, fault.again_s]).tolist()
        fault.parts = dict(zip(PARTS, pieces, strict=True))


def _finish(run: Run, seconds: float) -> None:
    code = run.wait(
        "the end of the run", lambda: (run.ended() is not None) and [run.ended()], seconds, alive=False
    )
    if code[0] or not (run.folder / "result.json").exists():
        raise Problem(f"the run has ended with exit code {code[0]}\n{run.tail()}")
    run.say("the run has finished")


def show(faults: list[Fault], console: Console) -> None:
    """Every fault, the kinds' medians, and where the time after a killed worker goes."""
    every = Table(title=f"{len(faults)} faults")
    kinds = Table(title="medians")
    for t, names in (
        (every, ("fault", "step", "noticed", "training again", "pause", "steps lost")),
        (kinds, ("kind", "times", "noticed", "training again", "pause", "steps lost")),
    ):
        for name in names:
            t.add_column(name, justify="left" if name in ("fault", "kind") else "right", no_wrap=True)
    for f in faults:
        every.add_row(
            f.kind, str(f.step), *map(_seconds, (f.notice_s, f.again_s, f.pause_s)), str(f.steps_lost)
        )
    for kind, values in medians(faults).items():
        times = map(_seconds, (values["notice_s"], values["again_s"], values["pause_s"]))
        kinds.add_row(kind, str(values["times"]), *times, f"{values['steps_lost']:g}")
    console.print(every)
    console.print(kinds)
    if parts := recovery(faults):
        console.print("after a killed worker: " + ", ".join(f"{k} {v:.1f} s" for k, v in parts.items()))


def medians(faults: list[Fault]) -> dict[str, dict]:
    """By kind."""
    out = {}
    for kind in sorted({fault.kind for fault in faults}):
        each = [fault for fault in faults if fault.kind == kind]
        out[kind] = {"times": len(each)}
        for name in ("notice_s", "again_s", "pause_s", "steps_lost"):
            values = [v for f in each if (v := getattr(f, name)) is not None]
            out[kind][name] = statistics.median(values) if values else None
    return out


def recovery(faults: list[Fault]) -> dict[str, float]:
    """Where the time between SIGKILL and the next step goes: the median of each part."""
    each = [fault.parts for fault in faults if fault.parts]
    return {part: statistics.median(parts[part] for parts in each) for part in PARTS} if each else {}


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def main(
    faults: Annotated[int, typer.Option(help="How many things happen to the run.")] = 24,
    seed: Annotated[int, typer.Option(help="Of what happens when.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="These kinds alone (repeatable).")] = None,
    minutes: Annotated[float, typer.Option(help="After which it is given up.")] = 40,
) -> None:
    """Prints the tables; with all faults, writes benchmarks/results/chaos.json."""
    began, console, done = time.monotonic(), Console(), []
    until, rng = began + 60 * minutes, random.Random(seed)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    wanted = plan(faults, rng, only or [])
    total = max(len(wanted), 4) * STEPS_EACH // EPOCHS * EPOCHS
    rows = prepare(folder / "data", total)
    print(f"{total} steps, {rows:,} rows, {EPOCHS} epochs; everything is in {folder}", flush=True)
    nodes, problem, outcome = Nodes(folder / "ray"), None, {}
    try:
        for _ in range(MOST):
            nodes.add()
        calm = undisturbed(folder, configure(folder, folder / "data", MOST), nodes, until)
        with small_disk(folder / "small", 160):
            config = configure(folder, folder / "data", [1, MOST])
            run = Run(folder / "run", folder / "small" / "checkpoints", config, nodes, until)
            disturbed(run, wanted, total, rng, done)
        auc = [json.loads((r.folder / "result.json").read_text())["eval.auc"] for r in (run, calm)]
        outcome = compare(run.record.trained(), calm.record.trained(), rows, EPOCHS)
        outcome |= {"auc": auc[0], "auc_undisturbed": auc[1], "auc_delta": abs(auc[0] - auc[1])}
    except Problem as error:
        problem = str(error)
    finally:
        nodes.close()
    show(done, console)
    console.print(outcome)
    good = not problem and not outcome["rows_lost"] and not outcome["rows_doubled"]
    good = good and not outcome["steps_with_other_rows"] and outcome["auc_delta"] <= LARGEST_AUC_DELTA
    if problem:
        print(f"FAILED: {problem}\nwhat is left is in {folder}")
    if len(done) >= 20 and not problem:
        values = {"faults": len(done), "steps": total, "rows": rows, "epochs": EPOCHS, **outcome}
        values |= {"seconds": round(time.monotonic() - began), "seed": seed, "recovery": recovery(done)}
        values |= {"kinds": medians(done), "list": [asdict(fault) for fault in done]}
        RESULTS.write_text(json.dumps(values, indent=1) + "\n")
    if good:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if good and (only or len(done) >= min(faults, 20)) else 1)


if __name__ == "__main__":
    typer.run(main)
