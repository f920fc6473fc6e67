"""RunConfig, which contains all sections of a configuration and is loaded from YAML and overrides.

The sections are defined in the other files of this folder. Neither torch nor Ray is imported, because importing them
takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from raytrec.common.errors import (
    MAX_WORD_LENGTH,
    ConfigError,
    find_similar_word,
    format_suggestion,
    join_first_lines,
    shorten_repr,
)
from raytrec.common.reading import parse_yaml
from raytrec.common.redaction import hide_all
from raytrec.common.storage import join_uri
from raytrec.config.base import Mark, Section, read_settings, reword_message
from raytrec.config.data import DataSection, RunSection, WarmStartSection
from raytrec.config.models import SECTIONS, AnyModel
from raytrec.config.models.ranking import DlrmSection
from raytrec.config.overrides import (
    Overrides,
    apply_override,
    convert_yaml_errors,
    hide_override_secrets,
    to_override_texts,
)
from raytrec.config.tables import OptimSection, PlanSection
from raytrec.config.tasks import EvalSection, TaskSection
from raytrec.config.training import (
    CheckpointSection,
    ChecksSection,
    ExportSection,
    ScalingSection,
    TrackingSection,
    TrainSection,
)
from raytrec.config.trust import find_foreign_code, find_origin, refuse_code

MAX_MISTAKES = 20  # listed in one error message
EXPECTED = "Input should be "  # prefix of pydantic's messages


class RunConfig(Section):
    """Configuration of a run. `raytrec config --schema` prints its JSON Schema."""

    run: RunSection = Field(default_factory=RunSection)
    warm_start: WarmStartSection = Field(default_factory=WarmStartSection)
    data: DataSection
    scaling: Annotated[ScalingSection, Mark.FREE] = Field(default_factory=ScalingSection)
    model: AnyModel = Field(default_factory=DlrmSection, description="Model and its inputs.")
    tasks: list[TaskSection] = Field(
        default_factory=lambda: [TaskSection()],
        min_length=1,
        description="Tasks to learn; default: the schema's first label, with binary cross-entropy.",
    )
    optim: OptimSection = Field(default_factory=OptimSection)
    plan: Annotated[PlanSection, Mark.FREE] = Field(default_factory=PlanSection)
    train: TrainSection = Field(default_factory=TrainSection)
    eval: Annotated[EvalSection, Mark.FREE] = Field(default_factory=EvalSection)
    checkpoint: Annotated[CheckpointSection, Mark.FREE] = Field(default_factory=CheckpointSection)
    export: Annotated[ExportSection, Mark.FREE, Mark.COMMON] = Field(default_factory=ExportSection)
    checks: Annotated[ChecksSection, Mark.FREE] = Field(default_factory=ChecksSection)
    tracking: Annotated[TrackingSection, Mark.FREE, Mark.COMMON] = Field(default_factory=TrackingSection)

    @model_validator(mode="after")
    def _check_combinations(self) -> RunConfig:
        data, train, minimum, workers = self.data, self.train, self.scaling.min_workers, self.scaling.max_workers
        workers_key = f"scaling.num_workers{'' if isinstance(self.scaling.num_workers, int) else '.max'}"
        if minimum > workers:
            raise ValueError(f"scaling.num_workers.min ({minimum}) exceeds scaling.num_workers.max ({workers})")
        if data.lanes < workers:
            raise ValueError(
                f"data.lanes is {data.lanes}, but {workers_key} is {workers}: each worker "
                "reads at least one lane; increase data.lanes, or lower the number of workers"
            )
        if data.global_batch_size < workers:
            raise ValueError(
                f"data.global_batch_size is {data.global_batch_size}, but {workers_key} is {workers}: each worker "
                "needs at least one row of a batch"
            )
        if train.compile == "graphs" and self.scaling.device == "cpu":
            raise ValueError(
                "train.compile=graphs records CUDA graphs, but scaling.device is cpu; set train.compile=true"
            )
        if train.compile and train.activation_checkpointing:
            raise ValueError(
                "train.compile and train.activation_checkpointing are both set; set one of them to false, "
                "because torch.compile itself selects the activations to recompute"
            )
        every, restores_best = train.eval_every_steps, train.early_stopping and train.early_stopping.restore_best
        if self.checkpoint.keep_best and not every:
            raise ValueError("checkpoint.keep_best is set, but train.eval_every_steps is not")
        if train.early_stopping and not every:
            raise ValueError("train.early_stopping is set, but train.eval_every_steps is not")
        if restores_best and not self.checkpoint.keep_best:
            raise ValueError("train.early_stopping.restore_best is set, but checkpoint.keep_best is not")
        if self.eval.retrieval and not (data.valid or data.test):
            raise ValueError("eval.retrieval is set, but neither data.valid nor data.test is set")
        is_in_order = data.shuffle == "none" and data.test and train.epochs == 1
        if every == "next_folder" and (not is_in_order or data.valid or data.holdout or restores_best):
            raise ValueError(
                "train.eval_every_steps=next_folder requires data.shuffle=none, data.test and train.epochs=1, and "
                "excludes data.valid, data.holdout and train.early_stopping.restore_best"
            )
        if every and not (data.valid or data.test or data.holdout):
            raise ValueError("train.eval_every_steps is set, but none of data.valid, data.holdout and data.test is")
        return self

    @property
    def checkpoint_root(self) -> str:
        """Return the folder of the run's checkpoints: checkpoint.dir, else a folder in run.dir, which must be set."""
        return self.checkpoint.dir or join_uri(self.run.dir, "checkpoints")

    def to_yaml(self) -> str:
        """Return the configuration as YAML, including all defaults, under the keys used in configuration files."""
        return yaml.safe_dump(self.model_dump(by_alias=True, mode="json"), sort_keys=False)

    def get_changed_values(self) -> dict[str, Any]:
        """Return the plain values that differ from the defaults.

        Keys that are explicitly set to their defaults, as in the config.yaml of a run folder, are omitted.
        """
        return self.model_dump(by_alias=True, mode="json", exclude_defaults=True)

    def with_overrides(self, overrides: Overrides) -> RunConfig:
        """Return a copy with overrides applied; if they change model.name, unset keys get the new model's defaults.

        Raises:
            ConfigError: An override is malformed, or the result is invalid, e.g. sets a key that the new model lacks.
        """
        return load_config(self.get_changed_values(), overrides)


def load_config(
    source: str | Path | dict | RunConfig,
    overrides: Overrides | None = None,
    *,
    elsewhere: str | None = None,
    allow_code: bool = False,
) -> RunConfig:
    """Load a RunConfig from a YAML file, a mapping or a RunConfig, and apply overrides.

    Args:
        source: Path of a YAML file (local, s3:// or gs://), the values of a configuration, or a RunConfig.
        overrides: `section.key=value` strings, whose values are YAML (`train.epochs=3`, `model={name: mf}`),
            or a mapping of such keys (overrides.py).
        elsewhere: Origin of values that another user may have written (trust.py). Default for a file: the result of
            `find_origin`, which treats every URI as such an origin.
        allow_code: True to accept code and servers named by values that another user may have written.

    Raises:
        ConfigError: The file cannot be read or is not YAML, the values name code that is not allowed, an override is
            malformed, or keys, types or combinations are invalid. Up to MAX_MISTAKES mistakes are listed, with the
            nearest key for an unknown key.
        DataError: The URI of the file is invalid, or its store cannot be reached.
    """
    if isinstance(source, RunConfig):
        values, where = source.model_dump(by_alias=True), "RunConfig"
    elif isinstance(source, dict):
        where = "config"
        with convert_yaml_errors(where):
            values = parse_yaml(yaml.safe_dump(source))  # a copy that contains only YAML types
    else:
        values, where = _read(str(source)), str(source)
        elsewhere = elsewhere or find_origin(where)
    foreign_code = find_foreign_code(values) if elsewhere and not allow_code else {}
    overrides = to_override_texts(overrides)
    for override in overrides:
        apply_override(values, override, RunConfig.model_fields)
    refuse_code(foreign_code, values, elsewhere or where)
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            _format_mistakes(error, values),
            where=where + (f" with {' '.join(map(hide_override_secrets, overrides))}" if overrides else ""),
            do="correct the configuration; `raytrec config --schema` describes all keys and their values",
        ) from None


def _read(uri: str) -> dict:
    missing = ConfigError("the config file does not exist", where=uri, expected="a YAML file such as jobs/own.yaml")
    values = read_settings(uri, "config", missing)
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError("the config is not a mapping of sections", where=uri, expected="data: {…}, model: {…}, …")
    return values


def _format_mistakes(error: ValidationError, values: dict) -> str:
    """Return one line per invalid key; a section is omitted if one of its keys is invalid."""
    listed = [dict(mistake) for mistake in error.errors()[:MAX_MISTAKES]]
    places: dict[tuple[str, ...], list[dict]] = {}
    for mistake in listed:
        places.setdefault(_locate_mistake(mistake, values), []).append(mistake)
    above = {place[:depth] for place in places for depth in range(len(place))}
    lines = [_explain(".".join(place), mistakes) for place, mistakes in places.items() if place not in above]
    return join_first_lines(lines, error.error_count() - len(listed) + len(lines))


def _locate_mistake(mistake: dict, values: Any) -> tuple[str, ...]:
    """Return the keys of the file that lead to an error: pydantic's location without union members."""
    place = []
    for part in mistake["loc"]:
        if part in values if isinstance(values, dict) else isinstance(values, list) and isinstance(part, int):
            values = values[part]
            place.append(str(part))
    return (*place, str(mistake["loc"][-1])) if mistake["type"] == "missing" else tuple(place)


def _explain(place: str, mistakes: list[dict]) -> str:
    """Return one line about the errors of a key. A key of a union type has one error per member."""
    error, kind = mistakes[0], mistakes[0]["type"]
    loc: tuple = error["loc"]
    section, model, *rest = (*loc, None, None)
    if kind == "extra_forbidden" and section == "model" and model in SECTIONS and rest[1:] == [None, None]:
        near = find_similar_word(str(rest[0]), list(SECTIONS[model].model_fields))
        return f"{place}: unknown key of model {model}" + (f"; did you mean model.{near}?" if near else "")
    if kind == "extra_forbidden":
        near = _find_nearest_key(place)
        return f"{place}: unknown key" + (f"; did you mean {near}?" if near else "")
    if kind == "missing":
        return f"{place}: missing"
    if kind == "value_error":
        message = error["msg"].removeprefix("Value error, ")
        return message if not place or message.startswith(f"{section}.") else f"{place}: {message}"
    texts = dict.fromkeys(reword_message(mistake["msg"]) for mistake in mistakes)
    message = "; or ".join(texts).replace(f"; or {EXPECTED}", " or ")
    if isinstance(error["input"], dict) and "names" in (context := error.get("ctx", {})):  # base.build_section_union
        message += format_suggestion(str(error["input"].get(context["key"])), context["names"].split(", "))
    return f"{place}: {message} (got {shorten_repr(hide_all({place: error['input']})[place])})"


def _find_nearest_key(place: str) -> str | None:
    """Return a known key with a similar spelling, else a key with a similar last part, else None."""
    from difflib import get_close_matches

    if len(place) > MAX_WORD_LENGTH:
        return None
    keys = [key for key, _ in _iterate_fields()]
    if near := get_close_matches(place, keys, n=1, cutoff=0.85):
        return near[0]
    section, _, name = place.rpartition(".")
    siblings = {key.rpartition(".")[2]: key for key in keys if key.rpartition(".")[0] == section}
    if meant := find_similar_word(name, list(siblings)):
        return siblings[meant]
    last = {key.rpartition(".")[2]: key for key in keys}
    near = get_close_matches(name, list(last), n=1, cutoff=0.7)
    return last[near[0]] if near else None


def list_keys_with(mark: Mark) -> tuple[str, ...]:
    """Return the names of the sections and keys that have a mark, as section or section.key.

    Keys that only inherit the mark from their section are omitted.
    """
    return tuple(key for key, field in _iterate_fields() if mark in field.metadata)


def _iterate_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield every section and every key, as section.key, with its pydantic field."""
    for name, field in model.model_fields.items():
        key = prefix + (field.alias or name)
        yield key, field
        parts = (field.annotation, *get_args(field.annotation))
        for part in (get_args(p)[0] if get_origin(p) is Annotated else p for p in parts):
            if isinstance(part, type) and issubclass(part, Section):
                yield from _iterate_fields(part, key + (".*." if get_origin(field.annotation) is dict else "."))
