"""Assign a role in the schema to each column, with the transforms that it needs; propose.py states the rules."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from raytrec.common.errors import SchemaError
from raytrec.common.formatting import format_count, format_percent
from raytrec.config.schema import advise_transform, format_yaml_scalar
from raytrec.inspection.column_stats import ColumnStats, undo_log

LABEL_NAMES = tuple(
    "label labels target click clicked is_click is_clicked converted conversion y".split()  # noqa: SIM905
)
# Texts that mean yes. If no value of a label matches, its rarest value is positive.
POSITIVE_TEXT = re.compile(
    r"(?i)[+]?0*1(\.0*)?|t|true|y|yes|on|pos|positive|click(ed)?|buy|bought|purchased?|liked?|convert(ed)?"
    "|conversion|success|good|win|ja|oui|si|sí"
)
MAX_LABEL_VALUES = 20  # a text column with more values is not a label
# Unit → range [low, high) of integers that could be times since 1970 in this unit.
TIMES = {"s": (10**8, 10**10), "ms": (10**11, 10**13), "us": (10**14, 10**16), "ns": (10**17, 10**19)}
MAX_ID_RANGE_FACTOR = 10  # ids fill their range if its width is below this factor × the number of distinct values
MAX_CODE_VALUES = 100  # maximum number of distinct values of codes and ordinals
REASON_CONSTANT = "constant: the model cannot learn anything from it"
MAX_EXACT_INTEGER = 2**53  # repeated integers of at least this magnitude are ids, not quantities
MAX_NAME_CHARS = 1000  # YAML keys have at most 1,024 characters


@dataclass
class Finding:
    """Role of a column in the proposed schema.

    Attributes:
        stats: Statistics of the column.
        kind: Role of the column: label, dense, sparse, weights, reserved or skipped.
        why: Reason for the role, as text for the user.
        notes: Notes on the column for the user, such as "3 nulls inside lists".
        transforms: Entries of data.transforms that the column needs.
    """

    stats: ColumnStats
    kind: str
    why: str
    notes: list[str] = field(default_factory=list)
    transforms: list[dict] = field(default_factory=list)

    def add_transform(self, do: str, **settings) -> Finding:
        """Add the transform `do` with its settings for the column to `transforms`, and return this finding."""
        self.transforms.append({"do": do, "columns": [self.stats.name], **settings})
        return self


def find_role(s: ColumnStats, labels: list[str], other_labels: bool) -> Finding:
    """Return the finding for a column that is not reserved.

    Args:
        s: Statistics of the column.
        labels: Names of the columns to predict; []: labels are recognized by name (LABEL_NAMES).
        other_labels: True if some column with a label's name contains only numbers in [0, 1]; columns with such a
            name and other values are then skipped.

    Raises:
        SchemaError: The column is a label, by `labels` or by its name, but its values cannot be labels.
    """
    if s.name in labels or (not labels and has_label_name(s.name)):
        if s.is_probability or labels or not other_labels:
            return _label(s, "named with --label" if labels else "its name")
        values = f" ({_values(s)})" if _values(s) else ""
        kind = "a list" if s.is_list else f"not a column of numbers in [0, 1]{values}"
        return Finding(s, "skipped", s.trouble or f"named like a label, but {kind}")
    if s.trouble or s.lacking or len(format_yaml_scalar(s.name)) > MAX_NAME_CHARS:
        return Finding(s, "skipped", s.trouble or s.lacking or "its name is too long for YAML")
    return _add_hints(_feature(s))


def find_reserved(s: ColumnStats) -> Finding:
    """Return the finding for a reserved column, which is kept with its rows and is not a feature.

    Raises:
        SchemaError: The column is a list, is missing in a file, cannot be read, or has an unsupported type.
    """
    if trouble := s.trouble or s.lacking or (f"it is of type {s.type}" if s.is_list else None):
        raise SchemaError(
            f"column '{s.name}' cannot be reserved: {trouble}",
            where=f"column {s.name}",
            expected="one value per row, with the same type in all files",
            do="pass another column with --reserve COLUMN",
        )
    return Finding(s, "reserved", "named with --reserve: not a feature")


def has_label_name(name: str) -> bool:
    """Return True if a column name is in LABEL_NAMES, in upper or lower case."""
    return name.lower() in LABEL_NAMES


def _feature(s: ColumnStats) -> Finding:
    if not s.values:
        return Finding(s, "skipped", "only nulls or empty lists" if s.is_list else "only nulls")
    if s.distinct <= 1 and not s.nulls and not s.nan and not s.is_list:
        return Finding(s, "skipped", "constant")
    unit = _find_epoch_unit(s)
    if s.base == "time" or unit:
        return Finding(s, "skipped", f"{'possibly ' * bool(unit)}a time; to use it as a feature, {_time_hint(s, unit)}")
    if s.base == "text" and s.is_unique:
        return Finding(s, "skipped", "a different value in (almost) each row")
    if s.base == "text" or (s.is_list and s.base == "integer"):
        return Finding(s, "sparse", "a list of ids" if s.is_list else "text")
    if s.is_whole and s.base != "integer" and (why := _has_id_name(s) if s.is_list else _explain_id(s)):
        finding = Finding(s, "sparse", f"{why}; whole numbers")
        largest = max(abs(s.lowest), abs(s.highest))
        if largest >= 2**63:
            return Finding(s, "skipped", "whole numbers beyond int64; to use them as ids, write them as text")
        exact = s.base == "float" and largest < MAX_EXACT_INTEGER
        return finding if exact and not s.is_list else finding.add_transform("cast", to="int64")
    if s.is_list and s.base in ("float", "decimal"):
        return Finding(s, "skipped", "a list of floats that are not a feature's weights")
    if s.is_list and s.base == "bool":
        hint = advise_transform("cast", s.name, to="int64")
        return Finding(s, "skipped", f"a list of bools; to use them as ids, {hint}, and a sparse feature to the schema")
    if s.is_list:
        return Finding(s, "skipped", f"type {s.type} is not supported")
    if s.base == "integer" and (why := _explain_id(s)):
        return Finding(s, "sparse", why)
    if s.base == "integer" and s.distinct == s.values > 100:
        return Finding(s, "skipped", "a different value in (almost) each row")
    if s.count("infinite") and s.lowest > s.highest:
        return Finding(s, "skipped", "no finite number")
    return Finding(s, "dense", "a number")


def _add_hints(f: Finding) -> Finding:
    """Add the notes on a column to its finding, and the transforms that it needs; return the finding."""
    s = f.stats
    if len(s.types) > 1:
        f.notes.append(f"its type differs: {'; '.join(f'{kind} in {path}' for kind, path in s.types.items())}")
    if s.nulls_inside:
        f.notes.append(f"{format_count(s.count('nulls_inside'), 'null')} inside lists")
    if f.kind == "sparse" and s.mixed and not f.transforms:
        f.add_transform("cast", to="string" if s.base == "text" else "int64")
    if f.kind == "sparse" and s.count("nulls_inside"):
        f.add_transform("drop_null")
    return _require_finite_numbers(f) if f.kind == "dense" else f


def _require_finite_numbers(f: Finding) -> Finding:
    s = f.stats
    if s.mixed:
        f.add_transform("cast", to="float32")
    if s.count("nulls") or s.count("nan"):
        what = [format_count(s.count("nulls"), "null")] if s.count("nulls") else []
        what += [f"{s.count('nan'):,} NaN"] if s.count("nan") else []
        f.notes.append(f"{' and '.join(what)}: replaced by the mean (scale)")
    if s.count("infinite"):
        f.notes.append(f"{format_count(s.count('infinite'), 'infinite value')}: clipped to the finite range")
        f.add_transform("clip", low=s.lowest, high=s.highest)
    return f


def fill_weights(f: Finding) -> None:
    """Add the transforms that make the weights in a column of lists finite; nulls and NaN in lists become 0."""
    s = f.stats
    if s.mixed or s.base == "decimal":
        f.add_transform("cast", to="float32")
    if s.count("nulls_inside") or s.count("nan"):
        f.add_transform("fill_null", value=0)
    if s.count("infinite"):
        low, high = (s.lowest, s.highest) if s.lowest <= s.highest else (0, 1)  # else: no finite weight
        f.add_transform("clip", low=low, high=high)


def _label(s: ColumnStats, why: str) -> Finding:
    """Return the finding for a label, with a transform (binarize) if values are text or outside [0, 1].

    Raises:
        SchemaError: The values cannot be labels.
    """
    f = Finding(s, "label", why)
    fits = s.values and not s.is_list and s.base in ("integer", "float", "bool", "decimal", "text")
    if s.trouble or not fits:
        trouble = s.trouble or (f"it is of type {s.type}" if s.values or s.is_list else "it contains only nulls")
        raise SchemaError(
            f"column '{s.name}' cannot be the label: {trouble}",
            where=f"column {s.name}",
            expected="a number or a text in each row of every file",
            do="write the schema of requests by hand (docs/requests.md), because inspect reads rows with one example"
            if s.is_list
            else "pass another column with --label COLUMN",
        )
    if s.distinct == 1:
        f.notes.append(REASON_CONSTANT)
    if missing := s.count_missing():
        f.notes.append(f"{format_count(missing, 'null')} or NaN: rows without a label (`nulls: skip` in its task)")
    if infinite := s.count("infinite"):
        rejected = ": rejected, or skipped with data.on_error=skip" * s.is_probability
        f.notes.append(f"{format_count(infinite, 'infinite value')}{rejected}")
    if s.base == "text":
        return _label_of_text(f)
    if s.mixed:
        f.add_transform("cast", to="float32")
    if s.is_probability:
        return f
    threshold = _threshold(s)
    share = _share(s, lambda v: v >= threshold)
    f.notes.append(f"{_values(s)}, not 0 and 1: choose the threshold{share}, or loss mse without binarize")
    return f.add_transform("binarize", at_least=threshold)


def _threshold(s: ColumnStats) -> float:
    """Return the lowest value in the upper quarter of a label's range, or a typical value if `few` is None."""
    if s.few is None:
        scale = s.scale()
        least = float(undo_log(np.array(scale.mean))) if scale.log else scale.mean
    else:
        start = s.lowest + 0.75 * (s.highest - s.lowest)
        least = min((v for v in s.few if v >= start), default=start)
    return int(least) if float(least).is_integer() else float(f"{least:.6g}")


def _label_of_text(f: Finding) -> Finding:
    s = f.stats
    if s.few is None or not 0 < len(s.few) <= MAX_LABEL_VALUES:
        raise SchemaError(
            f"column '{s.name}' cannot be the label: it contains {s.distinct_text} distinct texts",
            where=f"column {s.name}",
            expected=f"numbers, or at most {MAX_LABEL_VALUES} distinct texts, some of which mean 1",
            do="pass another column with --label COLUMN; or write the schema by hand, and convert texts to 0 and 1: "
            + advise_transform("binarize", s.name, positive="[TEXT, …]"),
        )
    counts = {v.decode(errors="replace") if isinstance(v, bytes) else str(v): n for v, n in s.few.items()}
    positive = [text for text in counts if POSITIVE_TEXT.fullmatch(text.strip())] or [min(counts, key=counts.get)]
    share = _share(s, lambda v: v in positive)
    chosen = ", ".join(sorted(positive))
    f.notes.append(f"text ({_values(s)}): choose the texts that mean 1, currently {chosen}{share}")
    if s.mixed:
        f.add_transform("cast", to="string")
    return f.add_transform("binarize", positive=sorted(positive))


def _share(s: ColumnStats, positive) -> str:
    if not s.few:
        return ""
    share = sum(n for value, n in s.few.items() if positive(value)) / max(sum(s.few.values()), 1)
    return f" ({format_percent(share)} of the rows are currently 1)"


def _values(s: ColumnStats) -> str:
    if s.base == "text":
        return ", ".join(str(v)[:40] for v in sorted(s.few or ())[:8])
    return s.range_text


def _time_hint(s: ColumnStats, unit: str | None) -> str:
    if "duration" in s.type:
        return advise_transform("age", s.name, unit="days") + f", and {format_yaml_scalar(s.name)} to the schema"
    part = "weekday" if "date" in s.type else "hour"
    since = {"since_1970": unit} if unit else {}
    into = format_yaml_scalar(f"{s.name}_{part}")
    return advise_transform("date_part", s.name, part=part, **since, into=f"[{into}]") + f", and {into} to the schema"


def words(name: str) -> list[str]:
    """Split a name into lowercase words: [user, id] for user_id, userId and user.id."""
    return [w.lower() for w in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W_A-Z]+|[^\W_]+", name)]


def _has_id_name(s: ColumnStats) -> str | None:
    return "its name" if (w := words(s.name)) and w[-1] in ("id", "ids") else None


def is_ordinal(s: ColumnStats) -> bool:
    """Return True for a column without lists, such as an age, of at most MAX_CODE_VALUES values, not named like ids."""
    return s.distinct <= MAX_CODE_VALUES and not s.is_list and not _has_id_name(s)


def _explain_id(s: ColumnStats) -> str | None:
    """Return the reason why a column of whole numbers contains ids, or None if it does not."""
    if why := _has_id_name(s):
        return why
    repeat, span = s.distinct * 2 <= s.values, s.highest - s.lowest
    if s.lowest >= 0 and s.highest < MAX_ID_RANGE_FACTOR * s.distinct and repeat:
        return "integers that fill their range"
    if s.lowest > 0 and span < MAX_ID_RANGE_FACTOR * s.distinct and repeat:
        return f"integers that fill a range starting at {s.lowest:,}"
    if max(abs(s.lowest), abs(s.highest)) >= MAX_EXACT_INTEGER and repeat:
        return "integers too large to be quantities"
    if s.distinct <= MAX_CODE_VALUES and s.lowest > span and s.distinct * 20 <= s.values:
        return f"{s.distinct} codes that occur repeatedly"
    return None


def _find_epoch_unit(s: ColumnStats) -> str | None:
    """Return the unit in TIMES in which a column's whole numbers could be times since 1970, or None."""
    if s.is_list or not s.is_whole or _has_id_name(s):
        return None
    return next((u for u, (low, high) in TIMES.items() if low <= s.low and s.high < high), None)
