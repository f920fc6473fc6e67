"""Dry runs of plans, with the memory of tables per rank and memory tier."""

from raytrec.planning.dry_run import dry_run
from raytrec.planning.machines import Cluster
from raytrec.planning.memory import GIB, TIERS, compute_rank_parts


class PlannedMemory:
    """Plan of a dry run and the memory of its tables.

    Attributes:
        plan: table → PlannedTable.
        ranks: tier → list of GiB of all tables, per rank.
        of: table → tier → list of GiB, per rank that holds the table.
    """

    def __init__(self, config, schema, hosts=1, gpus=8, memory_gib=80, host_memory_gib=None, disk_gib=1e6):
        cluster = Cluster.from_sizes(hosts, gpus, memory_gib, host_memory_gib, disk_gib)
        tables = dry_run(config, schema, cluster)
        self.plan = {table.table: table for table in tables}
        self.ranks = {tier: [0.0] * cluster.world for tier in TIERS}
        self.of = {name: {tier: [0.0] * len(t.ranks) for tier in TIERS} for name, t in self.plan.items()}
        for (name, rank), its in compute_rank_parts(tables, config, schema).items():
            for tier, bytes_ in zip(TIERS, its.size, strict=True):
                self.ranks[tier][rank] += bytes_ / GIB
                self.of[name][tier][self.plan[name].ranks.index(rank)] = bytes_ / GIB
