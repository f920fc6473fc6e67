"""The sections of a RunConfig: every knob, its unit and its default."""

from __future__ import annotations

import re
from math import cos, pi
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from raytrec.common.errors import some
from raytrec.common.registry import PYTHON_PATH, modules_of
from raytrec.common.storage import sibling
from raytrec.config.base import (
    Few,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
)
from raytrec.config.transforms import BUILT_IN, Transform

NAME = re.compile(r"\w[\w .,:+=@()-]{0,149}")


def name_like(text: str) -> str:
    """The name nearest to a text that a run can have."""
    name = re.sub(r"[^\w .,:+=@()-]", "_", text)[:100]
    return name if NAME.fullmatch(name) else f"_{name}"


def _a_name(name: str) -> str:
    """It becomes the name of a folder, and stands in logs and on terminals."""
    if not NAME.fullmatch(name) or name != name.strip() or len(name.encode()) > 200:
        raise ValueError(
            "run.name: a name is at most 150 letters, digits, spaces and . , : + = @ ( ) - _, beginning with "
            f"a letter, digit or _ (got {name[:60]!r}); run.dir sets where its folder is"
        )
    return name


class RunSection(Section):
    name: Annotated[str, AfterValidator(_a_name)] | None = Field(
        None,
        description="Name of the run: letters, digits, spaces and . , : + = @ ( ) - _; default: the config's "
        "name and the time.",
    )
    dir: str | None = Field(
        None, description="The run folder: result, checkpoints, config; default: runs/NAME."
    )
    root: str | None = Field(
        None,
        description="Folder that relative paths of data and runs start at; default: RAYTREC_ROOT of the "
        "environment, which cluster nodes set, else the working directory.",
    )
    seed: Annotated[int, Field(strict=True, ge=0, lt=2**63)] = Field(
        0, description="Seeds initial weights, epoch order and dropout."
    )


class WarmStartSection(Section):
    """A new run that starts from an earlier run's weights."""

    from_: str | None = Field(
        None, alias="from", description="A run or checkpoint folder whose weights training starts from."
    )
    optimizer: bool = Field(False, description="Also take over the optimizers' state.")
    tables: dict[str, Literal["exact", "resize", "new", "drop"]] = Field(
        default_factory=dict,
        description="What happens to changed tables (or patterns such as 'item*'). exact: an error. resize: "
        "keep the rows that both have, initialize further ones. new: initialize all. drop: "
        "ignore the checkpoint's table.",
    )
    dense: Literal["exact", "matching"] = Field(
        "exact", description="matching: initialize dense parameters whose shape changed, instead of an error."
    )


Folders = str | Annotated[list[str], Field(min_length=1)]


def folders(value: Folders) -> list[str]:
    """One folder or several, as a list."""
    return [value] if isinstance(value, str) else value


def _each_once(names: list[str]) -> list[str]:
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"data.reserve_columns: column {some(min(twice))} is named twice")
    return names


class PartitionRange(Section):
    from_: str | None = Field(
        None, alias="from", description="First partition, such as date=2026-11-01; null: no bound."
    )
    to: str | None = Field(
        None, description="Last partition, included, such as date=2026-11-07/hour=11; null: no bound."
    )


class DataSection(Section):
    train: Folders = Field(
        description="Folder of Parquet files to train on (local, s3:// or gs://), or a list of folders."
    )
    partitions: PartitionRange = Field(
        default_factory=PartitionRange,
        description="Partitions of data.train to train on, of folders such as date=2026-11-01/hour=07.",
    )
    valid: Folders | None = Field(None, description="Evaluated every train.eval_every_steps.")
    test: Folders | None = Field(None, description="Evaluated at the end; default: data.valid.")
    schema_path: str | None = Field(
        None, alias="schema", description="The schema.yaml; default: the one in the folder above data.train."
    )
    transforms: list[Transform] = Field(
        default_factory=list,
        description="What is applied to columns before the schema sees them: "
        f"{', '.join(BUILT_IN)}, or module:function.",
    )
    reserve_columns: Annotated[list[Annotated[str, Field(min_length=1)]], AfterValidator(_each_once)] = Field(
        default_factory=list,
        description="Columns that go along with rows untouched: groups and items of tasks, slices of "
        "evaluations, keys of predictions. Any type with one value a row; also those of folders key=value.",
    )
    global_batch_size: Annotated[PositiveInt, Field(lt=2**31)] = Field(
        2048, description="Rows per step over all workers together."
    )
    shuffle: Literal["none", "groups", "window"] = Field(
        "window",
        description="none: file order. groups: row groups in a new seeded order each epoch. window: also "
        "rows within a window of row groups.",
    )
    window: Few = Field(
        2,
        description="Row groups of each lane whose rows are mixed by shuffle=window; large ones are split "
        "into pieces of 20,000 rows.",
    )
    lanes: Few = Field(
        24,
        description="Places of the data that each global batch is read from; also the maximum number of "
        "workers.",
    )
    on_error: Literal["fail", "skip"] = Field(
        "fail",
        description="Rows that cannot be read or violate the schema: fail, or skip them. Skipped rows have "
        "no loss; they are counted (train.skipped_rows) and listed in skipped.jsonl.",
    )
    drop_last: bool = Field(False, description="Skip an epoch's last, smaller batch.")
    readers: Few = Field(1, description="Concurrent Ray Data read tasks for each worker.")
    buffer_gib: PositiveFloat = Field(
        0.5, description="GiB of rows read ahead for each worker, in Ray's object store."
    )

    @property
    def schema_uri(self) -> str:
        """Where the schema is: data.schema, or schema.yaml in the folder above (the first of) data.train."""
        return self.schema_path or sibling(folders(self.train)[0], "schema.yaml")


class WorkerRange(Section):
    min: Few = Field(description="The run waits until there is room for this many workers.")
    max: Few = Field(description="Maximum number of workers.")


class ScalingSection(Section):
    num_workers: Few | WorkerRange = Field(
        2,
        description="Worker processes; on GPUs one for each GPU. {min, max}: as many as the cluster has "
        "room for; the run shrinks and grows with the cluster, at the same global batch size.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where Ray has GPUs, and the packages there are those for CUDA."
    )
    cpus_per_worker: Few = Field(1, description="CPUs that Ray reserves for each worker.")
    address: str | None = Field(
        None,
        description="Ray cluster to join ('auto' or HOST:PORT); default: the one of a Ray job, else a "
        "local one on loopback, ended with the run.",
    )
    hang_timeout_s: PositiveFloat = Field(
        45,
        description="Seconds without a step, once training has started, after which the group is restarted.",
    )
    max_failures: NonNegativeInt = Field(
        8, description="Worker failures that a run survives. Lost and preempted nodes do not count."
    )
    shutdown_grace_s: PositiveFloat = Field(
        30, description="Seconds that Ctrl-C, SIGTERM or `ray job stop` wait for a last checkpoint."
    )

    @property
    def min_workers(self) -> int:
        """Workers without which the run waits."""
        return self.num_workers.min if isinstance(self.num_workers, WorkerRange) else self.num_workers

    @property
    def max_workers(self) -> int:
        """Workers that the run never exceeds."""
        return self.num_workers.max if isinstance(self.num_workers, WorkerRange) else self.num_workers

    @property
    def elastic(self) -> bool:
        """Whether the number of workers may change."""
        return self.min_workers < self.max_workers


class CheckpointSection(Section):
    dir: str | None = Field(
        None,
        description="Where checkpoints go: a folder that all nodes share, s3:// or gs://; default: "
        "checkpoints/ in the run folder.",
    )
    every_steps: PositiveInt | None = Field(None, description="Save every this many steps.")
    every_s: PositiveFloat | None = Field(
        300, description="Save when this many seconds have passed since the last save; null: not by time."
    )
    keep_last: PositiveInt = Field(2, description="Keep this many newest checkpoints.")
    keep_best: NonNegativeInt = Field(
        0,
        description="Also keep this many best ones, by the evaluations of train.eval_every_steps; saves at "
        "each.",
    )
    best_metric: str | None = Field(
        None,
        description="What keep_best goes by: a metric of the task, TASK.METRIC where there are several; "
        "default: the first metric of training that should be low or high (ne with binary cross-entropy).",
    )
    async_save: bool = Field(
        True,
        description="Write while training continues: from a copy in host memory, but for tables on CPUs that "
        "are updated in backward, of which rows that change are set aside. false: training waits.",
    )


if TYPE_CHECKING:
    Optimizer = str
else:  # one file each
    Optimizer = Literal[tuple(modules_of("raytrec.embeddings.optimizers"))]


class EmbeddingOptim(Section):
    name: Optimizer = Field(
        "rowwise_adagrad", description="Updates tables in backward (fused); adam on CPU: a dense update."
    )
    lr: PositiveFloat = Field(0.02, description="Learning rate.")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment (not sgd).")
    weight_decay: NonNegativeFloat = Field(
        0.0,
        description="L2 penalty of whole tables: only where the update is dense (compute_kernel: dense, "
        "data_parallel, adam on CPU). FBGEMM's fused kernels do not keep it.",
    )


class TableOptim(Section):
    """What is different for a table from optim.embeddings."""

    name: Optimizer | None = Field(None, description="Optimizer.")
    lr: PositiveFloat | None = Field(None, description="Learning rate.")
    eps: PositiveFloat | None = Field(None, description="See optim.embeddings.eps.")
    weight_decay: NonNegativeFloat | None = Field(None, description="See optim.embeddings.weight_decay.")


class DenseOptim(Section):
    name: Literal["adam", "adagrad", "sgd"] = Field("adam", description="Optimizer of the dense layers.")
    lr: PositiveFloat = Field(1e-3, description="Learning rate.")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment (not sgd).")
    weight_decay: NonNegativeFloat = Field(0.0, description="L2 penalty.")


class Schedule(Section):
    """Factor on all learning rates as a function of the step alone, so that nothing of it needs saving."""

    warmup_steps: NonNegativeInt = Field(0, description="Steps in which the factor grows to 1, in a line.")
    decay: Literal["constant", "linear", "cosine"] = Field("constant", description="What follows.")
    decay_steps: PositiveInt | None = Field(
        None,
        description="Steps after the warm-up in which the factor falls to 0; default: until the end of the "
        "run.",
    )

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
    tables: dict[str, TableOptim] = Field(
        default_factory=dict,
        description="Optimizers of single tables: table, or pattern such as 'item*', to name, lr, eps, "
        "weight_decay, where they are not those of optim.embeddings. Where several match, later lines "
        "override earlier ones.",
    )
    dense: DenseOptim = Field(default_factory=DenseOptim)
    schedule: Schedule = Field(default_factory=Schedule)


Sharding = Literal[
    "table_wise",
    "row_wise",
    "column_wise",
    "data_parallel",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]


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

    sharding_type: Sharding | None = Field(None, description="Sharding type.")
    ranks: list[NonNegativeInt] | None = Field(
        None, min_length=1, description="The ranks that hold it. One rank alone means table_wise."
    )
    compute_kernel: Literal["fused", "dense", "fused_uvm", "fused_uvm_caching", "fused_mmap"] | None = Field(
        None,
        description="fused: in device memory, updated in backward. dense: ordinary gradients and a dense "
        "update. fused_uvm(_caching): in host memory (with a cache of a fifth of the rows on the device). "
        "fused_mmap: in a file, for workers on CPU.",
    )
    dtype: Annotated[Literal["fp32", "fp16"], BeforeValidator(_trainable)] | None = Field(
        None,
        description="Of the weights; default fp32. Sums, gradients and optimizer state stay fp32. On GPUs "
        "updates round to one of the two nearest values at random, on CPU to the nearest. (FBGEMM trains no "
        "bf16 and no int8 tables.)",
    )


Precision = Literal["fp32", "fp16", "bf16", "int8"]


class QCommsSection(Section):
    """Quantized collectives: in what precision embeddings and their gradients travel between workers."""

    forward_precision: Precision = Field(
        "fp32",
        description="Of embeddings on their way to the dense layers: fp32, fp16, bf16 or int8 (not for "
        "row_wise, table_row_wise and grid_shard, whose sums are added up on the way).",
    )
    backward_precision: Precision = Field(
        "fp32", description="Of their gradients on their way back to the tables; likewise."
    )

    @property
    def has_int8(self) -> bool:
        """Whether a direction is int8."""
        return "int8" in (self.forward_precision, self.backward_precision)


class PlanSection(Section):
    sharding_types: list[Sharding] = Field(
        ["table_wise", "row_wise"],
        min_length=1,
        description="Sharding types that the planner may choose from.",
    )
    tables: dict[str, TablePlan] = Field(
        default_factory=dict,
        description="Constraints: table, or pattern such as 'item*', to sharding_type, ranks, "
        "compute_kernel, dtype. Where several match, later lines override earlier ones.",
    )
    compute_kernels: list[Literal["fused", "fused_uvm", "fused_uvm_caching", "fused_mmap"]] = Field(
        ["fused"],
        min_length=1,
        description="Compute kernels that the planner may choose from, where a table's is not set: besides "
        "fused those of host memory (on GPUs) or of files (on CPU), for tables that memory does not hold.",
    )
    colocate: list[list[str]] = Field(
        default_factory=list,
        description="Groups of tables (or patterns); the tables of a group are placed on one rank, "
        "table-wise.",
    )
    qcomms: QCommsSection = Field(default_factory=QCommsSection)
    memory_gib: PositiveFloat | None = Field(
        None, description="Memory for tables on each worker's device, in GiB; default: what it has."
    )
    mmap_dir: Annotated[str, AfterValidator(_local)] | None = Field(
        None,
        description="Folder on a disk of each node for tables with compute_kernel fused_mmap; default: the "
        "run folder.",
    )


class EarlyStoppingSection(Section):
    """When training ends before its last step, by the evaluations of train.eval_every_steps."""

    metric: str | None = Field(
        None, description="What decides: as checkpoint.best_metric, with the same default."
    )
    patience: PositiveInt = Field(
        3, description="Evaluations in a row that do not improve on the best one, after which training ends."
    )


class TrainSection(Section):
    epochs: PositiveInt = Field(1, description="Passes over data.train.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many steps.")
    eval_every_steps: PositiveInt | None = Field(
        None, description="Evaluate on data.valid (else data.test) this often; the end is always evaluated."
    )
    early_stopping: EarlyStoppingSection | None = Field(
        None,
        description="End when a metric of the evaluations has not improved for a while: metric, patience; "
        "null: never.",
    )
    log_every_steps: PositiveInt = Field(20, description="Report loss and speed this often.")
    loss_reduction: Literal["mean", "sum"] = Field(
        "mean",
        description="Reduction over the rows of the global batch, of the loss that gradients are taken of.",
    )
    micro_batches: Few = Field(
        1,
        description="Pieces in which the dense layers process a batch, one after the other, to save memory. "
        "The step is that of the whole batch, tables included.",
    )
    max_grad_norm: PositiveFloat | None = Field(
        None, description="Largest L2 norm of the whole gradient, tables included; default: no clipping."
    )
    ema: Number | None = Field(
        None,
        gt=0,
        lt=1,
        description="Decay of an exponential moving average of the dense weights over steps, such as 0.999: "
        "evaluations use it, and checkpoints have both. Tables have none. null: no average.",
    )
    on_nan: Literal["stop", "skip"] = Field(
        "stop",
        description="A loss that is not finite: stop, with the batch in the run folder; or skip the step on "
        "all ranks, and count it.",
    )
    matmul: Literal["fp32", "tf32", "bf16"] = Field(
        "fp32",
        description="Precision of the dense layers' matrix products, in training and evaluation. tf32: "
        "float32 with 10 bits of fraction, on tensor cores; on CPU, fp32. bf16: autocast to bfloat16; "
        "parameters, losses, embeddings and optimizers stay fp32.",
    )
    compile: bool = Field(
        False,
        description="Compile the dense layers (torch.compile), which takes a while in the first step and the "
        "first evaluation. Needs a C++ compiler on nodes with CPU workers, a C compiler on those with GPUs.",
    )
    deterministic: bool = Field(
        False,
        description="On GPUs, add in one fixed order, so that the same run on the same machines gives the "
        "same bits; slower where a batch has an id thousands of times. On CPU this is always "
        "so.",
    )


class TrackingSection(Section):
    enabled: bool = Field(
        True,
        description="Record the run in MLflow. false: only in the run folder, which has everything in any "
        "case.",
    )
    uri: str | None = Field(
        None,
        description="MLflow store or server; default: MLFLOW_TRACKING_URI of the driver's environment, else "
        "mlflow.db (sqlite) next to the run folder.",
    )
    experiment: str = Field("raytrec", description="MLflow experiment.")
    parent_run: str | None = Field(
        None,
        description="Name of the parent run in MLflow, such as a sweep, of which this run becomes a child.",
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Further tags of the MLflow run.")
    every_steps: PositiveInt | None = Field(
        100,
        description="Record statistics of tables, phase times and load of every rank this often, and at "
        "the end; null: never.",
    )
    report: bool = Field(True, description="Write figures and report.html at the end of the run.")


# YAML reads a plain `off` as false.
Reaction = Annotated[
    Literal["off", "warn", "stop"], BeforeValidator(lambda value: "off" if value is False else value)
]


ModuleName = Annotated[str, Field(pattern=f"^{PYTHON_PATH.pattern}$")]


class ChecksSection(Section):
    """Live checks while training, and what a failure does."""

    every_steps: PositiveInt | None = Field(
        500, description="Check every this many steps, in addition to the start; null: only at the start."
    )
    at_checkpoints: bool = Field(True, description="Also check before each checkpoint.")
    same_environment: Reaction = Field(
        "stop", description="Configuration, schema, code and libraries are the same on all ranks."
    )
    shards: Reaction = Field("stop", description="Shards cover every row of every table once.")
    replicas: Reaction = Field(
        "stop", description="Dense layers, data-parallel tables and their state are equal on all ranks."
    )
    parity: Reaction = Field(
        "stop", description="Pooled embeddings and gradients of a live batch are those of one process."
    )
    conservation: Reaction = Field(
        "stop", description="No id and no row is lost between ranks; all ranks are at the same step."
    )
    managed_ids: Reaction = Field(
        "stop", description="Managed ids and their rows are one to one over all ranks."
    )
    finite: Reaction = Field(
        "stop",
        description="No weight and no optimizer state is NaN or infinite. Whatever is set here, such a state "
        "is never saved.",
    )
    numerics: Reaction = Field(
        "warn", description="No NaN or infinite gradient, no exploding norm, no drift of calibration."
    )
    custom: dict[ModuleName, Reaction] = Field(
        default_factory=dict, description="Checks of your own: module:Class to off, warn or stop."
    )
