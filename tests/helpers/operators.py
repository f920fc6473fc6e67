"""Count the torch operators called by this thread, including its backward passes.

torch.profiler (2.13.0) is not used because its stop() crashed with a segmentation fault.
"""

from collections import Counter

from raytrec.compat.torch_ import EveryOperator, describe_operator
from raytrec.planning.dense_work import UNCOUNTED_OPERATORS


def launches_kernel(func):
    """Return True if an operator launches a kernel on a GPU."""
    name, _, is_view = describe_operator(func)
    room, _, name = name.partition("::")
    return room != "profiler" and not is_view and not name.startswith(UNCOUNTED_OPERATORS)


class OperatorCounter(EveryOperator):
    """Context manager that counts operator calls.

    Attributes:
        calls: operator (e.g. aten::mm) → number of calls, without nested calls.
        launched: number of these calls that launch a kernel on a GPU.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.launched = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        self.launched += launches_kernel(func)
        return func(*args, **(kwargs or {}))
