"""adam: updates from running averages of the gradients and of their squares."""

from __future__ import annotations

from raytrec.embeddings.optimizers import StateKind, TableOptimizer, table_optimizer


@table_optimizer
class Adam(TableOptimizer):
    """Adam: m ← m + (1 − β₁)(g − m), v ← v + (1 − β₂)(g² − v), w ← w − lr·m̂ ÷ (√v̂ + eps).

    m̂ and v̂ are m ÷ (1 − β₁ⁿ) and v ÷ (1 − β₂ⁿ) at update n; β₁ = 0.9, β₂ = 0.999. Source: Kingma, Ba 2015,
    arXiv:1412.6980. FBGEMM has a kernel for GPUs only, which updates just the rows of the batch. A dense update also
    changes rows with earlier gradients.
    """

    devices = ("cuda",)
    state = (StateKind("exp_avg", "value", "momentum1"), StateKind("exp_avg_sq", "value", "momentum2"))
    counts = True
    second_moment = "exp_avg_sq"

    @staticmethod
    def torch_class():
        """Return torch.optim.Adam."""
        import torch

        return torch.optim.Adam

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average += (1 - 0.9) * (gradient_ND - average)
        square += (1 - 0.999) * (gradient_ND.square() - square)
        root = (square / (1 - 0.999**step)).sqrt() + eps
        weight_ND -= lr * average / (1 - 0.9**step) / root
