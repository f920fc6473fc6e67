"""The sections `optim` and `plan`."""

from __future__ import annotations

from math import cos, pi
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from raytrec.common.registry import list_modules
from raytrec.config.base import Mark, NonNegativeFloat, NonNegativeInt, Number, PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    Optimizer = str
else:  # each optimizer has its own file
    Optimizer = Literal[tuple(list_modules("raytrec.embeddings.optimizers"))]


class EmbeddingOptim(Section):
    """Optimizer of the embedding tables."""

    name: Optimizer = "rowwise_adagrad"
    """Optimizer. Tables are updated in the backward pass (fused), except in dense updates (compute_kernel: dense,
    data_parallel, adam on CPU)."""
    lr: PositiveFloat = 0.02
    """Learning rate."""
    eps: PositiveFloat = 1e-8
    """Number added to the root of the second moment (ignored by sgd)."""
    weight_decay: NonNegativeFloat = 0.0
    """Factor of the L2 penalty on all rows of a table, including rows outside the batch; requires dense updates."""


class TableOptim(Section):
    """Settings of a table's optimizer that differ from optim.embeddings."""

    name: Optimizer | None = None
    """Optimizer; default: optim.embeddings.name."""
    lr: PositiveFloat | None = None
    """Learning rate; default: optim.embeddings.lr."""
    eps: PositiveFloat | None = None
    """Number added to the root of the second moment; default: optim.embeddings.eps."""
    weight_decay: NonNegativeFloat | None = None
    """Factor of the L2 penalty; default: optim.embeddings.weight_decay."""


Beta = Annotated[Number, Field(ge=0, lt=1)]


class DenseOptim(Section):
    """Optimizer of the dense layers."""

    name: Literal["adam", "adagrad", "sgd"] = "adam"
    """Optimizer from torch.optim."""
    lr: PositiveFloat = 1e-3
    """Learning rate."""
    eps: PositiveFloat = 1e-8
    """Number added to the root of the second moment (ignored by sgd)."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """Decay rates of Adam's moving averages of the gradients and of the squared gradients."""
    weight_decay: NonNegativeFloat = 0.0
    """Factor of the L2 penalty."""

    @property
    def settings(self) -> dict[str, Any]:
        """Return the keyword arguments of the optimizer in torch.optim besides lr and weight_decay."""
        names = {"sgd": (), "adagrad": ("eps",), "adam": ("eps", "betas")}[self.name]
        return {name: getattr(self, name) for name in names}


class Schedule(Section):
    """Factor by which all learning rates are multiplied. The factor depends only on the step and is not saved."""

    warmup_steps: NonNegativeInt = 0
    """Number of steps in which the factor grows linearly to 1."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the factor after the warm-up."""
    decay_steps: PositiveInt | None = None
    """Number of steps after the warm-up in which the factor falls to 0; default: until the end of the run."""

    @model_validator(mode="after")
    def _check_decay(self) -> Schedule:
        if self.decay == "constant" and self.decay_steps:
            raise ValueError("optim.schedule: decay_steps is set, but decay is constant")
        return self

    def resolve_decay_steps(self, steps: int) -> Schedule:
        """Return the schedule with the default of `decay_steps` replaced for a run of `steps` steps."""
        if self.decay == "constant" or self.decay_steps:
            return self
        return self.model_copy(update={"decay_steps": max(1, steps - self.warmup_steps)})

    def compute_factor(self, step: int) -> float:
        """Return the factor at a step, which is counted from 0; `decay_steps` must be resolved."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.decay_steps is None:
            return 1.0
        done = min(1.0, (step - self.warmup_steps) / self.decay_steps)
        return 1 - done if self.decay == "linear" else (1 + cos(pi * done)) / 2


class OptimSection(Section):
    """Optimizers of tables and dense layers, and their schedule."""

    embeddings: EmbeddingOptim = Field(default_factory=EmbeddingOptim)
    tables: dict[str, TableOptim] = Field(default_factory=dict)
    """Settings that differ from optim.embeddings (name, lr, eps, weight_decay), by table or pattern such as
    'item*'. If several entries match, later entries override earlier ones."""
    dense: DenseOptim = Field(default_factory=DenseOptim)
    schedule: Schedule = Field(default_factory=Schedule)


Kernel = Literal["fused", "fused_uvm", "fused_uvm_caching", "fused_mmap"]
Sharding = Literal[
    "table_wise", "row_wise", "column_wise", "data_parallel",
    "table_row_wise", "table_column_wise", "grid_shard",
]  # fmt: skip


def _check_trainable(dtype: object) -> object:
    if dtype in ("bf16", "int8"):
        raise ValueError(
            f"FBGEMM has no training kernels for dtype {dtype} on any device; use fp16 or fp32"
            + ("; FBGEMM supports int8 tables for inference only" if dtype == "int8" else "")
        )
    return dtype


def _check_local(value: str) -> str:
    if "://" in value:
        raise ValueError(
            "plan.mmap_dir: tables cannot be mapped from a URI; use the path of a folder on a disk of each node"
        )
    return value


class TablePlan(Section):
    """Constraints on the plan of a table. The planner chooses sharding_type, ranks and compute_kernel if null."""

    sharding_type: Sharding | None = None
    """Division of the table among ranks (docs/sharding.md)."""
    ranks: list[NonNegativeInt] | None = Field(None, min_length=1)
    """Ranks that hold the table. A single rank implies table_wise; several ranks require sharding_type."""
    compute_kernel: Kernel | Literal["dense"] | None = None
    """fused: in device memory, updated in the backward pass. dense: ordinary gradients and a dense update. fused_uvm:
    in host memory, except the state of rowwise_adagrad. fused_uvm_caching: as fused_uvm, with a fifth of the rows
    cached on the device. fused_mmap: in a file, for CPU workers."""
    # FIXED, like qcomms: rounding changes the trained model, unlike the number of workers.
    dtype: Annotated[Annotated[Literal["fp32", "fp16"], BeforeValidator(_check_trainable)] | None, Mark.FIXED] = None
    """Dtype of the weights; default: fp32. Sums, gradients and optimizer state stay fp32. On GPUs, updates
    are rounded stochastically to one of the two nearest values; on CPU, to the nearest value. FBGEMM trains
    neither bf16 nor int8 tables."""


Precision = Literal["fp32", "fp16", "bf16", "int8"]


class QCommsSection(Section):
    """Quantized collectives: precision of embeddings and gradients that workers exchange."""

    forward_precision: Precision = "fp32"
    """Precision of embeddings sent to the dense layers: fp32, fp16, bf16 or int8. int8 does not support
    row_wise, table_row_wise and grid_shard, which reduce partial sums during the exchange."""
    backward_precision: Precision = "fp32"
    """Precision of gradients sent back to the tables; same values and restriction as forward_precision."""

    @property
    def has_int8(self) -> bool:
        """Return True if the precision of either direction is int8."""
        return "int8" in (self.forward_precision, self.backward_precision)


class PlanSection(Section):
    """Sharding of the embedding tables and constraints on the planner."""

    sharding_types: list[Sharding] = Field(["table_wise", "row_wise"], min_length=1)
    """Sharding types that the planner may choose from."""
    tables: dict[str, TablePlan] = Field(default_factory=dict)
    """Constraints (sharding_type, ranks, compute_kernel, dtype), by table or pattern such as 'item*'. If
    several entries match, later entries override earlier ones."""
    compute_kernels: list[Kernel] = Field(["fused"], min_length=1)
    """Compute kernels that the planner may choose from for tables without a compute_kernel. In addition to
    fused, kernels for host memory (on GPUs) or files (on CPU) store tables that do not fit in memory."""
    colocate: list[list[str]] = Field(default_factory=list)
    """Groups of tables (or patterns). The tables of a group are placed on one rank, table-wise."""
    qcomms: Annotated[QCommsSection, Mark.FIXED] = Field(default_factory=QCommsSection)
    memory_gib: PositiveFloat | None = None
    """Memory for tables on each worker's device, in GiB; default: the device's memory. If set, memory not
    used by in-memory tables caches the most frequent rows of tables in files."""
    mmap_dir: Annotated[str, AfterValidator(_check_local)] | None = None
    """Folder on a disk of each node for tables with compute_kernel fused_mmap; default: the run folder."""
