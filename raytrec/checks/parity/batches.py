"""Random global batches, and their division among ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch.nn.functional import pad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from raytrec.config.features import Features, resolve_features
from raytrec.config.schema import Schema
from raytrec.data.batch import Batch
from raytrec.tasks.task import Task, key_columns
from raytrec.tasks.task_columns import label_ranges, whole_labels

START_OF_2026_S = 1_767_225_600.0  # 2026-01-01 00:00 UTC as Unix time
MAX_UNBOUNDED_LABEL = 5.0  # largest magnitude of labels without a bound


@dataclass(frozen=True)
class GlobalBatch:
    """Global batch as plain tensors, before its division among ranks.

    Attributes:
        dense: Dense features, float32 [B, n].
        labels: Labels in the schema's order, float32 [B, labels].
        bags: Feature → (ids, int64 [N]; bag of each id, int64 [N]; weight of each id, float32 [N]).
        weights: Weight of each row in each task, float32 [B, T]; None: all weights are 1.
        keys: Values of the tasks' key columns (tasks.task.key_columns), int64 [B, K]; None without key columns.
        side_features: Sequence feature → values of its side features for each id, float64 [N, n].
    """

    dense: torch.Tensor
    labels: torch.Tensor
    bags: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    weights: torch.Tensor | None = None
    keys: torch.Tensor | None = None
    side_features: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, rows: slice) -> GlobalBatch:
        start, stop, _ = rows.indices(len(self))
        bags, side_features = {}, {}
        for feature, (ids, bag, weights) in self.bags.items():
            is_inside = (bag >= start) & (bag < stop)
            bags[feature] = ids[is_inside], bag[is_inside] - start, weights[is_inside]
            if feature in self.side_features:
                side_features[feature] = self.side_features[feature][is_inside]
        weights, keys = (None if x is None else x[rows] for x in (self.weights, self.keys))
        return GlobalBatch(self.dense[rows], self.labels[rows], bags, weights, keys, side_features)


def make_random_batches(
    schema: Schema,
    rows: int,
    count: int,
    seed: int,
    tasks: Sequence[Task] = (),
    lengths: Mapping[str, int] | None = None,
) -> list[GlobalBatch]:
    """Return `count` random batches of `rows` rows each.

    Each bag has 0 to 4 ids, or as many as `lengths` specifies; ids may repeat. The ids of each feature in a batch
    begin with the last and the first id of its table. If a feature has weights, they are in [0, 2). Dense features are
    standard normal.

    Args:
        schema: Schema of the run.
        rows: Number of rows per batch.
        count: Number of batches.
        seed: Seed for the random values.
        tasks: Tasks, which determine labels: the lowest or highest accepted value (0 or 1 if any number is
            accepted, 5 or −5 in place of a missing bound), or any class. If tasks mask or weight rows, about a third
            of the rows have weight 0 in each task. The other rows have weights in (0, 2). If tasks group rows, each
            group has a few rows.
        lengths: Feature → number of ids in each of its bags, for features whose bags have a fixed length.
    """
    lengths = lengths or {}
    ranges, classes = label_ranges(tasks, schema), whole_labels(tasks)
    bounds_L = [ranges[label] or (0.0, 1.0) for label in schema.labels]
    low_L, high_L = torch.tensor(bounds_L).T.nan_to_num(posinf=MAX_UNBOUNDED_LABEL, neginf=-MAX_UNBOUNDED_LABEL)
    weighs, columns = any(task.is_weighted for task in tasks), len(key_columns(tasks))
    widths = {name: len(spec.side_features) for name, spec in schema.sparse.items() if spec.side_features}
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        bags = {}
        for feature, spec in schema.sparse.items():
            low, high = (lengths[feature],) * 2 if feature in lengths else (0, 4)
            lengths_B = torch.randint(low, high + 1, (rows,), generator=g)
            own_rows = schema.tables[spec.table].own_rows
            ids = torch.randint(0, own_rows, (int(lengths_B.sum()),), generator=g)
            ids[:1], ids[1:2] = own_rows - 1, 0
            weights = torch.rand(len(ids), generator=g) * 2 if spec.weights else torch.ones(len(ids))
            bags[feature] = ids, torch.arange(rows).repeat_interleave(lengths_B), weights
        side_features = {  # times within the first hour of 2026, in seconds
            name: START_OF_2026_S + 3600 * torch.rand(len(bags[name][0]), width, generator=g, dtype=torch.float64)
            for name, width in widths.items()
        }
        dense = torch.randn(rows, len(schema.dense), generator=g)
        is_high = torch.randint(0, 2, (rows, len(schema.labels)), generator=g).bool()
        labels = torch.where(is_high, high_L, low_L)
        for column in (schema.labels.index(label) for label in classes):
            low, high = int(low_L[column]), int(high_L[column])
            labels[:, column] = torch.randint(low, high + 1, (rows,), generator=g).float()
        weights = torch.rand(rows, len(tasks), generator=g) * 3 - 1 if weighs else None
        if weights is not None:
            weights[:1] = weights[:1].abs()  # the first row counts in every task
            weights = weights.clamp(min=0)
        keys = torch.randint(0, 1 + rows // 4, (rows, columns), generator=g) if columns else None
        batches.append(GlobalBatch(dense, labels, bags, weights, keys, side_features))
    return batches


def compute_row_bounds(rows: int, world: int, balance: str) -> list[int]:
    """Return the boundaries of the ranks' rows: rank r has the rows [bounds[r], bounds[r + 1]).

    Args:
        rows: Number of rows in a global batch.
        world: Number of ranks.
        balance: equal, unequal (rank r has r + 1 shares), or empty (rank 0 has no rows, unless it is the only rank, and
            the others have equal shares); all up to rounding.
    """
    shares = {
        "equal": [1] * world,
        "unequal": list(range(1, world + 1)),
        "empty": [0] + [1] * (world - 1) if world > 1 else [1],
    }[balance]
    return [rows * sum(shares[:r]) // sum(shares) for r in range(world + 1)]


def make_local_batch(
    batch: GlobalBatch, schema: Schema, bounds: list[int], rank: int, features: Features | None = None
) -> Batch:
    """Return a rank's part of a global batch, in the form in which training reads it.

    The part is padded with empty rows of weight 0 to the size of the largest part.

    Args:
        batch: The global batch.
        schema: Schema of the run.
        bounds: Boundaries of the ranks' rows (`compute_row_bounds`).
        rank: Rank whose part is returned.
        features: Features of the run; default: features of a model that reads no sequence id by id.
    """
    longest = max(b - a for a, b in pairwise(bounds))
    part = batch[bounds[rank] : bounds[rank + 1]]

    def padded(rows: torch.Tensor | None) -> torch.Tensor | None:
        return None if rows is None else pad(rows, (0, 0, 0, longest - len(part)))

    features = features or resolve_features(schema)
    orders = {f: _order_recent_first(part.bags[f][1], features.sequences.get(f)) for f in schema.sparse}
    bags = [tuple(values[orders[f]] for values in part.bags[f]) for f in schema.sparse]
    lengths = [torch.bincount(bag, minlength=longest) for _, bag, _ in bags]
    weights = torch.cat([weights for _, _, weights in bags]) if schema.has_weights else None
    return Batch(
        padded(part.dense),
        KeyedJaggedTensor(
            features.keys,
            torch.cat([ids for ids, _, _ in bags]),
            weights,
            lengths=torch.cat(lengths).int(),
            length_per_key=[len(ids) for ids, _, _ in bags],
        ),
        padded(part.labels),
        (torch.arange(longest) < len(part)).float(),
        len(batch),
        task_weights=padded(part.weights),
        keys=padded(part.keys),
        side_features={f: part.side_features[f][orders[f]] for f in features.side_features} or None,
    )


def count_later_ids(bag: torch.Tensor) -> torch.Tensor:
    """Return, for each id, the number of ids after it in its bag, int64 [N]; `bag` must be in ascending order."""
    ends = torch.bincount(bag).cumsum(0)
    return ends[bag] - 1 - torch.arange(len(bag), device=bag.device)


def _order_recent_first(bag: torch.Tensor, length: int | None) -> torch.Tensor:
    """Return the indices of a feature's ids in the order of training batches, int64 [n].

    A sequence that is read id by id has its `length` most recent ids, the last one first. Other features, for
    which `length` is None, have all ids in their order.
    """
    if length is None:
        return torch.arange(len(bag))
    ages = count_later_ids(bag)
    recent = (ages < length).nonzero().squeeze(1)
    return recent[(bag[recent] * length + ages[recent]).argsort()]
