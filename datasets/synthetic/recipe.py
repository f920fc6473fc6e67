"""Draw rows with the columns of Criteo, and labels from a planted model.

    logit = bias + dense part + Σ over features of their ids' effects + Σ over pairs of features of u·v

Each part is scaled to its share of the logit's variance on a fixed sample. Ids are drawn log-uniformly by
rank (the most frequent id in a table of 10,000 rows takes 7.5 % of the draws). Effects shrink with the rank:
no model can learn ids that occur a few times in a million rows, so such ids have small effects.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from raytrec_datasets.writing import SPLITS, Output, SplitWriter, progress

from raytrec.config.schema import Schema

CHUNK_ROWS = 65_536  # a chunk depends only on (seed, split, chunk number); memory holds one chunk
BINS = 1_000_000  # histogram bins of the true probability, for the best AUC
LOGIT_STD = 1.7
SHARES = {"dense": 0.4, "ids": 0.5, "pairs": 0.1}  # shares of the logit's variance
POSITIVE_RATE = 0.25
EFFECT_RANKS = 2_048  # only ids with ranks from 0 to EFFECT_RANKS − 2 have an effect
PAIRS, PAIR_DIM, PAIR_IDS = 4, 3, 32
LONGEST_BAG = 8
SAMPLE_ROWS = 50_000


def write(
    out: Path, rows: int, seed: int, dense: int, sparse: int, multi_hot: int, table_rows: int, dim: int, force: bool
) -> None:
    """Write the dataset; the arguments are those of `raytrec prepare synthetic`.

    Raises:
        ConfigError: The output folder cannot be replaced (`Output.is_ready`).
    """
    options = {name: value for name, value in locals().items() if name not in ("out", "force")}
    output = Output(out, "synthetic", options, force)
    if not output.is_ready():
        shape = Shape.of(dense, sparse, min(multi_hot, sparse), table_rows)
        model = Planted(shape, seed)
        counts = {"train": rows, "valid": max(rows // 10, 1), "test": max(rows // 10, 1)}
        with output, progress("synthetic rows", sum(counts.values())) as advance:
            best = {
                s: _write_split(output.partial / s, model, seed, i, counts[s], advance) for i, s in enumerate(SPLITS)
            }
            output.finish(schema_of(shape, dim), counts, best_auc=best)
    best = output.facts()["best_auc"]
    line = f"best achievable AUC (of the model that generated the labels): test {best['test']:.4f}"
    output.summary("synthetic", lines=[line])


def schema_of(shape: Shape, dim: int) -> Schema:
    """Return the schema of a shape, with dense columns I1 …, and sparse features C1 … with tables of width `dim`."""
    pooling = {f: "mean" if shape.is_mean(f) else "sum" for f in range(len(shape.tables))}
    return Schema.parse(
        {
            "labels": ["label"],
            "dense": [f"I{i + 1}" for i in range(shape.dense)],
            "sparse": {f"C{f + 1}": {"table": f"C{f + 1}", "pooling": pooling[f]} for f in pooling},
            "tables": {f"C{f + 1}": {"rows": rows, "dim": dim} for f, rows in enumerate(shape.tables)},
        },
        "schema.yaml",
    )


def _write_split(folder: Path, model: Planted, seed: int, split: int, rows: int, advance) -> float:
    """Write a split, and return the AUC of the true probabilities."""
    writer, histogram = None, np.zeros((2, BINS), np.int64)
    for chunk, start in enumerate(range(0, rows, CHUNK_ROWS)):
        rng = np.random.default_rng((seed, 3, split, chunk))
        drawn = draw(model.shape, rng, min(CHUNK_ROWS, rows - start))
        probability = 1 / (1 + np.exp(-model.logits(drawn)))
        label = rng.random(len(probability)) < probability
        bins = np.minimum((probability * BINS).astype(np.int64), BINS - 1)
        for value in (0, 1):
            histogram[value] += np.bincount(bins[label == value], minlength=BINS)
        table = _table(model, drawn, label)
        writer = writer or SplitWriter(folder, table.schema)
        writer.write(table)
        advance(len(label))
    writer.close()
    return _auc(*histogram)


def _table(model: Planted, drawn: Rows, label: np.ndarray) -> pa.Table:
    columns = {"label": label.astype(np.int8)}
    for i in range(model.shape.dense):
        columns[f"I{i + 1}"] = np.ascontiguousarray(drawn.dense[:, i])
    for f in range(len(model.shape.tables)):
        ids = model.ids(f, drawn.ranks[f])
        if model.shape.is_bag(f):
            offsets = np.concatenate([[0], np.cumsum(drawn.lengths[f])]).astype(np.int32)
            ids = pa.ListArray.from_arrays(offsets, ids)
        columns[f"C{f + 1}"] = ids
    return pa.table(columns)


def _auc(negative: np.ndarray, positive: np.ndarray) -> float:
    """Return the area under the ROC curve, given counts by bin; a pair of rows in the same bin counts half.

    Without positive or without negative rows, the result is 0.5.
    """
    below = np.cumsum(negative) - negative
    pairs = negative.sum() * positive.sum()
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else 0.5


@dataclass(frozen=True)
class Shape:
    """Sizes of the data.

    Attributes:
        dense: Number of dense columns.
        tables: Number of rows of each feature's table.
        multi_hot: Number of features that are bags.
    """

    dense: int
    tables: tuple[int, ...]
    multi_hot: int

    @classmethod
    def of(cls, dense: int, sparse: int, multi_hot: int, largest: int) -> Shape:
        """Return a shape with log-spaced table sizes from 100 to `largest`, in mixed order."""
        sizes = np.geomspace(100, largest, sparse).round().astype(int)
        return cls(dense, tuple(int(s) for s in np.random.default_rng(26).permutation(sizes)), multi_hot)

    def is_bag(self, feature: int) -> bool:
        """Return True if the feature is one of the last `multi_hot` features, which are bags."""
        return feature >= len(self.tables) - self.multi_hot

    def is_mean(self, feature: int) -> bool:
        """Return True if the feature is mean-pooled, as every second bag is; other bags are sum-pooled."""
        return self.is_bag(feature) and feature % 2 == 0


@dataclass
class Rows:
    """Chunk of drawn inputs.

    Attributes:
        dense: Dense columns, float32 [n, dense].
        lengths: Number of ids in each row, [n] for each feature.
        ranks: Frequency ranks of the ids, [sum of lengths] for each feature.
    """

    dense: np.ndarray
    lengths: list[np.ndarray]
    ranks: list[np.ndarray]


def draw(shape: Shape, rng: np.random.Generator, rows: int) -> Rows:
    """Return the randomly drawn inputs of `rows` rows; the state of `rng` advances."""
    dense = rng.standard_normal((rows, shape.dense), dtype=np.float32)
    dense[:, 1::2] = np.log1p(np.abs(dense[:, 1::2]) * 3)  # like Criteo's counts after their logarithm
    lengths, ranks = [], []
    for feature, size in enumerate(shape.tables):
        bag = rng.integers(0, LONGEST_BAG + 1, rows) if shape.is_bag(feature) else np.ones(rows, np.int64)
        u = rng.random(int(bag.sum()), dtype=np.float32)
        rank = np.exp(u * np.float32(np.log(size))).astype(np.int64) - 1
        lengths.append(bag)
        ranks.append(np.minimum(rank, size - 1))
    return Rows(dense, lengths, ranks)


class Planted:
    """Model that generates the labels, planted for a shape and a seed.

    Attributes:
        shape: Sizes of the data.
    """

    def __init__(self, shape: Shape, seed: int):
        self.shape = shape
        rng = np.random.default_rng((seed, 1))
        self._linear = rng.normal(size=shape.dense)
        strength = rng.gamma(1.5, size=len(shape.tables))
        decay = 1 / (1 + np.arange(EFFECT_RANKS) / 25)
        self._effects = [s * decay * rng.normal(size=EFFECT_RANKS) for s in strength]
        for effect in self._effects:
            effect[-1] = 0  # the last rank also stands for all higher ranks
        single = [f for f in range(len(shape.tables)) if not shape.is_bag(f)] or [0, 1]
        self._pairs = [tuple(rng.choice(single, 2, replace=len(single) < 2)) for _ in range(PAIRS)]
        self._factors = [rng.normal(size=(2, PAIR_IDS + 1, PAIR_DIM)) for _ in range(PAIRS)]
        for factor in self._factors:
            factor[:, -1] = 0
        self._scatter = [_coprime(size, rng) for size in shape.tables]
        self._scale = dict.fromkeys(SHARES, 1.0)
        self._bias = 0.0
        self._calibrate(draw(shape, np.random.default_rng((seed, 2)), SAMPLE_ROWS))

    def logits(self, rows: Rows) -> np.ndarray:
        """Return the true logit of each row, float64 [n]."""
        return self._bias + sum(self._scale[name] * part for name, part in self._parts(rows).items())

    def ids(self, feature: int, ranks: np.ndarray) -> np.ndarray:
        """Convert ranks by frequency to ids, int64 [n], which are scattered so that they do not reveal frequencies."""
        factor, shift = self._scatter[feature]
        return (ranks * factor + shift) % self.shape.tables[feature]

    def _parts(self, rows: Rows) -> dict[str, np.ndarray]:
        dense = rows.dense @ self._linear + np.tanh(2 * rows.dense[:, :1]).sum(1)
        ids = sum(self._feature(rows, f) for f in range(len(self.shape.tables)))
        pairs = np.zeros(len(rows.dense))
        for (a, b), factor in zip(self._pairs, self._factors, strict=True):
            left, right = (np.minimum(rows.ranks[f], PAIR_IDS) for f in (a, b))
            pairs += np.einsum("nd,nd->n", factor[0][left], factor[1][right])
        return {"dense": dense, "ids": ids, "pairs": pairs}

    def _feature(self, rows: Rows, feature: int) -> np.ndarray:
        lengths = rows.lengths[feature]
        effects = self._effects[feature][np.minimum(rows.ranks[feature], EFFECT_RANKS - 1)]
        if not self.shape.is_bag(feature):
            return effects
        totals = np.concatenate([[0.0], np.cumsum(effects)])
        ends = np.cumsum(lengths)
        sums = totals[ends] - totals[ends - lengths]
        divisor = np.maximum(lengths, 1) if self.shape.is_mean(feature) else LONGEST_BAG / 2
        return sums / divisor

    def _calibrate(self, sample: Rows) -> None:
        """Scale the parts to their shares, and set the bias that results in the positive rate."""
        parts = self._parts(sample)
        for name, part in parts.items():
            self._scale[name] = LOGIT_STD * np.sqrt(SHARES[name]) / max(part.std(), 1e-9)
        logits, low, high = self.logits(sample), -20.0, 20.0
        while high - low > 1e-9:
            middle = (low + high) / 2
            if (1 / (1 + np.exp(-logits - middle))).mean() < POSITIVE_RATE:
                low = middle
            else:
                high = middle
        self._bias = low


def _coprime(size: int, rng: np.random.Generator) -> tuple[int, int]:
    """Return (factor, shift) of a bijection rank → (rank · factor + shift) mod size."""
    while np.gcd(factor := int(rng.integers(1, size)), size) != 1:
        pass
    return factor, int(rng.integers(size))
