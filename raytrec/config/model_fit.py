"""Whether a built-in model can be made for a schema. No torch.

The driver asks before anything starts; the models ask the same functions when they are built.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.model_sections import (
    DcnSection,
    DlrmSection,
    ModelSection,
    PythonSection,
    SequenceSection,
    TwoTowerSection,
)
from raytrec.config.schema import Schema


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
