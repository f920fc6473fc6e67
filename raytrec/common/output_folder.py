"""Folders of files that appear when they are complete, on disk or in an object store."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from pyarrow import fs

from raytrec.common.errors import RunError, os_errors
from raytrec.common.processes import owner, remove_leftovers
from raytrec.common.storage import join_uri, open_filesystem, read_bytes, sync


class OutputFolder:
    """A folder where files appear when they are complete.

    Attributes:
        partial: the folder below, of files on disk that are not.

    Raises:
        OSError: from all of it.
    """

    partial = "_parts"

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/") or uri
        self._filesystem, self._path = open_filesystem(uri)
        self.is_local = self._filesystem.type_name == "local"

    def uri_of(self, name: str) -> str:
        """The address of a file."""
        return join_uri(self.uri, name)

    def names(self) -> set[str]:
        """Of all files, at all depths."""
        found = self._filesystem.get_file_info(
            fs.FileSelector(self._path, recursive=True, allow_not_found=True)
        )
        files = (info.path for info in found if info.type == fs.FileType.File)
        return {path.removeprefix(self._path).lstrip("/") for path in files}

    def write(self, name: str, data: bytes) -> None:
        """Writes a file that is there when it is whole."""
        self.sweep()
        with self.stream(name, name) as stream:
            stream.write(data)

    @contextmanager
    def stream(self, name: str, partial: str) -> Iterator[pa.NativeFile]:
        """A stream to a file that appears after the block; after an error it does not.

        A file on disk is written under another name. An object appears when its stream is closed, which after
        an error only the interpreter may do: then the footer has fewer rows than its metadata states.
        """
        target = f"{self._path}/{name}"
        if not self.is_local:
            stream = self._filesystem.open_output_stream(target)
            yield stream
            stream.close()
            return
        written = f"{self._path}/{partial}.{owner()}.tmp"
        os.makedirs(os.path.dirname(written), exist_ok=True)
        try:
            with self._filesystem.open_output_stream(written) as stream:
                yield stream
            sync(written)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(written, target)
        except BaseException:
            Path(written).unlink(missing_ok=True)
            raise

    def sweep(self) -> None:
        """Removes what writers that were killed have left, of a folder on disk."""
        for place in (self._path, f"{self._path}/{self.partial}") if self.is_local else ():
            remove_leftovers(place, "*.{owner}.tmp")

    def read(self, name: str) -> bytes | None:
        """A small file; None where there is none."""
        try:
            return read_bytes(self.uri_of(name))
        except FileNotFoundError:
            return None

    def remove(self, folder: str) -> None:
        """Removes a folder with all that is in it, if it is there."""
        found = self._filesystem.get_file_info(f"{self._path}/{folder}")
        if found.type == fs.FileType.Directory:
            self._filesystem.delete_dir(found.path)

    def delete(self, name: str) -> None:
        """Removes a file."""
        self._filesystem.delete_file(f"{self._path}/{name}")


@contextmanager
def hold_folder(folder: OutputFolder) -> Iterator[None]:
    """Lock a folder on disk against other writers, until the block or the process ends.

    A folder that does not exist is made, and removed if it is empty after the block.

    Raises:
        RunError: Another process writes to the folder, or the folder cannot be made.
    """
    if not folder.is_local:
        yield
        return
    with os_errors("the folder cannot be written", where=f"--out {folder.uri}"):
        is_new = not os.path.isdir(folder.uri)
        os.makedirs(folder.uri, exist_ok=True)
        held = os.open(folder.uri, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(held, folder)
        try:
            yield
        finally:
            with suppress(OSError):  # it holds files
                if is_new:
                    os.rmdir(folder.uri)
    finally:
        os.close(held)


def _lock(held: int, folder: OutputFolder) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RunError(
            "another process writes to this folder",
            where=f"--out {folder.uri}",
            do="wait until that has ended, or choose another --out",
        ) from None
    except OSError:  # a file system without locks
        return
