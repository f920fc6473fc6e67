"""Single-process computation in plain torch: the definition that every sharded run must match.

The dense model has the same code as the sharded run's; tables and losses are implemented independently.
Pooling and losses (losses.py) follow their formulas. Tables are ordinary parameters, updated as their
optimizers define (embeddings/optimizers). Dense layers use torch.optim, and gradients are clipped as in a
plain training loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from raytrec.checks.parity.batches import GlobalBatch, count_later_ids
from raytrec.checks.parity.losses import compute_loss
from raytrec.config.schema import Schema
from raytrec.config.tasks import TaskSection
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.models.inputs import IDS, Sequence
from raytrec.tasks.objective import TEMPERATURES, Objective
from raytrec.tasks.task import resolve_tasks

KINKED_ACTIVATIONS = (nn.ReLU, nn.PReLU, nn.LeakyReLU)


class Reference(nn.Module):
    """Tables and a dense model in one process.

    fp16 tables are stored and updated in fp32. After every step, `train` rounds the tables to the nearest values of
    their dtypes.

    Args:
        schema: Schema, which defines features, their pooling and their tables.
        tables: Table → weights, floating-point [rows, dim]; copied.
        model: Dense model with forward(dense, pooled) → logits; not copied.
        sequences: Feature that the model reads id by id, last id first → maximum number of ids.
        objective: Tasks and losses; default: the objective of a configuration without `tasks`.
        with_ids: Features whose ids are also passed to the model (ModelSection.reads_ids).
    """

    def __init__(
        self,
        schema: Schema,
        tables: dict[str, torch.Tensor],
        model: nn.Module,
        sequences: Mapping[str, int] | None = None,
        objective: Objective | None = None,
        with_ids: Iterable[str] = (),
    ):
        super().__init__()
        self.schema, self.sequences, self.with_ids = schema, sequences or {}, tuple(with_ids)
        self.objective = objective or Objective(resolve_tasks([TaskSection()], schema))
        self.weights = nn.ParameterList([nn.Parameter(w.float().clone()) for w in tables.values()])
        self.dtypes = {name: w.dtype for name, w in tables.items()}
        self.tables = dict(zip(tables, self.weights, strict=True))
        self.model = model

    def pooled(self, batch: GlobalBatch) -> dict[str, torch.Tensor | Sequence]:
        """Return the pooled embeddings by feature, float32 [B, dim]: Σ wᵢ·eᵢ, divided by Σ wᵢ for means.

        wᵢ and eᵢ are the weight and the vector of the bag's i-th id. Empty bags are 0, and means with Σ wᵢ = 0 are not
        divided. A feature that the model reads id by id is a Sequence with each wᵢ·eᵢ.
        """
        embeddings = {}
        for feature, spec in self.schema.sparse.items():
            ids, bag, weights = batch.bags[feature]
            vectors = self.tables[spec.table][ids].float() * weights.unsqueeze(1)
            if feature in self.sequences:
                sides, present = batch.side_features.get(feature), torch.ones_like(ids, dtype=torch.bool)
                padded_sides = None if sides is None else self._pad(feature, batch, sides)
                padded = self._pad(feature, batch, vectors), self._pad(feature, batch, present)
                embeddings[feature] = Sequence(*padded, padded_sides)
                continue
            sums = vectors.new_zeros(len(batch), vectors.shape[1]).index_add(0, bag, vectors)
            if spec.pooling != "sum":
                totals = weights.new_zeros(len(batch)).index_add(0, bag, weights)
                sums = sums / totals.masked_fill(totals == 0, 1).unsqueeze(1)
            embeddings[feature] = sums
        return embeddings

    def _pad(self, feature: str, batch: GlobalBatch, values: torch.Tensor, padding: int = 0) -> torch.Tensor:
        """Return a feature's values per id, [N, …], arranged by row as [B, L, …] and padded with `padding`.

        Sequences start with their last id. Only the first id of a pooled bag is included.
        """
        _, bag, _ = batch.bags[feature]
        places, length = count_later_ids(bag), self.sequences.get(feature, 1)
        if feature not in self.sequences:
            places = torch.bincount(bag)[bag] - 1 - places
        is_included = places < length
        padded = values.new_full((len(batch), length, *values.shape[1:]), padding)
        return padded.index_put((bag[is_included], places[is_included]), values[is_included])

    def forward(self, batch: GlobalBatch) -> torch.Tensor:
        """Return the output of the dense model for a global batch, [B] or [B, columns] (tasks/objective.py)."""
        inputs = self.pooled(batch)
        if self.with_ids:
            inputs[IDS] = {feature: self._pad(feature, batch, batch.bags[feature][0], -1) for feature in self.with_ids}
        return self.model(batch.dense, inputs)

    def loss(self, logits: torch.Tensor, batch: GlobalBatch) -> torch.Tensor:
        """Return the loss of a global batch, a scalar, including the L2 regularization of looked-up rows.

        Raises:
            RunError: As for `compute_loss`.
        """
        temperatures = getattr(self.model, TEMPERATURES, logits.new_zeros(0)).exp()
        loss = compute_loss(self.objective.tasks, logits, batch, self.objective.own_loss, temperatures)
        for feature, factor in self.objective.l2_factors.items():
            ids, bag, _ = batch.bags[feature]
            is_recent = count_later_ids(bag) < self.sequences.get(feature, len(ids) + 1)
            rows = self.tables[self.schema.sparse[feature].table][ids[is_recent]]
            loss = loss + factor / 2 * rows.float().square().sum() / len(batch)
        return loss


class TableReference(torch.optim.Optimizer):
    """Optimizer that updates a table by the definition in TableOptimizer.update.

    Args:
        name: Name of the optimizer in the configuration, a registered TableOptimizer.
        table: Weights of the table, float32 [rows, dim].
        lr: Learning rate.
        eps: Constant added to the denominator; ignored by optimizers without one (sgd).
        weight_decay: Multiple of the weights that is added to the gradient.
        touched_rows: True to leave rows whose gradient is 0, and their state, unchanged, as FBGEMM's fused
            kernels do with rows outside the batch. Bias correction counts all steps.
    """

    def __init__(
        self,
        name: str,
        table: nn.Parameter,
        lr: float,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        touched_rows: bool = False,
    ):
        super().__init__([table], {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self._optimizer, self._touched_rows, self._steps = find_optimizer(name), touched_rows, 0
        for kind, per, _ in self._optimizer.state:
            self.state[table][kind] = torch.zeros_like(table if per == "value" else table[:, 0])

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Update the table and its optimizer state once, given the table's gradient; `closure` is ignored."""
        self._steps += 1
        for group in self.param_groups:
            (table,) = group["params"]
            gradient = table.grad + group["weight_decay"] * table
            rows = table.grad.abs().sum(1) > 0 if self._touched_rows else torch.ones_like(table[:, 0], dtype=torch.bool)
            parts = {kind: values[rows] for kind, values in self.state[table].items()}
            weight = table[rows]
            self._optimizer.update(weight, gradient[rows], parts, self._steps, group["lr"], group["eps"])
            table[rows] = weight
            for kind, part in parts.items():
                self.state[table][kind][rows] = part


def train(
    reference: Reference,
    batches: Iterable[GlobalBatch],
    optimizers: list[torch.optim.Optimizer],
    max_grad_norm: float | None = None,
    clip_tables: bool = True,
) -> None:
    """Train on global batches in a plain loop.

    Afterwards, `grad` of each parameter contains the clipped gradient of the last batch, with 0 for unused parameters.

    Args:
        reference: Model and tables, changed in place.
        batches: Global batches.
        optimizers: Optimizers of the parameters; if empty, only gradients are computed.
        max_grad_norm: Limit for torch.nn.utils.clip_grad_norm_ over the clipped parameters; None or 0: no clipping.
        clip_tables: True to clip all parameters, False to clip only those of the dense model.

    Raises:
        RunError: As for `compute_loss`.
    """
    for batch in batches:
        reference.zero_grad()
        reference.loss(reference(batch), batch).backward()
        for p in reference.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        if max_grad_norm:
            nn.utils.clip_grad_norm_((reference if clip_tables else reference.model).parameters(), max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for name, weight in reference.tables.items():
                weight.copy_(weight.to(reference.dtypes[name]))


@torch.no_grad()
def measure_kink_margin(reference: Reference, batch: GlobalBatch) -> float:
    """Return a batch's distance from the nearest kink of an activation; inf if no activation has a kink.

    The distance is the smallest |input| of a module in KINKED_ACTIVATIONS, relative to the largest |input| of this
    module. At 0, the gradient is ambiguous, and rounding selects one of two values.
    """
    margins = [float("inf")]

    def look(_, inputs: tuple) -> None:
        sizes = inputs[0].abs()
        margins.append(float(sizes.amin() / sizes.amax().clamp(min=1e-30)))

    hooks = [m.register_forward_pre_hook(look) for m in reference.modules() if isinstance(m, KINKED_ACTIVATIONS)]
    reference(batch)
    for hook in hooks:
        hook.remove()
    return min(margins)


def measure_max_row_gradients(reference: Reference, batch: GlobalBatch, parameters: list[nn.Parameter]) -> list[float]:
    """Return, for each parameter, the largest magnitude in any row's contribution to the gradient via the logits.

    Contributions may cancel in the sum, but their rounding errors do not. Errors must therefore be compared with
    this magnitude. It is 0 for parameters that do not affect the logits.

    Raises:
        RunError: As for `compute_loss`.
    """
    largest, logits = [0.0] * len(parameters), reference(batch)
    (slopes,) = torch.autograd.grad(reference.loss(logits, batch), logits)
    for row in range(len(batch)):
        of_row = reference(batch[row : row + 1])
        grads = torch.autograd.grad(of_row, parameters, slopes[row : row + 1], allow_unused=True)
        sizes = [0.0 if g is None else float(g.abs().max()) for g in grads]
        largest = [max(pair) for pair in zip(largest, sizes, strict=True)]
    # The gradient of the logarithm of a temperature is a sum of such products over rows.
    products, temperatures = float((slopes * logits.detach()).abs().max()), getattr(reference.model, TEMPERATURES, None)
    return [products if p is temperatures else size for p, size in zip(parameters, largest, strict=True)]
