"""Backends of torch.compile for the models of a block."""

from contextlib import contextmanager
from functools import partialmethod
from unittest.mock import patch

from torch import nn


@contextmanager
def use_compile_backend(backend):
    """Compile the modules that are built in the block with this backend."""
    with patch.object(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend)):
        yield
