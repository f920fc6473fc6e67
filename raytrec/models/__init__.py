"""The registry of models: a new one is a file here, a line in MODELS and its name in sections.ModelSection.

A model is a plain nn.Module built from (schema, ModelSection). Its forward takes the dense columns, float32
[B, n], and the pooled embeddings, a dict of feature → float32 [B, dim of its table], and returns logits [B].
It knows nothing of tables and ranks; `raytrec.embeddings.pooling.PooledEmbeddings` looks up and pools before
it.
"""

from __future__ import annotations

from torch import nn

from raytrec.models.dlrm import DLRM
from raytrec.schema import Schema
from raytrec.sections import ModelSection

MODELS: dict[str, type[nn.Module]] = {"dlrm": DLRM}


def build_model(schema: Schema, config: ModelSection) -> nn.Module:
    """The model that `model.name` says."""
    return MODELS[config.name](schema, config)
