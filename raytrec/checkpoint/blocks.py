"""Chunks of tensors as blocks of bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from raytrec.checkpoint.index import ITEM_BYTES, CheckpointError
from raytrec.checkpoint.rawfile import StoredChunk, chunks_of
from raytrec.common.memory import bring_in

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


def metadata_of(index: dict) -> Metadata:
    """Return a sound index as torch's metadata, with a StoredChunk for every chunk."""
    tensors, stored = {}, {}
    for fqn, entry in index["tensors"].items():
        boxes = []
        for number, chunk in enumerate(chunks_of(fqn, entry)):
            boxes.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)))
            stored[MetadataIndex(fqn, boxes[-1].offsets, number)] = chunk
        properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
        tensors[fqn] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), boxes)
    return Metadata(tensors, storage_data=stored)


class Target:
    """A tensor that wants a box of a chunk.

    Attributes:
        tensor: of the box's shape.
        begin, end: bytes of the chunk between which all of the box is.
    """

    def __init__(self, chunk: StoredChunk, item: ReadItem, tensor: torch.Tensor):
        self.tensor = tensor.detach().as_subclass(torch.Tensor)
        if self.tensor.shape != item.lengths:
            raise CheckpointError(
                f"{tuple(item.lengths)} values of {chunk.fqn} for a tensor of {tuple(self.tensor.shape)}"
            )
        self._sizes, self._offsets = chunk.sizes, tuple(item.storage_offsets)
        strides = [math.prod(chunk.sizes[d + 1 :]) for d in range(len(chunk.sizes))]
        first = sum(o * s for o, s in zip(self._offsets, strides, strict=True))
        count = 1 + sum((n - 1) * s for n, s in zip(item.lengths, strides, strict=True))
        dtype = DTYPES[chunk.dtype]
        self.begin, self.end = (n * dtype.itemsize for n in (first, first + count))
        solid = count == self.tensor.numel() and self.tensor.dtype == dtype
        self._memory = memory(self.tensor) if solid and is_plain(self.tensor) else None

    def memory(self, begin: int, end: int) -> memoryview | None:
        """Where these bytes of the chunk belong, when they can be read to there as they are."""
        if self._memory is None or begin < self.begin or end > self.end:
            return None
        return self._memory[begin - self.begin : end - self.begin]

    def take(self, block: torch.Tensor, begin: int) -> None:
        """Copies what belongs here of a block of values, which begins at this byte of the chunk."""
        first = begin // block.element_size()
        for values, box in overlaps(block, first, self._sizes, self._offsets, self.tensor):
            box.copy_(values)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its values, one after the other."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a plain tensor; no copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def blocks(tensor: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor, block by block; each is there until the next one is asked for."""
    if is_plain(tensor):
        data = memory(tensor)
        for begin in range(0, len(data), block_bytes):
            block = data[begin : begin + block_bytes]
            bring_in(tensor.data_ptr() + begin, len(block))
            yield block
        return
    count = block_bytes // tensor.element_size()
    buffer = torch.empty(min(count, tensor.numel()), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    for first in range(0, tensor.numel(), count):
        block = buffer[: tensor.numel() - first]
        for values, box in overlaps(block, first, tensor.shape, (0,) * tensor.dim(), tensor):
            values.copy_(box)
        yield memory(block)


def pieces(tensor: torch.Tensor, block_bytes: int) -> Iterator[torch.Tensor]:
    """The values of a tensor, as views of some rows at a time if it is a plain one."""
    if not is_plain(tensor) or not tensor.dim() or not tensor.numel():
        yield tensor
        return
    for piece in tensor.split(max(1, block_bytes // tensor[0].nbytes)):
        bring_in(piece.data_ptr(), piece.nbytes)
        yield piece


def overlaps(
    block: torch.Tensor, first: int, sizes: Sequence[int], offsets: Sequence[int], box: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What a block of a chunk and a box in it have in common, as views of the one and of the other.

    Rows that the block has whole are one view; of the two that it may have in part, each is again a chunk,
    with one dimension less.

    Args:
        block: [n], consecutive values of the chunk.
        first: the place of the first of them in the chunk.
        sizes: of the chunk.
        offsets: of the box in the chunk.
        box: the box; its shape is its size.
    """
    if not sizes:
        yield block[0], box
        return
    width = math.prod(sizes[1:])
    while len(block):
        row, within = divmod(first, width)
        if within or len(block) < width:
            part = block[: width - within]
            if offsets[0] <= row < offsets[0] + len(box):
                yield from overlaps(part, within, sizes[1:], offsets[1:], box[row - offsets[0]])
        else:
            rows = len(block) // width
            part = block[: rows * width]
            low, high = max(row, offsets[0]), min(row + rows, offsets[0] + len(box))
            if low < high:
                values = part.view(rows, *sizes[1:])[low - row : high - row]
                for d in range(1, box.dim()):
                    values = values.narrow(d, offsets[d], box.shape[d])
                yield values, box[low - offsets[0] : high - offsets[0]]
        block, first = block[len(part) :], first + len(part)
