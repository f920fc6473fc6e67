"""How much memory a table takes, and where; no torch, for the driver."""

from __future__ import annotations

from typing import NamedTuple

from raytrec.config.schema import Schema, Table
from raytrec.embeddings.optimizers import optimizer_of

GIB = 1024**3
DTYPE_BYTES = {"fp32": 4, "fp16": 2}
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
MMAP_KERNEL = "fused_mmap"
# Bytes in a map of managed ids (embeddings/managed/key_map.py), six in ten slots of which are used: of a row
# (key, sightings, last step, row), and of an id that waits for one.
ID_BYTES, WAITING_BYTES = 41, 35
CACHED = 0.2  # of a table's rows, in the GPU's cache of fused_uvm_caching: FBGEMM's default (1.8.0)


class Footprint(NamedTuple):
    """Bytes of a table, or of a part of it: weights, optimizer state, cache."""

    device: int
    host: int
    disk: int = 0

    @property
    def total(self) -> int:
        return self.device + self.host + self.disk


def kernel_on(device: str, kernel: str | None) -> str | None:
    """A table's kernel as this device has it; None: the one that keeps all on the device, which on CPU, where
    there is no other memory, UVM kernels are, too.

    Args:
        device: cpu or cuda.
    """
    places = (*UVM_KERNELS, MMAP_KERNEL) if device == "cuda" else (MMAP_KERNEL,)
    return kernel if kernel in places else None


def footprint(table: Table, dtype: str, optimizer: str, kernel: str | None = None) -> Footprint:
    """What a table takes of a device and, with a UVM kernel on a GPU, of its host's memory, or with
    fused_mmap on CPU of its disk.

    Args:
        kernel: of `kernel_on`.
    """
    values, width, state = table.rows * table.dim, DTYPE_BYTES[dtype], optimizer_of(optimizer)
    weights, row_state = values * width, table.rows * state.bytes_per("row")
    host = weights + values * state.bytes_per("value")
    if kernel == MMAP_KERNEL:
        return Footprint(0, 0, host + row_state)
    if kernel not in UVM_KERNELS:
        return Footprint(host + row_state, 0)
    # FBGEMM (1.8.0, construct_split_state) keeps state of one value a row on the GPU, and for the cache 4
    # bytes a row and 16 a slot in addition to the slots' weights.
    cache = table.rows * (4 + CACHED * (16 + table.dim * width)) if kernel == "fused_uvm_caching" else 0
    return Footprint(int(cache) + row_state, host)


def map_share(schema: Schema, world: int) -> int:
    """Bytes of each rank's device, in addition to its tables, for the maps of managed ids: of every map each
    rank has an equal part, wherever the table's rows are.

    Args:
        world: number of ranks.
    """
    of_tables = (
        table.rows * (ID_BYTES + (WAITING_BYTES if table.ids.admit_after > 1 else 0))
        for table in schema.tables.values()
        if table.ids
    )
    return -(-sum(of_tables) // world)
