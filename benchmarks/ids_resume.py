"""Training on a stream of distinct ids with 100,000 managed rows, resumed with other numbers of workers.

    python benchmarks/ids_resume.py [--ids 10000000] [--folder FOLDER]

Steps have 12,288 rows and run on a CPU with a table of 100,000 × 16 and Adagrad. A row looks up a new id, and
the id that was new in the same row one to four steps earlier.

Two workers train all steps, and save a checkpoint after a third of them. From this checkpoint, two workers train
the rest again; three workers train to the second third, and one worker trains to the end. At the end, ids, rows
and counters must be equal. With two workers throughout, every weight must be bitwise equal.

Prints the comparison, and for each run its seconds and the memory growth of its processes after a tenth of its
steps; writes benchmarks/results/ids_resume.json.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import harness
import numpy as np
import torch
import typer
from harness import status_bytes
from ids import DIM, MODEL, ROWS
from rank_group import Ranks, Rig, rig, run_script

BATCH = 12_288  # rows per step
SCHEMA = {
    "sparse": {name: {"table": "item"} for name in ("new", "known")},
    "tables": {"item": {"rows": ROWS, "dim": DIM, "ids": "managed"}},
}


def batches_from(rank_rig: Rig, rank: int, world: int, first: int) -> Iterator[Any]:
    """Yield this rank's batches, starting at step `first`; the global batches depend only on the step."""
    size = BATCH // world
    places = np.arange(rank * size, (rank + 1) * size)
    for number in range(first, sys.maxsize):
        new = number * BATCH + places
        ids = [new, np.maximum(new - BATCH * (1 + places % 4), places)]
        yield rank_rig.batch((new * 7919 % 13 < 6).astype(np.float32), ids, number=number)


def side(rank: int, world: int) -> Any:
    """Return the function that serves a rank's requests."""

    def resume(root: str, first: int, saves: list[int]) -> tuple[float, int]:
        """Train from the checkpoint of step `first`, and save after each step in `saves`.

        Returns:
            (seconds, memory growth of this process after a tenth of the steps, in bytes).
        """
        from raytrec.checkpoint.managed import allocate_ids, gather_ids, load_ids
        from raytrec.checkpoint.restore import restore
        from raytrec.checkpoint.save import CheckpointWriter
        from raytrec.checkpoint.state import LogicalState
        from raytrec.config.training import CheckpointSection

        torch.manual_seed(0)
        rank_rig = rig(SCHEMA, MODEL, world, BATCH, optim={"embeddings": {"name": "adagrad"}})
        step, state = rank_rig.step, LogicalState(rank_rig.step.model, rank_rig.step.optimizer)
        saver = CheckpointWriter(root, CheckpointSection(async_save=False))
        if first:
            restored = restore(root, state, make_extra_tensors=lambda about: allocate_ids(about, step.maps))
            load_ids(step.maps, restored.extra_tensors, restored.about)
            step.trained = first
        batches = batches_from(rank_rig, rank, world, first)
        start_bytes, began, early = 0, perf_counter(), first + (saves[-1] - first) // 10
        for save in saves:
            for _ in step.train(batches, save - step.trained):
                if step.trained == early:
                    start_bytes = status_bytes("VmRSS")
            ids, about = gather_ids(step.maps)
            saver.save(save, state.tensors(), about, ids)
            if error := saver.collect_outcome().error:
                raise error
        return perf_counter() - began, status_bytes("VmRSS") - start_bytes

    return resume


def train(world: int, root: Path, first: int, saves: list[int]) -> dict[str, Any]:
    """Train on new ranks from step `first` to the last of `saves`, and return the measurements.

    If the measurements are already stored, they are returned without training.
    """
    record = root / f"{saves[-1]}.json"
    if record.exists():
        return json.loads(record.read_text())
    with ExitStack() as stack:
        answers = Ranks("ids_resume.py", world, stack).ask(root=str(root), first=first, saves=saves)
    figures = {
        "workers": world,
        "steps": [first, saves[-1]],
        "s": max(s for s, _ in answers),
        "grown_mib": sum(size for _, size in answers) / 2**20,
    }
    print(json.dumps(figures), flush=True)
    record.write_text(json.dumps(figures))
    return figures


def differences(one: Path, other: Path) -> dict[str, float]:
    """Return the largest difference in each tensor that is not bitwise equal in two checkpoints."""
    from raytrec.checkpoint.blocks import DTYPES
    from raytrec.checkpoint.index import read_index
    from raytrec.checkpoint.restore import load

    whole = []
    for folder in (one, other):
        entries = read_index(str(folder))["tensors"]
        whole.append({n: torch.empty(e["shape"], dtype=DTYPES[e["dtype"]]) for n, e in entries.items()})
        load(str(folder), whole[-1])
    if whole[0].keys() != whole[1].keys():
        raise SystemExit(f"different tensors: {sorted(whole[0].keys() ^ whole[1].keys())}")
    pairs = ((name, values, whole[1][name]) for name, values in whole[0].items())
    return {n: float((a.double() - b.double()).abs().max()) for n, a, b in pairs if not torch.equal(a, b)}


def measure(steps: int, root: Path) -> dict[str, Any]:
    """Train all runs; return their measurements, and their differences from the uninterrupted run."""
    from raytrec.checkpoint.files import get_step_folder

    third, tail, paths = steps // 3, steps - steps // 3, {n: root / n for n in ("whole", "two", "others")}
    runs = [train(2, paths["whole"], 0, [third, steps])]
    for name in ("two", "others"):
        if not paths[name].exists():
            shutil.copytree(get_step_folder(str(paths["whole"]), third), get_step_folder(str(paths[name]), third))
    runs.append(train(2, paths["two"], third, [steps]))
    runs.append(train(3, paths["others"], third, [third + tail // 2]))
    runs.append(train(1, paths["others"], third + tail // 2, [steps]))
    ends = {name: Path(get_step_folder(str(path), steps)) for name, path in paths.items()}
    differing = {name: differences(ends["whole"], ends[name]) for name in ("two", "others")}
    return {"ids": steps * BATCH, "runs": runs, "differences": differing}


def main(
    ids: Annotated[int, typer.Option(help="Number of distinct ids.")] = 10_000_000,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for checkpoints, from which an interrupted benchmark continues.")
    ] = None,
    smallest: harness.Smallest = False,
) -> None:
    """Print the comparison; exit with 1 if ids differ or, with two workers, if any tensor differs."""
    steps = 12 if smallest else -(-ids // BATCH)
    with TemporaryDirectory(prefix="ids-") as temporary:
        results = measure(steps, folder or Path(temporary))
    two, others = results["differences"].values()
    print(f"{results['ids']:,} ids; 2 → 2 workers: {two or 'equal to the last bit'}; 2 → 3 → 1: {others}")
    if not smallest:
        harness.store("ids_resume", results)
    if two or any(name.startswith("ids/") for name in others):
        raise SystemExit("the resumed run differs from the uninterrupted run")


if __name__ == "__main__":
    run_script(main, side)
