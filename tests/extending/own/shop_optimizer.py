"""A table optimizer without an FBGEMM kernel, so its updates are dense."""

from raytrec.embeddings.optimizers import StateKind, TableOptimizer, table_optimizer


@table_optimizer
class RMSprop(TableOptimizer):
    """v ← 0.99·v + 0.01·g², w ← w − lr·g ÷ (√v + eps)."""

    devices = ()
    state = (StateKind("square_avg", "value", "momentum1"),)
    counts = True
    second_moment = "square_avg"

    @staticmethod
    def torch_class():
        """Return torch.optim.RMSprop."""
        import torch

        return torch.optim.RMSprop

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Update the weights in place (see TableOptimizer.update)."""
        state["square_avg"] += 0.01 * (gradient_ND.square() - state["square_avg"])
        weight_ND -= lr * gradient_ND / (state["square_avg"].sqrt() + eps)
