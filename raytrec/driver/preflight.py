"""Refuses configurations that do not fit their schema or machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raytrec.cluster.session import stays_here
from raytrec.common.errors import ConfigError, DataError, some
from raytrec.common.machine import built_for, require_compiler
from raytrec.config.features import resolve_features
from raytrec.config.models import check_model
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.transforms import Sample
from raytrec.doctor.host_checks import check_before_run
from raytrec.driver.prepare import RunPlan
from raytrec.driver.resume import check_warm_start
from raytrec.embeddings.constraints import MMAP_KERNEL, free_disk, resolve_constraints, table_optimizers
from raytrec.metrics.selection import Selection
from raytrec.planning.memory import GIB, check_disk, footprints, map_share
from raytrec.planning.validation import check_decay
from raytrec.tasks.columns import check_reserved
from raytrec.tasks.losses import BatchLoss
from raytrec.tasks.task import Task, check_model_learns, columns_of, needs_vectors, resolve_tasks
from raytrec.tracking.store import check_address
from raytrec.worker.loop import total_steps


def check_plan(plan: RunPlan) -> list[str]:
    """Refuses a run that cannot work; warnings about one that can.

    Raises:
        ConfigError, SchemaError: as in `check_fit`; or the weights of warm_start.from do not fit.
        DataError: as in `check_constant_labels`.
    """
    config, schema, train = plan.config, plan.schema, plan.datasets["train"]
    lines = copied_numbers(config, schema, total_steps(config, train.rows))
    lines += check_warm_start(config, schema) if plan.start == "warm" else []
    here = stays_here(config.scaling.address)
    check_fit(config, schema, here=here)
    lines += check_before_run() if here else []
    return lines + check_constant_labels(plan)


def check_fit(config: RunConfig, schema: Schema, *, here: bool) -> None:
    """Refuses a configuration that cannot work with its schema.

    Args:
        here: whether the workers run on this machine, with its memory.

    Raises:
        ConfigError, SchemaError: tasks, metrics, dims or features that the model cannot take; tables in
            plan.tables or optim.tables that the schema does not have; weight decay that kernels do
            not keep; train.compile without a compiler, or with graphs of sizes that change; tables larger
            than the machine; an address that no MLflow store has.
    """
    # With `auto` on GPUs there is also adam to refuse, by the workers: only they know.
    device = "cuda" if config.scaling.device == "cuda" else "cpu"
    check_decay(resolve_constraints(config, schema), table_optimizers(config, schema), device)
    check_drawn(config, schema)
    if config.tracking.enabled and config.tracking.uri:
        check_address(config.tracking.uri)
    features = resolve_features(schema, config.model)
    varying = [*features.sequences, *schema.of_candidates(schema.sparse)]
    if config.train.compile == "graphs" and varying:
        raise ConfigError(
            f"the model reads {some(varying)} id by id: sizes change from batch to batch",
            where="train.compile=graphs",
            expected="a model whose batches all have one size",
            do="set train.compile=true",
        )
    tasks = resolve_tasks(config.tasks, schema)
    check_model(schema, config.model, needs_vectors(tasks), columns_of(tasks))
    check_model_learns(tasks, config.model)
    check_candidates(config, schema, tasks)
    check_reserved(tasks, config.eval.slices, config.data.reserve_columns)
    selection, keeping = Selection(tasks, config.eval), config.checkpoint
    if keeping.keep_best or keeping.best_metric:
        selection.best(keeping.best_metric)
    if stopping := config.train.early_stopping:
        selection.best(stopping.metric, "train.early_stopping.metric")
    if here:
        if config.train.compile:
            require_compiler("cuda" if built_for() == "cuda" and config.scaling.device != "cpu" else "cpu")
        check_memory(config, schema)


def check_candidates(config: RunConfig, schema: Schema, tasks: Sequence[Task]) -> None:
    """Refuses what is not made for rows that are requests with candidates.

    Raises:
        ConfigError: names the key.
    """
    refused = {
        "model.lookup_l2": bool(config.model.l2_factors(schema)),
        "model.negatives": config.model.own_loss,
        "eval.retrieval": config.eval.retrieval is not None,
    }
    refused |= {f"tasks[{i}].loss": isinstance(task.loss, BatchLoss) for i, task in enumerate(tasks)}
    if schema.candidates and (found := [key for key, used in refused.items() if used]):
        raise ConfigError(
            f"{found[0]} cannot be used where rows are requests with candidates (schema.yaml, candidates)",
            where=found[0],
            expected="a loss of single examples, such as bce; no negatives, lookup_l2 or eval.retrieval",
            do="leave it out, or write a row for each candidate and remove candidates from schema.yaml",
        )


def check_drawn(config: RunConfig, schema: Schema) -> None:
    """Check that ids drawn for rows are in range of the tables that look them up.

    Raises:
        ConfigError: Some would be out of range.
    """
    for key, rows, feature, name in _drawn(config, schema):
        table = schema.tables[name]
        if table.out_of_range == "error" and not table.ids and rows > table.rows:
            raise ConfigError(
                f"ids up to {rows - 1:,} are drawn for {feature}, and table {name} has {table.rows:,} rows",
                where=key,
                expected=f"at most {table.rows:,}",
                do="leave rows out: the table's are the default",
            )


def _drawn(config: RunConfig, schema: Schema) -> Iterator[tuple[str, int, str, str]]:
    """Yield (key, its value, feature, table) for each `rows` of do: sample and each feature of its column."""
    for place, transform in enumerate(config.data.transforms):
        if isinstance(transform, Sample) and transform.rows:
            for feature, spec in schema.sparse.items():
                if schema.column_of(feature) == transform.column:
                    yield f"data.transforms[{place}].rows", transform.rows, feature, spec.table


def check_memory(config: RunConfig, schema: Schema) -> None:
    """Whether this machine's memory and disk can hold the tables and their optimizer state, where all is on
    CPUs.

    Raises:
        ConfigError: they cannot, whatever the plan.
    """
    if config.scaling.device == "cuda" or (config.scaling.device == "auto" and built_for() != "cpu"):
        return
    from raytrec.compat.ray_core import system_memory

    constraints, optimizers = resolve_constraints(config, schema), table_optimizers(config, schema)
    sizes = {table: size.device for table, size in footprints(config, schema, constraints, "cpu").items()}
    have, free, maps = system_memory(), free_disk(config), map_share(schema, 1)
    check_disk(constraints, schema, config, have - maps, free)
    need = sum(sizes.values()) + maps
    if need > have + (free if MMAP_KERNEL in config.plan.compute_kernels else 0):
        names = " and ".join(dict.fromkeys(optimizer.name for optimizer in optimizers.values()))
        largest = max(sizes, key=sizes.get)
        table = schema.tables[largest]
        raise ConfigError(
            f"the tables take {need / GIB:,.1f} GiB with the state of {names}, and this machine has "
            f"{have / GIB:,.1f} GiB",
            where=f"schema.yaml, tables; the largest is {largest}: {table.rows:,} rows × {table.dim}",
            expected="tables that fit into memory",
            do="lower rows (out_of_range: hash brings any id into range) or dim; train on a cluster; or put "
            f"large tables on the disk: plan.tables.{largest}.compute_kernel=fused_mmap",
        )


def copied_numbers(config: RunConfig, schema: Schema, steps: int) -> list[str]:
    """Return a warning for each number that does not fit the tables or the run.

    Args:
        steps: Number of steps of the whole run.
    """
    lines = [
        f"{key} is {rows:,}, and table {table} has {schema.tables[table].rows:,} rows: the ids from {rows:,} "
        "on are never drawn; leave rows out to draw among all"
        for key, rows, _, table in _drawn(config, schema)
        if rows < schema.tables[table].rows
    ]
    lines = list(dict.fromkeys(lines))  # features may share a table
    schedule = config.optim.schedule
    end = schedule.warmup_steps + (schedule.decay_steps or steps)
    if end < steps:
        lines.append(
            f"optim.schedule: learning rates are 0 from step {end:,} on, and the run has {steps:,} steps; "
            "leave decay_steps out to decay until its end"
        )
    return lines


def check_constant_labels(plan: RunPlan) -> list[str]:
    """Check in the footers that labels of data.train differ where a loss compares predictions with them.

    Returns:
        A warning for each task whose label has one value.

    Raises:
        DataError: a new run would learn to classify by a label of one class.
    """
    lines, constant = [], plan.datasets["train"].constant_labels
    for section, task in zip(plan.config.tasks, resolve_tasks(plan.config.tasks, plan.schema), strict=True):
        if task.label not in constant or task.loss.reads_vectors or task.loss.from_model:
            continue
        what = f"the label of task {task.name} is {constant[task.label]:g} in every row"
        classifies = task.loss.predicts in ("probability", "classes")
        if plan.start == "new" and classifies and ":" not in section.loss:
            raise DataError(
                f"{what}, from which {section.loss} learns nothing",
                where=f"data.train={plan.datasets['train'].uri}, column {task.label}",
                expected="rows of several classes",
                do="add the rows of the other classes, or leave the task out; from positives alone, "
                "in_batch_softmax and from_model can learn",
            )
        lines.append(
            f"{what} of data.train, from which {section.loss} learns nothing; in_batch_softmax and "
            "from_model can learn from positives alone"
        )
    return lines
