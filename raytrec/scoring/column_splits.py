"""Divide a model's columns between users and candidates, so that user features are processed once per user."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import process_time
from typing import Any

import pyarrow as pa
import torch

from raytrec.data.row_slices import Rows
from raytrec.scoring.lookups import Tensors
from raytrec.scoring.manifest import Input
from raytrec.scoring.plain_rows import PlainRowReader
from raytrec.scoring.request_rows import RowReader, name_rows, repeat_users
from raytrec.scoring.single_rows import Program, repeat_rows

# Comparison of two ways to score candidates: numbers of candidates, calls per measurement, and maximum CPU time.
MEASURED_CANDIDATES, MEASURED_RUNS, MEASURING_S = (4, 16, 64, 256), 3, 0.03


@dataclass(eq=False)
class ColumnSplit:
    """Division of a model's columns between users and candidates, created by `Scorer.split`.

    Attributes:
        names: Names of the model's columns that the user's row contains.
        users: Reader of the users' features.
        candidates: Reader of the candidates' features.
        plain: Fast readers (plain_rows.py) of users, of candidates, and of rows with all columns; None: that kind of
            row always needs a RowReader.
        repeated: Columns of the user that features of candidates also need; `read` appends them to candidates.
        inputs: Inputs of the model's program.
        program: Program that takes `inputs`, the user of each candidate, and the dense columns of users or None
            (single_rows.py).
        once: Indices of the inputs of `program` with one row per user.
        min_candidates: Number of candidates from which this split is faster than repeating the user; None: unknown.
    """

    names: frozenset[str]
    users: RowReader
    candidates: RowReader
    plain: Sequence[PlainRowReader | None]
    repeated: Sequence[str]
    inputs: Sequence[Input]
    program: Program
    once: Collection[int]
    min_candidates: int | None = None

    def read_plain(
        self, user: Mapping, max_ids: int, candidates: Sequence[Any], repeat: bool
    ) -> tuple[Rows, Rows | None, ColumnSplit | None] | None:
        """Read one user and candidates with the fast readers.

        Args:
            user: Values of the user by column.
            max_ids: Maximum number of ids in a list.
            candidates: Mappings of columns to values.
            repeat: True to add the user's columns to each candidate.

        Returns:
            (candidates, user, this split), or (rows with all columns, None, None) if `repeat` is True. None if a
            reader is missing or cannot read a row, or a candidate has a column of the user.
        """
        users, others, whole = self.plain
        if not (users and others and whole):
            return None
        user_rows = None if repeat else users.read_objects([user], max_ids)
        full = [{**each, **user} if isinstance(each, dict) else each for each in candidates] if repeat else candidates
        rows = (whole if repeat else others).read_objects(full, max_ids)
        is_plain = rows and (repeat or user_rows) and all(map(self.names.isdisjoint, candidates))
        return (rows, user_rows, None if repeat else self) if is_plain else None

    def read(self, users: pa.Table, candidates: pa.Table, counts: Sequence[int]) -> list[Rows]:
        """Return [rows of the users, rows of all candidates], read from tables.

        Args:
            users: One row per user.
            candidates: Candidates of all users, in the order of the users.
            counts: Number of candidates of each user.

        Raises:
            DataError: A column or value is missing, or a value is invalid.
        """
        tables = users, repeat_users(candidates, users, self.repeated, counts)
        rows, readers = [], {"user": self.users, "candidates": self.candidates}
        for plain, table, (part, reader) in zip(self.plain, tables, readers.items(), strict=False):
            with name_rows(part):
                rows.append((plain and plain.read_table(table, sys.maxsize, sys.maxsize)) or reader.read(table))
        return rows

    def run(self, user_inputs: Tensors, row_inputs: Tensors, users_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the outputs of the model's program for candidates: for each task, float32 [B] or [B, classes].

        Args:
            user_inputs: Inputs from the users' columns, with one row per user.
            row_inputs: Inputs from the candidates' columns, with one row per candidate.
            users_B: Index of each candidate's user, int64 [B].
        """
        tensors = []
        for place, entry in enumerate(self.inputs):
            key = entry.kind, entry.feature
            if place in self.once:
                tensors.append(user_inputs[key])
            elif entry.kind == "dense":  # both are 0 in columns that the other one contains
                tensors.append(repeat_rows(user_inputs[key], users_B) + row_inputs[key])
            else:
                tensors.append(row_inputs[key] if key in row_inputs else repeat_rows(user_inputs[key], users_B))
        return self.program(*tensors, users_B, user_inputs.get(("dense", "")))


def find_min_candidates(score: Callable[[list[Any], bool], Any], rows: list[Any]) -> int:
    """Return the number of candidates from which scoring a user once takes less CPU time than repeating the user.

    The numbers in MEASURED_CANDIDATES are measured in order, for about MEASURING_S of CPU time at most. If repeating
    the user is faster for every measured number, the result is the last of these numbers.

    Args:
        score: Function of (candidates, True to repeat the user) that scores the candidates; it is called repeatedly.
        rows: Examples of candidates; at least one.
    """
    until = process_time() + MEASURING_S
    for count in MEASURED_CANDIDATES:
        examples = [rows[i % len(rows)] for i in range(count)]
        once_s, repeated_s = (_measure(partial(score, examples, repeat)) for repeat in (False, True))
        if once_s < repeated_s or process_time() > until:
            break
    return count


def _measure(call: Callable[[], Any]) -> float:
    """Return the shortest CPU time of MEASURED_RUNS calls, in seconds.

    timeit is not used, because it would keep the call, and thus the model, alive until the next garbage collection.
    """
    seconds = []
    for _ in range(MEASURED_RUNS):
        began = process_time()
        call()
        seconds.append(process_time() - began)
    return min(seconds)
