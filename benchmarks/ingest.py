"""How fast rows come: raytrec's stream, against decoding alone and against other ways to read Parquet.

    raytrec prepare synthetic --out data/ingest --rows 1250000
    python benchmarks/ingest.py [data/ingest/train] [--rounds 3] [--readers 1]

Every variant delivers all rows of the folder once, as batches of 4096 rows, from the same number of reading
processes. The variants take turns, so that a machine that grows slower does so for all. What is printed is
the median of the turns.

decode          pyarrow.parquet row-group decode and nothing else, in the reading processes: the limit
stream          raytrec, shuffle: groups
window          raytrec, shuffle: window
numpy collate   ray.data iter_torch_batches(collate_fn) over NumPy, as in Ray's own recommender benchmark
DataLoader      torch DataLoader with pyarrow in its worker processes, and a collate to a KeyedJaggedTensor
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, process_time
from typing import Annotated

import numpy as np
import pyarrow.parquet as pq
import ray  # noqa: F401 (before psutil, which it brings along)
import torch
import typer

import psutil  # isort: skip
from rich.console import Console
from rich.table import Table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.cluster import ray_session
from raytrec.data.fragments import Dataset, RowGroup, scan
from raytrec.data.order import Order
from raytrec.data.stream import Stream
from raytrec.schema import Schema

RESULTS = Path(__file__).parent / "results" / "ingest.json"
BATCH = 4096


def decode_groups(groups: list[RowGroup], columns: list[str]) -> int:
    """Rows of these row groups, decoded in this process."""
    return sum(
        pq.ParquetFile(group.path, pre_buffer=True)
        .read_row_group(group.index, columns=columns, use_threads=False)
        .num_rows
        for group in groups
    )


def decode(dataset: Dataset, schema: Schema, readers: int, pool: ProcessPoolExecutor) -> int:
    parts = [dataset.groups[i::readers] for i in range(readers)]
    return sum(pool.map(partial(decode_groups, columns=schema.columns), parts))


def stream(dataset: Dataset, schema: Schema, readers: int, _, shuffle: str) -> int:
    order = Order(BATCH, 24, shuffle, 2)
    reading = Stream(dataset, schema, order, rank=0, world=1, readers=readers)
    return sum(int(batch.weights.sum()) for batch in reading.batches())


def numpy_collate(dataset: Dataset, schema: Schema, readers: int, _) -> int:
    import ray.data

    files = sorted({group.path for group in dataset.groups})
    data = ray.data.read_parquet(files, columns=schema.columns, concurrency=readers)
    data.context.enable_progress_bars = False
    batches = data.iter_torch_batches(batch_size=BATCH, collate_fn=partial(collate_numpy, schema))
    return sum(len(labels) for _, _, labels in batches)


def collate_numpy(schema: Schema, batch: dict[str, np.ndarray]):
    """NumPy columns (lists as object arrays) → dense, KeyedJaggedTensor, labels."""
    dense = torch.as_tensor(np.stack([batch[name] for name in schema.dense], axis=1), dtype=torch.float32)
    values, lengths = [], []
    for feature in schema.sparse:
        column = batch[schema.column_of(feature)]
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
    """Batches as NumPy columns from row groups, dealt out over the loader's workers."""

    def __init__(self, groups: tuple[RowGroup, ...], schema: Schema):
        self.groups, self.schema = groups, schema

    def __iter__(self) -> Iterator:
        worker = torch.utils.data.get_worker_info()
        for group in self.groups[worker.id :: worker.num_workers]:
            file = pq.ParquetFile(group.path, pre_buffer=True)
            table = file.read_row_group(group.index, columns=self.schema.columns, use_threads=False)
            for batch in table.to_batches(max_chunksize=BATCH):
                columns = {
                    name: batch.column(i).to_numpy(zero_copy_only=False)
                    for i, name in enumerate(batch.schema.names)
                }
                yield collate_numpy(self.schema, columns)


def data_loader(dataset: Dataset, schema: Schema, readers: int, _) -> int:
    loader = torch.utils.data.DataLoader(
        Groups(dataset.groups, schema), batch_size=None, num_workers=readers, multiprocessing_context="spawn"
    )
    return sum(len(labels) for _, _, labels in loader)


VARIANTS = {
    "decode": decode,
    "stream": partial(stream, shuffle="groups"),
    "window": partial(stream, shuffle="window"),
    "numpy_collate": numpy_collate,
    "data_loader": data_loader,
}


@dataclass
class Measured:
    """One turn: rows a second; CPU-µs a row over all processes; this process's CPU as a share of time; the
    most memory that all processes held beyond what they held before, in MiB."""

    rows_per_s: float
    cpu_us: float
    consumer: float
    memory_mib: float


def processes() -> dict[int, psutil.Process]:
    """This process and all below it: Ray's, too, which it has started."""
    me = psutil.Process()
    return {p.pid: p for p in [me, *me.children(recursive=True)]}


def total(what: str) -> float:
    """CPU seconds, or bytes of private memory, of all these processes."""
    out = 0.0
    for process in processes().values():
        try:
            if what == "cpu":
                times = process.cpu_times()
                out += times.user + times.system + times.children_user + times.children_system
            else:
                memory = process.memory_info()
                out += memory.rss - memory.shared
        except psutil.Error:
            continue
    return out


def measure(variant, dataset: Dataset, schema: Schema, readers: int, pool) -> Measured:
    over, most, before = Event(), [0.0], total("memory")

    def watch() -> None:
        while not over.wait(0.25):
            most[0] = max(most[0], total("memory") - before)

    watcher = Thread(target=watch)
    watcher.start()
    cpu, mine, began = total("cpu"), process_time(), perf_counter()
    try:
        rows = variant(dataset, schema, readers, pool)
    finally:
        seconds, mine, cpu = perf_counter() - began, process_time() - mine, total("cpu") - cpu
        over.set()
        watcher.join()
    assert rows == dataset.rows, (rows, dataset.rows)
    return Measured(rows / seconds, cpu / rows * 1e6, mine / seconds, most[0] / 2**20)


def main(
    data: Annotated[str, typer.Argument(help="Folder of Parquet.")] = "data/ingest/train",
    rounds: Annotated[int, typer.Option(help="Turns of each variant.")] = 3,
    readers: Annotated[int, typer.Option(help="Reading processes.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="These variants alone (repeatable).")] = None,
) -> None:
    """Prints the table and, with all variants, writes benchmarks/results/ingest.json."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    schema = Schema.load(str(Path(data).parent / "schema.yaml"))
    dataset = scan(data, schema)
    chosen = {name: VARIANTS[name] for name in only or VARIANTS}
    turns: dict[str, list[Measured]] = {name: [] for name in chosen}
    pool = ProcessPoolExecutor(readers, mp_context=get_context("spawn"))
    with pool, ray_session(num_cpus=readers + 1):
        for turn in range(rounds + 1):
            for name, variant in chosen.items():
                measured = measure(variant, dataset, schema, readers, pool)
                if turn:  # the first starts processes
                    turns[name].append(measured)
    show(dataset, readers, turns)


def show(dataset: Dataset, readers: int, turns: dict[str, list[Measured]]) -> None:
    table = Table(title=f"{dataset.rows:,} rows, batch {BATCH}, {readers} reading process(es)")
    for column in ("variant", "rows/s", "of decode", "CPU-µs/row", "consumer CPU", "memory MiB"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    middle = {
        name: Measured(
            *(statistics.median(getattr(m, f) for m in each) for f in Measured.__dataclass_fields__)
        )
        for name, each in turns.items()
    }
    limit = middle["decode"].rows_per_s if "decode" in middle else float("nan")
    for name, m in middle.items():
        share = f"{m.rows_per_s / limit:.2f}"
        table.add_row(
            name,
            f"{m.rows_per_s:,.0f}",
            share,
            f"{m.cpu_us:.2f}",
            f"{m.consumer:.0%}",
            f"{m.memory_mib:,.0f}",
        )
    Console().print(table)
    if set(middle) == set(VARIANTS):
        rate = {name: m.rows_per_s for name, m in middle.items()}
        values = {
            "rows": dataset.rows,
            "readers": readers,
            "rows_per_s": rate,
            "cpu_us_per_row": {name: m.cpu_us for name, m in middle.items()},
            "consumer_cpu": {name: m.consumer for name, m in middle.items()},
            "memory_mib": {name: m.memory_mib for name, m in middle.items()},
            "ratios": {
                "stream_over_decode": rate["stream"] / rate["decode"],
                "stream_over_numpy_collate": rate["stream"] / rate["numpy_collate"],
            },
        }
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
