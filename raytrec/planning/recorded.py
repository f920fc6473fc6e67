"""Statistics of the ids that a run has looked up, for its schema."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raytrec.common.messages import RankLine
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Statistics

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
    from raytrec.planning.loads import ids_of_features

    expected, statistics = ids_of_features(schema, resolve_features(schema, config.model)), {}
    for name, spec in schema.sparse.items():
        if spec.table in lengths:
            of_table = [expected[each] for each, other in schema.sparse.items() if other.table == spec.table]
            share = expected[name] / sum(of_table) if sum(of_table) else 1 / len(of_table)
            known = schema.statistics.get(name, UNKNOWN)
            statistics[name] = known.model_copy(update={"mean_length": lengths[spec.table] * share})
    return schema.model_copy(update={"statistics": schema.statistics | statistics})
