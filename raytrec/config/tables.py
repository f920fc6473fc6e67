"""The sections `optim` and `plan`."""

from __future__ import annotations

from math import cos, pi
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from raytrec.common.registry import modules_of
from raytrec.config.base import Mark, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    Optimizer = str
else:  # one file each
    Optimizer = Literal[tuple(modules_of("raytrec.embeddings.optimizers"))]


class EmbeddingOptim(Section):
    name: Optimizer = "rowwise_adagrad"
    """Updates tables in backward (fused); adam on CPU: a dense update."""
    lr: PositiveFloat = 0.02
    """Learning rate."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment (not sgd)."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty of whole tables: only where the update is dense (compute_kernel: dense, data_parallel, adam
    on CPU). FBGEMM's fused kernels do not keep it."""


class TableOptim(Section):
    """What is different for a table from optim.embeddings."""

    name: Optimizer | None = None
    """Optimizer."""
    lr: PositiveFloat | None = None
    """Learning rate."""
    eps: PositiveFloat | None = None
    """See optim.embeddings.eps."""
    weight_decay: NonNegativeFloat | None = None
    """See optim.embeddings.weight_decay."""


class DenseOptim(Section):
    name: Literal["adam", "adagrad", "sgd"] = "adam"
    """Optimizer of the dense layers."""
    lr: PositiveFloat = 1e-3
    """Learning rate."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment (not sgd)."""
    weight_decay: NonNegativeFloat = 0.0
    """L2 penalty."""


class Schedule(Section):
    """Factor on all learning rates as a function of the step alone, so that nothing of it needs saving."""

    warmup_steps: NonNegativeInt = 0
    """Steps in which the factor grows to 1, in a line."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What follows."""
    decay_steps: PositiveInt | None = None
    """Steps after the warm-up in which the factor falls to 0; default: until the end of the run."""

    @model_validator(mode="after")
    def _known(self) -> Schedule:
        if self.decay == "constant" and self.decay_steps:
            raise ValueError("optim.schedule: decay_steps is set, but decay is constant")
        return self

    def over(self, steps: int) -> Schedule:
        """The schedule of a run of so many steps."""
        if self.decay == "constant" or self.decay_steps:
            return self
        return self.model_copy(update={"decay_steps": max(1, steps - self.warmup_steps)})

    def factor(self, step: int) -> float:
        """The factor at a step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        return 1 - done if self.decay == "linear" else (1 + cos(pi * done)) / 2


class OptimSection(Section):
    embeddings: EmbeddingOptim = Field(default_factory=EmbeddingOptim)
    tables: dict[str, TableOptim] = Field(default_factory=dict)
    """Optimizers of single tables: table, or pattern such as 'item*', to name, lr, eps, weight_decay, where
    they are not those of optim.embeddings. Where several match, later lines override earlier ones."""
    dense: DenseOptim = Field(default_factory=DenseOptim)
    schedule: Schedule = Field(default_factory=Schedule)


Kernel = Literal["fused", "fused_uvm", "fused_uvm_caching", "fused_mmap"]
Sharding = Literal[
    "table_wise", "row_wise", "column_wise", "data_parallel",
    "table_row_wise", "table_column_wise", "grid_shard",
]  # fmt: skip


def _trainable(dtype: object) -> object:
    if dtype in ("bf16", "int8"):
        raise ValueError(
            f"plan.tables: FBGEMM has no kernels for dtype {dtype}, on no device; use fp16 or fp32"
            + ("; its int8 tables are for inference alone" if dtype == "int8" else "")
        )
    return dtype


def _local(value: str) -> str:
    if "://" in value:
        raise ValueError(
            "plan.mmap_dir: no table trains in an object store; use a folder on a disk of each node"
        )
    return value


class TablePlan(Section):
    """Constraints of a table; the planner chooses what is not set."""

    sharding_type: Sharding | None = None
    """Sharding type."""
    ranks: list[NonNegativeInt] | None = Field(None, min_length=1)
    """The ranks that hold it. One rank alone means table_wise."""
    compute_kernel: Kernel | Literal["dense"] | None = None
    """fused: in device memory, updated in backward. dense: ordinary gradients and a dense update.
    fused_uvm(_caching): in host memory (with a cache of a fifth of the rows on the device). fused_mmap: in a
    file, for workers on CPU."""
    dtype: Annotated[Literal["fp32", "fp16"], BeforeValidator(_trainable)] | None = None
    """Of the weights; default fp32. Sums, gradients and optimizer state stay fp32. On GPUs updates round to
    one of the two nearest values at random, on CPU to the nearest. (FBGEMM trains no bf16 and no int8
    tables.)"""


Precision = Literal["fp32", "fp16", "bf16", "int8"]


class QCommsSection(Section):
    """Quantized collectives: in what precision embeddings and their gradients travel between workers."""

    forward_precision: Precision = "fp32"
    """Of embeddings on their way to the dense layers: fp32, fp16, bf16 or int8 (not for row_wise,
    table_row_wise and grid_shard, whose sums are added up on the way)."""
    backward_precision: Precision = "fp32"
    """Of their gradients on their way back to the tables; likewise."""

    @property
    def has_int8(self) -> bool:
        """Whether a direction is int8."""
        return "int8" in (self.forward_precision, self.backward_precision)


class PlanSection(Section):
    sharding_types: list[Sharding] = Field(["table_wise", "row_wise"], min_length=1)
    """Sharding types that the planner may choose from."""
    tables: dict[str, TablePlan] = Field(default_factory=dict)
    """Constraints: table, or pattern such as 'item*', to sharding_type, ranks, compute_kernel, dtype. Where
    several match, later lines override earlier ones."""
    compute_kernels: list[Kernel] = Field(["fused"], min_length=1)
    """Compute kernels that the planner may choose from, where a table's is not set: besides fused those of
    host memory (on GPUs) or of files (on CPU), for tables that memory does not hold."""
    colocate: list[list[str]] = Field(default_factory=list)
    """Groups of tables (or patterns); the tables of a group are placed on one rank, table-wise."""
    # What it rounds away changes what is trained; the number of workers does not.
    qcomms: Annotated[QCommsSection, Mark.FIXED] = Field(default_factory=QCommsSection)
    memory_gib: PositiveFloat | None = None
    """Memory for tables on each worker's device, in GiB; default: what it has. Where it is set, what tables
    in memory leave of it has the rows of tables in files that are looked up most."""
    mmap_dir: Annotated[str, AfterValidator(_local)] | None = None
    """Folder on a disk of each node for tables with compute_kernel fused_mmap; default: the run folder."""

    @model_validator(mode="before")
    @classmethod
    def _without_balance(cls, values: Any) -> Any:
        """Leave out plan.balance, which configurations of earlier runs have."""
        if isinstance(values, dict):
            return {key: value for key, value in values.items() if key != "balance"}
        return values
