"""Models and their common contract; the configuration of each model is a section in raytrec/config/models.

A model is a plain nn.Module built from (schema, its section of the configuration, outputs), where outputs is the
number of logits per row. Its forward takes the dense columns, float32 [B, n], and a dict with one input per sparse
feature:

- pooled embeddings, float32 [B, dim of the feature's table];
- inputs.Sequence(vectors [B, L, dim], present [B, L]) for features with pooling: sequence that the model reads
  id by id, L ids at most (ModelSection.sequence_lengths). It contains the embedding of each id, most recent first.
  The embeddings of other features with pooling: sequence are averaged.

The keys inputs.IDS and inputs.REQUESTS of this dict exist for models that read ids or encode each request once.

forward returns logits, float32 [B] for one output, else [B, outputs]. Columns follow the order of the tasks.
A task has one column, or one column per class. The tasks define the losses and the meaning of the logits
(raytrec/tasks). A model reads no labels.

Some models return additional columns:

- A model that accepts `vectors` can also return query and item vectors, for losses that compare the rows of a
  batch: [B, outputs + 2·D]. The query columns precede the item columns.
- A model whose section has `own_loss` returns its own loss, which is added to the losses of the tasks. The
  loss is one column between the logits and the vectors. It contains each row's loss, which is finite for
  padding rows and 0 in eval mode.

A model whose section sets `retrieves` has two more methods with the arguments of forward. `query` returns
float32 [B, D], or several vectors per row, [B, n, D], of which retrieval uses the last. `item` returns float32 [B, D].
Both methods read only the features in the section's `tower_members`. The dot products of a query vector and the
item vectors rank the items in the order of their scores. Item vectors can therefore be stored in an index
(docs/retrieval.md).

A model is independent of tables and ranks: `embeddings.pooling.PooledEmbeddings` looks up and pools the
embeddings (recommender.py). A row's logits depend only on that row (no batch norm), so the distribution of
rows over ranks does not change them.

`build_model` calls ModelSection.check and check_tasks before the constructor, which therefore repeats few checks.

A user-defined class (`model.name: "my.module:MyModel"`) follows the same contract, with its settings under
`model.options`. Its __init__ receives `outputs`, `vectors` and `tasks` only if it has parameters with these
names. `tasks` maps each task to its number of logit columns, in the order of the columns.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from raytrec.common.errors import ConfigError
from raytrec.common.registry import find_code
from raytrec.config.models import ModelSection, PythonSection, check_model
from raytrec.config.schema import Schema


def build_model(
    schema: Schema, config: ModelSection, tasks: Mapping[str, int] | None = None, vectors: bool = False
) -> nn.Module:
    """Return a new instance of the model named by `model.name`.

    If the module of a user-defined class is not found, the working directory is added to sys.path.

    Args:
        schema: Schema of the data.
        config: Section `model` of the configuration.
        tasks: Task → number of its logit columns, in the order of the columns; empty only with `vectors`.
            Default: one task with one column.
        vectors: True if the model must also return query and item vectors.

    Raises:
        ConfigError: The model does not support the schema, the tasks or `vectors`; or a user-defined class does
            not exist or violates the contract in this module's docstring.
        Exception: Any error raised by the module or the constructor of a user-defined class.
    """
    tasks = {"task": 1} if tasks is None else dict(tasks)
    check_model(schema, config, vectors, tasks)
    cls = find_code(config.path, "model", "model.name", os.getcwd())
    is_custom = isinstance(config, PythonSection)
    if is_custom and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise _make_contract_error(config.name, "it is not a subclass of torch.nn.Module", "a torch.nn.Module class")
    parameters = [each.name for each in inspect.signature(cls).parameters.values() if each.kind is not each.VAR_KEYWORD]
    optional = {"outputs": sum(tasks.values()), "vectors": vectors, "tasks": tasks}
    kwargs = {name: value for name, value in optional.items() if name in parameters[2:]}
    if vectors and "vectors" not in kwargs:
        raise _make_contract_error(
            config.name,
            "a loss of the tasks reads query and item vectors, but the constructor has no parameter `vectors`",
            "def __init__(self, schema, config, outputs, vectors), and the vectors as the last output columns",
        )
    return _build_checked_model(cls, schema, config, kwargs) if is_custom else cls(schema, config, **kwargs)


def _build_checked_model(cls: type, schema: Schema, config: ModelSection, kwargs: dict[str, Any]) -> nn.Module:
    """Return an instance of a user-defined class; raise ConfigError if the class violates the models' contract."""
    args = ", ".join(["schema", "config", *kwargs])
    try:
        inspect.signature(cls).bind(schema, config, **kwargs)
    except TypeError as error:
        raise _make_contract_error(
            config.name,
            f"its constructor does not accept ({args}): {error}",
            "def __init__(self, schema, config), where config.options has model.options; optionally with "
            "outputs (total number of the tasks' logit columns), vectors and tasks",
        ) from None
    if config.retrieves and (missing := [tower for tower in ("query", "item") if not hasattr(cls, tower)]):
        raise _make_contract_error(
            config.name,
            f"model.towers is set, but the class has no method {' and no method '.join(missing)}",
            "methods query(dense, pooled) and item(dense, pooled), which return float32 [B, D]; or no model.towers",
        )
    model = cls(schema, config, **kwargs)
    try:
        inspect.signature(model.forward).bind(None, {})
    except TypeError as error:
        raise _make_contract_error(
            config.name, f"its forward does not accept (dense, pooled): {error}", "def forward(self, dense, pooled)"
        ) from None
    return model


def _make_contract_error(path: str, what: str, expected: str) -> ConfigError:
    return ConfigError(f"cannot build model {path}: {what}", where="model.name", expected=expected)
