"""Rows per second of raytrec's stream, compared with decoding alone and with other Parquet readers.

    raytrec prepare synthetic --out data/ingest --rows 1250000
    python benchmarks/ingest.py [data/ingest/train] [--rounds 3] [--readers 1] [--times 4]

Every variant reads an epoch of `times` times the folder's rows in batches of 4,096 rows, with the same number of
reading processes. The variants take turns; the table shows medians over turns.

decode          the limit: only decoding row groups with pyarrow.parquet in these processes, each file opened once
stream          raytrec, shuffle: groups
window          raytrec, shuffle: window
numpy collate   ray.data iter_torch_batches(collate_fn) over NumPy, as in Ray's own recommender benchmark
DataLoader      torch DataLoader with pyarrow in its worker processes, collating to a KeyedJaggedTensor

In addition, the peak memory of reading the folder once and eight times is compared, and the time to the first
batch is measured for row groups of other sizes. Writes benchmarks/results/ingest.json.
"""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter, process_time
from typing import Annotated

import harness
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray  # before psutil, which is part of Ray's package
import torch
import typer
from harness import Grid, take_turns, tree_cpu_s

import psutil  # isort: skip
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.cluster.session import ray_session
from raytrec.config.schema import Schema
from raytrec.data.fragments import Dataset, RowGroup, scan
from raytrec.data.order import Order
from raytrec.data.read_plans import ReadPlan
from raytrec.data.stream import Stream

BATCH, LANES = 4096, 24
GROUP_ROWS = (10_000, 100_000, 1_000_000, 5_000_000)


def decode_groups(groups: list[RowGroup], columns: list[str]) -> int:
    """Decode row groups in this process, and return the number of rows."""
    files = {path: pq.ParquetFile(path, pre_buffer=True) for path in {group.path for group in groups}}
    return sum(
        files[group.path].read_row_group(group.index, columns=columns, use_threads=False).num_rows for group in groups
    )


def decode(dataset: Dataset, schema: Schema, readers: int, pool: ProcessPoolExecutor) -> int:
    """Decode all row groups in the pool's processes, and return the number of rows."""
    parts = [dataset.groups[i::readers] for i in range(readers)]
    return sum(pool.map(partial(decode_groups, columns=schema.columns), parts))


def stream(dataset: Dataset, schema: Schema, readers: int, _, shuffle: str) -> int:
    """Read an epoch with raytrec's stream, and return the number of rows."""
    return sum(int(batch.weights.sum()) for batch in stream_of(dataset, shuffle, readers).batches())


def stream_of(dataset: Dataset, shuffle: str, readers: int) -> Stream:
    """Return raytrec's stream over a dataset."""
    return Stream(dataset, Order(BATCH, LANES, shuffle, 2), rank=0, world=1, readers=readers)


def numpy_collate(dataset: Dataset, schema: Schema, readers: int, _) -> int:
    """Read the files with Ray Data and a NumPy collate function, and return the number of rows."""
    import ray.data

    files = [group.path for group in dataset.groups if group.index == 0]
    data = ray.data.read_parquet(files, columns=schema.columns, concurrency=readers)
    data.context.enable_progress_bars = False
    batches = data.iter_torch_batches(batch_size=BATCH, collate_fn=partial(collate_numpy, schema))
    return sum(len(labels) for _, _, labels in batches)


def collate_numpy(schema: Schema, batch: dict[str, np.ndarray]):
    """Convert NumPy columns, in which lists are object arrays, to (dense, KeyedJaggedTensor, labels)."""
    dense = torch.as_tensor(np.stack([batch[name] for name in schema.dense], axis=1), dtype=torch.float32)
    values, lengths = [], []
    for feature in schema.sparse:
        column = batch[schema.get_ids_column(feature)]
        if column.dtype == object:
            lengths.append(np.fromiter((len(bag) for bag in column), np.int32, len(column)))
            values.append(np.concatenate(list(column)))
        else:
            lengths.append(np.ones(len(column), np.int32))
            values.append(column)
    sparse = KeyedJaggedTensor(
        list(schema.sparse),
        torch.from_numpy(np.concatenate(values).astype(np.int64)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )
    return dense, sparse, torch.as_tensor(batch[schema.labels[0]], dtype=torch.float32)


class Groups(torch.utils.data.IterableDataset):
    """Dataset of batches decoded from row groups, which are divided among the loader's workers."""

    def __init__(self, groups: tuple[RowGroup, ...], schema: Schema):
        self.groups, self.schema = groups, schema

    def __iter__(self) -> Iterator:
        worker = torch.utils.data.get_worker_info()
        paths = {group.path for group in self.groups}
        files = {path: pq.ParquetFile(path, pre_buffer=True) for path in paths}
        for group in self.groups[worker.id :: worker.num_workers]:
            table = files[group.path].read_row_group(group.index, columns=self.schema.columns, use_threads=False)
            for batch in table.to_batches(max_chunksize=BATCH):
                columns = {
                    name: batch.column(i).to_numpy(zero_copy_only=False) for i, name in enumerate(batch.schema.names)
                }
                yield collate_numpy(self.schema, columns)


def data_loader(dataset: Dataset, schema: Schema, readers: int, _) -> int:
    """Read all row groups with a torch DataLoader, and return the number of rows."""
    loader = torch.utils.data.DataLoader(
        Groups(dataset.groups, schema), batch_size=None, num_workers=readers, multiprocessing_context="spawn"
    )
    return sum(len(labels) for _, _, labels in loader)


VARIANTS: dict[str, Callable[[Dataset, Schema, int, ProcessPoolExecutor | None], int]] = {
    "decode": decode,
    "stream": partial(stream, shuffle="groups"),
    "window": partial(stream, shuffle="window"),
    "numpy_collate": numpy_collate,
    "data_loader": data_loader,
}


@dataclass
class Measured:
    """Measurements of one turn: rows/s, CPU-µs per row in all processes, and CPU share of this process."""

    rows_per_s: float
    cpu_us: float
    consumer: float


def measure(run: Callable[[], int], rows: int) -> Measured:
    """Run a variant once, and return its measurements."""
    cpu, own_cpu, began = tree_cpu_s(), process_time(), perf_counter()
    assert run() == rows
    seconds, own_cpu, cpu = perf_counter() - began, process_time() - own_cpu, tree_cpu_s() - cpu
    return Measured(rows / seconds, cpu / rows * 1e6, own_cpu / seconds)


def memory_mib() -> float:
    """Return the private memory of this process and its descendants plus Ray's object store, in MiB."""
    total = ray.cluster_resources()["object_store_memory"]
    total -= ray.available_resources().get("object_store_memory", 0)
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            memory = process.memory_info()
            total += memory.rss - memory.shared
        except psutil.Error:
            continue
    return total / 2**20


def peak_memory_mib(run: Callable[[], int]) -> float:
    """Call a function, and return the peak of `memory_mib` during the call."""
    over, peak = Event(), [memory_mib()]

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], memory_mib())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        over.set()
        watcher.join()
    return peak[0]


def repeated(dataset: Dataset, times: int) -> Dataset:
    """Return a dataset in which each row group occurs `times` times."""
    return replace(dataset, groups=dataset.groups * times)


def first_batches(
    source: Dataset, schema: Schema, readers: int, rounds: int, group_rows: tuple[int, ...]
) -> dict[str, dict[int, float]]:
    """Measure the seconds from a stream's start to its first batch, after other streams on this Ray cluster.

    Args:
        source: Dataset whose rows are rewritten in row groups of each size.
        schema: Schema of the dataset.
        readers: Number of reading processes.
        rounds: Number of turns for each size.
        group_rows: Sizes of row groups, in rows.

    Returns:
        shuffle → rows per row group → median seconds.
    """

    def first(dataset: Dataset, shuffle: str) -> float:
        began = perf_counter()
        batches = stream_of(dataset, shuffle, readers).batches()
        next(batches)
        taken = perf_counter() - began
        batches.close()
        return taken

    rows = pa.concat_tables(pq.read_table(path) for path in sorted({g.path for g in source.groups}))
    with tempfile.TemporaryDirectory(prefix="ingest-") as folder:
        turns = {}
        for size in group_rows:
            place = Path(folder) / str(size)
            place.mkdir()
            whole = pa.concat_tables([rows] * max(1, -(-size // len(rows)))).slice(0, max(size, len(rows)))
            pq.write_table(whole, place / "part.parquet", size, compression="zstd")
            dataset = scan(str(place), ReadPlan(schema))
            for shuffle in ("groups", "window"):
                turns[shuffle, size] = lambda dataset=dataset, shuffle=shuffle: first(dataset, shuffle)
        seconds = take_turns(turns, rounds, warm_up=1)  # the first turn starts processes
    return {shuffle: {size: median(seconds[shuffle, size]) for size in group_rows} for shuffle in ("groups", "window")}


def main(
    data: Annotated[str, typer.Argument(help="Folder with Parquet files.")] = "data/ingest/train",
    rounds: harness.Rounds = 3,
    readers: Annotated[int, typer.Option(help="Number of reading processes.")] = 1,
    times: Annotated[int, typer.Option(help="Number of times the folder is read in one epoch.")] = 4,
    only: Annotated[list[str] | None, typer.Option(help="Run only these variants (repeatable).")] = None,
    smallest: harness.Smallest = False,
) -> None:
    """Print the tables; with all variants and without --smallest, write benchmarks/results/ingest.json."""
    rounds, times = (1, 1) if smallest else (rounds, times)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    schema = Schema.load(str(Path(data).parent / "schema.yaml"))
    once = scan(data, ReadPlan(schema))
    dataset, memory = repeated(once, times), {}
    pool = ProcessPoolExecutor(readers, mp_context=get_context("spawn"))
    with ray_session(num_cpus=readers + 1):
        for size in (once, repeated(once, 8)):  # before other variants, which leave memory behind
            memory[size.rows] = peak_memory_mib(partial(VARIANTS["stream"], size, schema, readers, None))
        with pool:
            runs = {name: partial(VARIANTS[name], dataset, schema, readers, pool) for name in only or VARIANTS}
            turns = take_turns(
                {name: lambda run=run: measure(run, dataset.rows) for name, run in runs.items()},
                rounds,
                warm_up=1,  # starts processes
            )
        starts = first_batches(once, schema, readers, rounds, (1000,) if smallest else GROUP_ROWS)
    rate, cpu_us, consumer = (
        {name: median(getattr(one, figure) for one in each) for name, each in turns.items()}
        for figure in Measured.__dataclass_fields__
    )
    show(rate, cpu_us, consumer, f"{dataset.rows:,} rows, batch {BATCH}, {readers} reading process(es)")
    for rows, mib in memory.items():
        print(f"peak memory of the stream, all processes and object store: {mib:,.0f} MiB for {rows:,} rows")
    header = ("seconds to the first batch, by rows per row group", *map("{:,}".format, starts["groups"]))
    lines = [[f"shuffle: {name}", *map("{:.2f}".format, found.values())] for name, found in starts.items()]
    Grid(header, lines).show()
    if set(turns) == set(VARIANTS) and not smallest:
        content = {
            "rows": dataset.rows,
            "readers": readers,
            "rows_per_s": rate,
            "cpu_us_per_row": cpu_us,
            "consumer_cpu": consumer,
            "stream_memory_mib": memory,
            "first_batch_s": starts,
            "ratios": {f"stream_over_{name}": rate["stream"] / rate[name] for name in ("decode", "numpy_collate")},
        }
        harness.store("ingest", content)


def show(rate: dict[str, float], cpu_us: dict[str, float], consumer: dict[str, float], title: str) -> None:
    """Print the table, with a row for each variant."""
    rows = []
    for name, speed in rate.items():
        share = f"{speed / rate['decode']:.2f}" if "decode" in rate else ""
        rows.append([name, f"{speed:,.0f}", share, f"{cpu_us[name]:.2f}", f"{consumer[name]:.0%}"])
    Grid(("variant", "rows/s", "× decode", "CPU-µs/row", "consumer CPU"), rows, title).show()


if __name__ == "__main__":
    typer.run(main)
