"""What managed ids cost: a step against one of a table without them, and a stream of ids without an end.

    python benchmarks/ids.py [--workers 1,2] [--stream 10000000]

Steps of 2,048 rows a rank, 12 ids a row, on CPU, out of memory, with a row-wise table of 100,000 × 16 and
next to no dense work; collating is counted. Sides take turns of some steps each, and of each side the best
turn counts: a static table; managed ids all of which have their rows; managed ids of which a hundredth, or a
tenth, has never been seen, so that in a table that is full others lose their rows, and come back later.

The stream sends distinct ids through a map of 100,000 rows, 16,384 at a time.

Prints a table; writes benchmarks/results/ids.json and the tables in docs/benchmarks.md.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from documents import fill, keep
from ids_side import BATCH
from rank_group import Ranks, take_turns

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "ids.json"
SIDES = {
    "static": {"ids": "static", "new_share": 0.0},
    "known": {"ids": "managed", "new_share": 0.0},
    "hundredth": {"ids": "managed", "new_share": 0.01},
    "tenth": {"ids": "managed", "new_share": 0.1},
}


def measure(world: int, rounds: int) -> dict[str, Any]:
    """ms of a step and CPU-µs of a row, of each side."""
    with ExitStack() as stack:
        sides = {side: Ranks("ids_side.py", HERE.parent, world, stack) for side in SIDES}
        begun = {side: ranks.tell(**SIDES[side])["s"] / 20 for side, ranks in sides.items()}
        return take_turns(sides, begun, rounds, BATCH * world)


def stream(world: int, ids: int) -> dict[str, float]:
    """Of distinct ids through a map: seconds, ids a second, MiB that all processes have grown by."""
    with ExitStack() as stack:
        answers = Ranks("ids_side.py", HERE.parent, world, stack).ask(stream=ids)
    seconds, grown = max(s for s, _ in answers), sum(size for _, size in answers)
    return {"ids": ids, "s": seconds, "ids_per_s": ids / seconds, "grown_mib": grown / 2**20}


def document(found: dict[str, Any]) -> str:
    """A line for each number of workers, as Markdown."""
    lines = [
        "| workers | ms a step: static | ids known | | a hundredth new | | a tenth new | "
        "| ids/s through the map | grown, MiB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for point in found["points"]:
        static, *others = (point["sides"][side]["step_ms"] for side in SIDES)
        cells = [str(point["workers"]), f"{static:,.1f}"]
        for managed in others:
            cells += [f"{managed:,.1f}", f"{managed / static:.2f} ×"]
        through = point["stream"]
        cells += [f"{through['ids_per_s']:,.0f}", f"{through['grown_mib']:,.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(
    workers: Annotated[str, typer.Option(help="Numbers of ranks.")] = "1,2",
    rounds: Annotated[int, typer.Option(help="Turns of each side.")] = 7,
    ids: Annotated[int, typer.Option("--stream", help="Distinct ids of the stream.")] = 10_000_000,
    smallest: Annotated[bool, typer.Option("--smallest", help="One point, and write nothing.")] = False,
) -> None:
    """Prints the table; writes benchmarks/results/ids.json."""
    points = []
    for world in [int(text) for text in ("1" if smallest else workers).split(",")]:
        sides = measure(world, 1 if smallest else rounds)
        through = stream(world, 200_000 if smallest else ids)
        points.append({"workers": world, "sides": sides, "stream": through})
        print(json.dumps(points[-1]), flush=True)
    found = {"cpus": os.cpu_count(), "points": points}
    print(document(found))
    if not smallest:
        keep(RESULTS, found)
        fill("docs/benchmarks.md", "ids", document(found))


if __name__ == "__main__":
    typer.run(main)
