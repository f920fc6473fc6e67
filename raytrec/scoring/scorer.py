"""Scorer: an exported model that scores rows in this process, as returned by `raytrec.load`."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import WeakSet, proxy

import numpy as np
import pyarrow as pa
import torch

from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.config.features import resolve_input_columns
from raytrec.config.tasks import TowerName
from raytrec.data.assembler import Assembler
from raytrec.data.row_slices import Rows
from raytrec.scoring.column_splits import ColumnSplit, find_min_candidates
from raytrec.scoring.lookups import IdRows, Lookups, Tensors
from raytrec.scoring.manifest import Manifest, ProgramName
from raytrec.scoring.plain_rows import PlainRowReader, make_plain_reader
from raytrec.scoring.request_rows import ROWS_PLACE, RowReader, concat_rows, name_rows, to_table, widen_type
from raytrec.scoring.single_rows import RewrittenProgram, rewrite_for_single_rows

TOLERANCE = 1e-6  # maximum difference between scores of a golden row, relative for scores above 1
MAX_CACHED_SPLITS = 16  # maximum number of cached ColumnSplits
Programs = Mapping[ProgramName, torch.fx.GraphModule]


class Scorer:
    """Trained model that scores rows, created by `raytrec.load`. All methods are thread-safe, except `update`.

    Args:
        manifest: Manifest of the export.
        programs: Programs of the manifest (ExportedProgram.module), which map tensors to a tuple of tensors.
        lookups: Lookups in the tables.
        golden: Golden rows: rows with the scores that the export computed, which `check` compares.

    Attributes:
        manifest: Manifest of the export.
        columns: Columns that a row must contain, with the types to which values without a type (JSON) are converted.
        lookups: Lookups in the tables.
        step: Training step of the current state of tables and weights.
        version: Name of the current state in responses: `export_version` until the first `update`.
        export_version: The manifest's version.
        split: Function from the names of a user's columns (frozenset) to the ColumnSplit for such users.
    """

    def __init__(self, manifest: Manifest, programs: Programs, lookups: Lookups, golden: pa.Table):
        self.manifest, self.golden = manifest, golden
        scores = {task.column for task in manifest.tasks}
        self.columns = pa.schema([(f.name, widen_type(f.type)) for f in golden.schema if f.name not in scores])
        self._programs, self.lookups = programs, lookups
        self.version = self.export_version = manifest.version
        self.step, self._rewritten = manifest.source.step, WeakSet[RewrittenProgram]()
        # The caches refer to the scorer weakly. Without reference cycles, its tables are freed with the last reference.
        scorer, features = proxy(self), manifest.features
        self.split = lru_cache(MAX_CACHED_SPLITS)(lambda names: scorer._make_split(names))
        self._assembler = lru_cache(4 * MAX_CACHED_SPLITS)(lambda reader: Assembler(reader.form, features))

    def predict(self, rows: Any = None, *, user: Any = None, candidates: Any = None) -> pa.Table:
        """Return the predictions of rows, or of one user's candidates.

        Args:
            rows: A pyarrow.Table, a pandas.DataFrame, a mapping of columns to values (one row) or a list of
                mappings, with the columns of the features (`columns`). Additional columns are ignored.
            user: One row with some of the columns: a mapping, a pyarrow.Table or a pandas.DataFrame.
            candidates: Rows in any of these forms, with the remaining columns.

        Returns:
            One row per input row, in the same order. The column is `score`, float32; with several tasks, there is
            a column `score_TASK` per task. The values of a task with classes are lists.

        Raises:
            DataError: There are no rows; a column or value is missing or invalid; or as for `to_ranking_tables`.
            ConfigError: The arguments are neither `rows` alone, nor `user` and `candidates`.
        """
        is_given = [each is not None for each in (rows, user, candidates)]
        if is_given not in ([True, False, False], [False, True, True]):
            raise ConfigError(
                "predict requires either rows, or user and candidates",
                where="predict",
                expected="predict(rows) or predict(user=…, candidates=…)",
            )
        if rows is not None:
            return self.as_table(self.score([self.reader.read(to_table(rows, self.reader.columns))]))
        return self.as_table(self._score_parts(*self.read_candidates(user, candidates)))

    def _score_parts(self, rows: Any, user: Any, split: ColumnSplit | None) -> list[np.ndarray]:
        return self.rank(split, [user], [rows]) if split else self.score([rows])

    def vectors(self, rows: Any, *, tower: TowerName = "query") -> np.ndarray:
        """Return the query or item vectors of rows, float32 [rows, width], for `Index.search`.

        Args:
            rows: Rows as in `predict`, with the columns of the tower's features.
            tower: query or item.

        Raises:
            ConfigError: The model does not compute query and item vectors, or `tower` has another value.
            DataError: There are no rows, or a column or value is missing or invalid.
        """
        reader = self.get_reader(tower)
        return self.score([reader.read(to_table(rows, reader.columns))], tower)[0]

    @property
    def program_weights(self) -> dict[str, torch.Tensor]:
        """Return the dense weights and buffers of all programs, with keys PROGRAM/NAME."""
        states = {program: module.state_dict() for program, module in self._programs.items()}
        return {f"{program}/{name}": value for program, state in states.items() for name, value in state.items()}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Return the dense weights and buffers by name; programs that contain the same name have the same values."""
        return {name.partition("/")[2]: value for name, value in self.program_weights.items()}

    def update(self, step: int, version: str, ids: Mapping[str, IdRows], weights: Mapping[str, torch.Tensor]) -> None:
        """Replace managed ids and weights in place. Rows of tables are replaced by `Lookups.prepare_update`.

        This method is not thread-safe, and must be called in the thread that scores.

        Args:
            step: Training step of the new state.
            version: Name of the new state in responses.
            ids: Table → rows of its managed ids, for some or all tables.
            weights: Values of all weights of the programs, by name.
        """
        with torch.no_grad():
            for key, value in self.program_weights.items():
                value.copy_(weights[key.partition("/")[2]])
            for rewritten in self._rewritten:
                rewritten.refresh()
        self.lookups.ids.update(ids)
        self.step, self.version = step, version

    @cached_property
    def reader(self) -> RowReader:
        """Return the reader of rows for the program `predict`."""
        return self.get_reader("predict")

    def get_reader(self, program: ProgramName) -> RowReader:
        """Return the reader of rows for a program.

        Raises:
            ConfigError: The export does not contain this program.
        """
        if program not in self._programs and self.manifest.towers:
            raise ConfigError(f"there is no tower '{program}'", where=f"tower={program}", expected="query or item")
        if program not in self._programs:
            raise ConfigError(
                f"the model of run {self.manifest.source.run} does not compute query and item vectors",
                where=self.export_version,
                expected="a model with a query and an item tower, such as two_tower (docs/retrieval.md)",
                do="use predict (in services: POST /predict)",
            )
        return self._readers[program]

    def get_plain_reader(self, program: ProgramName) -> PlainRowReader | None:
        """Return the fast reader of a program's plain rows, or None as in `plain_rows.make_plain_reader`."""
        return self._plain_readers[program]

    @cached_property
    def _plain_readers(self) -> dict[ProgramName, PlainRowReader | None]:
        return {name: make_plain_reader(reader) for name, reader in self._readers.items()}

    @cached_property
    def _readers(self) -> dict[ProgramName, RowReader]:
        return {name: self._make_reader(self._list_names(name)) for name in self._programs}

    def _list_names(self, program: ProgramName) -> set[str]:
        """Return the features and dense columns that a program reads."""
        if program in ("query", "item"):
            return set(self.manifest.towers[program])
        inputs = self.manifest.programs[program].inputs
        dense = self.manifest.data_schema.dense if any(each.kind == "dense" for each in inputs) else []
        return {*dense, *(each.feature for each in inputs if each.feature)}

    def _make_reader(self, names: Collection[str]) -> RowReader:
        manifest = self.manifest
        return RowReader(manifest.data_schema.select_features(names), manifest.transforms, manifest.lists, self.columns)

    def score(self, pieces: Sequence[Rows], program: ProgramName = "predict") -> list[np.ndarray]:
        """Return the outputs of a program for rows, which may come from several requests.

        Args:
            pieces: Rows read by `get_reader(program)`.
            program: Program to run.

        Returns:
            float32 [rows] or [rows, classes] for each task; for a tower, one array [rows, width].

        Raises:
            DataError: There are no rows.
            ConfigError: The export does not contain the program.
        """
        count = sum(map(len, pieces))
        tensors = self._look_up(self.get_reader(program), pieces, count)
        inputs = self.manifest.programs[program].inputs
        with torch.inference_mode():
            outputs = self._programs[program].forward(*(tensors[each.kind, each.feature] for each in inputs))
            return [each.numpy() for each in outputs]

    def read_candidates(self, user: Any, candidates: Any, max_ids: int = sys.maxsize) -> tuple[Any, Any, Any]:
        """Read a user and candidates, in the forms that `predict` accepts, for `rank` or `score`.

        A few candidates are returned as rows that contain the user's columns, if scoring such rows is faster. The
        first call for a set of user columns measures the number of candidates from which scoring such
        rows is slower (`find_min_candidates`).

        Args:
            user: One row.
            candidates: Rows with the remaining columns of the model.
            max_ids: Maximum number of ids in a list; with longer lists, rows are read as tables.

        Returns:
            (candidates, user, split) for `rank`, or (rows with all columns, None, None) for `score`.

        Raises:
            DataError: The user or the candidates are invalid, as for `to_ranking_tables`.
        """
        names = self._select_known(user) if isinstance(user, Mapping) else frozenset()
        first = candidates[0] if isinstance(candidates, list) and candidates else None
        # A split is only made for candidates with all other columns, because making it takes about 0.1 s.
        if names and isinstance(first, dict) and first.keys() >= set(self.columns.names) - names:
            split = self.split(names)
            read, is_few = partial(split.read_plain, user, max_ids), len(candidates) < (split.min_candidates or 0)
            if plain := read(candidates, is_few):
                if split.min_candidates is None:
                    split.min_candidates = find_min_candidates(lambda *few: self._score_parts(*read(*few)), candidates)
                return plain
        return self.to_ranking_tables(user, candidates)

    def to_ranking_tables(self, user: Any, candidates: Any) -> tuple[pa.Table, pa.Table, ColumnSplit]:
        """Return (table of candidates, table of their user, split) for `rank`.

        Args:
            user: One row: a mapping, a pyarrow.Table or a pandas.DataFrame.
            candidates: Rows with the remaining columns of the model, in any form that `predict` accepts.

        Raises:
            DataError: The user is not a single row with some, but not all, of the model's columns; candidates
                repeat a column of the user; or rows cannot be converted, as for `to_table`.
        """
        fields = [field for field in self.columns if not isinstance(user, Mapping) or field.name in user]
        with name_rows("user"):
            user = to_table(user, pa.schema(fields))
        names = self._select_known(user.column_names)
        if not names or len(user) != 1:
            raise DataError(
                f"user has {len(user):,} rows" if names else "user has none of the model's columns",
                where="user",
                expected=f"one row with some of {', '.join(self.columns.names)}",
            )
        listed = candidates if isinstance(candidates, list | tuple) else [candidates]
        candidate_names = {name for row in listed if isinstance(row, Mapping) for name in row}
        fields = [field for field in self.columns if field.name not in names]
        with name_rows("candidates"):
            candidates = to_table(candidates, pa.schema(fields))
        if repeated := sorted(names & (candidate_names | set(candidates.column_names))):
            raise DataError(
                f"column '{repeated[0]}' is in both user and candidates",
                where="user, candidates",
                expected="each column in only one of the two",
                do=f"remove {repeated[0]} from user or from all candidates",
            )
        return candidates, user, self.split(names)

    def rank(self, split: ColumnSplit, users: Sequence[Any], candidates: Sequence[Any]) -> list[np.ndarray]:
        """Return the predictions for the candidates of one or several users, in the form returned by `score`.

        Args:
            split: Division of the columns between users and candidates.
            users: One row for each user, either all as `Rows` or all as tables of one schema.
            candidates: Candidates of each user: `Rows` if the users are, else tables or ObjectRows of one schema.

        Raises:
            DataError: There are no candidates, or a column or value of a table or of ObjectRows is missing or invalid.
        """
        counts = [len(each) for each in candidates]
        if not isinstance(users[0], Rows):
            user_rows, rows = split.read(pa.concat_tables(users), concat_rows(candidates), counts)
            users, candidates = [user_rows], [rows]
        users_B = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
        user_inputs = self._look_up(split.users, users, len(counts))
        with name_rows("candidates"):
            row_inputs = self._look_up(split.candidates, candidates, len(users_B))
        with torch.inference_mode():
            return [each.numpy() for each in split.run(user_inputs, row_inputs, users_B)]

    def _select_known(self, names: Iterable[str]) -> frozenset[str]:
        return frozenset(names) & frozenset(self.columns.names)

    def _make_split(self, names: frozenset[str]) -> ColumnSplit:
        """Return the division of the model's columns for users with columns of these names.

        Raises:
            DataError: The names include all columns that the model's features need.
        """
        schema, transforms = self.manifest.data_schema, list(self.manifest.transforms)
        all_names = self._list_names("predict")
        needed = {n: set(resolve_input_columns(transforms, schema.select_features([n]).inputs)) for n in all_names}
        user_names = {name for name, columns in needed.items() if columns <= names}
        if user_names == all_names:
            raise DataError(
                "user has all columns of the model, so all candidates would have the same scores",
                where="user",
                expected="at least one column of the model in candidates only",
                do="pass the columns in which candidates differ in candidates instead of user",
            )
        user_reader, other_reader = self._make_reader(user_names), self._make_reader(all_names - user_names)
        repeated = [name for name in other_reader.columns.names if name in names]
        inputs, module = self.manifest.programs["predict"].inputs, self._programs["predict"]
        once_names = user_names if user_names >= set(schema.dense) else user_names - set(schema.dense)
        read_names = [{each.feature} if each.feature else set(schema.dense) for each in inputs]
        once = frozenset(place for place, features in enumerate(read_names) if features <= once_names)
        columns = () if once_names >= set(schema.dense) else [i for i, c in enumerate(schema.dense) if c in user_names]
        is_divided = 0 < len(once) < len(inputs)
        rewritten = rewrite_for_single_rows(module, inputs, once, columns) if is_divided else None
        if rewritten:
            self._rewritten.add(rewritten)
        else:
            once = frozenset()
        program = rewritten or (lambda *tensors: module.forward(*tensors[: len(inputs)]))
        plain = [make_plain_reader(user_reader), make_plain_reader(other_reader), self.get_plain_reader("predict")]
        return ColumnSplit(names, user_reader, other_reader, plain, repeated, inputs, program, once)

    def _look_up(self, reader: RowReader, pieces: Sequence[Rows], count: int) -> Tensors:
        if not count:
            raise DataError("there are no rows", where=ROWS_PLACE, expected="at least one row")
        rows = self._assembler(reader).assemble(list(pieces), count)
        with torch.inference_mode():
            return self.lookups(rows, reader.form.schema.sparse)

    def as_table(self, predictions: Sequence[np.ndarray]) -> pa.Table:
        """Return predictions, as returned by `score`, as a table with one column per task (lists for classes)."""
        names = [task.column for task in self.manifest.tasks]
        columns = (pa.array(values if values.ndim == 1 else list(values)) for values in predictions)
        return pa.table(dict(zip(names, columns, strict=True)))

    def check(self) -> float:
        """Score the golden rows, and return the largest difference from the exported scores.

        Differences are absolute for scores up to 1, relative for larger scores, and 0 without golden rows.

        Raises:
            RunError: The difference exceeds TOLERANCE.
        """
        if not len(self.golden):
            return 0.0
        largest, predictions = 0.0, self.score([self.reader.read(self.golden)])
        for task, actual in zip(self.manifest.tasks, predictions, strict=True):
            expected = np.array(self.golden[task.column].to_pylist(), np.float32)
            differences = np.abs(actual - expected) / np.maximum(1, np.abs(expected))
            largest = max(largest, float(np.nan_to_num(differences, nan=np.inf).max()))
        if largest > TOLERANCE:
            raise RunError(
                f"scores computed here differ from the exported scores by {largest:.2g}",
                where=f"the golden rows of {self.version}",
                expected=f"a difference of at most {TOLERANCE:g}",
                do=f"use torch {self.manifest.source.torch}, or export the run again with a deterministic model",
            )
        return largest

    def __repr__(self) -> str:
        return f"<Scorer: {self.version}>"
