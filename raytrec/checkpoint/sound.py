"""Whether an index has what it must have. A right hash does not show that. No torch."""

from __future__ import annotations

import math
from typing import Annotated, Any, NotRequired

from pydantic import Field, Strict
from typing_extensions import TypedDict

from raytrec.common.documents import typed
from raytrec.common.reading import NotReadable

MOST_BLOCK_BYTES = 1 << 30  # a block is what is read at a time
MOST_DIMENSIONS = 8
ITEM_BYTES = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
ITEM_BYTES |= {f"float{8 * width}": width for width in (2, 4, 8)}
ITEM_BYTES |= {f"{kind}{8 * width}": width for kind in ("int", "uint") for width in (1, 2, 4, 8)}

Count = Annotated[int, Strict(), Field(ge=0, lt=2**62)]
Counts = Annotated[list[Count], Field(max_length=MOST_DIMENSIONS)]
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
    block_bytes: Annotated[int, Strict(), Field(gt=0, le=MOST_BLOCK_BYTES, multiple_of=8)]
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


def why_unsound(index: dict[str, Any]) -> str | None:
    """What of an index cannot be, in a few words; None where all of it can."""
    if words := _misfit(_Index, index):
        return words
    for name, tensor in index["tensors"].items():
        if words := _why_not_whole(name[:80], tensor, index["block_bytes"]):
            return words
    return None


def why_no_run(about: dict[str, Any]) -> str | None:
    """What the index of a run's checkpoint must have and this one lacks; None: nothing."""
    return _misfit(_About, about)


def why_no_progress(about: dict[str, Any]) -> str | None:
    """The same of what a run resumes from."""
    return _misfit(_Progress, about.get("progress")) or _misfit(_Ids, {"ids": about.get("ids", {})})


def _why_not_whole(name: str, tensor: dict[str, Any], block_bytes: int) -> str | None:
    shape, width = tensor["shape"], ITEM_BYTES.get(tensor["dtype"])
    if width is None:
        return f"tensor {name} is of {tensor['dtype'][:40]}"
    for chunk in tensor["chunks"]:
        offsets, sizes, file = chunk["offsets"], chunk["sizes"], chunk["file"]
        if not len(offsets) == len(sizes) == len(shape):
            return f"a part of tensor {name} has other dimensions than the whole"
        if any(o + s > whole for o, s, whole in zip(offsets, sizes, shape, strict=True)):
            return f"a part of tensor {name} is outside of the whole"
        if file in ("", ".", "..") or "/" in file or "\0" in file:
            return f"it names a file of another folder: {file[:80]}"
    if sum(math.prod(chunk["sizes"]) for chunk in tensor["chunks"]) != math.prod(shape):
        return f"it does not have all of tensor {name}"
    for chunk in tensor["chunks"]:
        if len(chunk["crc32"]) != -(-math.prod(chunk["sizes"]) * width // block_bytes):
            return f"a part of tensor {name} has too few or too many checksums"
    return None


def _misfit(kind: type, value: Any) -> str | None:
    try:
        typed(value, kind)
    except NotReadable as error:
        return str(error)
    return None
