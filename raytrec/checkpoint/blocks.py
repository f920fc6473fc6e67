"""Convert between chunks of tensors and blocks of bytes.

A chunk is a tensor or shard in a file, and a block is a range of its bytes that is read at once and has a checksum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from raytrec.checkpoint.index import ITEM_BYTES
from raytrec.checkpoint.rawfile import StoredChunk, parse_chunks
from raytrec.common.memory import prefetch_pages

DTYPES = {name: getattr(torch, name) for name in ITEM_BYTES}


def to_metadata(index: dict, first_rows: Mapping[str, int]) -> Metadata:
    """Convert a valid index to torch's metadata, whose `storage_data` has a StoredChunk for every included chunk.

    `first_rows` maps tables to the number of leading rows to include. Other tables are included as a whole.
    """
    tensors, chunks = {}, {}
    for fqn, entry in index["tensors"].items():
        boxes, shape = [], entry["shape"]
        rows = first_rows.get(fqn.split("/")[1]) if fqn.startswith("tables/") and shape else None
        for number, chunk in enumerate(parse_chunks(fqn, entry)):
            sizes = chunk.sizes
            if rows is not None:
                sizes = [min(sizes[0], rows - chunk.offsets[0]), *sizes[1:]]
            if rows is None or chunk.offsets[0] < rows:
                boxes.append(ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(sizes)))
                chunks[MetadataIndex(fqn, boxes[-1].offsets, number)] = chunk
        properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
        shape = shape if rows is None else [rows, *shape[1:]]
        tensors[fqn] = TensorStorageMetadata(properties, torch.Size(shape), boxes)
    return Metadata(tensors, storage_data=chunks)


class Target:
    """Destination tensor for a box (a rectangular part) of a chunk.

    Args:
        chunk: Chunk that contains the box.
        item: Planned read, which defines the box.
        tensor: Destination, which torch's planner has narrowed to the box.

    Attributes:
        tensor: Destination as a plain tensor without gradient.
        begin: First byte of the box in the chunk.
        end: Byte after the last byte of the box in the chunk.
    """

    def __init__(self, chunk: StoredChunk, item: ReadItem, tensor: torch.Tensor):
        self.tensor = tensor.detach().as_subclass(torch.Tensor)
        self._sizes, self._offsets = chunk.sizes, tuple(item.storage_offsets)
        strides = [math.prod(chunk.sizes[d + 1 :]) for d in range(len(chunk.sizes))]
        first = sum(o * s for o, s in zip(self._offsets, strides, strict=True))
        count = 1 + sum((n - 1) * s for n, s in zip(item.lengths, strides, strict=True))
        dtype = DTYPES[chunk.dtype]
        self.begin, self.end = (n * dtype.itemsize for n in (first, first + count))
        is_contiguous = count == self.tensor.numel() and self.tensor.dtype == dtype
        self._memory = memory(self.tensor) if is_contiguous and is_host_contiguous(self.tensor) else None

    def memory(self, begin: int, end: int) -> memoryview | None:
        """Return the destination's memory for bytes [begin, end) of the chunk; None if `take` must copy them."""
        if self._memory is None or begin < self.begin or end > self.end:
            return None
        return self._memory[begin - self.begin : end - self.begin]

    def take(self, block: torch.Tensor, begin: int) -> None:
        """Copy the box's values from a block: consecutive values of the chunk, [n], that start at byte `begin`."""
        first = begin // block.element_size()
        for values, box in iterate_overlaps(block, first, self._sizes, self._offsets, self.tensor):
            box.copy_(values)


def is_host_contiguous(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is in host memory and its values are contiguous."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without copying them."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def blocks(tensor: torch.Tensor, block_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in blocks of `block_bytes`, a multiple of the dtype's size, and a smaller last block.

    Each block is valid until the next one is requested. An empty tensor has no blocks.
    """
    if is_host_contiguous(tensor):
        data = memory(tensor)
        for begin in range(0, len(data), block_bytes):
            block = data[begin : begin + block_bytes]
            prefetch_pages(tensor.data_ptr() + begin, len(block))
            yield block
        return
    count = block_bytes // tensor.element_size()
    buffer = torch.empty(min(count, tensor.numel()), dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    for first in range(0, tensor.numel(), count):
        block = buffer[: tensor.numel() - first]
        for values, box in iterate_overlaps(block, first, tensor.shape, (0,) * tensor.dim(), tensor):
            values.copy_(box)
        yield memory(block)


def iterate_row_pieces(tensor: torch.Tensor, block_bytes: int) -> Iterator[torch.Tensor]:
    """Yield views of a tensor's consecutive rows, of at most `block_bytes` each, but at least one row.

    A tensor that is not in host memory or not contiguous, and an empty tensor or scalar, is yielded as a whole.
    """
    if not is_host_contiguous(tensor) or not tensor.dim() or not tensor.numel():
        yield tensor
        return
    for piece in tensor.split(max(1, block_bytes // tensor[0].nbytes)):
        prefetch_pages(piece.data_ptr(), piece.nbytes)
        yield piece


def iterate_overlaps(
    block: torch.Tensor, first: int, sizes: Sequence[int], offsets: Sequence[int], box: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of views, (part of the block, part of the box), of the values in both the block and the box.

    The block's complete rows form one view. If the block contains only part of its first or last row, that
    row is treated as a chunk with one dimension fewer.

    Args:
        block: Consecutive values of the chunk, [n].
        first: Index of the block's first value in the chunk.
        sizes: Shape of the chunk.
        offsets: Offsets of the box in the chunk.
        box: Tensor of the box's shape.
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
                yield from iterate_overlaps(part, within, sizes[1:], offsets[1:], box[row - offsets[0]])
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
