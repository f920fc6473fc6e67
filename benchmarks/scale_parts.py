"""Parts of benchmarks/scale.py, each in a separate process: PART RANKS TABLES FOLDER → measurements as JSON.

`plan` must run first, because it writes the plan from which the other parts read the tables of each rank.
`records` writes the run folder that `mlflow` and `report` read.
"""

from __future__ import annotations

import json
import pickle
import random
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from raytrec.cluster.session import ray_session
from raytrec.common.messages import PHASES, RankLine, compute_heartbeat_interval
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.tracking.history import select_recorded_ranks

DIM, IDS = 64, 20
RECORDS = 3  # number of records in the run folder
WEIGHT, STATE = 4 * DIM, 4  # bytes of a row's weights, and of its row-wise Adagrad state
PARTS: dict[str, Callable[..., dict]] = {}


def part(function: Callable[..., dict]) -> Callable[..., dict]:
    """Register a function as the part with the function's name (a decorator)."""
    PARTS[function.__name__] = function
    return function


def schema_of(world: int, tables: int) -> Schema:
    """Return a schema with tables of 100 to 5e8 rows that take at most a quarter of the GPUs' memory."""
    rows = np.exp(np.random.default_rng(0).uniform(np.log(1e3), np.log(5e8), tables))
    rows = np.maximum(100, rows * min(1.0, 20e9 * world / WEIGHT / rows.sum())).astype(int)
    values = {
        "labels": ["label"],
        "dense": ["dense"],
        "sparse": {f"f{i}": {"table": f"t{i}"} for i in range(tables)},
        "tables": {f"t{i}": {"rows": int(rows[i]), "dim": DIM} for i in range(tables)},
    }
    return Schema.parse(values, "scale")


def config_of(world: int) -> RunConfig:
    """Return the default configuration with a batch of 1,024 rows per GPU."""
    return RunConfig.model_validate({"data": {"train": "x", "global_batch_size": 1024 * world}})


def planned(folder: Path) -> dict[str, list[int]]:
    """Return a mapping from table to the ranks that hold a part of the table."""
    return json.loads((folder / "ranks.json").read_text())


class Cpu:
    """Context manager that measures the CPU seconds that this process uses in a block."""

    def __enter__(self) -> Cpu:
        self._began = time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = round(time.process_time() - self._began, 4)


def peak_mib() -> int:
    """Return the peak resident memory of this process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


@part
def plan(world: int, tables: int, folder: Path) -> dict:
    """Measure the planner on all tables, and write the ranks of each table."""
    from raytrec.planning.dry_run import dry_run
    from raytrec.planning.machines import Cluster

    dry_run(config_of(1), schema_of(1, 2), Cluster(1, 1, 80, 1280, 1e6))  # the planner imports TorchRec when it runs
    start = peak_mib()
    with Cpu() as cpu:
        hosts, gpus = max(1, world // 8), min(8, world)
        found = dry_run(config_of(world), schema_of(world, tables), Cluster(hosts, gpus, 80, 1280, 1e6))
    (folder / "ranks.json").write_text(json.dumps({table.table: table.ranks for table in found}))
    shards = sum(len(table.ranks) for table in found)
    cut = sum(len(table.ranks) > 1 for table in found)
    return {"seconds": cpu.seconds, "memory_mib": peak_mib() - start, "shards": shards, "tables_cut": cut}


@part
def cursor(world: int, tables: int, folder: Path) -> dict:
    """Measure the cursor's work for an epoch of a billion rows on a rank, and the arithmetic of a step."""
    from raytrec.data.fragments import Dataset, RowGroup
    from raytrec.data.order import Order

    data = Dataset("d", tuple(RowGroup(f"f{i}", 0, 1_000_000) for i in range(1000)), form=None)
    order, steps = Order(1024 * world, max(64, 2 * world)), 1000
    with Cpu() as opening:
        items = order.items(data, 0, world // 2, world, 10)
    with Cpu() as stepping:
        for step in range(steps):
            order.shares(data.rows, step, world // 2, world)
            order.padded_rows(data.rows, step, world)
    return {"epoch_s": opening.seconds, "items": len(items), "us_a_step": 1e6 * stepping.seconds / steps}


@part
def beats(world: int, tables: int, folder: Path) -> dict:
    """Measure the coordinator's actor, with heartbeats from all ranks sent as fast as it responds."""
    import ray

    from raytrec.driver.coordinator import start_coordinator

    rounds = max(4, 2048 // world)
    with ray_session(num_cpus=1):
        actor = start_coordinator(60, 600)
        began = time.monotonic()
        ray.get([actor.enter.remote("a", rank, world, rank, "127.0.0.1", "") for rank in range(world)])
        entered = time.monotonic() - began
        process = _process_of(actor)
        before, began = sum(process.cpu_times()[:2]), time.monotonic()
        for tick in range(rounds):
            ray.get([actor.beat.remote("a", r, tick, tick, "step", "", False) for r in range(world)])
        wall, cpu = time.monotonic() - began, sum(process.cpu_times()[:2]) - before
        memory = process.memory_info().rss >> 20
    cpu_per_beat = cpu / (rounds * world)
    return {
        "wall_s_until_all_have_entered": round(entered, 3),
        "us_a_heartbeat": 1e6 * cpu_per_beat,
        "answered_a_second": rounds * world / wall,
        "sent_a_second": world / compute_heartbeat_interval(world),
        "share_of_a_core": cpu_per_beat * world / compute_heartbeat_interval(world),
        "actor_mib": memory,
    }


def _process_of(actor: Any) -> Any:
    """Return the actor's process once the actor responds, found by the class name in its command line."""
    import psutil
    import ray

    ray.get(actor.step.remote())
    tree = psutil.Process().children(recursive=True)
    return next(p for p in tree if "Coordinator" in " ".join(p.cmdline()))


def entry(draw: random.Random, rows: int) -> dict[str, Any]:
    """Return random statistics for a shard, as in worker.statistics."""
    shares = ("dead_share", "collision_rate", "unique_ratio", "changed_share")
    norms = ("weight_norm", "gradient_norm", "update_norm", "state_norm", "max_abs", "row_norm_max")
    some = {name: draw.random() for name in (*shares, *norms, "row_norm_p05", "row_norm_p50", "row_norm_p95")}
    counts = {"rows": rows, "columns": DIM, "lookups": 10**6, "lookup_bytes": 10**8, "touched_rows": 9999}
    sizes = {"weight_bytes": rows * WEIGHT, "state_bytes": rows * STATE, "read_ids": 10**6}
    bins = {"row_norm_counts": [draw.randint(0, 99) for _ in range(30)]}
    return {**counts, **sizes, **some, **bins, "replicated": False, "device": "cuda:0"}


def lines_of(world: int, ranks: dict[str, list[int]], step: int) -> list[RankLine]:
    """Return the lines that recorded ranks send at a step."""
    draw, rank_tables = random.Random(step), defaultdict(dict)
    for table, on in ranks.items():
        for rank in on:
            rank_tables[rank][table] = entry(draw, 1000)
    out = []
    for rank in select_recorded_ranks(world):
        line = RankLine(
            step=step,
            first_step=step - 100,
            unix_s=1e9 + step,
            rank=rank,
            world=world,
            attempt=1,
            steps=100,
            seconds=5.0,
            phases_s=dict.fromkeys(PHASES, 0.5),
            system=dict.fromkeys(("cpu_percent", "rss_bytes", "gpu_percent", "gpu_memory_bytes"), 10.0**10),
            tables=rank_tables[rank],
        )
        out.append(line)
    return out


@part
def records(world: int, tables: int, folder: Path) -> dict:
    """Measure the transfer of records from the actor's queue to the run folder."""
    from raytrec.driver.coordinator import start_coordinator
    from raytrec.driver.recorder import Record, Watch

    ranks, run = planned(folder), folder / "run"
    run.mkdir()
    with ray_session(num_cpus=1):
        actor = start_coordinator(60, 600)
        watch = Watch(SimpleNamespace(warn=lambda text: None), Record(run, lambda text: None))
        process = _process_of(actor)
        start_bytes, began, cpu_s, growth = process.memory_info().rss, time.monotonic(), 0.0, 0
        with watch.reading(actor):
            for record in range(1, RECORDS + 1):
                lines = lines_of(world, ranks, 100 * record)
                sent, before_cpu = time.monotonic(), time.process_time()
                for line in lines:
                    actor.put.remote(line)
                while (run / "ranks.jsonl").exists() is False or _lines(run) < record * len(lines):
                    growth = max(growth, process.memory_info().rss - start_bytes)
                    time.sleep(0.02)
                cpu_s += time.process_time() - before_cpu
                began = time.monotonic() - sent
    size = (run / "ranks.jsonl").stat().st_size
    (run / "config.yaml").write_text(config_of(world).to_yaml())
    return {
        "messages_a_record": len(lines),
        "kb_a_record": size / RECORDS / 1e3,
        "kb_of_largest_line": max(map(len, (run / "ranks.jsonl").read_bytes().splitlines())) / 1e3,
        "driver_s_a_record": cpu_s / RECORDS,
        "wall_s_of_last_record": began,
        "actor_grows_mib": growth >> 20,
    }


def _lines(run: Path) -> int:
    with open(run / "ranks.jsonl", "rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


@part
def mlflow(world: int, tables: int, folder: Path) -> dict:
    """Measure the transfer of records from the run folder to an SQLite store."""
    from raytrec.tracking.mlflow_records import RecordReader
    from raytrec.tracking.store import Store

    feed = RecordReader(folder / "run")
    config = config_of(world)
    config.tracking.uri = f"sqlite:///{folder}/mlflow.db"
    store = Store(config, folder / "run")
    store.open()
    metrics = calls = 0
    with Cpu() as cpu:
        while batch := feed.next_batch():
            store.write_metrics(batch.records)
            count = sum(len(record.figures) for record in batch.records)
            metrics, calls = metrics + count, calls + -(-count // 1000)
            feed.mark_batch_written()
    return {
        "metrics_a_record": metrics // RECORDS,
        "calls_a_record": calls / RECORDS,
        "seconds_a_record": cpu.seconds / RECORDS,
    }


@part
def report(world: int, tables: int, folder: Path) -> dict:
    """Measure reading the run folder and building the report."""
    from raytrec.report.report import build
    from raytrec.tracking.run_folder import RunFolder

    with Cpu() as reading:
        RunFolder.read(folder / "run")
    with Cpu() as drawing:
        page, _ = build(folder / "run")
    sizes = {"page_mb": page.stat().st_size / 1e6, "memory_mib": peak_mib()}
    return {"read_s": reading.seconds, "whole_s": drawing.seconds, **sizes}


@part
def checkpoint(world: int, tables: int, folder: Path) -> dict:
    """Measure rank 0's global save plan, the commit, reading the index, and removing old checkpoints."""
    import torch
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
    from torch.distributed.checkpoint.storage import WriteResult

    from raytrec.checkpoint import files
    from raytrec.checkpoint.index import INDEX, read_index
    from raytrec.checkpoint.storage import ShardWriter

    rows, properties = 1000, TensorProperties(dtype=torch.float32)
    items: dict[int, list[WriteItem]] = defaultdict(list)
    for table, on in planned(folder).items():
        for kind, columns in (("weight", (DIM,)), ("sum", ())):
            whole = torch.Size([rows * len(on), *columns])
            for number, rank in enumerate(on):
                offsets = torch.Size([rows * number, *(0 for _ in columns)])
                chunk = ChunkStorageMetadata(offsets, torch.Size([rows, *columns]))
                index = MetadataIndex(f"tables/{table}/{kind}", offsets)
                data = TensorWriteData(chunk, properties, whole)
                items[rank].append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
    plans = [SavePlan(items[rank]) for rank in range(world)]
    sent = [len(pickle.dumps(plan)) for plan in plans]
    root = folder / "checkpoints"
    target = root / "step-0000000100"
    about = {"data": "x" * 64, "schema": schema_of(world, tables).to_yaml(), "config": {}}
    writer, planner = ShardWriter(str(target), "scale", about), DefaultSavePlanner(flatten_state_dict=False)
    writer.set_up_storage_writer(True)
    planner.set_up_planner({}, None, True)
    with Cpu() as planning:
        plans, metadata = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
    results = []
    for plan in plans:
        end, of_rank = 0, []
        for item in plan.items:
            chunk = item.tensor_data.chunk
            size = 4 * chunk.sizes.numel()
            place = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": plan.storage_data}
            of_rank.append(WriteResult(item.index, size, {**place, "start": end, "crc32": [0]}))
            end += -(-size // 64) * 64
        results.append(of_rank)
        if of_rank:
            with open(target / plan.storage_data, "wb") as file:
                file.truncate(of_rank[-1].storage_data["start"] + of_rank[-1].size_in_bytes)
    with Cpu() as committing:
        writer.finish(metadata, results)
    with Cpu() as reading:
        read_index(str(target))
    for step in (200, 300):
        other = root / f"step-{step:010d}"
        other.mkdir()
        (other / INDEX).write_bytes((target / INDEX).read_bytes())
    files.keep(str(root), 3, 0, None)
    (root / f"step-{300:010d}" / INDEX).write_bytes((target / INDEX).read_bytes())  # as a save does
    with Cpu() as keeping:
        files.keep(str(root), 3, 0, None)
    return {
        "chunks": sum(map(len, items.values())),
        "kb_a_rank_sends": sum(sent) / world / 1e3,
        "mb_at_rank_0": sum(sent) / 1e6,
        "plan_s": planning.seconds,
        "commit_s": committing.seconds,
        "index_mb": (target / INDEX).stat().st_size / 1e6,
        "read_index_s": reading.seconds,
        "keep_last_s": keeping.seconds,
        "memory_mib": peak_mib(),
    }


if __name__ == "__main__":
    name, world, tables, place = sys.argv[1:]
    print(json.dumps(PARTS[name](int(world), int(tables), Path(place))))
