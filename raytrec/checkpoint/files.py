"""Find, pin and remove the checkpoints of a run without importing torch.

Each step has a folder, which is a complete checkpoint if it contains an index. Functions that list, pin or remove
checkpoints raise OSError if the storage fails. All raise DataError for an invalid path or unreachable store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raytrec.checkpoint.index import INDEX, CheckpointError, find_run_problem, make_foreign_error, read_index
from raytrec.common.errors import RunError, convert_os_errors
from raytrec.common.formatting import parse_number
from raytrec.common.reading import MAX_YAML_BYTES, UnreadableError, parse_yaml, read_bytes
from raytrec.common.storage import (
    chooses_server,
    join_uri,
    make_absolute,
    open_filesystem,
    query_file_info,
    split_query,
)
from raytrec.config.trust import describe_foreign_file, is_own_file

if TYPE_CHECKING:
    from raytrec.metrics.selection import MetricDisplay

STEP_PREFIX = "step-"
FOLDER = "checkpoints"  # in the run folder, unless checkpoint.dir is set
PIN = "pinned"  # file in the folder of a pinned checkpoint
# Cache: folder → (size and modification time of its index, the index's `about`). Reading the index of a
# checkpoint with many shards takes seconds.
_ABOUT_CACHE: dict[str, tuple[tuple[int, int], dict]] = {}


def get_step_folder(root: str, step: int) -> str:
    """Return the path or URI of a step's checkpoint folder in the folder `root`."""
    return join_uri(root, f"{STEP_PREFIX}{step:010d}")


def steps(root: str) -> list[int]:
    """Return the steps with a checkpoint folder in `root`, complete or not, newest first; [] if `root` is missing."""
    from pyarrow import fs

    filesystem, path = open_filesystem(root)
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in infos if info.type == fs.FileType.Directory and _is_step(info.base_name)]
    return sorted((int(name.removeprefix(STEP_PREFIX)) for name in names), reverse=True)


def iterate_indexes(
    root: str, find_obstacle: Callable[[dict[str, Any]], str | None]
) -> Iterator[tuple[str, dict[str, Any], CheckpointError | None]]:
    """Yield (folder, index, None) for each usable checkpoint and (folder, {}, error) for others, newest first.

    Args:
        root: Folder of all checkpoints.
        find_obstacle: Function that returns the reason why an index's `about` cannot be used; None if it can.
    """
    for step in steps(root):
        folder = get_step_folder(root, step)
        try:
            index = read_index(folder)
            if problem := find_obstacle(index["about"]):
                raise make_foreign_error(problem, join_uri(folder, INDEX))
            yield folder, index, None
        except CheckpointError as error:
            yield folder, {}, error


def find_newest_checkpoint(root: str) -> tuple[str | None, dict[str, Any]]:
    """Return (folder, index) of the newest complete checkpoint of a run, or (None, {}) if there is none.

    Only the index is read; damaged data is detected when the checkpoint is loaded.
    """
    found = iterate_indexes(root, lambda about: None if isinstance(about.get("data"), str) else "about: no data")
    return next(((folder, index) for folder, index, error in found if error is None), (None, {}))


def find(place: str | Path) -> tuple[str, dict[str, Any]]:
    """Return (folder, index) of the newest complete checkpoint of a run, or of a given checkpoint.

    Args:
        place: Run folder, folder of all checkpoints, or folder of one checkpoint.

    Raises:
        RunError: The folder cannot be listed or contains no usable checkpoint, or as for `list_roots`.
        CheckpointError: The given checkpoint is incomplete or damaged, or no training run has written it.
        ConfigError: As for `make_absolute`.
    """
    place = make_absolute(str(place))
    with _convert_list_errors(place):
        for root in list_roots(place):
            folder, index = find_newest_checkpoint(root)
            if folder:
                return folder, _check_run_index(folder, index)
        if _is_step(split_query(place)[0].rpartition("/")[2]) or query_file_info(join_uri(place, INDEX)).is_file:
            return place, _check_run_index(place, read_index(place))
    raise RunError(
        "there is no complete checkpoint in this folder with a valid index of a training run",
        where=place,
        expected="a folder of a run, of all its checkpoints or of one checkpoint, with a complete checkpoint",
        do="pass the folder of a run (run.dir) with a checkpoint, or a checkpoint's own folder to see its error",
    )


def find_step(place: str | Path, step: int) -> tuple[str, dict[str, Any]]:
    """Return (folder, index) of a run's checkpoint of a step.

    Raises:
        RunError: The folder cannot be listed or has no checkpoint of the step, or as for `list_roots`.
        CheckpointError, ConfigError: As for `find`.
    """
    place = make_absolute(str(place))
    saved: set[int] = set()
    with _convert_list_errors(place):
        for root in list_roots(place):
            if step in (root_steps := steps(root)):
                folder = get_step_folder(root, step)
                return folder, _check_run_index(folder, read_index(folder))
            saved.update(root_steps)
    raise RunError(
        f"there is no checkpoint of step {step}",
        where=place,
        expected=f"one of the steps {', '.join(map(str, sorted(saved)))}" if saved else "a run folder with checkpoints",
    )


def _check_run_index(folder: str, index: dict[str, Any]) -> dict[str, Any]:
    """Return an index unchanged if it describes a training run's checkpoint.

    Raises:
        CheckpointError: The index lacks an entry that a run's checkpoint must have.
    """
    if problem := find_run_problem(index["about"]):
        raise make_foreign_error(f"about: {problem}", join_uri(folder, INDEX))
    return index


def _convert_list_errors(place: str) -> AbstractContextManager[None]:
    expected = "a folder of a run or checkpoint that you can read"
    return convert_os_errors("the checkpoints cannot be listed", where=place, expected=expected)


def _is_step(name: str) -> bool:
    return name.startswith(STEP_PREFIX) and name.removeprefix(STEP_PREFIX).isdecimal()


def list_roots(place: str) -> list[str]:
    """Return the folders that may contain a run's checkpoints.

    The result contains, in this order: checkpoint.dir of a local run's readable configuration if set, the folder
    `checkpoints` in `place`, and `place`.

    Raises:
        RunError: The run's configuration names a server and belongs to another user.
    """
    roots = [join_uri(place, FOLDER), place]
    config = Path(place) / "config.yaml"
    if "://" not in place and config.is_file():
        try:
            checkpoint_dir = parse_yaml(read_bytes(config, MAX_YAML_BYTES))["checkpoint"]["dir"]
        except (OSError, UnreadableError, KeyError, TypeError):  # code that needs the configuration reports it
            return roots
        if isinstance(checkpoint_dir, str) and checkpoint_dir:
            # The server would get this user's credentials.
            if chooses_server(checkpoint_dir) and not is_own_file(config):
                raise RunError(
                    f"checkpoint.dir in the configuration of the run names a server: {checkpoint_dir}",
                    where=describe_foreign_file(config),
                    expected="a run that you own, or a checkpoint.dir that names no server",
                    do="if you trust the run's source, pass the folder of one of its checkpoints instead",
                )
            roots.insert(0, checkpoint_dir)
    return roots


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
    """Return (folder, index) of the run's complete checkpoint with the best value of the metric `by`.

    Raises:
        RunError: The folder cannot be listed, no checkpoint has a value of the metric, or as for `list_roots`.
        CheckpointError, ConfigError: As for `find`.
    """
    place = make_absolute(str(place))
    with _convert_list_errors(place):
        for root in list_roots(place):
            if best := _select_best(_read_all_abouts(root), 1, by):
                return find_step(place, best.pop())
    raise RunError(
        f"no checkpoint in this folder contains a value of the metric {by.key}",
        where=place,
        expected="a run with a checkpoint saved after an evaluation (train.eval_every_steps) with this metric",
        do="omit --checkpoint to use the newest checkpoint, or pass --checkpoint STEP",
    )


def keep(root: str, last: int, best: int, by: MetricDisplay | None) -> None:
    """Remove complete checkpoints except the `last` newest and the `best` best by the metric `by` (None: no best).

    Incomplete checkpoints older than the newest complete one are also removed. The newest complete checkpoint, pinned
    checkpoints, and checkpoints whose index cannot be read, which may be temporary, are kept.
    """
    for step, is_complete in _find_removable(root, last, best, by).items():
        _remove(root, step, is_complete)


def remove_incomplete(root: str) -> None:
    """Remove all incomplete checkpoints in the folder `root`. No process may be writing to this folder."""
    for step, about in _read_all_abouts(root).items():
        if about is None:
            _remove(root, step, is_complete=False)


def remove_oldest(root: str, best: int, by: MetricDisplay | None) -> str | None:
    """Remove the oldest removable complete checkpoint; return its folder, or None if all must be kept.

    The newest complete checkpoint, from which a run resumes, the `best` best by the metric `by`, and pinned
    checkpoints are kept.
    """
    removable = [step for step, is_complete in _find_removable(root, 1, best, by).items() if is_complete]
    if not removable:
        return None
    _remove(root, removable[-1], is_complete=True)
    return get_step_folder(root, removable[-1])


def _find_removable(root: str, last: int, best: int, by: MetricDisplay | None) -> dict[int, bool]:
    """Return step → True if its checkpoint is complete, newest first, for the checkpoints that `keep` removes."""
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
