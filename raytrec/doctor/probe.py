"""What a rank looks at to know its rates: products, memory, lookups, collectives, steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.planning.rates import COLLECTIVES

BAGS, TABLE_BYTES, ID_SETS = 512, 64 << 20, 24
DENSE_BYTES = 4 * (3 + 2 + 3)  # of a value in Adagrad's dense update, as loads.loads_of counts them
DENSE = "dense"
# A table's optimizer → FBGEMM's name for it.
UPDATES = {"rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD", "adagrad": "EXACT_ADAGRAD", "sgd": "EXACT_SGD"}
# Of lookups: (way of updating, tables, columns, ids of a bag). Bytes, ids and shards follow from these.
LOOKUPS = tuple(
    (way, *shape) for way in (*UPDATES, DENSE) for shape in ((1, 16, 16), (8, 16, 1), (8, 64, 1), (1, 64, 16))
)
# A small matrix of a batched product, as DLRM has them of 27 vectors with 16 columns.
SMALL_SHAPE, SMALL_FLOPS = (27, 16), 2 * 27 * 27 * 16
SMALL, LARGE = 256, 1 << 20  # values of a collective
# Steps with next to no arithmetic, (features, ways of sharding): what each of these takes of the host.
TINY_STEPS = ((2, 1), (26, 1), (26, 2))
CLOCKS = ("s", "cpu s")
Sample = dict[str, float]


class Probe:
    """Measures rates in a rank; making it and each sample are collectives.

    Args:
        device: of the rank.
    """

    def __init__(self, device: torch.device):
        from raytrec.planning.dense_work import Counter

        self._device, self._world = device, dist.get_world_size()
        made = torch.Generator(device="cpu").manual_seed(dist.get_rank())

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=made).to(device)

        big = 1 if device.type == "cpu" else 16
        self._x, self._w = values(512 * big, 512).requires_grad_(), values(256 * big, 512).requires_grad_()
        self._layers = [values(512, 512).requires_grad_() for _ in range(4)]
        self._large = torch.optim.Adagrad([values(1 << 24).requires_grad_()])
        self._tensors = torch.optim.Adagrad([values(8).requires_grad_() for _ in range(16)])
        self._matrices = values(512, *SMALL_SHAPE)
        self._small = [values(8, 8).requires_grad_() for _ in range(16)]
        with Counter() as counter:
            self._many_small()
        self._launches = counter.launches
        with Counter() as self._of_layers:
            self._run_layers()
        self._lookups = {shape: _Lookup(*shape, device, made) for shape in LOOKUPS}
        self._steps = {shape: _TinyStep(*shape, self._world, device) for shape in TINY_STEPS}
        if dist.get_world_size() == 1:
            self._steps.pop(TINY_STEPS[-1], None)  # ways of sharding are the same there
        self._copy_host = torch.empty(1 << 24, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def sample(self) -> Sample:
        """One look at everything."""
        out: Sample = {"on_gpu": float(self._device.type == "cuda")}
        products = 3 * 2.0 * self._x.shape[0] * self._x.shape[1] * self._w.shape[0]
        for name in ("fp32", "bf16"):
            out[f"matrix {name}"] = products / self._compute(partial(self._layer, bf16=name == "bf16"))
        out["matrix tf32"] = out["matrix fp32"]
        if self._device.type == "cuda":
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            out["matrix tf32"] = products / self._compute(self._layer)
            torch.set_float32_matmul_precision(before)
            there = self._copy_host.to(self._device)
            copy = self._compute(lambda: there.copy_(self._copy_host, non_blocking=True))
            out["host link"] = self._copy_host.numel() / copy
        out["layers"] = self._compute(self._run_layers, 4)
        (large,) = self._large.param_groups[0]["params"]
        out["stream"] = DENSE_BYTES * large.numel() / self._compute(partial(self._update, self._large), 1)
        tensors = len(self._tensors.param_groups[0]["params"])
        out["tensor"] = self._compute(partial(self._update, self._tensors)) / tensors
        for shape, lookup in self._lookups.items():
            out[f"lookup {shape}"] = self._compute(lookup, 1)
        batched = partial(torch.bmm, self._matrices, self._matrices.transpose(1, 2))
        out["small"] = self._compute(batched) / len(self._matrices)
        out["launch"] = self._compute(self._many_small) / self._launches
        work = self._of_layers
        arithmetic = work.flops / out["matrix fp32"] + work.launches * out["launch"]
        out["copy"] = work.bytes / max(0.1 * out["layers"], out["layers"] - arithmetic)
        if self._world > 1:
            for kind in COLLECTIVES:
                for size in (SMALL, LARGE):
                    out |= _both(f"{kind} {size}", self._collective(kind, size))
        for layout, step in self._steps.items():
            out |= _both(f"step {layout}", step.seconds())
        return out

    def _run_layers(self) -> None:
        """Some layers as models have them, forward and backward. What they take beyond products and launches
        is for reading, writing and getting memory."""
        kept = [self._x]
        for weights in self._layers:
            kept.append(torch.nn.functional.linear(kept[-1], weights).relu())
        torch.cat(kept, 1).square().mean().backward()
        self._x.grad = None
        for weights in self._layers:
            weights.grad = None

    def _layer(self, bf16: bool = False) -> None:
        """A layer's products, forward and backward."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=bf16):
            given = torch.nn.functional.linear(self._x, self._w)
        given.backward(given.detach())
        self._x.grad = self._w.grad = None

    def _update(self, optimizer: torch.optim.Optimizer) -> None:
        """A dense update, whose gradients are made for it."""
        for weights in optimizer.param_groups[0]["params"]:
            weights.grad = torch.ones_like(weights)
        optimizer.step()
        optimizer.zero_grad()

    def _many_small(self) -> None:
        x = self._small[0]
        for weights in self._small:
            x = (x @ weights).relu()
        x.sum().backward()

    def _compute(self, call: Callable[[], object], times: int = 8) -> float:
        """Seconds of the device that a call takes."""
        took = [self._timed(call, times) for _ in range(3)]
        return min(each[self._device.type == "cpu"] for each in took)

    def _timed(self, call: Callable[[], object], times: int) -> tuple[float, float]:
        """(seconds, seconds of CPU) of a call."""
        call()
        self._wait()
        began, used = perf_counter(), process_time()
        for _ in range(times):
            call()
        self._wait()
        return (perf_counter() - began) / times, (process_time() - used) / times

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _collective(self, kind: str, size: int) -> tuple[float, float]:
        """(seconds, seconds of CPU) of one of `size` values."""
        each = size // self._world
        whole, part = (torch.ones(n, device=self._device) for n in (each * self._world, each))
        other = torch.empty_like(whole)
        calls: dict[str, Callable[[], object]] = {
            "all_to_all": lambda: dist.all_to_all_single(other, whole),
            "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.split(each))),
            "all_gather": lambda: dist.all_gather_into_tensor(other, part),
            "all_reduce": lambda: dist.all_reduce(whole),
        }
        dist.barrier()
        return self._timed(calls[kind], 6)


def _both(name: str, took: tuple[float, float]) -> Sample:
    return {f"{name}, {clock}": seconds for clock, seconds in zip(CLOCKS, took, strict=True)}


class _Lookup:
    """FBGEMM's lookup and update of some tables, as TorchRec calls it."""

    def __init__(self, way: str, tables: int, dim: int, length: int, device: torch.device, made: Any):
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            DenseTableBatchedEmbeddingBagsCodegen,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        rows, on_cpu = TABLE_BYTES // (4 * dim * tables), device.type == "cpu"
        places = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        if not on_cpu:
            places = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        if way == DENSE:  # whose gradients are as large as its tables: small ones
            rows = 1024
            self._kernel: Any = DenseTableBatchedEmbeddingBagsCodegen([(rows, dim)] * tables, use_cpu=on_cpu)
        else:
            self._kernel = SplitTableBatchedEmbeddingBagsCodegen(
                [(rows, dim, *places)] * tables, optimizer=EmbOptimType[UPDATES[way]], device=device
            )
        bags = BAGS * tables
        # Other ids each time, as in training: rows of the last ones are in caches.
        drawn = torch.randint(0, rows, (ID_SETS, bags * length), generator=made).to(device)
        self._ids = cycle(drawn.unbind())
        self._offsets = torch.arange(0, bags * length + 1, length).to(device)
        self._gradient = torch.full((BAGS, dim * tables), 1e-3, device=device)

    def __call__(self) -> None:
        self._kernel(next(self._ids), self._offsets).backward(self._gradient)


def lookup_shape(way: str, tables: int, dim: int, length: int) -> tuple[float, float, float]:
    """Bytes at random places, ids and shards of `_Lookup`, as loads.loads_of counts them."""
    bags, row, state = BAGS * tables, 4.0 * dim, 0.0
    if way != DENSE:
        state = dim * optimizer_of(way).bytes_per("value") + optimizer_of(way).bytes_per("row")
    touched = bags * (length * (row + row + 2 * (row + state)) + 2 * row)
    return touched, float(bags * length), float(tables)


class _TinyStep:
    """raytrec's step of a DLRM whose arithmetic is next to nothing."""

    def __init__(self, features: int, ways: int, world: int, device: torch.device):
        from raytrec.checks.parity.batches import cuts, local_batch, random_batches
        from raytrec.worker.build import build_step

        config, schema = tiny_run(features, ways, world, device.type)
        self._step, _ = build_step(config, schema, device)
        (global_batch,) = random_batches(schema, config.data.global_batch_size, 1, seed=0)
        bounds = cuts(len(global_batch), world, "equal")
        self._batch = local_batch(global_batch, schema, bounds, dist.get_rank())

    def seconds(self, steps: int = 8) -> tuple[float, float]:
        """(seconds, seconds of CPU) of a step in steady state."""
        dist.barrier()
        batches = (self._batch for _ in range(steps))
        times = [(perf_counter(), process_time()) for _ in self._step.train(batches, steps)]
        seconds, of_cpu = np.median(np.diff(times, axis=0), axis=0)
        return float(seconds), float(of_cpu)


def tiny_run(features: int, ways: int, world: int, device: str) -> tuple[RunConfig, Schema]:
    """Configuration and schema of `_TinyStep`."""
    names = [f"f{i}" for i in range(features)]
    schema = Schema.parse(
        {
            "labels": ["y"],
            "dense": ["d"],
            "sparse": {name: {"table": name} for name in names},
            "tables": {name: {"rows": 64, "dim": 4} for name in names},
        },
        "rates",
    )
    kinds = {name: "row_wise" if ways > 1 and place % 2 else "table_wise" for place, name in enumerate(names)}
    config = load_config(
        {
            "data": {"train": "unused/train", "global_batch_size": 8 * world},
            "scaling": {"num_workers": world, "device": device},
            "model": {"name": "dlrm", "bottom_mlp": [4], "top_mlp": [4]},
            "plan": {"tables": {name: {"sharding_type": kind} for name, kind in kinds.items()}},
        }
    )
    return config, schema
