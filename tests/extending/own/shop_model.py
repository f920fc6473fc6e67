"""A model: one linear layer."""

import torch
from torch import nn


class Linear(nn.Module):
    def __init__(self, schema, config):
        super().__init__()
        self.features = list(schema.sparse)
        width = sum(schema.tables[feature.table].dim for feature in schema.sparse.values())
        self.layer = nn.Linear(width + len(schema.dense), 1)

    def forward(self, dense, pooled):
        return self.layer(torch.cat([dense, *(pooled[name] for name in self.features)], 1))[:, 0]
