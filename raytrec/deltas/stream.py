"""Stream of a run's deltas: identity, newest delta and manifests. Does not import torch."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import fs

from raytrec.common.documents import find_document, read_document, to_json_document
from raytrec.common.errors import ConfigError, RaytrecError, RunError, convert_os_errors, get_first_line
from raytrec.common.formatting import as_dict
from raytrec.common.messages import DELTA_STREAM
from raytrec.common.output_folder import OutputFolder
from raytrec.common.reading import UnreadableError
from raytrec.common.storage import join_uri, open_filesystem, query_file_info, read_bytes
from raytrec.config.run_config import RunConfig
from raytrec.deltas.format import (
    DELTAS_FOLDER,
    EXPORTS_FOLDER,
    STREAM_FILE,
    DeltaManifest,
    DeltaStream,
    DeltaTable,
    Operation,
    encode_manifest,
    format_number,
    get_export_uri,
    get_manifest_uri,
    read_delta_manifest,
)
from raytrec.scoring.manifest import MANIFEST_FILE, FileEntry


class NewestDelta(NamedTuple):
    """Newest delta of a folder; (0, "") if the folder contains no delta.

    Attributes:
        number: Number of the delta.
        sha256: SHA-256 of its manifest file.
    """

    number: int
    sha256: str


def open_stream(config: RunConfig) -> None:
    """Create the stream of a run before training starts, or check that the run owns the stream in the folder.

    Raises:
        ConfigError: The folder contains deltas of another or an unknown run, or is the run folder or checkpoint folder.
        RunError: The folder cannot be written.
    """
    folder, own_file = config.export.deltas.to, Path(config.run.dir) / DELTA_STREAM
    if folder in (config.run.dir, config.checkpoint_root):
        raise ConfigError(
            "deltas need a separate folder",
            where=f"export.deltas.to={folder}",
            expected=f"a folder other than {config.run.dir} and {config.checkpoint_root}",
        )
    with convert_os_errors("the folder of deltas cannot be written", where=f"export.deltas.to={folder}"):
        stored = find_document(join_uri(folder, STREAM_FILE), DeltaStream)
        own = find_document(str(own_file), DeltaStream)
        is_unused = not (list_numbers(folder, DELTAS_FOLDER) or list_numbers(folder, EXPORTS_FOLDER))
        if is_unused and (stored is None or stored.run == config.run.name):  # the run may have written no delta
            stream = DeltaStream(id=uuid.uuid4().hex, run=config.run.name)
            OutputFolder(folder).write(STREAM_FILE, to_json_document(stream))
            OutputFolder(config.run.dir).write(DELTA_STREAM, to_json_document(stream))
        elif stored is None or stored != own:
            raise ConfigError(
                f"the folder contains the deltas of {f'another run, {stored.run}' if stored else 'an unknown run'}",
                where=f"export.deltas.to={folder}",
                expected="a new folder, or the folder that this run has written",
                do="choose another export.deltas.to, or remove the folder",
            )


def read_stream(config: RunConfig) -> DeltaStream:
    """Return the stream that `open_stream` has recorded in the run folder.

    Raises:
        RunError: The record cannot be read.
    """
    return read_document(config.run.dir, DELTA_STREAM, DeltaStream, "stream of deltas", "raytrec train")


def list_numbers(folder: str, subfolder: str) -> list[int]:
    """Return the numbers of the deltas (subfolder deltas) or full exports (exports) of a folder, ascending.

    Raises:
        OSError: The store cannot be read.
    """
    filesystem, path = open_filesystem(join_uri(folder, subfolder))
    infos = filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = [info.base_name.removesuffix(".json") for info in infos]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def list_exports(folder: str) -> list[int]:
    """Return the numbers of the complete full exports of a folder, ascending. Errors are as in `list_numbers`."""
    numbers = list_numbers(folder, EXPORTS_FOLDER)
    return [each for each in numbers if query_file_info(join_uri(get_export_uri(folder, each), MANIFEST_FILE)).is_file]


def remove_old_files(folder: str, keep: int) -> None:
    """Remove all but the `keep` newest full exports, and the deltas before the oldest remaining full export.

    The manifests are removed first, so that no reader finds a partial export or delta.

    Raises:
        OSError: The store cannot be read or written.
    """
    exports = list_exports(folder)[-keep:]
    if not exports:
        return
    output = OutputFolder(folder)
    for number in list_numbers(folder, EXPORTS_FOLDER):
        name = f"{EXPORTS_FOLDER}/{format_number(number)}"
        if number < exports[0]:
            with suppress(FileNotFoundError):  # the export was incomplete
                output.delete(f"{name}/{MANIFEST_FILE}")
            output.remove(name)
    filesystem, path = open_filesystem(join_uri(folder, DELTAS_FOLDER))
    names = [info.base_name for info in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))]
    for name in sorted(names, key=lambda name: (not name.endswith(".json"), name)):
        if name < format_number(exports[0]):
            (output.delete if name.endswith(".json") else output.remove)(f"{DELTAS_FOLDER}/{name}")


def find_newest_delta(folder: str) -> NewestDelta:
    """Return the newest delta of a folder.

    Raises:
        OSError: The store cannot be read.
    """
    numbers = list_numbers(folder, DELTAS_FOLDER)
    if not numbers:
        return NewestDelta(0, "")
    return NewestDelta(numbers[-1], hashlib.sha256(read_bytes(get_manifest_uri(folder, numbers[-1]))).hexdigest())


class DeltaOutcome(NamedTuple):
    """Outcome of writing a delta, the same on all ranks.

    Attributes:
        number: Number of the delta if it has been written, else of the newest known delta.
        error: Reason why the delta was not written, or None.
    """

    number: int
    error: str | None = None


class ManifestWriter:
    """Writer of the manifests of a run's deltas, used on rank 0.

    Args:
        folder: Folder of deltas.
        stream: Stream of the run.
        tables: Sizes of all tables.
        confirm: Function called before a delta is committed; raises RunError if this group no longer owns the run.
    """

    def __init__(self, folder: str, stream: DeltaStream, tables: dict[str, DeltaTable], confirm: Callable[[], None]):
        self._folder, self._stream, self._tables, self._confirm = folder, stream, tables, confirm
        self._newest: NewestDelta | None = None  # None: unknown

    def find_since(self, position: Mapping[str, Any] | None, step: int) -> tuple[int, list[DeltaManifest] | None]:
        """Return the number of the newest delta, and the deltas that contain changes after a checkpoint.

        A checkpoint contains the number N of the delta of its step. If that delta could not be written, delta N
        belongs to a later step or does not exist. In the second case, the changes before the checkpoint are unknown.

        Args:
            position: Entry "deltas" of the checkpoint's index; None at the start of the run.
            step: Step of the checkpoint.

        Returns:
            The number, 0 if the folder cannot be read; and the manifests of the deltas, None if they are unknown.
        """
        first = 0 if position is None else as_dict(position).get("number")
        is_same = position is None or as_dict(position).get("stream") == self._stream.id
        try:
            self._newest = newest = find_newest_delta(self._folder)
        except OSError:
            return 0, None
        if not is_same or not isinstance(first, int) or not 0 <= first <= newest.number:
            return newest.number, None
        try:
            found = [read_delta_manifest(self._folder, each) for each in range(max(1, first), newest.number + 1)]
        except (OSError, UnreadableError):
            return newest.number, None
        if None in found or [sha256 for _, sha256 in found[:-1]] != [delta.parent for delta, _ in found[1:]]:
            return newest.number, None  # a delta is missing or damaged
        deltas = [delta for delta, _ in found]
        return newest.number, deltas[1:] if first and deltas[0].step == step else deltas

    def begin(self, known: int) -> tuple[int, str | None]:
        """Return the number of the newest delta, and the reason why the next delta cannot be started, or None.

        Args:
            known: Number of the newest known delta. A newer delta exists if the store has created a manifest in
                spite of an error, or if another process writes deltas.
        """
        try:
            self._newest = self._newest or find_newest_delta(self._folder)
        except (OSError, RaytrecError) as failure:
            return known, describe_failure(failure)
        number = self._newest.number
        return number, None if number == known else f"delta {number} exists already"

    def commit(self, number: int, entries: Iterable[dict[Operation, dict[str, FileEntry]]], **about: Any) -> str | None:
        """Write the manifest of a delta. Return None, or the reason why the manifest was not written.

        Args:
            number: Number of the delta.
            entries: DeltaFiles.entries of each rank.
            **about: Fields step, cut_unix_s and last of the manifest.
        """
        manifest = DeltaManifest(
            stream=self._stream.id, number=number, parent=self._newest.sha256, tables=self._tables, **about
        )
        for operation, files in (item for rank_entries in entries for item in rank_entries.items()):
            manifest.files.setdefault(operation, {}).update(files)
        content, sha256 = encode_manifest(manifest)
        try:
            self._confirm()
            if query_file_info(get_manifest_uri(self._folder, number)).is_file:
                raise RunError(f"delta {number} exists already")
            OutputFolder(join_uri(self._folder, DELTAS_FOLDER)).write(f"{format_number(number)}.json", content)
        except (OSError, RaytrecError) as failure:
            return describe_failure(failure)
        self._newest = NewestDelta(number, sha256)
        return None

    def give_up(self, number: int, attempt: str) -> None:
        """Remove the files of a delta that could not be written.

        Args:
            number: Number of the delta.
            attempt: Name of the subfolder with the files.
        """
        self._newest = None
        with suppress(OSError, RaytrecError):  # a store may have created the manifest in spite of the error
            if not query_file_info(get_manifest_uri(self._folder, number)).is_file:
                OutputFolder(join_uri(self._folder, DELTAS_FOLDER)).remove(attempt)


def describe_failure(failure: Exception) -> str:
    """Return the reason for a failure in one line."""
    if isinstance(failure, RaytrecError):
        return failure.what
    return (isinstance(failure, OSError) and failure.strerror) or get_first_line(failure)
