"""adagrad: the learning rate of each weight decreases with the sum of its squared gradients."""

from __future__ import annotations

from raytrec.embeddings.optimizers import StateKind, TableOptimizer, table_optimizer


@table_optimizer
class Adagrad(TableOptimizer):
    """Adagrad: s ← s + g², w ← w − lr·g ÷ (√s + eps). Source: Duchi et al. 2011, JMLR 12, pp. 2121–2159."""

    state = (StateKind("sum", "value", "momentum1"),)
    second_moment = "sum"
    cpu_lookup = (1.8e-10, 2.1e-7, 2.3e-5)

    @staticmethod
    def torch_class():
        """Return torch.optim.Adagrad."""
        import torch

        return torch.optim.Adagrad

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        state["sum"] += gradient_ND.square()
        weight_ND -= lr * gradient_ND / (state["sum"].sqrt() + eps)
