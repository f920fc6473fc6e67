"""Distinct ids without an end through a table of 100,000 managed rows, resumed by other numbers of workers.

    python benchmarks/ids_resume.py [--ids 10000000] [--folder FOLDER]

Steps of 12,288 rows, on CPU, from a table of 100,000 × 16 with Adagrad. A row looks up an id that has never
been before, and one that the row at its place had one to four steps ago.

Two workers train all steps, and save a checkpoint after a third of them. From there two workers train the
rest once more; and so do three up to the second third, and one to the end. Ids, rows and counters must be
equal at the end, and where there were two workers throughout, every weight to the last bit.

Prints what is equal, seconds, and how far each process has grown since a tenth of its steps; writes
benchmarks/results/ids_resume.json.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from documents import keep
from ids_side import RESUME_ROWS
from rank_group import Ranks

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "ids_resume.json"


def train(world: int, root: Path, first: int, saves: list[int]) -> dict[str, Any]:
    """Steps from `first` to the last of `saves`, from the checkpoint of `first`, unless that is done."""
    record = root / f"{saves[-1]}.json"
    if record.exists():
        return json.loads(record.read_text())
    with ExitStack() as stack:
        ranks = Ranks("ids_side.py", HERE.parent, world, stack)
        answers = ranks.ask(resume=str(root), first=first, saves=saves)
    found = {
        "workers": world,
        "steps": [first, saves[-1]],
        "s": max(s for s, _ in answers),
        "grown_mib": sum(size for _, size in answers) / 2**20,
    }
    print(json.dumps(found), flush=True)
    record.write_text(json.dumps(found))
    return found


def differences(one: Path, other: Path) -> dict[str, float]:
    """Tensor → by how much two checkpoints differ at most; those that are equal to the last bit have none."""
    import torch

    from raytrec.checkpoint.blocks import DTYPES
    from raytrec.checkpoint.index import read_index
    from raytrec.checkpoint.restore import load

    whole = []
    for folder in (one, other):
        entries = read_index(str(folder))["tensors"]
        whole.append({n: torch.empty(e["shape"], dtype=DTYPES[e["dtype"]]) for n, e in entries.items()})
        load(str(folder), whole[-1])
    if whole[0].keys() != whole[1].keys():
        raise SystemExit(f"other tensors: {sorted(whole[0].keys() ^ whole[1].keys())}")
    pairs = ((name, values, whole[1][name]) for name, values in whole[0].items())
    return {n: float((a.double() - b.double()).abs().max()) for n, a, b in pairs if not torch.equal(a, b)}


def measure(steps: int, root: Path) -> dict[str, Any]:
    """All runs, and what differs."""
    from raytrec.checkpoint.files import folder_of

    third, rest, paths = steps // 3, steps - steps // 3, {n: root / n for n in ("whole", "two", "others")}
    runs = [train(2, paths["whole"], 0, [third, steps])]
    for name in ("two", "others"):
        if not paths[name].exists():
            shutil.copytree(folder_of(str(paths["whole"]), third), folder_of(str(paths[name]), third))
    runs.append(train(2, paths["two"], third, [steps]))
    runs.append(train(3, paths["others"], third, [third + rest // 2]))
    runs.append(train(1, paths["others"], third + rest // 2, [steps]))
    ends = {name: Path(folder_of(str(path), steps)) for name, path in paths.items()}
    found = {name: differences(ends["whole"], ends[name]) for name in ("two", "others")}
    return {"ids": steps * RESUME_ROWS, "runs": runs, "differences": found}


def main(
    ids: Annotated[int, typer.Option(help="Distinct ids.")] = 10_000_000,
    folder: Annotated[
        Path | None,
        typer.Option(help="For checkpoints, to continue there when interrupted; default: a temporary one."),
    ] = None,
    smallest: Annotated[bool, typer.Option("--smallest", help="Few ids, and write nothing.")] = False,
) -> None:
    """Prints what is equal; exit code 1 where ids are not, or with two workers anything else."""
    steps = 12 if smallest else -(-ids // RESUME_ROWS)
    with TemporaryDirectory(prefix="ids-") as temporary:
        found = measure(steps, folder or Path(temporary))
    two, others = found["differences"].values()
    print(f"{found['ids']:,} ids; 2 → 2 workers: {two or 'equal to the last bit'}; 2 → 3 → 1: {others}")
    if not smallest:
        keep(RESULTS, found)
    if two or any(name.startswith("ids/") for name in others):
        raise SystemExit("what was resumed is not what was trained without a break")


if __name__ == "__main__":
    typer.run(main)
