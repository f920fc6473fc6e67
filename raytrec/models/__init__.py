"""Models: a new one is a file here and its section of the configuration, a file in raytrec/config/models.

A model is a plain nn.Module built from (schema, its section of the configuration). Its forward takes the
dense columns, float32 [B, n], and the inputs of the sparse features, a dict of feature →

- pooled embeddings, float32 [B, dim of its table];
- inputs.Sequence(vectors [B, L, dim], present [B, L]) for features of pooling: sequence, if the section has a
  max_length L: embeddings id by id, the most recent first. Without max_length they are pooled by their mean;

and returns logits, float32 [B], or [B, T] with a column for each of T tasks. What they mean, and what is
learned from them, is the tasks' affair (raytrec/tasks): a model sees no labels. It knows nothing of tables
and ranks: `embeddings.pooling.PooledEmbeddings` looks up and pools before it (recommender.py). It computes
each row from that row alone (no batch norm), so that how rows are dealt to ranks changes nothing.

A class of yours is one of these models, too: `model.name: "my.module:MyModel"`, with what it wants to know
under `model.options`.
"""

from __future__ import annotations

import inspect

from torch import nn

from raytrec.common.errors import ConfigError
from raytrec.common.registry import find_code
from raytrec.config.models import ModelSection, PythonSection
from raytrec.config.schema import Schema


def build_model(schema: Schema, config: ModelSection) -> nn.Module:
    """The model that `model.name` says.

    Raises:
        ConfigError: what the model refuses; no such module or class, or one that cannot be a model.
    """
    found = find_code(config.path, "model", "model.name")
    return _checked(found, schema, config) if isinstance(config, PythonSection) else found(schema, config)


def _checked(found: object, schema: Schema, config: PythonSection) -> nn.Module:
    """A model of the user's, whose class is held to the contract first."""
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise _refused(config.name, "it is no torch.nn.Module", "a class derived from torch.nn.Module")
    try:
        inspect.signature(found).bind(schema, config)
    except TypeError as error:
        raise _refused(
            config.name,
            f"it cannot be built from (schema, config): {error}",
            "def __init__(self, schema, config), where config.options has model.options",
        ) from None
    model = found(schema, config)
    try:
        inspect.signature(model.forward).bind(None, {})
    except TypeError as error:
        raise _refused(
            config.name,
            f"its forward does not take (dense, pooled): {error}",
            "def forward(self, dense, pooled)",
        ) from None
    return model


def _refused(path: str, what: str, expected: str) -> ConfigError:
    return ConfigError(f"no model {path}: {what}", where="model.name", expected=expected)
