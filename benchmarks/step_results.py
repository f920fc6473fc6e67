"""What `benchmarks/step.py` has measured, as figures, tables, a picture and parts of the documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from documents import fill
from rich.table import Table

SIDES = {
    "limit": "TorchRec, batches in memory",
    "by_hand": "TorchRec and a DataLoader, by hand",
    "ray_recipe": "TorchTrainer and iter_torch_batches",
    "raytrec": "raytrec train",
}
NAMES = {"dlrm": "DLRM", "dcn": "DCN-V2"}
FIGURES = ("samples_per_s", "cpu_us_per_row", "peak_mib", "first_step_s", "after_last_step_s")
OTHERS = ("limit", "by_hand", "ray_recipe")


def cases_of(models: list[str], workers: list[int]) -> dict[str, tuple[str, int]]:
    """Name → (model, number of workers)."""
    return {f"{model}_{ranks}": (model, ranks) for model in models for ranks in workers}


def case_title(case: str) -> str:
    """For people."""
    model, _, ranks = case.rpartition("_")
    return f"{NAMES.get(model, model)}, {ranks} worker{'s' * (ranks != '1')}"


def summarize(title: str, found: dict[str, dict[str, list[Any]]]) -> dict[str, Any]:
    """The content of step.json.

    Args:
        found: case → side → Measured of each round.

    Returns:
        Each figure as side → case → the best of the rounds: whatever else a machine does only slows a side.
        `rounds`: case → side → rows/s of each. `ratios` of rows/s as the lowest over all cases, `cpu_ratio`
        as the highest, all of them in `by_case`.
    """
    sides = list(next(iter(found.values())))
    results: dict[str, Any] = {"title": title}
    for figure in FIGURES:
        best = max if figure == "samples_per_s" else min
        results[figure] = {
            side: {case: round(best(getattr(m, figure) for m in of[side]), 3) for case, of in found.items()}
            for side in sides
        }
    results["rounds"] = {
        case: {side: [round(m.samples_per_s) for m in of[side]] for side in sides}
        for case, of in found.items()
    }
    results["cpu_us_by_role"] = {
        case: {side: min(of[side], key=lambda m: m.cpu_us_per_row).cpu_us_by_role for side in sides}
        for case, of in found.items()
    }
    by_case = {case: _compare(results, case) for case in found}
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
    """raytrec against the others, in one case."""
    speeds, cpu_us = (
        {side: of[case] for side, of in results[figure].items()}
        for figure in ("samples_per_s", "cpu_us_per_row")
    )
    if "raytrec" not in speeds:
        return {}
    ratios = {
        f"raytrec_over_{other}": speeds["raytrec"] / speeds[other] for other in OTHERS if other in speeds
    }
    if "limit" in cpu_us:
        ratios["cpu_ratio"] = cpu_us["raytrec"] / cpu_us["limit"]
    return {name: round(value, 4) for name, value in ratios.items()}


def rows_of(results: dict[str, Any], case: str) -> list[tuple[str, ...]]:
    """Cells of a case's table, side by side of one another: side, then figures."""
    rows = []
    for side, speeds in results["samples_per_s"].items():
        of = {figure: results[figure][side][case] for figure in FIGURES}
        limit = results["cpu_us_per_row"].get("limit", {}).get(case)
        rows.append(
            (
                SIDES[side],
                f"{speeds[case]:,.0f}",
                f"{of['cpu_us_per_row']:.1f}",
                f"{of['cpu_us_per_row'] / limit:.2f}" if limit else "",
                f"{of['peak_mib']:,.0f}",
                f"{of['first_step_s']:.1f}",
            )
        )
    return rows


COLUMNS = ("", "rows/s", "CPU-µs a row", "× limit", "peak MiB", "first step after, s")


def table_of(results: dict[str, Any], case: str) -> Table:
    """For a terminal."""
    table = Table(title=f"{case_title(case)}: {results['title']}")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows_of(results, case):
        table.add_row(*row)
    return table


def markdown(results: dict[str, Any], cases: list[str]) -> str:
    """A table for a document, with a line for each case and side."""
    lines = ["| model, workers | side | " + " | ".join(COLUMNS[1:]) + " |", "|---|---|" + "---:|" * 5]
    for case in cases:
        for number, row in enumerate(rows_of(results, case)):
            name = case_title(case) if number == 0 else ""
            lines.append(f"| {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def documents(results: dict[str, Any]) -> dict[str, str]:
    """Document → what it has of the results."""
    picture = f"![rows/s and CPU time of each side: {results['title']}](images/step.png)"
    return {
        "README.md": markdown(results, ["dlrm_2"]),
        "docs/benchmarks.md": f"{markdown(results, list(results['by_case']))}\n\n{picture}",
    }


def write_tables(results: dict[str, Any]) -> None:
    """Puts the tables where the documents have their place for them."""
    for page, text in documents(results).items():
        fill(page, "step", text)


def draw(results: dict[str, Any], path: Path) -> None:
    """Rows/s and CPU time of each case and side, as bars."""
    from raytrec.report.figures.style import BLUE, GREEN, GREY, ORANGE, WHOLE, new_figure, save_png, styled

    colours = dict(zip(SIDES, (GREY, GREEN, ORANGE, BLUE), strict=True))

    @styled
    def made() -> Any:
        figure, panels = new_figure(
            f"Training against loops written by hand: {results['title']}", 4.6, rows=2
        )
        cases = list(results["by_case"])
        for axes, name, label in zip(panels, FIGURES[:2], ("rows/s", "CPU-µs a row"), strict=False):
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
