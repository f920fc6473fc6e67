"""The registry of models: a new one is a file here, a line in MODELS and its section in model_sections.py.

A model is a plain nn.Module built from (schema, its section of the configuration). Its forward takes the
dense columns, float32 [B, n], and the inputs of the sparse features, a dict of feature →

- pooled embeddings, float32 [B, dim of its table];
- inputs.Sequence(vectors [B, L, dim], present [B, L]) for features of pooling: sequence, if the section has a
  max_length L: embeddings id by id, the most recent first. Without max_length they are pooled by their mean;

and returns logits, float32 [B]. It knows nothing of tables and ranks: `embeddings.pooling.PooledEmbeddings`
looks up and pools before it. It computes each row from that row alone (no batch norm), so that how rows are
dealt to ranks changes nothing.

A class of yours is one of these models, too: `model.name: "my.module:MyModel"`, with what it wants to know
under `model.options`.
"""

from __future__ import annotations

import inspect
import sys

from torch import nn

from raytrec.common import python_path
from raytrec.common.errors import ConfigError, did_you_mean
from raytrec.config.model_sections import ModelSection, PythonSection
from raytrec.config.schema import Schema
from raytrec.models.dcn import DCN
from raytrec.models.dlrm import DLRM
from raytrec.models.sequence import SequenceModel
from raytrec.models.two_tower import TwoTower

MODELS: dict[str, type[nn.Module]] = {
    "dlrm": DLRM,
    "dcn": DCN,
    "two_tower": TwoTower,
    "sequence": SequenceModel,
}


def build_model(schema: Schema, config: ModelSection) -> nn.Module:
    """The model that `model.name` says.

    Raises:
        ConfigError: what the model refuses; no such module or class, or one that cannot be a model.
    """
    if isinstance(config, PythonSection):
        return _of_class(schema, config)
    return MODELS[config.name](schema, config)


def _of_class(schema: Schema, config: PythonSection) -> nn.Module:
    found = _found(config.name)
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


def _found(path: str) -> object:
    module, _, name = path.partition(":")
    try:
        return python_path.load(path)
    except ModuleNotFoundError as error:
        raise _refused(
            path,
            f"there is no module {error.name}",
            f"{module} on Python's path of every worker, or in the folder that the command was given in",
        ) from None
    except AttributeError:
        if module not in sys.modules:
            raise  # the module's own error, while it was imported
        near = did_you_mean(name, [n for n in vars(sys.modules[module]) if not n.startswith("_")])
        raise _refused(
            path,
            f"the module has no {name}" + (f"; did you mean {near}?" if near else ""),
            "module:Class",
        ) from None


def _refused(path: str, what: str, expected: str) -> ConfigError:
    return ConfigError(f"no model {path}: {what}", where="model.name", expected=expected)
