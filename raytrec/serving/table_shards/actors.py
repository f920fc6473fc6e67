"""Actors of a service's table shards, and the lookups of the service's replicas in the shards."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from raytrec.common.errors import RunError
from raytrec.common.formatting import format_bytes
from raytrec.deltas.chain import Position, iterate_exports, make_missing_export_error
from raytrec.scoring.load import LookupMaker
from raytrec.scoring.lookups import IdRows
from raytrec.scoring.manifest import Manifest, read_manifest
from raytrec.serving.coordinator import NAMESPACE
from raytrec.serving.options import ServiceOptions
from raytrec.serving.replica_state import ReplicaMetrics
from raytrec.serving.table_shards.connection import ShardConnection, TableState
from raytrec.serving.table_shards.lookups import ShardedLookups
from raytrec.serving.table_shards.shard import TableShard

SHARD_CPUS = 0.01  # almost 0, because Ray places shards by memory
MAX_CALLS = 100  # concurrent calls of `TableShard.open`; calls for loaded states must not wait


def get_shard_name(name: str, number: int, count: int) -> str:
    """Return the name of a shard's actor."""
    return f"raytrec-tables-{name}-{number}-of-{count}"


def start_shards(service_options: ServiceOptions) -> None:
    """Start the missing shards of a service, without waiting until the shards have loaded tables.

    Raises:
        RunError: There is no export, or the cluster does not have enough memory.
    """
    import ray

    name, count, missing = service_options.name, service_options.table_shards, []
    for number in range(count):
        try:
            ray.get_actor(get_shard_name(name, number, count), NAMESPACE)
        except ValueError:
            missing.append(number)
    uri = service_options.uri
    if service_options.follow:
        uri, _ = next(iterate_exports(uri), (None, None))
        if uri is None:
            raise make_missing_export_error(service_options.uri)
    manifest = read_manifest(uri)
    memory_bytes = -(-sum(manifest.files[file].bytes for each in manifest.stacks for file in each.files) // count)
    _check_memory(memory_bytes, len(missing))
    for number in missing:
        ray.remote(TableShard).options(
            name=get_shard_name(name, number, count),
            namespace=NAMESPACE,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=MAX_CALLS,
            num_cpus=SHARD_CPUS,
            memory=memory_bytes,
            scheduling_strategy="SPREAD",
        ).remote(number, count)


def _check_memory(memory_bytes: int, shards: int) -> None:
    from raytrec.compat.ray_core import has_autoscaler, list_free_resources

    free = [node.get("memory", 0.0) for node in list_free_resources().values()]
    if sum(each // max(1, memory_bytes) for each in free) < shards and not has_autoscaler():
        what, where = f"a table shard needs {format_bytes(memory_bytes)} of memory", f"--table-shards {shards}"
        expected = f"nodes with that much free memory; the nodes have {', '.join(map(format_bytes, free))}"
        raise RunError(what, where=where, expected=expected, do="start more shards, or add nodes")


def end_shards(name: str, count: int) -> None:
    """Terminate the existing shards of a service."""
    import ray

    for number in range(count):
        with suppress(ValueError):  # the actor does not exist
            ray.kill(ray.get_actor(get_shard_name(name, number, count), NAMESPACE))


def make_lookup_maker(
    service_options: ServiceOptions, figures: ReplicaMetrics, position: Position | None = None
) -> LookupMaker:
    """Return the function that makes the lookups of an export in the service's shards.

    Args:
        service_options: Options of the service.
        figures: Metrics of the replica.
        position: Delta that leads to the state of the export; None: the service does not follow a run.
    """
    count = service_options.table_shards
    names = [get_shard_name(service_options.name, number, count) for number in range(count)]

    def make_lookups(uri: str, manifest: Manifest, ids: Mapping[str, IdRows]) -> ShardedLookups:
        state = TableState(uri, manifest.version, manifest.stack_precisions)
        if position:
            where = service_options.uri, position.version, manifest.stack_precisions
            state = TableState(*where, position.number, is_first=True)
        connections = [ShardConnection(number, partial(_open, name), state) for number, name in enumerate(names)]
        return ShardedLookups(manifest, ids, connections, service_options, figures)

    return make_lookups


def _open(name: str, state: TableState, timeout_s: float) -> Any:
    import ray

    deadline, shard = monotonic() + timeout_s, ray.get_actor(name, NAMESPACE)
    while (address := ray.get(shard.open.remote(state), timeout=max(0.0, deadline - monotonic()))) is None:
        pass  # the shard is loading tables for another call
    return address
