"""Files of raw bytes, on disks and object stores. They are written from beginning to end, and read at any
place."""

from __future__ import annotations

import ctypes
import errno
import os
import zlib
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

from raytrec.checkpoint.index import is_local, reason, unreadable
from raytrec.common.reading import open_regular, retry_read
from raytrec.common.storage import join_uri, open_filesystem, sync

ALIGNMENT = 64  # bytes
SEND_BYTES = 32 << 20  # after how many the disk is set to work
SYNC_FILE_RANGE_WRITE = 2  # of Linux
# Blocks in work at a time. Two on a disk: one is read while the other is checked. An object store answers
# late, so that its speed is that of the requests under way.
READS, REMOTE_READS = 2, 8


class Sink:
    """A new file that is written from beginning to end; removed when something goes wrong, where it is local.

    Attributes:
        size: bytes written.

    Raises:
        OSError: from all of it; FileExistsError, where there is such a file: it may belong to a checkpoint.
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

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind, *_) -> None:
        # Closing an object's stream would make an object of what has been written.
        if kind is None or self._local:
            self._file.close()
        if kind is not None and self._local:
            with suppress(OSError):
                self._path.unlink()

    def align(self) -> int:
        """Fills up to where the next chunk can start; gives that place, in bytes."""
        if gap := -self.size % ALIGNMENT:
            self.write(memoryview(bytes(gap)))
        return self.size

    def write(self, data: memoryview) -> None:
        self.size += len(data)
        while len(data):
            data = data[self._file.write(data) :]
        if self._local and self.size - self._sent >= SEND_BYTES:
            _send(self._file.fileno(), self._sent, self.size - self._sent)
            self._sent = self.size

    def sync(self) -> None:
        """Makes the file outlast a power cut."""
        if self._local:
            os.fsync(self._file.fileno())
            sync(self._path.parent)


def _send(descriptor: int, start: int, count: int) -> None:
    """Lets Linux begin to write bytes of a file to the disk, in the background; it does not wait.

    Without this, the disk has nothing to do until the sync at the end. It is only advice, so errors and
    systems without the call do not matter. (posix_fadvise would do it, too, but forgets part of the file.)
    """
    if begin := getattr(ctypes.CDLL(None), "sync_file_range", None):
        begin(descriptor, ctypes.c_int64(start), ctypes.c_int64(count), SYNC_FILE_RANGE_WRITE)


class Source:
    """A file read at any place, from several threads.

    Attributes:
        reads: how many at a time are worth it.

    Raises:
        OSError: from all of it.
    """

    def __init__(self, folder: str, name: str):
        self._uri = join_uri(folder, name)
        filesystem, path = open_filesystem(self._uri)
        if is_local(filesystem):
            self.reads = READS
            self._file: Any = open_regular(path)
            self._read = self._read_local
        else:
            self.reads = REMOTE_READS
            self._file = retry_read(self._uri, partial(filesystem.open_input_file, path))
            self._read = self._read_remote

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    def read(self, start: int, into: memoryview) -> int:
        """Fills memory from this byte on; gives the number of bytes, fewer only at the file's end."""
        return self._read(start, into)

    def _read_local(self, start: int, into: memoryview) -> int:
        got = 0
        while got < len(into) and (more := os.preadv(self._file.fileno(), [into[got:]], start + got)):
            got += more
        return got

    def _read_remote(self, start: int, into: memoryview) -> int:
        data = retry_read(self._uri, lambda: self._file.read_at(len(into), start))
        into[: len(data)] = data
        return len(data)


def open_source(folder: str, name: str, where: str | None = None) -> Source:
    """A file of a checkpoint, to be read.

    Args:
        where: for people; default: its place.

    Raises:
        CheckpointError: it cannot be opened, or is not in this folder.
    """
    if "/" in name:
        raise unreadable(f"damaged (it names a file of another folder: {name})", folder)
    try:
        return Source(folder, name)
    except OSError as error:
        raise unreadable(reason(error), where or join_uri(folder, name)) from None


def read_block(source: Source, start: int, into: memoryview, crc32: int | None, where: str) -> None:
    """Fills memory with a block of a chunk, and checks it.

    Args:
        start: the block's first byte in the file.
        crc32: its checksum; None: of a part of a block, which has none.
        where: the block, for people.

    Raises:
        CheckpointError: it cannot be read, or is not what was written.
    """
    try:
        got = source.read(start, into)
    except OSError as error:
        raise unreadable(reason(error), where) from None
    if got < len(into):
        raise unreadable(f"the file ends {len(into) - got:,} bytes too early", where)
    if crc32 is not None and zlib.crc32(into) != crc32:
        raise unreadable("damaged (the bytes do not match their checksum)", where)
