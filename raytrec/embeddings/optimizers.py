"""Table optimizers. To add one, add a class to this file, and its name to `Optimizer` in config/tables.py.

    class Adagrad(TableOptimizer, name="adagrad"):
        torch_path = "torch.optim:Adagrad"
        state = (StateKind("sum", "value", "momentum1"),)
        cpu_lookup = (1.8e-10, 2.1e-7, 2.3e-5)

        def update(weight_ND, gradient_ND, state, step, lr, eps): ...

`optim.embeddings.name` then accepts the name. The class determines the predicted memory and time of plans, the
names in checkpoints, the statistics and the parity check. The driver also reads these classes, so this file imports
torch only inside methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from raytrec.common.registry import load_code

if TYPE_CHECKING:
    import torch

BYTES_PER_STATE_VALUE = 4  # size of a state value: FBGEMM keeps state in fp32 for any dtype of weights
OPTIMIZERS: dict[str, type[TableOptimizer]] = {}  # by name in the configuration


class StateKind(NamedTuple):
    """Kind of optimizer state; its values are 0 before the first update.

    Attributes:
        kind: Name in torch.optim and in checkpoints.
        value_granularity: "value" for one number per weight, [rows, dim]; "row" for one number per row,
            [rows].
        buffer: Name in FBGEMM.
    """

    kind: str
    value_granularity: Literal["value", "row"]
    buffer: str


class TableOptimizer(ABC):
    """Base class of table optimizers, each of which defines an update rule, its state and its kernels.

    A subclass is registered under its `name`.

    Attributes:
        torch_path: `module:name` of the torch optimizer class for dense updates, which must have the same state as
            this optimizer. TorchRec selects FBGEMM's kernel by this class.
        devices: Devices for which FBGEMM has a kernel that updates tables in backward (fused). Updates are
            dense on other devices.
        state: Kinds of optimizer state.
        counts: True if an update depends on the number of previous updates, which is then also state.
        second_moment: Name of the state that is 0 until a row's first gradient, or None if there is none.
        settings: Keys of optim.embeddings that the optimizer uses in addition to lr and weight_decay.
        cpu_lookup: Seconds that a lookup and its update take on CPU: per byte read or written, per id, and
            per shard of a table. `raytrec doctor --measure` measures these costs. None without a CPU kernel.
    """

    torch_path: ClassVar[str]
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    state: ClassVar[tuple[StateKind, ...]] = ()
    counts: ClassVar[bool] = False
    second_moment: ClassVar[str | None] = None
    settings: ClassVar[tuple[str, ...]] = ("eps",)
    cpu_lookup: ClassVar[tuple[float, float, float] | None] = None

    def __init_subclass__(cls, name: str, **options: Any) -> None:
        """Register the optimizer.

        Raises:
            TypeError: The optimizer has a CPU kernel, but the class does not define `cpu_lookup`, from which the
                time of plans is predicted.
        """
        super().__init_subclass__(**options)
        if "cpu" in cls.devices and cls.cpu_lookup is None:
            raise TypeError(f"{cls.__name__} has a CPU kernel but does not define cpu_lookup")
        OPTIMIZERS[name] = cls

    @classmethod
    def torch_class(cls) -> type[torch.optim.Optimizer]:
        """Return the torch optimizer class for dense updates."""
        return load_code(cls.torch_path)

    @staticmethod
    @abstractmethod
    def update(
        weight_ND: torch.Tensor,
        gradient_ND: torch.Tensor,
        state: Mapping[str, torch.Tensor],
        step: int,
        lr: float,
        eps: float,
    ) -> None:
        """Apply one update in place, following the definition of the optimizer.

        The parity check compares kernels and `torch_class` with this method.

        Args:
            weight_ND: Weights, float32 [rows, dim].
            gradient_ND: Gradient, float32 [rows, dim].
            state: State by kind, float32 [rows, dim], or [rows] for one value per row.
            step: Number of this update, starting at 1.
            lr: Learning rate.
            eps: Constant added to the denominator.
        """

    @classmethod
    def count_state_bytes(cls, unit: Literal["value", "row"]) -> int:
        """Return the number of bytes of state per weight ("value") or per row ("row")."""
        return BYTES_PER_STATE_VALUE * sum(state.value_granularity == unit for state in cls.state)

    @classmethod
    def has_row_state(cls) -> bool:
        """Return True if any state has one value per row, so that each column shard keeps a separate copy."""
        return any(state.value_granularity == "row" for state in cls.state)


class Adagrad(TableOptimizer, name="adagrad"):
    """Adagrad: s ← s + g², w ← w − lr·g ÷ (√s + eps)."""

    torch_path = "torch.optim:Adagrad"
    state = (StateKind("sum", "value", "momentum1"),)
    second_moment = "sum"
    cpu_lookup = (1.8e-10, 2.1e-7, 2.3e-5)

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        state["sum"] += gradient_ND.square()
        weight_ND -= lr * gradient_ND / (state["sum"].sqrt() + eps)


class Adam(TableOptimizer, name="adam"):
    """Adam: m ← m + (1 − β₁)(g − m), v ← v + (1 − β₂)(g² − v), w ← w − lr·m̂ ÷ (√v̂ + eps).

    m̂ and v̂ are m ÷ (1 − β₁ⁿ) and v ÷ (1 − β₂ⁿ) at update n; β₁ = 0.9, β₂ = 0.999. FBGEMM has a kernel for
    GPUs only, which updates just the rows of the batch. A dense update changes every row.
    """

    torch_path = "torch.optim:Adam"
    devices = ("cuda",)
    state = (StateKind("exp_avg", "value", "momentum1"), StateKind("exp_avg_sq", "value", "momentum2"))
    counts = True
    second_moment = "exp_avg_sq"

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        average, square = state["exp_avg"], state["exp_avg_sq"]
        average += (1 - 0.9) * (gradient_ND - average)
        square += (1 - 0.999) * (gradient_ND.square() - square)
        root = (square / (1 - 0.999**step)).sqrt() + eps
        weight_ND -= lr * average / (1 - 0.9**step) / root


class RowWiseAdagrad(TableOptimizer, name="rowwise_adagrad"):
    """Row-wise Adagrad, with one sum per row: s ← s + mean(g²), w ← w − lr·g ÷ (√s + eps)."""

    torch_path = "torchrec.optim:RowWiseAdagrad"
    state = (StateKind("sum", "row", "momentum1"),)
    second_moment = "sum"
    cpu_lookup = (3.6e-11, 5e-7, 3e-5)

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        state["sum"] += gradient_ND.square().mean(1)
        weight_ND -= lr * gradient_ND / (state["sum"].sqrt() + eps).unsqueeze(1)


class SGD(TableOptimizer, name="sgd"):
    """Stochastic gradient descent: w ← w − lr·g."""

    torch_path = "torch.optim:SGD"
    settings = ()
    cpu_lookup = (9e-11, 5e-8, 1.2e-5)

    @staticmethod
    def update(weight_ND, gradient_ND, state, step, lr, eps):
        """Apply one update in place (see TableOptimizer.update)."""
        weight_ND -= lr * gradient_ND


def find_optimizer(name: str) -> type[TableOptimizer]:
    """Return the optimizer class with this name in the configuration."""
    return OPTIMIZERS[name]
