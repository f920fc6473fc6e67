"""How much memory a table takes, and where. No torch here: the driver asks, too."""

from __future__ import annotations

from typing import NamedTuple

from raytrec.config.schema import Table

GIB = 1024**3
DTYPE_BYTES = {"fp32": 4, "fp16": 2}
# Bytes of optimizer state: of each weight, or of each row. FBGEMM keeps it in fp32 whatever the weights are.
STATE_BYTES = {"sgd": 0, "rowwise_adagrad": 0, "adagrad": 4, "adam": 8}
ROW_STATE_BYTES = {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 0, "adam": 0}
UVM_KERNELS = ("fused_uvm", "fused_uvm_caching")
CACHED = 0.2  # of a table's rows, in the GPU's cache of fused_uvm_caching: FBGEMM's default (1.8.0)


class Footprint(NamedTuple):
    """Bytes of a table, or of a part of it: weights, optimizer state, cache."""

    device: int
    host: int

    @property
    def total(self) -> int:
        return self.device + self.host


def footprint(table: Table, dtype: str, optimizer: str, kernel: str | None = None) -> Footprint:
    """What a table takes of a device and, with a UVM kernel on a GPU, of its host's memory.

    Args:
        kernel: None where all is on the device: unless it is fused_uvm(_caching), and on CPU always.
    """
    values, width = table.rows * table.dim, DTYPE_BYTES[dtype]
    weights, row_state = values * width, table.rows * ROW_STATE_BYTES[optimizer]
    host = weights + values * STATE_BYTES[optimizer]
    if kernel not in UVM_KERNELS:
        return Footprint(host + row_state, 0)
    # FBGEMM (1.8.0, construct_split_state) keeps state of one value a row on the GPU, and for the cache 4
    # bytes a row and 16 a slot beside the slots' weights.
    cache = table.rows * (4 + CACHED * (16 + table.dim * width)) if kernel == "fused_uvm_caching" else 0
    return Footprint(int(cache) + row_state, host)
