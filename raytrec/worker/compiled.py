"""torch.compile of the dense model (train.compile)."""

from __future__ import annotations

import torch
from torch import nn

from raytrec.common.installed import require_compiler


def compile_dense(model: nn.Module, device: torch.device) -> None:
    """Has a dense model compiled at its first forward, in place: its parameters keep their names.

    Sizes are left open, so that a smaller batch, or a micro-batch, does not compile it again. Training and
    evaluation each compile it once, in the first step and in the first evaluation.

    Raises:
        ConfigError: what torch compiles with is not installed on this node.
    """
    require_compiler(device.type)
    model.compile(dynamic=True)
