"""Convert Criteo click logs to Parquet with Ray Data tasks.

Dense columns are log(1 + x), with missing and negative values as 0, as in MLPerf's DLRM. In sparse columns,
id 0 stands for missing values and, with a frequency vocabulary, for rare values. The last seventh of Kaggle's
file and the last day of 1TB are held out: the first half is valid, and the second half is test. All other
rows are train.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from raytrec_datasets.criteo.lines import DENSE, SPARSE, Chunk, chunks, hex_values, read
from raytrec_datasets.writing import SPLITS, Output, SplitWriter, progress

from raytrec.cluster.session import ray_session
from raytrec.common.errors import ConfigError, DataError, get_root_cause
from raytrec.common.formatting import format_count
from raytrec.config.schema import Schema

MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 ÷ golden ratio (Knuth's multiplicative hash)


def write(
    out: Path,
    source: Path,
    layout: str,
    vocabulary: str,
    hash_rows: int,
    min_count: int,
    dim: int,
    skip_bad: bool,
    force: bool,
) -> None:
    """Write the dataset with tasks of a Ray session; the arguments are those of `raytrec prepare criteo`.

    Raises:
        ConfigError: There are too few rows, or the output folder cannot be replaced (`Output.is_ready`).
        DataError: There are no files of the layout, a file is damaged, or a line is malformed and `skip_bad` is False.
    """
    source = source.expanduser().absolute()
    files = find_files(source, layout)
    size = {"hash_rows": hash_rows} if vocabulary == "hash" else {"min_count": min_count}
    options = {"source": str(source), "vocabulary": vocabulary, **size, "dim": dim, "skip_bad": skip_bad}
    output = Output(out, "criteo", options, force)
    if output.is_ready():
        output.summary("criteo")
        return
    with output, ray_session():
        work = [chunk for path in files.all for chunk in chunks(path)]
        counts = [rows for rows, _ in _each(work, _count, skip_bad, "counting lines")]
        bounds = _bounds(files, work, counts)
        tables = None
        if vocabulary == "frequency":
            train = [c for c, first in zip(work, _firsts(counts), strict=True) if first < bounds[0]]
            tables = _vocabulary(train, skip_bad, min_count, output.partial / "vocabulary")
        writer = ChunkWriter(str(output.partial), bounds, tables, hash_rows)
        tasks = list(zip(work, _firsts(counts), range(len(work)), strict=True))
        written = list(_each(tasks, writer, skip_bad, "writing Parquet"))
        rows = {name: sum(w[name] for w in written) for name in SPLITS}
        sizes = [len(tables[c]) + 1 if tables else hash_rows for c in SPARSE]
        skipped = sum(w["skipped"] for w in written)
        output.finish(schema_of(sizes, dim), rows, skipped_lines=skipped)
    output.summary("criteo", lines=[f"skipped {format_count(skipped, 'malformed line')}"] if skipped else [])


@dataclass(frozen=True)
class Files:
    """Files of the source that are converted, and their division into splits.

    Attributes:
        all: All files in order.
        held_out: File with valid and test (1TB); None: the only file is split by rows (Kaggle).
    """

    all: list[Path]
    held_out: Path | None


def find_files(source: Path, layout: str) -> Files:
    """Find Kaggle's train.txt, or 1TB's day_0 … day_23 (also .gz), in a folder or as a single file.

    A single day is split by rows, like train.txt, unless the layout is 1tb, which requires two days.

    Raises:
        DataError: There are no such files, there is only one day for 1tb, or the files do not match the layout.
    """
    names = [source] if source.is_file() else sorted(source.iterdir()) if source.is_dir() else []
    days = [p for p in names if re.fullmatch(r"day_\d+(\.gz)?", p.name)]
    days.sort(key=lambda p: int(re.search(r"\d+", p.name)[0]))
    kaggle = [p for p in names if p.name in ("train.txt", "train.txt.gz")] or ([source] if source.is_file() else [])
    kaggle = kaggle or (days if len(days) == 1 else [])
    if days and (layout == "1tb" or (layout == "auto" and len(days) > 1)):
        if len(days) < 2:
            raise DataError(
                f"the source contains only {days[0].name}",
                where=str(source),
                expected="at least two days; the last day becomes valid and test",
                do="add days, or omit --layout to split the day by rows",
            )
        return Files(days, days[-1])
    if layout != "1tb" and kaggle:
        return Files(kaggle[:1], None)
    raise DataError(
        f"no Criteo files found{'' if layout == 'auto' else f' for --layout {layout}'}",
        where=str(source),
        expected="train.txt (Kaggle), or day_0 … day_23 (1TB), plain or .gz",
        do="pass the folder with the original files as --source" + ", or omit --layout" * (layout != "auto"),
    )


def schema_of(sizes: list[int], dim: int) -> Schema:
    """Return a schema with 13 dense columns, and 26 features with a table each; `sizes` are the tables' rows."""
    return Schema.parse(
        {
            "labels": ["label"],
            "dense": DENSE,
            "sparse": {name: {"table": name} for name in SPARSE},
            "tables": {name: {"rows": rows, "dim": dim} for name, rows in zip(SPARSE, sizes, strict=True)},
        },
        "schema.yaml",
    )


def _firsts(counts: list[int]) -> list[int]:
    """Return the index of the first row of each chunk."""
    return (np.cumsum([0, *counts[:-1]])).tolist()


def _bounds(files: Files, work: list[Chunk], counts: list[int]) -> tuple[int, int]:
    """Return (index of the first row of valid, index of the first row of test).

    Raises:
        ConfigError: A split would have no rows.
    """
    total = sum(counts)
    if files.held_out is None:
        first = total - total // 7
    else:
        first = sum(n for c, n in zip(work, counts, strict=True) if c.path != str(files.held_out))
    if total - first < 2 or first < 1:
        raise ConfigError(
            f"{format_count(total, 'row')} cannot be split into train, valid and test",
            where=str(files.all[0]),
            expected="at least 14 rows in one file; or, in several days, two in the last day and one before it",
        )
    return first, first + (total - first) // 2


def _each(tasks: list, function, skip_bad: bool, text: str) -> Iterator:
    """Yield function(task, skip_bad) for each task in order, computed by Ray Data tasks.

    Raises:
        DataError: A task found invalid data.
    """
    import pickle

    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # Ray Data reports each execution on stderr
    shared = ray.put(tasks)

    def run(index: pa.Table) -> pa.Table:
        results = [function(ray.get(shared)[i.as_py()], skip_bad) for i in index["id"]]
        return pa.table({"result": [pickle.dumps(r) for r in results]})

    data = ray.data.range(len(tasks), override_num_blocks=len(tasks)).map_batches(
        run, batch_size=None, batch_format="pyarrow"
    )
    data.context.execution_options.preserve_order = True
    data.context.enable_progress_bars = False
    data.context.raise_original_map_exception = True
    try:
        with progress(text, len(tasks)) as advance:
            for batch in data.iter_batches(batch_size=None, batch_format="pyarrow"):
                for value in batch["result"]:
                    advance(1)
                    yield pickle.loads(value.as_py())  # safe: our own tasks have just written these bytes
    except Exception as error:
        raise get_root_cause(error) from None


def _count(chunk: Chunk, skip_bad: bool) -> tuple[int, int]:
    """Return the numbers of rows and skipped lines in a chunk."""
    parts = [(len(table), bad) for table, bad in read(chunk, skip_bad)]
    return sum(n for n, _ in parts), sum(b for _, b in parts)


def _count_values(chunk: Chunk, skip_bad: bool) -> pa.Table:
    """Count the values in each block of a chunk.

    Returns:
        Table with the columns column (column number), value (-1: missing) and count.
    """
    parts = []
    for table, _ in read(chunk, skip_bad):
        for number, name in enumerate(SPARSE):
            values, counts = np.unique(hex_values(table[name]), return_counts=True)
            column = np.full(len(values), number)
            parts.append(pa.table({"column": column, "value": values, "count": counts}))
    return pa.concat_tables(parts)


def _vocabulary(train: list[Chunk], skip_bad: bool, min_count: int, folder: Path) -> dict[str, np.ndarray]:
    """Return the values of each column that occur at least min_count times in train, and write them as Parquet.

    Values are sorted by descending count, then by value. The id of a value is 1 + its position.
    """
    parts: list[pa.Table] = []
    for part in _each(train, _count_values, skip_bad, "counting values"):
        parts.append(part)
        if sum(map(len, parts[1:])) >= len(parts[0]):  # merged rarely enough that the total cost stays linear
            parts = [_added_up(parts)]
    total = _added_up(parts)
    folder.mkdir()
    vocabulary = {}
    for number, name in enumerate(SPARSE):
        rows = total.filter((pa.compute.field("column") == number) & (pa.compute.field("value") >= 0))
        rows = rows.filter(pa.compute.field("count") >= min_count)
        rows = rows.sort_by([("count", "descending"), ("value", "ascending")]).select(["value", "count"])
        pq.write_table(rows, folder / f"{name}.parquet", compression="zstd")
        vocabulary[name] = rows["value"].to_numpy()
    return vocabulary


def _added_up(parts: list[pa.Table]) -> pa.Table:
    """Return a table with the total count of each value in each column."""
    counts = pa.concat_tables(parts).group_by(["column", "value"]).aggregate([("count", "sum")])
    return counts.rename_columns({"count_sum": "count"})


class ChunkWriter:
    """Task that writes a chunk as part files of the splits.

    Args:
        folder: Folder that receives the splits.
        bounds: Index of the first row of valid, and of test.
        tables: Column → values with the ids 1, 2, …; None: values are hashed.
        hash_rows: Number of rows of each table, if values are hashed.
    """

    def __init__(self, folder: str, bounds: tuple[int, int], tables: dict[str, np.ndarray] | None, hash_rows: int):
        self._folder, self._bounds, self._hash_rows = folder, bounds, hash_rows
        self._tables = None
        if tables is not None:
            orders = {name: np.argsort(values) for name, values in tables.items()}
            self._tables = {name: (values[orders[name]], orders[name] + 1) for name, values in tables.items()}

    def __call__(self, task: tuple[Chunk, int, int], skip_bad: bool) -> dict[str, int]:
        """Write a chunk, and return the numbers of rows in each split and of skipped lines (key skipped).

        Args:
            task: (chunk, index of its first row, number of the chunk).
            skip_bad: True to skip malformed lines.

        Raises:
            DataError: A line is malformed and `skip_bad` is False.
        """
        chunk, first, number = task
        writers: dict[str, SplitWriter] = {}
        skipped = 0
        for table, bad in read(chunk, skip_bad):
            skipped += bad
            ready = self._convert(table)
            for name, part in self._divide(ready, first):
                if name not in writers:
                    writers[name] = SplitWriter(Path(self._folder) / name, ready.schema, prefix=f"part-{number:05d}")
                writers[name].write(part)
            first += len(table)
        for writer in writers.values():
            writer.close()
        return {name: writers[name].rows if name in writers else 0 for name in SPLITS} | {"skipped": skipped}

    def _divide(self, table: pa.Table, first: int) -> Iterator[tuple[str, pa.Table]]:
        edges = [0, *self._bounds, 2**62]
        for name, low, high in zip(SPLITS, edges, edges[1:], strict=False):
            start, stop = max(low - first, 0), min(high - first, len(table))
            if start < stop:
                yield name, table.slice(start, stop - start)

    def _convert(self, table: pa.Table) -> pa.Table:
        columns = {"label": table["label"].combine_chunks()}
        for name in DENSE:
            values = table[name].fill_null(0).to_numpy()
            columns[name] = np.log1p(np.maximum(values, 0)).astype(np.float32)
        for name in SPARSE:
            columns[name] = self._ids(name, hex_values(table[name]))
        return pa.table(columns)

    def _ids(self, name: str, values: np.ndarray) -> np.ndarray:
        if self._tables is None:
            with np.errstate(over="ignore"):
                mixed = (values.astype(np.uint64) + np.uint64(1)) * MIX >> np.uint64(20)
            ids = 1 + (mixed % np.uint64(self._hash_rows - 1)).astype(np.int64)
            return np.where(values < 0, 0, ids)
        keys, ids = self._tables[name]
        if not len(keys):
            return np.zeros(len(values), np.int64)
        at = np.minimum(np.searchsorted(keys, values), len(keys) - 1)
        return np.where(keys[at] == values, ids[at], 0).astype(np.int64)
