"""Output folders on disk or in an object store, in which files appear only when complete."""

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

OTHER_FOLDER_ADVICE = "choose another --out, or remove the folder"
T = TypeVar("T")


def compute_binding(*parts: Any) -> str:
    """Return a hash of the JSON values that determine the content of a folder or file."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class OutputFolder:
    """Folder in which files appear only when complete. All methods may raise OSError.

    Attributes:
        partial: Name of the subfolder for incomplete files on disk.
    """

    partial = "_parts"

    def __init__(self, uri: str):
        self.uri = uri.rstrip("/") or uri
        self._filesystem, self._path = open_filesystem(uri)
        self.is_local = self._filesystem.type_name == "local"

    def uri_of(self, name: str) -> str:
        """Return the path or URI of a file."""
        return join_uri(self.uri, name)

    def list_names(self) -> set[str]:
        """Return the names of all files, including those in subfolders."""
        infos = self._filesystem.get_file_info(fs.FileSelector(self._path, recursive=True, allow_not_found=True))
        files = (info.path for info in infos if info.type == fs.FileType.File)
        return {path.removeprefix(self._path).lstrip("/") for path in files}

    def write(self, name: str, data: bytes) -> None:
        """Write a file, which appears only when complete."""
        self.sweep()
        with self.stream(name, name) as stream:
            stream.write(data)

    @contextmanager
    def stream(self, name: str, partial: str) -> Iterator[pa.NativeFile]:
        """Open a stream to a file that appears after the block; on disk, it does not appear after an error.

        A file on disk is first written under another name. In an object store, an object appears when its stream is
        closed. After an error, the interpreter closes the stream when it frees the stream, so an incomplete object
        can appear. The footer of an incomplete Parquet file counts fewer rows than the file's metadata states.

        Args:
            name: Name of the file.
            partial: Prefix of the name of the incomplete file on disk.
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
        """Remove incomplete files left by killed writers, if the folder is on disk."""
        for place in (self._path, f"{self._path}/{self.partial}") if self.is_local else ():
            remove_leftovers(place, "*.{owner}.tmp")

    def remove(self, folder: str) -> None:
        """Remove a subfolder with its content, if it exists."""
        info = self._filesystem.get_file_info(f"{self._path}/{folder}")
        if info.type == fs.FileType.Directory:
            self._filesystem.delete_dir(info.path)

    def delete(self, name: str) -> None:
        """Remove a file."""
        self._filesystem.delete_file(f"{self._path}/{name}")


class ClaimedFolder(OutputFolder):
    """Output folder of one command, which the same command can continue to fill after an interruption.

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

        A missing folder is created, and removed if it is empty after the block.

        Raises:
            RunError: Another process is writing to the folder, or the folder cannot be created.
        """
        if not self.is_local:
            yield
            return
        with convert_os_errors("cannot write to the folder", where=f"--out {self.uri}"):
            is_new = not os.path.isdir(self.uri)
            os.makedirs(self.uri, exist_ok=True)
            descriptor = os.open(self.uri, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(descriptor)
            try:
                yield
            finally:
                with suppress(OSError):  # the folder contains files
                    if is_new:
                        os.rmdir(self.uri)
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
        """Return the names of all files, and the claim that an earlier command stored, or None in a new folder.

        A claim is a JSON document that identifies the output to which the folder belongs.

        Args:
            name: Name of the file that contains the claim.
            kind: Type of the claim; see documents.validate_as.

        Raises:
            ConfigError: The folder contains other files but no claim, or the claim is damaged.
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
        """Return the error for a folder to which the command must not write, because it has other content."""
        expected = f"a new folder, or the folder of an earlier run of the same `{self._command}`"
        return ConfigError(what, where=f"--out {self.uri}", expected=expected, do=do)
