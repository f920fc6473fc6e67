"""What each rank looks up, holds and sends in a step, from the plan of the tables. No torch here."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raytrec.common.messages import RankLine
from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Statistics
from raytrec.embeddings.constraints import (
    CACHING_KERNEL,
    MMAP_KERNEL,
    SUMMED_TYPES,
    UVM_KERNELS,
    table_optimizers,
)
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.planning.memory import CACHED, DTYPE_BYTES, PlannedTable

ID_BYTES, LENGTH_BYTES, VALUE_BYTES = 8, 4, 4
WIRE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.125}  # int8: with scales of 64 values
# Of a table without statistics: the share of lookups that the hottest fifth of its rows takes. By Zipf's law
# with exponent 1 it is 0.89 of a million rows; 0.8 leaves room.
UNKNOWN_HITS = 0.8


@dataclass
class Loads:
    """Arrays of one number a rank, float64 [ranks], of a step, forward and backward.

    Attributes:
        ids, shards, touched: how rows are updated (a table's optimizer, or dense) → ids looked up, of all
            ranks' rows; shards that they are looked up in; bytes read and written for that in the device's
            memory, at random places.
        streamed: bytes that dense updates read and write, in order.
        host_bytes: the same of host memory, over the link of a GPU.
        file_rows: rows read from files.
        received_ids: bytes of ids and lengths that reach the rank; sent_ids: that it sends (one number).
        pooled: bytes of the sums, or vectors, that its lookups give; summed: of those that ranks add up.
        near, far: kind of collective → bytes that a rank sends to others of its host and to other hosts;
            forward and backward together.
        arrived: of an all-to-all, bytes that each rank gets from its host and from other hosts (two numbers).
        gradients: bytes of dense gradients of tables, which replicas add up.
        groups: ways of sharding, for each of which ids and sums travel apart → how many tables have it.
        replicated: bytes of gradients of tables that are copied to all ranks (one number).
        row_values: values of a row's inputs that reach the dense layers; row_ids: its ids (numbers).
    """

    ids: dict[str, np.ndarray]
    shards: dict[str, np.ndarray]
    touched: dict[str, np.ndarray]
    streamed: np.ndarray
    host_bytes: np.ndarray
    file_rows: np.ndarray
    received_ids: np.ndarray
    pooled: np.ndarray
    summed: np.ndarray
    gradients: np.ndarray
    near: dict[str, np.ndarray]
    far: dict[str, np.ndarray]
    arrived: np.ndarray
    sent_ids: float = 0.0
    groups: Counter[tuple[str, str]] = field(default_factory=Counter)
    replicated: float = 0.0
    row_values: float = 0.0
    row_ids: float = 0.0

    @classmethod
    def none(cls, world: int, row_ids: float) -> Loads:
        """Those of no table."""
        kinds = ("all_to_all", "reduce_scatter", "all_gather")
        near, far = ({kind: np.zeros(world) for kind in kinds} for _ in range(2))
        ids, shards, touched = (defaultdict(lambda: np.zeros(world)) for _ in range(3))
        streamed, host, files, received, pooled, summed, added = np.zeros((7, world))
        of_ranks = streamed, host, files, received, pooled, summed, added
        return cls(ids, shards, touched, *of_ranks, near, far, np.zeros(2), row_ids=row_ids)


def loads_of(config: RunConfig, schema: Schema, plan: Sequence[PlannedTable], hosts: int, gpus: int) -> Loads:
    """The loads of all ranks under a plan; see LoadCounter."""
    counter = LoadCounter(config, schema, hosts, gpus)
    out = counter.none()
    for table in plan:
        counter.add(out, table)
    return out


class LoadCounter:
    """Counts loads table by table.

    With G rows of the global batch, B = G ÷ W of each of W ranks, a table with F features and ℓ ids of a row
    in all, and shards of c columns of w bytes:

    table_wise, column_wise, table_column_wise: the rank of a shard gets G·ℓ ids, looks them up, and sends
        G·F·c values of which B·F·c stay.
    row_wise: each rank gets its part of G·ℓ ids, and has partial sums of all G·F·c values, which a
        reduce-scatter adds up: a ring sends (W−1)/W of them to the neighbour, and over the network each host
        passes them once, through all of its GPUs' ports.
    table_row_wise, grid_shard: the same within a host of L ranks; then the hosts exchange sums, of which a
        rank has G/L rows.
    data_parallel: each rank looks up its own B·ℓ ids; gradients of whole tables are added up.

    Tables whose model reads them id by id send vectors of ids, G·ℓ·c values, instead of sums.
    A lookup reads c·w bytes of an id and writes c·4 of a bag; an update reads c·4 bytes of gradient of an id,
    and reads and writes weights and state of each distinct row.

    Args:
        hosts, gpus: groups of ranks whose links are fast, and ranks of each (Cluster.linked).
    """

    def __init__(self, config: RunConfig, schema: Schema, hosts: int, gpus: int):
        self._schema, self._features = schema, resolve_features(schema, config.model)
        self._lengths = ids_of_features(schema, self._features)
        self._hosts, self._gpus, self._world = hosts, gpus, hosts * gpus
        self._total = config.data.global_batch_size
        self._batch = -(-self._total // self._world)
        self._on_cpu = config.scaling.device == "cpu"
        self._optimizers = table_optimizers(config, schema)
        self._of_table: dict[str, list[str]] = {table: [] for table in schema.tables}
        for name in schema.sparse:
            self._of_table[schema.sparse[name].table].append(name)
        qcomms = config.plan.qcomms
        self._there, self._back = WIRE_BYTES[qcomms.forward_precision], WIRE_BYTES[qcomms.backward_precision]
        self._distinct: dict[tuple[str, float], float] = {}

    def none(self) -> Loads:
        """Loads to which tables are to be added."""
        return Loads.none(self._world, sum(self._lengths.values()))

    def add(self, out: Loads, table: PlannedTable, times: int = 1) -> None:
        """Adds a table's; with times = −1 takes them away."""
        names, kind = self._of_table[table.table], table.sharding_type
        each, by_id = sum(self._lengths[name] for name in names), table.table in self._features.tables_by_id
        vectors = each if by_id else len(names)  # that a row sends
        out.row_values += times * table.dim * vectors
        optimizer = optimizer_of(self._optimizers[table.table].name)
        ranks = np.array([rank for rank, _, _ in table.shards])
        rows, columns = (
            np.array(of, float) for of in zip(*(shard[1:] for shard in table.shards), strict=True)
        )
        share = rows / table.rows
        batches = float(self._batch if kind == "data_parallel" else self._total)
        ids = batches * each * (1.0 if kind == "data_parallel" else share)
        known = [self._schema.statistics[name] for name in names if name in self._schema.statistics]
        distinct = self._distinct_of(table, batches * each, known) * (ids / max(1e-9, batches * each))
        row = columns * DTYPE_BYTES[table.dtype]
        state = columns * optimizer.bytes_per("value") + optimizer.bytes_per("row")
        sums = batches * vectors * columns * VALUE_BYTES * (share if by_id else 1.0)
        read, updated = ids * row, 2 * distinct * (row + state)
        gradients = ids * columns * VALUE_BYTES

        def add(to: np.ndarray, values: np.ndarray | float) -> None:
            np.add.at(to, ranks, times * values)

        dense = table.compute_kernel == "dense"
        if dense:  # gradients of all rows are made, copied for each table, and read with weights and state
            add(out.streamed, rows * (3 * row + 2 * state + 5 * columns * VALUE_BYTES))
            updated = 2 * distinct * row
        way = "dense" if dense else self._optimizers[table.table].name
        add(out.ids[way], ids)
        add(out.shards[way], 1.0)
        near_bytes = read + updated
        if table.compute_kernel in UVM_KERNELS and not self._on_cpu:
            missed = 1.0
            if table.compute_kernel == CACHING_KERNEL:
                missed = 1 - hit_share(table.rows * CACHED, known)
            add(out.host_bytes, missed * (read + updated))
            near_bytes = (1 - missed) * near_bytes
        if table.compute_kernel == MMAP_KERNEL:
            add(out.file_rows, distinct)
        add(out.touched[way], near_bytes + gradients + 2 * sums)
        add(out.pooled, sums)
        if kind == "data_parallel":
            out.replicated += times * table.rows * table.dim * VALUE_BYTES
            add(out.gradients, rows * columns * VALUE_BYTES)
            return
        if kind in SUMMED_TYPES and not by_id:
            add(out.summed, sums)
        if dense:
            add(out.gradients, rows * columns * VALUE_BYTES)
        group = (table.table if by_id else "", kind)
        out.groups[group] += times
        if not out.groups[group]:
            del out.groups[group]
        weighted = sum(self._lengths[name] for name in names if self._schema.sparse[name].weights)
        bytes_of_ids, of_lengths = each * ID_BYTES + weighted * VALUE_BYTES, len(names) * LENGTH_BYTES
        blocks = round(table.dim / columns[0])  # of columns: each gets all ids
        out.sent_ids += times * self._batch * blocks * (bytes_of_ids + of_lengths)
        add(out.received_ids, self._total * (bytes_of_ids * share + of_lengths))
        self._add_sums(out, table, ranks, times * self._total * vectors * columns * (share if by_id else 1.0))

    def _add_sums(self, out: Loads, table: PlannedTable, ranks: np.ndarray, values: np.ndarray) -> None:
        """What travels of so many values that each shard gives; where ranks add them up, each has a part of
        all of them."""
        world, hosts, gpus, kind = self._world, self._hosts, self._gpus, table.sharding_type
        both = (("reduce_scatter", self._there), ("all_gather", self._back))
        summed = kind in SUMMED_TYPES and table.table not in self._features.tables_by_id
        if summed and kind == "row_wise":
            for collective, width in both:
                size = values[0] * width
                out.near[collective] += size * (world - 1) / world
                out.far[collective] += size / gpus if hosts > 1 else 0.0
            return
        near, far, wire = (min(world, gpus) - 1) / world, (world - gpus) / world, self._there + self._back
        if summed:  # within a host, of which the hosts then exchange the sums
            for collective, width in both:
                np.add.at(out.near[collective], ranks, values * width * (gpus - 1) / gpus)
            near, far, wire = 0.0, (hosts - 1) / hosts, wire / gpus
        np.add.at(out.near["all_to_all"], ranks, values * wire * near)
        np.add.at(out.far["all_to_all"], ranks, values * wire * far)
        out.arrived += values.sum() * wire / world * np.array([near, far])

    def _distinct_of(self, table: PlannedTable, draws: float, known: Sequence[Statistics]) -> float:
        key = table.table, draws
        if key not in self._distinct:
            self._distinct[key] = _distinct(draws, table.rows, known)
        return self._distinct[key]


def ids_of_features(schema: Schema, features: Features) -> dict[str, float]:
    """Sparse feature → how many ids of a row the planner expects: the mean that `raytrec inspect` has found,
    and of a sequence that is read id by id at most as many as the model reads. Where the schema has no
    statistics, as many as such a sequence may have, and of others one."""
    found = {}
    for name in schema.sparse:
        known, most = schema.statistics.get(name), features.sequences.get(name)
        found[name] = float(min(known.mean_length, most or known.mean_length) if known else most or 1)
    return found


def lengths_of_tables(schema: Schema, features: Features) -> dict[str, list[float]]:
    """Table → the same of each feature that looks it up."""
    found: dict[str, list[float]] = {table: [] for table in schema.tables}
    for name, length in ids_of_features(schema, features).items():
        found[schema.sparse[name].table].append(length)
    return found


def _distinct(draws: float, rows: int, known: Sequence[Statistics]) -> float:
    """Distinct rows among so many lookups of a table: n draws from m ids that are drawn alike give
    m·(1 − (1 − 1/m)ⁿ) of them, counted for the 1, next 9, next 90, … hottest ids apart; without statistics,
    of rows that are drawn alike."""
    if not known or not known[0].hottest:
        return _alike(draws, min(rows, known[0].distinct or rows) if known else rows)
    one = known[0]
    found, before, taken = 0.0, 0, 0.0
    for power, share in enumerate(one.hottest):
        upto = min(10**power, one.distinct)
        if upto > before:
            found += _alike(draws * (share - taken), upto - before)
        before, taken = upto, share
    if one.distinct > before:
        found += _alike(draws * max(0.0, 1 - taken), one.distinct - before)
    return min(found, float(rows))


def _alike(draws: float, ids: float) -> float:
    return float(-ids * np.expm1(draws * np.log1p(-1 / ids))) if ids > 1 else min(1.0, draws)


def hit_share(rows: float, known: Sequence[Statistics]) -> float:
    """The share of lookups that the `rows` hottest rows of a table take; between two powers of ten it grows
    with the logarithm of their number."""
    if not known or not known[0].hottest:
        return UNKNOWN_HITS
    shares, distinct = [*known[0].hottest], max(1, known[0].distinct)
    places = [float(power) for power in range(len(shares))]
    if 10 ** places[-1] < distinct:
        places, shares = [*places, float(np.log10(distinct))], [*shares, 1.0]
    return float(np.interp(np.log10(max(1.0, rows)), places, shares))


UNKNOWN = Statistics(mean_length=0, p99_length=0, max_length=0, distinct=0)


def recorded_lengths(lines: Iterable[RankLine], config: RunConfig, schema: Schema) -> dict[str, float]:
    """Return the mean number of ids per row of the global batch, by table, over all recorded steps.

    Copies of a replicated table count once. Ranks that are not recorded (messages.recorded_ranks) are assumed
    to look up as many ids as the others. On GPUs, ids that are looked up once a batch count once.
    """
    sums: dict[str, tuple[float, float]] = {}  # table → ids looked up; rows held × steps
    for line in lines:
        for table, entry in line.tables.items():
            ids, held = sums.get(table, (0.0, 0.0))
            steps = line.steps / (line.world if entry.get("replicated") else 1)
            sums[table] = ids + (entry.get("lookups") or 0), held + (entry.get("rows") or 0) * steps
    batch, tables = config.data.global_batch_size, schema.tables
    return {
        table: tables[table].rows * ids / held / batch
        for table, (ids, held) in sums.items()
        if table in tables and held > 0 <= ids
    }


def with_lengths(config: RunConfig, schema: Schema, lengths: Mapping[str, float]) -> Schema:
    """Return the schema with statistics of this many ids per row; the frequencies of ids stay as they are.

    Args:
        lengths: table → ids per row (recorded_lengths). Features of a table share them as they did before.
    """

    expected, statistics = ids_of_features(schema, resolve_features(schema, config.model)), {}
    for name, spec in schema.sparse.items():
        if spec.table in lengths:
            of_table = [expected[each] for each, other in schema.sparse.items() if other.table == spec.table]
            share = expected[name] / sum(of_table) if sum(of_table) else 1 / len(of_table)
            known = schema.statistics.get(name, UNKNOWN)
            statistics[name] = known.model_copy(update={"mean_length": lengths[spec.table] * share})
    return schema.model_copy(update={"statistics": schema.statistics | statistics})
