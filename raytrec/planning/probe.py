"""Measured rates of this machine's ranks: samples taken by each rank, and the rates computed from them.

All ranks take the same samples at the same time, so they share caches, memory and links as in a run. Work on
CPU is measured in CPU seconds, and collectives in elapsed seconds. The host time of a step is not measured but taken
from `Rates.for_cpu` or `Rates.for_gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from itertools import cycle
from statistics import median
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from raytrec.embeddings.optimizers import OPTIMIZERS, find_optimizer
from raytrec.planning.dense_work import OperatorCounter
from raytrec.planning.rates import COLLECTIVES, DENSE, PRECISIONS, LookupRates, Rates

BAGS, TABLE_BYTES, NUM_ID_SETS = 512, 64 << 20, 24
# Bytes per value in Adagrad's dense update, as counted by loads.LoadCounter but without copies of gradients.
DENSE_UPDATE_BYTES = 4 * (3 + 2 + 3)
# Shapes of lookups: (tables, columns, ids per bag). The shape determines the numbers of bytes, ids and shards.
LOOKUP_SHAPES = ((1, 16, 16), (8, 16, 1), (8, 64, 1), (1, 64, 16))
COLLECTIVE_VALUES = (256, 1 << 20)  # numbers of values in small and large collectives
ROUNDS = 7
Sample = dict[str, float]  # name of a measurement → rate, or seconds of a lookup or collective
Lookup = tuple[str, int, int, int]  # update type, followed by one of LOOKUP_SHAPES


def list_lookups(device: str) -> list[Lookup]:
    """Return the lookups to measure on a device: each optimizer with a fused kernel, and dense, in LOOKUP_SHAPES."""
    update_types = [name for name, optimizer in OPTIMIZERS.parts.items() if device in optimizer.devices]
    return [(update_type, *shape) for update_type in (*update_types, DENSE) for shape in LOOKUP_SHAPES]


def take_samples(rank: int, world: int, folder: str, limit_s: float) -> dict[str, Any]:
    """Take the samples of one rank and return {"samples": list of ROUNDS samples}.

    This is a collective operation: `world` processes must call it, each with another rank. In this process, it creates
    and destroys the default process group, and selects the GPU `rank` or limits torch to one CPU thread.

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        folder: Empty folder in which the ranks find each other.
        limit_s: Timeout of a collective in seconds.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    backend, timeout = "nccl" if on_gpu else "gloo", timedelta(seconds=limit_s)
    dist.init_process_group(backend, f"file://{folder}/store", timeout, rank=rank, world_size=world)
    probe = RateProbe(device)
    probe.sample()  # warm-up
    samples = [probe.sample() for _ in range(ROUNDS)]
    dist.destroy_process_group()
    return {"samples": samples}


def compute_rates(samples: Sequence[Sequence[Sample]]) -> Rates:
    """Compute the rates of this machine from the medians of samples.

    Args:
        samples: For each rank, its samples of all rounds, as returned by `take_samples`; at least one.
    """
    world, device = len(samples), "cuda" if samples[0][0]["on_gpu"] else "cpu"
    medians = {
        name: median([float(np.median([sample[name] for sample in of_rank])) for of_rank in samples])
        for name in samples[0][0]
    }
    seconds: dict[str, dict[Lookup, float]] = {}
    for lookup in list_lookups(device):
        seconds.setdefault(lookup[0], {})[lookup] = medians[f"lookup {lookup}"]
    latency, bandwidth = {}, {}
    for kind in COLLECTIVES:
        latency[kind], large = (medians.get(f"{kind} {size}", 0.0) for size in COLLECTIVE_VALUES)
        added_bytes = 4 * (COLLECTIVE_VALUES[1] - COLLECTIVE_VALUES[0]) * (2 if kind == "all_reduce" else 1)
        sent = added_bytes * (world - 1) / world
        bandwidth[kind] = sent / max(1e-9, large - latency[kind]) if world > 1 else 1e12
    return replace(
        Rates.for_cpu(world) if device == "cpu" else Rates.for_gpu(""),
        source=f"measured with {world} ranks",
        ranks=world,
        copy=medians["copy"],
        stream=medians["stream"],
        lookup={update: fit_lookup_rates(by_shape) for update, by_shape in seconds.items()},
        matrix={name: medians[f"matrix {name}"] for name in PRECISIONS},
        latency_s=latency,
        bandwidth=bandwidth,
        peer_s=0.0,  # included in the latency, which is measured with the same number of ranks
        host_link=medians.get("host link", float("inf")),
    )


def fit_lookup_rates(durations: Mapping[Lookup, float]) -> LookupRates:
    """Return the seconds per byte, id and shard from a non-negative least-squares fit of relative errors.

    Args:
        durations: Lookup → measured seconds.
    """
    rates, used = np.zeros(3), [0, 1, 2]
    work = np.array([count_lookup_work(*shape) for shape in durations]) / np.array([[*durations.values()]]).T
    while used:
        values = np.linalg.lstsq(work[:, used], np.ones(len(durations)), rcond=None)[0]
        if (values >= 0).all():
            rates[used] = values
            break
        used.pop(int(values.argmin()))
    return LookupRates(*rates.tolist())


class RateProbe:
    """Measurement of rates on one rank. `sample` is a collective operation: every rank must call it.

    Args:
        device: Device of the rank.
    """

    def __init__(self, device: torch.device):
        self._device, self._world = device, dist.get_world_size()
        rng = torch.Generator(device="cpu").manual_seed(dist.get_rank())

        def values(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=rng).to(device)

        size = 1 if device.type == "cpu" else 16
        self._x, self._w = values(512 * size, 512).requires_grad_(), values(256 * size, 512).requires_grad_()
        self._layers = [values(512, 512).requires_grad_() for _ in range(4)]
        self._large = values(1 << 24).requires_grad_()
        self._optimizer = torch.optim.Adagrad([self._large])
        with OperatorCounter() as self._of_layers:
            self._run_layers()
        self._launch_s = (Rates.for_cpu(1) if device.type == "cpu" else Rates.for_gpu("")).launch_s
        self._lookups = {lookup: _Lookup(*lookup, device, rng) for lookup in list_lookups(device.type)}
        self._copy_host = torch.empty(1 << 24, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def sample(self, clock: Callable[[], float] = perf_counter) -> Sample:
        """Measure every rate once and return the sample.

        Args:
            clock: Clock for collectives; use process_time on a machine that runs other work.
        """
        out: Sample = {"on_gpu": float(self._device.type == "cuda")}
        products = 3 * 2.0 * self._x.shape[0] * self._x.shape[1] * self._w.shape[0]
        for name in ("fp32", "bf16"):
            out[f"matrix {name}"] = products / self._time_min(partial(self._run_layer, bf16=name == "bf16"))
        out["matrix tf32"] = out["matrix fp32"]
        if self._device.type == "cuda":
            previous_precision = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("high")
            out["matrix tf32"] = products / self._time_min(self._run_layer)
            torch.set_float32_matmul_precision(previous_precision)
            device_copy = self._copy_host.to(self._device)
            copy = self._time_min(lambda: device_copy.copy_(self._copy_host, non_blocking=True))
            out["host link"] = self._copy_host.numel() / copy
        layers, work = self._time_min(self._run_layers, 4), self._of_layers
        arithmetic = work.flops / out["matrix fp32"] + work.launches * self._launch_s
        out["copy"] = work.bytes / max(0.1 * layers, layers - arithmetic)
        out["stream"] = DENSE_UPDATE_BYTES * self._large.numel() / self._time_min(self._run_update, 1)
        for shape, lookup in self._lookups.items():
            out[f"lookup {shape}"] = self._time_min(lookup, 1)
        if self._world > 1:
            for kind in COLLECTIVES:
                for size in COLLECTIVE_VALUES:
                    out[f"{kind} {size}"] = self._time_collective(kind, size, clock)
        return out

    def _run_layers(self) -> None:
        """Run typical model layers, forward and backward.

        The time not spent on matrix products and launches is spent reading, writing and allocating memory.
        """
        outputs = [self._x]
        for weights in self._layers:
            outputs.append(torch.nn.functional.linear(outputs[-1], weights).relu())
        torch.cat(outputs, 1).square().mean().backward()
        self._x.grad = None
        for weights in self._layers:
            weights.grad = None

    def _run_layer(self, bf16: bool = False) -> None:
        """Run the matrix products of one layer, forward and backward."""
        with torch.autocast(self._device.type, torch.bfloat16, enabled=bf16):
            output = torch.nn.functional.linear(self._x, self._w)
        output.backward(output.detach())
        self._x.grad = self._w.grad = None

    def _run_update(self) -> None:
        """Create gradients and run a dense update."""
        self._large.grad = torch.ones_like(self._large)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _time_min(self, call: Callable[[], object], times: int = 8) -> float:
        """Return the lowest of three means of a call's seconds over `times` calls: CPU seconds on CPU, else elapsed."""
        clock = process_time if self._device.type == "cpu" else perf_counter
        return min(self._time_calls(call, times, clock) for _ in range(3))

    def _time_calls(self, call: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
        call()
        self._synchronize()
        began = clock()
        for _ in range(times):
            call()
        self._synchronize()
        return (clock() - began) / times

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _time_collective(self, kind: str, size: int, clock: Callable[[], float]) -> float:
        """Return the mean seconds that a collective of `size` values takes."""
        part_size = size // self._world
        whole, part = (torch.ones(n, device=self._device) for n in (part_size * self._world, part_size))
        output = torch.empty_like(whole)
        calls: dict[str, Callable[[], object]] = {
            "all_to_all": lambda: dist.all_to_all_single(output, whole),
            "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.split(part_size))),
            "all_gather": lambda: dist.all_gather_into_tensor(output, part),
            "all_reduce": lambda: dist.all_reduce(whole),
        }
        dist.barrier()
        return self._time_calls(calls[kind], 6, clock)


class _Lookup:
    """Callable that runs FBGEMM's lookup in equally large tables and their update, as TorchRec runs them."""

    def __init__(self, update: str, tables: int, dim: int, length: int, device: torch.device, rng: Any):
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            DenseTableBatchedEmbeddingBagsCodegen,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        rows, on_cpu = TABLE_BYTES // (4 * dim * tables), device.type == "cpu"
        on_gpu = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
        locations = (EmbeddingLocation.HOST, ComputeDevice.CPU) if on_cpu else on_gpu
        if update == DENSE:  # gradients are as large as the tables, so the tables are small
            rows = 1024
            self._kernel: Any = DenseTableBatchedEmbeddingBagsCodegen([(rows, dim)] * tables, use_cpu=on_cpu)
        else:
            kind = optimizer_type_to_emb_opt_type(find_optimizer(update).torch_class())
            specs = [(rows, dim, *locations)] * tables
            self._kernel = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=kind, device=device)
        bags = BAGS * tables
        # Each call looks up different ids, as in training: rows of the previous call would still be in caches.
        ids = torch.randint(0, rows, (NUM_ID_SETS, bags * length), generator=rng).to(device)
        self._ids = cycle(ids.unbind())
        self._offsets = torch.arange(0, bags * length + 1, length).to(device)
        self._gradient = torch.full((BAGS, dim * tables), 1e-3, device=device)

    def __call__(self) -> None:
        self._kernel(next(self._ids), self._offsets).backward(self._gradient)


def count_lookup_work(update_type: str, tables: int, dim: int, length: int) -> tuple[float, float, float]:
    """Return the bytes accessed at random, number of ids and number of shards of a `_Lookup` (loads.LoadCounter)."""
    bags, row, state = BAGS * tables, 4.0 * dim, 0.0
    if update_type != DENSE:
        optimizer = find_optimizer(update_type)
        state = dim * optimizer.count_state_bytes("value") + optimizer.count_state_bytes("row")
    touched = bags * (length * (row + row + 2 * (row + state)) + 2 * row)
    return touched, float(bags * length), float(tables)
