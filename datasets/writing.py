"""Output folder, Parquet writer and progress bar for recipes."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from raytrec.common.errors import ConfigError
from raytrec.common.storage import make_relative
from raytrec.common.terminal import open_console
from raytrec.config.schema import Schema

MARKER = "prepared.json"
SPLITS = ("train", "valid", "test")


class Output:
    """Folder of a prepared dataset, used as a context manager.

    Files are written to a hidden folder next to the dataset, whose earlier content is removed when the block begins.
    When the block ends without an error, the hidden folder replaces the dataset's folder, so an interrupted recipe
    never looks complete. After an error, the hidden folder is removed.

    Args:
        folder: Folder of the dataset.
        recipe: Name of the recipe.
        options: Options of the recipe, which are stored in prepared.json and compared when the recipe runs
            again.
        force: True to replace a folder that a recipe has prepared, whatever its options. Other nonempty folders are
            never replaced.

    Attributes:
        folder: Absolute path of the dataset's folder.
        options: Name of the recipe (key recipe) and its options.
        partial: Hidden folder to which files are written.
    """

    def __init__(self, folder: Path, recipe: str, options: dict, force: bool):
        self.folder = folder.expanduser().absolute()
        self.options = {"recipe": recipe, **options}
        self.partial = self.folder.with_name(f".{self.folder.name}.partial")
        self._force = force

    def is_ready(self) -> bool:
        """Return True, and print a message, if the folder is already prepared and must not be replaced.

        This is the case if the folder was prepared with the same options and `force` is False.

        Raises:
            ConfigError: The folder was prepared with other options and `force` is False, is not empty and was not
                written by a recipe, or contains a file or folder that an option names, which would be deleted.
        """
        for name, path in self.options.items():
            if isinstance(path, str) and Path(path).is_absolute() and Path(path).is_relative_to(self.folder):
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"the path in {option} is inside the output folder, which the recipe replaces",
                    where=f"{option} {path}, --out {self.folder}",
                    do="choose another --out",
                )
        if not self.folder.exists() or (self.folder.is_dir() and not any(self.folder.iterdir())):
            return False
        stored = self._previous_options()
        if stored and self._force:
            return False
        if stored == self.options:
            open_console(stderr=True).print(f"{self.folder} is already prepared", soft_wrap=True)
            return True
        if stored is None:
            raise ConfigError(
                "the path exists, but is not a prepared dataset",
                where=str(self.folder),
                do="choose another --out, or delete the path: --force only replaces prepared datasets",
            )
        keys = sorted(k for k in stored.keys() | self.options.keys() if stored.get(k) != self.options.get(k))
        changes = ", ".join(f"{k} was {stored.get(k)}, now {self.options.get(k)}" for k in keys)
        raise ConfigError(
            f"the folder was prepared with other options: {changes}",
            where=str(self.folder),
            do="choose another --out, or replace it with --force",
        )

    def _previous_options(self) -> dict | None:
        """Return the options with which the folder was prepared, or None if there is no valid marker."""
        try:
            return self.facts()["options"]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def __enter__(self) -> Output:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            shutil.rmtree(self.partial, ignore_errors=True)
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.partial.rename(self.folder)

    def facts(self) -> dict:
        """Return the content of the marker written by `finish`: options, rows (split → number) and the recipe's facts.

        Raises:
            OSError, ValueError: The marker does not exist, or is not valid JSON.
        """
        return json.loads((self.folder / MARKER).read_text(encoding="utf-8"))

    def finish(
        self,
        schema: Schema,
        rows: dict[str, int],
        comments: Mapping[tuple[str, str], str] | None = None,
        **facts: object,
    ) -> None:
        """Write schema.yaml and the marker prepared.json to the hidden folder.

        Args:
            schema: Schema of the dataset.
            rows: Number of rows in each split.
            comments: Comments in schema.yaml, as for Schema.to_yaml.
            **facts: Further facts to store in the marker.
        """
        (self.partial / "schema.yaml").write_text(schema.to_yaml(comments), encoding="utf-8")
        text = json.dumps({"options": self.options, "rows": rows, **facts}, indent=2)
        (self.partial / MARKER).write_text(text + "\n", encoding="utf-8")

    def summary(self, job: str = "own", settings: Sequence[str] = (), lines: Sequence[str] = ()) -> None:
        """Print the number of rows in each split, further lines, and the next command on stderr.

        Args:
            job: Name of the example in jobs/ that suits the data.
            settings: Overrides that the example requires in addition to the paths.
            lines: Lines to print between the rows and the next command.
        """
        rows, place = self.facts()["rows"], make_relative(self.folder)
        counts = ", ".join(f"{name} {count:,}" for name, count in rows.items())
        paths = [f"data.{name}={place}/{name}" for name in SPLITS if rows.get(name)]
        command = shlex.join(["raytrec", "train", f"jobs/{job}.yaml", *paths, *settings])
        console = open_console(stderr=True)
        for line in (f"{place}: {counts} rows", *lines, f"next: {command}"):
            console.print(line, soft_wrap=True)


class SplitWriter:
    """Writer of one split, as files part-*.parquet compressed with zstd. A split without rows gets one empty file.

    Args:
        folder: Folder of the split.
        schema: Arrow schema of every table.
        group_rows: Number of rows in a row group.
        file_rows: Number of rows after which a new file is started.
        prefix: Prefix of the file names, so that several writers can share a folder.

    Attributes:
        rows: Number of rows passed to `write`.
    """

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        group_rows: int = 16_384,
        file_rows: int = 4_194_304,
        prefix: str = "part",
    ):
        self._folder, self._schema = folder, schema
        self._group_rows, self._file_rows, self._prefix = group_rows, file_rows, prefix
        self._writer: pq.ParquetWriter | None = None
        self._waiting: list[pa.Table] = []
        self._files = self._in_file = 0
        self.rows = 0
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, table: pa.Table) -> None:
        """Add rows, and write all full row groups. A row group can contain rows from several calls.

        Raises:
            ValueError: The table's columns differ from the schema, or a value cannot be cast to its type.
        """
        self._waiting.append(table.cast(self._schema))
        self.rows += len(table)
        waiting = sum(map(len, self._waiting))
        if waiting >= self._group_rows:
            whole = pa.concat_tables(self._waiting)
            ready = waiting - waiting % self._group_rows
            self._waiting = [whole.slice(ready)]
            for start in range(0, ready, self._group_rows):
                self._write_group(whole.slice(start, self._group_rows))

    def close(self) -> None:
        """Write the last, possibly smaller row group, and close the file."""
        remaining = pa.concat_tables(self._waiting) if self._waiting else self._schema.empty_table()
        if len(remaining) or not self._files:
            self._write_group(remaining)
        self._waiting = []
        self._writer.close()

    def _write_group(self, table: pa.Table) -> None:
        if self._writer is None or self._in_file >= self._file_rows:
            if self._writer:
                self._writer.close()
            path = self._folder / f"{self._prefix}-{self._files:05d}.parquet"
            self._writer = pq.ParquetWriter(path, self._schema, compression="zstd", write_page_checksum=True)
            self._files, self._in_file = self._files + 1, 0
        self._writer.write_table(table, row_group_size=self._group_rows)
        self._in_file += len(table)


def write_table(folder: Path, table: pa.Table, group_rows: int = 16_384) -> int:
    """Write one table as a split in `folder`, with row groups of `group_rows` rows, and return its number of rows."""
    writer = SplitWriter(folder, table.schema, group_rows)
    writer.write(table)
    writer.close()
    return writer.rows


@contextmanager
def progress(text: str, total: int | None) -> Iterator:
    """Yield a function that advances a progress bar on stderr by a number of units.

    The bar is hidden if stderr is not a terminal.

    Args:
        text: Text before the bar.
        total: Number of units of the whole task; None: unknown.
    """
    console = open_console(stderr=True)
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.advance(task, done)
