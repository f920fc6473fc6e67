"""The registry of models: a new one is a file here, a line in MODELS and its name in config.ModelSection.

A model is an nn.Module built from (schema, ModelSection) whose forward(dense, sparse) returns logits [B], and
that looks its features up through `raytrec.embeddings.pooling.PooledEmbeddings` as `self.embeddings`.
"""

from __future__ import annotations

from torch import nn

from raytrec.config import ModelSection
from raytrec.models.dlrm import DLRM
from raytrec.schema import Schema

MODELS: dict[str, type[nn.Module]] = {"dlrm": DLRM}


def build_model(schema: Schema, config: ModelSection) -> nn.Module:
    """The model that `model.name` says; tables are on the meta device until they are sharded."""
    return MODELS[config.name](schema, config)
