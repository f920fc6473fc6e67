"""Output folders on disk or in an object store. On disk, files appear only when they are complete."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import fs

from raytrec.common.documents import validate_as
from raytrec.common.errors import ConfigError, RunError, convert_os_errors
from raytrec.common.processes import get_owner_name, lock_file, remove_leftovers
from raytrec.common.reading import UnreadableError, parse_json
from raytrec.common.storage import join_uri, open_filesystem, read_bytes, sync_to_disk

OTHER_FOLDER_ADVICE = "choose another --out, or remove the folder if its files are not needed"
T = TypeVar("T")


def compute_binding(*parts: Any) -> str:
    """Return the SHA-256, in hex, of JSON values that together identify the content of a folder or file."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class OutputFolder:
    """Folder on disk or in an object store, given by its path or URI. All methods may raise OSError.

    The constructor raises a DataError if the path is not valid or the store cannot be reached.

    Attributes:
        partial: Name of the subfolder for incomplete files on disk.
    """

    partial = "_parts"

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/") or uri
        self._filesystem, self._path = open_filesystem(uri)
        self.is_local = self._filesystem.type_name == "local"

    def uri_of(self, name: str) -> str:
        """Return the path or URI of the file with this name in the folder."""
        return join_uri(self.uri, name)

    def list_names(self) -> set[str]:
        """Return the paths, relative to the folder, of all files, also incomplete ones, in it and its subfolders.

        The result is empty if the folder does not exist.
        """
        infos = self._filesystem.get_file_info(fs.FileSelector(self._path, recursive=True, allow_not_found=True))
        files = (info.path for info in infos if info.type == fs.FileType.File)
        return {path.removeprefix(self._path).lstrip("/") for path in files}

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which on disk appears only when complete; remove incomplete files of killed writers first."""
        self.sweep()
        with self.stream(name, name) as stream:
            stream.write(data)

    @contextmanager
    def stream(self, name: str, partial: str) -> Iterator[pa.NativeFile]:
        """Open a stream to a file that appears, or replaces an existing file, at the end of the block.

        On disk, the file is written under another name and renamed at the end. If the block raises an error, the
        incomplete file is removed. In an object store, an object appears when its stream is closed. After an error,
        Python closes the stream when it frees the stream, so an incomplete object can appear.

        Args:
            name: Path of the file, relative to the folder.
            partial: Prefix of the path of the incomplete file on disk, relative to the folder.
        """
        target = f"{self._path}/{name}"
        if not self.is_local:
            stream = self._filesystem.open_output_stream(target)
            yield stream
            stream.close()
            return
        written = f"{self._path}/{partial}.{get_owner_name()}.tmp"
        os.makedirs(os.path.dirname(written), exist_ok=True)
        try:
            with self._filesystem.open_output_stream(written) as stream:
                yield stream
            sync_to_disk(written)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.replace(written, target)
        except BaseException:
            Path(written).unlink(missing_ok=True)
            raise

    def sweep(self) -> None:
        """Remove incomplete files left by killed writers of this host, if the folder is on disk."""
        for place in (self._path, f"{self._path}/{self.partial}") if self.is_local else ():
            remove_leftovers(place, "*.{owner}.tmp")

    def remove(self, folder: str) -> None:
        """Remove a subfolder with its content, if the subfolder exists."""
        info = self._filesystem.get_file_info(f"{self._path}/{folder}")
        if info.type == fs.FileType.Directory:
            self._filesystem.delete_dir(info.path)

    def delete(self, name: str) -> None:
        """Remove a file; raise FileNotFoundError if a file on disk does not exist."""
        self._filesystem.delete_file(f"{self._path}/{name}")


class ClaimedFolder(OutputFolder):
    """Output folder of one command; after an interruption, the same command can continue to fill the folder.

    Args:
        uri: Path or URI of the folder (--out).
        command: Command that fills the folder, such as "raytrec export".
    """

    def __init__(self, uri: str, command: str):
        super().__init__(uri)
        self._command = command

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the folder, if it is on disk, against other writers until the block or the process ends.

        A missing folder is created, and removed if it is empty after the block. If the file system does not support
        locks, other writers are not detected.

        Raises:
            RunError: Another process is writing to the folder, or the folder cannot be created or opened.
        """
        if not self.is_local:
            yield
            return
        with convert_os_errors("cannot create or open the folder", where=f"--out {self.uri}"):
            is_new = not os.path.isdir(self._path)
            os.makedirs(self._path, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(descriptor)
            try:
                yield
            finally:
                with suppress(OSError):  # the folder contains files
                    if is_new:
                        os.rmdir(self._path)
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            lock_file(descriptor)
        except BlockingIOError:
            raise RunError(
                "another process is writing to this folder",
                where=f"--out {self.uri}",
                do="wait until that process has ended, or choose another --out",
            ) from None

    def claim(self, name: str, kind: type[T]) -> tuple[set[str], T | None]:
        """Read the claim: the JSON document in which an earlier command stored what the folder contains.

        Args:
            name: Name of the claim's file.
            kind: Type of the claim; see documents.validate_as.

        Returns:
            The names of all files in the folder, and the claim. The claim is None if the folder is empty, or contains
            only incomplete files of an interrupted write of the claim.

        Raises:
            ConfigError: The folder contains other files but no claim, or the claim is not valid.
            OSError: The folder or the claim cannot be read.
        """
        names = self.list_names()
        if name not in names:
            if others := sorted(each for each in names if not each.startswith(name)):
                raise self.make_refusal(f"the folder contains other files, such as {others[0]}")
            return names, None
        try:
            return names, validate_as(parse_json(read_bytes(self.uri_of(name))), kind)
        except UnreadableError as error:
            raise self.make_refusal(f"cannot read {name}: {error}") from None

    def make_refusal(self, what: str, do: str = OTHER_FOLDER_ADVICE) -> ConfigError:
        """Return the error for a folder to which the command must not write.

        Args:
            what: Reason, as a clause.
            do: Advice to the user.
        """
        expected = f"a new or empty folder, or the folder of an earlier run of the same `{self._command}`"
        return ConfigError(what, where=f"--out {self.uri}", expected=expected, do=do)
