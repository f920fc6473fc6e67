"""Pin checkpoints, find the best ones, and remove those that need not be kept, without importing torch."""

from __future__ import annotations

from contextlib import suppress
from math import isnan
from pathlib import Path
from typing import Any

from raytrec.checkpoint.files import find_step, get_step_folder, list_roots, steps
from raytrec.checkpoint.index import INDEX, CheckpointError, read_index
from raytrec.common.errors import RunError
from raytrec.common.formatting import parse_number
from raytrec.common.storage import join_uri, make_absolute, open_filesystem, query_file_info
from raytrec.metrics.selection import MetricDisplay

PIN = "pinned"  # file in the folder of a pinned checkpoint
# Cache: folder → (size and modification time of its index, the index's `about`). Reading the index of a
# checkpoint with many shards takes seconds.
_ABOUT_CACHE: dict[str, tuple[tuple[int, int], dict]] = {}


def pin(folder: str) -> None:
    """Protect a checkpoint from removal.

    Raises:
        OSError: The folder of the checkpoint does not exist or cannot be written.
    """
    filesystem, path = open_filesystem(join_uri(folder, PIN))
    filesystem.open_output_stream(path).close()


def unpin(folder: str) -> None:
    """End the protection of a checkpoint; do nothing if it is not pinned.

    Raises:
        OSError: The folder of the checkpoint cannot be written.
    """
    if is_pinned(folder):
        filesystem, path = open_filesystem(join_uri(folder, PIN))
        filesystem.delete_file(path)


def is_pinned(folder: str) -> bool:
    """Return True if a checkpoint is protected from removal."""
    return query_file_info(join_uri(folder, PIN)).is_file


def find_best(place: str | Path, by: MetricDisplay) -> tuple[str, dict[str, Any]]:
    """Return (folder, index) of the run's checkpoint with the best value of a metric.

    Raises:
        RunError: No checkpoint has the metric, or the run's configuration names a server and belongs to
            another user.
    """
    for root in list_roots(make_absolute(str(place))):
        if best := _select_best(_read_all_abouts(root), 1, by):
            return find_step(place, best.pop())
    raise RunError(
        f"no checkpoint of this run has been evaluated with {by.key}",
        where=make_absolute(str(place)),
        expected="a run that was evaluated during training (train.eval_every_steps)",
        do="pass a step, or omit --checkpoint to use the newest checkpoint",
    )


def keep(root: str, last: int, best: int, by: MetricDisplay | None) -> None:
    """Remove complete checkpoints except the `last` newest and the `best` best by the metric `by`.

    Incomplete checkpoints older than the newest complete checkpoint are also removed. Pinned checkpoints are kept.
    A checkpoint whose index cannot be read is kept, because the index may be readable later.
    """
    for step, is_complete in _find_removable(root, last, best, by).items():
        _remove(root, step, is_complete)


def remove_incomplete(root: str) -> None:
    """Remove incomplete checkpoints; call only when no process is writing to this folder."""
    for step, about in _read_all_abouts(root).items():
        if about is None:
            _remove(root, step, is_complete=False)


def remove_oldest(root: str, best: int, by: MetricDisplay | None) -> str | None:
    """Remove the oldest removable checkpoint; return its folder, or None if all must be kept.

    The newest complete checkpoint, from which a run resumes, the `best` best by the metric `by`, and pinned
    checkpoints are kept.
    """
    removable = [step for step, is_complete in _find_removable(root, 1, best, by).items() if is_complete]
    if not removable:
        return None
    _remove(root, removable[-1], is_complete=True)
    return get_step_folder(root, removable[-1])


def _find_removable(root: str, last: int, best: int, by: MetricDisplay | None) -> dict[int, bool]:
    """Return step → True if complete, newest first, for the checkpoints that `keep` removes."""
    abouts = _read_all_abouts(root)
    complete = [step for step, about in abouts.items() if about is not None]
    retained = {*complete[:last], *_select_best(abouts, best, by)}
    return {
        step: about is not None
        for step, about in abouts.items()
        if step not in retained and complete and step < complete[0] and not is_pinned(get_step_folder(root, step))
    }


def _read_all_abouts(root: str) -> dict[int, dict | None]:
    """Return step → `about` of the checkpoint's index, newest step first; None for checkpoints without an index.

    Checkpoints whose index exists but cannot be read are omitted.
    """
    abouts: dict[int, dict | None] = {}
    for step in steps(root):
        folder = get_step_folder(root, step)
        info = query_file_info(join_uri(folder, INDEX))
        version = info.size, info.mtime_ns
        try:
            if None in version or _ABOUT_CACHE.get(folder, (None,))[0] != version:
                _ABOUT_CACHE[folder] = version, read_index(folder)["about"]
            abouts[step] = _ABOUT_CACHE[folder][1]
        except CheckpointError:
            if not query_file_info(join_uri(folder, INDEX)).is_file:
                abouts[step] = None
    return abouts


def _select_best(abouts: dict[int, dict | None], best: int, by: MetricDisplay | None) -> set[int]:
    if not best or by is None:
        return set()
    values = {
        step: parse_number((about.get("evaluation") or {}).get(by.key))
        for step, about in abouts.items()
        if about is not None
    }
    rated = [step for step, value in values.items() if not isnan(value)]
    return set(sorted(rated, key=lambda step: by.loss(values[step]))[:best])


def _remove(root: str, step: int, is_complete: bool) -> None:
    folder = get_step_folder(root, step)
    filesystem, path = open_filesystem(folder)
    _ABOUT_CACHE.pop(folder, None)
    if is_complete:  # the index first, so that a partly removed checkpoint is incomplete
        filesystem.delete_file(f"{path}/{INDEX}")
    filesystem.delete_dir(path)


def remove_other_attempts(folder: str, attempt: str) -> None:
    """Remove the files of all attempts except `attempt` from the folder of a complete checkpoint."""
    from pyarrow import fs

    filesystem, path = open_filesystem(folder)
    for info in filesystem.get_file_info(fs.FileSelector(path)):
        is_data_file = info.base_name.endswith(".bin") or ".partial-" in info.base_name
        if is_data_file and attempt not in info.base_name:
            filesystem.delete_file(info.path)


def discard(folder: str, attempt: str) -> None:
    """Remove the files of a failed attempt, and the folder if it is then empty; errors are ignored."""
    from pyarrow import fs

    filesystem, path = open_filesystem(folder)
    with suppress(OSError):
        files = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        for info in files:
            if attempt in info.base_name:
                filesystem.delete_file(info.path)
        if all(attempt in info.base_name for info in files):
            filesystem.delete_dir(path)
