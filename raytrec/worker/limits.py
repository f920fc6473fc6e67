"""What this rank's machine can do at most, beside what a step asks of it; measured once, after training.

The work of a step is counted, and short measurements say how fast the same kind of work is by itself: matrix
products of the dense model's shapes, random rows of a table, the collectives alone. Some 0.3 s in all.
Nothing that has been trained is changed. (report/bounds.py puts both together.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.embeddings.planner.footprint import MMAP_KERNEL
from raytrec.embeddings.tables import Shard, Table
from raytrec.worker.numerics import Numerics
from raytrec.worker.step import Head

DENSE_S = 0.1  # of dense work at most that is done to count it
MATRICES_S = 0.12  # of matrix products
GATHERED = 2**24  # bytes of random rows, in pieces whose copies stay in the processor's caches
PIECE = 4096  # rows
LARGEST = 2**25  # bytes of a collective that is measured; of a larger one the time is as much longer
BY_ROWS = ("row_wise", "table_row_wise", "grid_shard")  # every rank has a part of every bag's sum

aten = torch.ops.aten
Shape = tuple[int, int, int, int]  # n products of [m, k] by [k, p]


@dataclass(frozen=True)
class Probe:
    """A step's work on this rank.

    Attributes:
        pooled: feature → shape of its pooled embeddings.
        batch: the data.batch.Batch of a training step.
        dense_s: seconds of a step's dense work.
        table_bytes: that a step reads and writes in this rank's shards.
    """

    pooled: dict[str, torch.Size]
    batch: Any
    dense_s: float
    table_bytes: float


class Limits:
    """Measures the limits of this rank and of its group.

    Args:
        head: of the model. tables: embeddings.tables.tables.
    """

    def __init__(
        self,
        config: RunConfig,
        schema: Schema,
        head: Head,
        tables: Mapping[str, Table],
        device: torch.device,
    ):
        self._head, self._tables, self._device = head, tables, device
        self._table_of = {name: spec.table for name, spec in schema.sparse.items()}
        self._by_id = resolve_features(schema, config.model).tables_by_id
        self._numerics = Numerics(config.train, device)
        self._dtype = torch.bfloat16 if config.train.matmul == "bf16" else torch.float32

    def measure(self, probe: Probe) -> dict[str, float]:
        """Means over the ranks of what bounds.find_bound takes; a collective.

        A figure that cannot be had on some rank is left out.
        """
        own: dict[str, float] = {"table_bytes": probe.table_bytes}
        # What fails here, such as a user's model that wants whole batches, must not keep others waiting.
        for measurement in (self._dense, self._rows):
            with suppress(Exception):
                own |= measurement(probe)
        own |= self._exchange(probe)
        everyone: list[dict[str, float]] = [{}] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        return {
            name: sum(each[name] for each in everyone) / len(everyone)
            for name in own
            if all(name in each for each in everyone)
        }

    def _dense(self, probe: Probe) -> dict[str, float]:
        rows = len(probe.batch.labels)
        some = max(1, min(rows, int(rows * DENSE_S / max(probe.dense_s, 1e-9))))
        with self._numerics():
            flop, shapes = count_flop(self._head, probe.pooled, probe.batch, some, self._device)
            rate = matrix_rate(shapes, self._dtype, self._device)
        dense = sum(p.nbytes for p in self._head.parameters())
        by_torch = sum(_table_bytes(t) for t in self._tables.values() if t.kernel == "dense")
        return {
            "dense_flop": flop * rows / some,
            "matrix_flop_per_s": rate,
            "optimizer_table_share": by_torch / max(1, by_torch + dense),
        }

    def _rows(self, probe: Probe) -> dict[str, float]:
        # Of a file, which is read into memory as it is used, the first figure would be the disk's.
        tables = [table for table in self._tables.values() if table.kernel != MMAP_KERNEL]
        shards = [shard for table in tables for shard in table.weight.local]
        largest = max(shards, key=lambda shard: shard.values.nbytes)
        return {"gather_bytes_per_s": gather_rate(largest, self._device)}

    def _exchange(self, probe: Probe) -> dict[str, float]:
        """Seconds of a step's collectives by themselves, one after the other."""
        world = dist.get_world_size()
        if world == 1:
            return {"exchange_bytes": 0.0, "exchange_s": 0.0}
        sizes: list[dict[str, int]] = [{}] * world
        dist.all_gather_object(sizes, self._exchanged(probe, world))
        ids, pooled, dense = (max(each[name] for each in sizes) for name in ("ids", "pooled", "dense"))
        seconds = self._alone(_all_to_all, ids) + 2 * self._alone(_all_to_all, pooled)
        return {
            "exchange_bytes": float(ids + 2 * pooled + dense),
            "exchange_s": seconds + self._alone(_all_reduce, dense),
        }

    def _exchanged(self, probe: Probe, world: int) -> dict[str, int]:
        """Bytes that this rank hands to a step's collectives, its own part included."""
        ids = pooled = 0
        for key, count in zip(probe.batch.sparse.keys(), probe.batch.sparse.length_per_key(), strict=True):
            table = self._tables[self._table_of[key]]
            if table.sharding == "data_parallel":
                continue
            ids += 8 * count
            if self._table_of[key] in self._by_id:
                pooled += 4 * count * table.shape[1]  # each id's vector comes from the rank that has it
            else:
                pooled += 4 * probe.pooled[key].numel() * (world if table.sharding in BY_ROWS else 1)
        dense = sum(p.nbytes for p in self._head.parameters())
        copies = sum(_table_bytes(t) for t in self._tables.values() if t.weight.replicated)
        return {"ids": ids, "pooled": pooled, "dense": dense + copies}

    def _alone(self, collective: Callable[[torch.Tensor], None], size: int) -> float:
        """Seconds of a collective of so many bytes."""
        if not size:
            return 0.0
        world = dist.get_world_size()
        values = -(-min(size, LARGEST) // (4 * world)) * world
        given = torch.zeros(values, device=self._device)
        return fastest(lambda: collective(given), self._device, 3) * max(1.0, size / LARGEST)


def count_flop(
    head: Head, pooled: Mapping[str, torch.Size], batch: Any, rows: int, device: torch.device
) -> tuple[float, Counter[Shape]]:
    """Floating-point operations of forward and backward of the dense model, and its matrix products.

    Args:
        pooled, batch: as in Probe.
        rows: of the batch that are taken.
    """
    shapes: Counter[Shape] = Counter()

    def product(of: int) -> Callable:
        """A formula of FlopCounterMode, which gives it shapes; `of`: of the first matrix in the arguments."""

        def flop(*given: Any, **_: Any) -> int:
            (*n, m, k), p = given[of], given[of + 1][-1]
            shapes[(n or [1])[0], m, k, p] += 1
            return 2 * (n or [1])[0] * m * k * p

        return flop

    formulas = {aten.mm: product(0), aten.bmm: product(0), aten.addmm: product(1), aten.baddbmm: product(1)}
    sizes = {name: (rows, *shape[1:]) for name, shape in pooled.items()}
    given = {name: torch.rand(size, device=device, requires_grad=True) for name, size in sizes.items()}
    trained, was = [p for p in head.parameters() if p.requires_grad], head.training
    try:
        head.eval()  # no running means change, no dropout
        with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
            # Views, because the counter takes no leaves as inputs of modules (torch 2.13.0, autograd.grad).
            inputs = {name: values.view_as(values) for name, values in given.items()}
            loss, _ = head.loss_of_rows(inputs, batch, slice(0, rows), alone=True)
            # Not backward(), which would have DistributedDataParallel add up the gradients of all ranks.
            torch.autograd.grad(loss, [*trained, *given.values()], allow_unused=True)
    finally:
        head.train(was)
    return float(counter.get_total_flops()), shapes


def matrix_rate(shapes: Mapping[Shape, int], dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of matrix products of these shapes, those with the most first."""
    flop = {shape: 2.0 * shape[0] * shape[1] * shape[2] * shape[3] * n for shape, n in shapes.items()}
    done = seconds = 0.0
    until = perf_counter() + MATRICES_S
    for shape in sorted(flop, key=lambda each: -flop[each]):
        n, m, k, p = shape
        left, right = (torch.rand(n, *size, device=device).to(dtype) for size in ((m, k), (k, p)))
        product = (lambda a=left[0], b=right[0]: a @ b) if n == 1 else (lambda a=left, b=right: a @ b)
        seconds += fastest(product, device, 2) * shapes[shape]
        done += flop[shape]
        if perf_counter() > until:
            break
    return done / seconds


def gather_rate(shard: Shard, device: torch.device) -> float:
    """Bytes a second of random rows of a shard: of the rows that are read."""
    rows, width = len(shard.values), shard.values[0].nbytes
    pieces = max(1, GATHERED // (PIECE * width))
    ids = torch.randint(rows, (pieces, PIECE), device=shard.values.device)

    def gather() -> None:
        for piece in ids:
            shard.read(piece)

    return ids.numel() * width / fastest(gather, device, 2)


def fastest(work: Callable[[], object], device: torch.device, times: int) -> float:
    """Seconds of the fastest of some runs of what was run once before; on a GPU, between CUDA events."""
    work()
    return min(_seconds(work, device) for _ in range(times))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        began = perf_counter()
        work()
        return max(perf_counter() - began, 1e-9)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    work()
    last.record()
    last.synchronize()
    return max(first.elapsed_time(last) / 1e3, 1e-9)


def _all_to_all(values: torch.Tensor) -> None:
    dist.all_to_all_single(torch.empty_like(values), values)


def _all_reduce(values: torch.Tensor) -> None:
    dist.all_reduce(values)


def _table_bytes(table: Table) -> int:
    return sum(shard.values.nbytes for shard in table.weight.local)


def bytes_of_step(tables: Mapping[str, Mapping[str, Any]], steps: int) -> float:
    """Bytes a step that lookups and updates read and write in a rank's shards.

    Args:
        tables: of a RankLine: of `steps` steps.

    Each id's row is read; each distinct row is read and written once more with its optimizer state. Of a copy
    on every rank the optimizer reads gradient, weights and state whole, and writes both and zeros.
    """
    total = 0.0
    for figures in tables.values():
        read, weights, state = (figures[f"{part}_bytes"] for part in ("lookup", "weight", "state"))
        total += read
        if figures["replicated"]:
            total += steps * (4 * weights + 2 * state)
        elif weights:
            total += 2 * read * (figures.get("unique_ratio") or 1.0) * (1 + state / weights)
    return total / max(1, steps)
