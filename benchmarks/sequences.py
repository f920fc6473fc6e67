"""What a step over sequences costs: as they get longer, and by models of the next item.

    python benchmarks/sequences.py [--only lengths,models] [--lengths 10,50,100,200,500] [--workers 1,2]

lengths: sequences that are read id by id, against the mean of all ids. models: next_item.py.

Id by id, TorchRec's EmbeddingCollection gives the vector of each of at most L ids; the mean is pooled by its
EmbeddingBagCollection, and only sums travel between ranks. Both sides train 512 rows a rank on CPU, out of
memory, with a row-wise table of 100,000 × 16 and next to no dense work; collating is counted.
They take turns of some steps each, and of each side the best turn counts. `full` lists have as many ids as
the model reads (half as many to half as many again), `short` ones a tenth of it.

Prints tables; writes benchmarks/results/sequences.json, docs/images/sequences.png and a table of
docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import documents
import next_item
import typer
from rank_group import Ranks, take_turns
from sequences_side import BATCH

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results" / "sequences.json", HERE.parent / "docs" / "images" / "sequences.png"
SIDES = {"mean": "mean of all ids", "by_id": "id by id"}
FILLS = {"full": 1.0, "short": 0.1}


def measure(sides: dict[str, Ranks], length: int, ids: int, world: int, rounds: int) -> dict[str, Any]:
    """ms of a step and CPU-µs of a row, of each side."""
    begun = {
        side: ranks.tell(length=length, ids=ids, by_id=side == "by_id")["s"] / 2
        for side, ranks in sides.items()
    }
    return take_turns(sides, begun, rounds, BATCH * world)


def table_of(points: list[dict[str, Any]]) -> str:
    """A line for each point, as Markdown."""
    lines = [
        "| workers | ids read | in a list | ms a step: mean | id by id | | CPU-µs a row: mean | id by id | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        cells = [str(point["workers"]), str(point["length"]), str(point["ids"])]
        for figure in ("step_ms", "cpu_us_per_row"):
            mean, by_id = (point[side][figure] for side in SIDES)
            cells += [f"{mean:,.1f}", f"{by_id:,.1f}", f"{by_id / mean:.1f} ×"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(points: list[dict[str, Any]]) -> None:
    """Time of a step over length, a panel for each number of workers."""
    import matplotlib.pyplot as plt

    worlds = sorted({point["workers"] for point in points})
    figure, panels = plt.subplots(1, len(worlds), figsize=(5 * len(worlds), 3.6), squeeze=False)
    for world, panel in zip(worlds, panels[0], strict=True):
        for side, name in SIDES.items():
            for fill, style in (("full", "-o"), ("short", "--s")):
                of_line = [p for p in points if p["workers"] == world and p["fill"] == fill]
                x, y = [p["length"] for p in of_line], [p[side]["step_ms"] for p in of_line]
                color = "C3" if side == "mean" else "C0"
                panel.plot(x, y, style, color=color, label=f"{name}, {fill} lists", markersize=4)
        panel.set(title=f"{world} worker{'s' * (world > 1)}", xscale="log", yscale="log")
        panel.set(xlabel="ids that are read, at most", ylabel="ms a step")
        panel.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=130)


def document(found: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md, of results; empty before models have been measured."""
    return next_item.table_of(found["models"]) if found.get("models") else ""


def put(points: list[dict[str, Any]], point: dict[str, Any], *keys: str) -> None:
    """Adds a point in the place of an older one of the same keys."""
    points[:] = [p for p in points if any(p[key] != point[key] for key in keys)] + [point]
    print(json.dumps(point), flush=True)


def main(
    only: Annotated[str, typer.Option(help="What is measured.")] = "lengths,models",
    lengths: Annotated[str, typer.Option(help="Ids that are read, at most.")] = "10,50,100,200,500",
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2",
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 5,
    smallest: Annotated[bool, typer.Option("--smallest", help="One point each, and write nothing.")] = False,
) -> None:
    """Prints the tables; writes benchmarks/results/sequences.json."""
    rounds, tree = 1 if smallest else rounds, HERE.parent
    chosen = [int(text) for text in ("3" if smallest else lengths).split(",")] * ("lengths" in only)
    cases = (next_item.SMALLEST if smallest else next_item.CASES) if "models" in only else {}
    found = {} if smallest or not RESULTS.exists() else json.loads(RESULTS.read_text())
    points, of_models = found.get("points", []), found.get("models", [])
    for world in [int(text) for text in ("1" if smallest else workers).split(",")]:
        with ExitStack() as stack:
            sides = {side: Ranks("sequences_side.py", tree, world, stack) for side in SIDES}
            for length in chosen:
                for fill, share in FILLS.items():
                    ids = max(1, round(length * share))
                    figures = measure(sides, length, ids, world, rounds)
                    point = {"workers": world, "length": length, "fill": fill, "ids": ids, **figures}
                    put(points, point, "workers", "length", "fill")
        with ExitStack() as stack:
            worlds = {"plain": 1, "raytrec": world}
            sides = {side: Ranks("next_item_side.py", tree, n, stack) for side, n in worlds.items()}
            for (model, shape), sizes in cases.items():
                figures = next_item.measure(sides, model, sizes, rounds)
                point = {"model": model, "shape": shape, "workers": world, **figures}
                put(of_models, point, "model", "shape", "workers")
    points.sort(key=lambda p: (p["workers"], p["fill"], p["length"]))
    of_models.sort(key=lambda p: (p["workers"], [*next_item.CASES].index((p["model"], p["shape"]))))
    found = {"cpus": os.cpu_count(), "points": points, "models": of_models}
    print(table_of(points), document(found), sep="\n\n")
    if not smallest:
        documents.keep(RESULTS, found)
        documents.fill("docs/benchmarks.md", "sequences", document(found))
        draw(points)


if __name__ == "__main__":
    typer.run(main)
