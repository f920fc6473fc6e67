"""What each rank looks up, holds and sends in a step, from the plan of the tables. No torch here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from raytrec.config.features import Features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Statistics
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.embeddings.planner.constraints import SUMMED_TYPES, table_optimizers
from raytrec.embeddings.planner.dry_run import PlannedTable
from raytrec.embeddings.planner.footprint import CACHED, CACHING_KERNEL, DTYPE_BYTES, MMAP_KERNEL, UVM_KERNELS

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
        near, far: kind of collective → bytes that a rank sends, or receives if that is more, to others of its
            host and to other hosts; forward and backward together.
        gradients: bytes of dense gradients of tables, which replicas add up.
        groups: ways of sharding, for each of which ids and sums travel apart; replicated: bytes of gradients
            of tables that are copied to all ranks (one number).
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
    sent_ids: float = 0.0
    groups: set[tuple[str, str]] = field(default_factory=set)
    replicated: float = 0.0
    row_values: float = 0.0
    row_ids: float = 0.0


def loads_of(
    config: RunConfig,
    schema: Schema,
    features: Features,
    plan: Sequence[PlannedTable],
    lengths: Mapping[str, float],
    hosts: int,
    gpus: int,
) -> Loads:
    """The loads of all ranks.

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
        lengths: feature → ids of a row.
        hosts, gpus: groups of ranks whose links are fast, and ranks of each (Cluster.linked).
    """
    world = hosts * gpus
    total, batch = config.data.global_batch_size, -(-config.data.global_batch_size // world)
    kinds = ("all_to_all", "reduce_scatter", "all_gather")
    near, far = ({kind: np.zeros(world) for kind in kinds} for _ in range(2))
    by_way: list[dict[str, np.ndarray]] = [defaultdict(lambda: np.zeros(world)) for _ in range(3)]
    looked_up, shards, touched = by_way
    streamed, host, files, received, pooled, summed, added = np.zeros((7, world))
    out = Loads(looked_up, shards, touched, streamed, host, files, received, pooled, summed, added, near, far)
    out.row_ids = sum(lengths.values())
    optimizers, of_table = table_optimizers(config, schema), {table: [] for table in schema.tables}
    for name in schema.sparse:
        of_table[schema.sparse[name].table].append(name)
    there, back = (
        WIRE_BYTES[precision]
        for precision in (config.plan.qcomms.forward_precision, config.plan.qcomms.backward_precision)
    )
    beside_near, beside_far = (min(world, gpus) - 1) / world, (world - gpus) / world
    for table in plan:
        names = of_table[table.table]
        each, by_id = sum(lengths[name] for name in names), table.table in features.tables_by_id
        vectors = each if by_id else len(names)  # that a row sends
        weighted = sum(lengths[name] for name in names if schema.sparse[name].weights)
        out.row_values += table.dim * vectors
        optimizer = optimizer_of(optimizers[table.table].name)
        ranks = np.array([rank for rank, _, _ in table.shards])
        rows, columns = (
            np.array(of, float) for of in zip(*(shard[1:] for shard in table.shards), strict=True)
        )
        share, kind = rows / table.rows, table.sharding_type
        batches = float(batch if kind == "data_parallel" else total)
        ids = batches * each * (1.0 if kind == "data_parallel" else share)
        known = [schema.statistics[name] for name in names if name in schema.statistics]
        distinct = _distinct(batches * each, table.rows, known) * (ids / max(1e-9, batches * each))
        row = columns * DTYPE_BYTES[table.dtype]
        state = columns * optimizer.bytes_per("value") + optimizer.bytes_per("row")
        sums = batches * vectors * columns * VALUE_BYTES * (share if by_id else 1.0)
        read, updated = ids * row, 2 * distinct * (row + state)
        gradients = ids * columns * VALUE_BYTES
        dense = table.compute_kernel == "dense"
        if dense:  # gradients of all rows are made, copied for each table, and read with weights and state
            _add(out.streamed, ranks, rows * (3 * row + 2 * state + 5 * columns * VALUE_BYTES))
            updated = 2 * distinct * row
        way = "dense" if dense else optimizers[table.table].name
        _add(out.ids[way], ranks, ids)
        _add(out.shards[way], ranks, 1.0)
        near_bytes = read + updated
        if table.compute_kernel in UVM_KERNELS and config.scaling.device != "cpu":
            missed = 1.0
            if table.compute_kernel == CACHING_KERNEL:
                missed = 1 - hit_share(table.rows * CACHED, known)
            _add(out.host_bytes, ranks, missed * (read + updated))
            near_bytes = (1 - missed) * near_bytes
        if table.compute_kernel == MMAP_KERNEL:
            _add(out.file_rows, ranks, distinct)
        _add(out.touched[way], ranks, near_bytes + gradients + 2 * sums)
        _add(out.pooled, ranks, sums)
        if kind == "data_parallel":
            out.replicated += table.rows * table.dim * VALUE_BYTES
            _add(out.gradients, ranks, rows * columns * VALUE_BYTES)
            continue
        if kind in SUMMED_TYPES and not by_id:
            _add(out.summed, ranks, sums)
        if dense:
            _add(out.gradients, ranks, rows * columns * VALUE_BYTES)
        out.groups.add((table.table if by_id else "", kind))
        blocks = round(table.dim / columns[0])  # of columns: each gets all ids
        bytes_of_ids = each * ID_BYTES + weighted * VALUE_BYTES
        out.sent_ids += batch * blocks * (bytes_of_ids + len(names) * LENGTH_BYTES)
        _add(out.received_ids, ranks, total * (bytes_of_ids * share + len(names) * LENGTH_BYTES))
        wire = there + back
        whole = total * vectors * columns * wire  # of a shard's columns, both ways
        if by_id:
            _exchange(out, ranks, whole * share, beside_near, beside_far)
        elif kind == "row_wise":
            for collective, width in (("reduce_scatter", there), ("all_gather", back)):
                size = total * vectors * table.dim * width
                out.near[collective] += size * (world - 1) / world
                out.far[collective] += size / gpus if hosts > 1 else 0.0
        elif kind in ("table_row_wise", "grid_shard"):
            for collective, width in (("reduce_scatter", there), ("all_gather", back)):
                _add(out.near[collective], ranks, total * vectors * columns * width * (gpus - 1) / gpus)
            _exchange(out, ranks, whole / gpus, 0.0, (hosts - 1) / hosts)
        else:
            _exchange(out, ranks, whole, beside_near, beside_far)
    return out


def _exchange(out: Loads, ranks: np.ndarray, sizes: np.ndarray, near: float, far: float) -> None:
    """An all-to-all in which these ranks send so many bytes, evenly to all. A rank that receives more than it
    sends takes as long as that."""
    world = len(out.pooled)
    for found, part in ((out.near, near), (out.far, far)):
        sent = np.zeros(world)
        _add(sent, ranks, sizes * part)
        found["all_to_all"] += np.maximum(sent, sizes.sum() * part / world)


def _add(to: np.ndarray, ranks: np.ndarray, values: np.ndarray | float) -> None:
    np.add.at(to, ranks, values)


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
