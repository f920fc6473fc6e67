"""Which tables can have plan.qcomms, and its error bounds.

Embeddings travel from the ranks that hold tables to those whose rows look them up, their gradients back. Each
time that a value is sent, and each time that two are added up on the way, it is rounded once. No torch here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, gcd, log2

from raytrec.common.errors import ConfigError
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import Precision
from raytrec.embeddings.constraints import SUMMED_TYPES, TableConstraint, column_parts

# What one rounding changes of a value at most, as a share of it; with int8, as a share of the largest in its
# group, whose values are 255 equal steps apart from its smallest to its largest (the limit is half a step and
# 2 % more, for FBGEMM adds 1e-8 to what it divides by).
UNIT = {"fp32": 0.0, "fp16": 2.0**-11, "bf16": 2.0**-8, "int8": 1 / 250}
# Values below this lose as much as this one: fp16 has no smaller exponent, int8 that 1e-8.
SMALLEST = {"fp32": 0.0, "fp16": 2.0**-14, "bf16": 0.0, "int8": 2.0**-12}
SCALE_BYTES = 8  # that a group of int8 values carries: its smallest value and its step


@dataclass(frozen=True)
class Rounding:
    """How much of values may be lost on their way between ranks.

    Attributes:
        share: of the sizes of what is added up.
        smallest: sizes below this count as this.
    """

    share: float
    smallest: float


def forward_rounding(
    precision: Precision, sharding: str, world: int, row_parts: int, by_id: bool
) -> Rounding:
    """Of the embeddings of a table.

    Args:
        row_parts: into how many ranges of rows it is cut.
        by_id: whether it gives the vector of each id: no sums, then, that are added up on the way.
    """
    if sharding == "data_parallel" or world == 1:
        return Rounding(0.0, 0.0)
    # row_parts numbers are rounded and added one after the other: that many roundings of at most the sum of
    # their sizes. From the hosts' sums of table_row_wise and grid_shard one more, across hosts.
    times = 1 if by_id or sharding not in SUMMED_TYPES else row_parts + (sharding != "row_wise")
    return Rounding((1 + UNIT[precision]) ** times - 1, SMALLEST[precision])


def backward_rounding(
    precision: Precision, sharding: str, world: int, row_parts: int, by_id: bool, factor: float
) -> Rounding:
    """Of the gradients that reach a table; of a rank's loss, not of its part of the global one.

    Args:
        factor: see `gradient_factor`. The others: see `forward_rounding`.
    """
    if sharding == "data_parallel" or world == 1:
        return Rounding(0.0, 0.0)
    twice = not by_id and sharding in SUMMED_TYPES and sharding != "row_wise"
    # The first of two groups divides by its size before the second sends.
    smallest = SMALLEST[precision] / factor * (world / row_parts if twice else 1)
    return Rounding((1 + UNIT[precision]) ** (2 if twice else 1) - 1, smallest)


def gradient_factor(config: RunConfig, world: int) -> float:
    """What gradients are multiplied with while they travel: a power of two, so that nothing is rounded by it.

    A row's gradient is divided by the rows of a batch (and multiplied by the number of ranks, see
    tasks/global_batch.py): beyond 1e5 rows, fp16 would keep a few bits of it.
    """
    return 2.0 ** floor(log2(max(1, config.data.global_batch_size // world)))


def check_qcomms(
    config: RunConfig, schema: Schema, constraints: dict[str, TableConstraint], world: int, local: int | None
) -> None:
    """Whether the precisions of plan.qcomms are worth it. (constraints.py leaves out ways of sharding that
    cannot have them.)

    Args:
        local: ranks of a host; None: not known.

    Raises:
        ConfigError: shards whose widths have no common divisor that is large enough for int8.
    """
    if not config.plan.qcomms.has_int8:
        return
    widths = {
        table: schema.tables[table].dim
        // column_parts(schema.tables[table].dim, each.sharding, each.ranks, world, local or world)
        for table, each in constraints.items()
        if each.sharding != ("data_parallel",)
    }
    if widths and (group := gcd(*widths.values())) <= SCALE_BYTES:
        narrow = min(widths, key=lambda table: widths[table])
        raise ConfigError(
            f"int8 saves nothing: {group} values, the common divisor of the widths of all shards, would "
            f"share {SCALE_BYTES} bytes of scale (a shard of table {narrow} has {widths[narrow]} columns)",
            where="plan.qcomms",
            expected=f"shards whose widths have a common divisor above {SCALE_BYTES}, such as 16",
            do="set plan.qcomms to fp16 or bf16, or the tables' dim to multiples of 16",
        )
