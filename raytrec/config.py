"""One RunConfig: every knob, its unit and its default. YAML plus `section.key=value` overrides.

No torch or Ray here: `raytrec config` answers in well under a second.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from raytrec.errors import ConfigError, did_you_mean
from raytrec.storage import sibling


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, validate_default=True)


class RunSection(Section):
    name: str | None = Field(None, description="Name of the run; default: the config's name and the time.")
    dir: str | None = Field(
        None, description="The run folder: result, checkpoint, config; default: runs/NAME."
    )
    seed: NonNegativeInt = Field(0, description="Seeds initial weights, epoch order and dropout.")


class DataSection(Section):
    train: str = Field(description="Folder of Parquet files to train on (local, s3:// or gs://).")
    valid: str | None = Field(None, description="Folder evaluated every train.eval_every_steps.")
    test: str | None = Field(None, description="Folder evaluated at the end; default: data.valid.")
    schema_path: str | None = Field(
        None, alias="schema", description="The schema.yaml; default: the one in the folder above data.train."
    )
    global_batch_size: PositiveInt = Field(2048, description="Rows per step over all workers together.")
    shuffle: Literal["none", "groups", "window"] = Field(
        "window",
        description="none: file order. groups: row groups in a new seeded order each epoch. window: also "
        "rows within a window of row groups.",
    )
    window: PositiveInt = Field(
        2, description="Row groups of each lane whose rows are mixed by shuffle=window."
    )
    lanes: PositiveInt = Field(
        24, description="Parts that a global batch is read from at once; the most workers that can share it."
    )
    drop_last: bool = Field(False, description="Leave out an epoch's last, smaller batch.")
    readers: PositiveInt = Field(1, description="Ray Data tasks that read for one worker at the same time.")
    prefetch: PositiveInt = Field(4, description="Batches made ready ahead of the step, for each worker.")

    @property
    def schema_uri(self) -> str:
        """Where the schema is: data.schema, or schema.yaml in the folder above data.train."""
        return self.schema_path or sibling(self.train, "schema.yaml")


class ScalingSection(Section):
    workers: PositiveInt = Field(2, description="Worker processes; on GPUs one for each GPU.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where Ray has GPUs.")
    cpus_per_worker: PositiveInt = Field(1, description="CPUs that Ray sets aside for one worker.")
    address: str | None = Field(
        None,
        description="Ray cluster to join ('auto' or HOST:PORT); default: the one of a Ray job, else a "
        "local one on loopback, ended with the run.",
    )
    timeout_s: PositiveInt = Field(300, description="Seconds that a collective may wait for another rank.")


class ModelSection(Section):
    name: Literal["dlrm"] = Field("dlrm", description="The model.")
    bottom_mlp: list[PositiveInt] = Field(
        [128], description="Hidden sizes between the dense columns and their embedding."
    )
    top_mlp: list[PositiveInt] = Field([128, 64], description="Hidden sizes between interactions and logit.")
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout in the top MLP while training.")


class EmbeddingOptim(Section):
    name: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = Field(
        "rowwise_adagrad", description="Updates tables in backward (fused); adam on CPU: a dense update."
    )
    lr: PositiveFloat = Field(0.02, description="Learning rate.")
    eps: PositiveFloat = Field(1e-8, description="Added to the root of the second moment (not sgd).")


class DenseOptim(Section):
    name: Literal["adam", "adagrad", "sgd"] = Field("adam", description="Optimizer of the dense layers.")
    lr: PositiveFloat = Field(1e-3, description="Learning rate.")
    weight_decay: NonNegativeFloat = Field(0.0, description="L2 penalty.")


class OptimSection(Section):
    embeddings: EmbeddingOptim = Field(default_factory=EmbeddingOptim)
    dense: DenseOptim = Field(default_factory=DenseOptim)


class PlanSection(Section):
    sharding: list[Literal["table_wise", "row_wise", "column_wise", "data_parallel"]] = Field(
        ["table_wise", "row_wise"], min_length=1, description="Ways of sharding that the planner may choose."
    )


class TrainSection(Section):
    epochs: PositiveInt = Field(1, description="Passes over data.train.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many steps.")
    eval_every_steps: PositiveInt | None = Field(
        None, description="Evaluate on data.valid (else data.test) this often; the end is always evaluated."
    )
    log_every_steps: PositiveInt = Field(20, description="Report loss and speed this often.")


class TrackingSection(Section):
    uri: str | None = Field(
        None, description="MLflow store or server; default: mlflow.db (sqlite) beside the run folder."
    )
    experiment: str = Field("raytrec", description="MLflow experiment.")


class RunConfig(Section):
    """A whole run. `raytrec config --schema` prints this as JSON Schema."""

    run: RunSection = Field(default_factory=RunSection)
    data: DataSection
    scaling: ScalingSection = Field(default_factory=ScalingSection)
    model: ModelSection = Field(default_factory=ModelSection)
    optim: OptimSection = Field(default_factory=OptimSection)
    plan: PlanSection = Field(default_factory=PlanSection)
    train: TrainSection = Field(default_factory=TrainSection)
    tracking: TrackingSection = Field(default_factory=TrackingSection)

    @model_validator(mode="after")
    def _possible(self) -> RunConfig:
        if self.data.lanes < self.scaling.workers:
            raise ValueError(
                f"data.lanes is {self.data.lanes} and scaling.workers {self.scaling.workers}: each worker "
                "reads at least one lane; raise data.lanes"
            )
        if self.data.global_batch_size < self.scaling.workers:
            raise ValueError(
                f"data.global_batch_size is {self.data.global_batch_size} and scaling.workers "
                f"{self.scaling.workers}: each worker needs at least one row of a batch"
            )
        if self.train.eval_every_steps and not (self.data.valid or self.data.test):
            raise ValueError("train.eval_every_steps is set, but neither data.valid nor data.test is")
        if "column_wise" in self.plan.sharding and self.optim.embeddings.name == "rowwise_adagrad":
            raise ValueError(
                "plan.sharding has column_wise and optim.embeddings.name is rowwise_adagrad: its state is "
                "one value per row, and column shards would each keep their own; use adagrad, or leave out "
                "column_wise"
            )
        return self

    def to_yaml(self) -> str:
        """The resolved whole, every default included, in the file's own spelling."""
        return yaml.safe_dump(self.model_dump(by_alias=True), sort_keys=False)


def load_config(source: str | Path | dict | RunConfig, overrides: list[str] | None = None) -> RunConfig:
    """A RunConfig from a YAML file, a mapping or a RunConfig, with overrides on top.

    Args:
        source: path of a YAML file, or its values.
        overrides: `section.key=value` strings; values are YAML (`train.epochs=3`, `model.top_mlp=[64,32]`).

    Raises:
        ConfigError: no file, not YAML, unknown keys (with the nearest valid one), wrong types or impossible
            combinations; all of them in one message.
    """
    if isinstance(source, RunConfig):
        values, where = source.model_dump(by_alias=True), "RunConfig"
    elif isinstance(source, dict):
        values, where = yaml.safe_load(yaml.safe_dump(source)), "config"
    else:
        values, where = _read(Path(source)), str(source)
    for override in overrides or []:
        _apply(values, override)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            "\n".join(_explain(e) for e in error.errors()),
            where=where + (f" with {' '.join(overrides)}" if overrides else ""),
            do="`raytrec config --schema` lists every key",
        ) from None


def _read(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (FileNotFoundError, IsADirectoryError):
        raise ConfigError(
            "there is no such config file", where=str(path), expected="a YAML file, as in jobs/"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"not YAML: {' '.join(str(error).split())}", where=str(path)) from None
    if not isinstance(values, dict):
        raise ConfigError("the config is not a mapping of sections", where=str(path))
    return values


def _apply(values: dict, override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) < 2:
        raise ConfigError(
            f"'{override}' is not an override", where="command line", expected="section.key=value"
        )
    try:
        value = yaml.safe_load(text) if text else None
    except yaml.YAMLError:
        raise ConfigError(f"'{text}' is not a YAML value", where=f"command line, {key}") from None
    for part in parts[:-1]:
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, dict):
            raise ConfigError(f"'{part}' is a value, not a section", where=f"command line, {key}")
    values[parts[-1]] = value


def _explain(error: dict) -> str:
    place = ".".join(str(p) for p in error["loc"])
    if error["type"] == "extra_forbidden":
        near = _nearest(place)
        return f"{place}: unknown key" + (f"; did you mean {near}?" if near else "")
    if error["type"] == "missing":
        return f"{place}: missing"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return message
    return f"{place}: {message} (got {error['input']!r})"


def _nearest(place: str) -> str | None:
    """The valid key that a wrong one may mean: one spelt alike, else one whose last part is."""
    from difflib import get_close_matches

    keys = _all_keys()
    if near := get_close_matches(place, keys, n=1, cutoff=0.85):
        return near[0]
    last = {key.rpartition(".")[2]: key for key in keys}
    near = did_you_mean(place.rpartition(".")[2], list(last))
    return last[near] if near else None


def _all_keys(model: type[BaseModel] = RunConfig, prefix: str = "") -> list[str]:
    """Every key of the configuration as section.key, and the sections themselves."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        keys.append(key)
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, Section):
                keys += _all_keys(part, key + ".")
    return keys


def json_schema() -> dict[str, Any]:
    """The JSON Schema of RunConfig, for editors."""
    return RunConfig.model_json_schema(by_alias=True)
