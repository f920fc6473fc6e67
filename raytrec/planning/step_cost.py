"""Memory and time of a step, part by part, computed from loads and rates.

The tier "device" is GPU memory, or main memory on CPU. The tier "host" is the main memory of GPU hosts, and
"disk" stores tables in files. The parts of memory are summed as if all were live at once. On GPUs, they belong
to separate streams, between which PyTorch's allocator does not share memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import DenseOptim
from raytrec.embeddings.constraints import REDUCE_SCATTER_TYPES
from raytrec.embeddings.mapped import BYTES_PER_PLACE, ROW_BYTES
from raytrec.embeddings.optimizers import find_optimizer
from raytrec.planning.dense_work import DenseWork
from raytrec.planning.loads import ID_BYTES, LENGTH_BYTES, VALUE_BYTES, Loads
from raytrec.planning.memory import CACHE, GIB, TIERS, PlannedTable, RankPart, compute_rank_parts, estimate_id_map_bytes
from raytrec.planning.rates import COLLECTIVES, Rates

DEVICE, HOST, DISK = TIERS
BATCHES_IN_FLIGHT = 3  # batches in TorchRec's pipeline: the current batch and the next two
CUDA_CONTEXT_GIB = 1.5  # GPU memory of the CUDA context with its kernels, and of NCCL's buffers
# A rank's process takes 331 MiB after importing torch and TorchRec, and grows during a run. With CUDA's
# libraries, pinned batches and Ray's worker, the process takes 6 GiB.
PROCESS_GIB = {"cpu": 0.45, "cuda": 6.0}
PYTHON_OBJECTS_MIB = 6  # Python objects of model, plan and pipeline, with allocator overhead (make bench-plan)
GLOO_COPIES = 3  # copies in Gloo's reduce-scatter and all-gather (make bench-plan)
SORT_BUFFER_BYTES_PER_ID = 40  # in FBGEMM's update on GPUs: row and position, unsorted and sorted, and run of rows


@dataclass(frozen=True)
class MemoryUse:
    """Memory use of each rank: (tier, part) → bytes, float64 [ranks]."""

    parts: Mapping[tuple[str, str], np.ndarray]

    def of(self, tier: str) -> np.ndarray:
        """Return the total bytes of all parts of a tier, float64 [ranks]."""
        found = [size for (place, _), size in self.parts.items() if place == tier]
        return np.sum(found, axis=0) if found else np.zeros(len(next(iter(self.parts.values()))))


def estimate_memory(
    config: RunConfig, schema: Schema, plan: Sequence[PlannedTable], loads: Loads, dense: DenseWork
) -> MemoryUse:
    """Return the memory use of each rank in the following parts, without parts that are 0 on every rank.

    B is the number of rows of a rank's batch, and P the size of the dense weights.

    weights, optimizer state, cache: See `memory.estimate_parts`.
    id maps: See `memory.estimate_id_map_bytes`.
    hot rows: Rows of tables in files that are cached in the rest of plan.memory_gib (`estimate_hot_rows`).
    dense model: Weights P, optimizer state (Adam 2·P, Adagrad P), and averages P with train.ema.
    gradients: P for the dense layers, and twice the size of tables that are replicated or have a dense kernel.
        The gradients of all these tables are created at once, and then copied table by table.
    activations: Peak memory of the activations of the dense layers (`DenseWork.activations`) for B rows.
    exchange buffers: Pooled lookup results and their gradients. With several ranks, also the received results for
        B rows and their gradients. On GPUs, also 40 bytes per id that the update sorts. On CPU, also GLOO_COPIES
        copies of the sums over ranks.
    pipeline batches: Three batches of B rows (ids 8 bytes; lengths of bags, dense columns, labels and row weights 4),
        and for two batches the ids that the rank receives, including its own.
    checkpoint copies, with checkpoint.async_save: On GPUs, copies in host memory of the dense layers and of all
        tables; on CPU, only of dense layers and of tables with dense updates.
    read ahead: data.buffer_gib.
    process: PROCESS_GIB.
    objects: PYTHON_OBJECTS_MIB.
    CUDA: CUDA_CONTEXT_GIB, on GPUs only.
    """
    device, world = "cpu" if config.scaling.device == "cpu" else "cuda", len(loads.pooled)
    parts: dict[tuple[str, str], np.ndarray] = {}

    def add(tier: str, part: str, sizes: np.ndarray | float, rank: int | slice = slice(None)) -> None:
        parts.setdefault((tier, part), np.zeros(world))[rank] += sizes

    copies = np.zeros(world)
    kernels = {table.table: table.compute_kernel for table in plan}
    shards = compute_rank_parts(plan, config, schema)
    for (table, rank), shard in shards.items():
        for part, size in shard.parts.items():
            for tier, tier_bytes in zip(TIERS, size, strict=True):
                add(tier, part, tier_bytes, rank)
            if part != CACHE and (device == "cuda" or kernels[table] == "dense"):
                copies[rank] += size.device + size.host
    if maps := estimate_id_map_bytes(schema, world):
        add(DEVICE, "id maps", maps)
    add(DEVICE, "hot rows", np.array([size for _, size in estimate_hot_rows(shards, config, schema, world)]))
    batch = -(-config.data.global_batch_size // world)
    dense_state = dense.parameters * (1 + count_optimizer_states(config.optim.dense) + bool(config.train.ema))
    add(DEVICE, "dense model", dense_state)
    add(DEVICE, "gradients", dense.parameters + 2 * loads.gradients)
    add(DEVICE, "activations", dense.activations)
    arrived = batch * loads.row_values * VALUE_BYTES
    sorting = SORT_BUFFER_BYTES_PER_ID * sum(loads.ids.values()) if device == "cuda" else GLOO_COPIES * loads.summed
    add(DEVICE, "exchange buffers", 2 * loads.pooled + (2 * arrived if world > 1 else 0.0) + sorting)
    batches = BATCHES_IN_FLIGHT * estimate_batch_bytes(schema, loads, batch)
    add(DEVICE, "pipeline batches", batches + 2 * loads.received_ids)
    main_memory = HOST if device == "cuda" else DEVICE
    if config.checkpoint.async_save:
        add(main_memory, "checkpoint copies", copies + dense_state)
    add(main_memory, "read ahead", config.data.buffer_gib * GIB)
    add(main_memory, "process", PROCESS_GIB[device] * GIB)
    add(main_memory, "objects", PYTHON_OBJECTS_MIB * 2**20)
    if device == "cuda":
        add(DEVICE, "CUDA", CUDA_CONTEXT_GIB * GIB)
    return MemoryUse({key: size for key, size in parts.items() if size.any()})


def count_optimizer_states(optimizer: DenseOptim) -> int:
    """Return the number of state values that the dense optimizer stores per weight."""
    return find_optimizer(optimizer.name).count_state_bytes("value") // VALUE_BYTES


def estimate_batch_bytes(schema: Schema, loads: Loads, rows: int) -> float:
    """Return the bytes of a rank's batch as read: ids, lengths, dense columns, labels and row weights."""
    ids = loads.row_ids * ID_BYTES + len(schema.sparse) * LENGTH_BYTES
    return rows * (ids + VALUE_BYTES * (len(schema.dense) + len(schema.labels) + 1))


ALL_REDUCE_BUCKET_BYTES = 25 << 20  # bytes of gradients in one all-reduce (DistributedDataParallel)
COMPILED_BYTES_RATIO = 0.5  # bytes moved by compiled layers, relative to eager layers (docs/gpu.md)
# Host time of compiled layers relative to eager layers. According to benchmarks/results/host.json, the host times are
# equal in fp32. The casts of bf16, a quarter of the eager operators, are compiled away.
COMPILED_LAUNCHES_RATIOS = {"fp32": 1.0, "tf32": 1.0, "bf16": 0.72}
GRAPH_LAUNCHES_RATIO = 0.15  # assumed host time of replaying a CUDA graph, relative to compiled layers
# Share of a batch's assembly for which the launching thread waits for Python's lock (benchmarks/results/host.json).
ASSEMBLY_LOCK_SHARE = 0.43
ALL_REDUCE_OVERLAP_SHARE = 0.5  # share of dense time that hides an all-reduce: backward except its first layers


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step, in seconds.

    Attributes:
        parts: Part (see `estimate_step_time`) → seconds that the slowest rank takes if the part runs alone.
        step: Seconds of the whole step.
        rows_per_s: Rows per second on all ranks together.
        bottleneck: Part that takes the most time on the critical path.
        balance: Mean ÷ maximum over ranks of the time of lookups and their exchange; 1 means even.
        busy: Seconds for which each rank computes and sends, without ingest and waiting.
    """

    parts: dict[str, float]
    step: float
    rows_per_s: float
    bottleneck: str
    balance: float
    busy: list[float]


def estimate_step_time(
    config: RunConfig,
    schema: Schema,
    loads: Loads,
    dense: DenseWork,
    rates: Rates,
    hosts: int,
    gpus: int,
    cpus: float = 0.0,
) -> StepTime:
    """Return the predicted time of a step, which is computed as follows.

    lookup = bytes touched ÷ random-access rate + ids × time per id + shards × time per shard + bytes of dense
        updates ÷ memory rate + bytes of host memory ÷ host link + rows of files × time per row.
    input exchange = ids and lengths: an all-to-all of sizes, and two all-to-alls (lengths, ids) per group of tables.
    output exchange = sums and gradients: two collectives per group (four for table_row_wise and grid_shard), and the
        slower of links and network, which work concurrently.
    dense layers = products ÷ their rate + small matrices × time per matrix + other operators' bytes ÷ memory
        rate + the update, which reads weights, gradients and state and writes weights, state and any averages.
    all-reduce = buckets × latency + rings: 2·(L−1)/L × gradients ÷ links over the L ranks of a host, and 2·(H−1)/H ×
        gradients ÷ L ÷ network over the H hosts.
    host launches = operators of the dense layers × time per operator + tensors × time per tensor + the time
        of a step and, on several ranks, of each group of tables (Loads.groups) + assembly of the next batch,
        which on GPUs counts only while it holds the same Python lock.
    ingest = columns and ids read by the reader processes, of which as many run at once as there are CPUs.
    host to device = bytes of a batch ÷ host link, on GPUs only.

    On GPUs, train.compile reduces bytes and launches of dense layers by constant factors. The device, host, readers and
    copies work concurrently. Ids are sent during the previous step, and half of the dense time hides the all-reduce:
        step = max(lookup + output exchange + dense + max(0, all-reduce − dense ÷ 2), host, ingest, copies, ids)
    On CPU, ranks execute their own sends, so a step is the sum of its parts except ingest, or ingest if it takes
    longer. W ranks on a host share C cores: work that takes tᵣ of CPU time on rank r takes max(max tᵣ, Σ tᵣ ÷ C).
    Collectives are measured with the same number of ranks, and every part waits for the slowest rank.

    `hosts` and `gpus` are the number of groups of ranks with fast links and the number of ranks per group
    (Cluster.linked). `cpus` is the number of CPUs per rank: two for the rank's processes, the others for readers; 0
    means enough.

    Raises:
        ConfigError: The rates do not include the optimizer of a table.
    """
    world, total = hosts * gpus, config.data.global_batch_size
    batch, on_cpu = -(-total // world), rates.device == "cpu"

    def shared(seconds: np.ndarray | float) -> float:
        """Return the elapsed seconds for the given CPU seconds of each rank when ranks share cores."""
        times = np.broadcast_to(np.asarray(seconds, float), (world,))
        return float(max(times.max(), times.sum() / hosts / rates.cores if rates.cores else 0.0))

    lookups = loads.streamed_bytes / rates.stream + loads.host_bytes / rates.host_link
    lookups = lookups + loads.file_rows * rates.file_row_s
    for update, count in loads.ids.items():
        lookups += rates.get_lookup_rates(update).seconds(loads.touched[update], count, loads.shards[update])
    precision = "fp32" if on_cpu and config.train.matmul == "tf32" else config.train.matmul
    moved = dense.bytes * (COMPILED_BYTES_RATIO if config.train.compile and not on_cpu else 1.0)
    moved += dense.parameters * (3 + 2 * count_optimizer_states(config.optim.dense) + 3 * bool(config.train.ema))
    products = dense.flops / rates.matrix[precision] + dense.matrices * rates.matrix_s + moved / rates.copy
    launches = dense.launches * (COMPILED_LAUNCHES_RATIOS[precision] if config.train.compile and not on_cpu else 1.0)
    launches *= GRAPH_LAUNCHES_RATIO if config.train.compile == "graphs" else 1.0
    host = dense.tensors * rates.tensor_s + launches * rates.launch_s + rates.step_s
    columns, ids_s = len(schema.columns), loads.row_ids * rates.read_id_s
    assembled = batch * (columns * rates.assemble_column_s + ids_s) * (1.0 if on_cpu else ASSEMBLY_LOCK_SHARE)
    readers = config.data.readers if not cpus else min(config.data.readers, max(0.5, cpus - 2))
    ids = output = all_reduce = np.zeros(world)
    if world > 1:
        host += (len(loads.groups) + bool(loads.replicated)) * rates.group_s
        ids = _estimate_input_exchange_s(loads, rates, world, hosts, gpus)
        output = _estimate_output_exchange_s(loads, rates, world)
        reduced_bytes = dense.parameters + loads.replicated
        all_reduce = np.full(world, _estimate_all_reduce_s(reduced_bytes, rates, world, hosts, gpus))
    parts = {
        "lookup": shared(lookups),
        "input exchange": float(ids.max()),
        "output exchange": float(output.max()),
        "dense layers": shared(products),
        "all-reduce": float(all_reduce.max()),
        "host launches": shared(host) + assembled,
        "ingest": batch * (columns * rates.read_column_s + ids_s) / readers,
        "host to device": 0.0 if on_cpu else estimate_batch_bytes(schema, loads, batch) / rates.host_link,
    }
    if on_cpu:
        serial = {name: seconds for name, seconds in parts.items() if name != "ingest"}
        concurrent = {"ingest": parts["ingest"]}
    else:
        serial = {name: parts[name] for name in ("lookup", "output exchange", "dense layers")}
        serial["all-reduce"] = max(0.0, parts["all-reduce"] - ALL_REDUCE_OVERLAP_SHARE * parts["dense layers"])
        concurrent = {name: seconds for name, seconds in parts.items() if name not in serial}
    step = max(sum(serial.values()), *concurrent.values())
    critical = serial if step == sum(serial.values()) else concurrent
    slowest = max(critical, key=lambda name: critical[name])
    busy = lookups + output
    balance = float(busy.mean() / busy.max()) if busy.max() else 1.0
    total_busy = busy + ids + all_reduce + products + host + assembled
    return StepTime(parts, step, total / step, slowest, balance, total_busy.tolist())


def _estimate_input_exchange_s(loads: Loads, rates: Rates, world: int, hosts: int, gpus: int) -> np.ndarray:
    size = np.maximum(loads.received_ids, loads.sent_ids)
    count = 1 + 2 * len(loads.groups)
    near = size * (min(world, gpus) - 1) / world / rates.bandwidth["all_to_all"]
    far = size * (world - gpus) / world / rates.far if hosts > 1 else 0.0
    return count * _get_latency_s(rates, "all_to_all", world) + np.maximum(near, far)


def _estimate_output_exchange_s(loads: Loads, rates: Rates, world: int) -> np.ndarray:
    summed = [kind for by_id, kind in loads.groups if kind in REDUCE_SCATTER_TYPES and not by_id]
    out, near, far = np.zeros(world), np.zeros(world), np.zeros(world)
    for kind in COLLECTIVES[:3]:
        sent, sent_far = loads.near[kind], loads.far[kind]
        if kind == "all_to_all":  # limited by the larger of the bytes sent and received
            sent, sent_far = np.maximum(sent, loads.arrived[0]), np.maximum(sent_far, loads.arrived[1])
        near = near + sent / rates.bandwidth[kind]
        far = far + (sent_far / rates.far if rates.far else 0.0)
    out += len(summed) * (_get_latency_s(rates, "reduce_scatter", world) + _get_latency_s(rates, "all_gather", world))
    out += 2 * (len(loads.groups) - summed.count("row_wise")) * _get_latency_s(rates, "all_to_all", world)
    return out + np.maximum(near, far)


def _estimate_all_reduce_s(size: float, rates: Rates, world: int, hosts: int, gpus: int) -> float:
    near = 2 * size * (min(world, gpus) - 1) / min(world, gpus) / rates.bandwidth["all_reduce"]
    far = 2 * size * (hosts - 1) / hosts / gpus / rates.far if hosts > 1 else 0.0
    return -(-size // ALL_REDUCE_BUCKET_BYTES) * _get_latency_s(rates, "all_reduce", world) + near + far


def _get_latency_s(rates: Rates, kind: str, world: int) -> float:
    return rates.latency_s[kind] + rates.peer_s * (world - 1) * (kind == "all_to_all")


def estimate_hot_rows(
    rank_parts: Mapping[tuple[str, int], RankPart], config: RunConfig, schema: Schema, world: int
) -> list[tuple[float, float]]:
    """Return, for each of `world` ranks, the share of rows in files that are cached in memory, and the cache's bytes.

    The rows fill the rest of plan.memory_gib. Both are 0 if plan.memory_gib is not set, or if no table is in files.
    """
    free = [(config.plan.memory_gib or 0) * GIB - estimate_id_map_bytes(schema, world)] * world
    sizes, place_bytes = [0] * world, [0] * world
    for (_, rank), part in rank_parts.items():
        free[rank] -= part.size.device
        if part.size.disk:
            free[rank] -= part.rows * ROW_BYTES
            sizes[rank] += part.size.disk + part.rows * BYTES_PER_PLACE
            place_bytes[rank] += part.rows * ROW_BYTES
    shares = [min(1.0, max(0.0, room / size)) if size else 0.0 for room, size in zip(free, sizes, strict=True)]
    return [
        (share, share * size + of_rows if share else 0.0)
        for share, size, of_rows in zip(shares, sizes, place_bytes, strict=True)
    ]
