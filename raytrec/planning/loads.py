"""Ids, bytes and values that each rank looks up, holds and sends per step under a plan for the tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np

from raytrec.common.messages import RankLine
from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Statistics
from raytrec.embeddings.constraints import (
    CACHING_KERNEL,
    MMAP_KERNEL,
    REDUCE_SCATTER_TYPES,
    UVM_KERNELS,
    resolve_optimizers,
)
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.planning.memory import CACHED_ROWS_SHARE, DTYPE_BYTES, PlannedTable

ID_BYTES, LENGTH_BYTES, VALUE_BYTES = 8, 4, 4
WIRE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.125}  # int8: with 8 bytes of scales per 64 values
# Share of lookups that go to the hottest fifth of the rows of a table without statistics. Zipf's law with
# exponent 1 gives 0.89 for a million rows; 0.8 leaves a margin.
DEFAULT_HIT_SHARE = 0.8


class Loads:
    """Work that a plan's tables cause on each rank per step, forward and backward, added up by LoadCounter.

    Arrays are float64 [ranks]. An update type is the name of a table's optimizer, or dense. A host is a group of ranks
    that fast links connect, which can span several machines (Cluster.linked).

    Args:
        world: Number of ranks.
        row_ids: Mean number of ids per row of a batch.

    Attributes:
        ids: Update type → number of ids that a rank looks up, for rows of all ranks.
        shards: Update type → number of shards in which ids are looked up.
        touched: Update type → bytes of device memory that lookups read and write at random addresses.
        streamed_bytes: Bytes that dense updates read and write sequentially.
        host_bytes: Bytes of host memory that lookups read and write over a GPU's link to the host.
        file_rows: Number of rows read from files.
        received_ids: Bytes of ids, per-id weights and lengths that a rank receives.
        sent_ids: Bytes of ids, per-id weights and lengths that each rank sends (one number).
        pooled: Bytes of the sums or vectors that lookups return.
        summed: Bytes of partial sums that are reduced over ranks.
        near: Collective → bytes of lookup results and gradients that a rank sends within its host.
        far: Collective → bytes of lookup results and gradients that a rank sends to other hosts.
        arrived: Such bytes that each rank receives in all-to-alls, from its host and from other hosts, float64 [2].
        gradients: Bytes of the tables' dense gradients.
        groups: (table read id by id, or "", sharding type) → number of tables. The ids and sums of each group
            are sent separately.
        replicated: Bytes of gradients of tables that are replicated on all ranks (one number).
        row_values: Number of values per row of a batch that tables pass to the dense layers.
        row_ids: Mean number of ids per row of a batch.
    """

    def __init__(self, world: int, row_ids: float):
        self.ids, self.shards, self.touched, self.near, self.far = (
            defaultdict(partial(np.zeros, world)) for _ in range(5)
        )
        self.streamed_bytes, self.host_bytes, self.file_rows, self.received_ids = np.zeros((4, world))
        self.pooled, self.summed, self.gradients = np.zeros((3, world))
        self.arrived, self.groups = np.zeros(2), Counter[tuple[str, str]]()
        self.sent_ids = self.replicated = self.row_values = 0.0
        self.row_ids = row_ids


class LoadCounter:
    """Counter of the bytes and ids that ranks look up, send and update per step under a plan.

    A global batch has G rows, and each of W ranks reads B = G ÷ W of them. A table has F features, ℓ ids per
    row in total, and shards of c columns with w bytes per value.

    table_wise, column_wise, table_column_wise: The rank of a shard receives G·ℓ ids, looks them up, and sends
        G·F·c values, of which B·F·c stay on the rank.
    row_wise: Each rank receives its part of the G·ℓ ids and computes partial sums of all G·F·c values, which a
        reduce-scatter adds up. In the ring, each rank sends (W−1)/W of the values to its neighbor. Each host sends
        the values over the network once, through the ports of all its GPUs.
    table_row_wise, grid_shard: The same within a host of L ranks, which leaves each rank with the sums of G/L rows;
        the hosts then exchange the sums.
    data_parallel: Each rank looks up its own B·ℓ ids; gradients of whole tables are added up.

    For tables that the model reads id by id, ranks send one vector per id, G·ℓ·c values, instead of sums. A lookup
    reads c·w bytes per id and writes c·4 bytes per bag. An update reads c·4 bytes of gradient per id, and reads and
    writes the weights and state of each distinct row.

    Args:
        config: Configuration of the run.
        schema: Schema of the data.
        hosts: Number of groups of ranks connected by fast links (Cluster.linked).
        gpus: Number of ranks per group.

    Raises:
        ConfigError: A key of optim.tables matches no table.
    """

    def __init__(self, config: RunConfig, schema: Schema, hosts: int, gpus: int):
        self._schema, self._features = schema, resolve_features(schema, config.model)
        self._lengths = estimate_ids_per_row(schema, self._features)
        self._hosts, self._gpus, self._world = hosts, gpus, hosts * gpus
        self._total = config.data.global_batch_size
        self._batch = -(-self._total // self._world)
        self._on_cpu = config.scaling.device == "cpu"
        self._optimizers = resolve_optimizers(config, schema)
        self._features_of_table = schema.features_by_table
        qcomms = config.plan.qcomms
        self._fwd, self._bwd = WIRE_BYTES[qcomms.forward_precision], WIRE_BYTES[qcomms.backward_precision]
        self._distinct: dict[tuple[str, float], float] = {}

    def count(self, plan: Sequence[PlannedTable] = ()) -> Loads:
        """Return the loads of all ranks under a plan; the default is a plan without tables."""
        out = Loads(self._world, sum(self._lengths.values()))
        for table in plan:
            self.add(out, table)
        return out

    def add(self, out: Loads, table: PlannedTable, times: int = 1) -> None:
        """Add the loads of a table to `out` in place; with times = −1, subtract them."""
        names, kind = self._features_of_table[table.table], table.sharding_type
        ids_per_row, by_id = sum(self._lengths[n] for n in names), table.table in self._features.tables_by_id
        vectors = ids_per_row if by_id else len(names)  # vectors sent per row
        out.row_values += times * table.dim * vectors
        optimizer = find_optimizer(self._optimizers[table.table].name)
        ranks = np.array([rank for rank, _, _ in table.shards])
        rows, columns = (np.array(of, float) for of in zip(*(shard[1:] for shard in table.shards), strict=True))
        share = rows / table.rows
        batches = float(self._batch if kind == "data_parallel" else self._total)
        draws = batches * ids_per_row
        ids = draws * share
        statistics = self._schema.statistics
        table_statistics = next((statistics[name] for name in names if name in statistics), None)
        key = table.table, draws
        if key not in self._distinct:
            self._distinct[key] = _estimate_distinct_rows(draws, table.rows, table_statistics)
        distinct = self._distinct[key] * (ids / max(1e-9, draws))
        row = columns * DTYPE_BYTES[table.dtype]
        state = columns * optimizer.count_state_bytes("value") + optimizer.count_state_bytes("row")
        sums = batches * vectors * columns * VALUE_BYTES * (share if by_id else 1.0)
        dense = table.compute_kernel == "dense"
        update_type = "dense" if dense else self._optimizers[table.table].name

        def add(to: np.ndarray, values: np.ndarray | float) -> None:
            np.add.at(to, ranks, times * values)

        if dense:  # gradients of all rows are created, copied per table, and read with weights and state
            add(out.streamed_bytes, rows * (3 * row + 2 * state + 5 * columns * VALUE_BYTES))
            add(out.gradients, rows * columns * VALUE_BYTES)
        add(out.ids[update_type], ids)
        add(out.shards[update_type], 1.0)
        moved, missed_share = ids * row + 2 * distinct * (row + (0.0 if dense else state)), 0.0
        if table.compute_kernel in UVM_KERNELS and not self._on_cpu:
            missed_share = 1.0
            if table.compute_kernel == CACHING_KERNEL:
                missed_share -= estimate_hit_share(table.rows * CACHED_ROWS_SHARE, table_statistics)
        add(out.host_bytes, missed_share * moved)
        if table.compute_kernel == MMAP_KERNEL:
            add(out.file_rows, distinct)
        add(out.touched[update_type], (1 - missed_share) * moved + ids * columns * VALUE_BYTES + 2 * sums)
        add(out.pooled, sums)
        if kind == "data_parallel":
            out.replicated += times * table.rows * table.dim * VALUE_BYTES
            return
        if kind in REDUCE_SCATTER_TYPES and not by_id:
            add(out.summed, sums)
        group = (table.table if by_id else "", kind)
        out.groups[group] += times
        if not out.groups[group]:
            del out.groups[group]
        weighted = sum(self._lengths[name] for name in names if self._schema.sparse[name].weights)
        bytes_of_ids, of_lengths = ids_per_row * ID_BYTES + weighted * VALUE_BYTES, len(names) * LENGTH_BYTES
        blocks = round(table.dim / columns[0])  # column blocks; each receives all ids
        out.sent_ids += times * self._batch * blocks * (bytes_of_ids + of_lengths)
        add(out.received_ids, self._total * (bytes_of_ids * share + of_lengths))
        self._add_sums(out, table, ranks, times * self._total * vectors * columns * (share if by_id else 1.0))

    def _add_sums(self, out: Loads, table: PlannedTable, ranks: np.ndarray, values: np.ndarray) -> None:
        """Add the bytes that ranks exchange for the lookup results of a table and their gradients to `out`.

        `ranks` contains the rank of each shard, [shards], and `values` the number of values that each shard sends.
        """
        world, hosts, gpus, kind = self._world, self._hosts, self._gpus, table.sharding_type
        collectives = (("reduce_scatter", self._fwd), ("all_gather", self._bwd))
        summed = kind in REDUCE_SCATTER_TYPES and table.table not in self._features.tables_by_id
        if summed and kind == "row_wise":
            for collective, width in collectives:
                size = values[0] * width
                out.near[collective] += size * (world - 1) / world
                out.far[collective] += size / gpus if hosts > 1 else 0.0
            return
        near, far, wire = (min(world, gpus) - 1) / world, (world - gpus) / world, self._fwd + self._bwd
        if summed:  # sums are reduced within each host; then the hosts exchange them
            for collective, width in collectives:
                np.add.at(out.near[collective], ranks, values * width * (gpus - 1) / gpus)
            near, far, wire = 0.0, (hosts - 1) / hosts, wire / gpus
        np.add.at(out.near["all_to_all"], ranks, values * wire * near)
        np.add.at(out.far["all_to_all"], ranks, values * wire * far)
        out.arrived += values.sum() * wire / world * np.array([near, far])


def estimate_ids_per_row(schema: Schema, features: Features) -> dict[str, float]:
    """Return the expected number of ids per row of each sparse feature.

    The number is the mean length measured by `raytrec inspect`, for sequences read id by id at most the length that
    the model reads. Without statistics, it is that length for these sequences and 1 for all other features.
    """
    lengths = {}
    for name in schema.sparse:
        stats, limit = schema.statistics.get(name), features.sequences.get(name)
        lengths[name] = float(min(stats.mean_length, limit or stats.mean_length) if stats else limit or 1)
    return lengths


def group_lengths_by_table(schema: Schema, features: Features) -> dict[str, list[float]]:
    """Return the expected ids per row by table: one number for each feature that looks up the table."""
    lengths = estimate_ids_per_row(schema, features)
    return {table: [lengths[name] for name in names] for table, names in schema.features_by_table.items()}


def _estimate_distinct_rows(draws: float, rows: int, statistics: Statistics | None) -> float:
    """Return the expected number of distinct rows among `draws` lookups of a table.

    n draws from m equally likely ids yield m·(1 − (1 − 1/m)ⁿ) distinct ids. The hottest 1, next 9, next 90, …
    ids are counted separately. If these are unknown, all ids (their number is `distinct`, else `rows`) count as equally
    likely.
    """

    def count_distinct(draws: float, ids: float) -> float:
        return float(-ids * np.expm1(draws * np.log1p(-1 / ids))) if ids > 1 else min(1.0, draws)

    if statistics is None or not statistics.hottest:
        return count_distinct(draws, min(rows, statistics.distinct or rows) if statistics else rows)
    total, previous_rank, previous_share = 0.0, 0, 0.0
    sizes = [min(10**power, statistics.distinct) for power in range(len(statistics.hottest))]
    for end_rank, share in zip([*sizes, statistics.distinct], [*statistics.hottest, 1.0], strict=True):
        if end_rank > previous_rank:
            total += count_distinct(draws * max(0.0, share - previous_share), end_rank - previous_rank)
        previous_rank, previous_share = end_rank, share
    return min(total, float(rows))


def estimate_hit_share(rows: float, statistics: Statistics | None) -> float:
    """Return the share of lookups that go to the `rows` hottest rows of a table.

    Between powers of ten, the share grows with log(rows). Without statistics of hot ids, it is DEFAULT_HIT_SHARE.
    """
    if statistics is None or not statistics.hottest:
        return DEFAULT_HIT_SHARE
    shares, distinct = [*statistics.hottest], max(1, statistics.distinct)
    exponents = [float(power) for power in range(len(shares))]
    if 10 ** exponents[-1] < distinct:
        exponents, shares = [*exponents, float(np.log10(distinct))], [*shares, 1.0]
    return float(np.interp(np.log10(max(1.0, rows)), exponents, shares))


EMPTY_STATISTICS = Statistics(mean_length=0, p99_length=0, max_length=0, distinct=0)


def compute_recorded_lengths(lines: Iterable[RankLine], config: RunConfig, schema: Schema) -> dict[str, float]:
    """Return the mean number of ids per row of the global batch, by table, over all recorded steps.

    Copies of a replicated table are counted once. Ranks that are not recorded (history.select_recorded_ranks) are
    assumed to look up as many ids as the recorded ranks. If ranks send only distinct ids (for tables read id by id,
    on GPUs), repeated ids in a rank's batch count once. Tables without records, or unknown to the schema, are omitted.
    """
    sums: dict[str, tuple[float, float]] = {}  # table → ids looked up; rows held × steps
    for line in lines:
        for table, entry in line.tables.items():
            ids, row_steps = sums.get(table, (0.0, 0.0))
            steps = line.steps / (line.world if entry.get("replicated") else 1)
            sums[table] = ids + (entry.get("lookups") or 0), row_steps + (entry.get("rows") or 0) * steps
    batch, tables = config.data.global_batch_size, schema.tables
    return {
        table: tables[table].rows * ids / row_steps / batch
        for table, (ids, row_steps) in sums.items()
        if table in tables and row_steps > 0 <= ids
    }


def replace_lengths(config: RunConfig, schema: Schema, lengths: Mapping[str, float]) -> Schema:
    """Return the schema with mean lengths that match `lengths`, the ids per row by table (compute_recorded_lengths).

    A table's number is divided among its features in the same proportion as before, or equally if all were 0. The
    frequencies of ids, and the statistics of tables without a number, are unchanged.
    """
    features, statistics = resolve_features(schema, config.model), {}
    expected, by_table = estimate_ids_per_row(schema, features), group_lengths_by_table(schema, features)
    for name, spec in schema.sparse.items():
        if spec.table in lengths:
            table_lengths = by_table[spec.table]
            share = expected[name] / sum(table_lengths) if sum(table_lengths) else 1 / len(table_lengths)
            previous = schema.statistics.get(name, EMPTY_STATISTICS)
            statistics[name] = previous.model_copy(update={"mean_length": lengths[spec.table] * share})
    return schema.model_copy(update={"statistics": schema.statistics | statistics})
