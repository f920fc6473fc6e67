"""Manifests that rank 0 writes, and outcomes of writing deltas."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from raytrec.common.errors import RaytrecError, RunError, get_first_line
from raytrec.common.formatting import as_dict
from raytrec.common.output_folder import OutputFolder
from raytrec.common.storage import join_uri, query_file_info
from raytrec.deltas.files import DeltaFiles
from raytrec.deltas.format import (
    DELTAS_FOLDER,
    DeltaManifest,
    DeltaStream,
    DeltaTable,
    Operation,
    encode_manifest,
    format_number,
    get_manifest_uri,
)
from raytrec.deltas.stream import NewestDelta, find_deltas_since, find_newest_delta, list_exports
from raytrec.scoring.manifest import FileEntry


class DeltaOutcome(NamedTuple):
    """Outcome of writing a delta, the same on all ranks.

    Attributes:
        number: Number of the delta if it has been written, else of the newest known delta.
        error: Reason why the delta was not written, or None.
        is_overtaken: True if another process has written deltas in the meantime.
    """

    number: int
    error: str | None = None
    is_overtaken: bool = False


class ManifestWriter:
    """Writer of the manifests of a run, on rank 0.

    Args:
        folder: Folder of deltas.
        stream: Stream of the run.
        tables: Sizes of all tables.
        confirm: Function called before a delta is committed; raises RunError if this group no longer owns the run.
    """

    def __init__(self, folder: str, stream: DeltaStream, tables: dict[str, DeltaTable], confirm: Callable[[], None]):
        self._folder, self._stream, self._tables, self._confirm = folder, stream, tables, confirm
        self._newest: NewestDelta | None = None  # None: unknown
        self._hashes: set[str] = set()  # of the manifests of this process, which a store may contain after an error

    def find_deltas_since(
        self, position: Mapping[str, Any] | None, step: int
    ) -> tuple[int, list[DeltaManifest] | None, bool]:
        """Return the number of the newest delta, the deltas since a checkpoint, and True if there is no full export.

        The deltas are None if they cannot be determined.

        Args:
            position: Entry "deltas" of the checkpoint's index; None at the start of the run.
            step: Step of the checkpoint.
        """
        known = {"stream": self._stream.id, "number": 0} if position is None else as_dict(position)
        try:
            self._newest = newest = find_newest_delta(self._folder)
            lacks_export = not list_exports(self._folder)
        except OSError:
            return 0, None, False
        known = known if known.get("stream") == self._stream.id else {}
        return newest.number, find_deltas_since(self._folder, newest, known, step), lacks_export

    def begin(self, known: int) -> tuple[int, str, str | None]:
        """Return the number of the next delta, the name of its folder of files, and None.

        If there is an error, return the number of the newest known delta, "-", and the error. The name is empty if
        another process has written newer deltas.

        Args:
            known: Number of the newest known delta.
        """
        try:
            if self._newest is None:
                newest = find_newest_delta(self._folder)
                if newest.number > known and newest.sha256 not in self._hashes:
                    return newest.number, "", f"another process has written delta {newest.number}"
                self._newest = newest
        except (OSError, RaytrecError) as failure:
            return known, "-", describe_failure(failure)
        number = self._newest.number + 1
        return number, f"{format_number(number)}-{uuid.uuid4().hex[:8]}", None

    def commit(self, number: int, entries: Iterable[dict[Operation, dict[str, FileEntry]]], **about: Any) -> str | None:
        """Write the manifest of a delta, and return the reason if that fails.

        Args:
            number: Number of the delta.
            entries: Files of each rank.
            **about: step, cut_unix_s and last of the manifest.
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
                raise RunError(f"another process has written delta {number}")
            self._hashes.add(sha256)
            OutputFolder(join_uri(self._folder, DELTAS_FOLDER)).write(f"{format_number(number)}.json", content)
        except (OSError, RaytrecError) as failure:
            return describe_failure(failure)
        self._newest = NewestDelta(number, sha256)
        return None

    def give_up(self, number: int, files: DeltaFiles) -> None:
        """Remove the files of a delta that could not be written."""
        self._newest = None
        with suppress(OSError, RaytrecError):  # a store may have created the manifest in spite of the error
            if not query_file_info(get_manifest_uri(self._folder, number)).is_file:
                files.discard()


def describe_failure(failure: Exception) -> str:
    """Return the reason of a failure in one line."""
    if isinstance(failure, RaytrecError):
        return failure.what
    return (isinstance(failure, OSError) and failure.strerror) or get_first_line(failure)
