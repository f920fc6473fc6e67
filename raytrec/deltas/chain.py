"""Folder of a run's deltas: its stream, and the chain of full exports and deltas. Does not import torch."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from pyarrow import fs

from raytrec.common.documents import find_document, read_document, to_json_document, validate_as
from raytrec.common.errors import ConfigError, RunError, convert_os_errors, get_first_line
from raytrec.common.messages import DELTA_STREAM
from raytrec.common.output_folder import OutputFolder
from raytrec.common.reading import UnreadableError, parse_json
from raytrec.common.storage import join_uri, open_filesystem, query_file_info, read_bytes, split_query
from raytrec.config.run_config import RunConfig
from raytrec.deltas.format import (
    DELTAS_FOLDER,
    EXPORTS_FOLDER,
    STREAM_FILE,
    DeltaManifest,
    DeltaStream,
    format_number,
    get_export_uri,
    get_manifest_uri,
    has_manifest,
    read_delta_manifest,
)
from raytrec.scoring.manifest import MANIFEST_FILE, ExportSource, format_version, read_manifest

REFUSAL_ADVICE = "use a full export of this or a later delta, or wait until the run has written one"


@dataclass(frozen=True)
class Position:
    """State of a consumer (an export or a service), identified by the delta that leads to the state.

    Attributes:
        run: Name of the run.
        manifest: Manifest of the delta.
        checksum: SHA-256 of the manifest's file.
    """

    run: str
    manifest: DeltaManifest
    checksum: str

    @property
    def number(self) -> int:
        """Return the number of the delta."""
        return self.manifest.number

    @property
    def version(self) -> str:
        """Return the version of the state, as named in responses of a service."""
        return format_version(self.run, self.manifest.step, self.checksum)


class NewestDelta(NamedTuple):
    """Newest delta of a folder; (0, "") if the folder contains no delta.

    Attributes:
        number: Number of the delta.
        sha256: SHA-256 of its manifest file.
    """

    number: int
    sha256: str


def make_refusal(folder: str, number: int, reason: str, expected: str | None = None) -> RunError:
    """Return the error for a delta that cannot be applied; `reason` is a clause, `expected` as in RaytrecError."""
    what, where = f"delta {number} cannot be applied: {reason}", get_manifest_uri(folder, number)
    return RunError(what, where=where, expected=expected, do=REFUSAL_ADVICE)


def make_missing_export_error(folder: str) -> RunError:
    """Return the error for a folder of deltas without a full export."""
    what, expected = "the folder contains no usable full export", "an export.deltas.to folder with a full export"
    return RunError(what, where=folder, expected=expected, do="retry when the run has written a full export")


def open_stream(config: RunConfig) -> None:
    """Check that a run owns the stream in its folder of deltas; create a stream (two files) in an unused folder.

    Raises:
        ConfigError: The folder contains deltas of another or an unknown run, or is the run folder or checkpoint folder.
        RunError: The folder of deltas or the run folder cannot be read or written.
        DataError: As for `open_filesystem`.
    """
    folder = config.export.deltas.to
    where = f"export.deltas.to={folder}"
    if folder in (config.run.dir, config.checkpoint_root):
        expected = f"a folder other than {config.run.dir} and {config.checkpoint_root}"
        what = "deltas need a separate folder, not the run folder or the checkpoint folder"
        raise ConfigError(what, where=where, expected=expected)
    with convert_os_errors("the stream of deltas cannot be read or written", where=f"{where}, {config.run.dir}"):
        stored = find_document(join_uri(folder, STREAM_FILE), DeltaStream)
        own = find_document(join_uri(config.run.dir, DELTA_STREAM), DeltaStream)
        is_unused = not (list_numbers(folder, DELTAS_FOLDER) or list_numbers(folder, EXPORTS_FOLDER))
        if is_unused and (stored is None or stored.run == config.run.name):  # the run may have written no delta
            stream = DeltaStream(id=uuid.uuid4().hex, run=config.run.name)
            OutputFolder(folder).write(STREAM_FILE, to_json_document(stream))
            OutputFolder(config.run.dir).write(DELTA_STREAM, to_json_document(stream))
        elif stored is None or stored != own:
            owner = f"run {stored.run}, stream {stored.id[:8]}" if stored else "an unknown run"
            expected = f"a new folder, or one whose {STREAM_FILE} equals {DELTA_STREAM} of the run folder"
            do = "choose another export.deltas.to, or remove the folder if its deltas are not needed"
            raise ConfigError(f"the folder is for the deltas of {owner}", where=where, expected=expected, do=do)


def read_stream(config: RunConfig) -> DeltaStream:
    """Return the stream that `open_stream` has recorded in the run folder. Errors are as for `read_document`."""
    return read_document(config.run.dir, DELTA_STREAM, DeltaStream, "stream of deltas", "raytrec train")


def find_stream(folder: str) -> DeltaStream | None:
    """Return the identity of the run that writes a folder of deltas, or None if no run has written to the folder.

    Raises:
        RunError: STREAM_FILE cannot be read or is not valid.
        DataError: As for `open_filesystem`.
    """
    uri = join_uri(folder, STREAM_FILE)
    try:
        return validate_as(parse_json(read_bytes(uri)), DeltaStream)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnreadableError) as error:
        what, expected = f"the file cannot be read: {get_first_line(error)}", f"{STREAM_FILE} as a run has written it"
        raise RunError(what, where=uri, expected=expected) from None


def list_names(folder: str) -> list[str]:
    """Return the names of the files and subfolders directly in a folder; [] if the folder does not exist.

    Raises:
        OSError: The folder cannot be read.
        DataError: As for `open_filesystem`.
    """
    filesystem, path = open_filesystem(folder)
    return [info.base_name for info in filesystem.get_file_info(fs.FileSelector(path, allow_not_found=True))]


def list_numbers(folder: str, subfolder: str) -> list[int]:
    """Return the ascending numbers of the deltas (DELTAS_FOLDER) or of all exports, even incomplete (EXPORTS_FOLDER).

    Errors are as in `list_names`.
    """
    names = [name.removesuffix(".json") for name in list_names(join_uri(folder, subfolder))]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def list_exports(folder: str) -> list[int]:
    """Return the numbers of the complete full exports of a folder, ascending. Errors are as in `list_names`."""
    numbers = list_numbers(folder, EXPORTS_FOLDER)
    return [each for each in numbers if query_file_info(join_uri(get_export_uri(folder, each), MANIFEST_FILE)).is_file]


def find_newest_delta(folder: str) -> NewestDelta:
    """Return the newest delta of a folder, without checking its manifest.

    Raises:
        OSError, DataError: As for `list_names`.
    """
    numbers = list_numbers(folder, DELTAS_FOLDER)
    if not numbers:
        return NewestDelta(0, "")
    return NewestDelta(numbers[-1], hashlib.sha256(read_bytes(get_manifest_uri(folder, numbers[-1]))).hexdigest())


def read_next(folder: str, position: Position) -> Position | None:
    """Return the position after the next delta, or None if the next delta does not exist yet.

    Raises:
        RunError: The manifest cannot be read, belongs to another run, or does not continue the consumer's delta.
        DataError: As for `open_filesystem`.
    """
    number, stream = position.number + 1, position.manifest.stream
    try:
        found = read_delta_manifest(folder, number)
    except (OSError, UnreadableError) as error:
        raise make_refusal(folder, number, f"the manifest cannot be read: {get_first_line(error)}") from None
    if found is None:
        return None
    manifest, checksum = found
    if manifest.stream != stream:
        raise make_refusal(folder, number, f"it belongs to another run: stream {manifest.stream}", f"stream {stream}")
    if manifest.parent != position.checksum:
        reason = f"it does not continue delta {position.number}: parent {manifest.parent[:8] or 'none'}"
        raise make_refusal(folder, number, reason, f"parent {position.checksum[:8]}")
    return Position(position.run, manifest, checksum)


def check_gap(folder: str, position: Position) -> None:
    """Raise an error if the next delta is missing and will not appear.

    Raises:
        RunError: The stream cannot be read or is another one; or the next delta is missing, and the delta after it
            exists or the consumer's delta has been removed.
        OSError, DataError: As for `list_names`.
    """
    number, stream, own_stream = position.number + 1, find_stream(folder), position.manifest.stream
    if stream and stream.id != own_stream:
        expected = f"stream {own_stream}, or a full export of the new stream"
        do = "wait for the first full export of the new stream"
        what = f"the folder contains the deltas of another run: stream {stream.id}"
        raise RunError(what, where=folder, expected=expected, do=do)
    after, own, now = (has_manifest(folder, each) for each in (number + 1, position.number, number))
    if after and not now:
        raise make_refusal(folder, number, f"it is missing, but delta {number + 1} exists")
    if not own and not now:
        if stream is None:
            do = "restore the folder, or restart the service with another folder"
            raise RunError("the folder no longer contains the deltas of the run", where=folder, do=do)
        raise make_refusal(folder, number, f"it is missing, and delta {position.number} has been removed")


def iterate_exports(folder: str, newer_than: int = 0) -> Iterator[tuple[str, Position]]:
    """Yield the location and position of each full export of the current stream with readable manifests, newest first.

    Args:
        folder: Folder of deltas.
        newer_than: Number of a delta; only exports of later deltas are yielded.

    Raises:
        RunError: As for `find_stream`.
        OSError, DataError: As for `list_names`.
    """
    stream = find_stream(folder)
    for number in reversed(list_numbers(folder, EXPORTS_FOLDER) if stream else []):
        if number <= newer_than:
            break
        uri = get_export_uri(folder, number)
        try:
            source, found = read_manifest(uri).source, read_delta_manifest(folder, number)
        except (OSError, RunError, UnreadableError):  # incomplete or damaged
            continue
        if found and (found[0].stream, found[0].step) == (stream.id, source.step):
            yield uri, Position(source.run, *found)


def find_position(folder: str, export: str, source: ExportSource) -> Position:
    """Return the position of an export, which may be a copy of a full export or have another precision.

    Args:
        folder: Folder of deltas.
        export: Location of the export. If its last path component is a number, only the delta of this number is
            considered.
        source: Origin of the exported model.

    Raises:
        RunError: The stream is missing or cannot be read, or not exactly one readable delta leads to the export's step.
        OSError, DataError: As for `list_names`.
    """
    stream, name = find_stream(folder), split_query(export)[0].rpartition("/")[2]
    if stream is None:
        raise RunError(f"the folder has no {STREAM_FILE}", where=folder, expected="a run's export.deltas.to folder")
    numbers, found = set(list_numbers(folder, DELTAS_FOLDER)), []
    for number in sorted(numbers & {int(name)} if name.isdecimal() and name.isascii() else numbers):
        with suppress(UnreadableError, OSError):
            entry = read_delta_manifest(folder, number)
            if entry and (entry[0].stream, entry[0].step) == (stream.id, source.step):
                found.append(Position(source.run, *entry))
    if len(found) != 1:
        which = f"deltas {', '.join(str(each.number) for each in found)} lead" if found else "no readable delta leads"
        what = f"{which} to step {source.step:,} of the export"
        expected = "exactly one delta that leads to the step of the export"
        do = f"apply deltas to a full export in {EXPORTS_FOLDER}/"
        raise RunError(what, where=folder, expected=expected, do=do)
    return found[0]


def remove_old_files(folder: str, keep: int) -> None:
    """Remove the full exports before the `keep` (at least 1) newest complete ones, and the deltas before these exports.

    Without a complete full export, nothing is removed. The manifests are removed first, so that no reader finds
    a partial export or delta.

    Raises:
        OSError, DataError: As for `list_names`, also if a file cannot be removed.
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
    names = sorted(list_names(join_uri(folder, DELTAS_FOLDER)))
    for name in sorted(names, key=lambda name: not name.endswith(".json")):
        if name < format_number(exports[0]):
            (output.delete if name.endswith(".json") else output.remove)(f"{DELTAS_FOLDER}/{name}")
