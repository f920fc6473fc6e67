"""Models: each has its section in raytrec/config/models.

A model is a plain nn.Module built from (schema, its section of the configuration, outputs). Its forward
takes the dense columns, float32 [B, n], and the inputs of the sparse features, a dict of feature →

- pooled embeddings, float32 [B, dim of its table];
- inputs.Sequence(vectors [B, L, dim], present [B, L]) for features of pooling: sequence, if the section has a
  max_length L: embeddings id by id, the most recent first. Without max_length they are pooled by their mean;

and returns logits, float32 [B] for one output, else [B, outputs]: a column for each task, or as many as it
has classes, in the order of the tasks. The tasks decide what they mean and what is learned from them
(raytrec/tasks): a model sees no labels. One that takes `vectors` can give those of query and item, too, for
losses that compare the rows of a batch: [B, outputs + 2·D], the query's columns before the item's at the end.
One whose section has `own_loss` gives its own loss, which is added to those of the tasks: one column
after its outputs and before vectors, what each row adds to it, finite for padding, 0 in eval mode.

One whose section `retrieves` has two more methods, called like forward: `query`, float32 [B, D] (or [B,
outputs, D], of which retrieval takes the last), and `item`, [B, D]. Each looks at nothing but the features
that the section's `tower_members` names; the dot product orders the items of a query as its scores do. So
items can be ranked all at once, and found in an index (docs/retrieval.md).

It knows nothing of tables and ranks: `embeddings.pooling.PooledEmbeddings` looks up and pools before it
(recommender.py). It computes each row from that row alone (no batch norm), so that how rows are dealt to
ranks changes nothing.

A class of yours is one of these models, too: `model.name: "my.module:MyModel"`, with what it wants to know
under `model.options`. It is given `outputs`, `vectors` and `tasks` (task → its columns of logits, in their
order, for layers of each task's own) only if its __init__ takes them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from raytrec.common.errors import ConfigError
from raytrec.common.registry import find_code
from raytrec.config.models import ModelSection, PythonSection, check_model
from raytrec.config.schema import Schema


def build_model(
    schema: Schema,
    config: ModelSection,
    outputs: int = 1,
    vectors: bool = False,
    tasks: Mapping[str, int] | None = None,
) -> nn.Module:
    """The model that `model.name` names.

    Args:
        outputs: columns of logits; 0 only with `vectors`.
        vectors: whether it gives vectors of query and item, too.
        tasks: task → its columns, `outputs` in all, in the order of the columns; default: a task for each
            column, without its own name.

    Raises:
        ConfigError: what the model refuses; no such module or class, or one that cannot be a model.
    """
    tasks = dict(tasks or {f"task_{place}": 1 for place in range(outputs)})
    check_model(schema, config, vectors, tasks)
    found = find_code(config.path, "model", "model.name")
    own = isinstance(config, PythonSection)
    if own and not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise _refused(config.name, "it is not a torch.nn.Module", "a class derived from torch.nn.Module")
    wanted = {"outputs": outputs, "vectors": vectors, "tasks": tasks}
    taken = {name: value for name, value in wanted.items() if _takes(found, name)}
    if vectors and "vectors" not in taken:
        raise _refused(
            config.name,
            "a loss of the tasks reads vectors of query and item, and it takes no `vectors`",
            "def __init__(self, schema, config, outputs, vectors), and those vectors as its last columns",
        )
    return _checked(found, schema, config, taken) if own else found(schema, config, **taken)


def _checked(found: type, schema: Schema, config: ModelSection, taken: dict[str, Any]) -> nn.Module:
    """A model of the user's, whose class is held to the contract first."""
    try:
        inspect.signature(found).bind(schema, config, **taken)
    except TypeError as error:
        raise _refused(
            config.name,
            f"it cannot be built from (schema, config): {error}",
            "def __init__(self, schema, config), where config.options has model.options; and outputs, if it "
            "wants to know how many columns of logits the tasks have",
        ) from None
    if config.retrieves and (missing := [tower for tower in ("query", "item") if not hasattr(found, tower)]):
        raise _refused(
            config.name,
            f"model.towers is set, and it has no method {' and no method '.join(missing)}",
            "methods query(dense, pooled) and item(dense, pooled), which give float32 [B, D]",
        )
    model = found(schema, config, **taken)
    try:
        inspect.signature(model.forward).bind(None, {})
    except TypeError as error:
        raise _refused(
            config.name,
            f"its forward does not take (dense, pooled): {error}",
            "def forward(self, dense, pooled)",
        ) from None
    return model


def _takes(found: type, name: str) -> bool:
    """Whether a class can be given an argument of this name, in addition to (schema, config)."""
    places = list(inspect.signature(found).parameters.values())
    return any(each.name == name and each.kind is not each.VAR_KEYWORD for each in places[2:])


def _refused(path: str, what: str, expected: str) -> ConfigError:
    return ConfigError(f"no model {path}: {what}", where="model.name", expected=expected)
