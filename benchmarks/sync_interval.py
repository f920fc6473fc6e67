"""AUC that a served model loses if it is synchronized with training only at intervals.

    python benchmarks/sync_interval.py [--seeds 5]

A DCN-V2 is trained in one process on a stream of clicks in simulated time. A batch has 256 rows and takes 10 s. The
model is trained on each batch once, in order. Before it is trained on a batch, served copies of the model predict that
batch. Like a service that follows deltas, a copy has the state of training at its last synchronization. This state is
constant for an interval, so the trained model computes the copy's predictions when the interval begins. All copies
follow the same training, so their differences are paired.

Users, items and topics have vectors. A click's logit is a scaled dot product of the user's vector and the sum of the
item's and topic's vectors, plus an appeal. Vectors of users and items drift as random walks that revert to 0. New
items appear all the time. An item's traffic halves every 2 hours, so half of it goes to items younger than that.

Writes benchmarks/results/sync_interval.json, docs/images/sync.png and the table in docs/benchmarks.md.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Annotated, Any

import harness
import numpy as np
import typer
from harness import Grid
from rank_group import join_group, rig

BATCH, STEPS_PER_H = 256, 360  # rows of a batch, batches in a simulated hour
WARM_UP_H, SERVED_H = 1, 4
# Name of a synchronization interval → steps of the interval; None: no synchronization after the warm-up.
SIDES = {"10 s": 1, "5 min": STEPS_PER_H // 12, "1 h": STEPS_PER_H, "never": None}
USERS, TOPICS, DIM = 500, 20, 4
ITEMS_PER_H, HALF_LIFE_H = 100, 2  # new items per hour, hours after which an item's traffic has halved
OLDEST_H, DRIFT_H = 8, 12  # age of the oldest item at the start, decay time of the vectors' autocorrelation, in hours
BIAS, SCALE, APPEAL = -1.5, 0.7, 1.0  # mean logit, weight of the dot product, weight of the appeal
WINDOW, SHIFT = STEPS_PER_H // 6, STEPS_PER_H // 24  # steps of a window of the plot (10 min) and between windows
MODEL = {"name": "dcn", "cross_layers": 2, "top_mlp": [64, 32]}
OPTIM = {"embeddings": {"name": "adagrad", "lr": 0.2}, "dense": {"lr": 0.002}}
TRUE = "true probabilities"


@dataclass(frozen=True)
class Stream:
    """Simulated clicks.

    Attributes:
        ids: User, item and topic of each row, int64 [3, T, BATCH] for T steps.
        chances: Probability of a click, float64 [T, BATCH].
        labels: 1 for a click, else 0, float32 [T, BATCH].
        items: Number of items.
    """

    ids: np.ndarray
    chances: np.ndarray
    labels: np.ndarray
    items: int

    @classmethod
    def simulate(cls, seed: int, steps: int) -> Stream:
        """Return a stream of this number of steps."""
        random = np.random.default_rng(seed)
        hours = steps / STEPS_PER_H
        born = np.sort(random.uniform(-OLDEST_H, hours, round(ITEMS_PER_H * (OLDEST_H + hours))))
        popularity, topics = random.lognormal(size=len(born)), random.integers(0, TOPICS, len(born))
        # The last column of items and topics is the appeal.
        users, items = random.normal(size=(USERS, DIM)), random.normal(size=(len(born), DIM + 1))
        centers = random.normal(size=(TOPICS, DIM + 1))
        keep = np.exp(-1 / STEPS_PER_H / DRIFT_H)
        ids, chances = np.empty((3, steps, BATCH), np.int64), np.empty((steps, BATCH))
        for step in range(steps):
            users, items = (keep * x + (1 - keep**2) ** 0.5 * random.normal(size=x.shape) for x in (users, items))
            age_h = step / STEPS_PER_H - born
            traffic = np.where(age_h >= 0, popularity * 0.5 ** (age_h / HALF_LIFE_H), 0)
            user = random.integers(0, USERS, BATCH)
            item = random.choice(len(born), BATCH, p=traffic / traffic.sum())
            vectors = (items[item] + centers[topics[item]]) / 2**0.5
            logits = BIAS + SCALE * (users[user] * vectors[:, :DIM]).sum(1) + APPEAL * vectors[:, DIM]
            ids[:, step], chances[step] = (user, item, topics[item]), 1 / (1 + np.exp(-logits))
        return cls(ids, chances, (random.random(chances.shape) < chances).astype(np.float32), len(born))


def train_and_predict(stream: Stream, seed: int, warm_up: int) -> dict[str, np.ndarray]:
    """Train on the stream, and return side → logits of the batches after the warm-up, float32 [T - warm_up, BATCH]."""
    import torch

    sizes = {"user": USERS, "item": stream.items, "topic": TOPICS}
    schema = {
        "sparse": {name: {"table": name} for name in sizes},
        "tables": {name: {"rows": rows, "dim": 8} for name, rows in sizes.items()},
    }
    torch.manual_seed(seed)
    rank_rig, steps = rig(schema, MODEL, 1, BATCH, run={"seed": seed}, optim=OPTIM), len(stream.labels)

    def batch(first: int, last: int) -> Any:
        labels, ids = stream.labels[first:last].ravel(), stream.ids[:, first:last].reshape(len(sizes), -1)
        return rank_rig.batch(labels, list(ids), number=first)

    logits: dict[str, list[np.ndarray]] = {side: [] for side in SIDES}
    for n in range(steps):
        for side, interval in SIDES.items() if n >= warm_up else ():
            if (n - warm_up) % (interval or steps) == 0:
                served = batch(n, min(n + (interval or steps), steps))
                logits[side] += [each["y"].logits.numpy() for each in rank_rig.step.evaluate(iter([served]))]
        for _ in rank_rig.step.train(iter([batch(n, n + 1)]), 1):
            pass
    return {side: np.concatenate(values).reshape(-1, BATCH) for side, values in logits.items()}


def auc_of(labels: np.ndarray, predictions: np.ndarray) -> float:
    """Return the AUC of predictions [T, BATCH]."""
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(labels.ravel(), predictions.ravel()))


def document(results: dict[str, Any]) -> str:
    """Return the table for docs/benchmarks.md, with means ± standard deviations over seeds."""
    rows, base = [], np.array(results["auc"]["10 s"])
    for side, values in results["auc"].items():
        pairs = zip((values, np.array(values) - base), (".4f", "+.4f"), strict=True)
        cells = [f"{np.mean(each):{form}} ± {np.std(each, ddof=len(base) > 1):.4f}" for each, form in pairs]
        rows.append([side, cells[0], cells[1] if side in list(SIDES)[1:] else ""])
    return Grid(("synchronized every", "AUC", "difference from 10 s"), rows).markdown()


def draw(windows: dict[str, list[float]]) -> None:
    """Plot the AUC over simulated time, given side → mean AUC of each window."""
    import matplotlib.pyplot as plt

    figure, panel = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for side, curve in windows.items():
        hours = (SHIFT * np.arange(len(curve)) + WINDOW / 2) / STEPS_PER_H
        panel.plot(hours, curve, label=side if side == "never" else f"every {side}", linewidth=1.8)
    panel.set(xlabel="simulated time since the end of the warm-up (hours)", ylabel="AUC in windows of 10 min")
    panel.set(xlim=(0, SERVED_H), xticks=range(SERVED_H + 1))
    panel.grid(alpha=0.3)
    panel.legend(title="synchronized", loc="lower left", ncols=2)
    figure.savefig(harness.IMAGES / "sync.png", dpi=120)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Number of streams and models.")] = 5,
    smallest: harness.Smallest = False,
) -> None:
    """Print the table; without --smallest, write results, plot and docs/benchmarks.md."""
    warm_up, served, seeds = (5, 10, 1) if smallest else (WARM_UP_H * STEPS_PER_H, SERVED_H * STEPS_PER_H, seeds)
    with tempfile.TemporaryDirectory() as folder:
        join_group(0, 1, f"{folder}/store")
    aucs: dict[str, list[float]] = {side: [] for side in (*SIDES, TRUE)}
    windows: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    starts = range(0, max(1, served - WINDOW + 1), SHIFT)
    for seed in range(seeds):
        stream = Stream.simulate(seed, warm_up + served)
        labels, predictions = stream.labels[warm_up:], train_and_predict(stream, seed, warm_up)
        for side, values in predictions.items():
            aucs[side].append(auc_of(labels, values))
            windows[side].append([auc_of(labels[n : n + WINDOW], values[n : n + WINDOW]) for n in starts])
        aucs[TRUE].append(auc_of(labels, stream.chances[warm_up:]))
        print(f"seed {seed}: {', '.join(f'{side} {values[-1]:.4f}' for side, values in aucs.items())}", flush=True)
    results = {"auc": aucs, "windows": {side: np.mean(each, 0).round(5).tolist() for side, each in windows.items()}}
    print(document(results))
    if not smallest:
        draw(results["windows"])
        harness.publish("sync_interval", results, document(results))


if __name__ == "__main__":
    typer.run(main)
