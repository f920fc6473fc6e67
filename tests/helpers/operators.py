"""Counts the operators of torch that this thread calls, those of its backward passes included.

Not with torch.profiler (2.13.0): a rank has crashed in its stop() with a segmentation fault.
"""

from collections import Counter

from raytrec.compat.torch_ import EveryOperator, described
from raytrec.planning.dense_work import FREE_OPERATORS


def is_launched(func):
    """Whether an operator computes something."""
    name, _, is_view = described(func)
    room, _, name = name.partition("::")
    return room != "profiler" and not is_view and not name.startswith(FREE_OPERATORS)


class Operators(EveryOperator):
    """Counts calls inside a `with`.

    Attributes:
        calls: operator (aten::mm) → number of calls; without those that other operators make.
        launched: how many of these launch something on a GPU.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.launched = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        self.launched += is_launched(func)
        return func(*args, **(kwargs or {}))
