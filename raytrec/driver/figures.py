"""What commands came to, as pairs of a name and a text: for tables of the console and of notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from raytrec.metrics.results import format_result

Pairs = list[tuple[str, str]]


def of_result(metrics: Mapping[str, Any]) -> Pairs:
    """Of run.Result."""
    return [(row.title, row.text) for row in format_result(metrics).values()]


def of_predictions(metrics: Mapping[str, Any]) -> Pairs:
    """Of predict.Predictions."""
    speed = metrics["predict.rows_per_s"]
    pairs = [
        ("rows", f"{metrics['predict.rows']:,}"),
        ("files", f"{metrics['predict.files']:,}"),
        ("rows per second", f"{speed:,.0f}" if speed else "nothing was left to do"),
        ("seconds", f"{metrics['seconds']:,.1f}"),
    ]
    if ids := metrics["predict.ids"]:
        pairs.append(("ids out of range", f"{metrics['predict.changed_ids']:,} of {ids:,}"))
    for key in ("skipped_rows", "skipped_files"):
        if count := metrics[f"predict.{key}"]:
            pairs.append((key.replace("_", " "), f"{count:,}"))
    return pairs


def of_index(metrics: Mapping[str, Any]) -> Pairs:
    """Of index.Indexed."""
    pairs = [
        ("items", f"{metrics['index.items']:,}"),
        ("width of a vector", f"{metrics['index.width']:,}"),
        ("index of faiss", metrics["index.faiss"] or "none: search is exact"),
    ]
    for name, value in metrics.items():
        if name.startswith("index.recall@"):
            pairs.append((f"its recall of the exact {name.partition('@')[2]}", f"{value:.4f}"))
    if count := metrics.get("index.queries"):
        pairs.append(("measured with queries", f"{count:,}"))
    return [*pairs, ("seconds", f"{metrics['seconds']:,.1f}")]


def as_html(name: str, pairs: Pairs, lines: Iterable[str]) -> str:
    """A table for a notebook, with lines below it."""
    cells = (f"<tr><td>{escape(title)}</td><td>{escape(text)}</td></tr>" for title, text in pairs)
    return f"<b>{escape(name)}</b><table>{''.join(cells)}</table><pre>{escape(chr(10).join(lines))}</pre>"
