"""The sections `train`, `scaling` and `checkpoint`: steps, workers, and what is saved."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raytrec.config.base import Few, NonNegativeInt, Number, PositiveFloat, PositiveInt, Section


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
    activation_checkpointing: bool = Field(
        False,
        description="Compute the activations of each block of the dense model again in backward, instead of "
        "keeping them: less memory, more time, the same values. Not with train.compile.",
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
