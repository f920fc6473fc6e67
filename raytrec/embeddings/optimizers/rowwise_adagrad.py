"""rowwise_adagrad: Adagrad with one sum of squared gradients per row."""

from __future__ import annotations

from raytrec.embeddings.optimizers import StateKind, TableOptimizer, table_optimizer


@table_optimizer
class RowWiseAdagrad(TableOptimizer):
    """Row-wise Adagrad: s ← s + mean(g²) over the row, w ← w − lr·g ÷ (√s + eps), as in TorchRec (1.8.0)."""

    state = (StateKind("sum", "row", "momentum1"),)
    second_moment = "sum"
    cpu_lookup = (3.6e-11, 5e-7, 3e-5)

    @staticmethod
    def torch_class():
        """Return TorchRec's RowWiseAdagrad."""
        from torchrec.optim import RowWiseAdagrad

        return RowWiseAdagrad

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        state["sum"] += gradient_ND.square().mean(1)
        weight_ND -= lr * gradient_ND / (state["sum"].sqrt() + eps).unsqueeze(1)
