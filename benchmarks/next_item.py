"""SASRec and HSTU by raytrec against plain torch in one process: a part of `benchmarks/sequences.py`.

Both sides train the same global batch: one process of plain torch (next_item_plain.py), and raytrec's ranks.
"""

from __future__ import annotations

from typing import Any

from next_item_side import lengths_of
from rank_group import Ranks, take_turns

SIDES = {"plain": True, "raytrec": False}
# Histories are log-normal around `median`, cut to `shortest` and `length`: 157 and 7 ids on average.
ML1M = {
    "rows": 128,
    "items": 3_706,
    "dim": 64,
    "length": 200,
    "median": 170,
    "spread": 0.6,
    "shortest": 20,
    "negatives": 128,
    "share_negatives": False,
    "dropout": 0.2,
    "blocks": 2,
    "heads": 2,
    "feedforward": 256,
}
AMAZON = ML1M | {
    "rows": 512,
    "items": 11_924,
    "length": 50,
    "median": 5.6,
    "spread": 0.75,
    "shortest": 3,
    "negatives": 1,
    "share_negatives": True,
    "dropout": 0.5,
    "feedforward": 64,
}
CASES = {
    ("sasrec", "MovieLens-1M"): ML1M,
    ("hstu", "MovieLens-1M"): ML1M,
    ("sasrec", "Amazon Toys"): AMAZON | {"dim": 128, "feedforward": 128},
    ("hstu", "Amazon Toys"): AMAZON | {"dim": 128},
    ("sasrec", "200,000 items"): AMAZON | {"items": 200_000},
}
SMALLEST = {("hstu", "MovieLens-1M"): ML1M | {"rows": 4}}


def measure(sides: dict[str, Ranks], model: str, shape: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Tokens (ids of histories) a second, and CPU-µs of a token over all processes, of each side."""
    shape = shape | {"model": model}
    begun = {side: ranks.tell(shape=shape, plain=SIDES[side])["s"] / 2 for side, ranks in sides.items()}
    tokens = int(lengths_of(shape).sum())
    found = take_turns(sides, begun, rounds, tokens, turn_s=0.8)
    return {
        side: {"tokens_per_s": 1e3 * tokens / of["step_ms"], "cpu_us_per_token": of["cpu_us_per_row"]}
        for side, of in found.items()
    }


def table_of(points: list[dict[str, Any]]) -> str:
    """A line for each point, as Markdown."""
    lines = [
        "| model | shape | workers | tokens/s: plain torch | raytrec | | CPU-µs a token: plain | raytrec |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for point in points:
        speeds, costs = (
            [point[side][figure] for side in SIDES] for figure in ("tokens_per_s", "cpu_us_per_token")
        )
        cells = [point["model"], point["shape"], str(point["workers"])]
        cells += [f"{speed:,.0f}" for speed in speeds] + [f"{speeds[1] / speeds[0]:.2f} ×"]
        cells += [f"{cost:.1f}" for cost in costs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
