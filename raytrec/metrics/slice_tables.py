"""The figures of slices in result.json (over_ranks/slices.py), as tables for people. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raytrec.common.formatting import number

SLICES = "eval.slices"  # task → column → slices, largest, worst
COLUMNS = {  # of a record
    "slice": ("value", "{}"),
    "rows": ("rows", "{:,.0f}"),
    "auc": ("AUC", "{:.4f}"),
    "auc_bound": ("off by at most", "{:.1e}"),
    "calibration": ("calibration", "{:.4f}"),
}


@dataclass(frozen=True)
class SliceTable:
    """Some slices of one task by one column.

    Attributes:
        title: which these are.
        columns: their names.
        rows: of each slice its texts, and its values as numbers (NaN where there is none).
    """

    title: str
    columns: list[str]
    rows: list[list[tuple[str, float]]]


def slice_tables(result: Mapping[str, Any]) -> list[SliceTable]:
    """The largest and the worst slices of a result, task by task; what is no record is passed over."""
    tasks = _mapping(result.get(SLICES))
    return [
        SliceTable(f"{task}: {name} of {_count(found)} values of {column}", *_table(records))
        for task, columns in tasks.items()
        for column, found in _mapping(columns).items()
        for name in ("largest", "worst")
        if (records := _records(_mapping(found).get(name)))
    ]


def _table(records: list[dict[str, Any]]) -> tuple[list[str], list[list[tuple[str, float]]]]:
    shown = {key: about for key, about in COLUMNS.items() if any(key in record for record in records)}
    rows = [[_cell(record.get(key), form) for key, (_, form) in shown.items()] for record in records]
    return [title for title, _ in shown.values()], rows


def _cell(value: Any, form: str) -> tuple[str, float]:
    as_number = number(value)
    if isinstance(value, str) and form == "{}":
        return value, as_number
    return ("–" if as_number != as_number else form.format(as_number)), as_number


def _records(values: Any) -> list[dict[str, Any]]:
    return [each for each in values if isinstance(each, dict)] if isinstance(values, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _count(found: Any) -> str:
    return COLUMNS["rows"][1].format(number(_mapping(found).get("slices")))
