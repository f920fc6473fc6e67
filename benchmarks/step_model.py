"""A model of a step's time from 8 to 1,024 GPUs, part by part; nothing of it has been run on so many GPUs.

    python benchmarks/step_model.py [--rows 8192] [--row-wise 0.1] [--gpus 8,64,256,1024]

Every assumption is a field of Model or Machine, explained in docs/scaling.md. The model is DLRM-DCNv2 as in
MLPerf Training (Criteo 1 TB, multi-hot), weak scaling: each GPU keeps its rows a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isqrt, log2
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from raytrec.worker.consensus import RING


@dataclass(frozen=True)
class Model:
    """DLRM-DCNv2 of MLPerf Training 3.0: 26 tables of 128 columns, 214 ids a row."""

    tables: int = 26
    dim: int = 128
    ids_a_row: int = 214
    # Multiply-adds a row: bottom 13-512-256-128, three cross layers of rank 512 on 27 × 128 values, top
    # 3456-1024-1024-512-256-1.
    macs: int = (
        13 * 512 + 512 * 256 + 256 * 128 + 3 * 2 * 3456 * 512 + 3456 * 1024 + 1024**2 + 1024 * 512 + 512 * 257
    )

    @property
    def dense_bytes(self) -> int:
        """Of the dense layers' gradients: nearly one weight for each multiply-add."""
        return 4 * self.macs

    @property
    def pooled_bytes(self) -> int:
        """Of a row's pooled embeddings, float32."""
        return 4 * self.tables * self.dim


@dataclass(frozen=True)
class Machine:
    """H100 SXM5, 8 a host, one 400 Gb/s port each. Peaks are the maker's, shares of them are guesses."""

    tflops: float = 495.0  # TF32 without sparsity
    tflops_share: float = 0.4
    hbm_gb_s: float = 3350.0
    hbm_share: float = 0.5  # rows of 512 bytes at random places
    nvlink_gb_s: float = 450.0  # one way
    port_gb_s: float = 50.0  # one way
    wire_share: float = 0.7
    host: int = 8
    launch_ms: float = 3.0  # Python and kernel launches that the GPU waits for
    collective_us: float = 20.0  # of each collective, whatever its size
    peer_us: float = 1.0  # of each other rank in an all-to-all
    hop_us: float = 10.0  # between hosts, in an all-reduce
    agreement_hop_us: float = 25.0  # of gloo over TCP, between two processes


def parts(model: Model, machine: Machine, gpus: int, rows: int, row_wise: float) -> dict[str, float]:
    """Milliseconds of each part of a step, if nothing overlapped.

    Args:
        rows: of each GPU's part of the batch.
        row_wise: share of the pooled values that come from tables cut by rows over all GPUs, each of which
            sends a partial sum for every row of the global batch.
    """
    flops = 3 * 2 * model.macs * rows  # backward costs twice forward
    # Forward reads rows; backward reads gradients, and reads and writes rows.
    lookups = 4 * model.ids_a_row * 4 * model.dim * rows
    pooled = model.pooled_bytes * rows * ((1 - row_wise) + row_wise * gpus)
    ids = model.ids_a_row * 8 * rows
    exchanges = 3 * (machine.collective_us + machine.peer_us * (gpus - 1)) / 1e3
    return {
        "dense": flops / (machine.tflops * machine.tflops_share * 1e12) * 1e3,
        "lookups": lookups / (machine.hbm_gb_s * machine.hbm_share * 1e9) * 1e3,
        "ids": _all_to_all_ms(machine, gpus, ids),
        "embeddings": 2 * _all_to_all_ms(machine, gpus, pooled),
        "latency": exchanges,
        "all-reduce": _all_reduce_ms(machine, gpus, model.dense_bytes),
        "host": machine.launch_ms,
        "agreement": 2 * (_ring(gpus) - 1) * machine.agreement_hop_us / 1e3,
    }


def _ring(gpus: int) -> int:
    """Ranks of the longest ring that an agreement goes round in a step (raytrec/worker/consensus.py)."""
    return gpus if gpus <= RING else max(isqrt(gpus), gpus // isqrt(gpus))


def _all_to_all_ms(machine: Machine, gpus: int, size: float) -> float:
    """Of `size` bytes that each GPU sends evenly to all: the slower of NVLink and port."""
    near, far = (min(gpus, machine.host) - 1) / gpus, max(0, gpus - machine.host) / gpus
    times = size * near / machine.nvlink_gb_s, size * far / machine.port_gb_s
    return max(times) / (machine.wire_share * 1e9) * 1e3


def _all_reduce_ms(machine: Machine, gpus: int, size: float) -> float:
    """In the host, then over all ports of the hosts at once."""
    hosts = max(1, gpus // machine.host)
    inside = 2 * size / machine.nvlink_gb_s
    between = 2 * (hosts - 1) / hosts * size / (machine.port_gb_s * machine.host)
    hops = 2 * ceil(log2(hosts)) * machine.hop_us / 1e3 if hosts > 1 else 0.0
    return (inside + between) / (machine.wire_share * 1e9) * 1e3 + hops


def step_ms(found: dict[str, float]) -> float:
    """Of a pipelined step: ids of the next batch travel meanwhile, the all-reduce hides behind half of what
    is dense, and nobody waits for an agreement that takes less than a step."""
    visible = max(0.0, found["all-reduce"] - found["dense"] / 2)
    main = sum(found[name] for name in ("dense", "lookups", "embeddings", "latency", "host")) + visible
    return max(main, found["ids"], found["agreement"])


def main(
    rows: Annotated[int, typer.Option(help="Of each GPU's part of a batch.")] = 8192,
    row_wise: Annotated[float, typer.Option(help="Share of pooled values from tables cut by rows.")] = 0.0,
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, with commas between.")] = "8,16,64,256,1024",
) -> None:
    """Prints a table: milliseconds of each part and of the step, rows a second, what of linear is left."""
    model, machine = Model(), Machine()
    table = Table(title=f"DLRM-DCNv2, {rows:,} rows a GPU, {row_wise:.0%} row-wise: ms of a step (model)")
    counts = [int(count) for count in gpus.split(",")]
    found = [parts(model, machine, count, rows, row_wise) for count in counts]
    for column in ("GPUs", *found[0], "step", "rows/s", "of linear"):
        table.add_column(column, justify="right", no_wrap=True)
    alone = rows / step_ms(found[0])
    for count, each in zip(counts, found, strict=True):
        step = step_ms(each)
        speed = f"{count * rows / step * 1e3 / 1e6:,.1f} M"
        cells = [f"{ms:.2f}" if ms < 10 else f"{ms:.0f}" for ms in each.values()]
        table.add_row(f"{count:,}", *cells, f"{step:.1f}", speed, f"{rows / step / alone:.0%}")
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
