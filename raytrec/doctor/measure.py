"""What the ranks of this machine reach: rates for `raytrec plan --rates`, measured in as many processes.

All ranks measure the same at the same time, so that what they share (caches, memory, links) is shared as in
a run. On CPU what is computed is counted in seconds of CPU. Collectives and steps are counted in seconds and
in seconds of CPU; the latter mean something on a machine that has other work, too.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from raytrec.common.errors import RunError, os_errors
from raytrec.common.machine import built_for, gpu_kinds, usable_gpus
from raytrec.doctor.child import ChildError, run_child
from raytrec.doctor.probe import (
    CLOCKS,
    DENSE,
    LARGE,
    LOOKUPS,
    SMALL,
    SMALL_FLOPS,
    TINY_STEPS,
    UPDATES,
    Probe,
    Sample,
    lookup_shape,
    tiny_run,
)
from raytrec.planning.machines import Cluster
from raytrec.planning.prediction import Predictor
from raytrec.planning.rates import COLLECTIVES, LookupRates, Rates
from raytrec.worker.build import unsharded

ROUNDS = 7
ALONE_S = 180.0  # that measuring may take, for each rank


def write_rates(file: Path, ranks: int | None) -> None:
    """Measure the rates of the ranks of this machine, and write them for `raytrec plan`.

    Args:
        file: JSON file to write.
        ranks: Number of ranks; default: one for each GPU, or 2.

    Raises:
        RunError: A rank failed, or the file cannot be written.
    """
    gpus = usable_gpus() if built_for() == "cuda" else []
    rates = measure_rates(ranks or len(gpus) or 2, lambda line: print(line, file=sys.stderr))
    with os_errors("cannot write the rates", where=str(file)):
        file.write_text(rates.to_json(), encoding="utf-8")


def measure_rates(ranks: int, show: Callable[[str], None]) -> Rates:
    """The rates of so many ranks on this machine: a GPU each where there are GPUs, else on CPU. Takes some
    20 s where nothing else runs.

    Args:
        ranks: at least 1.
        show: is given a line about what is measured.

    Raises:
        RunError: a rank failed.
    """
    show(f"measuring with {ranks} rank{'s' if ranks > 1 else ''}, {ROUNDS} rounds")
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment |= {} if gpu_kinds() else {"OMP_NUM_THREADS": "1"}
    limit_s = ALONE_S * ranks
    with tempfile.TemporaryDirectory(prefix="raytrec-rates-") as folder, ThreadPoolExecutor(ranks) as pool:
        asked = [
            pool.submit(run_child, take_samples, rank, ranks, folder, limit_s=limit_s, **environment)
            for rank in range(ranks)
        ]
        try:
            for answer in as_completed(asked):  # the first error is the cause of the others
                answer.result()
        except (ChildError, TimeoutError) as error:
            raise RunError(
                f"rank {asked.index(answer)} could not measure: {error}",
                where=f"{ranks} ranks on this machine",
                do="look at `raytrec check` of a small configuration, which names what is wrong",
            ) from None
    samples = [answer.result()["samples"] for answer in asked]
    rates = rates_from(samples, "cuda" if samples[0][0]["on_gpu"] else "cpu")
    show(f"{rates.matrix['fp32'] / 1e9:.0f} GFLOP/s in fp32, {rates.copy / 1e9:.0f} GB/s of memory")
    return rates


def rates_from(samples: Sequence[Sequence[Sample]], device: str, clock: str = CLOCKS[0]) -> Rates:
    """Rates of what the ranks have seen.

    Bytes, ids and shards of lookups follow by least squares from LOOKUPS. The rest of the tiny steps,
    when all that is known of them is taken away, is the host's: of a step, a feature, a way of sharding.

    Args:
        samples: of each rank, one for each round.
        clock: of CLOCKS, by which collectives and steps count; cpu s: as on a machine without other work
            whose ranks never wait.
    """
    world = len(samples)
    seen = {
        name: median([float(np.median([sample[name] for sample in of_rank])) for of_rank in samples])
        for name in samples[0][0]
    }
    lookups = {
        way: fit_lookups({shape: seen[f"lookup {shape}"] for shape in LOOKUPS if shape[0] == way})
        for way in (*UPDATES, DENSE)
    }
    latency, bandwidth = {}, {}
    for kind in COLLECTIVES:
        small, large = (seen.get(f"{kind} {size}, {clock}", 0.0) for size in (SMALL, LARGE))
        latency[kind] = small
        sent = 4 * (LARGE - SMALL) * (world - 1) / world * (2 if kind == "all_reduce" else 1)
        bandwidth[kind] = sent / max(1e-9, large - small) if world > 1 else 1e12
    rates = Rates(
        source=f"measured with {world} ranks",
        device=device,
        ranks=world,
        cores=0.0 if device == "cuda" else float(len(os.sched_getaffinity(0))),
        copy=seen["copy"],
        stream=seen["stream"],
        tensor_s=0.0 if device == "cuda" else seen["tensor"],  # there in one kernel
        lookup=lookups,
        matrix_s=max(0.0, seen["small"] - SMALL_FLOPS / seen["matrix fp32"]),
        matrix={name: seen[f"matrix {name}"] for name in ("fp32", "tf32", "bf16")},
        latency_s=latency,
        bandwidth=bandwidth,
        launch_s=seen["launch"],
        step_s=0.0,
        group_s=0.0,
        feature_s=0.0,
        host_link=seen.get("host link", 1e12),
    )
    return _with_host(rates, {shape: seen.get(f"step {shape}, {clock}") for shape in TINY_STEPS}, clock)


def fit_lookups(took: Mapping[tuple, float]) -> LookupRates:
    """What a byte, an id and a shard take: at least 0, with the least squares of relative errors (what would
    be below 0 is left out).

    Args:
        took: shape, as in LOOKUPS → seconds.
    """
    found, left = [0.0, 0.0, 0.0], [0, 1, 2]
    while left:
        matrix = np.array([lookup_shape(*shape) for shape in took])[:, left] / np.array([[*took.values()]]).T
        values = np.linalg.lstsq(matrix, np.ones(len(took)), rcond=None)[0]
        if (values >= 0).all():
            for place, value in zip(left, values.tolist(), strict=True):
                found[place] = value
            break
        left.pop(int(values.argmin()))
    return LookupRates(*found)


def _with_host(rates: Rates, seen: Mapping[tuple, float | None], clock: str) -> Rates:
    """The same rates with what the host takes.

    What a tiny step takes beyond its predicted parts is s + ways · g + features · f, on each of the cores
    that ranks share; a single rank has one way of sharding alone, so that g is among s.

    Args:
        seen: features and ways of sharding → seconds of the step.
    """
    world, left = rates.ranks, {}
    share = max(1.0, world / rates.cores) if rates.cores and clock == CLOCKS[0] else 1.0
    for shape, seconds in seen.items():
        if seconds is not None:
            config, schema = tiny_run(shape[0], shape[1], world, rates.device)
            time = Predictor(config, schema, unsharded, rates)(Cluster(1, world, 16, 64, 64)).time
            known = time.step if clock == CLOCKS[0] else float(np.mean(time.busy))
            left[shape] = (seconds - known) / share
    few, many, two_ways = (left.get(shape) for shape in TINY_STEPS)
    feature = max(0.0, many - few) / (TINY_STEPS[1][0] - TINY_STEPS[0][0])
    group = 0.0 if two_ways is None else max(0.0, two_ways - many)
    step = max(0.0, few - TINY_STEPS[0][0] * feature - group)
    return replace(rates, step_s=step, group_s=group, feature_s=feature)


def take_samples(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Take the samples of one rank of `measure_rates`.

    Args:
        folder: Empty folder in which the ranks find each other.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    timeout = timedelta(seconds=ALONE_S)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", f"file://{folder}/store", timeout, rank=rank, world_size=world
    )
    probe = Probe(device)
    probe.sample()  # sets everything up
    samples = [probe.sample() for _ in range(ROUNDS)]
    dist.destroy_process_group()
    return {"samples": samples}
