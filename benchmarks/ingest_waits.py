"""What a stream costs that rows a second do not show: before its first batch, and while the step is slower.

Imported by ingest.py.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time, sleep

import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from raytrec.config.schema import Schema
from raytrec.data.form import ReadPlan
from raytrec.data.fragments import Dataset, scan
from raytrec.data.order import Order
from raytrec.data.stream import Stream

GROUP_ROWS = (10_000, 100_000, 1_000_000, 5_000_000)
BATCH, LANES = 4096, 24
SETTLES_S, WAITS_S = 8.0, 10.0


def first_batches(
    source: Dataset, schema: Schema, readers: int, rounds: int, group_rows: tuple[int, ...] = GROUP_ROWS
) -> dict[str, dict[int, float]]:
    """Seconds from the beginning of a stream to its first batch, in a Ray that has had others.

    Args:
        source: its rows are written anew, in row groups of each size.

    Returns:
        shuffle → rows of a row group → median.
    """
    rows = pa.concat_tables(pq.read_table(path) for path in sorted({g.path for g in source.groups}))
    seconds: dict[str, dict[int, list[float]]] = {"groups": {}, "window": {}}
    with tempfile.TemporaryDirectory(prefix="ingest-") as folder:
        datasets = {}
        for size in group_rows:
            place = Path(folder) / str(size)
            place.mkdir()
            whole = pa.concat_tables([rows] * max(1, -(-size // len(rows))))
            pq.write_table(
                whole.slice(0, max(size, len(rows))), place / "part.parquet", size, compression="zstd"
            )
            datasets[size] = scan(str(place), ReadPlan(schema))
        for turn in range(rounds + 1):
            for shuffle, by_size in seconds.items():
                for size, dataset in datasets.items():
                    taken = _first_batch(dataset, shuffle, readers)
                    if turn:  # the first starts processes
                        by_size.setdefault(size, []).append(taken)
    return {
        shuffle: {size: statistics.median(each) for size, each in by_size.items()}
        for shuffle, by_size in seconds.items()
    }


def _first_batch(dataset: Dataset, shuffle: str, readers: int) -> float:
    began = perf_counter()
    batches = Stream(dataset, Order(BATCH, LANES, shuffle, 2), rank=0, world=1, readers=readers).batches()
    next(batches)
    taken = perf_counter() - began
    batches.close()
    return taken


def waiting(dataset: Dataset, readers: int, cpu_seconds: Callable[[], float]) -> dict[str, float]:
    """Milliseconds of CPU a second while a stream has read ahead all that it may, and nobody takes it.

    Args:
        cpu_seconds: of all processes so far.

    Returns:
        consumer: this process; all: Ray's, too.
    """
    batches = Stream(dataset, Order(BATCH, LANES, "window", 2), rank=0, world=1, readers=readers).batches()
    next(batches)
    sleep(SETTLES_S)
    began, mine, everybody = perf_counter(), process_time(), cpu_seconds()
    sleep(WAITS_S)
    seconds = perf_counter() - began
    found = {"consumer": (process_time() - mine), "all": (cpu_seconds() - everybody)}
    batches.close()
    return {name: taken / seconds * 1e3 for name, taken in found.items()}


def tell(waits: dict[str, float], starts: dict[str, dict[int, float]]) -> None:
    """Prints what the two others have measured."""
    table = Table(title="seconds to the first batch")
    sizes = next(iter(starts.values()))
    for column in ("rows of a row group", *(f"{size:,}" for size in sizes)):
        table.add_column(column, justify="left" if column.startswith("rows") else "right", no_wrap=True)
    for shuffle, by_size in starts.items():
        table.add_row(f"shuffle: {shuffle}", *(f"{by_size[size]:.2f}" for size in sizes))
    console = Console()
    console.print(table)
    console.print(
        f"a stream that waits takes {waits['consumer']:.0f} ms of CPU a second in the process that trains, "
        f"{waits['all']:.0f} with all of Ray's"
    )
