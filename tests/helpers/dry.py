"""Dry runs of plans, and where the bytes of their tables are."""

from raytrec.planning.dry_run import dry_run
from raytrec.planning.machines import Cluster
from raytrec.planning.memory import GIB, TIERS, held


class Held:
    """A plan, and its tables' GiB.

    Attributes:
        plan: table → PlannedTable.
        ranks: tier → GiB of all tables on each rank.
        of: table → tier → GiB on each rank that holds it.
    """

    def __init__(self, config, schema, hosts=1, gpus=8, memory_gib=80, host_memory_gib=None, disk_gib=1e6):
        cluster = Cluster.described(hosts, gpus, memory_gib, host_memory_gib, disk_gib)
        tables = dry_run(config, schema, cluster)
        self.plan = {table.table: table for table in tables}
        self.ranks = {tier: [0.0] * cluster.world for tier in TIERS}
        self.of = {name: {tier: [0.0] * len(t.ranks) for tier in TIERS} for name, t in self.plan.items()}
        for (name, rank), its in held(tables, config, schema).items():
            for tier, bytes_ in zip(TIERS, its.size, strict=True):
                self.ranks[tier][rank] += bytes_ / GIB
                self.of[name][tier][self.plan[name].ranks.index(rank)] = bytes_ / GIB
