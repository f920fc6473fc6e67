"""What an export of a large table takes, and how fast its rows are looked up.

    python benchmarks/export.py [--gib 30] [--precisions fp32,int8] [--requests 2000] [--folder DIR]

A run of DLRM is trained on 1,000 rows. In its checkpoint one table of dim 64 is made --gib large: its parts
are the same GiB of random values again and again, so that the checkpoint takes 1 GiB on disk. `raytrec
export` writes it whole.

peak      the most resident memory of `raytrec export`, torch and TorchRec included
lookups   2,000 rows a request, drawn by a power law (exponent 1.2) over all rows: hot, when the same requests
          are asked for the second time; cold, each after the files have been dropped from the page cache

Prints a table; writes benchmarks/results/export.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated

import numpy as np
import torch
import typer
from documents import REPO, fill, keep
from rich.console import Console
from rich.table import Table

from raytrec.checkpoint.files import find
from raytrec.checkpoint.index import write_index
from raytrec.scoring.load import open_table
from raytrec.scoring.lookups import BlockTable
from raytrec.scoring.manifest import TableEntry, read_manifest

RESULTS = Path(__file__).parent / "results" / "export.json"
GIB, DIM, KEYS = 1 << 30, 64, 2000
TABLE, COLD = "C1", 50  # the table, and how many cold requests
COMMAND = [sys.executable, "-m", "raytrec"]


def main(
    gib: Annotated[float, typer.Option(help="Of the table.")] = 30,
    precisions: Annotated[str, typer.Option(help="A,B,...")] = "fp32,int8",
    requests: Annotated[int, typer.Option(help="Hot ones.")] = 2000,
    folder: Annotated[Path | None, typer.Option(help="With room for the largest export and 2 GiB.")] = None,
    smallest: Annotated[bool, typer.Option(help="Whether it runs at all; writes nothing.")] = False,
) -> None:
    """Prints the table."""
    gib, requests = (0.01, 20) if smallest else (gib, requests)
    with tempfile.TemporaryDirectory(prefix="raytrec-export-", dir=folder) as scratch:
        run = _trained(Path(scratch))
        rows = _enlarge(run, int(gib * GIB))
        found = [
            _measure(run, Path(scratch), precision, rows, requests) for precision in precisions.split(",")
        ]
    _print(found)
    if not smallest:
        keep(RESULTS, {"gib": gib, "rows": rows, "requests": requests, "exports": found})
        fill("docs/benchmarks.md", "export", _markdown(found))


def _trained(scratch: Path) -> Path:
    """A run of 1,000 rows."""
    data, run = scratch / "data", scratch / "run"
    prepare = ["prepare", "synthetic", "--rows", "1000", "--dim", str(DIM), "--out", str(data)]
    config = str(REPO / "jobs" / "synthetic.yaml")
    train = [
        "train",
        config,
        f"data.train={data}/train",
        f"data.valid={data}/valid",
        f"data.test={data}/test",
        f"run.dir={run}",
        "train.epochs=1",
        "tracking.enabled=false",
    ]
    for words in (prepare, [*train, "scaling.num_workers=1", "run.name=export"]):
        subprocess.run([*COMMAND, *words], check=True, capture_output=True, timeout=300)
    return run


def _enlarge(run: Path, size: int) -> int:
    """Makes a table of the newest checkpoint so many bytes large; how many rows it has then."""
    folder, index = find(run)
    block_bytes = index["block_bytes"]
    part = min(GIB, size) // (4 * DIM)  # rows
    values = np.random.default_rng(0).normal(0, 0.05, (part, DIM)).astype(np.float32).tobytes()
    (Path(folder) / "repeated.bin").write_bytes(values)
    sums = [zlib.crc32(values[at : at + block_bytes]) for at in range(0, len(values), block_bytes)]
    parts = size // len(values)
    about = {"file": "repeated.bin", "start": 0, "crc32": sums, "sizes": [part, DIM]}
    rows = part * parts
    entry = index["tensors"][f"tables/{TABLE}/weight"]
    entry["shape"], entry["chunks"] = [rows, DIM], [{**about, "offsets": [part * i, 0]} for i in range(parts)]
    schema = index["about"]["schema"].splitlines()
    index["about"]["schema"] = "\n".join(
        f"  {TABLE}: {{rows: {rows}, dim: {DIM}}}" if line.startswith(f"  {TABLE}: {{rows") else line
        for line in schema
    )
    write_index(folder, {key: value for key, value in index.items() if key not in ("format", "sha256")})
    return rows


def _measure(run: Path, scratch: Path, precision: str, rows: int, requests: int) -> dict:
    """One export, and lookups in its table."""
    out = scratch / "export"
    words = ["export", str(run), "--out", str(out), "--golden-rows", "8"]
    began = perf_counter()
    quantize = [] if precision == "fp32" else ["--quantize", precision]
    process, peak = subprocess.Popen([*COMMAND, *words, *quantize]), 0
    while process.poll() is None:
        peak = max(peak, _peak_memory(process.pid))
        sleep(0.2)
    seconds = perf_counter() - began
    if process.returncode:
        raise SystemExit(f"raytrec export ended with {process.returncode}")
    entry = read_manifest(str(out)).tables[TABLE]
    size = sum((out / name).stat().st_size for name in entry.files)
    draw = np.random.default_rng(1)
    table = open_table(out, entry, rows, DIM)
    asked = [_keys(draw, rows) for _ in range(requests)]
    hot = [[_look_up(table, keys) for keys in asked] for _ in range(2)][1]
    del table
    cold = [_cold(out, entry, rows, _keys(draw, rows)) for _ in range(min(COLD, requests))]
    subprocess.run(["rm", "-rf", str(out)], check=True)
    return {
        "precision": precision,
        "bytes": size,
        "seconds": seconds,
        "peak_bytes": peak,
        **{f"hot_p{p}_ms": float(np.percentile(hot, p)) for p in (50, 99)},
        **{f"cold_p{p}_ms": float(np.percentile(cold, p)) for p in (50, 99)},
    }


def _peak_memory(process: int) -> int:
    """The most resident memory that a process has had, in bytes. (wait4 counts its parent's, too.)"""
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _keys(draw: np.random.Generator, rows: int) -> torch.Tensor:
    """int64 [KEYS], by a power law; which rows are frequent is spread over the table."""
    ranks = np.minimum(draw.zipf(1.2, KEYS), 2**62) % rows
    return torch.from_numpy(ranks * 2654435761 % rows)


def _look_up(table: BlockTable, keys: torch.Tensor) -> float:
    """Milliseconds."""
    began = perf_counter()
    table.vectors(keys)
    return 1000 * (perf_counter() - began)


def _cold(out: Path, entry: TableEntry, rows: int, keys: torch.Tensor) -> float:
    """Milliseconds of one request whose rows are on disk."""
    for name in entry.files:
        with (out / name).open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return _look_up(open_table(out, entry, rows, DIM), keys)


def _rows(found: list[dict]) -> list[list[str]]:
    return [
        [
            each["precision"],
            f"{each['bytes'] / GIB:.1f} GiB",
            f"{each['seconds']:.0f} s",
            f"{each['peak_bytes'] / GIB:.2f} GiB",
            f"{each['hot_p50_ms']:.2f} / {each['hot_p99_ms']:.2f} ms",
            f"{each['cold_p50_ms']:.0f} / {each['cold_p99_ms']:.0f} ms",
        ]
        for each in found
    ]


HEAD = ["tables", "size", "export", "peak memory", "2,000 rows hot, p50 / p99", "cold"]


def _print(found: list[dict]) -> None:
    table = Table(*HEAD)
    for row in _rows(found):
        table.add_row(*row)
    Console().print(table)
    print(json.dumps(found))


def _markdown(found: list[dict]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *_rows(found)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    typer.run(main)
