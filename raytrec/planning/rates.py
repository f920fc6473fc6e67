"""Rates of a rank's device, links and host, measured or from data sheets. Does not import torch."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, PositiveFloat

from raytrec.common.documents import validate_as
from raytrec.common.errors import ConfigError, convert_os_errors
from raytrec.common.reading import UnreadableError, parse_json
from raytrec.embeddings.optimizers import OPTIMIZERS
from raytrec.planning.machines import UNKNOWN_GPU, UNKNOWN_NETWORK, find_gpu

# all_to_all exchanges ids and the sums of whole tables, reduce_scatter the sums of tables split by rows,
# all_gather the gradients of these sums, and all_reduce the gradients of dense layers.
COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
PRECISIONS = ("fp32", "tf32", "bf16")  # precisions of matrix products (train.matmul)
DENSE = "dense"  # update type of tables without a fused optimizer
# Shares of the data sheets' rates that steps reach: fp32 products as in TorchRec's published 149,000 rows/s
# on A100; tf32, bf16, memory and links as assumed in docs/gpu.md; half for random rows of a few hundred bytes.
REACHED_RATE_SHARES = {"fp32": 0.9, "tf32": 0.65, "bf16": 0.5, "copy": 0.75, "lookup": 0.5, "wire": 0.7}

# Bytes that FBGEMM moves per id to sort ids by row for the update. For each of 4 digits, 12 bytes of row and
# position are read and written, and 8 bytes are read again for counting. Creating and reading take 16 bytes.
SORT_BYTES_PER_ID = 4 * (2 * 12 + 8) + 16


class LookupRates(NamedTuple):
    """Time taken by table lookups, in the forward pass and the update, for one update type.

    Attributes:
        byte_s: Seconds per byte read or written.
        id_s: Additional seconds per id.
        shard_s: Additional seconds per shard of a table.
    """

    byte_s: float
    id_s: float = 0.0
    shard_s: float = 0.0

    def seconds(self, touched: Any, ids: Any, shards: Any) -> Any:
        """Return the seconds that lookups with these counts (numbers or arrays) take."""
        return touched * self.byte_s + ids * self.id_s + shards * self.shard_s


@dataclass(frozen=True)
class Rates:
    """Rates of one rank, in bytes, operations and seconds.

    Attributes:
        source: Origin of the rates.
        device: Device type, cpu or cuda.
        ranks: Number of ranks with which collectives were measured; 1 for data sheets.
        cores: Cores that the ranks of a host share for computation; 0 if each rank has its own device.
        copy: Memory bandwidth in bytes/s, counting both reads and writes.
        stream: Memory bandwidth in bytes/s for large tensors that are created in each step.
        lookup: Update type (a table's optimizer, or dense) → rates of lookups.
        matrix: Precision → operations/s in matrix products.
        latency_s: Collective within a host → minimum duration in seconds.
        bandwidth: Collective within a host → bytes/s that a rank sends.
        launch_s: Host seconds per operator of the dense layers.
        step_s: Other host seconds per step.
        tensor_s: Host seconds per tensor that the dense optimizer updates.
        group_s: Host seconds per group of tables (Loads.groups), and for replicated tables; with several ranks only.
        matrix_s: Seconds per small matrix in a batched product.
        peer_s: Seconds per other rank in an all-to-all.
        far: Bytes/s that a rank sends to other hosts.
        host_link: Bytes/s between the host's memory and a GPU.
        file_row_s: Seconds per row read from a file.
        assemble_column_s: Seconds per column of a row to assemble a batch in the rank's process.
        read_column_s: Seconds per column of a row to read the row in another process.
        read_id_s: Seconds per id to assemble a batch, and again to read the row.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # files of rates must not contain unknown keys

    source: str
    device: str
    ranks: int
    cores: float
    copy: PositiveFloat
    stream: PositiveFloat
    lookup: dict[str, LookupRates]
    matrix: dict[str, PositiveFloat]
    latency_s: dict[str, float]
    bandwidth: dict[str, PositiveFloat]
    launch_s: float
    step_s: float
    tensor_s: float = 0.0
    group_s: float = 0.0
    matrix_s: float = 0.0
    peer_s: float = 0.0
    far: float = 0.0
    host_link: float = float("inf")
    file_row_s: float = 1e-4  # an SSD's random read
    # benchmarks/results/ingest.json: 0.35 and 1.17 µs of CPU time per row of 40 columns, 26 of which contain an id
    assemble_column_s: float = 5.5e-9
    read_column_s: float = 26e-9
    read_id_s: float = 5e-9

    def get_lookup_rates(self, update_type: str) -> LookupRates:
        """Return the rates of lookups for an update type: the name of a table optimizer, or dense.

        Raises:
            ConfigError: `lookup` lacks this update type.
        """
        if update_type not in self.lookup:
            update = "dense updates" if update_type == DENSE else f"optimizer {update_type}"
            raise ConfigError(
                f"the rates do not include lookups with {update}",
                where=f"rates {self.source}",
                expected=f"rates for this kind of update (included: {', '.join(self.lookup) or 'none'})",
                do="measure the rates again, on the type of machine to plan for, with `raytrec doctor --measure FILE`",
            )
        return self.lookup[update_type]

    def to_json(self) -> str:
        """Return the rates as JSON text, which `from_json` reads; an infinite rate is written as Infinity."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Rates:
        """Return the rates in a JSON text written by `to_json`; `where` names the text's source in errors.

        Raises:
            ConfigError: The text does not contain valid rates.
        """
        try:
            rates = validate_as(parse_json(text), cls)
            for field, keys in ("bandwidth", COLLECTIVES), ("latency_s", COLLECTIVES), ("matrix", PRECISIONS):
                if set(getattr(rates, field)) != {*keys}:
                    raise UnreadableError(f"the keys of {field} are not {', '.join(keys)}")
            return rates
        except UnreadableError as error:
            raise ConfigError(
                f"the file does not contain valid rates: {error}",
                where=where,
                do="write the file again with `raytrec doctor --measure FILE`",
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """Read rates from a file.

        Raises:
            ConfigError: The file cannot be read or does not contain valid rates.
        """
        with convert_os_errors("cannot read the rates", ConfigError, where=str(path)):
            text = Path(path).read_bytes()
        return cls.from_json(text, str(path))

    @classmethod
    def for_cpu(cls, world: int) -> Rates:
        """Return rates of CPU ranks, accurate to an order of magnitude.

        The rates were measured with two ranks of one core each (benchmarks/results/plan.json). Hosts are
        assumed to have as many cores as this machine and to be connected by 10 Gb/s. On such hosts, sums over
        three or four ranks have about (ranks − 1)² times the latency of sums over two. `group_s` is the difference
        between measured steps of several ranks and the sum of all other parts. It includes the time of Gloo's threads.

        Args:
            world: Number of ranks, on which the latencies of collectives depend.
        """
        rings = (world - 1) ** 2
        fused = {name: LookupRates(*of.cpu_lookup) for name, of in OPTIMIZERS.parts.items() if of.cpu_lookup}
        return cls(
            source="two ranks on CPU",
            device="cpu",
            ranks=2,
            cores=len(os.sched_getaffinity(0)),
            copy=15e9,
            stream=7e9,
            lookup=fused | {DENSE: LookupRates(2e-11, 4e-9, 4e-5)},
            matrix={"fp32": 160e9, "tf32": 160e9, "bf16": 470e9},
            latency_s={
                "all_to_all": 6e-4,
                "reduce_scatter": 12e-4 * rings,
                "all_gather": 3e-4 * rings,
                "all_reduce": 4e-4 * rings,
            },
            bandwidth={"all_to_all": 1.4e9, "reduce_scatter": 0.6e9, "all_gather": 0.7e9, "all_reduce": 1.3e9},
            launch_s=2.9e-6,
            tensor_s=12.3e-6,
            step_s=1.5e-3,
            group_s=5e-3,
            matrix_s=1.6e-7,
            far=0.9e9,
        )

    @classmethod
    def for_gpu(cls, name: str, network: float = UNKNOWN_NETWORK) -> Rates:
        """Return the rates in a GPU's data sheet, multiplied by REACHED_RATE_SHARES.

        Host rates are derived from benchmarks/results/host.json: host time and launches of a single rank, and the ratio
        of the host time of one of 8 ranks with two sharding types to that of a single rank. A launch is assumed to take
        2.7 µs longer on CUDA than an operator of one row on CPU. A collective is assumed to take 20 µs plus 1 µs per
        peer, which is the right order of magnitude for NCCL.

        Args:
            name: Name of the GPU as reported by its driver; an unknown GPU is treated as a V100.
            network: Network bandwidth to other hosts, in 10⁹ bytes/s.
        """
        gpu, wire = find_gpu(name) or UNKNOWN_GPU, REACHED_RATE_SHARES["wire"] * 1e9
        copy = REACHED_RATE_SHARES["copy"] * gpu.memory * 1e9
        near = gpu.intra_host * wire
        lookup = LookupRates(1 / (REACHED_RATE_SHARES["lookup"] * gpu.memory * 1e9), SORT_BYTES_PER_ID / copy)
        return cls(
            source=f"data sheet of {name}",
            device="cuda",
            ranks=1,
            cores=0,
            copy=copy,
            stream=copy,
            lookup=dict.fromkeys([*OPTIMIZERS.parts, DENSE], lookup),
            matrix={name: REACHED_RATE_SHARES[name] * getattr(gpu, name) * 1e12 for name in PRECISIONS},
            latency_s=dict.fromkeys(COLLECTIVES, 20e-6),
            bandwidth=dict.fromkeys(COLLECTIVES, near),
            launch_s=7.2e-6,
            step_s=1.38e-3,
            group_s=0.55e-3,
            peer_s=1e-6,
            far=network * wire,
            host_link=gpu.pcie * wire,
            # Cores are assumed to be 1.7 times as fast as in benchmarks/results/ingest.json.
            assemble_column_s=cls.assemble_column_s / 1.7,
            read_column_s=cls.read_column_s / 1.7,
            read_id_s=cls.read_id_s / 1.7,
        )
