"""A custom model that averages sequences; it also accepts pooled inputs."""

import torch
from torch import nn


class MeanModel(nn.Module):
    def __init__(self, schema, config, outputs):
        super().__init__()
        self.features = list(schema.sparse)
        width = sum(schema.tables[spec.table].dim for spec in schema.sparse.values())
        self.logit = nn.Linear(len(schema.dense) + width, outputs)

    def forward(self, dense, inputs):
        return self.logit(torch.cat([dense, *(mean_vector(inputs[name]) for name in self.features)], 1))


def mean_vector(given):
    if isinstance(given, torch.Tensor):
        return given
    return given.vectors.sum(1) / given.present.sum(1, keepdim=True).clamp(min=1)
