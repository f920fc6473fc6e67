"""Looks at Parquet and writes the schema.yaml that fits it, with the transforms that it needs.

How a column's kind is inferred, in this order (column_roles.py):

    label      named with --label, or called label, target, click, …; other values than 0 to 1 become 0 and 1
               by a transform (binarize)
    skipped    missing in a file, or of types that have nothing in common; constant or only nulls; integers
               that differ in each row; dates and times (also integers that look like seconds since 1970)
    sparse     lists of integers or text (mean pooling; sequences where they are called history, clicked, …);
               text; numbers called …id; integers that fill their range, from wherever it begins, and repeat;
               integers of few values, or too large for quantities
    weights    lists of floats called like a sparse list: tags_weights or tags_weight for tags
    dense      other numbers

Fields of structs are columns: user.age. Features share a table where their values do and their names say so,
or where values are such (text, hashed ids) that it cannot be chance (shared_tables.py).

A table has max + 1 rows where ids fill their range. Where there is no validation and test data beside the
training data, or only a sample was read, it has a tenth more, and `out_of_range: hash` for ids that were not
seen. Text, hashed and negative ids are hashed, too, into ten times as many rows as there are values (of many:
twice as many).
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from raytrec.common.errors import ConfigError, SchemaError
from raytrec.common.storage import parts_beside, train_part
from raytrec.config.schema import Schema, scalar
from raytrec.inspection.column_roles import (
    LABEL_NAMES,
    Finding,
    fill_weights,
    find_role,
    is_called_label,
)
from raytrec.inspection.column_scan import Scan, scan_columns
from raytrec.inspection.column_stats import ColumnStats
from raytrec.inspection.shared_tables import SharedTable, find_tables, is_sequence

# Of transforms: in lists, all but fill_null remove nulls, whose weights would stay.
ORDER = ("fill_null", "cast", "drop_null", "binarize", "clip", "log")
LONGEST_COMMAND = 2000  # with transforms in it


@dataclass
class Inspection:
    """What was found in a folder.

    Attributes:
        uri: the place that was looked at.
        findings: one for each column, in the files' order.
        schema: the schema that fits what comes out of the transforms.
        transforms: data.transforms, without which training refuses columns of the schema.
        tables: why features share tables.
        scan: what was looked at.
    """

    uri: str
    findings: list[Finding]
    schema: Schema
    transforms: list[dict]
    tables: list[SharedTable]
    scan: Scan

    @property
    def rows(self) -> int:
        """Rows of the training data that were looked at."""
        return self.scan.rows

    @property
    def whole(self) -> bool:
        """Whether all rows were looked at."""
        return self.scan.whole

    def schema_yaml(self) -> str:
        """schema.yaml, with the transforms and a comment for every column."""
        sampled = "" if self.whole else ", a sample: cardinalities and ranges are lower bounds"
        beside = f", ids also from {' and '.join(self.scan.also)}" if self.scan.also else ""
        lines = [
            f"Inferred from {self.uri} ({self.rows:,} rows{sampled}{beside}). Look it over before you train."
        ]
        lines += [f"{part} was not looked at: {why}" for part, why in self.scan.not_seen.items()]
        if self.transforms:
            lines += ["Training needs these in its configuration, too:", "data:", "  transforms:"]
            lines += [f"    - {_flow(transform)}" for transform in self.transforms]
        out = [f"# {_printable(line)}" for line in lines]
        out.append(
            self.schema.to_yaml({key: _printable(text) for key, text in self._comments().items()}).rstrip()
        )
        for f in self.findings:
            if f.kind == "skipped":
                out.append(_printable(f"# skipped: {scalar(f.stats.name)} ({f.stats.type}): {f.why}"))
        return "\n".join(out) + "\n"

    def _comments(self) -> dict[tuple[str, str], str]:
        """(section, column) → its comment."""
        shared = {
            name: f"shares {t.name}'s table: {why}" for t in self.tables for name, why in t.reasons.items()
        }
        found = {}
        for f in self.findings:
            section = {"label": "labels", "dense": "dense", "sparse": "sparse"}.get(f.kind)
            if section:
                more = [shared[f.stats.name]] if section == "sparse" and f.stats.name in shared else []
                if section == "sparse" and is_sequence(f):
                    more.append("its name says sequence: the most recent id has to be the last")
                found[section, f.stats.name] = "; ".join([_describe(f), *more])
        return found

    def show(self, out: str | None = None, overwrite: bool = False) -> None:
        """A table of the columns on stderr; the schema on stdout or in a file.

        Raises:
            ConfigError: the file exists, or cannot be written.
        """
        self._print_table()
        if out is None:
            if hasattr(sys.stdout, "reconfigure"):
                sys.stdout.reconfigure(encoding="utf-8")  # as a schema is read, whatever the terminal's is
            sys.stdout.write(self.schema_yaml())
            return
        path = Path(out)
        if path.exists() and not overwrite:
            raise ConfigError(
                "the file exists", where=out, do="choose another --out, or replace it with --force"
            )
        try:
            path.write_text(self.schema_yaml(), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write the schema: {error.strerror}", where=out) from None
        print(f"wrote {out}; look it over, then:", file=sys.stderr)
        print(f"  {self._command(out)}", file=sys.stderr)

    def _command(self, schema: str) -> str:
        """The command that trains with a schema file."""
        parts = {"test" if name == "test" else "valid": place for name, place in self.scan.also.items()}
        settings = [f"data.train={self.uri}", *(f"data.{name}={place}" for name, place in parts.items())]
        settings.append(f"data.schema={schema}")
        transforms = f"data.transforms=[{', '.join(map(_flow, self.transforms))}]"
        if self.transforms and len(transforms) <= LONGEST_COMMAND:
            settings.append(transforms)
        command = shlex.join(["raytrec", "train", "jobs/own.yaml", *settings])
        if self.transforms and len(transforms) > LONGEST_COMMAND:
            command += f"  # with the data.transforms that {schema} names in jobs/own.yaml"
        return command

    def _print_table(self) -> None:
        from rich.table import Table

        from raytrec.common.terminal import open_console, plain

        table = Table(title=plain(f"{self.uri}: {self.rows:,} rows"), title_justify="left")
        for heading in ("column", "role", "because", "nulls", "distinct"):
            table.add_column(heading)
        for f in self.findings:
            why = "; ".join([f.why, *f.notes])
            table.add_row(plain(f.stats.name), f.kind, plain(why), f.stats.nulls_text, f.stats.distinct_text)
        open_console(stderr=True).print(table)


def inspect(
    uri: str, *, dim: int = 16, labels: list[str] | None = None, max_rows: int | None = None
) -> Inspection:
    """Reads Parquet row group by row group and infers a schema.

    Args:
        uri: folder or file; local, s3:// or gs://. Of a folder with train/, valid/, test/ it looks at train/,
            and at the others for the ids, nulls and types that are there; so it does of a folder train/ with
            such folders beside it.
        dim: width of the tables.
        labels: columns to predict; default: a column with a usual name.
        max_rows: look at about this many rows of each, in row groups spread over the files.

    Raises:
        DataError: nothing there, or not Parquet. SchemaError: no label or no sparse feature can be told.
    """
    uri = train_part(uri)
    scan = scan_columns(
        uri, max_rows, parts_beside(uri), lambda name: name in labels if labels else is_called_label(name)
    )
    names = [column.name for column in scan.columns]
    if missing := [label for label in labels or () if label not in names]:
        raise SchemaError(f"there is no column '{missing[0]}'", where=uri, expected=", ".join(names[:50]))
    plain_labels = any(is_called_label(c.name) and c.is_probability for c in scan.columns)
    findings = [find_role(column, labels, plain_labels) for column in scan.columns]
    _check_some_label(findings, uri)
    _pair_weights(findings)
    tables = find_tables(findings)
    all_seen = bool(scan.also) and scan.whole
    schema = _schema(findings, tables, dim, all_seen, uri)
    return Inspection(uri, findings, schema, _transforms(findings), tables, scan)


def _check_some_label(findings: list[Finding], uri: str) -> None:
    if any(f.kind == "label" for f in findings):
        return
    likely = [f.stats.name for f in findings if f.stats.is_probability and f.stats.distinct == 2]
    ratings = [f.stats.name for f in findings if f.kind in ("dense", "sparse") and _could_be_rating(f.stats)]
    raise SchemaError(
        "cannot tell which column is the label",
        where=uri,
        expected=f"a column called {', '.join(LABEL_NAMES[:5])} or the like",
        do=f"name it with --label COLUMN; columns of 0 and 1 are: {', '.join(likely[:20]) or 'none'}"
        + (
            f"; with few values, which a transform makes 0 and 1: {', '.join(ratings[:20])}"
            if ratings
            else ""
        ),
    )


def _could_be_rating(s: ColumnStats) -> bool:
    return not s.is_list and s.few is not None and 2 <= len(s.few) <= 11 and not s.is_probability


def _pair_weights(findings: list[Finding]) -> None:
    """Lists of floats that are named after a list of ids are its weights, and keep their length."""
    lists = {f.stats.name: f for f in findings if f.kind == "sparse" and f.stats.is_list}
    for f in findings:
        name = f.stats.name
        owner = name.removesuffix("s").removesuffix("_weight")
        owner = f"{name.removesuffix('.value')}.key" if name.endswith(".value") else owner  # of a map
        floats = f.stats.is_list and f.stats.base in ("float", "decimal") and not f.stats.trouble
        if floats and owner in lists and owner != name:
            f.kind, f.why, f.transforms = "weights", f"of {owner}", []
            fill_weights(f)
            _keep_length(lists[owner])


def _keep_length(f: Finding) -> None:
    """Nulls in a list that has weights become an id of their own, instead of going."""
    if not any(t["do"] == "drop_null" for t in f.transforms):
        return
    f.transforms = [t for t in f.transforms if t["do"] != "drop_null"]
    s = f.stats
    if s.base == "text":
        f.needs("fill_null", value="")
        return
    s.high = max(int(s.highest) + 1, 0)
    f.needs("fill_null", value=s.high)


def _schema(findings: list[Finding], tables: list[SharedTable], dim: int, all_seen: bool, uri: str) -> Schema:
    if not tables:
        raise SchemaError(
            "no column can be looked up in a table",
            where=uri,
            expected="integer ids, lists of them, or text",
            do="make ids of a number in data.transforms: {do: bucketize, columns: [NUMBER], boundaries: […]}",
        )
    of_column = {f.stats.name: table for table in tables for f in table.members}
    weights = {f.why.removeprefix("of "): f.stats.name for f in findings if f.kind == "weights"}
    sparse = {}
    for f in findings:
        if f.kind == "sparse":
            name = f.stats.name
            pooling = "sequence" if is_sequence(f) else "mean" if f.stats.is_list else "sum"
            sparse[name] = {"table": of_column[name].name, "pooling": pooling, "weights": weights.get(name)}
    values = {
        "labels": [f.stats.name for f in findings if f.kind == "label"],
        "dense": [f.stats.name for f in findings if f.kind == "dense"],
        "sparse": sparse,
        "tables": {table.name: {"dim": dim, **table.size(all_seen)} for table in tables},
    }
    return Schema.parse(values, uri)


def _transforms(findings: list[Finding]) -> list[dict]:
    """What all columns need, columns of the same need together."""
    together: dict[str, dict] = {}
    for transform in (t for f in findings if f.kind != "skipped" for t in f.transforms):
        settings = {key: value for key, value in transform.items() if key != "columns"}
        known = together.setdefault(_flow(settings), {"do": transform["do"], "columns": [], **settings})
        known["columns"] += transform["columns"]
    return sorted(together.values(), key=lambda t: ORDER.index(t["do"]))


def _flow(value: object) -> str:
    """YAML on one line."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(inner)}' for key, inner in value.items())}}}"
    return f"[{', '.join(map(_flow, value))}]" if isinstance(value, list) else scalar(value)


def _printable(text: str) -> str:
    """Text that can stand in a comment."""
    return "".join(c if c.isprintable() else " " for c in text)


def _describe(finding: Finding) -> str:
    s = finding.stats
    parts = [s.type, f"{s.distinct_text} distinct", s.range_text, f"{s.nulls_text} null"]
    if s.is_list:
        parts.append(f"bags {s.bag_text}")
    beyond = [part for part, other in s.elsewhere.items() if other.high > s.high or other.low < s.low]
    if finding.kind == "sparse" and beyond and s.base != "text":
        parts.append(f"{s.lowest:.10g} to {s.highest:.10g} with {' and '.join(beyond)}")
    return ", ".join(p for p in [*parts, *finding.notes] if p)
