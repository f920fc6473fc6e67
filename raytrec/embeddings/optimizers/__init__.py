"""Registry of table optimizers. To add one, add a file to this folder; the file name is the optimizer's name.

    @table_optimizer
    class Adagrad(TableOptimizer):
        state = (StateKind("sum", "value", "momentum1"),)
        cpu_lookup = (1.8e-10, 2.1e-7, 2.3e-5)

        @staticmethod
        def torch_class(): ...

        @staticmethod
        def update(weight_ND, gradient_ND, state, step, lr, eps): ...

`optim.embeddings.name` then accepts the name. The class determines the predicted memory and time of plans, and the
names of optimizer state in checkpoints. The parity check uses its update rule. The driver, which must not import
torch, also loads these classes, so files in this folder import torch only inside methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

from raytrec.common.registry import Registry

if TYPE_CHECKING:
    import torch

BYTES_PER_STATE_VALUE = 4  # size of a state value: FBGEMM keeps state in fp32 for any dtype of weights


class StateKind(NamedTuple):
    """Kind of optimizer state; its values are 0 before the first update.

    Attributes:
        kind: Name of the state in torch.optim and in checkpoints, such as exp_avg.
        value_granularity: "value" for one number per weight, [rows, dim]; "row" for one number per row,
            [rows].
        buffer: Name of the state in FBGEMM, such as momentum1.
    """

    kind: str
    value_granularity: Literal["value", "row"]
    buffer: str


class TableOptimizer(ABC):
    """Base class of table optimizers, each of which defines an update rule, its state and its kernels.

    In the formulas of subclasses, w is a weight, g its gradient, and lr and eps are arguments of `update`.

    Attributes:
        devices: Devices (cpu, cuda) on which FBGEMM has a fused kernel, which updates tables in backward. Updates are
            dense on other devices.
        state: Kinds of optimizer state.
        counts: True if an update depends on the number of previous updates, which is then also saved as state.
        second_moment: Kind of state that is 0 until a row's first nonzero gradient, or None if there is none.
        settings: Keys of optim.embeddings that the optimizer uses in addition to lr and weight_decay.
        cpu_lookup: Seconds that a lookup and its update take on CPU: per byte read or written, per id, and
            per shard of a table, as `raytrec doctor --measure` measures. None without a fused kernel for CPU.
    """

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")
    state: ClassVar[tuple[StateKind, ...]] = ()
    counts: ClassVar[bool] = False
    second_moment: ClassVar[str | None] = None
    settings: ClassVar[tuple[str, ...]] = ("eps",)
    cpu_lookup: ClassVar[tuple[float, float, float] | None] = None

    @staticmethod
    @abstractmethod
    def torch_class() -> type[torch.optim.Optimizer]:
        """Return the torch optimizer class for dense updates; TorchRec selects FBGEMM's kernel by this class.

        The class must have the same state as this optimizer.
        """

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
        """Apply one update in place, following the definition of the optimizer without weight decay.

        The parity check compares kernels and `torch_class` with this method.

        Args:
            weight_ND: Weights, float32 [rows, dim].
            gradient_ND: Gradient, float32 [rows, dim].
            state: State by kind, float32 [rows, dim], or [rows] for one value per row.
            step: Number of this update, starting at 1.
            lr: Learning rate.
            eps: Constant added to the denominator; ignored by optimizers without `eps` in `settings`.
        """

    @classmethod
    def count_state_bytes(cls, unit: Literal["value", "row"]) -> int:
        """Return the bytes per weight of state with one number per weight (unit "value"), or per row ("row")."""
        return BYTES_PER_STATE_VALUE * sum(state.value_granularity == unit for state in cls.state)

    @classmethod
    def has_row_state(cls) -> bool:
        """Return True if any state has one value per row, so that each column shard keeps a separate copy."""
        return any(state.value_granularity == "row" for state in cls.state)


OPTIMIZERS: Registry[type[TableOptimizer]] = Registry("optimizer", __name__)
T = TypeVar("T", bound=type[TableOptimizer])


def table_optimizer(cls: T) -> T:
    """Register an optimizer under the name of its file (a decorator).

    Raises:
        TypeError: The optimizer has a CPU kernel, but the class does not define `cpu_lookup`, from which the
            time of plans is predicted.
        ValueError: The file already defines another optimizer.
    """
    if "cpu" in cls.devices and cls.cpu_lookup is None:
        raise TypeError(f"{cls.__name__} has a CPU kernel but does not define cpu_lookup")
    OPTIMIZERS(cls.__module__.rpartition(".")[2])(cls)
    return cls


def find_optimizer(name: str) -> type[TableOptimizer]:
    """Return the class of the optimizer that has this name in the configuration; raise KeyError if there is none."""
    return OPTIMIZERS.parts[name]
