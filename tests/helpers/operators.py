"""Counts the operators of torch that this thread calls, those of its backward passes included.

Not with torch.profiler (2.13.0): a rank has crashed in its stop() with a segmentation fault.
"""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode

# Operators that launch nothing, besides views.
NOTHING = ("empty", "detach", "_local_scalar_dense", "sym_", "is_pinned", "_unsafe_view", "_reshape_alias")


def is_launched(func):
    """Whether an operator computes something."""
    returns = func._schema.returns
    is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    room, _, name = func._schema.name.partition("::")
    return room != "profiler" and not is_view and not name.startswith(NOTHING)


class Operators(TorchDispatchMode):
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
