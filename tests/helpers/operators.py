"""Counts the operators of torch that this thread calls, those of its backward passes included.

Not with torch.profiler (2.13.0): a rank has crashed in its stop() with a segmentation fault.
"""

from collections import Counter

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Counts calls inside a `with`.

    Attributes:
        calls: operator (aten::mm) → number of calls; without those that other operators make.
    """

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))
