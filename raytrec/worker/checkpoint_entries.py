"""Create the parts of a run's checkpoints: table snapshots, delta publisher, index entry, and errors with advice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import time
from typing import TYPE_CHECKING, Any

from raytrec.checkpoint.files import get_step_folder
from raytrec.checkpoint.save import NonfiniteStateError
from raytrec.checkpoint.snapshot import RowSnapshot
from raytrec.checkpoint.state import LogicalState
from raytrec.common import messages
from raytrec.common.errors import RunError
from raytrec.common.machine import get_installed_versions
from raytrec.common.redaction import hide_all
from raytrec.common.storage import quote_for_shell
from raytrec.embeddings.sharding import describe_plan
from raytrec.worker.context import WorkerTask
from raytrec.worker.progress import RankRun
from raytrec.worker.step import Step

if TYPE_CHECKING:
    from raytrec.deltas.publish import DeltaPublisher


def make_row_snapshot(step: Step, state: LogicalState, on_wait: Callable[[], None]) -> RowSnapshot:
    """Return a snapshot that preserves the rows that training or the reassignment of rows changes during a save.

    `on_wait` is passed to RowSnapshot.
    """
    rows = RowSnapshot(step.model, state.tables, on_wait)
    if step.managed is not None:
        step.managed.on_write = rows.preserve_rows
    return rows


def make_publisher(run: RankRun, about: Mapping[str, Any] | None) -> DeltaPublisher:
    """Return the publisher of the run's deltas (export.deltas).

    This is a collective operation: every rank must call it.

    Args:
        run: Run whose deltas are published.
        about: Entry "about" of the restored checkpoint's index; None at the start of a run.
    """
    from raytrec.deltas.publish import DeltaPublisher

    context = run.context
    return DeltaPublisher(
        context.task.config,
        run.step.model,
        run.state,
        run.step.managed,
        None if about is None else about.get("deltas", {}),
        run.progress.step,
        context.heartbeat.confirm,
        lambda text: context.report(messages.Warn(text=text)),
    )


def describe_run(run: RankRun) -> dict[str, Any]:
    """Return the index entry "about" for a checkpoint of the current state, without managed ids and deltas.

    This is a collective operation: every rank must call it.
    """
    task, config = run.context.task, run.context.task.config
    train = task.datasets.get("train")  # missing if batches do not come from files
    return {
        "name": config.run.name,
        "saved_unix_s": time(),
        "progress": run.progress.record(),
        "evaluation": run.progress.last_evaluation,
        "data": task.fingerprint,
        "text_ids": dict(train.text_ids) if train else {},
        "config": hide_all(config.model_dump(by_alias=True, mode="json")),  # checkpoints are shared
        "schema": task.schema.to_yaml(),
        "plan": describe_plan(run.plan),
        "world_size": run.context.world,
        "versions": get_installed_versions(),
    }


def make_unsaved_error(error: RunError, folder: str, newest: int | None) -> RunError:
    """Return the error of a run whose last checkpoint could not be written.

    Args:
        error: Error of the save.
        folder: Run folder.
        newest: Step of the newest checkpoint; None if there is none.
    """
    if isinstance(error, NonfiniteStateError):
        return error
    from_step = f"from the checkpoint of step {newest}" if newest else "from the beginning"
    return RunError(
        f"the trained model is not saved: {error.what}",
        where=error.where,
        expected=error.expected,
        do=f"free up space, and train the remaining steps {from_step}: raytrec train --resume "
        f"{quote_for_shell(folder)}",
    )


def add_advice(error: NonfiniteStateError, task: WorkerTask, newest: int | None) -> NonfiniteStateError:
    """Return the error with advice on training on from the newest checkpoint, which is finite.

    Args:
        error: Error of the save.
        task: Task of the ranks.
        newest: Step of the newest checkpoint; None if there is none.
    """
    optim = task.config.optim
    lower = f"optim.embeddings.lr={optim.embeddings.lr / 10:g} optim.dense.lr={optim.dense.lr / 10:g}"
    if newest is None:
        do = f"restart with lower learning rates ({lower}), or set train.max_grad_norm"
    else:
        folder = get_step_folder(task.checkpoint, newest)
        do = (
            "start a new run from the last checkpoint, whose values are finite, with lower learning rates or a lower "
            f"train.max_grad_norm: raytrec train --warm-start {quote_for_shell(folder)} {lower}"
        )
    return NonfiniteStateError(error.what, where=error.where, expected=error.expected, do=do)
