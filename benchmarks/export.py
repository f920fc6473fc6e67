"""Speed and memory of the export of a large table, and speed of lookups in the export.

    python benchmarks/export.py [--gib 30] [--precisions fp32,int8] [--requests 2000] [--folder DIR]

DLRM is trained on 1,000 rows. One table of dim 64 in the run's checkpoint is enlarged to --gib by repeating the
same GiB of random values, so the checkpoint takes only 1 GiB on disk. `raytrec export` writes the whole table.

peak      peak resident memory of `raytrec export`, including torch and TorchRec
lookups   2,000 rows per request, drawn from a power law (exponent 1.2) over all rows; warm: the second run of
          the same requests; cold: each request after the files have been dropped from the page cache

Writes benchmarks/results/export.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated, Any

import harness
import numpy as np
import torch
import typer
from harness import REPO, Grid, forget, run_raytrec, status_bytes

from raytrec.checkpoint.files import find
from raytrec.checkpoint.index import write_index
from raytrec.scoring.manifest import read_manifest
from raytrec.scoring.stored_tables import StackedTable, open_tables

GIB, DIM, KEYS = 1 << 30, 64, 2000
TABLE, COLD = "C1", 50  # name of the table, and number of cold requests
HEADER = (
    *("precision of tables", "size", "export time", "peak memory"),
    *("warm lookup, p50 / p99", "cold lookup, p50 / p99"),
)


def _trained(scratch: Path) -> Path:
    """Train DLRM on 1,000 rows, and return the run folder."""
    data, run = scratch / "data", scratch / "run"
    run_raytrec("prepare", "synthetic", "--rows", "1000", "--dim", str(DIM), "--out", data)
    places = [f"data.{split}={data}/{split}" for split in ("train", "valid", "test")]
    settings = ["train.epochs=1", "tracking.enabled=false", "scaling.num_workers=1", "run.name=export"]
    run_raytrec("train", REPO / "jobs" / "synthetic.yaml", *places, f"run.dir={run}", *settings)
    return run


def _enlarge(run: Path, size: int) -> int:
    """Enlarge a table in the newest checkpoint to at most `size` bytes, and return the table's number of rows."""
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
        f"  {TABLE}: {{rows: {rows}, dim: {DIM}}}" if line.startswith(f"  {TABLE}: {{rows") else line for line in schema
    )
    write_index(folder, {key: value for key, value in index.items() if key not in ("format", "sha256")})
    return rows


def _measure(run: Path, out: Path, precision: str, rows: int, requests: int) -> dict[str, Any]:
    """Export a run to a new folder, look up rows and remove the folder; return the measurements."""
    words = ["export", str(run), "--out", str(out), "--golden-rows", "8"]
    words += [] if precision == "fp32" else ["--quantize", precision]
    began = perf_counter()
    process, peak = subprocess.Popen([sys.executable, "-m", "raytrec", *words]), 0
    while process.poll() is None:
        peak = max(peak, status_bytes("VmHWM", pid=process.pid))  # wait4 also counts the parent's memory
        sleep(0.2)
    seconds = perf_counter() - began
    if process.returncode:
        raise SystemExit(f"raytrec export failed with exit code {process.returncode}")
    manifest = read_manifest(str(out))
    files = [out / name for stack in manifest.stacks for name in stack.files]
    size = sum(file.stat().st_size for file in files)
    draw = np.random.default_rng(1)
    table = open_tables(out, manifest)[TABLE]
    hot_keys = [_keys(draw, rows) for _ in range(requests)]
    hot = [[_look_up(table, keys) for keys in hot_keys] for _ in range(2)][1]
    del table
    cold = []
    for _ in range(min(COLD, requests)):
        keys = _keys(draw, rows)
        forget(files)
        cold.append(_look_up(open_tables(out, manifest)[TABLE], keys))
    shutil.rmtree(out)
    return {
        "precision": precision,
        "bytes": size,
        "seconds": seconds,
        "peak_bytes": peak,
        **{f"hot_p{p}_ms": float(np.percentile(hot, p)) for p in (50, 99)},
        **{f"cold_p{p}_ms": float(np.percentile(cold, p)) for p in (50, 99)},
    }


def _keys(draw: np.random.Generator, rows: int) -> torch.Tensor:
    """Draw row numbers, int64 [KEYS], from a power law whose frequent rows are spread over the table."""
    ranks = np.minimum(draw.zipf(1.2, KEYS), 2**62) % rows
    return torch.from_numpy(ranks * 2654435761 % rows)


def _look_up(table: StackedTable, keys: torch.Tensor) -> float:
    """Look up rows, and return the duration in milliseconds."""
    began = perf_counter()
    table.stack.vectors(keys + table.first_row)
    return 1000 * (perf_counter() - began)


def grid(exports: list[dict[str, Any]]) -> Grid:
    """Return the table of results, with a row for each precision."""
    rows = [
        [
            each["precision"],
            f"{each['bytes'] / GIB:.1f} GiB",
            f"{each['seconds']:.0f} s",
            f"{each['peak_bytes'] / GIB:.2f} GiB",
            f"{each['hot_p50_ms']:.2f} / {each['hot_p99_ms']:.2f} ms",
            f"{each['cold_p50_ms']:.0f} / {each['cold_p99_ms']:.0f} ms",
        ]
        for each in exports
    ]
    return Grid(HEADER, rows)


def main(
    gib: Annotated[float, typer.Option(help="Size of the table in GiB.")] = 30,
    precisions: Annotated[str, typer.Option(help="Precisions, separated by commas.")] = "fp32,int8",
    requests: Annotated[int, typer.Option(help="Number of warm lookups.")] = 2000,
    folder: Annotated[Path | None, typer.Option(help="Folder with space for an export and 2 GiB more.")] = None,
    smallest: harness.Smallest = False,
) -> None:
    """Print the table; without --smallest, write benchmarks/results/export.json and docs/benchmarks.md."""
    torch.set_num_threads(1)
    gib, requests = (0.01, 20) if smallest else (gib, requests)
    with tempfile.TemporaryDirectory(prefix="raytrec-export-", dir=folder) as scratch:
        run = _trained(Path(scratch))
        rows = _enlarge(run, int(gib * GIB))
        exports = [
            _measure(run, Path(scratch, "export"), precision, rows, requests) for precision in harness.split(precisions)
        ]
    grid(exports).show()
    if not smallest:
        content = {"gib": gib, "rows": rows, "requests": requests, "exports": exports}
        harness.publish("export", content, grid(exports).markdown())


if __name__ == "__main__":
    typer.run(main)
