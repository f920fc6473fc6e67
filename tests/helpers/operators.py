"""Which operators of torch this thread calls, and how often; those that autograd calls for it, too.

torch.profiler counts as well, but has ended ranks with a segmentation fault (2.13.0): operators of gloo's
threads may still run when it stops.
"""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts calls in a `with`.

    Attributes:
        calls: operator, as in aten::mm → how often it was called. Not those that operators call themselves.
    """

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
