"""parity: embeddings and gradients equal those of a single process.

A bag contains the ids of a feature in one row of a batch. Before a step, the check pools a few bags of its batch in
plain torch, and finds their table rows only through the map of shards. The result is compared with the inputs of the
dense layers. After the step, the gradient of these table rows is computed from its definition over the batches of all
ranks. This gradient is compared with the gradient that reached the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist

from raytrec.checks.live.keys import Bags, compute_bag_factors, compute_slots, flatten_vectors, select_bags
from raytrec.checks.live.outcome import STEP, Check, CheckedRun, Outcome, Position
from raytrec.checks.live.registry import check
from raytrec.compat.torchrec_ import get_shard_origin
from raytrec.data.batch import Batch
from raytrec.embeddings import sharding
from raytrec.embeddings.hashing import compute_initial_values
from raytrec.embeddings.taps import KeyLookups, add_row_gradients, iterate_keys, match_ids, split_bags

COMPARED_BAGS = 4  # compared bags per feature and rank, in addition to the longest bag
MAX_COMPARING_RANKS = 8  # ranks whose bags are compared at a time; limited because all ranks exchange the bags' ids
COMPARED_ROWS = 256  # maximum number of rows per table whose gradients are compared
MAX_RELATIVE_ERROR = 1e-5  # largest accepted relative error, without the rounding by plan.qcomms; see Parity
MIN_MAGNITUDE = 1e-30  # smallest divisor of an error; smaller numbers lose precision


@check("parity")
class Parity(Check):
    """Check that compares the embeddings and gradients of a step with those of a single process.

    The error of a bag or row is relative to the sum of the magnitudes of its terms. Otherwise, rounding would seem
    large when terms cancel. Measured errors are at most 5e-7, whereas a wrong divisor, row or factor causes errors of
    0.1 or more. If plan.qcomms rounds values sent between ranks, a bound on the effect of this rounding
    (embeddings/sharding.py) is added to the limit of 1e-5.
    """

    moments = frozenset({STEP})
    do = (
        "resume the run (raytrec train --resume RUN, or submit its job again); run raytrec check CONFIG to see "
        "whether this plan is wrong from the start, for example with another version of torchrec or fbgemm"
    )

    def __init__(self, run: CheckedRun):
        super().__init__(run)
        self._turn = 0
        self._forward, self._backward = _bound_roundings(run)
        self._rows: dict[str, torch.Tensor] = {}
        self._expected: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def prepare(self, batch: Batch) -> None:
        """Compute the expected embeddings of a few bags of a batch, before the step that trains it.

        This is a collective operation: every rank must call it with its part of the batch, in CPU memory.
        """
        bags = self._bags(batch)
        self._rows = self._gather_compared_rows(bags)
        values = self._gather_row_values()
        self._reset_new_rows(values, batch)
        for feature, selected in bags.items():
            table = self.run.schema.sparse[feature].table
            vectors_ND = values[table][torch.searchsorted(self._rows[table], selected.ids)]
            vectors_ND *= selected.factors.unsqueeze(1)
            pooled_SD = vectors_ND.new_zeros(len(selected.doubt), vectors_ND.shape[1])
            sizes_S = vectors_ND.new_zeros(len(selected.doubt))
            pooled_SD.index_add_(0, selected.bag, vectors_ND)
            sizes_S.index_add_(0, selected.bag, vectors_ND.abs().amax(1))
            sizes_S = torch.maximum(sizes_S * selected.doubt, self._forward[table].smallest * selected.share)
            self._expected[feature] = selected.at, pooled_SD, sizes_S

    @torch.no_grad()
    def evaluate(self, position: Position, probed: bool) -> Outcome:
        """Return the outcome of comparing the step with a single process. Every rank must call this method."""
        run, peers = self.run, self.run.peers
        pooled = run.taps.input.pooled
        # Feature → error of its pooled embeddings; table → (error, rank that holds the largest error).
        forward = {
            feature: find_largest_error(flatten_vectors(pooled[feature][at]), expected, sizes)[0]
            for feature, (at, expected, sizes) in self._expected.items()
        }
        gradient = dict(self._compare_gradients())
        limits = [MAX_RELATIVE_ERROR + self._forward[run.schema.sparse[f].table].share for f in forward]
        limits += [MAX_RELATIVE_ERROR + self._backward[table].share for table in gradient]
        local_errors = [*forward.values(), *(error for error, _ in gradient.values())]
        worst = peers.max(torch.tensor(local_errors, dtype=torch.float64)).tolist()
        errors = list(zip(worst, limits, strict=True))
        wrong = any(error > limit for error, limit in errors)
        problems = self._problems(peers.objects((forward, gradient)), errors) if wrong else []
        summary = "pooled embeddings and gradients match those of a single process"
        nearest = max([(0.0, MAX_RELATIVE_ERROR), *errors], key=lambda pair: pair[0] / pair[1])
        return self.outcome(position.step, problems, summary, *nearest)

    def _problems(self, of_ranks: list[tuple[dict, dict]], errors: list[tuple[float, float]]) -> list[str]:
        (forward, gradient), texts = of_ranks[0], []
        for feature, (error, _) in zip(forward, errors, strict=False):
            _, rank = max((found[feature], rank) for rank, (found, _) in enumerate(of_ranks))
            texts.append(
                f"table {self.run.schema.sparse[feature].table}, feature {feature}: pooled embeddings on "
                f"rank {rank} differ from those of a single process, with a relative error of {error:.2g}"
            )
        for table, (error, _) in zip(gradient, errors[len(forward) :], strict=True):
            _, holder = max(found[table] for _, found in of_ranks)
            texts.append(
                f"table {table}: the gradient that reaches rank {holder} differs from the gradient of the "
                f"global loss, with a relative error of {error:.2g}"
            )
        return [text for text, (error, limit) in zip(texts, errors, strict=True) if error > limit]

    def _reset_new_rows(self, values: dict[str, torch.Tensor], batch: Batch) -> None:
        """Set the values of rows that the batch assigns to new ids to the initial values of these ids."""
        for name, (rows, ids, _) in (batch.new_rows or {}).items():
            compared, table, seed = self._rows[name], self.run.tables[name], self.run.config.run.seed
            if len(compared):
                hits, places = match_ids(compared, rows)
                initial = compute_initial_values(seed, name, ids[hits], range(table.shape[1]), table.shape[0])
                values[name][places] = initial.to(table.dtype).float()

    def _bags(self, batch: Batch) -> dict[str, Bags]:
        """Return a few bags of each feature: the bags of the first rows with a weight above 0, and the longest bag.

        Bags of more than `LONGEST_BAG` ids are omitted. No bags are selected if it is not this rank's turn to compare
        bags, or if no row has such a weight.
        """
        is_turn = is_comparing(dist.get_rank(), dist.get_world_size(), self._turn)
        self._turn += 1
        first = (batch.weights > 0).nonzero().squeeze(1)[: COMPARED_BAGS if is_turn else 0]
        return {
            feature: select_bags(
                key,
                first[first < len(key.lengths)],
                self.run.features.is_mean(feature),
                self.run.device,
                self.run.features.sequences.get(feature),
            )
            for feature, key in self._keys(batch)
        }

    def _keys(self, batch: Batch) -> Iterator[tuple[str, KeyLookups]]:
        """Yield (feature, its ids and bags); for features of candidates, each id is a separate bag."""
        schema = self.run.schema
        for feature, key in zip(schema.sparse, iterate_keys(batch.sparse, len(schema.sparse)), strict=True):
            yield feature, split_bags(key) if feature in schema.candidates else key

    def _gather_compared_rows(self, bags: dict[str, Bags]) -> dict[str, torch.Tensor]:
        """Return table → sorted rows in the compared bags of all ranks, int64 [R]. Every rank must call this method."""
        starts, total = {}, 0
        for name, table in self.run.tables.items():
            starts[name], total = total, total + table.shape[0]
        keys = torch.cat([b.ids + starts[self.run.schema.sparse[f].table] for f, b in bags.items()])
        keys = self.run.peers.union(keys)
        borders = torch.tensor([*starts.values(), total], device=keys.device)
        sizes = torch.searchsorted(keys, borders).diff().tolist()
        return {name: part - starts[name] for name, part in zip(starts, keys.split(sizes), strict=True)}

    def _gather_row_values(self) -> dict[str, torch.Tensor]:
        """Return table → values of the compared rows, float32 [R, dim]. Every rank must call this method."""
        tables = self.run.tables
        flat, blocks = _make_zero_blocks(
            [(len(self._rows[name]), table.shape[1]) for name, table in tables.items()], self.run.device
        )
        values = dict(zip(tables, blocks, strict=True))
        for name, table in tables.items():
            for shard in [] if table.weight.replicated else table.weight.local:
                rows, columns = self._rows[name], slice(shard.columns.start, shard.columns.stop)
                edges = torch.tensor([shard.rows.start, shard.rows.stop], device=rows.device)
                low, high = torch.searchsorted(rows, edges).tolist()
                values[name][low:high, columns] = shard.read(rows[low:high] - shard.rows.start).float()
        dist.all_reduce(flat)
        for name, table in tables.items():
            if table.weight.replicated:
                values[name].copy_(table.weight.local[0].values[self._rows[name]])
        return values

    def _compare_gradients(self) -> Iterator[tuple[str, tuple[float, int]]]:
        """Yield (table, (largest error of its gradient, rank that holds the value with this error))."""
        device, world = self.run.device, dist.get_world_size()
        rows = {name: every[:: max(1, -(-len(every) // COMPARED_ROWS))] for name, every in self._rows.items()}
        sizes = [(len(rows[name]), table.shape[1]) for name, table in self.run.tables.items()]
        flat, blocks = _make_zero_blocks([*sizes, *sizes, *[(r,) for r, _ in sizes]], device)
        n = len(rows)
        expected, actual, size = (dict(zip(rows, blocks[i : i + n], strict=True)) for i in (0, n, 2 * n))
        self._add_expected_gradients(rows, expected, size)
        self._add_actual_gradients(rows, actual)
        dist.all_reduce(flat)
        for name, table in self.run.tables.items():
            if table.weight.replicated:
                # Gradient averaged by DistributedDataParallel; or, if clipping scales it, the kernels' input.
                average = None if table.parameter is None else table.parameter.grad
                train = self.run.config.train
                is_sum = average is None or (train.max_grad_norm and train.clip_tables)
                actual[name] = actual[name] / world if is_sum else average[rows[name]].float()
            # Each rank's loss is `world` times its part of the global loss (tasks/objective.py).
            error, row, column = find_largest_error(actual[name], expected[name] / world, size[name] / world)
            holder = 0
            if len(rows[name]):
                row_id, shards = int(rows[name][row]), table.weight.shards
                holders = (s.rank for s in shards if row_id in s.rows and column in s.columns)
                holder = next(holders, dist.get_rank())
            yield name, (error, holder)

    def _add_expected_gradients(
        self, rows: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], size: dict[str, torch.Tensor]
    ) -> None:
        """Add this rank's contributions to gradients to `expected`, and their magnitudes to `size`."""
        recorded, features = self.run.taps.input, self.run.schema.sparse
        for feature, key in self._keys(recorded.batch):
            gradient, table = recorded.gradient.get(feature), features[feature].table
            if gradient is None or not len(rows[table]):
                continue
            grad_SD, slot = (flatten_vectors(gradient), compute_slots(key, self.run.features.sequences.get(feature)))
            mean = self.run.features.is_mean(feature)
            factors, doubt, _ = compute_bag_factors(key.weights, slot, len(grad_SD), mean)
            hits, positions = match_ids(rows[table], key.ids)
            terms_ND = grad_SD[slot[hits]] * factors[hits].unsqueeze(1)
            expected[table].index_add_(0, positions, terms_ND)
            # Ranks exchange gradients of bags, which the kernel multiplies by the id's weight.
            sizes_N = torch.maximum(terms_ND.abs().amax(1), self._backward[table].smallest * key.weights[hits].abs())
            size[table].index_add_(0, positions, sizes_N * doubt[slot[hits]])

    def _add_actual_gradients(self, rows: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> None:
        """Add the gradients of `rows` that reached this rank's kernels to `actual`."""
        for lookup in self.run.taps.lookups:
            for shard, key, grad_BC in lookup.gradients():
                row, column = get_shard_origin(shard)
                part = actual[shard.name][:, column : column + grad_BC.shape[1]]
                add_row_gradients(part, rows[shard.name] - row, key, grad_BC)


def _bound_roundings(run: CheckedRun) -> tuple[dict[str, sharding.Rounding], ...]:
    """Return two mappings, table → bound on the rounding by plan.qcomms: of embeddings, and of gradients."""
    qcomms, world = run.config.plan.qcomms, dist.get_world_size()
    factor = sharding.choose_gradient_factor(run.config, world)
    forward, backward = {}, {}
    for name, table in run.tables.items():
        row_parts = sum(shard.columns.start == 0 for shard in table.weight.shards)
        layout = table.sharding, world, row_parts, name in run.features.tables_by_id
        forward[name] = sharding.bound_forward_rounding(qcomms.forward_precision, *layout)
        backward[name] = sharding.bound_backward_rounding(qcomms.backward_precision, *layout, factor)
    return forward, backward


def is_comparing(rank: int, world: int, turn: int) -> bool:
    """Return True if a rank compares bags at this turn; at most MAX_COMPARING_RANKS ranks do so at once."""
    turns = -(-world // MAX_COMPARING_RANKS)
    return rank % turns == turn % turns


def find_largest_error(got: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> tuple[float, int, int]:
    """Find the largest relative error, and its row and column.

    Args:
        got: Actual values, float32 [R, D].
        expected: Expected values, float32 [R, D].
        sizes: Sum of the magnitudes of each row's terms, float32 [R].

    Returns:
        (error, row, column), where error is |got − expected| ÷ size, with a size of at least MIN_MAGNITUDE. The error
        is 0 if both values are equal or NaN, and infinite if only one value is NaN. (0, 0, 0) if there are no values.
    """
    if not got.numel():
        return 0.0, 0, 0
    same = (got == expected) | (got.isnan() & expected.isnan())
    errors = (got - expected).abs() / sizes.clamp(min=MIN_MAGNITUDE).unsqueeze(1)
    errors = errors.nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
    at = int(errors.argmax())
    return float(errors.flatten()[at]), at // errors.shape[1], at % errors.shape[1]


def _make_zero_blocks(
    shapes: list[tuple[int, ...]], device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return a flat tensor of zeros, for use in a single collective, and views into it with these shapes."""
    sizes = [prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), device=device)
    return flat, tuple(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))
