"""What a rank reaches: rates of its device, links and host, from data sheets or measured. No torch here."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ConfigDict, PositiveFloat, TypeAdapter, ValidationError

from raytrec.common.errors import ConfigError, os_errors
from raytrec.common.reading import NotReadable, json_values
from raytrec.embeddings.optimizers import OPTIMIZERS
from raytrec.planning.machines import UNKNOWN_GPU, UNKNOWN_NETWORK, known_gpu

# Kinds of collectives, by what takes them: ids and whole tables' sums; sums of tables that are cut by rows,
# and their gradients; dense layers.
COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
DENSE = "dense"  # update of rows that have no optimizer in a kernel
# Shares of data sheets that steps reach: fp32 products as in TorchRec's published 149,000 rows/s on A100;
# tf32, bf16, memory and wires as docs/gpu.md assumes them; rows of some hundred bytes at random places half.
SHARES = {"fp32": 0.9, "tf32": 0.65, "bf16": 0.5, "copy": 0.75, "lookup": 0.5, "wire": 0.7}

# Bytes that FBGEMM moves to sort an id by its row for the update: 12 of row and place, read and written for
# each of 4 digits, of which 8 are read once more to count them; and 16 to make and to read them.
SORTED = 4 * (2 * 12 + 8) + 16


class LookupRates(NamedTuple):
    """Of lookups in tables, forward and update, whose rows are updated in one way: seconds of a byte that is
    read or written, of an id, and of a table's shard in addition."""

    byte_s: float
    id_s: float = 0.0
    shard_s: float = 0.0

    def seconds(self, touched: Any, ids: Any, shards: Any) -> Any:
        """Of so much; numbers or arrays."""
        return touched * self.byte_s + ids * self.id_s + shards * self.shard_s


@dataclass(frozen=True)
class Rates:
    """Of one rank, in bytes, operations and seconds.

    Attributes:
        source: where they come from.
        device: cpu or cuda.
        ranks: with how many ranks collectives were measured; 1: they are from data sheets.
        cores: that ranks of a host share for what they compute; 0: each has a device.
        copy: bytes a second, read and written. stream: the same of large tensors, made at each step.
        lookup: how rows are updated (a table's optimizer, or dense) → rates of lookups.
        matrix: precision → operations a second. matrix_s: of each small matrix of a batched product.
        latency_s, bandwidth: of each kind of collective within a host: seconds that it takes however small,
            and bytes a second that a rank sends.
        peer_s: of each other rank of an all-to-all. far: bytes a second to other hosts.
        host_link: bytes a second between host and device. file_row_s: of a row that is read from a file.
        launch_s: of an operator of the dense layers on the host. tensor_s: of a tensor that their optimizer
            updates. step_s, group_s: of the rest of a step on the host: of each step, and of each way of
            sharding in it.
        assemble_column_s, read_column_s: of each column of a row, to put a batch together in the rank's
            process, and to read it in another one; read_id_s: of an id, in each of the two.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # of files of rates

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
    # benchmarks/results/ingest.json: 0.35 and 1.17 CPU-µs a row of 40 columns, 26 of which have an id
    assemble_column_s: float = 5.5e-9
    read_column_s: float = 26e-9
    read_id_s: float = 5e-9

    def lookup_of(self, way: str) -> LookupRates:
        """Return the rates of a table optimizer, or of dense updates.

        Raises:
            ConfigError: The rates were measured without it.
        """
        if way not in self.lookup:
            raise ConfigError(
                f"no rates of lookups with the optimizer {way}",
                where=self.source,
                expected=f"one of {', '.join(self.lookup)}",
                do="measure again with `raytrec doctor --measure FILE`",
            )
        return self.lookup[way]

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> Rates:
        """Reads what `to_json` wrote.

        Raises:
            ConfigError: it is not that; `where` names it.
        """
        try:
            made = TypeAdapter(cls).validate_python(json_values(text))
            if set(made.bandwidth) != {*COLLECTIVES}:
                raise ValueError(f"bandwidth has other keys than {', '.join(COLLECTIVES)}")
            return made
        except (NotReadable, ValueError) as error:
            why = str(error)
            if isinstance(error, ValidationError):
                first = error.errors()[0]
                why = ".".join(map(str, first["loc"])) + f": {first['msg']}"
            raise ConfigError(
                f"not a file of rates: {why}",
                where=where,
                do="write them again with `raytrec doctor --measure FILE`",
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """Reads a file.

        Raises:
            ConfigError: there is none, or it has no rates.
        """
        with os_errors("cannot read the rates", ConfigError, where=str(path)):
            text = Path(path).read_bytes()
        return cls.from_json(text, str(path))

    @classmethod
    def of_cpu(cls, world: int) -> Rates:
        """Orders of magnitude: of two ranks with a core each (benchmarks/results/plan.json), of hosts with as
        many cores as this one, and 10 Gb/s between them. Sums over three and four ranks take about
        (ranks − 1)² times as long to begin there."""
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
            bandwidth={
                "all_to_all": 1.4e9,
                "reduce_scatter": 0.6e9,
                "all_gather": 0.7e9,
                "all_reduce": 1.3e9,
            },
            launch_s=2.9e-6,
            tensor_s=12.3e-6,
            step_s=1.5e-3,
            matrix_s=1.6e-7,
            far=0.9e9,
        )

    @classmethod
    def of_gpu(cls, name: str, network: float = UNKNOWN_NETWORK) -> Rates:
        """From a GPU's data sheet, and SHARES of it.

        Host: benchmarks/results/host.json counts operators and milliseconds of a step. With TorchRec's
        exchanges and kernels of two ways of sharding (95 launches each), metrics and the all-reduce, a
        DCN-v2's 400 launches take 7 ms and 260, compiled, 5.5 ms: 11 µs each, and 4.8 ms of the rest. A
        collective takes 20 µs, and 1 µs for each peer: guesses of the right size for NCCL.

        Args:
            name: As its driver has it; a GPU that is not known counts as V100.
            network: 10⁹ bytes a second to other hosts.
        """
        gpu, wire = known_gpu(name) or UNKNOWN_GPU, SHARES["wire"] * 1e9
        copy = SHARES["copy"] * gpu.memory * 1e9
        near = gpu.intra_host * wire
        lookup = LookupRates(1 / (SHARES["lookup"] * gpu.memory * 1e9), SORTED / copy)
        return cls(
            source=f"data sheet of {name}",
            device="cuda",
            ranks=1,
            cores=0,
            copy=copy,
            stream=copy,
            lookup=dict.fromkeys([*OPTIMIZERS.parts, DENSE], lookup),
            matrix={name: SHARES[name] * getattr(gpu, name) * 1e12 for name in ("fp32", "tf32", "bf16")},
            latency_s=dict.fromkeys(COLLECTIVES, 20e-6),
            bandwidth=dict.fromkeys(COLLECTIVES, near),
            launch_s=11e-6,
            step_s=4.8e-3,
            group_s=95 * 11e-6,
            peer_s=1e-6,
            far=network * wire,
            host_link=gpu.pcie * wire,
            # of cores that are 1.7 times as fast as those of benchmarks/results/ingest.json
            assemble_column_s=cls.assemble_column_s / 1.7,
            read_column_s=cls.read_column_s / 1.7,
            read_id_s=cls.read_id_s / 1.7,
        )
