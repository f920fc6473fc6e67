"""sgd: plain stochastic gradient descent."""

from __future__ import annotations

from raytrec.embeddings.optimizers import TableOptimizer, table_optimizer


@table_optimizer
class SGD(TableOptimizer):
    """Stochastic gradient descent: w ← w − lr·g."""

    settings = ()
    cpu_lookup = (9e-11, 5e-8, 1.2e-5)

    @staticmethod
    def torch_class():
        """Return torch.optim.SGD."""
        import torch

        return torch.optim.SGD

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        weight_ND -= lr * gradient_ND
