"""The table of docs/quality.md, from benchmarks/results/quality.json."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

COLUMNS = (
    "data",
    "model",
    "metric",
    "mean ± spread",
    "seeds",
    "published",
    "parameters",
    "rows/s",
    "s a run",
)


def lines_of(rows: list, results: dict) -> list[tuple[str, ...]]:
    """A line for each figure of each row that has runs."""
    lines = []
    for row in rows:
        runs = results.get(row.name, {}).get("runs", [])
        for place, name in enumerate(row.metrics if runs else []):
            values = [run["figures"][name] for run in runs]
            first = (
                (row.data, f"{row.model}, {row.note}" if row.note else row.model) if not place else ("", "")
            )
            fastest = min(runs, key=lambda run: run["seconds"])
            speed = f"{fastest['rows_per_s']:,}" if "rows_per_s" in fastest else ""
            costs = f"{runs[0]['parameters']:,}", speed, f"{fastest['seconds']:,.0f}"
            beside = row.published.get("figures", {}).get(name)
            figures = (name, spread(values), str(len(values)), "" if beside is None else f"{beside:.4g}")
            lines.append((*first, *figures, *(costs if not place else ("", "", ""))))
    return lines


def spread(values: list[float]) -> str:
    """Mean ± standard deviation over seeds; the value of one run."""
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def document(rows: list, results: dict) -> str:
    """The table as Markdown, then data sets, and where published figures are from."""
    lines = lines_of(rows, results)
    if not lines:
        return ""
    head = [f"| {' | '.join(COLUMNS)} |", f"|---|---|---|---|{'---:|' * (len(COLUMNS) - 4)}"]
    table = [*head, *(f"| {' | '.join(line)} |" for line in lines)]
    there: list[Any] = [row for row in rows if results.get(row.name, {}).get("runs")]
    notes = [f"- `{row.data}`: {row.title}: `raytrec prepare {_shown(row.recipe)}`" for row in there]
    models: dict[tuple[str, str], list[str]] = {}  # (data set, source) → models beside which its figure is
    for row in there:
        if row.published:
            models.setdefault((row.data, row.published["source"]), []).append(row.model)
    sources = [f"- `{data}`, {', '.join(names)}: {source}" for (data, source), names in models.items()]
    parts = [
        table,
        list(dict.fromkeys(notes)),
        ["Published figures:", "", *sources] if sources else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part)


def exports_document(rows: list, results: dict) -> str:
    """The table of exports as Markdown: values with tables of fp32, and what those of fewer bits change."""
    lines = ["| data | model | metric | fp32 | fp16 | int8 | int4 |", f"|---|---|---|{'---:|' * 4}"]
    for row in rows:
        for name, values in results.get(row.name, {}).items():
            fp32 = values["fp32"]
            changes = [f"{values[precision] - fp32:+.1e}" for precision in ("fp16", "int8", "int4")]
            lines.append(f"| {' | '.join((row.data, row.model, name, f'{fp32:.5f}', *changes))} |")
    return "\n".join(lines)


def _shown(recipe: str) -> str:
    return recipe.replace("{source}/", "SOURCE/")


def print_table(rows: list, results: dict) -> None:
    """The table on the terminal."""
    table = Table(title="make quality")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in COLUMNS[:4] else "right")
    for line in lines_of(rows, results):
        table.add_row(*line)
    Console().print(table)
