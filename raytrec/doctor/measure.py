"""Rates of this machine for `raytrec plan --rates`, measured in as many processes as there are ranks."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from raytrec.common.errors import RunError, os_errors
from raytrec.common.machine import built_for, gpu_kinds, usable_gpus
from raytrec.doctor.child import ChildError, run_child
from raytrec.planning.probe import ROUNDS, rates_from, take_samples
from raytrec.planning.rates import Rates

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
    """Return the rates of ranks on this machine: a GPU each where there are GPUs, else on CPU.

    It takes some 20 s where nothing else runs.

    Args:
        ranks: Number of ranks, at least 1.
        show: Is given a line about what is measured.

    Raises:
        RunError: A rank failed.
    """
    show(f"measuring with {ranks} rank{'s' if ranks > 1 else ''}, {ROUNDS} rounds")
    environment = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    environment |= {} if gpu_kinds() else {"OMP_NUM_THREADS": "1"}
    limit_s = ALONE_S * ranks
    with tempfile.TemporaryDirectory(prefix="raytrec-rates-") as folder, ThreadPoolExecutor(ranks) as pool:
        asked = [
            pool.submit(run_child, take_samples, rank, ranks, folder, ALONE_S, limit_s=limit_s, **environment)
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
    rates = rates_from([answer.result()["samples"] for answer in asked])
    show(f"{rates.matrix['fp32'] / 1e9:.0f} GFLOP/s in fp32, {rates.copy / 1e9:.0f} GB/s of memory")
    return rates
