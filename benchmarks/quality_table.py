"""Tables in docs/quality.md, made from benchmarks/results/quality.json and quality_exports.json."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

from harness import Grid

COLUMNS = ("dataset", "model", "metric", "mean ± std", "seeds", "published")
PRECISIONS = ("fp16", "int8", "int4")


def lines_of(rows: list, results: dict) -> list[tuple[str, ...]]:
    """Return a table line for each metric of each row with runs."""
    lines = []
    for row in rows:
        runs = results.get(row.name, {}).get("runs", [])
        for place, name in enumerate(row.metrics if runs else []):
            values = [run["figures"][name] for run in runs]
            model = f"{row.model}, {row.note}" if row.note else row.model
            published = row.published.get("figures", {}).get(name)
            figures = name, spread(values), str(len(values)), "" if published is None else f"{published:.4g}"
            lines.append((*((row.data, model) if not place else ("", "")), *figures))
    return lines


def spread(values: list[float]) -> str:
    """Return the mean ± standard deviation over seeds as text, or the value of a single run."""
    if len(values) < 2:
        return "".join(f"{value:.4f}" for value in values)
    return f"{statistics.mean(values):.4f} ± {statistics.stdev(values):.4f}"


def grid(rows: list, results: dict) -> Grid:
    """Return the table of quality metrics."""
    return Grid(COLUMNS, lines_of(rows, results), "make quality", left=4)


def document(rows: list, results: dict) -> str:
    """Return the text for docs/quality.md: the table, datasets, and sources of published results."""
    measured: list[Any] = [row for row in rows if results.get(row.name, {}).get("runs")]
    if not measured:
        return ""
    notes = [f"- `{row.data}`: `raytrec prepare {row.recipe.replace('{source}/', 'SOURCE/')}`" for row in measured]
    models: dict[tuple[str, str], list[str]] = {}  # (dataset, source) → models with metrics of the source
    for row in measured:
        if row.published:
            models.setdefault((row.data, row.published["source"]), []).append(row.model)
    several = {data for data, count in Counter(data for data, _ in models).items() if count > 1}
    sources = [
        f"- `{data}`{', ' + ', '.join(names) if data in several else ''}: {source}"
        for (data, source), names in models.items()
    ]
    parts = [grid(rows, results).markdown(), "\n".join(dict.fromkeys(notes))]
    return "\n\n".join([*parts, *(["\n".join(["Published results:", "", *sources])] if sources else [])])


def exports_document(rows: list, results: dict) -> str:
    """Return the table of exports, with the values for fp32 tables and their changes for tables with fewer bits."""
    lines = [
        [row.data, row.model, name, f"{of['fp32']:.5f}", *(f"{of[p] - of['fp32']:+.1e}" for p in PRECISIONS)]
        for row in rows
        for name, of in results.get(row.name, {}).items()
    ]
    return Grid(("dataset", "model", "metric", "fp32", *PRECISIONS), lines, left=3).markdown()
