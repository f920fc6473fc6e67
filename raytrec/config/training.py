"""The sections `train`, `scaling`, `checkpoint`, `tracking` and `checks`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from raytrec.common.registry import PYTHON_PATH
from raytrec.config.base import Few, Mark, NonNegativeInt, Number, PositiveFloat, PositiveInt, Section

FREE = Mark.FREE


class WorkerRange(Section):
    min: Few
    """The run waits until there is room for this many workers."""
    max: Few
    """Maximum number of workers."""


class ScalingSection(Section):
    num_workers: Few | WorkerRange = 2
    """Worker processes; on GPUs one for each GPU. {min, max}: as many as the cluster has room for; the run
    shrinks and grows with the cluster, at the same global batch size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where Ray has GPUs, and the packages there are those for CUDA."""
    cpus_per_worker: Few = 1
    """CPUs that Ray reserves for each worker."""
    address: Annotated[str | None, Mark.COMMON] = None
    """Ray cluster to join ('auto' or HOST:PORT); default: the one of a Ray job, else a local one on loopback,
    ended with the run."""
    hang_timeout_s: PositiveFloat = 45
    """Seconds without a step, once training has started, after which the group is restarted."""
    max_failures: NonNegativeInt = 8
    """Worker failures that a run survives. Lost and preempted nodes do not count."""
    shutdown_grace_s: PositiveFloat = 30
    """Seconds that Ctrl-C, SIGTERM or `ray job stop` wait for a last checkpoint."""

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
    dir: Annotated[str | None, Mark.FIXED, Mark.COMMON] = None
    """Where checkpoints go: a folder that all nodes share, s3:// or gs://; default: checkpoints/ in the run
    folder."""
    every_steps: PositiveInt | None = None
    """Save every this many steps."""
    every_s: PositiveFloat | None = 300
    """Save when this many seconds have passed since the last save; null: not by time."""
    keep_last: PositiveInt = 2
    """Keep this many newest checkpoints."""
    keep_best: NonNegativeInt = 0
    """Also keep this many best ones, by the evaluations of train.eval_every_steps; saves at each."""
    best_metric: str | None = None
    """What keep_best goes by: a metric of the task, TASK.METRIC where there are several; default: the first
    metric of training that should be low or high (ne with binary cross-entropy)."""
    async_save: bool = True
    """Write while training continues: from a copy in host memory, but for tables on CPUs that are updated in
    backward, of which rows that change are set aside. false: training waits."""


class EarlyStoppingSection(Section):
    """When training ends before its last step, by the evaluations of train.eval_every_steps."""

    metric: str | None = None
    """What decides: as checkpoint.best_metric, with the same default."""
    patience: PositiveInt = 3
    """Evaluations in a row that do not improve on the best one, after which training ends."""
    restore_best: bool = False
    """At the end, take back the weights of the best evaluation. Needs checkpoint.keep_best."""


class ProfileSection(Section):
    """Which steps are profiled."""

    steps: Annotated[str, Field(pattern=r"^[1-9]\d*\.\.[1-9]\d*$")]
    """FIRST..LAST, such as 100..110: steps of the run, both included. They are slower than others."""

    @model_validator(mode="after")
    def _check(self) -> ProfileSection:
        if not self.range:
            raise ValueError(f"train.profile.steps ends before it begins: {self.steps}")
        return self

    @property
    def range(self) -> range:
        """The steps, counted from 1."""
        first, last = map(int, self.steps.split(".."))
        return range(first, last + 1)


class TrainSection(Section):
    epochs: PositiveInt | Literal["auto"] = 1
    """Passes over data.train. auto: as many as come to a million rows, at least 1 and at most 10;
    of little data more, up to 100 steps."""
    initial_bias: Literal["drawn", "log_odds"] = "drawn"
    """Bias of a model's last layer before the first step. log_odds: the log-odds of the share of positives in
    a million rows of data.train, for tasks of log-odds and models with one last layer; drawn: random."""
    max_steps: PositiveInt | None = None
    """Stop after this many steps."""
    eval_every_steps: Annotated[PositiveInt | Literal["auto"] | None, FREE, Mark.COMMON] = None
    """Evaluate on data.valid (else data.test) this often; the end is always evaluated. auto: ten times in
    all."""
    early_stopping: EarlyStoppingSection | None = None
    """End when a metric of the evaluations has not improved for a while: metric, patience; null: never."""
    log_every_steps: Annotated[PositiveInt, FREE] = 20
    """Report loss and speed this often."""
    activation_checkpointing: Annotated[bool, FREE] = False
    """Compute the activations of each block of the dense model again in backward, instead of keeping them:
    less memory, more time, the same values. Not with train.compile."""
    max_grad_norm: PositiveFloat | None = None
    """Largest L2 norm of the whole gradient, tables included; default: no clipping."""
    ema: Number | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the dense weights over steps, such as 0.999: evaluations use
    it, and checkpoints have both. Tables have none. null: no average."""
    on_nan: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """A loss that is not finite: stop, with the batch in the run folder; or skip the step on all ranks, and
    count it."""
    matmul: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of the dense layers' matrix products, in training and evaluation. tf32: float32 with 10 bits
    of fraction, on tensor cores; on CPU, fp32. bf16: autocast to bfloat16; parameters, losses, embeddings and
    optimizers stay fp32."""
    compile: bool | Literal["graphs"] = False
    """Compile the dense layers (torch.compile), which takes a while in the first step and the first
    evaluation. Needs a C++ compiler on nodes with CPU workers, a C compiler on those with GPUs. graphs: on
    GPUs, also record them as CUDA graphs, which are replayed for every batch but a last, smaller one; not for
    models that read sequences id by id."""
    profile: Annotated[ProfileSection | None, FREE] = None
    """Write a trace of some steps of each rank (torch.profiler), and on GPUs the allocator's history, to
    profile/ in the run folder; null: of none."""
    deterministic: Annotated[bool, FREE] = False
    """On GPUs, add in one fixed order, so that the same run on the same machines gives the same bits; slower
    where a batch has an id thousands of times. On CPU this is always so."""


class TrackingSection(Section):
    enabled: bool = True
    """Record the run in MLflow. false: only in the run folder, which has everything in any case."""
    uri: str | None = None
    """MLflow store or server; default: MLFLOW_TRACKING_URI of the driver's environment, else mlflow.db
    (sqlite) next to the run folder."""
    experiment: str = "raytrec"
    """MLflow experiment."""
    parent_run: str | None = None
    """Name of the parent run in MLflow, such as a sweep, of which this run becomes a child."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Further tags of the MLflow run."""
    every_steps: PositiveInt | None = 100
    """Record statistics of tables, phase times and load of every rank this often, and at the end; null:
    never."""
    report: bool = True
    """Write figures and report.html at the end of the run."""


# YAML reads a plain `off` as false.
Reaction = Annotated[
    Literal["off", "warn", "stop"], BeforeValidator(lambda value: "off" if value is False else value)
]
ModuleName = Annotated[str, Field(pattern=f"^{PYTHON_PATH.pattern}$")]


class ChecksSection(Section):
    """Live checks while training, and what a failure does."""

    every_steps: PositiveInt | None = 500
    """Check every this many steps, in addition to the start; null: only at the start."""
    at_checkpoints: bool = True
    """Also check before each checkpoint."""
    same_environment: Reaction = "stop"
    """Configuration, schema, code and libraries are the same on all ranks."""
    shards: Reaction = "stop"
    """Shards cover every row of every table once."""
    replicas: Reaction = "stop"
    """Dense layers, data-parallel tables and their state are equal on all ranks."""
    parity: Reaction = "stop"
    """Pooled embeddings and gradients of a live batch are those of one process."""
    conservation: Reaction = "stop"
    """No id and no row is lost between ranks; all ranks are at the same step."""
    managed_ids: Reaction = "stop"
    """Managed ids and their rows are one to one over all ranks."""
    finite: Reaction = "stop"
    """No weight and no optimizer state is NaN or infinite. Whatever is set here, such a state is never
    saved."""
    numerics: Reaction = "warn"
    """No NaN or infinite gradient, no exploding norm, no drift of calibration."""
    custom: dict[ModuleName, Reaction] = Field(default_factory=dict)
    """Checks of your own: module:Class to off, warn or stop."""
