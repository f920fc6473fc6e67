"""Whether a model, a schema and this machine fit together: asked before anything starts. No torch."""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.common.installed import built_for, require_compiler
from raytrec.common.reading import MOST_YAML_BYTES, read_bytes
from raytrec.config.features import resolve_features
from raytrec.config.models import PythonSection, check_model
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.transforms import Sample
from raytrec.embeddings.per_table import table_optimizers
from raytrec.embeddings.planner.constraints import resolve_constraints
from raytrec.embeddings.planner.disk import free_disk
from raytrec.embeddings.planner.footprint import GIB, MMAP_KERNEL, map_share
from raytrec.embeddings.planner.tiers import disk_refusal
from raytrec.embeddings.planner.validation import check_decay, footprints
from raytrec.metrics.selection import Selection
from raytrec.tasks.columns import check_reserved
from raytrec.tasks.options import check_model_learns
from raytrec.tasks.task import columns_of, needs_vectors, resolve_tasks
from raytrec.tracking.store import check_address


def check_fit(config: RunConfig, schema: Schema, *, here: bool) -> None:
    """Refuses a configuration that cannot work with its schema.

    Args:
        here: whether the workers run on this machine, with its memory and its modules.

    Raises:
        ConfigError, SchemaError: tasks, metrics, dims, features or a module that the model cannot take;
            tables, named in plan.tables or optim.tables, that there are not; weight decay that kernels do
            not keep; train.compile without a compiler; tables larger than the machine; an address that no
            MLflow store has.
    """
    # With `auto` on GPUs there is also adam to refuse, by the workers: only they know.
    device = "cuda" if config.scaling.device == "cuda" else "cpu"
    check_decay(resolve_constraints(config, schema), table_optimizers(config, schema), device)
    check_drawn(config, schema)
    if config.tracking.enabled and config.tracking.uri:
        check_address(config.tracking.uri)
    resolve_features(schema, config.model)
    tasks = resolve_tasks(config.tasks, schema)
    check_model(schema, config.model, needs_vectors(tasks), columns_of(tasks))
    check_model_learns(tasks, config.model)
    check_reserved(tasks, config.eval.slices, config.data.reserve_columns)
    selection, keeping = Selection(tasks, config.eval), config.checkpoint
    if keeping.keep_best or keeping.best_metric:
        selection.best(keeping.best_metric)
    if stopping := config.train.early_stopping:
        selection.best(stopping.metric, "train.early_stopping.metric")
    if here:
        if config.train.compile:
            require_compiler("cuda" if built_for() == "cuda" and config.scaling.device != "cpu" else "cpu")
        if isinstance(config.model, PythonSection):
            check_class(config.model.name)
        check_memory(config, schema)


def check_drawn(config: RunConfig, schema: Schema) -> None:
    """Looks whether ids that are drawn for rows are ids of the tables which look them up.

    Raises:
        ConfigError: some would be out of range.
    """
    for place, transform in enumerate(config.data.transforms):
        if not isinstance(transform, Sample):
            continue
        for feature, spec in schema.sparse.items():
            table = schema.tables[spec.table]
            drawn_for = schema.column_of(feature) == transform.column
            bounded = table.out_of_range == "error" and not table.ids
            if drawn_for and bounded and (transform.rows or 0) > table.rows:
                raise ConfigError(
                    f"ids up to {transform.rows - 1:,} are drawn for {feature}, and table {spec.table} has "
                    f"{table.rows:,} rows",
                    where=f"data.transforms[{place}].rows",
                    expected=f"at most {table.rows:,}",
                    do="leave rows out: the table's are the default",
                )


def check_class(path: str) -> None:
    """Looks for a class of the user's in the text of its module, which is not run: it imports torch.

    What cannot be told from the text (a name that the module gets in another way) is left to the workers.

    Raises:
        ConfigError: there is no such module, it is no Python, or nothing in it has this name.
    """
    module, _, name = path.partition(":")
    file = _file_of(module)
    if file is None:
        raise ConfigError(
            f"no model {path}: there is no module {module}",
            where="model.name",
            expected=f"{module} on Python's path, or in the folder that the command is given in",
        )
    if file.suffix != ".py":  # compiled
        return
    try:
        tree = ast.parse(read_bytes(file, MOST_YAML_BYTES))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"no model {path}: {file.name} is no Python: {error}", where=str(file)) from None
    except OSError as error:
        raise ConfigError(f"no model {path}: {error.strerror}", where=str(file)) from None
    known = _names(tree)
    if known is not None and name not in known:
        near = did_you_mean(name, sorted(known))
        raise ConfigError(
            f"no model {path}: the module has no {name}" + (f"; did you mean {near}?" if near else ""),
            where="model.name",
            expected="module:Class",
        )


def _file_of(module: str) -> Path | None:
    """The file of a module that has not been imported, nor those above it."""
    places: list[str] | None = [str(Path.cwd()), *sys.path]
    spec = None
    for part in module.split("."):
        if places is None:
            return None
        spec = None
        with suppress(Exception):  # whatever stands in Python's path
            spec = PathFinder.find_spec(part, places)
        if spec is None:
            return None
        places = list(spec.submodule_search_locations) if spec.submodule_search_locations else None
    return Path(spec.origin) if spec and spec.origin else None


def _names(tree: ast.Module) -> set[str] | None:
    """What a module's top level defines; None where only running it would tell."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("globals", "exec", "setattr"):
            return None
    return None if "*" in found or "__getattr__" in found else found


def check_memory(config: RunConfig, schema: Schema) -> None:
    """Whether this machine's memory and disk can hold the tables and their optimizer state, where all is on
    CPUs.

    Raises:
        ConfigError: they cannot, whatever the plan.
    """
    if config.scaling.device == "cuda" or (config.scaling.device == "auto" and built_for() != "cpu"):
        return
    from raytrec.embeddings.planner.hosts import host_memory

    constraints, optimizers = resolve_constraints(config, schema), table_optimizers(config, schema)
    sizes = {table: size.device for table, size in footprints(config, schema, constraints, "cpu").items()}
    have, free, maps = host_memory(), free_disk(config), map_share(schema, 1)
    if refusal := disk_refusal(constraints, schema, config, have - maps, free):
        raise refusal
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
