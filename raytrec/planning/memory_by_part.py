"""The memory of each rank, part by part and tier by tier. No torch here.

Tiers: device is a GPU's memory, or on CPU main memory; host is the main memory of GPUs; disk has tables in
files. Parts of a step are added up as if all were there at once: on GPUs they belong to streams whose memory
PyTorch's allocator keeps apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.tables import DenseOptim
from raytrec.embeddings.optimizers import optimizer_of
from raytrec.planning.dense_work import DenseWork
from raytrec.planning.footprint import CACHE, GIB, map_share
from raytrec.planning.held import PlannedTable, held, hot_bytes, hot_shares
from raytrec.planning.loads import ID_BYTES, LENGTH_BYTES, VALUE_BYTES, Loads

DEVICE, HOST, DISK = TIERS = ("device", "host", "disk")
IN_FLIGHT = 3  # batches in TorchRec's pipeline: the one that is trained and two that come
CONTEXT_GIB = 1.5  # of a GPU: CUDA's context with its kernels, and NCCL's buffers
# Of a rank's process: 331 MiB after importing torch and TorchRec, and what a run adds; with CUDA's libraries,
# pinned batches and Ray's worker 6 GiB.
PROCESS_GIB = {"cpu": 0.45, "cuda": 6.0}
OBJECTS_MIB = 6  # of Python, for model, plan and pipeline, with what the allocator keeps (make bench-plan)
GLOO_COPIES = 3  # in its reduce-scatter and all-gather (make bench-plan)
SORTED_BYTES = 40  # of an id in FBGEMM's update on GPUs: its row and place twice, sorted and not, and a run's


@dataclass(frozen=True)
class Memory:
    """(tier, part) → bytes of each rank, float64 [ranks]."""

    parts: Mapping[tuple[str, str], np.ndarray]

    def of(self, tier: str) -> np.ndarray:
        """All parts of a tier together, [ranks]."""
        found = [size for (place, _), size in self.parts.items() if place == tier]
        return np.sum(found, axis=0) if found else np.zeros(len(next(iter(self.parts.values()))))


def memory_of(
    config: RunConfig, schema: Schema, plan: Sequence[PlannedTable], loads: Loads, dense: DenseWork
) -> Memory:
    """What each rank has.

    weights, optimizer state, cache: of shards, by `footprint.parts_of`; id maps by `footprint.map_share`.
    hot rows: of tables in files, in what plan.memory_gib leaves (`held.hot_shares`).
    dense model: weights P, the optimizer's state (Adam 2·P, Adagrad P), an average P with train.ema.
    gradients: of the dense layers P; of tables with a dense kernel, or copied to all ranks, twice their size,
        as the kernel makes them for all tables at once, and each table then gets its own.
    activations: what the dense layers have alive at most (dense_work), of B rows.
    exchange buffers: sums that lookups give, and their gradients; sums that arrive for B rows, and their
        gradients; on GPUs 40 bytes an id that the update sorts; on CPU GLOO_COPIES of sums that ranks add up.
    pipeline batches: three batches of B rows (ids 8 bytes, bags 4, dense columns and labels 4), and ids that
        have arrived from other ranks for two.
    checkpoint copies, with checkpoint.async_save: all that a rank's GPU holds of tables and dense layers, and
        tables in host memory once more; on CPU dense layers and tables with dense updates alone.
    read ahead: data.buffer_gib. process, objects, CUDA: PROCESS_GIB, OBJECTS_MIB, CONTEXT_GIB.
    """
    device, world = "cpu" if config.scaling.device == "cpu" else "cuda", len(loads.pooled)
    parts: dict[tuple[str, str], np.ndarray] = {}

    def add(tier: str, part: str, sizes: np.ndarray | float, rank: int | slice = slice(None)) -> None:
        parts.setdefault((tier, part), np.zeros(world))[rank] += sizes

    copies = np.zeros(world)
    kernels = {table.table: table.compute_kernel for table in plan}
    found = held(plan, config, schema)
    for (table, rank), its in found.items():
        for part, size in its.parts.items():
            for tier, of_tier in zip(TIERS, size, strict=True):
                add(tier, part, of_tier, rank)
            if part != CACHE and (device == "cuda" or kernels[table] == "dense"):
                copies[rank] += size.device + size.host
    if maps := map_share(schema, world):
        add(DEVICE, "id maps", maps)
    add(DEVICE, "hot rows", np.array(hot_bytes(found, hot_shares(found, config, schema, world))))
    batch = -(-config.data.global_batch_size // world)
    dense_state = dense.parameters * (1 + states_of(config.optim.dense) + bool(config.train.ema))
    add(DEVICE, "dense model", dense_state)
    add(DEVICE, "gradients", dense.parameters + 2 * loads.gradients)
    add(DEVICE, "activations", dense.activations)
    arrived = batch * loads.row_values * VALUE_BYTES
    sorting = SORTED_BYTES * sum(loads.ids.values()) if device == "cuda" else GLOO_COPIES * loads.summed
    add(DEVICE, "exchange buffers", 2 * loads.pooled + (2 * arrived if world > 1 else 0.0) + sorting)
    add(DEVICE, "pipeline batches", IN_FLIGHT * batch_bytes(schema, loads, batch) + 2 * loads.received_ids)
    if config.checkpoint.async_save:
        add(HOST if device == "cuda" else DEVICE, "checkpoint copies", copies + dense_state)
    add(HOST if device == "cuda" else DEVICE, "read ahead", config.data.buffer_gib * GIB)
    add(HOST if device == "cuda" else DEVICE, "process", PROCESS_GIB[device] * GIB)
    add(HOST if device == "cuda" else DEVICE, "objects", OBJECTS_MIB * 2**20)
    if device == "cuda":
        add(DEVICE, "CUDA", CONTEXT_GIB * GIB)
    return Memory({key: size for key, size in parts.items() if size.any()})


def states_of(optimizer: DenseOptim) -> int:
    """Values of state that the dense layers' optimizer has for each weight."""
    return optimizer_of(optimizer.name).bytes_per("value") // VALUE_BYTES


def batch_bytes(schema: Schema, loads: Loads, rows: int) -> float:
    """Of a rank's batch as it is read: ids and lengths, dense columns, labels and weights."""
    ids = loads.row_ids * ID_BYTES + len(schema.sparse) * LENGTH_BYTES
    return rows * (ids + VALUE_BYTES * (len(schema.dense) + len(schema.labels) + 1))
