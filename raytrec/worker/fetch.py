"""Values on their way from the device to the host, which need not wait for them."""

from __future__ import annotations

import torch


class Fetch:
    """What a tensor holds now, on its way into host memory.

    On CPU it is there at once. From a GPU it is copied into pinned memory behind the work that the current
    stream has been given so far; work that the stream is given afterwards does not hold it up.

    Args:
        values: of any shape and dtype; on CPU they must not be changed until they have been read.
    """

    def __init__(self, values: torch.Tensor):
        self._values, self._event = values.detach(), None
        if values.is_cuda:
            pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values = pinned.copy_(values.detach(), non_blocking=True)
            self._event = torch.cuda.Event(blocking=True)  # who waits sleeps: readers need the core
            self._event.record()

    @property
    def arrived(self) -> bool:
        """Whether `wait` would return at once; from any thread."""
        event = self._event
        return event is None or event.query()

    def wait(self) -> torch.Tensor:
        """The values, in host memory."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values
