"""Sample rows from a request log or training data, compute their statistics, and score them with an export."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from raytrec.common.errors import DataError
from raytrec.config.features import resolve_input_columns
from raytrec.data.arrow import is_list
from raytrec.data.assembler import AssembledTensors, Assembler
from raytrec.data.files.footers import read_footer
from raytrec.data.files.listing import list_files
from raytrec.data.files.partitions import find_folder_columns, parse_folder_values
from raytrec.data.fragments import RowGroup
from raytrec.data.pages.decode import decode_columns
from raytrec.data.row_slices import Rows
from raytrec.scoring.request_rows import RowReader
from raytrec.scoring.scorer import Scorer

REQUEST_COLUMN = "_request"  # column of a log that contains request ids
VERSION_KEY = b"raytrec.version"  # key in a log file's metadata; its value is the version that served the requests
NO_VERSION = "no version"  # stands for the version of files that do not name one
MAX_ROW_GROUPS = 64  # number of row groups to sample if each contains enough rows
ROWS_PER_SCORING = 2048  # rows scored together

Scores = dict[str, np.ndarray]  # score column (column[class] for a task with classes) → float32 [rows]


@dataclass(frozen=True)
class RowSample:
    """Sample of rows from a log or from training data.

    Attributes:
        rows: Number of rows.
        requests: Number of distinct requests in a log; 0 for training data.
        dense: Dense columns, float32 [rows, dense columns].
        ids: Feature → looked-up ids, int64 [lookups].
        lengths: Feature → bag lengths, int32 [rows].
        odd_lookups: Feature → number of lookups whose id is out of range or, in managed tables, has no dedicated row.
        nulls: Dense column or feature → number of rows with a null in any of its source columns.
        scores: Scores in the log; for training data, the same as `rescored`.
        rescored: Scores that the export computes for the rows.
    """

    rows: int
    requests: int
    dense: np.ndarray
    ids: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    odd_lookups: dict[str, int]
    nulls: Counter
    scores: Scores
    rescored: Scores

    @property
    def independent_values(self) -> int:
        """Return the number of values that can be treated as independent: requests, or rows of training data."""
        return self.requests or self.rows


def group_by_version(place: str, key: str) -> dict[str, list[RowGroup]]:
    """Return the non-empty row groups of the files in a folder, by the model version in each file's metadata.

    Files without a version are listed under NO_VERSION. Versions without rows are omitted.

    Args:
        place: Parquet file, or folder of Parquet files.
        key: Option or argument that names the folder, for errors.

    Raises:
        DataError: A file is missing or invalid; see `list_files`.
    """
    files, groups = list_files(place, key).files, defaultdict(list)
    with ThreadPoolExecutor(16) as pool:
        for file, footer in zip(files, pool.map(read_footer, files), strict=True):
            version = (footer.metadata or {}).get(VERSION_KEY, NO_VERSION.encode()).decode()
            counts = (footer.row_group(number).num_rows for number in range(footer.num_row_groups))
            groups[version] += [RowGroup(file, number, rows) for number, rows in enumerate(counts) if rows]
    return {version: row_groups for version, row_groups in groups.items() if row_groups}


def _iterate_tables(
    groups: Sequence[RowGroup], rows: int, reader: RowReader, columns: list[str]
) -> Iterator[tuple[str, pa.Table]]:
    """Yield tables of sampled rows: one random slice of each row group, until `rows` rows are sampled.

    Row groups are visited in random order. MAX_ROW_GROUPS of them suffice unless some are small. A fixed seed
    makes the sample reproducible.

    Yields:
        (location of the first row, for errors; table of at most ROWS_PER_SCORING rows).
    """
    draw = np.random.default_rng(0)
    rows_per_group, remaining = -(-rows // min(MAX_ROW_GROUPS, len(groups))), rows
    for place in draw.permutation(len(groups)):
        group, count = groups[place], min(rows_per_group, groups[place].rows, remaining)
        if count:
            first = int(draw.integers(0, group.rows - count + 1))
            form = reader.form
            if parse_folder_values(group.path):
                arrow = read_footer(group.path).schema.to_arrow_schema()
                types = {field.name: field.type for field in reader.columns}
                form = replace(form, types=types, from_folders=find_folder_columns(arrow, form, group.path))
            table = decode_columns(group.path, group.index, first, count, columns, form.folders)
            for at in range(0, count, ROWS_PER_SCORING):
                origin = f"{group.path}, row group {group.index}, from row {first + at}"
                yield origin, table.slice(at, ROWS_PER_SCORING)
        remaining -= count


def read_rows(scorer: Scorer, groups: Sequence[RowGroup], rows: int, *, logged: bool) -> RowSample:
    """Sample up to `rows` rows, read and score them with an export, and return their columns and scores.

    Args:
        scorer: Scorer of the export.
        groups: Row groups to sample from; at least one, and none of them empty.
        rows: Maximum number of rows, at least 1.
        logged: True if the rows are from a log, which also contains scores and request ids.

    Raises:
        DataError: A file or a row is invalid; the error names the file.
    """
    reader, names = scorer.reader, [task.column for task in scorer.manifest.tasks]
    schema, transforms = reader.form.schema, reader.form.plan.transforms
    sources = {name: resolve_input_columns(transforms, [name]) for name in schema.dense}
    sources |= {name: resolve_input_columns(transforms, [schema.get_ids_column(name)]) for name in schema.sparse}
    columns = [*reader.columns.names, *([*names, REQUEST_COLUMN] if logged else [])]
    pieces: list[Rows] = []
    nulls, requests, scores, rescored = Counter(), set[str](), [], []
    for origin, table in _iterate_tables(groups, rows, reader, columns):
        try:
            pieces.append(reader.read(table))
        except DataError as error:
            raise DataError(**error.parts | {"where": f"{origin}: {error.parts['where']}"}) from None
        for name, columns_of_name in sources.items():
            null = np.any([pc.is_null(table[source]).to_numpy() for source in columns_of_name], axis=0)
            nulls[name] += int(null.sum())
        rescored.append(_split_classes(names, scorer.score(pieces[-1:])))
        if logged:
            requests.update(pc.unique(table[REQUEST_COLUMN]).to_pylist())
            scores.append(_split_classes(names, [_to_scores(table[name]) for name in names]))
    count = sum(map(len, pieces))
    assembled = Assembler(reader.form).assemble(pieces, count)
    bags = assembled.bags
    lengths = dict(zip(bags.keys, bags.lengths.view(len(bags.keys), -1).numpy(), strict=True))
    ids = dict(zip(bags.keys, bags.ids.split(bags.counts), strict=True))
    odd = {n: _count_odd_lookups(scorer, n, ids[n], assembled, place) for place, n in enumerate(bags.keys)}
    ids = {name: each.numpy() for name, each in ids.items()}
    export_scores = _concatenate(rescored)
    dense, sample_scores = assembled.dense.numpy(), _concatenate(scores) if logged else export_scores
    return RowSample(count, len(requests), dense, ids, lengths, odd, nulls, sample_scores, export_scores)


def _count_odd_lookups(scorer: Scorer, feature: str, ids_N: torch.Tensor, rows: AssembledTensors, place: int) -> int:
    """Return the number of a feature's lookups whose id is out of range or, in managed tables, has no dedicated row."""
    schema = scorer.reader.form.schema
    name = schema.sparse[feature].table
    if schema.tables[name].ids:
        return int((scorer.lookups.find_table_rows(name, ids_N) >= schema.tables[name].own_rows).sum())
    return int(rows.changed[0, place]) if rows.changed is not None else 0


def _split_classes(names: list[str], values: Sequence[np.ndarray]) -> Scores:
    columns = {}
    for name, array in zip(names, values, strict=True):
        if array.ndim == 1:
            columns[name] = array
        else:
            columns |= {f"{name}[{i}]": array[:, i] for i in range(array.shape[1])}
    return columns


def _concatenate(parts: list[Scores]) -> Scores:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _to_scores(column: pa.ChunkedArray) -> np.ndarray:
    """Return a column of scores as float32 [rows] or [rows, classes]."""
    if not is_list(column.type):
        return column.to_numpy()
    return column.combine_chunks().flatten().to_numpy().reshape(len(column), -1)
