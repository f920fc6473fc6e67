"""Measurements, tables and plot of `benchmarks/step.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import BENCHMARKS_PAGE, Grid

SIDES = {
    "limit": "TorchRec, batches in memory",
    "by_hand": "TorchRec and a DataLoader, by hand",
    "ray_recipe": "TorchTrainer and iter_torch_batches",
    "raytrec": "raytrec train",
}
NAMES = {"dlrm": "DLRM", "dcn": "DCN-V2"}
FIGURES = ("samples_per_s", "cpu_us_per_row", "peak_mib")
OTHERS = ("limit", "by_hand", "ray_recipe")
COLUMNS = ("variant", "rows/s", "CPU-µs per row", "peak MiB")


def cases_of(models: list[str], workers: list[int]) -> dict[str, tuple[str, int]]:
    """Return a mapping from the name of a case to (model, number of workers)."""
    return {f"{model}_{ranks}": (model, ranks) for model in models for ranks in workers}


def case_title(case: str) -> str:
    """Return the title of a case, such as "DLRM, 2 workers"."""
    model, _, ranks = case.rpartition("_")
    return f"{NAMES.get(model, model)}, {ranks} worker{'s' * (ranks != '1')}"


def summarize(title: str, runs: dict[str, dict[str, list[Any]]]) -> dict[str, Any]:
    """Return the content of step.json.

    Args:
        title: Title, which states sizes and rounds.
        runs: Case → side → measurements of each round.

    Returns:
        Each measurement as side → case → best round. `rounds` is case → side → rows/s of each round. `ratios`
        contains the lowest ratios of rows/s over all cases, and `cpu_ratio` is the highest ratio of CPU time.
        `by_case` contains the ratios of every case.
    """
    sides = list(next(iter(runs.values())))
    results: dict[str, Any] = {"title": title}
    for figure in FIGURES:
        best = max if figure == "samples_per_s" else min
        results[figure] = {
            side: {case: round(best(getattr(m, figure) for m in of[side]), 3) for case, of in runs.items()}
            for side in sides
        }
    results["rounds"] = {
        case: {side: [round(m.samples_per_s) for m in of[side]] for side in sides} for case, of in runs.items()
    }
    by_case = {case: _compare(results, case) for case in runs}
    results["ratios"] = {
        name: min(of[name] for of in by_case.values())
        for name in (f"raytrec_over_{other}" for other in OTHERS)
        if all(name in of for of in by_case.values())
    }
    if all("cpu_ratio" in of for of in by_case.values()):
        results["cpu_ratio"] = max(of["cpu_ratio"] for of in by_case.values())
    results["by_case"] = by_case
    return results


def _compare(results: dict[str, Any], case: str) -> dict[str, float]:
    """Return the ratios between raytrec and the other sides in one case."""
    speeds, cpu_us = (
        {side: of[case] for side, of in results[figure].items()} for figure in ("samples_per_s", "cpu_us_per_row")
    )
    if "raytrec" not in speeds:
        return {}
    ratios = {f"raytrec_over_{other}": speeds["raytrec"] / speeds[other] for other in OTHERS if other in speeds}
    if "limit" in cpu_us:
        ratios["cpu_ratio"] = cpu_us["raytrec"] / cpu_us["limit"]
    return {name: round(value, 4) for name, value in ratios.items()}


def rows_of(results: dict[str, Any], case: str) -> list[tuple[str, ...]]:
    """Return the cells of a case's table, with a row for each side."""
    rows = []
    for side, speeds in results["samples_per_s"].items():
        of = {figure: results[figure][side][case] for figure in FIGURES}
        cells = f"{speeds[case]:,.0f}", f"{of['cpu_us_per_row']:.1f}", f"{of['peak_mib']:,.0f}"
        rows.append((SIDES[side], *cells))
    return rows


def table_of(results: dict[str, Any], case: str) -> Grid:
    """Return the table of a case for the terminal."""
    return Grid(COLUMNS, rows_of(results, case), title=f"{case_title(case)}: {results['title']}")


def markdown(results: dict[str, Any], cases: list[str]) -> str:
    """Return a table for a document, with a row for each case and side."""
    rows = []
    for case in cases:
        titles = [case_title(case)] + [""] * len(SIDES)
        rows += [(title, *cells) for title, cells in zip(titles, rows_of(results, case), strict=False)]
    return Grid(("model, workers", *COLUMNS), rows, left=2).markdown()


def documents(results: dict[str, Any]) -> dict[str, str]:
    """Return a mapping from document to the text to insert between the document's markers.

    The documents show the cases with 2 workers. The plot shows all cases.
    """
    cases = [case for case in results["by_case"] if case.endswith("_2")]
    picture = f"![rows/s and CPU time of each variant: {results['title']}](images/step.png)"
    return {"README.md": markdown(results, ["dlrm_2"]), BENCHMARKS_PAGE: f"{markdown(results, cases)}\n\n{picture}"}


def draw(results: dict[str, Any], path: Path) -> None:
    """Plot the rows/s and CPU time of each case and side as bars."""
    from raytrec.report.figures.style import BLUE, GREEN, GREY, ORANGE, WHOLE, new_figure, save_png, styled

    colours = dict(zip(SIDES, (GREY, GREEN, ORANGE, BLUE), strict=True))

    @styled
    def made() -> Any:
        figure, panels = new_figure(f"Training compared with hand-written loops: {results['title']}", 4.6, rows=2)
        cases = list(results["by_case"])
        for axes, name, label in zip(panels, FIGURES[:2], ("rows/s", "CPU-µs per row"), strict=False):
            for place, (side, values) in enumerate(results[name].items()):
                at = [number + 0.2 * (place - 1.5) for number in range(len(cases))]
                axes.bar(at, [values[case] for case in cases], 0.19, color=colours[side], label=SIDES[side])
            axes.set_ylabel(label)
            axes.set_xticks(range(len(cases)), [case_title(case).replace(", ", "\n") for case in cases])
            axes.grid(False, axis="x")
            axes.yaxis.set_major_formatter(WHOLE)
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower left", ncols=1)
        return figure

    save_png(made(), path)
