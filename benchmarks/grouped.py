"""What training costs where a row is a request with its candidates, against a row for each candidate.

    python benchmarks/grouped.py [--cases two_tower,din] [--workers 1,2]

Both sides train the same examples on CPU, out of memory: 256 requests a rank in each step. Like impressions
of MovieLens-1M, a request has a history of 50 to 200 films and 5 candidates; a wide one has 100 columns, and
10 candidates of 2 columns. Collating is counted, reading is not.
They take turns of some steps each, and of each side the best turn counts.

Prints a table; writes benchmarks/results/grouped.json.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from documents import fill, keep
from grouped_side import CASES, REQUESTS
from rank_group import Ranks, take_turns

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "grouped.json"
SIDES = ("repeated", "grouped")


def measure(sides: dict[str, Ranks], case: str, examples: int, rounds: int) -> dict[str, Any]:
    """ms of a step and CPU-µs of an example, of each side."""
    begun = {side: ranks.tell(case=case, grouped=side == "grouped")["s"] / 2 for side, ranks in sides.items()}
    return take_turns(sides, begun, rounds, examples, turn_s=0.8)


def document(found: dict[str, Any]) -> str:
    """A line for each point, as Markdown."""
    lines = [
        "| model | workers | examples/s: repeated | grouped | | CPU-µs an example: repeated | grouped | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in found["points"]:
        repeated, grouped = (point[side] for side in SIDES)
        speeds = [1e3 * point["examples"] / side["step_ms"] for side in (repeated, grouped)]
        costs = [side["cpu_us_per_row"] for side in (repeated, grouped)]
        cells = [point["case"], str(point["workers"]), *(f"{speed:,.0f}" for speed in speeds)]
        cells += [f"{speeds[1] / speeds[0]:.2f} ×", *(f"{cost:,.1f}" for cost in costs)]
        lines.append(f"| {' | '.join(cells)} | {costs[1] / costs[0]:.2f} × |")
    return "\n".join(lines)


def main(
    cases: Annotated[str, typer.Option(help="Models.")] = ",".join(CASES),
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2",
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 5,
    smallest: Annotated[bool, typer.Option("--smallest", help="One point, and write nothing.")] = False,
) -> None:
    """Prints the table; writes benchmarks/results/grouped.json."""
    points = [] if smallest or not RESULTS.exists() else json.loads(RESULTS.read_text())["points"]
    for world in [int(text) for text in ("1" if smallest else workers).split(",")]:
        with ExitStack() as stack:
            sides = {side: Ranks("grouped_side.py", HERE.parent, world, stack) for side in SIDES}
            for case in ("two_tower" if smallest else cases).split(","):
                examples = REQUESTS * CASES[case][3] * world
                figures = measure(sides, case, examples, 1 if smallest else rounds)
                point = {"case": case, "workers": world, "examples": examples, **figures}
                print(json.dumps(point), flush=True)
                points = [p for p in points if (p["case"], p["workers"]) != (case, world)] + [point]
    points.sort(key=lambda p: (list(CASES).index(p["case"]), p["workers"]))
    found = {"cpus": os.cpu_count(), "points": points}
    print(document(found))
    if not smallest:
        keep(RESULTS, found)
        fill("docs/benchmarks.md", "grouped", document(found))


if __name__ == "__main__":
    typer.run(main)
