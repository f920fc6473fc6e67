"""What a run has looked up, and a schema whose statistics are that. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from raytrec.common.messages import Message, RankLine, Start
from raytrec.config.features import resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema, Statistics

UNKNOWN = Statistics(mean_length=0, p99_length=0, max_length=0, distinct=0)


class Recorded:
    """The lookups of a run, added up from its messages.

    Attributes:
        workers: the numbers of workers that it has trained with.
    """

    def __init__(self, messages: Iterable[Message] = ()):
        self.workers: set[int] = set()
        self._sums: dict[str, tuple[float, float]] = {}  # table → ids looked up; rows held × steps
        for message in messages:
            self.add(message)

    def add(self, message: Message) -> None:
        """Takes any message; those of groups that begin, and of ranks' intervals, count."""
        if isinstance(message, Start):
            self.workers.add(message.workers)
        elif isinstance(message, RankLine):
            for table, entry in message.tables.items():
                ids, held = self._sums.get(table, (0.0, 0.0))
                steps = message.steps / (message.world if entry.get("replicated") else 1)
                self._sums[table] = (
                    ids + (entry.get("lookups") or 0),
                    held + (entry.get("rows") or 0) * steps,
                )

    def lengths(self, config: RunConfig, schema: Schema) -> dict[str, float]:
        """Table → ids of a row of the global batch, the mean over all recorded steps.

        A shard looks up the ids of its rows. Those of shards with the same rows count once, and ranks that
        are not recorded (messages.recorded_ranks) count as the others do. On GPUs, ids that are read one by
        one are looked up once a batch.
        """
        batch, tables = config.data.global_batch_size, schema.tables
        return {
            table: tables[table].rows * ids / held / batch
            for table, (ids, held) in self._sums.items()
            if table in tables and held > 0 <= ids
        }


def with_recorded(config: RunConfig, schema: Schema, lengths: Mapping[str, float]) -> Schema:
    """The schema with statistics of as many ids of a row as were recorded. How often which ids are looked up
    stays as `raytrec inspect` has found it.

    Args:
        lengths: table → ids of a row (Recorded.lengths), which features of the same table share as they did.
    """
    from raytrec.embeddings.planner.loads import ids_of_features

    expected, statistics = ids_of_features(schema, resolve_features(schema, config.model)), {}
    for name, spec in schema.sparse.items():
        if spec.table in lengths:
            of_table = [expected[each] for each, other in schema.sparse.items() if other.table == spec.table]
            share = expected[name] / sum(of_table) if sum(of_table) else 1 / len(of_table)
            known = schema.statistics.get(name, UNKNOWN)
            statistics[name] = known.model_copy(update={"mean_length": lengths[spec.table] * share})
    return schema.model_copy(update={"statistics": schema.statistics | statistics})
