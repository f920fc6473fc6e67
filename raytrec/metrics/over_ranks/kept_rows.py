"""Rows that are kept until all have been seen: in memory, and beyond a number of rows in files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import IO

import numpy as np
import torch

from raytrec.common.collectives import Peers
from raytrec.common.errors import RunError
from raytrec.embeddings.hashing import hash_bits

DISK_PARTS = 64  # into which rows on disk are divided by their keys


class KeptRows:
    """Rows of one rank: columns, the first of which is an int64 key that decides a row's part.

    Args:
        dtypes: of the columns.
        most: rows in memory. Beyond, all are appended to files, one a column, in the folder for temporary
            files; they have no names, and are gone with the process.
    """

    def __init__(self, dtypes: Sequence[torch.dtype], most: int):
        self._most, self._rows = most, 0
        self._none = [torch.empty(0, dtype=dtype) for dtype in dtypes]
        self._pieces: list[Sequence[torch.Tensor]] = [self._none]
        self._files: list[IO[bytes]] = []
        self._ranges: list[list[tuple[int, int]]] = [
            [] for _ in range(DISK_PARTS)
        ]  # of rows in the files: first, how many
        self._written = 0

    def add(self, columns: Sequence[torch.Tensor]) -> None:
        """Adds rows, [n] each, in host memory."""
        self._pieces.append(columns)
        self._rows += len(columns[0])
        if self._rows > self._most:
            self._write()

    def parts(self, peers: Peers) -> Iterator[list[torch.Tensor]]:
        """The rows of this rank, in one part if those of every rank are in memory, else in DISK_PARTS: rows
        of a key are in the same part on all ranks. A collective; nothing is kept then."""
        if peers.largest(bool(self._files)) > 0:
            self._write()
            for part in range(DISK_PARTS):
                yield self._read(part)
            for file in self._files:
                file.close()
        else:
            yield self._joined()
        self._pieces, self._rows = [self._none], 0
        self._files, self._ranges, self._written = [], [[] for _ in range(DISK_PARTS)], 0

    def _joined(self) -> list[torch.Tensor]:
        return [torch.cat(pieces) for pieces in zip(*self._pieces, strict=True)]

    def _write(self) -> None:
        """Appends what is in memory to the files, part after part."""
        columns = self._joined()
        parts = hash_bits(columns[0]) % DISK_PARTS
        order, counts = parts.argsort(stable=True), parts.bincount(minlength=DISK_PARTS).tolist()
        try:
            self._files = self._files or [tempfile.TemporaryFile() for _ in columns]  # noqa: SIM115
            for file, column in zip(self._files, columns, strict=True):
                column[order].numpy().tofile(file)
        except OSError as error:
            raise RunError(
                f"rows of the evaluation cannot be written: {error.strerror or error}",
                where=tempfile.gettempdir(),
                expected=f"room for {self._written + len(order):,} rows and more",
                do="make room, set TMPDIR to another folder, or raise eval.max_exact_rows if memory allows",
            ) from None
        for ranges, count in zip(self._ranges, counts, strict=True):
            ranges.append((self._written, count))
            self._written += count
        self._pieces, self._rows = [self._none], 0

    def _read(self, part: int) -> list[torch.Tensor]:
        found = []
        for file, none in zip(self._files, self._none, strict=True):
            pieces = [none.numpy()]
            for first, count in self._ranges[part]:
                file.seek(first * none.element_size())
                pieces.append(np.fromfile(file, pieces[0].dtype, count))
            found.append(torch.from_numpy(np.concatenate(pieces)))
        return found


def rank_of(keys_N: torch.Tensor, world: int) -> torch.Tensor:
    """The rank that owns each key, int64 [N]: evenly spread, whatever the keys have in common."""
    return (hash_bits(keys_N) >> 8) % world
