"""The sections `train`, `scaling`, `checkpoint`, `export`, `tracking` and `checks`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from raytrec.common.registry import PYTHON_PATH
from raytrec.config.base import Mark, NonNegativeInt, Number, PositiveFloat, PositiveInt, Section, SmallCount

FREE = Mark.FREE


class WorkerRange(Section):
    """Range of the number of workers of an elastic run."""

    min: SmallCount
    """Minimum number of workers. The run waits for room that other work, returning nodes or an autoscaler can provide.
    A cluster that is too small even when idle, without an autoscaler, is an error at the start."""
    max: SmallCount
    """Maximum number of workers."""


class ScalingSection(Section):
    """Workers of a run, their resources and their cluster."""

    num_workers: SmallCount | WorkerRange = 2
    """Worker processes; on GPUs, one per GPU. {min, max}: as many as the cluster has room for. The run then
    shrinks and grows with the cluster at the same global batch size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if Ray has GPUs and the CUDA packages are installed, else cpu."""
    cpus_per_worker: SmallCount = 1
    """CPUs that Ray reserves for each worker."""
    bind_cpus: bool = True
    """Run GPU workers only on the CPUs of their GPU's NUMA node. Readers use all CPUs."""
    address: Annotated[str | None, Mark.COMMON] = None
    """Ray cluster to join ('auto' or HOST:PORT); default: the cluster in RAY_ADDRESS, which Ray sets in jobs, else a
    local cluster on loopback that ends with the run."""
    hang_timeout_s: PositiveFloat = 45
    """Seconds without a step after which the worker group is restarted, once training has started."""
    max_failures: NonNegativeInt = 8
    """Maximum number of worker failures after which the run restarts. Lost and preempted nodes are not counted."""
    shutdown_grace_s: PositiveFloat = 30
    """Seconds that Ctrl-C, SIGTERM or `ray job stop` wait for a final checkpoint."""

    @property
    def min_workers(self) -> int:
        """Return the minimum number of workers, without which the run does not start."""
        return self.num_workers.min if isinstance(self.num_workers, WorkerRange) else self.num_workers

    @property
    def max_workers(self) -> int:
        """Return the maximum number of workers."""
        return self.num_workers.max if isinstance(self.num_workers, WorkerRange) else self.num_workers

    @property
    def elastic(self) -> bool:
        """Return True if the number of workers may change during the run."""
        return self.min_workers < self.max_workers


class CheckpointSection(Section):
    """Location, frequency and retention of checkpoints."""

    dir: Annotated[str | None, Mark.FIXED, Mark.COMMON] = None
    """Folder of the checkpoints: a folder that all nodes share, s3:// or gs://; default: checkpoints/ in the
    run folder."""
    every_steps: PositiveInt | None = None
    """Steps between saves; null: no saves by step."""
    every_s: PositiveFloat | None = 300
    """Seconds between the last save and the start of the next one; null: no saves by time."""
    keep_last: PositiveInt = 2
    """Number of newest checkpoints to keep."""
    keep_best: NonNegativeInt = 0
    """Number of best checkpoints to keep in addition, ranked by the evaluations of train.eval_every_steps. A
    checkpoint is then saved at each evaluation."""
    best_metric: str | None = None
    """Metric that keep_best compares: a metric of the task, or TASK.METRIC if there are several tasks. Default: the
    first metric for which lower or higher values are better (ne with binary cross-entropy); metrics that are also
    computed in training take precedence."""
    async_save: bool = True
    """Write while training continues, from a copy in host memory. Tables on CPUs that are updated in the
    backward pass are not copied as a whole; each row is copied before it changes. false: training waits."""


class DeltasSection(Section):
    """Deltas, which services load to follow the model during training (docs/online.md)."""

    to: str = Field(min_length=1)
    """Folder of the deltas and of the full exports that they continue; local, s3:// or gs://."""
    every_s: PositiveFloat = 10
    """Seconds between deltas. Each checkpoint also writes a delta."""
    full_every: PositiveInt = 100
    """Number of deltas after which the next checkpoint is exported in full, at low priority."""
    keep: PositiveInt = 2
    """Number of full exports to keep. Deltas older than the oldest of these exports are removed."""
    quantize: Literal["fp16", "int8", "int4"] | None = None
    """Precision of the tables of full exports, as in `raytrec export`; null: fp32. Deltas contain fp32."""


class ExportSection(Section):
    """Exports that a run writes during training."""

    deltas: DeltasSection | None = None
    """Write deltas every few seconds, i.e. the rows, ids and dense weights that have changed; null: no deltas."""


class EarlyStoppingSection(Section):
    """End of training before the last step, based on the evaluations of train.eval_every_steps."""

    metric: str | None = None
    """Metric that is compared; same values and default as checkpoint.best_metric."""
    patience: PositiveInt | None = 3
    """Number of consecutive evaluations without a new best value after which training ends; null: no limit."""
    target: Number | None = None
    """Value of the metric at which training ends; null: no target."""
    restore_best: bool = False
    """Load the weights of the best evaluation at the end. Requires checkpoint.keep_best."""

    @model_validator(mode="after")
    def _check_limits(self) -> EarlyStoppingSection:
        if self.patience is None and self.target is None:
            raise ValueError("train.early_stopping: patience and target are both null, so training never ends early")
        return self


class ProfileSection(Section):
    """Range of profiled steps."""

    steps: Annotated[str, Field(pattern=r"^[1-9]\d*\.\.[1-9]\d*$")]
    """FIRST..LAST, such as 100..110: steps of the run, both included. Profiled steps are slower than others."""

    @model_validator(mode="after")
    def _check_steps(self) -> ProfileSection:
        if not self.range:
            raise ValueError(f"train.profile.steps: FIRST is larger than LAST (got {self.steps})")
        return self

    @property
    def range(self) -> range:
        """Return the profiled steps, counted from 1."""
        first, last = map(int, self.steps.split(".."))
        return range(first, last + 1)


class TrainSection(Section):
    """Length, evaluation, numerics and compilation of training."""

    epochs: PositiveInt | Literal["auto"] = 1
    """Passes over data.train. auto: 1 to 10 passes, with at most a million rows in total if possible; more on small
    data, for at least 100 steps."""
    initial_bias: Literal["drawn", "log_odds"] = "drawn"
    """Initial bias of a model's last layer. drawn: random. log_odds: log-odds of the share of positives in
    about a million rows of data.train, for tasks with loss bce or focal. Without effect on other tasks, on requests
    with candidates, and on models that have no single last layer with a bias."""
    max_steps: PositiveInt | None = None
    """Maximum number of steps; null: no limit."""
    eval_every_steps: Annotated[PositiveInt | Literal["auto", "next_folder"] | None, FREE, Mark.COMMON] = None
    """Steps between evaluations on data.valid, else on rows of data.holdout, else on data.test. The end of training is
    always evaluated; null: only the end. auto: at most ten evaluations in total. next_folder: evaluate on each folder
    of files in data.train, such as a day, just before training on its first row; requires data.shuffle: none."""
    early_stopping: EarlyStoppingSection | None = None
    """End training when an evaluation metric reaches a target or stops improving; null: never."""
    log_every_steps: Annotated[PositiveInt, FREE] = 20
    """Steps between reports of loss and speed."""
    activation_checkpointing: Annotated[bool, FREE] = False
    """Recompute the activations of each block of the dense model in the backward pass instead of keeping
    them. Uses less memory and more time; results are the same. Cannot be combined with train.compile."""
    max_grad_norm: PositiveFloat | None = None
    """Maximum L2 norm to which the gradient of all parameters is clipped (see clip_tables); null: no clipping."""
    clip_tables: bool = True
    """Include tables in train.max_grad_norm. false: only the gradient of the dense layers is measured and clipped."""
    ema: Number | None = Field(None, gt=0, lt=1)
    """Decay of an exponential moving average of the dense weights over steps, such as 0.999. Evaluations use
    the average, and checkpoints contain both. Tables are not averaged. null: no average."""
    on_nan: Annotated[Literal["stop", "skip"], FREE] = "stop"
    """Reaction to a non-finite loss. stop: stop the run, and save the batch in the run folder. skip: skip the
    step on all ranks, and count it as skipped."""
    matmul: Literal["fp32", "tf32", "bf16"] = "fp32"
    """Precision of the dense layers' matrix products, in training and evaluation. tf32: float32 with a 10-bit
    fraction on tensor cores; fp32 on CPU. bf16: autocast to bfloat16; parameters, losses, embeddings and
    optimizers stay fp32."""
    compile: bool | Literal["graphs"] = False
    """Compile the dense layers (torch.compile), which slows down the first step and the first evaluation.
    Requires Python's headers, and a C++ compiler on nodes with CPU workers, or a C compiler and triton on nodes with
    GPUs. graphs: on GPUs, also record CUDA graphs, which are replayed for all batches except a last, smaller one.
    Models that read sequences id by id do not support graphs."""
    profile: Annotated[ProfileSection | None, FREE] = None
    """Write a trace of some steps of each rank (torch.profiler), and on GPUs the allocator's history, to
    profile/ in the run folder; null: no trace."""
    deterministic: Annotated[bool, FREE] = False
    """On GPUs, sum in a fixed order, so that the same run on the same machines gives identical bits. Slower
    if a batch contains an id thousands of times. CPU runs are always deterministic."""


class TrackingSection(Section):
    """Records of a run in MLflow and in the run folder."""

    enabled: bool = True
    """Record the run in MLflow. false: only in the run folder, which always contains all records."""
    uri: str | None = None
    """MLflow store or server; default: MLFLOW_TRACKING_URI of the driver's environment, else mlflow.db
    (sqlite) next to the run folder."""
    experiment: str = "raytrec"
    """Name of the MLflow experiment."""
    parent_run: str | None = None
    """Name of the parent run in MLflow, such as a sweep. This run becomes its child."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Additional tags of the MLflow run."""
    every_steps: PositiveInt | None = 100
    """Steps between records of table statistics, phase times and load of every rank; the last step is also recorded.
    null: never."""
    report: bool = True
    """Write plots and report.html at the end of the run."""


# YAML reads a plain `off` as false.
Reaction = Annotated[Literal["off", "warn", "stop"], BeforeValidator(lambda value: "off" if value is False else value)]
ModuleName = Annotated[str, Field(pattern=f"^{PYTHON_PATH.pattern}$")]


class ChecksSection(Section):
    """Live checks during training, and the reaction to a failed check."""

    every_steps: PositiveInt | None = 500
    """Steps between checks, besides those at the start, after step 2 and before checkpoints; null: only these."""
    at_checkpoints: bool = True
    """Check before each checkpoint."""
    same_environment: Reaction = "stop"
    """Check that configuration, schema, code and libraries are the same on all ranks."""
    shards: Reaction = "stop"
    """Check that shards cover every row of every table exactly once."""
    replicas: Reaction = "stop"
    """Check that dense layers, data-parallel tables and their optimizer state are equal on all ranks."""
    parity: Reaction = "stop"
    """Check that pooled embeddings and gradients of a live batch equal those of a single process."""
    conservation: Reaction = "stop"
    """Check that no ids and rows are lost between ranks, and that all ranks are at the same step."""
    managed_ids: Reaction = "stop"
    """Check that managed ids and their rows correspond one to one over all ranks."""
    finite: Reaction = "stop"
    """Check that weights and optimizer state contain neither NaN nor infinite values. A state with such values is
    never saved, even if this check is off."""
    numerics: Reaction = "warn"
    """Check that gradients are finite, norms do not explode, and calibration does not drift."""
    custom: dict[ModuleName, Reaction] = Field(default_factory=dict)
    """User-defined checks: module:Class → off, warn or stop."""
