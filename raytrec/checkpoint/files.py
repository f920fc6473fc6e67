"""Where checkpoints lie: one folder a step; complete ones have an index. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raytrec.checkpoint.index import INDEX, CheckpointError, read_index
from raytrec.errors import RunError
from raytrec.storage import absolute, open_filesystem

PREFIX = "step-"
FOLDER = "checkpoints"  # in a run folder, unless checkpoint.dir says otherwise
LESS_IS_BETTER = {"auc": False, "ne": True, "logloss": True}


def folder_of(root: str, step: int) -> str:
    """The folder of the checkpoint of a step."""
    return f"{root.rstrip('/')}/{PREFIX}{step:010d}"


def steps(root: str) -> list[int]:
    """Steps that there are folders for, complete or not, the newest first."""
    from pyarrow import fs

    filesystem, path = open_filesystem(root)
    found = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name for info in found if info.type == fs.FileType.Directory]
    return sorted((int(n.removeprefix(PREFIX)) for n in names if _is_step(n)), reverse=True)


def newest(root: str) -> tuple[str | None, dict[str, Any], list[CheckpointError]]:
    """The newest complete checkpoint, what its index says, and why newer ones are not complete.

    Only the index is read: whether the data behind it is whole is found out when it is loaded.
    """
    passed_over = []
    for step in steps(root):
        folder = folder_of(root, step)
        try:
            return folder, read_index(folder), passed_over
        except CheckpointError as error:
            passed_over.append(error)
    return None, {}, passed_over


def find(place: str | Path) -> tuple[str, dict[str, Any]]:
    """A checkpoint and what its index says: the folder given, or the newest complete one of a run folder.

    Raises:
        RunError: when there is none; CheckpointError: when the one given is damaged.
    """
    place = absolute(str(place))
    for root in _roots(place):
        folder, index, _ = newest(root)
        if folder:
            return folder, index
    if _is_step(place.rstrip("/").rpartition("/")[2]) or _exists(f"{place}/{INDEX}"):
        return place, read_index(place)
    raise RunError(
        "there is no run or checkpoint here",
        where=place,
        expected=f"a run folder with a complete checkpoint in {FOLDER}/, or a checkpoint folder",
        do="give the folder that `raytrec train` printed (run.dir)",
    )


def keep(root: str, last: int, best: int, by: str) -> list[str]:
    """Removes all complete checkpoints but the newest `last` and the `best` ones by a metric, and incomplete
    ones that are older than the newest complete one. What cannot be read is left alone: perhaps it can later.

    Returns:
        What has been removed.
    """
    found: dict[int, dict | None] = {}
    for step in steps(root):
        folder = folder_of(root, step)
        try:
            found[step] = read_index(folder)["about"]
        except CheckpointError:
            if not _exists(f"{folder}/{INDEX}"):
                found[step] = None
    complete = [step for step, about in found.items() if about is not None]
    kept = set(complete[:last])
    rated = [(s, m) for s in complete if (m := (found[s].get("evaluation") or {}).get(by)) is not None]
    rated.sort(key=lambda pair: pair[1], reverse=not LESS_IS_BETTER[by])
    kept |= {step for step, _ in rated[:best]}
    gone = [s for s in found if s not in kept and complete and s < complete[0]]
    filesystem, _ = open_filesystem(root)
    for step in gone:
        folder = folder_of(root, step)
        _, path = open_filesystem(folder)
        if found[step] is not None:  # first what makes it count, so that no half of one is taken for a whole
            filesystem.delete_file(f"{path}/{INDEX}")
        filesystem.delete_dir(path)
    return [folder_of(root, step) for step in gone]


def discard(folder: str, attempt: str) -> None:
    """Removes what an attempt that failed has written, as far as that is possible; it takes up room."""
    from pyarrow import fs

    filesystem, path = open_filesystem(folder)
    try:
        files = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
        for info in files:
            if attempt in info.base_name:
                filesystem.delete_file(info.path)
        if all(attempt in info.base_name for info in files):
            filesystem.delete_dir(path)
    except OSError:
        return


def _is_step(name: str) -> bool:
    return name.startswith(PREFIX) and name.removeprefix(PREFIX).isdecimal()


def _exists(uri: str) -> bool:
    from pyarrow import fs

    filesystem, path = open_filesystem(uri)
    return filesystem.get_file_info(path).type == fs.FileType.File


def _roots(place: str) -> list[str]:
    """Where a run folder's checkpoints may be: where its configuration says, beside it, or here."""
    import yaml

    roots = [f"{place}/{FOLDER}", place]
    config = Path(place) / "config.yaml"
    if "://" not in place and config.is_file():
        values = yaml.safe_load(config.read_text()) or {}
        if away := (values.get("checkpoint") or {}).get("dir"):
            roots.insert(0, away)
    return roots
