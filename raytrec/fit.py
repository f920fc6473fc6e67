"""Whether a model, a schema and this machine fit together: asked before anything starts. No torch.

The models ask the same functions when they are built, so that there is one answer.
"""

from __future__ import annotations

import ast
import sys
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.machinery import PathFinder
from pathlib import Path

from raytrec.config import RunConfig
from raytrec.embeddings.footprint import GIB, footprint
from raytrec.embeddings.pins import pins
from raytrec.errors import ConfigError, did_you_mean
from raytrec.installed import built_for
from raytrec.model_sections import (
    DcnSection,
    DlrmSection,
    ModelSection,
    PythonSection,
    SequenceSection,
    TwoTowerSection,
)
from raytrec.reading import MOST_YAML_BYTES, read_bytes
from raytrec.schema import Schema
from raytrec.sequences import looked_up, read_by_id


def check_fit(config: RunConfig, schema: Schema, *, here: bool) -> None:
    """Refuses a configuration that cannot work with its schema.

    Args:
        here: whether the workers run on this machine, with its memory and its modules.

    Raises:
        ConfigError, SchemaError: labels, dims, features or a module that the model cannot take; tables, named
            by hand, that there are not; tables larger than the machine.
    """
    pins(config, schema)
    looked_up(schema, read_by_id(schema, config.model))
    check_model(schema, config.model)
    if here:
        if isinstance(config.model, PythonSection):
            check_class(config.model.name)
        check_memory(config, schema)


def check_model(schema: Schema, config: ModelSection) -> None:
    """Whether a built-in model can be made for a schema.

    Raises:
        ConfigError: it cannot.
    """
    if isinstance(config, PythonSection):
        return
    one_label(schema, config.name)
    if isinstance(config, DlrmSection | SequenceSection):
        one_dim(schema, config.name)
    if isinstance(config, SequenceSection):
        targets(schema, config)
    if isinstance(config, TwoTowerSection):
        members(schema, config)
    if isinstance(config, DcnSection) and config.bottom_mlp and not schema.dense:
        raise ConfigError(
            f"model.bottom_mlp is {config.bottom_mlp}, and the schema has no dense columns",
            where="model.bottom_mlp",
            expected="[] without dense columns",
            do="set model.bottom_mlp=[]",
        )


def one_label(schema: Schema, model: str) -> None:
    """Refuses several labels."""
    if len(schema.labels) > 1:
        raise ConfigError(
            f"the schema has {len(schema.labels)} labels ({', '.join(schema.labels)})",
            where="schema.yaml, labels",
            expected=f"one label: {model} predicts one",
            do="leave the one to predict in labels",
        )


def one_dim(schema: Schema, model: str) -> int:
    """The dim of all tables; refuses different ones."""
    dims = {table.dim for table in schema.tables.values()}
    if len(dims) > 1:
        raise ConfigError(
            f"the tables have dims {', '.join(map(str, sorted(dims)))}",
            where="schema.yaml, tables",
            expected=f"one dim for all tables: {model} takes dot products between them",
            do="give every table the same dim",
        )
    return dims.pop()


def targets(schema: Schema, config: SequenceSection) -> dict[str, str]:
    """Sequence → the feature that it is attended for.

    Raises:
        ConfigError: no sequence; a target that is none, or that has to be said.
    """
    sequences = [f for f, spec in schema.sparse.items() if spec.pooling == "sequence"]
    if not sequences:
        raise ConfigError(
            "the schema has no sequence",
            where="schema.yaml, sparse",
            expected="a feature of pooling: sequence for model.name=sequence",
            do="set pooling: sequence on the feature whose ids are in the order of time, or take dlrm",
        )
    return {sequence: _target(schema, config.target, sequence) for sequence in sequences}


def _target(schema: Schema, target: str | None, sequence: str) -> str:
    bags = [feature for feature, spec in schema.sparse.items() if spec.pooling != "sequence"]
    same = [feature for feature in bags if schema.sparse[feature].table == schema.sparse[sequence].table]
    if target in bags:
        return target
    if target is not None:
        near = did_you_mean(target, bags)
        raise ConfigError(
            f"'{target}' is no feature" + (f"; did you mean '{near}'?" if near else ""),
            where="model.target",
            expected=f"one of {', '.join(bags)}",
        )
    if len(same) != 1:
        raise ConfigError(
            f"for which feature is {sequence} to be read? {len(same)} others look up its table",
            where="model.target",
            expected="one feature that shares the sequence's table, or a word on which it is",
            do=f"set model.target to one of {', '.join(same or bags)}",
        )
    return same[0]


def members(schema: Schema, config: TwoTowerSection) -> dict[str, set[str]]:
    """Tower → its features and columns; each name of the schema is in one.

    Raises:
        ConfigError: a feature of no or of two towers; a pattern that matches nothing.
    """
    names = [*schema.dense, *schema.sparse]
    found: dict[str, set[str]] = {}
    for side, patterns in (("query", config.towers.query), ("item", config.towers.item)):
        found[side] = set()
        for pattern in patterns:
            matching = {name for name in names if fnmatchcase(name, pattern)}
            if not matching:
                near = did_you_mean(pattern, names)
                raise ConfigError(
                    f"no feature or dense column is named, or matches, '{pattern}'"
                    + (f"; did you mean '{near}'?" if near else ""),
                    where=f"model.towers.{side}",
                    expected=f"names or patterns of {', '.join(names)}",
                )
            found[side] |= matching
    both = found["query"] & found["item"]
    neither = set(names) - found["query"] - found["item"]
    if both or neither:
        what, which = ("both towers", both) if both else ("neither tower", neither)
        raise ConfigError(
            f"in {what}: {', '.join(sorted(which))}",
            where="model.towers",
            expected="each feature and dense column in one tower: a query's vector knows nothing of the item",
            do="name it under query or item, or leave it out of the schema",
        )
    return found


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
    """Whether this machine's memory can hold the tables and their optimizer state, where all is on CPUs.

    Raises:
        ConfigError: it cannot, whatever the plan.
    """
    if config.scaling.device == "cuda" or (config.scaling.device == "auto" and built_for() != "cpu"):
        return
    from raytrec.embeddings.hosts import host_memory

    settled, optimizer = pins(config, schema), config.optim.embeddings.name
    sizes = {
        name: footprint(table, settled[name].dtype, optimizer).total for name, table in schema.tables.items()
    }
    have, need = host_memory(), sum(sizes.values())
    if need > have:
        largest = max(sizes, key=sizes.get)
        table = schema.tables[largest]
        raise ConfigError(
            f"the tables take {need / GIB:,.1f} GiB with the state of {optimizer}, and this machine has "
            f"{have / GIB:,.1f} GiB",
            where=f"schema.yaml, tables; the largest is {largest}: {table.rows:,} rows × {table.dim}",
            expected="tables that fit into memory",
            do="lower rows (out_of_range: hash brings any id into range) or dim; or train on a cluster",
        )
