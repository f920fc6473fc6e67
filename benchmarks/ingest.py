"""How fast rows come: raytrec's stream, against decoding alone and against other ways to read Parquet.

    raytrec prepare synthetic --out data/ingest --rows 1250000
    python benchmarks/ingest.py [data/ingest/train] [--rounds 3] [--readers 1] [--times 4]

Every variant delivers all rows of the folder, `times` times over as one epoch, as batches of 4096 rows, from
the same number of reading processes. The variants take turns, so that a machine that grows slower does so for
all. What is printed is the median of the turns.

decode          pyarrow.parquet row-group decode and nothing else, every file opened once, in the reading
                processes: the limit
stream          raytrec, shuffle: groups
window          raytrec, shuffle: window
numpy collate   ray.data iter_torch_batches(collate_fn) over NumPy, as in Ray's own recommender benchmark
DataLoader      torch DataLoader with pyarrow in its worker processes, and a collate to a KeyedJaggedTensor

Then the stream reads the folder once and eight times over, and the most memory that it took is compared; it
waits, read ahead, for a step that does not come; and it starts on the same rows in row groups of other sizes.
"""

from __future__ import annotations

import logging
import os
import statistics
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event, Thread
from time import perf_counter, process_time
from typing import Annotated

import numpy as np
import pyarrow.parquet as pq
import ray  # before psutil, which it brings along
import torch
import typer
from documents import keep
from ingest_waits import GROUP_ROWS, first_batches, tell, waiting

import psutil  # isort: skip
from rich.console import Console
from rich.table import Table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.cluster.session import ray_session
from raytrec.config.schema import Schema
from raytrec.data.form import ReadPlan
from raytrec.data.fragments import Dataset, RowGroup, scan
from raytrec.data.order import Order
from raytrec.data.stream import Stream

RESULTS = Path(__file__).parent / "results" / "ingest.json"
BATCH = 4096


def decode_groups(groups: list[RowGroup], columns: list[str]) -> int:
    """Rows of these row groups, decoded in this process."""
    files = {path: pq.ParquetFile(path, pre_buffer=True) for path in {group.path for group in groups}}
    return sum(
        files[group.path].read_row_group(group.index, columns=columns, use_threads=False).num_rows
        for group in groups
    )


def decode(dataset: Dataset, schema: Schema, readers: int, pool: ProcessPoolExecutor) -> int:
    parts = [dataset.groups[i::readers] for i in range(readers)]
    return sum(pool.map(partial(decode_groups, columns=schema.columns), parts))


def stream(dataset: Dataset, schema: Schema, readers: int, _, shuffle: str) -> int:
    order = Order(BATCH, 24, shuffle, 2)
    reading = Stream(dataset, order, rank=0, world=1, readers=readers)
    return sum(int(batch.weights.sum()) for batch in reading.batches())


def numpy_collate(dataset: Dataset, schema: Schema, readers: int, _) -> int:
    import ray.data

    files = [group.path for group in dataset.groups if group.index == 0]
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
        paths = {group.path for group in self.groups}
        files = {path: pq.ParquetFile(path, pre_buffer=True) for path in paths}
        for group in self.groups[worker.id :: worker.num_workers]:
            table = files[group.path].read_row_group(
                group.index, columns=self.schema.columns, use_threads=False
            )
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
    """One turn: rows a second; CPU-µs a row over all processes; this process's CPU as a share of time."""

    rows_per_s: float
    cpu_us: float
    consumer: float


def processes() -> list[psutil.Process]:
    """This process and all below it: Ray's, too, which it has started."""
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def cpu_seconds() -> float:
    """Of all these processes."""
    out = 0.0
    for process in processes():
        try:
            times = process.cpu_times()
            out += times.user + times.system + times.children_user + times.children_system
        except psutil.Error:
            continue
    return out


def measure(variant, dataset: Dataset, schema: Schema, readers: int, pool) -> Measured:
    cpu, mine, began = cpu_seconds(), process_time(), perf_counter()
    rows = variant(dataset, schema, readers, pool)
    seconds, mine, cpu = perf_counter() - began, process_time() - mine, cpu_seconds() - cpu
    assert rows == dataset.rows, (rows, dataset.rows)
    return Measured(rows / seconds, cpu / rows * 1e6, mine / seconds)


def memory_mib() -> float:
    """What all these processes hold for themselves, and Ray's object store for them, in MiB."""
    held = ray.cluster_resources()["object_store_memory"]
    held -= ray.available_resources().get("object_store_memory", 0)
    for process in processes():
        try:
            memory = process.memory_info()
            held += memory.rss - memory.shared
        except psutil.Error:
            continue
    return held / 2**20


def most_memory(variant, dataset: Dataset, schema: Schema, readers: int) -> float:
    """The most MiB while a variant runs."""
    over, most = Event(), [memory_mib()]

    def watch() -> None:
        while not over.wait(0.2):
            most[0] = max(most[0], memory_mib())

    watcher = Thread(target=watch)
    watcher.start()
    try:
        variant(dataset, schema, readers, None)
    finally:
        over.set()
        watcher.join()
    return most[0]


def repeated(dataset: Dataset, times: int) -> Dataset:
    """A dataset with the same row groups several times."""
    return replace(dataset, groups=dataset.groups * times)


def main(
    data: Annotated[str, typer.Argument(help="Folder of Parquet.")] = "data/ingest/train",
    rounds: Annotated[int, typer.Option(help="Turns of each variant.")] = 3,
    readers: Annotated[int, typer.Option(help="Reading processes.")] = 1,
    times: Annotated[int, typer.Option(help="How often the folder is read as one epoch.")] = 4,
    only: Annotated[list[str] | None, typer.Option(help="These variants alone (repeatable).")] = None,
    smallest: Annotated[bool, typer.Option(help="One turn; writes nothing.")] = False,
) -> None:
    """Prints the table and, with all variants, writes benchmarks/results/ingest.json."""
    rounds, times = (1, 1) if smallest else (rounds, times)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ["RAY_DATA_DISABLE_PROGRESS_BARS"] = "1"
    torch.set_num_threads(1)
    schema = Schema.load(str(Path(data).parent / "schema.yaml"))
    once = scan(data, ReadPlan(schema))
    dataset = repeated(once, times)
    chosen = {name: VARIANTS[name] for name in only or VARIANTS}
    turns: dict[str, list[Measured]] = {name: [] for name in chosen}
    memory = {}
    pool = ProcessPoolExecutor(readers, mp_context=get_context("spawn"))
    with ray_session(num_cpus=readers + 1):
        for size in (once, repeated(once, 8)):  # first, before other variants leave theirs behind
            memory[size.rows] = most_memory(VARIANTS["stream"], size, schema, readers)
        with pool:
            for turn in range(rounds + 1):
                for name, variant in chosen.items():
                    measured = measure(variant, dataset, schema, readers, pool)
                    if turn:  # the first starts processes
                        turns[name].append(measured)
        waits = waiting(repeated(once, 4 * times), readers, cpu_seconds)
        starts = first_batches(once, schema, readers, rounds, (1000,) if smallest else GROUP_ROWS)
    tell(waits, starts)
    others = {"waiting_cpu_ms_per_s": waits, "first_batch_s": starts}
    write = set(chosen) == set(VARIANTS) and not smallest
    show(dataset.rows, readers, turns, memory, others if write else None)


def show(
    rows: int,
    readers: int,
    turns: dict[str, list[Measured]],
    memory: dict[int, float],
    others: dict | None,
) -> None:
    """Prints the table; with `others` (further figures), writes the results."""
    table = Table(title=f"{rows:,} rows, batch {BATCH}, {readers} reading process(es)")
    for column in ("variant", "rows/s", "of decode", "CPU-µs/row", "consumer CPU"):
        table.add_column(column, justify="left" if column == "variant" else "right", no_wrap=True)
    middle = {
        name: Measured(
            *(statistics.median(getattr(m, f) for m in each) for f in Measured.__dataclass_fields__)
        )
        for name, each in turns.items()
    }
    rate = {name: m.rows_per_s for name, m in middle.items()}
    for name, m in middle.items():
        share = f"{m.rows_per_s / rate['decode']:.2f}" if "decode" in rate else ""
        table.add_row(name, f"{m.rows_per_s:,.0f}", share, f"{m.cpu_us:.2f}", f"{m.consumer:.0%}")
    console = Console()
    console.print(table)
    small, large = memory.items()
    console.print(
        f"most memory of the stream, all processes and object store: {small[1]:,.0f} MiB for {small[0]:,} "
        f"rows, {large[1]:,.0f} MiB for {large[0]:,}"
    )
    if others is not None:
        values = {
            "rows": rows,
            "readers": readers,
            "rows_per_s": rate,
            "cpu_us_per_row": {name: m.cpu_us for name, m in middle.items()},
            "consumer_cpu": {name: m.consumer for name, m in middle.items()},
            "stream_memory_mib": memory,
            **others,
            "ratios": {
                "stream_over_decode": rate["stream"] / rate["decode"],
                "stream_over_numpy_collate": rate["stream"] / rate["numpy_collate"],
            },
        }
        RESULTS.parent.mkdir(exist_ok=True)
        keep(RESULTS, values)


if __name__ == "__main__":
    typer.run(main)
