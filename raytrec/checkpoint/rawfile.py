"""Files of raw bytes on disks and object stores, written sequentially and read at any offset."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from raytrec.checkpoint.index import (
    ITEM_BYTES,
    CheckpointError,
    convert_write_errors,
    is_local,
    make_unreadable_error,
    reason,
)
from raytrec.common.reading import open_regular, retry_read
from raytrec.common.storage import join_uri, open_filesystem, sync_to_disk

ALIGNMENT_BYTES = 64  # chunks start at multiples of this offset in their file
WRITEBACK_INTERVAL_BYTES = 32 << 20  # bytes after which the kernel is asked to start writing to disk
SYNC_FILE_RANGE_WRITE = 2  # flag of sync_file_range(2) on Linux
# Blocks that are read concurrently. For a disk, two suffice: one is read while the other is checked. An object
# store has a high latency, so its throughput depends on the number of concurrent requests.
MAX_LOCAL_READS, MAX_REMOTE_READS = 2, 8


def make_folder(folder: str) -> None:
    """Create a checkpoint's local folder and its parents, synced to disk; object stores need no folder.

    Raises:
        CheckpointError: The folder cannot be created.
        DataError: The path is not valid, or the store cannot be reached.
    """
    filesystem, place = open_filesystem(folder)
    if not is_local(filesystem):
        return
    path = Path(place)
    with convert_write_errors(folder):
        missing = [directory for directory in (path, *path.parents) if not directory.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for directory in missing:
            sync_to_disk(directory.parent)


class RawFileWriter(AbstractContextManager):
    """Sequential writer of a new file, used as a context manager.

    After an error in its block, a local file is removed. The stream of an object is not closed, because closing it
    would create an incomplete object.

    Args:
        folder: Existing local folder, or URI.
        name: Name of the file in the folder.

    Attributes:
        size: Number of bytes written.

    Raises:
        FileExistsError: The file exists, and may belong to a checkpoint.
        OSError: The file cannot be created; methods raise it if the file cannot be written.
        DataError: The path is not valid, or the store cannot be reached.
    """

    def __init__(self, folder: str, name: str):
        filesystem, path = open_filesystem(join_uri(folder, name))
        self.size, self._path, self._local = 0, Path(path), is_local(filesystem)
        self._sent = 0
        if self._local:
            self._file = FileIO(path, "x")
        elif filesystem.get_file_info(path).is_file:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        else:
            self._file = filesystem.open_output_stream(path)

    def __exit__(self, kind, *_) -> None:
        # After an error, an object's stream is not closed here, because closing it would create the object.
        if kind is None or self._local:
            self._file.close()
        if kind is not None and self._local:
            with suppress(OSError):
                self._path.unlink()

    def align(self) -> int:
        """Pad the file to the alignment of chunks, and return the resulting offset in bytes."""
        if gap := -self.size % ALIGNMENT_BYTES:
            self.write(memoryview(bytes(gap)))
        return self.size

    def write(self, data: memoryview) -> None:
        """Append data to the file."""
        self.size += len(data)
        while len(data):
            data = data[self._file.write(data) :]
        if self._local and self.size - self._sent >= WRITEBACK_INTERVAL_BYTES:
            # Without this call, Linux may not write to disk before the final sync. Errors, and systems without
            # the call, are ignored. (posix_fadvise would drop part of the file from the page cache.)
            if begin := getattr(ctypes.CDLL(None), "sync_file_range", None):
                start, count = ctypes.c_int64(self._sent), ctypes.c_int64(self.size - self._sent)
                begin(self._file.fileno(), start, count, SYNC_FILE_RANGE_WRITE)
            self._sent = self.size

    def sync(self) -> None:
        """Flush a local file and its folder to disk, so that the file survives a power failure; ignore objects."""
        if self._local:
            os.fsync(self._file.fileno())
            sync_to_disk(self._path.parent)


class Source(AbstractContextManager):
    """Open file that several threads can read at any offset.

    Args:
        folder: Local path or URI of the folder.
        name: Name of the file in the folder.

    Attributes:
        reads: Recommended number of concurrent reads.

    Raises:
        OSError: The file cannot be opened; `read` raises it if the file cannot be read.
        DataError: The path is not valid, or the store cannot be reached.
    """

    def __init__(self, folder: str, name: str):
        self._uri = join_uri(folder, name)
        filesystem, path = open_filesystem(self._uri)
        self._local = is_local(filesystem)
        self.reads = MAX_LOCAL_READS if self._local else MAX_REMOTE_READS
        opening = partial(filesystem.open_input_file, path)
        self._file: Any = open_regular(path) if self._local else retry_read(self._uri, opening)

    def __exit__(self, *_) -> None:
        self._file.close()

    def read(self, start: int, into: memoryview) -> int:
        """Fill memory with the file's bytes from offset `start`, and return the number of bytes read.

        The number is smaller than the size of the memory only at the end of the file.
        """
        if not self._local:
            data = retry_read(self._uri, lambda: self._file.read_at(len(into), start))
            into[: len(data)] = data
            return len(data)
        count = 0
        while count < len(into) and (read := os.preadv(self._file.fileno(), [into[count:]], start + count)):
            count += read
        return count


@dataclass(frozen=True, eq=False)
class StoredChunk:
    """Tensor, or shard of a tensor, as stored in a file of a checkpoint.

    Attributes:
        fqn: Name of the tensor.
        dtype: Name of the dtype, such as "float32".
        offsets: Index of the chunk's first value in each dimension of the tensor.
        sizes: Shape of the chunk.
        file: Name of the file in the checkpoint's folder.
        start: Offset of the chunk's first byte in the file.
        crc32: CRC-32 of each block, a fixed number of consecutive bytes of the chunk.
    """

    fqn: str
    dtype: str
    offsets: Sequence[int]
    sizes: Sequence[int]
    file: str
    start: int
    crc32: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Return the size of the chunk in bytes."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]

    def where(self, folder: str, begin: int = 0, end: int | None = None) -> str:
        """Return the location of bytes [begin, end) of the chunk (default: all bytes), as text for errors."""
        end = self.nbytes if end is None else end
        place = f"bytes {self.start + begin} to {self.start + end - 1}"
        return f"{join_uri(folder, self.file)}, tensor {self.fqn}, {place}"

    def read(self, source: Source, folder: str, begin: int, into: memoryview, crc32: int | None = None) -> None:
        """Fill memory with the chunk's bytes from `begin` on.

        Args:
            source: Open file of the chunk.
            folder: Folder of the checkpoint, for errors.
            begin: Offset of the first byte in the chunk.
            into: Memory to fill; its size is the number of bytes to read.
            crc32: CRC-32 with which the bytes are compared; None: the bytes are not verified.

        Raises:
            CheckpointError: The bytes cannot be read, or their checksum does not match.
        """
        where = self.where(folder, begin, begin + len(into))
        try:
            count = source.read(self.start + begin, into)
        except OSError as error:
            raise make_unreadable_error(reason(error), where) from None
        if count < len(into):
            raise make_unreadable_error(f"the file ends {len(into) - count:,} bytes too early", where)
        if crc32 is not None and zlib.crc32(into) != crc32:
            raise make_unreadable_error("its data is damaged (the checksum does not match)", where)

    def read_block(
        self, source: Source, folder: str, number: int, block_bytes: int, into: memoryview | None = None
    ) -> memoryview:
        """Read a block of the chunk, and verify its checksum.

        Args:
            source: Open file of the chunk.
            folder: Folder of the checkpoint, for errors.
            number: Index of the block in the chunk, from 0.
            block_bytes: Size of every block except the last, which may be smaller.
            into: Memory of the block's size, which is filled and returned; default: new memory.

        Raises:
            CheckpointError: The block cannot be read, or its checksum does not match.
        """
        begin = number * block_bytes
        if into is None:
            into = memoryview(bytearray(min(block_bytes, self.nbytes - begin)))
        self.read(source, folder, begin, into, self.crc32[number])
        return into


def parse_chunks(fqn: str, entry: dict[str, Any]) -> list[StoredChunk]:
    """Return the chunks of a tensor as described by its entry in an index."""
    dtype = entry["dtype"]
    return [
        StoredChunk(fqn, dtype, part["offsets"], part["sizes"], part["file"], part["start"], part["crc32"])
        for part in entry["chunks"]
    ]


def open_data_file(folder: str, name: str, where: str | None = None) -> Source:
    """Open a file of a checkpoint for reading.

    Args:
        folder: Folder of the checkpoint.
        name: Name of the file, from an index that `read_index` has checked.
        where: Location of the data, for errors; default: the path of the file.

    Raises:
        CheckpointError: The file cannot be opened.
        DataError: As for Source.
    """
    try:
        return Source(folder, name)
    except OSError as error:
        raise make_unreadable_error(reason(error), where or join_uri(folder, name)) from None


def check_files(folder: str, sizes: dict[str, int]) -> None:
    """Check that the files written by all ranks are visible to this process.

    Args:
        folder: Folder of the checkpoint.
        sizes: Name of each file → its size in bytes.

    Raises:
        CheckpointError: The folder cannot be read, or a file is missing or has a different size, e.g. because nodes
            do not share the folder.
        DataError: The path is not valid, or the store cannot be reached.
    """
    filesystem, path = open_filesystem(folder)
    with convert_write_errors(folder):
        infos = filesystem.get_file_info([f"{path}/{name}" for name in sizes])
    for (name, size), info in zip(sizes.items(), infos, strict=True):
        if info.size != size:
            problem = "is missing" if info.size is None else f"has {info.size:,} bytes instead of {size:,}"
            raise CheckpointError(
                f"{name}, written by a worker, {problem} on the node of rank 0",
                where=folder,
                expected="a folder that all nodes share, and whose files no other process changes",
                do="start a new run whose checkpoint.dir is the same folder on all nodes, or in s3:// or gs://",
            )
