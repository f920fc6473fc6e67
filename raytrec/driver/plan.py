"""`raytrec plan`: the sharding plan for other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import ranges
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.driver.preflight import check_fit


def plan(
    source: str | Path | dict,
    overrides: list[str],
    hosts: int | None = None,
    gpus: int | None = None,
    memory_gib: float = 80,
    host_memory_gib: float | None = None,
    disk_gib: float | None = None,
    gpu: str = "",
) -> dict[str, Any]:
    """The plan of a configuration. Reads its schema, and no data.

    Args:
        source: a config file or its values; data.schema, or schema.yaml above data.train, must be there.
        overrides: `section.key=value` strings.
        hosts: machines; default: as many as scaling.num_workers fill.
        gpus: GPUs of each, or with scaling.device=cpu workers; default: scaling.num_workers, up to 8.
        memory_gib: of each of these, unless plan.memory_gib is set.
        host_memory_gib: of each host's main memory, where tables with kernel fused_uvm(_caching) are;
            default: twice that of its GPUs.
        disk_gib: of each host's disk, where tables with kernel fused_mmap are; default: enough.
        gpu: which GPUs, as in nvidia-smi, for their bandwidths; default: TorchRec's, a V100's.

    Returns:
        hosts, gpus, device, memory_gib; tables: one mapping each (table, rows, dim, sharding, kernel, ranks,
        gib, host_gib and disk_gib of each of these); gib: on each rank's GPU, or in a worker's memory on CPU;
        host_gib: in each host's main memory; disk_gib: on each host's disk.

    Raises:
        ConfigError, SchemaError: what is wrong with the input, or does not fit.
    """
    from dataclasses import asdict

    from raytrec.driver.prepare import resolve
    from raytrec.embeddings.planner.dry_run import ENOUGH_GIB, dry_run, gib_of_hosts, gib_of_ranks
    from raytrec.embeddings.planner.footprint import GIB, map_share
    from raytrec.embeddings.planner.machines import GPUS, known_gpu

    config = resolve(load_config(source, overrides), source)
    workers = config.scaling.max_workers
    gpus = gpus or min(8, workers)
    hosts = hosts or -(-workers // gpus)
    if hosts * gpus != workers:
        raise ConfigError(
            f"{hosts} hosts with {gpus} GPUs are {hosts * gpus} workers, scaling.num_workers is {workers}",
            where="scaling.num_workers, --hosts, --gpus",
            expected="one worker for each GPU",
        )
    if gpu and not known_gpu(gpu):
        raise ConfigError(f"the bandwidths of {gpu} are not known", where="--gpu", expected=", ".join(GPUS))
    schema = Schema.load(config.data.schema_uri)
    check_fit(config, schema, here=False)
    with catch_warnings():  # of what TorchRec will change
        simplefilter("ignore", FutureWarning)
        disk = disk_gib or ENOUGH_GIB
        tables = dry_run(config, schema, hosts, gpus, memory_gib, host_memory_gib, disk, gpu)
    memory_gib, maps_gib = config.plan.memory_gib or memory_gib, map_share(schema, workers) / GIB
    return {
        "hosts": hosts,
        "gpus": gpus,
        "device": "cpu" if config.scaling.device == "cpu" else "cuda",
        "memory_gib": memory_gib,
        "tables": [asdict(table) for table in tables],
        "gib": [gib + maps_gib for gib in gib_of_ranks(tables, workers)],
        "host_gib": gib_of_hosts(tables, hosts, gpus),
        "disk_gib": gib_of_hosts(tables, hosts, gpus, "disk_gib"),
    }


def print_plan(found: dict[str, Any]) -> None:
    """A line for each table, and how full the GPUs are, on stdout."""
    from rich.table import Table

    from raytrec.common.terminal import open_console, plain

    console, lines = open_console(), Table()
    for column in ("table", "rows", "dim", "sharding_type", "compute_kernel", "ranks", "GiB in all"):
        lines.add_column(column, justify="right" if column in ("rows", "dim", "GiB in all") else "left")
    for table in found["tables"]:
        lines.add_row(
            plain(table["table"]),
            f"{table['rows']:,}",
            str(table["dim"]),
            table["sharding_type"],
            table["compute_kernel"],
            ranges(table["ranks"]),
            f"{sum(table['gib'] + table['host_gib'] + table['disk_gib']):.2f}",
        )
    console.print(lines)
    gib, memory = found["gib"], found["memory_gib"]
    devices = "GPUs" if found["device"] == "cuda" else "workers"
    console.print(
        f"{found['hosts']} × {found['gpus']} {devices} of {memory:g} GiB: tables take {min(gib):.1f} to "
        f"{max(gib):.1f} GiB of each, {sum(gib):.1f} GiB in all",
        soft_wrap=True,
    )
    for words, each in (("in host memory", found["host_gib"]), ("on disks", found["disk_gib"])):
        if any(each):
            console.print(
                f"{words}: {min(each):.1f} to {max(each):.1f} GiB of each host, {sum(each):.1f} in all",
                soft_wrap=True,
            )
