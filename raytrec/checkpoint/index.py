"""The index of a checkpoint; writing it is the commit. It has what is in the checkpoint, and where, and is
written last.

No pickle: JSON, with a hash of itself. No torch either: the driver reads it, too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raytrec.checkpoint.sound import why_unsound
from raytrec.common import reading
from raytrec.common.errors import RunError, first_line, some
from raytrec.common.reading import retry_read, storage_hint
from raytrec.common.storage import open_filesystem, sync

INDEX = "checkpoint.json"
FORMAT = 1
FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointError(RunError):
    """A checkpoint is damaged, or cannot be read or written."""


class NoRoom(CheckpointError):
    """There is no space left for a checkpoint, or this user may not have more."""


def read_index(folder: str) -> dict:
    """The index of a checkpoint, checked.

    Args:
        folder: a local path or a URI.

    Returns:
        {"format", "attempt", "block_bytes", "tensors", "about", "sha256"}: see `storage.ShardWriter`.

    Raises:
        CheckpointError: there is none, it is damaged, of another format, or the storage does not answer.
    """
    where = f"{folder.rstrip('/')}/{INDEX}"
    filesystem, path = open_filesystem(where)

    def read() -> bytes:
        if is_local(filesystem):
            return reading.read_bytes(path)
        with filesystem.open_input_stream(path) as stream:
            return stream.read()

    try:
        text = retry_read(where, read)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            "there is no whole checkpoint here",
            where=where,
            expected=f"{INDEX}, which is written when all else has been",
            do="name the folder of a checkpoint; what an interrupted save left behind cannot be loaded",
        ) from None
    except OSError as error:
        raise unreadable(reason(error), where) from None
    try:
        index = reading.json_values(text)
        version, found = index["format"], index["sha256"]
        right = found == _digest(index)
    except (ValueError, KeyError, TypeError) as error:
        raise unreadable(f"damaged ({error})", where) from None
    if version != FORMAT:
        raise CheckpointError(
            f"the checkpoint is of format {some(version)}", where=where, expected=f"format {FORMAT}"
        )
    if not right:
        raise unreadable("damaged (it does not match its own hash)", where)
    if why := why_unsound(index):
        raise unreadable(f"damaged ({why})", where)
    return index


def write_index(folder: str, content: dict) -> None:
    """Commits a checkpoint, in one step, so that there is never a part of an index.

    Args:
        folder: a local path or a URI; it exists.
        content: the index without format and hash: `as_json` has passed it, and it has an "attempt".

    Raises:
        CheckpointError: it cannot be written; there is none then, or the one that was there before.
    """
    index = {"format": FORMAT, **content}
    text = _canonical({**index, "sha256": _digest(index)})
    filesystem, path = open_filesystem(folder)
    with writing(f"{folder.rstrip('/')}/{INDEX}"):
        if is_local(filesystem):
            _replace(Path(path), content["attempt"], text)
        else:  # an object appears whole when its stream is closed
            retry_read(folder, lambda: _put(filesystem, f"{path}/{INDEX}", text))


def check_files(folder: str, sizes: dict[str, int]) -> None:
    """Whether this process sees the files that all ranks have written.

    Args:
        sizes: file → its bytes.

    Raises:
        CheckpointError: it does not: the folder is another one on each node.
    """
    filesystem, path = open_filesystem(folder)
    with writing(folder):
        found = filesystem.get_file_info([f"{path}/{name}" for name in sizes])
    for (name, size), info in zip(sizes.items(), found, strict=True):
        if info.size != size:
            seen = "is not there" if info.size is None else f"has {info.size:,} bytes, not {size:,}"
            raise CheckpointError(
                f"{name}, which a worker has written, {seen} as the first worker sees it",
                where=folder,
                expected="a folder that all workers share",
                do="put checkpoints on storage that all nodes reach under the same path",
            )


def as_json(value: dict, where: str) -> dict:
    """A value as it will be read back: tuples are lists, keys are strings.

    Raises:
        CheckpointError: it has something else than JSON in it. NaN and infinity are not JSON.
    """
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot be written as JSON: {error}",
            where=where,
            expected="dicts, lists, strings, finite numbers, booleans and None",
        ) from None


def unreadable(what: str, where: str) -> CheckpointError:
    """The error of a part of a checkpoint that is damaged or cannot be read."""
    return CheckpointError(
        f"the checkpoint cannot be read: {what}",
        where=where,
        expected=storage_hint(where) + "the file as it was written",
        do="load another checkpoint, or restore this file from a copy; where a run that still trains removes "
        "checkpoints, give the command again, or set its checkpoint.keep_last higher",
    )


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Gives errors of the file system their place.

    Raises:
        CheckpointError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        kind = NoRoom if error.errno in FULL else CheckpointError
        raise kind(
            f"the checkpoint cannot be written: {reason(error)}",
            where=where,
            expected="a folder that all workers can write to, with room for the checkpoint",
            do="make room, or choose another folder; earlier checkpoints are as they were",
        ) from error


def reason(error: OSError) -> str:
    """The message of the operating system or the store, in one line."""
    return error.strerror or first_line(error)


def is_local(filesystem) -> bool:
    """Whether a pyarrow file system is this machine's (or mounted here)."""
    return filesystem.type_name == "local"


def make_folder(folder: str) -> None:
    """A folder for a checkpoint and, where it is local, those above it, so that they outlast a power cut.

    Raises:
        CheckpointError: it cannot be made.
    """
    filesystem, place = open_filesystem(folder)
    if not is_local(filesystem):
        return
    path = Path(place)
    with writing(folder):
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            sync(each.parent)


def _replace(folder: Path, attempt: str, text: bytes) -> None:
    partial = folder / f"{INDEX}.partial-{attempt}"
    try:
        with open(partial, "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, folder / INDEX)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise
    sync(folder)


def _put(filesystem, path: str, text: bytes) -> None:
    with filesystem.open_output_stream(path) as stream:
        stream.write(text)


def _canonical(index: dict) -> bytes:
    return json.dumps(index, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(index: dict) -> str:
    """sha256 over all but itself."""
    return hashlib.sha256(
        _canonical({key: value for key, value in index.items() if key != "sha256"})
    ).hexdigest()
