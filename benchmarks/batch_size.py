"""AUC with a doubled global batch, by learning rate, on synthetic rows with Criteo's columns, on one CPU.

    python benchmarks/batch_size.py [--rows 400000] [--rounds 3]

A model in the form of DLRM-DCNv2, with the optimizers of jobs/criteo_1tb_8xa100.yaml (Adagrad for tables and dense
layers), is trained once on rows whose labels follow a random factorization machine. The reference has BATCH rows per
step and the job's learning rate. The other variants have twice the rows per step, hence half the steps, and a
multiple of the learning rate. In each round, all variants have the same rows, initial values and test rows. The
differences from the reference are means over rounds ± standard error.

Writes benchmarks/results/batch_size.json and the table of docs/benchmarks.md.
"""

from __future__ import annotations

import tempfile
from math import sqrt
from statistics import mean, stdev
from typing import Annotated, Any

import harness
import torch
import typer
from gpu import DENSE, FEATURES, WHOLE, config_of, schema_of
from harness import Grid
from rank_group import join_group
from sklearn.metrics import roc_auc_score
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.run_config import RunConfig
from raytrec.data.batch import Batch
from raytrec.worker.build import build_step

TABLE_ROWS, WIDTH, FACTORS = 5_000, 16, 4
BATCH, RATE, TEST_ROWS = 256, 0.005, 50_000
MODEL = {"name": "dcn", "bottom_mlp": [64, 32, 16], "cross_layers": 3, "cross_rank": 32, "top_mlp": [128, 64]}
# (rows per step ÷ BATCH, learning rate ÷ RATE); the first is the reference.
VARIANTS = ((1, 1.0), (2, 1.0), (2, sqrt(2)), (2, 2.0))
Figures = dict[str, list[float]]  # variant → AUC of each round


def draw_rows(rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random dense columns [rows, 13] and ids [rows, 26], and labels [rows] of a model that all seeds share."""
    teacher, draw = torch.Generator().manual_seed(-1), torch.Generator().manual_seed(seed)
    effects = 0.25 * torch.randn(FEATURES, TABLE_ROWS, generator=teacher)
    factors = 0.25 * torch.randn(FEATURES, TABLE_ROWS, FACTORS, generator=teacher)
    slopes = 0.2 * torch.randn(DENSE, generator=teacher)
    dense = torch.randn(rows, DENSE, generator=draw)
    ids = (torch.rand(rows, FEATURES, generator=draw) ** 3 * TABLE_ROWS).long()  # small ids are frequent
    places = torch.arange(FEATURES)
    chosen = factors[places, ids]  # [rows, 26, FACTORS]
    pairs = (chosen.sum(1).square() - chosen.square().sum(1)).sum(1) / 2
    logits = dense @ slopes + effects[places, ids].sum(1) + pairs - 1
    return dense, ids, (torch.rand(rows, generator=draw) < logits.sigmoid()).float()


def make_batches(columns: tuple[torch.Tensor, ...], size: int) -> list[Batch]:
    """Return the rows as batches of `size` rows; `size` must divide the number of rows."""
    keys = [f"C{number + 1}" for number in range(FEATURES)]
    lengths = torch.ones(FEATURES * size, dtype=torch.int32)
    return [
        Batch(dense, KeyedJaggedTensor(keys, ids.T.flatten(), lengths=lengths), y.unsqueeze(1), torch.ones(size), size)
        for dense, ids, y in zip(*(column.split(size) for column in columns), strict=True)
    ]


def make_config(batch: int, rate: float, seed: int) -> RunConfig:
    """Return the configuration of a variant."""
    values = config_of(WHOLE, batch).model_dump(exclude_unset=True)
    optimizers = {part: {"name": "adagrad", "lr": rate} for part in ("embeddings", "dense")}
    return RunConfig.model_validate(values | {"model": MODEL, "optim": optimizers, "run": {"seed": seed}})


def measure(rows: int, factor: int, multiple: float, seed: int) -> float:
    """Train one variant, (factor, multiple) of VARIANTS, on the rows of a seed, and return the AUC of the test rows.

    The number of training rows is rounded down to a multiple of 2 · BATCH.
    """
    size, schema = BATCH * factor, schema_of(TABLE_ROWS, WIDTH)
    train, test = draw_rows(rows // (2 * BATCH) * 2 * BATCH, 2 * seed), draw_rows(TEST_ROWS, 2 * seed + 1)
    step, _ = build_step(make_config(size, RATE * multiple, seed), schema, torch.device("cpu"))
    batches = make_batches(train, size)
    for _ in step.train(iter(batches), len(batches)):
        pass
    outputs = list(step.evaluate(iter(make_batches(test, TEST_ROWS // 50))))
    scores = torch.cat([next(iter(each.tasks.values())).predictions for each in outputs])
    return float(roc_auc_score(test[2].numpy(), scores.numpy()))


def grid(found: Figures) -> Grid:
    """Return the table of the variants."""
    header, rows = ("rows per step", "learning rate", "test AUC", "difference"), []
    reference = found[repr(VARIANTS[0])]
    for factor, multiple in VARIANTS:
        aucs = found[repr((factor, multiple))]
        apart = [auc - other for auc, other in zip(aucs, reference, strict=True)]
        error = stdev(apart) / sqrt(len(apart)) if len(apart) > 1 else float("nan")
        difference = "" if aucs is reference else f"{mean(apart):+.4f} ± {error:.4f}"
        names = f"{factor} × {BATCH}", f"{multiple:.2f} × {RATE}"
        rows.append([*names, f"{mean(aucs):.4f}", difference])
    return Grid(header, rows, left=2)


def main(
    rows: Annotated[int, typer.Option(min=1024, help="Number of training rows.")] = 400_000,
    rounds: harness.Rounds = 3,
    smallest: harness.Smallest = False,
) -> None:
    """Train all variants in each round and print the table; without --smallest, write it into docs/benchmarks.md."""
    rows, rounds = (1024, 1) if smallest else (rows, rounds)
    found: Figures = {repr(variant): [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory(prefix="raytrec-batch-") as folder:
        join_group(0, 1, f"{folder}/store")
        for seed in range(rounds):
            for variant in VARIANTS:
                found[repr(variant)].append(measure(rows, *variant, seed))
            print(f"round {seed + 1}: {[round(aucs[-1], 4) for aucs in found.values()]}", flush=True)
    grid(found).show()
    if not smallest:
        content: dict[str, Any] = {"rows": rows, "auc": found}
        harness.publish("batch_size", content, grid(found).markdown())


if __name__ == "__main__":
    typer.run(main)
