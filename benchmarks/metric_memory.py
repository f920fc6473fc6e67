"""What an evaluation's metrics take of rank 0's memory, at 10⁵, 10⁶ and 10⁷ rows.

    python benchmarks/metric_memory.py [--rows 100000,1000000] [--exact-rows N] [--smallest]

Two ranks without Ray, in processes of their own for each point, get random rows in batches of 2¹⁶, as an
evaluation gives them, and compute the metrics. The figure is the growth of rank 0's peak resident memory
(VmHWM) since before the first row. Rows of `of an order` need 12 bytes each up to eval.max_exact_rows on a
rank, and then bins; those of `of groups` 20 bytes, and then files.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rank_group import join_group
from rich.console import Console
from rich.table import Table

WORLD, BATCH = 2, 1 << 16
METRICS = {
    "of an order": ["auc", "pr_auc", "calibration"],
    "of groups": ["gauc", "ndcg@10", "recall@10"],
}


def peak_bytes() -> int:
    """The most memory that this process has had."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def evaluate(rank: int, store: str, rows: int, exact_rows: int | None, metrics: list[str], answers) -> None:
    """One rank: puts (bytes, seconds, figures) into the queue, if it is the first."""
    join_group(rank, WORLD, store)
    import torch

    from raytrec.common.collectives import Peers
    from raytrec.config.tasks import EvalSection
    from raytrec.metrics.evaluation import TaskRows
    from raytrec.metrics.ranked import Counted
    from raytrec.metrics.selection import Selection
    from raytrec.tasks.losses.pointwise import BinaryCrossEntropy
    from raytrec.tasks.task import Task

    task = Task(
        label="y",
        name="y",
        column=0,
        loss=BinaryCrossEntropy(),
        weight=1.0,
        metrics=(*metrics,),
        group="user",
    )
    settings = EvalSection(**({} if exact_rows is None else {"max_exact_rows": exact_rows}))
    kept, cpu = TaskRows(Selection([task], settings), "y"), torch.device("cpu")
    warm(cpu)
    began, before = time.perf_counter(), peak_bytes()
    for start in range(0, rows // WORLD, BATCH):
        count = min(BATCH, rows // WORLD - start)
        logits = torch.randn(count) - 2
        labels = (torch.rand(count) < logits.sigmoid()).float()
        kept.add(
            Counted(logits, labels, torch.ones(count), {"user": torch.randint(0, 1 + rows // 50, (count,))})
        )
    figures, _ = kept.figures(Peers(cpu), cpu)
    if rank == 0:
        answers.put((peak_bytes() - before, time.perf_counter() - began, figures))


def warm(cpu) -> None:
    """What torch and gloo allocate once."""
    import torch

    from raytrec.common.collectives import Peers

    peers = Peers(cpu)
    numbers = torch.arange(1000)
    peers.send([numbers], numbers % WORLD)
    peers.sum(numbers.double().sort().values)


def measure(rows: int, exact_rows: int | None, metrics: list[str]) -> tuple[int, float, dict]:
    """(bytes, seconds, figures) of one evaluation."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", rows, exact_rows, metrics, answers)
        ranks = [context.Process(target=evaluate, args=(rank, *arguments)) for rank in range(WORLD)]
        for rank in ranks:
            rank.start()
        answer = answers.get(timeout=280)
        for rank in ranks:
            rank.join()
    return answer


def main(
    rows: Annotated[
        str, typer.Option(help="Numbers of rows, with commas between.")
    ] = "100000,1000000,10000000",
    exact_rows: Annotated[
        int | None, typer.Option(help="eval.max_exact_rows; default: as in configurations.")
    ] = None,
    only: Annotated[str, typer.Option(help="These metrics alone.")] = "",
    smallest: Annotated[bool, typer.Option(help="Few rows.")] = False,
) -> None:
    """Prints a table."""
    table = Table(title=f"{WORLD} ranks; memory of rank 0 beyond what it had before the first row")
    for column in ("metrics", "rows", "MiB", "seconds", "figures"):
        table.add_column(column, justify="left" if column in ("metrics", "figures") else "right")
    for name, metrics in METRICS.items():
        for count in map(int, ("20000" if smallest else rows).split(",")):
            if only in name:
                size, seconds, figures = measure(count, exact_rows, metrics)
                shown = ", ".join(f"{key} {value:.4g}" for key, value in figures.items())
                table.add_row(name, f"{count:,}", f"{size / 2**20:.0f}", f"{seconds:.1f}", shown)
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
