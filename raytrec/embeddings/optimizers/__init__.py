"""The registry of optimizers of tables. A new one is a file in this folder, and its name is the file's.

    @table_optimizer
    class Adagrad(TableOptimizer):
        state = (StateKind("sum", "value", "momentum1"),)
        cpu_lookup = (1.8e-10, 2.1e-7, 2.3e-5)

        def torch_class(): ...
        def update(weight_ND, gradient_ND, state, step, lr, eps): ...

`optim.embeddings.name` then takes it. The memory and time that plans count, names in checkpoints, statistics
and the check of parity follow from it. The driver reads these classes, too: a file here imports torch in its
methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeVar

from raytrec.common.registry import Registry

if TYPE_CHECKING:
    import torch

STATE_BYTES = 4  # of a value of state: FBGEMM keeps it in fp32, whatever the weights are


class StateKind(NamedTuple):
    """One kind of optimizer state; it is 0 before the first update.

    Attributes:
        kind: its name, as torch.optim has it; checkpoints have it, too.
        per: value: a number for each weight, [rows, dim]; row: one for each row, [rows].
        buffer: FBGEMM's name for it.
    """

    kind: str
    per: Literal["value", "row"]
    buffer: str


class TableOptimizer(ABC):
    """How a table is updated.

    Attributes:
        devices: where FBGEMM has a kernel that updates tables in backward (fused); on others the update is
            dense.
        state: its kinds.
        counts: whether an update depends on how many there were before: their number is state, too.
        second_moment: the kind of state that is 0 until a row's first gradient; None: there is none.
        settings: the keys of optim.embeddings that it has besides lr and weight_decay.
        cpu_lookup: Seconds of a byte read or written, of an id, and of a table's shard, that a lookup with
            its update takes on CPU, as `raytrec doctor --measure` measures them; None: no kernel on CPU.
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
        """The torch optimizer of dense updates, with this state; by it TorchRec finds FBGEMM's kernel."""

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
        """One update by the optimizer's definition, in place: what parity holds kernels and `torch_class` to.

        Args:
            weight_ND, gradient_ND: float32 [rows, dim].
            state: kind → float32 [rows, dim], or [rows] with one value a row.
            step: number of this update, from 1 on.
        """

    @classmethod
    def bytes_per(cls, unit: Literal["value", "row"]) -> int:
        """Bytes of state for each weight, or for each row."""
        return STATE_BYTES * sum(state.per == unit for state in cls.state)

    @classmethod
    def by_row(cls) -> bool:
        """Whether it has state of one value a row: column shards would each keep their own."""
        return any(state.per == "row" for state in cls.state)


OPTIMIZERS: Registry[type[TableOptimizer]] = Registry("optimizer", __name__)
T = TypeVar("T", bound=type[TableOptimizer])


def table_optimizer(cls: T) -> T:
    """Register an optimizer under the name of its file (a decorator).

    Raises:
        TypeError: FBGEMM has a CPU kernel, and the class no rates of it, by which plans are compared.
    """
    if "cpu" in cls.devices and cls.cpu_lookup is None:
        raise TypeError(f"{cls.__name__} has a kernel on CPU, but no cpu_lookup")
    OPTIMIZERS(cls.__module__.rpartition(".")[2])(cls)
    return cls


def optimizer_of(name: str) -> type[TableOptimizer]:
    """The optimizer of a name in the configuration."""
    return OPTIMIZERS.parts[name]
