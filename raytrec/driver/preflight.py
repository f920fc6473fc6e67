"""Checks of a configuration before a run, against its schema, data and machine, and `raytrec plan`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from raytrec.cluster.session import starts_local_ray
from raytrec.common.errors import ConfigError, DataError, convert_os_errors, shorten_repr
from raytrec.common.formatting import format_count
from raytrec.common.machine import get_build_device, require_compiler
from raytrec.common.reading import UnreadableError
from raytrec.common.storage import read_yaml
from raytrec.config.base import NonNegativeFloat
from raytrec.config.features import resolve_features
from raytrec.config.models import PythonSection, check_model
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema, format_yaml_scalar
from raytrec.config.transforms import Sample
from raytrec.doctor.host_checks import check_before_run
from raytrec.driver.prepare import RunPlan, resolve
from raytrec.driver.resume import check_warm_start
from raytrec.embeddings.constraints import MMAP_KERNEL, measure_free_disk, resolve_constraints, resolve_optimizers
from raytrec.metrics.selection import Selection
from raytrec.planning.dry_run import ClusterEstimator
from raytrec.planning.machines import MACHINES, Cluster, find_machine, parse_cluster
from raytrec.planning.memory import GIB, check_disk, estimate_footprints, estimate_id_map_bytes
from raytrec.planning.plan_report import Plans
from raytrec.planning.rates import Rates
from raytrec.planning.validation import check_decay
from raytrec.tasks.losses import BatchLoss
from raytrec.tasks.task import Task, check_model_learns, count_logits, needs_vectors, resolve_tasks
from raytrec.tasks.task_columns import check_group_columns, explain_ignored_log_odds
from raytrec.tracking.store import check_tracking_uri
from raytrec.worker.loop import count_total_steps, resolve_evaluation_interval

PRICES_ADAPTER = TypeAdapter(Annotated[dict[str, NonNegativeFloat], Field(min_length=1)])
ANY_MACHINE = "any"  # --on any: for each known machine, as many as needed


def check_plan(plan: RunPlan) -> list[str]:
    """Check that a planned run can work, and return warnings for the user.

    Raises:
        ConfigError, SchemaError: As in `check_fit` and `check_warm_start`.
        RunError, CheckpointError: The checkpoint in warm_start.from is missing or damaged.
        DataError: As in `check_constant_labels`.
    """
    config, schema, train = plan.config, plan.schema, plan.datasets["train"]
    lines = check_row_and_step_counts(config, schema, count_total_steps(config, train.rows))
    lines += check_warm_start(config, schema, train.text_ids) if plan.start == "warm" else []
    here = starts_local_ray(config.scaling.address)
    check_fit(config, schema, on_this_machine=here)
    lines += check_before_run() if here else []
    if config.train.initial_bias == "log_odds" and (reason := explain_ignored_log_odds(config, schema)):
        lines.append(f"train.initial_bias=log_odds has no effect, because {reason}")
    lines += [
        f"dense column {name} has absolute values up to {value:,.0f}, which make logits and gradients large; this is "
        f"avoided by scale: {{{format_yaml_scalar(name)}: {{log: true}}}} or its mean and std in schema.yaml, or by "
        f"{{do: log, columns: [{format_yaml_scalar(name)}]}} in data.transforms"
        for name, value in plan.datasets["train"].large_columns.items()
        if name != getattr(config.model, "request_time", None)
    ]
    return lines + check_constant_labels(plan)


def check_fit(config: RunConfig, schema: Schema, *, on_this_machine: bool) -> None:
    """Check that the settings of a configuration are compatible with each other and with its schema.

    Args:
        config: Configuration to check.
        schema: Schema of the data.
        on_this_machine: True if the workers run on this machine; the function then also checks whether the tables
            fit into its memory, and whether it has the compiler that train.compile needs.

    Raises:
        ConfigError, SchemaError: The model cannot use the tasks, metrics, dims or features; a setting does not support
            candidates; sampled ids are out of range; a column of groups is not in data.reserve_columns; plan.tables or
            optim.tables name tables that the schema lacks; kernels do not support the weight decay; restore_best
            lacks the best checkpoints; train.compile lacks a compiler, or is graphs although batch sizes vary; the
            tables do not fit on this machine; or tracking.uri is not the address of an MLflow store.
    """
    # scaling.device=auto counts as cpu here; nodes.check_constraints repeats the check once the device is known.
    device = "cuda" if config.scaling.device == "cuda" else "cpu"
    check_decay(resolve_constraints(config, schema), resolve_optimizers(config, schema), device)
    check_sampled_ids(config, schema)
    if config.tracking.enabled and config.tracking.uri:
        check_tracking_uri(config.tracking.uri)
    features = resolve_features(schema, config.model)
    varying = [*features.sequences, *schema.select_candidate_names(schema.sparse)]
    if config.train.compile == "graphs" and varying:
        raise ConfigError(
            f"the model reads {shorten_repr(varying)} id by id or for each candidate, so batches differ in size",
            where="train.compile=graphs",
            expected="batches that all have the same size",
            do="set train.compile=true",
        )
    tasks = resolve_tasks(config.tasks, schema)
    check_model(schema, config.model, needs_vectors(tasks), count_logits(tasks))
    check_model_learns(tasks, config.model)
    check_candidates(config, schema, tasks)
    check_group_columns(tasks, config.eval.slices, config.data.reserve_columns)
    selection, keeping = Selection(tasks, config.eval), config.checkpoint
    if keeping.keep_best or keeping.best_metric:
        selection.best(keeping.best_metric)
    if stopping := config.train.early_stopping:
        metric = selection.best(stopping.metric, "train.early_stopping.metric").key
        if stopping.restore_best and metric != (best := selection.best(keeping.best_metric).key):
            raise ConfigError(
                f"train.early_stopping compares {metric}, but only the checkpoints with the best {best} are kept",
                where="train.early_stopping.restore_best",
                expected="equal metrics, so that the checkpoint of the best evaluation exists",
                do=f"set checkpoint.best_metric={metric}",
            )
    if on_this_machine:
        if config.train.compile:
            require_compiler("cuda" if get_build_device() == "cuda" and config.scaling.device != "cpu" else "cpu")
        check_memory(config, schema)


def check_candidates(config: RunConfig, schema: Schema, tasks: Sequence[Task]) -> None:
    """Check that every setting supports rows that are requests with candidates, if the schema has candidates.

    Raises:
        ConfigError: A setting does not support such rows (the message names its key), or model.lookup_l2 is invalid.
    """
    refused = {
        "model.lookup_l2": bool(config.model.l2_factors(schema)),
        "model.gives_loss" if isinstance(config.model, PythonSection) else "model.negatives": config.model.own_loss,
        "eval.retrieval": config.eval.retrieval is not None,
    }
    for i, task in enumerate(tasks):  # items are columns of requests, not of candidates
        is_by_item = isinstance(task.loss, BatchLoss) and task.loss.by == "item"
        refused |= {f"tasks[{i}].{key}": is_by_item and getattr(task, key) for key in ("item", "item_frequency")}
    if schema.candidates and (keys := [key for key, used in refused.items() if used]):
        raise ConfigError(
            f"{keys[0]} does not support rows that are requests with candidates (schema.yaml, candidates)",
            where=keys[0],
            expected="one candidate per row, or a configuration without this setting",
            do="remove the setting, or write one row per candidate and remove candidates from schema.yaml",
        )


def check_sampled_ids(config: RunConfig, schema: Schema) -> list[str]:
    """Check that sampled ids (`rows` of a transform `do: sample`) are in the range of the tables that look them up.

    Returns:
        A warning for each transform that never samples some ids of a table.

    Raises:
        ConfigError: Some sampled ids would be out of range.
    """
    lines, transforms = [], enumerate(config.data.transforms)
    for place, sample in [(n, each) for n, each in transforms if isinstance(each, Sample) and each.rows]:
        key, rows = f"data.transforms[{place}].rows", sample.rows
        for feature in (name for name in schema.sparse if schema.get_ids_column(name) == sample.column):
            name = schema.sparse[feature].table
            table = schema.tables[name]
            size = format_count(table.rows, "row")
            if table.out_of_range == "error" and not table.ids and rows > table.rows:
                raise ConfigError(
                    f"ids up to {rows - 1:,} are sampled for {feature}, but table {name} has {size}",
                    where=key,
                    expected=f"at most {table.rows:,}",
                    do=f"remove {key}, whose default is the number of rows of the table",
                )
            if rows < table.rows:
                lines.append(
                    f"{key} is {rows:,}, but table {name} has {size}: ids from {rows:,} on are never "
                    "sampled; without the key rows, all ids are sampled"
                )
    return list(dict.fromkeys(lines))  # features may share a table


def check_memory(config: RunConfig, schema: Schema) -> None:
    """Check that the memory and disk of this machine can hold the tables and their optimizer state.

    The disk counts if plan.compute_kernels includes fused_mmap. The check is skipped if the tables may be on GPUs.

    Raises:
        ConfigError: Memory or disk are too small for the tables under every plan.
    """
    if config.scaling.device == "cuda" or (config.scaling.device == "auto" and get_build_device() != "cpu"):
        return
    from raytrec.compat.ray_core import measure_system_memory

    constraints, optimizers = resolve_constraints(config, schema), resolve_optimizers(config, schema)
    sizes = {table: size.device for table, size in estimate_footprints(config, schema, constraints, "cpu").items()}
    memory, free, id_maps = (measure_system_memory(), measure_free_disk(config), estimate_id_map_bytes(schema, 1))
    check_disk(constraints, schema, config, memory - id_maps, free)
    required = sum(sizes.values()) + id_maps
    uses_disk = MMAP_KERNEL in config.plan.compute_kernels
    if required > memory + (free if uses_disk else 0):
        disk = f" and {free / GIB:,.1f} GiB of free disk space" if uses_disk else ""
        names = " and ".join(dict.fromkeys(optimizer.name for optimizer in optimizers.values()))
        largest = max(sizes, key=sizes.get)
        table = schema.tables[largest]
        raise ConfigError(
            f"the tables need {required / GIB:,.1f} GiB including the optimizer state of {names}, but this "
            f"machine has {memory / GIB:,.1f} GiB of memory{disk}",
            where=f"schema.yaml, tables; the largest is {largest}: {table.rows:,} rows × {table.dim}",
            expected=f"tables that fit in memory{' and on disk' if uses_disk else ''}",
            do=f"reduce dim or rows{'' if table.ids else ' (out_of_range: hash maps ids into range)'}; or use a cluster"
            + ("" if uses_disk else f"; or store tables on disk: plan.tables.{largest}.compute_kernel=fused_mmap"),
        )


def check_row_and_step_counts(config: RunConfig, schema: Schema, steps: int) -> list[str]:
    """Return a warning for each number of rows or steps in the settings that does not match the tables or the run.

    The checked settings are `do: sample`, optim.schedule and train.early_stopping.

    Args:
        config: Configuration of the run.
        schema: Schema of the run.
        steps: Number of steps of the whole run.

    Raises:
        ConfigError: As in `check_sampled_ids`.
    """
    lines = check_sampled_ids(config, schema)
    schedule = config.optim.schedule
    end = schedule.warmup_steps + (schedule.decay_steps or steps)
    if end < steps:
        lines.append(
            f"optim.schedule: learning rates are 0 from step {end:,} on, but the run has {steps:,} steps; "
            "without decay_steps, they decay until the end of the run"
        )
    stopping, every = config.train.early_stopping, resolve_evaluation_interval(config, steps)
    if stopping and every:
        is_single = stopping.restore_best or stopping.target is not None  # then, one evaluation can have an effect
        if (earliest := every * (1 if is_single else 1 + (stopping.patience or 0))) >= steps:
            lines.append(
                f"train.early_stopping has no effect: training could end at step {earliest:,} at the earliest, but the "
                f"run has {format_count(steps, 'step')}; set train.eval_every_steps below {every:,}"
                + ("" if is_single else ", or lower train.early_stopping.patience")
            )
    return lines


def check_constant_labels(plan: RunPlan) -> list[str]:
    """Check in the footers of data.train that each label that a loss compares with predictions has several values.

    Returns:
        A warning for each task whose label has only one value; [] if the footers do not contain the values.

    Raises:
        DataError: In a new run, the label of a classification task with a built-in loss has only one value.
    """
    lines, constant = [], plan.datasets["train"].constant_labels
    for section, task in zip(plan.config.tasks, resolve_tasks(plan.config.tasks, plan.schema), strict=True):
        if task.label not in constant or task.loss.reads_vectors or task.loss.from_model:
            continue
        finding = f"the label of task {task.name} is {constant[task.label]:g} in every row that has it"
        are_positive = constant[task.label] == 1
        losses = "; the losses in_batch_softmax and from_model can learn from positives alone" if are_positive else ""
        classifies = task.loss.predicts in ("probability", "classes")
        if plan.start == "new" and classifies and ":" not in section.loss:
            raise DataError(
                f"{finding}, so {section.loss} cannot learn from the label",
                where=f"data.train={plan.datasets['train'].uri}, column {task.label}",
                expected="rows of several classes",
                do=f"add rows of the other classes, or remove the task{losses}",
            )
        lines.append(f"{finding} in data.train, so {section.loss} may learn nothing from the label{losses}")
    return lines


def plan(
    source: str | Path | dict,
    overrides: list[str],
    on: str | None = None,
    rates: str | Path | None = None,
    prices: str | Path | None = None,
) -> Plans:
    """Predict a configuration's memory and step time on given machines from its schema, without reading data.

    Args:
        source: Config file or its values; data.schema, or schema.yaml next to data.train, must exist.
        overrides: `section.key=value` strings.
        on: Clusters, separated by commas, such as 2x8xh100-sxm,4x48gib (machines.parse_cluster). "any" means the
            smallest cluster of each known machine that can hold the tables. Default without prices:
            scaling.num_workers GPUs (on CPU: workers) with 80 GiB each and at most 8 per host.
        rates: File of measured Rates; default: rates from data sheets for named machines, and no times for others.
        prices: File of machine → price per hour. Unless `on` includes any, the smallest cluster of each of these
            machines is planned.

    Returns:
        Plans: Estimates for the clusters in `on`, and for the smallest clusters, sorted by size and price.

    Raises:
        ConfigError, SchemaError: The input is invalid.
        DataError: A path is not valid, or its store cannot be reached.
        RunError: There is no checkpoint in warm_start.from.
    """
    from raytrec.worker.build import build_unsharded

    config = resolve(load_config(source, overrides), source)
    schema = Schema.load(config.data.schema_uri)
    check_fit(config, schema, on_this_machine=False)
    costs = _load_prices(prices) if prices else {}
    predict = ClusterEstimator(config, schema, build_unsharded, Rates.load(rates) if rates else None)
    names = [name.strip() for name in (on or "").split(",") if name.strip()]
    clusters = [parse_cluster(name) for name in names if name != ANY_MACHINE]
    if not names and not costs:
        workers = config.scaling.max_workers
        gpus = max(count for count in range(1, 9) if workers % count == 0)
        clusters = [Cluster.from_sizes(workers // gpus, gpus, 80)]
    choices = list(MACHINES.values()) if ANY_MACHINE in names else [find_machine(name, str(prices)) for name in costs]
    chosen = predict.choose_clusters(choices, costs)
    estimates = [predict(cluster, remedies=True) for cluster in clusters]
    return Plans(config=config, schema=schema, on=estimates, chosen=chosen, prices=costs)


def _load_prices(path: str | Path) -> dict[str, float]:
    """Read a YAML file of prices, and return full name of a machine → price per hour.

    Raises:
        ConfigError: The file cannot be read, is not a mapping of prices of at least 0, or names an unknown machine.
        DataError: The path is not valid, or its store cannot be reached.
    """
    where = {"where": str(path), "expected": "machines and prices per hour, such as 8xh100-sxm: 55.04"}
    with convert_os_errors("cannot read the prices", ConfigError, **where):
        try:
            prices = PRICES_ADAPTER.validate_python(read_yaml(str(path)))
        except UnreadableError as error:
            raise ConfigError(f"cannot read the prices: {error}", **where) from None
        except ValidationError:
            raise ConfigError("the file is not a mapping of machines to prices of at least 0", **where) from None
    return {find_machine(name, str(path)).name: price for name, price in prices.items()}
