"""One configuration trained with 1, 2, 3 and 4 workers: the same loss curve and the same test AUC.

    raytrec prepare synthetic --out data/synthetic
    python benchmarks/curves.py [CONFIG] [section.key=value]...

Writes benchmarks/results/curves.json and docs/images/curves.png.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Annotated

import matplotlib
import typer
from harness import IMAGES, Grid, Smallest, results_file

from raytrec.config.run_config import load_config
from raytrec.driver.run import train

matplotlib.use("Agg")
from matplotlib import pyplot as plt

WORKERS = (1, 2, 3, 4)


def run(config: str, overrides: list[str], workers: int, folder: Path) -> dict:
    """Train once; return {auc, ne, loss}, where loss is [[step, log loss since the previous entry], …]."""
    from mlflow import MlflowClient

    store = f"sqlite:///{folder}/mlflow.db"
    settings = [f"run.dir={folder}/w{workers}", f"tracking.uri={store}", f"scaling.num_workers={workers}"]
    result = train(config, ["train.log_every_steps=2", *overrides, *settings]).metrics
    history = MlflowClient(store).get_metric_history(result["mlflow_run_id"], "train/logloss")
    loss = [[point.step, point.value] for point in sorted(history, key=lambda point: point.step)]
    return {"auc": result["eval.auc"], "ne": result["eval.ne"], "loss": loss}


def difference(one: dict, other: dict) -> list[float]:
    """Return the absolute differences between two runs' training losses, at each recorded step."""
    assert [step for step, _ in one["loss"]] == [step for step, _ in other["loss"]]
    return [abs(a - b) for (_, a), (_, b) in zip(one["loss"], other["loss"], strict=True)]


def draw(runs: dict[int, dict]) -> None:
    """Plot the loss curves, and below them the differences from 1 worker."""
    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(3, 2), layout="constrained")
    for workers, width in zip(runs, (7, 4.5, 2.5, 1), strict=True):
        steps, losses = zip(*runs[workers]["loss"], strict=True)
        name = f"{workers} worker{'s' * (workers > 1)}, test AUC {runs[workers]['auc']:.5f}"
        above.plot(steps, losses, linewidth=width, label=name, color=f"C{workers - 1}")
        if workers > 1:
            # A log axis cannot show 0.
            values = [max(d, 1e-9) for d in difference(runs[1], runs[workers])]
            below.plot(steps, values, linewidth=1, label=f"{workers} workers", color=f"C{workers - 1}")
    above.set(ylabel="training log loss (nats)", title="The same run on any number of workers")
    below.set(ylabel="|difference to 1 worker|", xlabel="step", yscale="log", ylim=(1e-9, 1e-3))
    above.legend()
    below.legend(loc="upper left")
    figure.savefig(IMAGES / "curves.png", dpi=110)


def main(
    config: Annotated[str, typer.Argument(metavar="CONFIG")] = "jobs/synthetic.yaml",
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...")] = None,
    smallest: Smallest = False,
) -> None:
    """Train with each number of workers, print the table, draw the plot and store the results.

    With --smallest, train with 1 and 2 workers, and only print the table.
    """
    load_config(config, overrides or [])  # raises errors in the configuration before the first run
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            workers: run(config, overrides or [], workers, Path(folder))
            for workers in (WORKERS[:2] if smallest else WORKERS)
        }
    summary, rows = {}, []
    for workers, figures in runs.items():
        auc, ne, largest = figures["auc"], figures["ne"], max(difference(runs[1], figures))
        summary[workers] = {"auc": auc, "ne": ne, "loss_difference": largest}
        rows.append([str(workers), f"{auc:.6f}", f"{ne:.6f}", f"{largest:.1e}"])
    header = ("workers", "test AUC", "test NE", "largest difference in training loss")
    Grid(header, rows, f"{config}, {runs[1]['loss'][-1][0]} steps", left=0).show()
    if not smallest:
        draw(runs)
        results_file("curves").write_text(json.dumps({"summary": summary, "runs": runs}) + "\n")


if __name__ == "__main__":
    typer.run(main)
