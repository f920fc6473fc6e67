"""Load checkpoints into live models under any sharding plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from raytrec.checkpoint.files import iterate_indexes
from raytrec.checkpoint.index import CheckpointError
from raytrec.checkpoint.state import LogicalState, State, find_nonfinite, summarize_over_ranks
from raytrec.checkpoint.storage import ShardReader
from raytrec.common.errors import get_root_cause


@dataclass
class RestoreResult:
    """Result of `restore`.

    Attributes:
        folder: Folder of the restored checkpoint; None if there is no usable checkpoint.
        about: Entry "about" of the checkpoint's index.
        skip_reasons: Reasons why newer checkpoints were skipped.
        extra_tensors: Tensors that were read in addition to the model's.
    """

    folder: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    skip_reasons: list[str] = field(default_factory=list)
    extra_tensors: State = field(default_factory=dict)


def restore(
    root: str,
    state: LogicalState,
    find_obstacle: Callable[[dict[str, Any]], str | None] = lambda about: None,
    make_extra_tensors: Callable[[dict[str, Any]], State] = lambda about: {},
) -> RestoreResult:
    """Load the newest valid checkpoint into a model.

    This is a collective operation: every rank must call it. Checkpoints that are incomplete or damaged, contain NaN or
    infinity, or cannot be resumed are skipped.

    Args:
        root: Folder of all checkpoints.
        state: State of the model, which is overwritten.
        find_obstacle: Function that returns why a run cannot resume from an index's `about`, or None.
        make_extra_tensors: Function that returns further tensors to read, given an index's `about`.

    Raises:
        CheckpointError: At least one checkpoint has a usable index, but no checkpoint can be loaded.
    """
    result, unreadable = RestoreResult(), 0
    for folder, about, reason in _broadcast_checkpoints(root, find_obstacle):
        if reason:
            result.skip_reasons.append(reason)
            continue
        try:
            result.extra_tensors = make_extra_tensors(about)
            load(folder, state.tensors() | result.extra_tensors)
            # Training cannot recover from NaN or infinity in its state.
            if nonfinite := summarize_over_ranks(find_nonfinite(state.tensors(), state.unbounded)):
                raise CheckpointError(f"the checkpoint contains NaN or infinity: {nonfinite}", where=folder)
        except CheckpointError as error:
            result.skip_reasons.append(f"{error.what} ({error.where})")
            unreadable += 1
            continue
        state.refresh_kernels()
        result.folder, result.about = folder, about
        return result
    if unreadable:
        raise CheckpointError(
            f"no checkpoint can be read ({unreadable} tried): " + "; ".join(result.skip_reasons),
            where=root,
            do="restore one of them from a backup, or remove them to start over",
        )
    return result


def load(folder: str, tensors: State, rows: dict[str, int] | None = None) -> None:
    """Fill tensors in place with values from a checkpoint.

    This is a collective operation: every rank must call it.

    Args:
        folder: Folder of the checkpoint.
        tensors: Name → destination; the checkpoint must contain every name, with the same shape.
        rows: Table → number of leading rows to read, which is also the destination's number of rows. Other
            tables are read as a whole.

    Raises:
        CheckpointError: Data is damaged or missing, or a tensor has another shape; raised on every rank.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations within torch, on which users cannot act
            dcp.load(tensors, storage_reader=ShardReader(folder, rows))
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        cause = get_root_cause(error)
        if isinstance(cause, CheckpointError):
            raise cause from None
        if mismatch := _find_planning_error(error):
            raise CheckpointError(
                f"the checkpoint does not match the model: {mismatch}",
                where=folder,
                expected="all tensors that the configuration and schema require, in the same shapes",
                do="load another checkpoint, or use the configuration and schema of its run",
            ) from None
        raise


def _find_planning_error(error: BaseException) -> str | None:
    """Return torch's message for a tensor that is missing or has another shape; None for other errors."""
    errors = [f[0] for f in getattr(error, "failures", {}).values()] or [error]
    first_lines = [(str(failure).splitlines() or [""])[0] for failure in errors]
    return next((w for w in first_lines if "Missing key in checkpoint" in w or "ize mismatch" in w), None)


def _broadcast_checkpoints(root: str, why_not: Callable) -> list[tuple[str, dict, str | None]]:
    """Return (folder, about, None or the reason why it is unusable) for each checkpoint, newest first.

    Rank 0 reads the list, and all ranks receive it.
    """
    checkpoints: list[Any] = [None]
    if dist.get_rank() == 0:
        checkpoints[0] = [
            (folder, index.get("about", {}), error and f"{error.what} ({error.where})")
            for folder, index, error in iterate_indexes(root, why_not)
        ]
    dist.broadcast_object_list(checkpoints)
    return checkpoints[0]
