"""Compare the results, configurations and curves of several runs, for `raytrec compare`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from raytrec.common.errors import RunError
from raytrec.common.formatting import flatten, parse_number
from raytrec.common.redaction import hide
from raytrec.metrics.results import RESULT_TITLES, Row, as_text, format_result
from raytrec.report.report import read_run, write_page
from raytrec.tracking.run_folder import RunFolder, check_run_folder

# Prefixes of keys that do not affect training and are therefore not compared.
IGNORED_KEY_PREFIXES = ("run.name", "run.dir", "tracking.", "checkpoint.dir")


@dataclass(frozen=True)
class Comparison:
    """Comparison of several runs with the first one.

    Attributes:
        runs: Runs in the order of the command line.
        names: Name of each run; the path is appended to names that several runs share.
        results: Key in result.json → one text per run, "–" if missing; texts of later runs include the difference from
            the first run if both values are numbers.
        titles: Key in result.json → title for users.
        config: section.key → one text per run with the key's value; contains only keys whose values differ, without
            IGNORED_KEY_PREFIXES.
    """

    runs: list[RunFolder]
    names: list[str]
    results: dict[str, list[str]]
    titles: dict[str, str]
    config: dict[str, list[str]]


def compare(places: Sequence[str | Path]) -> Comparison:
    """Read the run folders `places`, and compare the runs with the first one.

    Raises:
        RunError: There are fewer than two places, or a folder does not exist, contains no files of a run, or contains
            a file that cannot be read.
    """
    if len(places) < 2:
        raise RunError(
            f"cannot compare {len(places)} run{'' if len(places) == 1 else 's'}",
            expected="at least two run folders",
            do="run `raytrec compare RUN RUN …`, or `raytrec report RUN` for a single run",
        )
    runs = [read_run(check_run_folder(place)) for place in places]
    unordered = {key: row for run in runs for key, row in format_result(run.result).items()}
    rows = dict(
        sorted(unordered.items(), key=lambda item: item[0] in RESULT_TITLES and [*RESULT_TITLES].index(item[0]) + 1)
    )
    results = {key: [_format_result(key, row, run, runs[0]) for run in runs] for key, row in rows.items()}
    titles = {key: row.title for key, row in rows.items()}
    return Comparison(runs, _names(runs), results, titles, _compare_configs(runs))


def write(comparison: Comparison, out: str | Path) -> Path:
    """Write a comparison to the file `out` as one self-contained HTML page, and return the path of the page.

    Raises:
        RunError: The page cannot be written.
    """
    from raytrec.report.figures.learning import draw_overlay
    from raytrec.report.figures.style import to_svg

    figures = draw_overlay(comparison.runs, comparison.names)
    pictures = [to_svg(picture, picture.get_suptitle()) for picture in figures]
    return write_page(
        Path(out),
        "compare.html.j2",
        names=comparison.names,
        folders=[str(run.path.absolute()) for run in comparison.runs],
        results=[(comparison.titles[key], texts) for key, texts in comparison.results.items()],
        config=comparison.config,
        pictures=pictures,
    )


def print_table(comparison: Comparison) -> None:
    """Print the results and the configuration differences to stdout as tables.

    On narrow terminals, cells are wrapped. In files and pipes, lines can have up to 10,000 characters.
    """
    from rich.table import Table

    from raytrec.common.terminal import open_console, to_plain_text

    console = open_console()
    console.width = console.width if console.is_terminal else 10_000  # cells do not wrap in files and pipes
    for title, rows in (("metric", comparison.results), ("configuration", comparison.config)):
        if not rows:
            continue
        table = Table()
        table.add_column(title, overflow="fold")
        for name in comparison.names:
            table.add_column(to_plain_text(name), justify="right" if title == "metric" else "left", overflow="fold")
        for key, texts in rows.items():
            label = comparison.titles[key] if title == "metric" else key
            table.add_row(to_plain_text(label), *map(to_plain_text, texts))
        console.print(table)


def _names(runs: list[RunFolder]) -> list[str]:
    names = [run.name for run in runs]
    return [n if names.count(n) == 1 else f"{n} ({run.path})" for n, run in zip(names, runs, strict=True)]


def _format_result(key: str, row: Row, run: RunFolder, first: RunFolder) -> str:
    """Return a result as text, "–" if it is missing; append the difference from the first run if both are numbers."""
    if key not in run.result:
        return "–"
    text = as_text(run.result[key], row.form)
    value, reference = parse_number(run.result[key]), parse_number(first.result.get(key))
    if run is first or isnan(value) or isnan(reference):
        return text
    return f"{text} ({row.difference(run.result[key], first.result[key])})"


def _compare_configs(runs: list[RunFolder]) -> dict[str, list[str]]:
    flat = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    texts = {key: [_value(values, key) for values in flat] for key in keys if not key.startswith(IGNORED_KEY_PREFIXES)}
    return {key: row for key, row in texts.items() if len(set(row)) > 1}


def _value(values: dict[str, Any], key: str) -> str:
    if key not in values:
        return "(not set)"
    return "null" if values[key] is None else hide(str(values[key]))
