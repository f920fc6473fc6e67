"""User-defined losses and models that tests configure as own_parts:NAME."""

import torch
from torch import nn

from raytrec.tasks.losses import BatchLoss, Loss


class Focal(Loss):
    """Binary cross-entropy × (1 − the probability of the label)^gamma."""

    label_range = (0.0, 1.0)
    metrics = ("auc", "logloss")

    def __init__(self, gamma: float = 2.0):
        self.gamma = gamma

    def predict(self, logits_B):
        return logits_B.sigmoid()

    def of_rows(self, logits_B, labels_B):
        entropy_B = nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B, reduction="none")
        return entropy_B * (1 - (-entropy_B).exp()) ** self.gamma


class Count(Loss):
    """Poisson regression: the logit is the logarithm of the expected count."""

    label_range = (0.0, float("inf"))
    metrics = ("mae",)

    def predict(self, logits_B):
        return logits_B.exp()

    def of_rows(self, logits_B, labels_B):
        return logits_B.exp() - labels_B * logits_B


class Unfinished(Loss):
    """A loss that does not define of_rows."""


class WithinGroups(BatchLoss):
    """Squared distance of each logit from the mean of its group; requires a group column."""

    by = "group"
    needs_column = True

    def of_batch(self, batch, rows):
        same = (batch.keys[rows].unsqueeze(1) == batch.keys) * batch.weights
        means = same @ batch.logits / same.sum(1).clamp(min=1e-9)
        return (batch.logits[rows] - means).square()


class NoLoss:
    pass


class Linear(nn.Module):
    """A linear model with one logit per task; options.tasks is the number of tasks."""

    def __init__(self, schema, config):
        super().__init__()
        self.features = list(schema.sparse)
        width = sum(schema.tables[spec.table].dim for spec in schema.sparse.values())
        self.logits = nn.Linear(width + len(schema.dense), config.options["tasks"])

    def forward(self, dense, pooled):
        return self.logits(torch.cat([dense, *(pooled[f] for f in self.features)], 1))


class Auxiliary(Linear):
    """A model with its own loss: the squared distance of a row's embeddings to a learned vector."""

    def __init__(self, schema, config, outputs, vectors):
        super().__init__(schema, type(config)(name=config.name, options={"tasks": outputs}))
        dim = schema.tables[schema.sparse[self.features[0]].table].dim
        self.centre, self.vectors = nn.Parameter(torch.full((dim,), 0.1)), vectors

    def forward(self, dense, pooled):
        logits_BT = super().forward(dense, pooled)
        apart_B = (sum(pooled[f] for f in self.features) - self.centre).square().sum(1)
        parts = [logits_BT, (apart_B if self.training else apart_B * 0).unsqueeze(1)]
        return torch.cat(parts + self.vectors * [pooled[f] for f in self.features[:2]], 1)
