"""What rows of a request log, or of training data, have: read, counted and scored by an export."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raytrec.common.errors import DataError
from raytrec.config.features import columns_before
from raytrec.data.arrow import is_list
from raytrec.data.assemble import Assembled, Assembler
from raytrec.data.footers import read_footer
from raytrec.data.fragments import RowGroup
from raytrec.data.listing import list_files
from raytrec.data.partitions import find_in_folders, in_folders
from raytrec.data.rows import decode_columns
from raytrec.scoring.rows import RowReader
from raytrec.scoring.scorer import Scorer
from raytrec.skew.distributions import Ids

REQUEST = "_request"  # column of a log: id of the request
VERSION = b"raytrec.version"  # of a log's rows, in the metadata of their file
MOST_GROUPS = 64  # row groups that are read, where each has enough
SCORED_ROWS = 2048  # rows that are scored together


@dataclass
class RowStats:
    """What rows have.

    Attributes:
        requests: that they are of, or rows of training data: what is independent of each other.
        dense: float32 [n, dense columns] each. ids: feature → its lookups.
        lengths: feature → of bags, [n] each.
        nulls: column or feature → rows with a null in what it is made of.
        odd: feature → lookups out of range, or in rows that ids share.
        scores: column → float32 [n] each. off: column → of the same rows scored again, likewise.
    """

    rows: int = 0
    requests: set[str] = field(default_factory=set)
    dense: list[np.ndarray] = field(default_factory=list)
    ids: dict[str, Ids] = field(default_factory=lambda: defaultdict(Ids))
    lengths: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    nulls: Counter = field(default_factory=Counter)
    odd: Counter = field(default_factory=Counter)
    scores: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))
    off: dict[str, list[np.ndarray]] = field(default_factory=lambda: defaultdict(list))

    @property
    def independent(self) -> int:
        """How many values of a column are independent of each other, at least."""
        return len(self.requests) or self.rows


def find_groups(place: str, key: str) -> dict[str, list[RowGroup]]:
    """The row groups of a folder by their version."""
    files, found = list_files(place, key).files, defaultdict(list)
    with ThreadPoolExecutor(16) as pool:
        for file, footer in zip(files, pool.map(read_footer, files), strict=True):
            version = (footer.metadata or {}).get(VERSION, b"no version").decode()
            counts = (footer.row_group(number).num_rows for number in range(footer.num_row_groups))
            found[version] += [RowGroup(file, number, rows) for number, rows in enumerate(counts) if rows]
    return {version: groups for version, groups in found.items() if groups}


def _tables(
    groups: Sequence[RowGroup], rows: int, reader: RowReader, columns: list[str]
) -> Iterator[tuple[str, pa.Table]]:
    """(file, up to SCORED_ROWS rows): about `rows` in all, a piece of each of some row groups."""
    draw = np.random.default_rng(0)
    each, left = -(-rows // min(MOST_GROUPS, len(groups))), rows
    for place in draw.permutation(len(groups)):
        group, count = groups[place], min(each, groups[place].rows, left)
        if count:
            first = int(draw.integers(0, group.rows - count + 1))
            form = reader.form
            if in_folders(group.path):
                arrow = read_footer(group.path).schema.to_arrow_schema()
                types = {field.name: field.type for field in reader.columns}
                form = replace(form, types=types, from_folders=find_in_folders(arrow, form, group.path))
            table = decode_columns(group.path, group.index, first, count, columns, form.folders)
            yield from ((group.path, table.slice(at, SCORED_ROWS)) for at in range(0, count, SCORED_ROWS))
        left -= count


def read_rows(scorer: Scorer, groups: Sequence[RowGroup], rows: int, *, logged: bool) -> RowStats:
    """Rows of Parquet as the export reads and scores them."""
    reader, seen, names = scorer.reader, RowStats(), [task.column for task in scorer.manifest.tasks]
    schema, transforms = reader.form.schema, reader.form.plan.transforms
    made_of = {name: columns_before(transforms, [name]) for name in schema.dense}
    made_of |= {name: columns_before(transforms, [schema.column_of(name)]) for name in schema.sparse}
    columns = [*reader.columns.names, *([*names, REQUEST] if logged else [])]
    for file, table in _tables(groups, rows, reader, columns):
        try:
            read = reader.read(table)
        except DataError as error:
            raise DataError(**error.parts | {"where": f"{file}: {error.parts['where']}"}) from None
        seen.rows += len(read)
        for name, sources in made_of.items():
            null = np.any([pc.is_null(table[source]).to_numpy() for source in sources], axis=0)
            seen.nulls[name] += int(null.sum())
        _add_columns(seen, scorer, Assembler(reader.form).assemble([read], len(read)))
        scores = _by_class(names, scorer.score([read]))
        if logged:
            seen.requests.update(pc.unique(table[REQUEST]).to_pylist())
            given = _by_class(names, [_numbers(table[name]) for name in names])
            for name, again in scores.items():
                off = np.abs(given[name] - again) / np.maximum(1, np.abs(again))
                off[np.isnan(given[name]) & np.isnan(again)] = 0
                seen.off[name].append(np.nan_to_num(off, nan=1.0))
            scores = given
        for name, values in scores.items():
            seen.scores[name].append(values)
    return seen


def _add_columns(seen: RowStats, scorer: Scorer, rows: Assembled) -> None:
    schema, bags = scorer.reader.form.schema, rows.bags
    seen.dense.append(rows.dense.numpy())
    lengths = bags.lengths.view(len(bags.keys), -1).numpy()
    for place, (feature, ids_N) in enumerate(zip(bags.keys, bags.ids.split(bags.counts), strict=True)):
        name = schema.sparse[feature].table
        table = schema.tables[name]
        seen.ids[feature].add(ids_N.numpy())
        seen.lengths[feature].append(lengths[place])
        if table.ids:
            seen.odd[feature] += int((scorer.rows_of(name, ids_N) >= table.own_rows).sum())
        elif rows.changed is not None:
            seen.odd[feature] += int(rows.changed[0, place])


def _by_class(names: list[str], values: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Scores by column; those of a task of classes by column[class]."""
    found = {}
    for name, each in zip(names, values, strict=True):
        if each.ndim == 1:
            found[name] = each
        else:
            found |= {f"{name}[{i}]": each[:, i] for i in range(each.shape[1])}
    return found


def _numbers(column: pa.ChunkedArray) -> np.ndarray:
    """A column of scores: float32 [n] or [n, classes]."""
    if not is_list(column.type):
        return column.to_numpy()
    return column.combine_chunks().flatten().to_numpy().reshape(len(column), -1)
