"""Stream of a run's deltas: its identity, its newest delta, and the deltas since a checkpoint; without torch."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from pyarrow import fs

from raytrec.common.documents import find_document, read_document, to_json_document
from raytrec.common.errors import ConfigError, convert_os_errors
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
    format_number,
    get_export_uri,
    get_manifest_uri,
    read_delta_manifest,
)
from raytrec.scoring.manifest import MANIFEST_FILE


class NewestDelta(NamedTuple):
    """Newest delta of a folder; number 0 and "" if there is none.

    Attributes:
        number: Number of the delta.
        sha256: SHA-256 of its manifest file.
    """

    number: int
    sha256: str


def open_stream(config: RunConfig) -> None:
    """Create the stream of a run before training starts, or check that the run owns the stream in the folder.

    Raises:
        ConfigError: The folder contains the stream of another run, or is the folder of the run or of its checkpoints.
        RunError: The folder cannot be written.
    """
    folder, own_file = config.export.deltas.to, Path(config.run.dir) / DELTA_STREAM
    if folder in (config.run.dir, config.checkpoint_root):
        raise ConfigError(
            "deltas need a separate folder",
            where=f"export.deltas.to={folder}",
            expected=f"another folder than {config.run.dir} and {config.checkpoint_root}",
        )
    with convert_os_errors("the folder of deltas cannot be written", where=f"export.deltas.to={folder}"):
        stored, own = (
            find_document(join_uri(folder, STREAM_FILE), DeltaStream),
            find_document(str(own_file), DeltaStream),
        )
        if stored is None and not list_numbers(folder, DELTAS_FOLDER):
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
    """Remove full exports except the `keep` newest, and the deltas before the oldest remaining export.

    The manifests are removed first, so that no reader finds a part of an export or of a delta.

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


def find_deltas_since(
    folder: str, newest: NewestDelta, position: Mapping[str, Any] | None, step: int
) -> list[DeltaManifest] | None:
    """Return the deltas that may lead away from the state of a checkpoint; None if they cannot be determined.

    Delta `number` of a checkpoint is the delta of its step, unless that delta could not be written. In that case, a
    later step has the number, or there is no delta of that number.

    Args:
        folder: Folder of deltas.
        newest: Newest delta in the folder.
        position: Entry "deltas" of the checkpoint; None if the checkpoint has no delta of this stream.
        step: Step of the checkpoint.
    """
    number = (position or {}).get("number")
    if not isinstance(number, int) or not 0 <= number <= newest.number:
        return None
    try:
        manifests = [read_delta_manifest(folder, each) for each in range(max(1, number), newest.number + 1)]
    except (OSError, UnreadableError):
        return None
    if None in manifests:
        return None
    deltas = [manifest for manifest, _ in manifests]
    return deltas[1:] if number and deltas[0].step == step else deltas
