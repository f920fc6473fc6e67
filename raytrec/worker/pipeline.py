"""The pipeline that a model is trained by."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from raytrec.compat.torch_ import time_waits
from raytrec.compat.torchrec_ import replicated_kernels, sharded_kernels
from raytrec.compat.torchrec_pipeline import PrefetchPipeline, TimedPipeline, TimedPrefetchPipeline
from raytrec.worker.step_timing import Phases, time_tables


def pipeline(
    model: Any, optimizer: Any, device: torch.device, phases: Phases | None, *, prefetch: bool
) -> TrainPipelineSparseDist:
    """TorchRec's pipeline, which exchanges the next batch's ids during this batch's forward.

    Args:
        phases: that the parts' times are added to, and all waits of this process for other ranks; None: they
            are not timed.
        prefetch: whether any rank has a table with a cache, whose rows are brought into it a batch ahead. The
            same on all ranks, whose collectives come in another order with it.
    """
    if phases:
        time_waits(phases.waits)
        time_tables([*sharded_kernels(model), *replicated_kernels(model)], phases)
        kind = TimedPrefetchPipeline if prefetch else TimedPipeline
        return kind(model, optimizer, device, phases.phase, lambda: phases.enter("collectives"))
    untimed = PrefetchPipeline if prefetch else TrainPipelineSparseDist
    return untimed(model, optimizer, device, execute_all_batches=True)
