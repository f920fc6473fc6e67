"""The index of a checkpoint: a list of its tensors and their locations in files.

Writing the index, which happens last, commits the checkpoint. The index is JSON, not pickle; it contains its
own hash, and its content is validated. This module does not import torch, because the driver reads indexes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, NotRequired

from pydantic import Field, Strict
from typing_extensions import TypedDict

from raytrec.common.documents import validate_as
from raytrec.common.errors import RunError, get_first_line, shorten_repr
from raytrec.common.reading import MAX_JSON_BYTES, UnreadableError, parse_json, retry_read, storage_hint
from raytrec.common.storage import join_uri, open_filesystem, read_bytes, sync_to_disk

INDEX = "checkpoint.json"
FORMAT = 1
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
MAX_BLOCK_BYTES = 1 << 30  # a reader needs memory for at least one block
MAX_DIMENSIONS = 8
ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
ITEM_BYTES |= {f"float{8 * width}": width for width in (2, 4, 8)}
ITEM_BYTES |= {f"{kind}{8 * width}": width for kind in ("int", "uint") for width in (1, 2, 4, 8)}

Count = Annotated[int, Strict(), Field(ge=0, lt=2**62)]
Counts = Annotated[list[Count], Field(max_length=MAX_DIMENSIONS)]
Checksum = Annotated[int, Strict(), Field(ge=0, lt=2**32)]
Text = Annotated[str, Strict()]


class _Chunk(TypedDict):
    offsets: Counts
    sizes: Counts
    file: Text
    start: Count
    crc32: list[Checksum]


class _Tensor(TypedDict):
    dtype: Text
    shape: Counts
    chunks: list[_Chunk]


class _Index(TypedDict):
    attempt: Text
    block_bytes: Annotated[int, Strict(), Field(gt=0, le=MAX_BLOCK_BYTES, multiple_of=8)]
    tensors: dict[Text, _Tensor]
    about: dict[Text, Any]


class _EarlyStopping(TypedDict, total=False):
    best: Annotated[float, Strict()]
    step: Count
    since: Count


class _Progress(TypedDict):
    step: Count
    rows: Count
    trained: Annotated[float, Strict()]
    nan_steps: Count
    window: dict[Text, Annotated[float, Strict()]]
    seconds: Annotated[float, Strict(), Field(ge=0)]
    timed_rows: Count
    evaluation: dict[Text, Any] | None
    early_stopping: _EarlyStopping


class _MapSizes(TypedDict):
    rows: Count
    waiting: Count
    left: Count
    handed: Count


class _Ids(TypedDict):
    ids: NotRequired[dict[Text, _MapSizes]]


class _About(TypedDict):
    config: dict[Text, Any]
    schema: Text
    data: Text
    progress: _Progress


class CheckpointError(RunError):
    """Error for a checkpoint that is missing or damaged, or that cannot be read or written."""


class InsufficientSpaceError(CheckpointError):
    """Error for a checkpoint that does not fit on the disk or in the user's quota."""


def read_index(folder: str) -> dict:
    """Read and check the index of a checkpoint.

    Args:
        folder: Local path or URI.

    Returns:
        {"format", "attempt", "block_bytes", "tensors", "about", "sha256"}: see `storage.ShardWriter`.

    Raises:
        CheckpointError: The index is missing, damaged, in another format, or cannot be read.
        DataError: The path is not valid, or the store cannot be reached.
    """
    where = join_uri(folder, INDEX)
    try:
        text = retry_read(where, lambda: read_bytes(where, MAX_JSON_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            "the folder contains no complete checkpoint",
            where=where,
            expected=f"{INDEX}, which is written last and therefore missing after an interrupted save",
            do="use a complete checkpoint; of a run folder, the newest complete one is used by default",
        ) from None
    except OSError as error:
        raise make_unreadable_error(reason(error), where) from None
    try:
        index = parse_json(text)
        version, stored_hash = index["format"], index["sha256"]
        is_intact = stored_hash == _hash_index(index)
    except (ValueError, KeyError, TypeError) as error:
        problem = f"the entry {error} is missing" if isinstance(error, KeyError) else error
        raise make_unreadable_error(f"its index is damaged ({problem})", where) from None
    if version != FORMAT:
        what, do = f"the checkpoint has format {shorten_repr(version)}", "use the version of raytrec that saved it"
        raise CheckpointError(what, where=where, expected=f"format {FORMAT}", do=do)
    if not is_intact:
        raise make_unreadable_error("its index is damaged (the hash does not match)", where)
    if problem := _find_type_problem(_Index, index) or _find_tensors_problem(index):
        raise make_unreadable_error(f"its index is damaged ({problem})", where)
    return index


def write_index(folder: str, content: dict) -> None:
    """Commit a checkpoint by writing its index atomically.

    Args:
        folder: Local path or URI of an existing folder.
        content: Index without "format" and "sha256", of values that JSON preserves (no tuples, NaN or infinity).

    Raises:
        CheckpointError: The index cannot be written, and an existing index is unchanged; or the index has been
            written, but the folder cannot be synced to disk.
        DataError: The path is not valid, or the store cannot be reached.
    """
    index = {"format": FORMAT, **content}
    text = _to_canonical_json({**index, "sha256": _hash_index(index)})
    filesystem, path = open_filesystem(folder)

    def put() -> None:  # an object appears only when its stream is closed, with its whole content
        with filesystem.open_output_stream(f"{path}/{INDEX}") as stream:
            stream.write(text)

    with convert_write_errors(join_uri(folder, INDEX)):
        if is_local(filesystem):
            _replace(Path(path), content["attempt"], text)
        else:
            retry_read(folder, put)


def make_foreign_error(problem: str, where: str) -> CheckpointError:
    """Return the error for a checkpoint whose index does not match a run's; `problem` names the first difference."""
    return CheckpointError(
        f"the index does not describe the checkpoint of a training run ({problem})",
        where=where,
        expected="a checkpoint that a run or `raytrec convert` of a compatible version has written",
    )


def make_unreadable_error(what: str, where: str) -> CheckpointError:
    """Return the error for a checkpoint that is damaged or cannot be read.

    Args:
        what: Cause, as a clause.
        where: Location of the checkpoint or of the damaged data.
    """
    return CheckpointError(
        f"the checkpoint cannot be read: {what}",
        where=where,
        expected=storage_hint(where) + "the file as it was written",
        do="make the file readable, restore it from a backup, or load another checkpoint. If the run is still training "
        "and has removed the checkpoint, repeat the command or increase checkpoint.keep_last",
    )


@contextmanager
def convert_write_errors(where: str) -> Iterator[None]:
    """Convert each OSError raised in the block to a CheckpointError that names `where`.

    Raises:
        CheckpointError: The block has raised an OSError. It is an InsufficientSpaceError if the disk or quota is full.
    """
    try:
        yield
    except OSError as error:
        is_full = error.errno in DISK_FULL_ERRNOS
        do = "free up space" if is_full else "correct the cause"
        raise (InsufficientSpaceError if is_full else CheckpointError)(
            f"the checkpoint cannot be written: {reason(error)}",
            where=where,
            expected="a folder that is writable on all nodes, with enough space for the checkpoint",
            do=f"{do}, or start again with another folder; earlier checkpoints are unchanged",
        ) from error


def reason(error: OSError) -> str:
    """Return the one-line message of an error from the operating system or the object store."""
    return error.strerror or get_first_line(error)


def is_local(filesystem) -> bool:
    """Return True if a pyarrow filesystem is the local one, which includes network mounts."""
    return filesystem.type_name == "local"


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
    sync_to_disk(folder)


def _to_canonical_json(index: dict) -> bytes:
    return json.dumps(index, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _hash_index(index: dict) -> str:
    """Return the SHA-256 of an index without its entry "sha256", in hexadecimal."""
    content = {key: value for key, value in index.items() if key != "sha256"}
    return hashlib.sha256(_to_canonical_json(content)).hexdigest()


def find_run_problem(about: dict[str, Any]) -> str | None:
    """Return the reason why an index's `about` does not describe a run's checkpoint, or None if it does."""
    return _find_type_problem(_About, about)


def find_progress_problem(about: dict[str, Any]) -> str | None:
    """Return the reason why a run cannot resume from an index's `about`, or None if it can."""
    return _find_type_problem(_Progress, about.get("progress")) or _find_type_problem(
        _Ids, {"ids": about.get("ids", {})}
    )


def _find_tensors_problem(index: dict[str, Any]) -> str | None:
    for name, tensor in index["tensors"].items():
        if problem := _find_tensor_problem(name[:80], tensor, index["block_bytes"]):
            return problem
    return None


def _find_tensor_problem(name: str, tensor: dict[str, Any], block_bytes: int) -> str | None:
    shape, width = tensor["shape"], ITEM_BYTES.get(tensor["dtype"])
    if width is None:
        return f"tensor {name} has the unsupported dtype {tensor['dtype'][:40]}"
    for chunk in tensor["chunks"]:
        offsets, sizes, file = chunk["offsets"], chunk["sizes"], chunk["file"]
        if not len(offsets) == len(sizes) == len(shape):
            return f"a chunk of tensor {name} has a different number of dimensions"
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a chunk of tensor {name} is outside the tensor"
        if file in ("", ".", "..") or "/" in file or "\0" in file:
            return f"it contains the invalid file name {file[:80]!r}"
    if sum(math.prod(chunk["sizes"]) for chunk in tensor["chunks"]) != math.prod(shape):
        return f"the chunks of tensor {name} do not add up to its shape"
    for chunk in tensor["chunks"]:
        if len(chunk["crc32"]) != -(-math.prod(chunk["sizes"]) * width // block_bytes):
            return f"a chunk of tensor {name} has too few or too many checksums"
    return None


def _find_type_problem(kind: type, value: Any) -> str | None:
    try:
        validate_as(value, kind)
    except UnreadableError as error:
        return str(error)
    return None
