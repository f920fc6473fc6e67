"""Looks at Parquet and writes the schema.yaml that fits it.

How a column's kind is inferred, in this order:

    label      named with --label, or called label, target, click, … with numbers in [0, 1]
    left out   constant or only nulls; integers that differ in each row; dates and times (also integers that
               look like seconds since 1970)
    sparse     lists of integers or text (mean pooling); text; integers called …id; integers ≥ 0 that fill
               their range (max < 10 × distinct values) and repeat
    weights    lists of floats called like a sparse list: tags_weights or tags_weight for tags
    dense      other numbers

A table has max + 1 rows where ids fill their range; else (text, hashed ids, negative ids) twice the distinct
values and `out_of_range: hash`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

from raytrec.column_stats import ColumnStats, scan_columns
from raytrec.errors import ConfigError, SchemaError
from raytrec.schema import Schema, table_name
from raytrec.storage import train_part

LABEL_NAMES = (
    "label",
    "labels",
    "target",
    "click",
    "clicked",
    "is_click",
    "is_clicked",
    "converted",
    "conversion",
    "y",
)
TIMES = ((10**8, 10**10), (10**11, 10**13), (10**14, 10**16))  # seconds, ms and µs since 1970
SPARSE_FILL = 10  # an id column's max is below this × its distinct values


@dataclass
class Finding:
    """One column: what it is taken for, why, and what to look out for."""

    stats: ColumnStats
    kind: str  # label, dense, sparse, weights or left out
    why: str
    notes: list[str] = field(default_factory=list)


@dataclass
class Inspection:
    """What was found in a folder.

    Attributes:
        uri: the place that was looked at.
        findings: one for each column, in the files' order.
        schema: the schema that fits.
        rows: rows looked at; `whole` says whether these are all.
    """

    uri: str
    findings: list[Finding]
    schema: Schema
    rows: int
    whole: bool

    def schema_yaml(self) -> str:
        """schema.yaml, with a comment for every column."""
        by_name = {f.stats.name: f for f in self.findings}
        sampled = "" if self.whole else ", a sample: cardinalities and ranges are lower bounds"
        lines = [f"# Inferred from {self.uri} ({self.rows:,} rows{sampled}). Look it over before you train."]
        section = ""
        for line in self.schema.to_yaml().splitlines():
            name = line.strip().partition(":")[0].strip("'\"")
            if not line.startswith(" "):
                section = name
                for column in self.schema.dense if section == "dense" else ():
                    lines.append(f"# {column}: {_describe(by_name[column])}")
            elif section == "sparse":
                line = f"{line}  # {_describe(by_name[name])}"
            lines.append(line)
        for finding in self.findings:
            if finding.kind == "left out":
                lines.append(f"# left out: {finding.stats.name} ({finding.stats.type}): {finding.why}")
        return "\n".join(lines) + "\n"

    def show(self, out: str | None = None, overwrite: bool = False) -> None:
        """A table of the columns on stderr; the schema on stdout or in a file.

        Raises:
            ConfigError: the file exists, or cannot be written.
        """
        self._print_table()
        if out is None:
            sys.stdout.write(self.schema_yaml())
            return
        path = Path(out)
        if path.exists() and not overwrite:
            raise ConfigError(
                "the file exists", where=out, do="choose another --out, or replace it with --force"
            )
        try:
            path.write_text(self.schema_yaml())
        except OSError as error:
            raise ConfigError(f"cannot write the schema: {error.strerror}", where=out) from None
        print(f"wrote {out}; look it over, then:", file=sys.stderr)
        print(f"  raytrec train jobs/own.yaml data.train={self.uri} data.schema={out}", file=sys.stderr)

    def _print_table(self) -> None:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.uri}: {self.rows:,} rows", title_justify="left")
        for heading in ("column", "taken for", "because", "nulls", "distinct"):
            table.add_column(heading)
        for f in self.findings:
            why = "; ".join([f.why, *f.notes])
            table.add_row(f.stats.name, f.kind, why, f.stats.nulls_text, f.stats.distinct_text)
        Console(stderr=True).print(table)


def inspect(
    uri: str, *, dim: int = 16, labels: list[str] | None = None, max_rows: int | None = None
) -> Inspection:
    """Reads Parquet row group by row group and infers a schema.

    Args:
        uri: folder or file; local, s3:// or gs://. Of a folder with train/, valid/, test/ it looks at train/.
        dim: width of the tables.
        labels: columns to predict; default: a column with a usual name.
        max_rows: look at about this many rows, in row groups spread over the files.

    Raises:
        DataError: nothing there, or not Parquet. SchemaError: no label or no sparse feature can be told.
    """
    uri = train_part(uri)
    columns, rows, whole = scan_columns(uri, max_rows)
    findings = [_finding(column, labels, columns) for column in columns]
    _pair_weights(findings)
    return Inspection(uri, findings, _schema(findings, dim, labels, uri), rows, whole)


def _finding(s: ColumnStats, labels: list[str] | None, columns: list[ColumnStats]) -> Finding:
    if s.name in (labels or ()) or (not labels and s.name.lower() in LABEL_NAMES and s.is_probability):
        return Finding(s, "label", "named with --label" if labels else "its name")
    if s.distinct == 0 or (s.distinct == 1 and not s.nulls and not s.is_list):
        return Finding(s, "left out", "only nulls" if s.distinct == 0 else "constant")
    if s.base == "time" or (s.base == "integer" and not s.is_list and _looks_like_time(s)):
        return Finding(s, "left out", "a time; derive features such as the hour from it")
    if s.base == "text" or (s.is_list and s.base == "integer"):
        return Finding(s, "sparse", "a list of ids" if s.is_list else "text")
    if s.is_list and s.base == "float":
        return Finding(s, "left out", "a list of floats that is no feature's weights")
    if s.base == "integer" and _is_id(s):
        why = "its name" if _named_id(s) else "integers that fill their range"
        return Finding(s, "sparse", why)
    if s.base == "integer" and not s.is_list and s.distinct == s.values > 100:
        return Finding(s, "left out", "another value in each row")
    if s.base in ("integer", "float", "bool") and not s.is_list:
        notes = [f"{s.nulls:,} nulls: training refuses them, fill them first"] if s.nulls else []
        if s.not_finite:
            notes.append(f"{s.not_finite:,} NaN or infinite: training refuses them")
        if max(abs(s.low), abs(s.high)) > 1000:
            notes.append("large values: scale them first, for example by log(1 + x)")
        return Finding(s, "dense", "a number", notes)
    return Finding(s, "left out", f"type {s.type} is not supported")


def _named_id(s: ColumnStats) -> bool:
    return s.name.lower() == "id" or s.name.lower().endswith("_id") or s.name.endswith("Id")


def _is_id(s: ColumnStats) -> bool:
    fills = s.low >= 0 and s.high < SPARSE_FILL * s.distinct
    return _named_id(s) or (fills and s.distinct * 2 <= s.values)


def _looks_like_time(s: ColumnStats) -> bool:
    return not _named_id(s) and any(low <= s.low and s.high < high for low, high in TIMES)


def _pair_weights(findings: list[Finding]) -> None:
    lists = {f.stats.name: f for f in findings if f.kind == "sparse" and f.stats.is_list}
    for f in findings:
        owner = f.stats.name.removesuffix("s").removesuffix("_weight")
        if f.stats.is_list and f.stats.base == "float" and owner in lists and owner != f.stats.name:
            f.kind, f.why = "weights", f"of {owner}"


def _schema(findings: list[Finding], dim: int, labels: list[str] | None, uri: str) -> Schema:
    names = [f.stats.name for f in findings]
    if missing := [label for label in labels or () if label not in names]:
        raise SchemaError(f"there is no column '{missing[0]}'", where=uri, expected=", ".join(names))
    chosen = [f.stats.name for f in findings if f.kind == "label"]
    if not chosen:
        likely = [f.stats.name for f in findings if f.stats.is_probability and f.stats.distinct == 2]
        raise SchemaError(
            "cannot tell which column is the label",
            where=uri,
            expected=f"a column called {', '.join(LABEL_NAMES[:5])} or the like",
            do=f"name it with --label COLUMN; columns of 0 and 1 are: {', '.join(likely) or 'none'}",
        )
    sparse, tables = {}, {}
    weights = {f.why.removeprefix("of "): f.stats.name for f in findings if f.kind == "weights"}
    for f in findings:
        if f.kind != "sparse":
            continue
        s = f.stats
        table = table_name(s.name.removesuffix("_id"))
        sparse[s.name] = {"table": table, "pooling": "mean" if s.is_list else "sum"}
        if s.name in weights:
            sparse[s.name]["weights"] = weights[s.name]
        tables[table] = {"dim": dim, **_size(s)}
    if not sparse:
        raise SchemaError(
            "no column can be looked up in a table", where=uri, expected="integer ids, lists of them, or text"
        )
    dense = [f.stats.name for f in findings if f.kind == "dense"]
    return Schema.parse({"labels": chosen, "dense": dense, "sparse": sparse, "tables": tables}, uri)


def _size(s: ColumnStats) -> dict:
    if s.base == "integer" and s.low >= 0 and s.high < max(SPARSE_FILL * s.distinct, 1000):
        return {"rows": int(s.high) + 1}
    return {"rows": max(2 * s.distinct, 100), "out_of_range": "hash"}


def _describe(finding: Finding) -> str:
    s = finding.stats
    parts = [s.type, f"{s.distinct_text} distinct", s.range_text, f"{s.nulls_text} null"]
    if s.is_list:
        parts.append(f"bags {s.bag_text}")
    return ", ".join(p for p in [*parts, *finding.notes] if p)
