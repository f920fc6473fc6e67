"""Stored configurations and schemas whose keys have changed since."""

from __future__ import annotations

from typing import Any

# Key in a stored configuration or schema (`*`: any name or place) → its last part today.
RENAMED = {
    "data.carry": "reserve_columns",
    "eval.exact_rows": "max_exact_rows",
    "tasks.*.where": "mask",
    "tasks.*.item_count": "item_frequency",
    "sparse.*.sides": "side_features",
}

ANY = object()  # a value that does not change what a run learns
# Key that was removed → the value with which a run does what every run does today. With another value the
# key is unknown.
REMOVED: dict[str, Any] = {
    "data.prefetch": ANY,
    "eval.slices_shown": ANY,
    "eval.window_steps": ANY,
    "optim.schedule.floor": 0.0,
    "plan.host_memory_gib": ANY,
    "plan.ranks_per_host": ANY,
    "plan.tables.*.cache_algorithm": ANY,
    "plan.tables.*.cache_load_factor": ANY,
    "plan.tables.*.stochastic_rounding": None,
    "scaling.phase_timeout_s": ANY,
    "scaling.scale_up_interval_s": ANY,
    "tables.*.ids.admit_probability": 1.0,
    "tables.*.ids.ttl_s": None,
    "tasks.*.divisor": "rows",
    "tracking.max_rank_table_series": ANY,
    "train.early_stopping.min_delta": 0.0,
    "train.loss_reduction": "mean",
    "train.micro_batches": ANY,
}


def with_current_keys(values: dict) -> dict:
    """A stored configuration or schema in the keys of today.

    Args:
        values: its plain values; changed in place.
    """
    for key, name in RENAMED.items():
        for section, last in _places(values, key):
            section[name] = section.pop(last)
    for key, value in REMOVED.items():
        for section, last in _places(values, key):
            if value is ANY or section[last] == value:
                del section[last]
    return values


def _places(values: dict, key: str) -> list[tuple[dict, str]]:
    """The mappings that have the last part of a key, each with that part."""
    *above, last = key.split(".")
    found: list[Any] = [values]
    for part in above:
        found = [inner for each in found for inner in _inner(each, part)]
    return [(each, last) for each in found if isinstance(each, dict) and last in each]


def _inner(value: Any, part: str) -> list[Any]:
    if part == "*":
        return [*value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
    return [value[part]] if isinstance(value, dict) and part in value else []
