"""Speed of lookups in table shards outside the replicas, compared with tables that the replica maps.

    python benchmarks/table_shards.py [--rounds 5] [--lookups 200] [--shards 2]

The tables are those of a DLRM with 26 tables of 100,000 rows and dim 64. A lookup has 2,002 keys, 77 in the bag of each
table, drawn from a power law. The sides are

in process         tables that this process maps
Flight             shards in Ray actors, over Arrow Flight; with and without the cache of frequent rows
Serve's handles    the same shards and messages, without the cache, through handles of Ray Serve

Keys/s per core are the number of keys divided by the CPU time of all processes. Then `raytrec serve` serves requests
of 32 rows with mapped tables, and with shards. Writes benchmarks/results/table_shards.json and the tables in
docs/benchmarks.md.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import harness
import numpy as np
import serve_http
import torch
import typer
from harness import Grid, take_turns, tree_cpu_s
from serve import make_dlrm

from raytrec.cluster.session import ray_session
from raytrec.data.assembler import AssembledTensors, Bags
from raytrec.scoring.load import load
from raytrec.scoring.manifest import read_manifest
from raytrec.serving.options import ServiceOptions
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.table_shards.connection import TableState
from raytrec.serving.table_shards.lookups import ShardedLookups
from raytrec.serving.table_shards.shard import TableShard, end_shards, make_lookup_maker, start_shards

KEYS_PER_TABLE, CLIENTS, NAME = 77, (1, 10), "bench"
HEADER = ("lookups of 2,002 keys", "p50 ms", "p99 ms", "keys/s per core")
SERVICE_HEADER = ("service", "clients", *serve_http.FIGURES[:4])


class HandleConnection:
    """Connection to a shard through a handle of Ray Serve, in place of ShardConnection."""

    def __init__(self, number: int, handle: Any, state: TableState):
        self.number, self.state, self._handle = number, state, handle

    def connect(self, state: TableState, timeout_s: float) -> None:
        """Wait until the shard responds."""
        self._handle.ready.remote().result(timeout_s=timeout_s)

    def send(self, request: bytes, deadline: float) -> Any:
        """Send a request."""
        return self._handle.answer.remote(request)

    def receive(self, response: Any, size: int) -> bytes:
        """Return the response."""
        return response.result()

    def close(self) -> None:
        """Do nothing; Serve ends the deployments."""


class HandleShard:
    """Deployment that serves requests with a shard's tables."""

    def __init__(self, number: int, count: int, state: TableState):
        self._shard = TableShard(number, count)
        self._shard.open(state)

    def ready(self) -> bool:
        """Return True."""
        return True

    def answer(self, request: bytes) -> bytes:
        """Return the response to a request."""
        return self._shard.answer(memoryview(request)).to_pybytes()


def draw_lookup(draw: np.random.Generator, keys: list[str], rows: int) -> AssembledTensors:
    """Return one row with KEYS_PER_TABLE ids in each bag, drawn from a power law."""
    ids = np.minimum(draw.zipf(1.2, len(keys) * KEYS_PER_TABLE) - 1, rows - 1)
    lengths = torch.full((len(keys),), KEYS_PER_TABLE, dtype=torch.int32)
    bags = Bags(keys, torch.from_numpy(ids), None, lengths, lengths.tolist(), 1)
    return AssembledTensors(torch.empty(1, 0), bags, None, None, None, None, None, None, None)


@contextmanager
def open_sides(export: str, shards: int) -> Iterator[dict[str, Any]]:
    """Yield side → lookups of each side, on a local Ray cluster that runs during the block."""
    from ray import serve

    options = ServiceOptions(uri=export, name=NAME, table_shards=shards, table_timeout_ms=5000)
    mapped = load(export)
    manifest, figures = mapped.manifest, ReplicaMetrics()
    with ray_session(num_cpus=2 + shards), ExitStack() as stack:
        stack.callback(end_shards, NAME, shards)
        start_shards(options)
        sides = {"in process": mapped.lookups}
        for side, mib in (("Flight", 64), ("Flight, no cache", 0)):
            make = make_lookup_maker(options.model_copy(update={"table_cache_mib": mib}), figures)
            sides[side] = load(export, make_lookups=make).lookups
        stack.callback(serve.shutdown)
        serve.start(proxy_location="Disabled")
        connections, slow = [], options.model_copy(update={"table_cache_mib": 0})
        state = TableState(export, manifest.version, manifest.stack_precisions)
        for number in range(shards):
            deployment = serve.deployment(HandleShard, name=f"shard-{number}", ray_actor_options={"num_cpus": 1})
            bound = deployment.bind(number, shards, state)
            handle = serve.run(bound, name=f"shard-{number}", route_prefix=None)
            connections.append(HandleConnection(number, handle, state))
        sides["Serve's handles"] = ShardedLookups(manifest, {}, connections, slow, figures)
        yield sides


def measure_lookups(lookups: Callable[..., Any], requests: list[AssembledTensors]) -> dict[str, float]:
    """Return p50 and p99 of the lookups' times in milliseconds, and the keys/s per core as `rate`."""
    seconds, cpu_s = [], tree_cpu_s()
    for request in requests:
        began = perf_counter()
        lookups(request, request.bags.keys)
        seconds.append(perf_counter() - began)
    cpu_s = max(tree_cpu_s() - cpu_s, 1e-3)
    p50, p99 = (1000 * value for value in np.percentile(seconds, (50, 99)))
    return {"p50": p50, "p99": p99, "rate": sum(len(each.bags.ids) for each in requests) / cpu_s}


def measure_services(export: str, data: Any, shards: int, rounds: int, seconds: float) -> list[list[str]]:
    """Return the cells of SERVICE_HEADER for a service with mapped tables, and one with shards."""
    columns, sides = serve_http.write_bodies(data)["columns"], {}
    words = {"mapped tables": [], f"{shards} shards": ["--table-shards", str(shards), "--table-timeout-ms", "5000"]}
    with ExitStack() as stack:
        for (side, options), port in zip(words.items(), serve_http.find_free_ports(len(words)), strict=True):
            sides[side] = {"port": port, "path": "/predict"} | columns
            command = ["-m", "raytrec", "serve", export, "--no-token", *options, "--port", str(port)]
            stack.enter_context(serve_http.run_service(command, sides[side], {}))
        turns = {
            (side, count): lambda side=side, count=count: serve_http.measure(sides[side], count, seconds)
            for side in sides
            for count in CLIENTS
        }
        results = take_turns(turns, rounds)
    formats = {"rate": ",.0f", "p50": ".1f", "p99": ".1f", "cpu_us": ",.0f"}
    return [
        [side, str(count), *(format(median(each[name] for each in values), form) for name, form in formats.items())]
        for (side, count), values in results.items()
    ]


def main(
    rounds: harness.Rounds = 5,
    lookups: Annotated[int, typer.Option(min=1, help="Lookups of each side in a round.")] = 200,
    shards: Annotated[int, typer.Option(min=1, help="Number of shards.")] = 2,
    smallest: harness.Smallest = False,
) -> None:
    """Measure lookups and services and print the tables; without --smallest, store them and fill docs/benchmarks.md."""
    torch.set_num_threads(1)
    rounds, lookups, table_rows, seconds = (1, 5, 1000, 0.3) if smallest else (rounds, lookups, 100_000, 3)
    with tempfile.TemporaryDirectory(prefix="raytrec-table-shards-") as scratch:
        os.chdir(scratch)
        export, data = make_dlrm(table_rows)
        export, draw = str(Path(export).absolute()), np.random.default_rng(0)
        with open_sides(export, shards) as sides:
            features = read_manifest(export).features
            rows = min(table.rows for table in features.schema.tables.values())
            turns = {
                side: lambda side=side: measure_lookups(
                    sides[side], [draw_lookup(draw, features.keys, rows) for _ in range(lookups)]
                )
                for side in sides
            }
            results = take_turns(turns, rounds, warm_up=1)
        forms = {"p50": ".2f", "p99": ".2f", "rate": ",.0f"}
        cells = {
            side: [format(median(v[n] for v in each), form) for n, form in forms.items()]
            for side, each in results.items()
        }
        found = {"lookups": [[side, *each] for side, each in cells.items()]}
        found["services"] = measure_services(export, data, shards, rounds, seconds)
    for table in make_tables(found):
        table.show(120)
    if not smallest:
        harness.publish("table_shards", found, document(found))


def make_tables(found: dict[str, list[list[str]]]) -> list[Grid]:
    """Return the tables of lookups and of services."""
    return [Grid(HEADER, found["lookups"]), Grid(SERVICE_HEADER, found["services"])]


def document(found: dict[str, list[list[str]]]) -> str:
    """Return the text for docs/benchmarks.md: the table of lookups, and the speed of services."""
    most = str(CLIENTS[-1])
    speeds = " and ".join(f"{rate} with {side}" for side, clients, rate, *_ in found["services"] if clients == most)
    services = f"With {most} clients, the number of requests/s of a service is {speeds}."
    return f"{Grid(HEADER, found['lookups']).markdown()}\n\n{services}"


if __name__ == "__main__":
    typer.run(main)
