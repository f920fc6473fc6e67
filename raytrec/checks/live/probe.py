"""parity: embeddings and gradients are those of one process.

A few bags of the next batch are pooled in plain torch from rows of the ranks' shards, by nothing but the map
of the shards, and compared with what the dense layers got. After the step, the gradient of those rows is
summed from its definition over the batches of all ranks, and compared with what has reached the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
import torch.distributed as dist

from raytrec.checks.live.keys import Bags, factors_of, flat, slots, some_bags
from raytrec.checks.live.outcome import STEP, Check, CheckedRun, Outcome, Position
from raytrec.checks.live.registry import check
from raytrec.compat.torchrec_ import shard_origin
from raytrec.config.tables import QCommsSection
from raytrec.data.batch import Batch
from raytrec.embeddings.hashing import initial_values
from raytrec.embeddings.sharding import Rounding, backward_rounding, forward_rounding, gradient_factor
from raytrec.embeddings.taps import Key, add_row_gradients, each_id, each_key, found

BAGS = 4  # of each feature and rank, in addition to the longest one
LOOKING = 8  # ranks whose bags are compared at a time: all ranks exchange the ids in them
COMPARED_ROWS = 256  # of each table whose gradient is compared
LIMIT = 1e-5  # see Parity; to which comes what plan.qcomms may change
TINY = 1e-30  # below this, numbers lose digits


@check("parity")
class Parity(Check):
    """Compares a step with what one process would have computed.

    An error is seen against Σ of the sizes of what is added up, bag by bag and row by row, so that terms
    which cancel do not make rounding look large. Measured: up to 5e-7. A wrong divisor, row or factor gives
    0.1 or more. Where plan.qcomms rounds what ranks send one another, the limit is what that may change at
    most (embeddings/sharding.py), in addition to the 1e-5.
    """

    moments = frozenset({STEP})
    probes = True
    do = (
        "resume from the last checkpoint: raytrec train --resume RUN; raytrec check CONFIG shows whether "
        "this plan is wrong from the start, as another version of torchrec or fbgemm may be"
    )

    def __init__(self, run: CheckedRun):
        super().__init__(run)
        self._turn = 0
        self._forward, self._backward = _roundings(run)
        self._rows: dict[str, torch.Tensor] = {}
        self._expected: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    @torch.no_grad()
    def prepare(self, batch: Batch) -> None:
        bags = self._bags(batch)
        self._rows = self._wanted(bags)
        values = self._gathered()
        self._begin(values, batch)
        for feature, some in bags.items():
            table = self.run.schema.sparse[feature].table
            vectors_ND = values[table][torch.searchsorted(self._rows[table], some.ids)]
            vectors_ND *= some.factors.unsqueeze(1)
            pooled_SD = vectors_ND.new_zeros(len(some.doubt), vectors_ND.shape[1])
            sizes_S = vectors_ND.new_zeros(len(some.doubt))
            pooled_SD.index_add_(0, some.bag, vectors_ND)
            sizes_S.index_add_(0, some.bag, vectors_ND.abs().amax(1))
            sizes_S = torch.maximum(sizes_S * some.doubt, self._forward[table].smallest * some.share)
            self._expected[feature] = some.at, pooled_SD, sizes_S

    @torch.no_grad()
    def evaluate(self, position: Position, probed: bool) -> Outcome:
        run, peers = self.run, self.run.peers
        pooled = run.taps.input.pooled
        # Feature → error of its pooled embeddings; table → (error, rank that holds where it is largest).
        forward = {
            feature: error_of(flat(pooled[feature][at]), expected, sizes)[0]
            for feature, (at, expected, sizes) in self._expected.items()
        }
        gradient = dict(self._gradients())
        limits = [LIMIT + self._forward[run.schema.sparse[f].table].share for f in forward]
        limits += [LIMIT + self._backward[table].share for table in gradient]
        found = [*forward.values(), *(error for error, _ in gradient.values())]
        worst = peers.max(torch.tensor(found, dtype=torch.float64)).tolist()
        errors = list(zip(worst, limits, strict=True))
        wrong = any(error > limit for error, limit in errors)
        problems = self._problems(peers.objects((forward, gradient)), errors) if wrong else []
        good = "pooled embeddings and gradients are those of one process"
        nearest = max([(0.0, LIMIT), *errors], key=lambda pair: pair[0] / pair[1])
        return self.outcome(position.step, problems, good, *nearest)

    def _problems(self, of_ranks: list[tuple[dict, dict]], errors: list[tuple[float, float]]) -> list[str]:
        (forward, gradient), texts = of_ranks[0], []
        for feature, (error, _) in zip(forward, errors, strict=False):
            _, rank = max((found[feature], rank) for rank, (found, _) in enumerate(of_ranks))
            texts.append(
                f"table {self.run.schema.sparse[feature].table}, feature {feature}: on rank {rank} pooled "
                f"embeddings are not those of one process, by {error:.2g} of their size"
            )
        for table, (error, _) in zip(gradient, errors[len(forward) :], strict=True):
            _, holder = max(found[table] for _, found in of_ranks)
            texts.append(
                f"table {table}: the gradient that reaches rank {holder} is not that of the global loss, "
                f"by {error:.2g} of its size"
            )
        return [text for text, (error, limit) in zip(texts, errors, strict=True) if error > limit]

    def _begin(self, values: dict[str, torch.Tensor], batch: Batch) -> None:
        """Puts what rows will begin with that the batch has given to ids in the place of what they hold."""
        for name, (rows, ids, _) in (batch.new_rows or {}).items():
            known, table = self._rows[name], self.run.tables[name]
            places = torch.searchsorted(known, rows)
            wanted = known[places.clamp(max=len(known) - 1)] == rows if len(known) else rows < 0
            columns = range(table.shape[1])
            begun = initial_values(self.run.config.run.seed, name, ids[wanted], columns, table.shape[0])
            values[name][places[wanted]] = begun.to(table.dtype).float()

    def _bags(self, batch: Batch) -> dict[str, Bags]:
        """A few bags of each feature: of the first rows, and the longest that is not too long. None on ranks
        whose turn it is not."""
        looking = is_looking(dist.get_rank(), dist.get_world_size(), self._turn)
        self._turn += 1
        first = (batch.weights > 0).nonzero().squeeze(1)[: BAGS if looking else 0]
        return {
            feature: some_bags(
                key,
                first[first < len(key.lengths)],
                self.run.features.is_mean(feature),
                self.run.device,
                looking and len(key.lengths) > 0,
                self.run.features.sequences.get(feature),
            )
            for feature, key in self._keys(batch)
        }

    def _keys(self, batch: Batch) -> Iterator[tuple[str, Key]]:
        """The ids of each feature; of candidates, each is a bag."""
        schema = self.run.schema
        for feature, key in zip(schema.sparse, each_key(batch.sparse, len(schema.sparse)), strict=True):
            yield feature, each_id(key) if feature in schema.candidates else key

    def _wanted(self, bags: dict[str, Bags]) -> dict[str, torch.Tensor]:
        """Table → int64 [R], sorted: the rows that the bags of any rank hold."""
        starts, total = {}, 0
        for name, table in self.run.tables.items():
            starts[name], total = total, total + table.shape[0]
        keys = torch.cat([b.ids + starts[self.run.schema.sparse[f].table] for f, b in bags.items()])
        keys = self.run.peers.union(keys)
        borders = torch.tensor([*starts.values(), total], device=keys.device)
        sizes = torch.searchsorted(keys, borders).diff().tolist()
        return {name: part - starts[name] for name, part in zip(starts, keys.split(sizes), strict=True)}

    def _gathered(self) -> dict[str, torch.Tensor]:
        """Table → float32 [R, dim]: the wanted rows, from the ranks that hold them."""
        tables = self.run.tables
        flat, blocks = _blocks(
            [(len(self._rows[name]), table.shape[1]) for name, table in tables.items()], self.run.device
        )
        values = dict(zip(tables, blocks, strict=True))
        for name, table in tables.items():
            for shard in [] if table.weight.replicated else table.weight.local:
                rows, here = self._rows[name], slice(shard.columns.start, shard.columns.stop)
                edges = torch.tensor([shard.rows.start, shard.rows.stop], device=rows.device)
                low, high = torch.searchsorted(rows, edges).tolist()
                values[name][low:high, here] = shard.read(rows[low:high] - shard.rows.start).float()
        dist.all_reduce(flat)
        for name, table in tables.items():
            if table.weight.replicated:
                values[name].copy_(table.weight.local[0].values[self._rows[name]])
        return values

    def _gradients(self) -> Iterator[tuple[str, tuple[float, int]]]:
        """Table → (error, rank that holds where it is largest)."""
        device, world = self.run.device, dist.get_world_size()
        rows = {name: every[:: max(1, -(-len(every) // COMPARED_ROWS))] for name, every in self._rows.items()}
        sizes = [(len(rows[name]), table.shape[1]) for name, table in self.run.tables.items()]
        flat, blocks = _blocks([*sizes, *sizes, *[(r,) for r, _ in sizes]], device)
        n = len(rows)
        expected, got, size = (dict(zip(rows, blocks[i : i + n], strict=True)) for i in (0, n, 2 * n))
        self._define(rows, expected, size)
        self._collect(rows, got)
        dist.all_reduce(flat)
        for name, table in self.run.tables.items():
            if table.weight.replicated:
                # After DistributedDataParallel; where clipping has scaled it, what its kernels were given.
                averaged = None if table.parameter is None else table.parameter.grad
                as_given = averaged is None or self.run.config.train.max_grad_norm
                got[name] = got[name] / world if as_given else averaged[rows[name]].float()
            # Each rank's loss is W times its part of the global loss (tasks/objective.py).
            error, row, column = error_of(got[name], expected[name] / world, size[name] / world)
            holder = 0
            if len(rows[name]):
                at, shards = int(rows[name][row]), table.weight.shards
                holders = (s.rank for s in shards if at in s.rows and column in s.columns)
                holder = next(holders, dist.get_rank())
            yield name, (error, holder)

    def _define(
        self, rows: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], size: dict[str, torch.Tensor]
    ) -> None:
        """Adds up what this rank's bags give to the gradient of rows, and the sizes of what is added up."""
        seen, features = self.run.taps.input, self.run.schema.sparse
        for feature, key in self._keys(seen.batch):
            gradient, table = seen.gradient.get(feature), features[feature].table
            if gradient is None or not len(rows[table]):
                continue
            grad_SD, slot = flat(gradient), slots(key, self.run.features.sequences.get(feature))
            mean = self.run.features.is_mean(feature)
            factors, doubt, _ = factors_of(key.weights, slot, len(grad_SD), mean)
            hits, places = found(rows[table], key.ids)
            terms_ND = grad_SD[slot[hits]] * factors[hits].unsqueeze(1)
            expected[table].index_add_(0, places, terms_ND)
            # What is sent is the bag's gradient, which the kernel multiplies with the id's weight.
            sizes_N = torch.maximum(
                terms_ND.abs().amax(1), self._backward[table].smallest * key.weights[hits].abs()
            )
            size[table].index_add_(0, places, sizes_N * doubt[slot[hits]])

    def _collect(self, rows: dict[str, torch.Tensor], got: dict[str, torch.Tensor]) -> None:
        """Adds up what has reached this rank's kernels for rows."""
        for lookup in self.run.taps.lookups:
            for shard, key, grad_BC in lookup.gradients():
                row, column = shard_origin(shard)
                part = got[shard.name][:, column : column + grad_BC.shape[1]]
                add_row_gradients(part, rows[shard.name] - row, key, grad_BC)


def _roundings(run: CheckedRun) -> tuple[dict[str, Rounding], dict[str, Rounding]]:
    """Table → what plan.qcomms may change of its embeddings; and of its gradients."""
    qcomms = run.config.plan.qcomms
    forward = dict.fromkeys(run.tables, Rounding(0.0, 0.0))
    backward = dict(forward)
    if qcomms == QCommsSection():
        return forward, backward
    world = dist.get_world_size()
    factor = gradient_factor(run.config, world)
    for name, table in run.tables.items():
        row_parts = sum(shard.columns.start == 0 for shard in table.weight.shards)
        how = table.sharding, world, row_parts, name in run.features.tables_by_id
        forward[name] = forward_rounding(qcomms.forward_precision, *how)
        backward[name] = backward_rounding(qcomms.backward_precision, *how, factor)
    return forward, backward


def is_looking(rank: int, world: int, turn: int) -> bool:
    """Whether a rank's bags are compared at this turn: at most LOOKING ranks are at a time, in turn."""
    turns = -(-world // LOOKING)
    return rank % turns == turn % turns


def error_of(got: torch.Tensor, expected: torch.Tensor, sizes: torch.Tensor) -> tuple[float, int, int]:
    """The largest error, and its row and column.

    Args:
        got, expected: float32 [R, D]. sizes: float32 [R], of what each row was added up from.

    Returns:
        |got − expected| ÷ size, infinite where one alone is NaN; (0, 0, 0) for no rows.
    """
    if not got.numel():
        return 0.0, 0, 0
    same = (got == expected) | (got.isnan() & expected.isnan())
    errors = (got - expected).abs() / sizes.clamp(min=TINY).unsqueeze(1)
    errors = errors.nan_to_num(nan=float("inf")).masked_fill(same, 0.0)
    at = int(errors.argmax())
    return float(errors.flatten()[at]), at // errors.shape[1], at % errors.shape[1]


def _blocks(
    shapes: list[tuple[int, ...]], device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Zeros in one flat tensor, so that one collective does for all, and blocks of it in these shapes."""
    sizes = [prod(shape) for shape in shapes]
    flat = torch.zeros(sum(sizes), device=device)
    return flat, tuple(part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True))
