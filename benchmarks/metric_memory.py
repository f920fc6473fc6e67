"""Memory that an evaluation's metrics use on rank 0, at 10⁵, 10⁶ and 10⁷ rows.

    python benchmarks/metric_memory.py [--rows 100000,1000000] [--exact-rows N] [--smallest]

For each point, two new ranks without Ray receive random rows in batches of 2¹⁶, as in an evaluation, and
compute the metrics. The measurement is the growth of rank 0's peak resident memory (VmHWM) from before the first
row. Up to eval.max_exact_rows per rank, metrics `of an order` need 12 bytes per row and metrics `of groups`
need 20. With more rows, the former use bins and the latter use files.
"""

from __future__ import annotations

from time import perf_counter
from typing import Annotated, Any

import harness
import typer
from harness import Grid, status_bytes
from rank_group import on_ranks

WORLD, BATCH = 2, 1 << 16
METRICS = {"of an order": ["auc", "pr_auc", "calibration"], "of groups": ["gauc", "ndcg@10", "recall@10"]}


def evaluate(
    rank: int, device: Any, rows: int, exact_rows: int | None, metrics: list[str]
) -> tuple[int, float, dict[str, float]]:
    """Evaluate random rows, and return this rank's (bytes, seconds, metric values)."""
    import torch

    from raytrec.common.collectives import Peers
    from raytrec.config.data import EvalSection
    from raytrec.metrics.evaluation import TaskRows
    from raytrec.metrics.ranked import WeightedRows
    from raytrec.metrics.selection import Selection
    from raytrec.tasks.losses.pointwise import BinaryCrossEntropy
    from raytrec.tasks.task import Task

    task = Task(label="y", name="y", column=0, loss=BinaryCrossEntropy(), weight=1.0, metrics=(*metrics,), group="user")
    settings = EvalSection(**({} if exact_rows is None else {"max_exact_rows": exact_rows}))
    task_rows, peers, numbers = TaskRows(Selection([task], settings), "y"), Peers(device), torch.arange(1000)
    peers.send([numbers], numbers % WORLD)  # torch and gloo allocate memory once
    peers.sum(numbers.double().sort().values)
    began, start_bytes = perf_counter(), status_bytes("VmHWM")
    for start in range(0, rows // WORLD, BATCH):
        count = min(BATCH, rows // WORLD - start)
        logits = torch.randn(count) - 2
        labels = (torch.rand(count) < logits.sigmoid()).float()
        task_rows.add(
            WeightedRows(logits, labels, torch.ones(count), {"user": torch.randint(0, 1 + rows // 50, (count,))})
        )
    figures, _ = task_rows.figures(Peers(device), device)
    return status_bytes("VmHWM") - start_bytes, perf_counter() - began, figures


def main(
    rows: Annotated[str, typer.Option(help="Numbers of rows, separated by commas.")] = "100000,1000000,10000000",
    exact_rows: Annotated[int | None, typer.Option(help="eval.max_exact_rows; default: raytrec's.")] = None,
    only: harness.Only = ",".join(METRICS),
    smallest: harness.Smallest = False,
) -> None:
    """Measure the memory of each kind of metrics at each number of rows, and print a table."""
    lines = []
    for name in harness.split(only):
        for count in harness.integers("20000" if smallest else rows):
            size, seconds, figures = on_ranks(WORLD, evaluate, count, exact_rows, METRICS[name])[0]
            shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
            lines.append([name, shown, f"{count:,}", f"{size / 2**20:.0f}", f"{seconds:.1f}"])
    title = f"{WORLD} ranks; memory of rank 0 in addition to its memory before the first row"
    Grid(("metrics", "values", "rows", "MiB", "seconds"), lines, title, left=2).show(160)


if __name__ == "__main__":
    typer.run(main)
