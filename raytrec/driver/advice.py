"""Numbers of a configuration that were copied from another table or run, as warnings."""

from __future__ import annotations

from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.config.transforms import Sample


def copied_numbers(config: RunConfig, schema: Schema, steps: int) -> list[str]:
    """A line for each number that does not fit the tables or the run.

    Args:
        steps: of the whole run.
    """
    lines = []
    for place, transform in enumerate(config.data.transforms):
        if not isinstance(transform, Sample) or not transform.rows:
            continue
        features = (name for name in schema.sparse if schema.column_of(name) == transform.column)
        for table in dict.fromkeys(schema.sparse[name].table for name in features):
            if transform.rows < schema.tables[table].rows:
                lines.append(
                    f"data.transforms[{place}].rows is {transform.rows:,}, and table {table} has "
                    f"{schema.tables[table].rows:,} rows: the ids from {transform.rows:,} on are never "
                    "drawn; leave rows out to draw among all"
                )
    schedule = config.optim.schedule
    end = schedule.warmup_steps + (schedule.decay_steps or steps)
    if not schedule.floor and end < steps:
        lines.append(
            f"optim.schedule: learning rates are 0 from step {end:,} on, and the run has {steps:,} steps; "
            "leave decay_steps out to decay until its end"
        )
    return lines
