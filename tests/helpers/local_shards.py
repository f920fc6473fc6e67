"""Table shards in the test process, which answer over Arrow Flight without Ray."""

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

from raytrec.scoring.stored_tables import StackedTable
from raytrec.serving.options import ServiceOptions
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.table_shards.connection import ShardConnection, TableState
from raytrec.serving.table_shards.loaded_tables import LoadedTables
from raytrec.serving.table_shards.lookups import ShardedLookups, close_connections
from raytrec.serving.table_shards.shard import TableShard


class LocalShards:
    """Table shards of exports, and lookups in them.

    Attributes:
        shards: shards by number; another shard may take a number.
        figures: metrics of the lookups.
    """

    def __init__(self, count):
        self.shards = [TableShard(number, count, "127.0.0.1") for number in range(count)]
        self.figures, self._connections, self._servers = ReplicaMetrics(), [], [each.server for each in self.shards]

    def serve_stacks(self, version, stacks, shapes, precisions="fp32"):
        """Serve stacks without an export."""
        entries = [SimpleNamespace(tables=[str(number)]) for number in range(len(stacks))]
        manifest = SimpleNamespace(version=version, stacks=entries, stack_shapes=shapes, stack_precisions=precisions)
        tables = {str(number): StackedTable(stack) for number, stack in enumerate(stacks)}
        for shard in self.shards:
            tables_of_shard = LoadedTables(manifest, tables, shard._part)
            others = [each for each in shard._tables if each.keys != tables_of_shard.keys]
            shard._tables = [*others, tables_of_shard]

    def make_maker(self, folder, **options):
        """Return the argument of `Follower` with which it looks up rows in the shards."""
        return lambda position: partial(self.make_lookups, followed=(str(folder), position), **options)

    def make_lookups(self, uri, manifest, ids, cache_bytes=2000, timeout_s=30.0, fallback="fail", followed=None):
        """Make lookups in the shards, as `load` does with `make_lookups`."""

        def reach(number):
            return lambda state, timeout_s: self.shards[number].open(state)

        state = TableState(uri, manifest.version, manifest.stack_precisions)
        if followed:
            folder, position = followed
            state = TableState(folder, position.version, manifest.stack_precisions, position.number, is_first=True)
        connections = [ShardConnection(number, reach(number), state) for number in range(len(self.shards))]
        self._connections += connections
        sizes = {"table_cache_mib": cache_bytes / 2**20, "table_timeout_ms": 1000 * timeout_s}
        options = ServiceOptions(uri="x", on_missing_shard=fallback, **sizes)
        return ShardedLookups(manifest, ids, connections, options, self.figures)

    def count(self, name, **labels):
        """Return the value of a metric."""
        return self.figures.registry.get_sample_value(name, labels) or 0.0

    def stop(self, number):
        """End the streams of a shard, which cannot be reached until another shard takes its number."""

        def refuse(*_):
            raise ConnectionError("the shard has ended")

        self.shards[number].answer = self.shards[number].open = refuse

    def replace(self, number):
        """Start another shard, without tables, in place of one that ends."""
        self.stop(number)
        self.shards[number] = TableShard(number, len(self.shards), "127.0.0.1")
        self._servers.append(self.shards[number].server)

    def close(self):
        close_connections(self._connections)  # the server waits for their ends
        for server in self._servers:
            server.shutdown()


@contextmanager
def local_shards(count):
    """Run table shards during the block."""
    shards = LocalShards(count)
    try:
        yield shards
    finally:
        shards.close()
