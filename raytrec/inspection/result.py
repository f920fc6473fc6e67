"""Present the result of an inspection as schema.yaml, a table of columns, and a training command."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from raytrec.common.errors import ConfigError, convert_os_errors
from raytrec.common.formatting import format_count
from raytrec.common.redaction import hide
from raytrec.common.terminal import open_console, to_plain_text
from raytrec.config.schema import Schema, format_yaml_scalar
from raytrec.inspection.column_roles import REASON_CONSTANT, Finding
from raytrec.inspection.column_scan import Scan
from raytrec.inspection.column_stats import ColumnStats
from raytrec.inspection.shared_tables import SharedTable, has_history_name

MAX_COMMAND_CHARS = 2000  # maximum characters of transforms in the printed command


@dataclass
class Inspection:
    """Result of `raytrec inspect` on a folder.

    Attributes:
        uri: Path or URI of the inspected data.
        findings: Finding for each column, in the order of the files' columns.
        schema: Proposed schema, which describes the columns after the transforms.
        transforms: Entries of data.transforms, without which training rejects columns of the schema.
        tables: Tables of the schema, with reasons why features share them.
        scan: Statistics and extent of the data that was read.
        reserve_columns: Entries of data.reserve_columns.
    """

    uri: str
    findings: list[Finding]
    schema: Schema
    transforms: list[dict]
    tables: list[SharedTable]
    scan: Scan
    reserve_columns: list[str]

    @property
    def rows(self) -> int:
        """Return the number of rows read from the training data."""
        return self.scan.rows

    @property
    def tasks(self) -> list[dict]:
        """Return the entries of `tasks` in a configuration; [] for a single label without nulls and NaN."""
        of_labels = [f.stats for f in self.findings if f.kind == "label"]
        tasks = [{"label": s.name} | ({"nulls": "skip"} if s.count_missing() else {}) for s in of_labels]
        return tasks if len(tasks) > 1 or "nulls" in tasks[0] else []

    def schema_yaml(self) -> str:
        """Return the text of schema.yaml, with comments that list the required settings and describe each column."""
        sample = "" if self.scan.whole else ", a sample: cardinalities and ranges are lower bounds"
        rows = format_count(self.rows, "row") + sample
        others = f", ids also read from {' and '.join(self.scan.inspected_parts)}" if self.scan.inspected_parts else ""
        lines = [f"Inferred from {self.uri} ({rows}{others}). Review it before training."]
        lines += [f"{part} was not inspected: {why}" for part, why in self.scan.skipped_parts.items()]
        data = [f"  reserve_columns: {to_flow_yaml(self.reserve_columns)}"] if self.reserve_columns else []
        if self.transforms:
            data += ["  transforms:", *(f"    - {to_flow_yaml(transform)}" for transform in self.transforms)]
        settings = ["data:", *data] if data else []
        if self.tasks:
            settings += ["tasks:", *(f"  - {to_flow_yaml(task)}" for task in self.tasks)]
        lines += ["Training also requires these settings:", *settings] if settings else []
        out = [f"# {_printable(line)}" for line in lines]
        out.append(self.schema.to_yaml({key: _printable(text) for key, text in self._comments().items()}).rstrip())
        for f in self.findings:
            if f.kind == "skipped":
                out.append(_printable(f"# skipped: {format_yaml_scalar(f.stats.name)} ({f.stats.type}): {f.why}"))
        return "\n".join(out) + "\n"

    def _comments(self) -> dict[tuple[str, str], str]:
        """Return the comments of the schema by (section, column or table)."""
        shared = {name: f"shares {t.name}'s table: {why}" for t in self.tables for name, why in t.reasons.items()}
        comments = {("tables", t.name): t.comment for t in self.tables}
        for f in self.findings:
            section = {"label": "labels", "dense": "dense", "sparse": "sparse"}.get(f.kind)
            if section:
                more = [shared[f.stats.name]] if section == "sparse" and f.stats.name in shared else []
                if section == "sparse" and has_history_name(f):
                    more.append("its name suggests a sequence: the most recent id must be last")
                comments[section, f.stats.name] = "; ".join([_describe(f), *more])
        return comments

    def show(self, out: str | None = None, overwrite: bool = False) -> None:
        """Print a table of the columns to stderr, and write the schema to stdout or a file.

        If the schema is written to a file, a command that trains with the schema is also printed to stderr.

        Args:
            out: Path of the file; None: stdout.
            overwrite: If True, replace an existing file.

        Raises:
            ConfigError: The file cannot be written, or exists and `overwrite` is False.
        """
        if out is not None:
            check_output_path(out, overwrite)
        self._print_table()
        write_schema(self.schema_yaml(), out)
        if out is not None:
            print(f"wrote {out}; review it, then run:", file=sys.stderr)
            print(f"  {self._command(out)}", file=sys.stderr)

    def _command(self, schema: str) -> str:
        """Return a shell command that trains with the schema file at path `schema`."""
        parts = {"test" if name == "test" else "valid": place for name, place in self.scan.inspected_parts.items()}
        settings = [f"data.train={self.uri}", *(f"data.{name}={place}" for name, place in parts.items())]
        settings.append(f"data.schema={schema}")
        if self.tasks:
            settings.append(f"tasks={to_flow_yaml(self.tasks)}")
        if self.reserve_columns:
            settings.append(f"data.reserve_columns={to_flow_yaml(self.reserve_columns)}")
        transforms = f"data.transforms=[{', '.join(map(to_flow_yaml, self.transforms))}]"
        is_long = len(transforms) > MAX_COMMAND_CHARS
        settings += [transforms] if self.transforms and not is_long else []
        command = shlex.join(["raytrec", "train", "jobs/own.yaml", *settings])
        return f"{command}  # add the data.transforms listed in {schema} to jobs/own.yaml" if is_long else command

    def _print_table(self) -> None:
        table = Table("column", "role", "reason", "nulls", "distinct", title_justify="left")
        table.title = to_plain_text(f"{hide(self.uri)}: {format_count(self.rows, 'row')}, {self.scan.listing}")
        for f in self.findings:
            why = "; ".join([f.why, *f.notes])
            counts = _nulls_text(f.stats), f.stats.distinct_text
            table.add_row(to_plain_text(f.stats.name), f.kind, to_plain_text(why), *counts)
        console = open_console(stderr=True)
        console.print(table)
        for f in self.findings:
            if f.kind == "label" and REASON_CONSTANT in f.notes:
                console.print(to_plain_text(f"warning: the label {f.stats.name} is {REASON_CONSTANT}"), soft_wrap=True)


def write_schema(text: str, out: str | None) -> None:
    """Write the text of a schema to the file `out`, or to stdout, whose encoding becomes UTF-8, if `out` is None.

    Raises:
        ConfigError: The file cannot be written.
    """
    if out is not None:
        with convert_os_errors("cannot write the schema", ConfigError, where=out):
            Path(out).write_text(text, encoding="utf-8")
        return
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # schemas are UTF-8, whatever the terminal's encoding
    sys.stdout.write(text)


def check_output_path(out: str, overwrite: bool) -> None:
    """Check that the path `out` does not prevent writing a schema, before any data is read.

    Raises:
        ConfigError: The path is a folder, its folder does not exist, or the file exists and `overwrite` is
            False.
    """
    path = Path(out)
    if path.is_dir():
        raise ConfigError("the output path is a folder", where=out, expected="a file: --out schema.yaml")
    if not path.parent.is_dir():
        raise ConfigError("there is no folder with this path", where=str(path.parent), do="create it, or correct --out")
    if path.exists() and not overwrite:
        raise ConfigError("the file exists", where=out, do="choose another --out, or replace the file with --force")


def to_flow_yaml(value: object) -> str:
    """Return a value of dicts, lists and scalars as YAML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {to_flow_yaml(inner)}' for key, inner in value.items())}}}"
    return f"[{', '.join(map(to_flow_yaml, value))}]" if isinstance(value, list) else format_yaml_scalar(value)


def _printable(text: str) -> str:
    """Return a text with spaces in place of unprintable characters and without secrets, for a YAML comment."""
    return "".join(c if c.isprintable() else " " for c in hide(text))


def _describe(finding: Finding) -> str:
    s = finding.stats
    parts = [s.type, f"{s.distinct_text} distinct", s.range_text, f"{_nulls_text(s)} null"]
    if s.is_list:
        parts.append(f"bags {format_bag_lengths(s)}")
    beyond = [part for part, other in s.stats_by_part.items() if other.high > s.high or other.low < s.low]
    if finding.kind == "sparse" and beyond and s.base != "text":
        parts.append(f"{s.lowest:.10g} to {s.highest:.10g} including {' and '.join(beyond)}")
    return ", ".join(p for p in [*parts, *finding.notes] if p)


def _nulls_text(s: ColumnStats) -> str:
    share = 100 * (s.nulls + (0 if s.is_list else s.nan)) / max(s.rows, 1)
    return f"{share:.0f} %" if share >= 10 else f"{share:.2g} %"


def format_bag_lengths(s: ColumnStats) -> str:
    """Return the range, mean and 95th percentile of list lengths, and the share of empty lists, as text.

    The result is "" for columns without lists or rows. Null lists count as empty.
    """
    if not s.is_list or not s.lengths.sum():
        return ""
    counts, lengths = s.lengths, np.flatnonzero(s.lengths)
    total = counts.sum()
    p95 = int(np.searchsorted(np.cumsum(counts), 0.95 * total))
    mean = s.values / total
    return f"{lengths[0]} to {lengths[-1]}, mean {mean:.3g}, p95 {p95}, empty {100 * counts[0] / total:.3g} %"
