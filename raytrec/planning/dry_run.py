"""Dry runs on a hypothetical cluster: plan, memory, step time, and changes that would make a run fit."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

from raytrec.common.errors import ConfigError
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.schema import Schema
from raytrec.embeddings.constraints import resolve_constraints, resolve_optimizers
from raytrec.planning.machines import Cluster, Machine
from raytrec.planning.memory import GIB, PlannedTable, estimate_footprints, list_planned_tables
from raytrec.planning.rates import Rates

if TYPE_CHECKING:
    from torch import nn

    from raytrec.planning.dense_work import DenseWork
    from raytrec.planning.loads import Loads
    from raytrec.planning.step_cost import MemoryUse, StepTime

TABLE_MEMORY_SHARE = 0.85  # share of GPU memory that TorchRec's planner gives to tables
MAX_HOSTS = 256
MAX_REFUSALS = 3  # number of failed plans, while hosts are doubled, after which more hosts are assumed not to help


@dataclass(frozen=True)
class MemoryShortage:
    """Memory tier (memory.TIERS) in which `rank`, the fullest rank, needs more GiB than it has.

    A rank has an equal share of its host's main memory and disk.
    """

    tier: str
    rank: int
    needs: float
    has: float


@dataclass
class ClusterEstimate:
    """Plan, memory and time of a configuration on a cluster.

    Attributes:
        cluster: Cluster for which the run was planned.
        tables: Sharding of each table.
        loads: Work that the tables cause on each rank; None without a plan.
        memory: Predicted memory use of each rank; None without a plan.
        time: Predicted step time; None without rates or without a plan.
        refusal: Reason why there is no plan, else None. With a reason, only `remedies` and `table_memory_gib` are set.
        table_memory_gib: (GiB that tables need, GiB available to them) on all devices; set if `refusal` is set.
        lacks: One shortage for each memory tier that is too small.
        remedies: Changes, each of which alone makes the run fit; [] if none were found or requested.
    """

    cluster: Cluster
    tables: list[PlannedTable] = field(default_factory=list)
    loads: Loads | None = None
    memory: MemoryUse | None = None
    time: StepTime | None = None
    refusal: ConfigError | None = None
    table_memory_gib: tuple[float, float] = (0.0, 0.0)
    lacks: list[MemoryShortage] = field(default_factory=list)
    remedies: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Return True if there is a plan and every tier has enough memory."""
        return self.refusal is None and not self.lacks


class ClusterEstimator:
    """Callable that predicts the plan, memory and time of one configuration on a cluster.

    The work of the dense layers is counted once per number of rows of a rank's batch, and again if a remedy changes it.

    Args:
        config: Configuration of the run.
        schema: Schema of the data.
        build: Function that builds the model of one rank (worker.build.build_unsharded).
        rates: Rates for all clusters. None: rates from data sheets for known machine types, and no step times for
            other clusters.
    """

    def __init__(self, config: RunConfig, schema: Schema, build: Callable[..., Any], rates: Rates | None = None):
        self._config, self._schema, self._build, self._rates = config, schema, build, rates
        self._dense: dict[tuple, DenseWork] = {}
        self._parameters: list[Any] = []

    def __call__(self, cluster: Cluster, remedies: bool = False) -> ClusterEstimate:
        """Return the prediction for a cluster, with remedies if requested and if the run does not fit.

        Raises:
            ConfigError: The settings of a table are invalid on any cluster (constraints.resolve_constraints), the rates
                lack an optimizer or belong to another kind of device, or no model can be built from the schema.
        """
        config, rates = _configure_for(self._config, cluster), self._rates
        device = "cpu" if config.scaling.device == "cpu" else "cuda"
        if rates and rates.device != device:
            what = f"the rates were measured on {rates.device}, but cluster {cluster.name} is planned for {device}"
            do = "measure rates on such a machine (`raytrec doctor --measure FILE`), or change scaling.device or --on"
            raise ConfigError(what, where="--rates", expected=f"rates of {device}", do=do)
        estimate = self._predict(config, cluster)
        if remedies and not estimate.fits:
            estimate.remedies = list(self._iterate_remedies(config, cluster))
        return estimate

    def _predict(self, config: RunConfig, cluster: Cluster) -> ClusterEstimate:
        import torch

        from raytrec.planning.loads import LoadCounter
        from raytrec.planning.step_cost import estimate_memory, estimate_step_time

        if not self._parameters:  # the same on all clusters
            head = self._build(config, self._schema, torch.device("cpu")).head
            self._parameters = list(head.parameters())
        try:
            with catch_warnings():  # TorchRec warns of future changes
                simplefilter("ignore", FutureWarning)
                tables = dry_run(config, self._schema, cluster, self._parameters)
        except ConfigError as refusal:
            needed = self._estimate_tables_gib(config, cluster)
            return ClusterEstimate(cluster, refusal=refusal, table_memory_gib=needed)
        shape = cluster.linked
        loads = LoadCounter(config, self._schema, *shape).count(tables)
        dense = self._count_dense_work(config, cluster)
        memory = estimate_memory(config, self._schema, tables, loads, dense)
        rates, cpus, machine = self._rates, 0.0, cluster.machine
        if machine:
            rates = rates or Rates.for_gpu(machine.gpu, machine.gpu_network)
            cpus = machine.cpus / cluster.gpus
        time = estimate_step_time(config, self._schema, loads, dense, rates, *shape, cpus) if rates else None
        needs = {tier: memory.of(tier) / GIB for tier in cluster.gib_by_tier}
        lacks = [
            MemoryShortage(tier, int(needs[tier].argmax()), float(needs[tier].max()), room)
            for tier, room in cluster.gib_by_tier.items()
            if needs[tier].max() > room
        ]
        return ClusterEstimate(cluster, tables, loads, memory, time, lacks=lacks)

    def _count_dense_work(self, config: RunConfig, cluster: Cluster) -> DenseWork:
        from raytrec.planning.dense_work import count_dense_layers

        train, rows = config.train, -(-config.data.global_batch_size // cluster.world)
        key = rows, train.matmul, train.activation_checkpointing
        if key not in self._dense:
            self._dense[key] = count_dense_layers(self._build, config, self._schema, rows)
        return self._dense[key]

    def _iterate_remedies(self, config: RunConfig, cluster: Cluster) -> Iterator[str]:
        """Yield single changes that make the run fit: first to the configuration, then to the number of hosts."""
        plan, train, on_cpu = config.plan, config.train, config.scaling.device == "cpu"
        kernels = ["fused", "fused_mmap"] if on_cpu else ["fused", "fused_uvm_caching", "fused_uvm"]
        changes = {
            f"plan.sharding_types=[{', '.join([*plan.sharding_types, kind])}]": kind not in plan.sharding_types
            for kind in ("row_wise", "column_wise")
        }
        changes |= {
            f"plan.compute_kernels=[{', '.join(kernels)}]": plan.compute_kernels != kernels,
            "train.activation_checkpointing=true": not train.compile and not train.activation_checkpointing,
            "checkpoint.async_save=false": config.checkpoint.async_save and not on_cpu,
            "optim.embeddings.name=rowwise_adagrad": config.optim.embeddings.name in ("adagrad", "adam"),
            "plan.tables.*.dtype=fp16": not plan.tables,
        }
        for change in (change for change, possible in changes.items() if possible):
            try:
                changed = load_config(config, [change], allow_code=True)
            except ConfigError:
                continue
            if self._predict(changed, cluster).fits:
                yield change + (" (changes results)" if change.startswith(("optim", "plan.tables")) else "")
        if larger := self.find_smallest_cluster(lambda hosts: cluster._replace(hosts=hosts), cluster.hosts + 1):
            yield f"{larger.cluster.hosts} hosts of this type" if not cluster.machine else larger.cluster.name

    def find_smallest_cluster(
        self, make_cluster: Callable[[int], Cluster], min_hosts: int = 1
    ) -> ClusterEstimate | None:
        """Return the prediction for the fewest hosts on which the run fits, or None if the search finds none.

        The number of hosts is doubled, starting from `min_hosts` (with fused kernels only, at least the number whose
        devices can hold the tables), and then bisected. The search ends at MAX_HOSTS hosts, at one row per GPU, and
        after MAX_REFUSALS clusters without a plan. `make_cluster` returns the cluster with a given number of hosts.
        Errors are those of `__call__`.
        """
        single_host = make_cluster(1)
        config = _configure_for(self._config, single_host)
        needed, room = self._estimate_tables_gib(config, single_host)
        if config.plan.compute_kernels == ["fused"]:
            min_hosts = max(min_hosts, math.ceil(needed / room))
        high, low, num_refused = min_hosts, min_hosts - 1, 0
        while not (estimate := self(make_cluster(high))).fits:
            num_refused += estimate.refusal is not None
            is_limit = high >= MAX_HOSTS or high * single_host.gpus >= config.data.global_batch_size
            if is_limit or num_refused == MAX_REFUSALS:
                return None
            low, high = high, min(2 * high, MAX_HOSTS)
        while high - low > 1:
            middle = (low + high) // 2
            if (candidate := self(make_cluster(middle))).fits:
                high, estimate = middle, candidate
            else:
                low = middle
        return estimate

    def _estimate_tables_gib(self, config: RunConfig, cluster: Cluster) -> tuple[float, float]:
        """Return (GiB that tables with optimizer state need, GiB available to them) on all devices of a cluster."""
        on_cpu = config.scaling.device == "cpu"
        constraints = resolve_constraints(config, self._schema)
        sizes = estimate_footprints(config, self._schema, constraints, "cpu" if on_cpu else "cuda")
        share = 1.0 if on_cpu else TABLE_MEMORY_SHARE
        memory = config.plan.memory_gib or cluster.memory_gib
        return sum(size.device for size in sizes.values()) / GIB, share * memory * cluster.world

    def choose_clusters(self, machines: list[Machine], prices: Mapping[str, float]) -> list[ClusterEstimate]:
        """Return the prediction for the smallest cluster of each machine type on which the run fits.

        The predictions are sorted by number of GPUs, then by price. Machine types on which the run does not fit are
        omitted. `prices` maps machine names to prices per hour; missing prices are sorted as 0. Errors are those of
        `__call__`.
        """
        estimates = [self.find_smallest_cluster(partial(Cluster.from_machine, machine=machine)) for machine in machines]
        found = [each for each in estimates if each]
        return sorted(found, key=lambda each: (each.cluster.world, compute_hourly_price(each, prices) or 0))


def compute_hourly_price(estimate: ClusterEstimate, prices: Mapping[str, float]) -> float | None:
    """Return the hourly price of an estimate's cluster; None without a machine type whose price is in `prices`."""
    machine = estimate.cluster.machine
    price = prices.get(machine.name) if machine else None
    return None if price is None else estimate.cluster.hosts * price


def _configure_for(config: RunConfig, cluster: Cluster) -> RunConfig:
    """Return the configuration with one worker for each GPU in a cluster, and device cuda for known machine types."""
    values: dict[str, Any] = {"num_workers": cluster.world}
    if cluster.machine:
        values["device"] = "cuda"
    return config.model_copy(update={"scaling": config.scaling.model_copy(update=values)})


def dry_run(
    config: RunConfig, schema: Schema, cluster: Cluster, dense: Iterable[nn.Parameter] = ()
) -> list[PlannedTable]:
    """Return the sharding of each table that a run on a cluster's GPUs or CPU workers (scaling.device) would use.

    As in a run, 15 % of GPU memory is reserved for dense layers and activations. To compare plans, the time of the
    dense layers is estimated from the shapes of their weights, `dense`.

    Raises:
        ConfigError: Tables do not fit, constraints cannot be met, or the cluster has no hosts, GPUs or CPU workers.
    """
    from raytrec.embeddings.optim import mark_fused
    from raytrec.embeddings.pooling import PooledEmbeddings
    from raytrec.embeddings.sharding import make_planning_sharders
    from raytrec.planning.plan import Hosts, search_plan, validate_for_hosts

    device = "cpu" if config.scaling.device == "cpu" else "cuda"
    gpus, world, machine = cluster.gpus, cluster.world, cluster.machine
    if min(cluster.hosts, gpus) < 1:
        kind = "worker" if device == "cpu" else "GPU"
        what = f"the cluster has {cluster.hosts} × {gpus} {kind}s"
        raise ConfigError(what, where="cluster", expected=f"at least one host, with at least one {kind} each")
    memory = int((config.plan.memory_gib or cluster.memory_gib) * GIB)
    host_share, disk_share = int(cluster.host_memory_gib * GIB) // gpus, int(cluster.disk_gib * GIB) // gpus
    hosts = Hosts(gpus, (), memory, host_share, disk_share)
    if machine:
        hosts = replace(hosts, gpus=frozenset([machine.gpu]), network=machine.gpu_network)
    optimizers = resolve_optimizers(config, schema)
    with _set_ranks_per_host(gpus):
        constraints, topology = validate_for_hosts(hosts, world, config, schema, device)
        tables = PooledEmbeddings(schema, constraints, resolve_features(schema, config.model).sequences)
        mark_fused(tables.collections, optimizers, device)  # the planner reads the optimizer state from the result
        sharders = make_planning_sharders(config, schema, world)
        plan = search_plan(hosts, topology, constraints, schema, config, tables, sharders, dense)
    return list_planned_tables(plan, config, schema, world)


@contextmanager
def _set_ranks_per_host(ranks: int) -> Iterator[None]:
    """Set LOCAL_WORLD_SIZE, from which TorchRec reads the number of ranks per host, within the block.

    The block also suppresses warnings of TorchRec's planner about the hypothetical topology and the dense layers.
    """
    logger, name = logging.getLogger("torchrec.distributed.planner"), "LOCAL_WORLD_SIZE"
    level, previous_value = logger.level, os.environ.get(name)
    logger.setLevel(logging.ERROR)
    os.environ[name] = str(ranks)
    try:
        yield
    finally:
        logger.setLevel(level)
        os.environ.pop(name)
        if previous_value is not None:
            os.environ[name] = previous_value
