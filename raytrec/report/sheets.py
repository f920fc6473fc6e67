"""Tables of a report, whose cells contain a text and a number for sorting."""

from __future__ import annotations

from collections.abc import Iterable
from math import nan

from raytrec.common.formatting import (
    as_dict,
    format_bytes,
    format_count,
    format_duration,
    format_figure,
    format_percent,
    format_rank_ranges,
    parse_number,
)
from raytrec.common.messages import Outcome, RankLine, Saved
from raytrec.metrics.results import Cell, DataTable
from raytrec.report.run_timeline import build_timeline
from raytrec.tracking import aggregate
from raytrec.tracking.run_folder import RunFolder

MAX_EVENTS = 200


def bounds(run: RunFolder) -> DataTable:
    """Return a table with a row for each part of the run's time (`findings.find_bound`); empty if none is recorded."""
    parts = as_dict(run.result.get("bound.parts"))
    return _build_slice_table(
        {
            "part": Cell(str(name)),
            "seconds": _number_cell(parse_number(part.get("seconds"))),
            "share of the time": _share(parse_number(part.get("share"))),
        }
        for name, part in parts.items()
        if isinstance(part, dict)
    )


def ranks(run: RunFolder) -> DataTable | None:
    """Return a table with a row for each recorded rank of the last worker group; None if ranks.jsonl has no lines.

    The group's first interval, in which readers start, is excluded unless it is the only one.
    """
    lines = aggregate.sum_over_time(aggregate.skip_warmup(run.ranks))
    total = sum(line.added("lookup_bytes") for line in lines)
    return _build_slice_table(_build_rank_row(line, total) for line in lines) if lines else None


def _build_rank_row(line: RankLine, total: float) -> dict[str, Cell]:
    """Return the row of a rank in the table of `ranks`.

    Args:
        line: Lines of one rank, summed over time.
        total: Number of bytes looked up by all ranks.
    """

    def system(key: str) -> float:
        return parse_number(line.system.get(key))

    return {
        "rank": Cell(str(line.rank), line.rank),
        "ms per step": _step_ms_cell(line, line.seconds),
        "own time": _step_ms_cell(line, aggregate.get_own_time_s(line)),
        "data wait": _share(line.phase_s("data") / max(1e-12, line.seconds)),
        "lookups": _share(line.added("lookup_bytes") / total if total else nan),
        "tables": Cell(str(len(line.tables)), len(line.tables)),
        "table memory": _bytes(line.added("weight_bytes") + line.added("state_bytes")),
        "process": _bytes(system("rss_bytes")),
        "CPU": _share(system("cpu_percent") / 100),
        "host memory": _share(system("host_memory_percent") / 100),
        "GPU": _share(system("gpu_percent") / 100),
        "GPU memory": _bytes(system("gpu_memory_bytes")),
        "sent/s": _bytes(system("network_sent_bytes_per_s")),
        "received/s": _bytes(system("network_received_bytes_per_s")),
    }


def build_table_sheet(run: RunFolder) -> DataTable | None:
    """Return a table with a row for each embedding table: its plan, and its statistics in the last interval.

    Lookups are summed over all intervals of the last worker group. The result is None if ranks.jsonl and plan.json
    contain no tables.
    """
    group = aggregate.sum_over_time(aggregate.select_last_group(run.ranks))
    latest = list(aggregate.by_step(run.ranks).values())[-1] if run.ranks else []
    names = list(dict.fromkeys([*aggregate.order_by_load(group), *run.plan]))
    looked = sum(line.added("lookup_bytes") for line in group)
    return _build_slice_table(_build_table_row(run, name, group, latest, looked) for name in names) if names else None


def _build_table_row(
    run: RunFolder, name: str, group: list[RankLine], latest: list[RankLine], looked: float
) -> dict[str, Cell]:
    """Return the row of an embedding table in the table of `build_table_sheet`.

    Args:
        run: Run to report on.
        name: Name of the embedding table.
        group: One line per rank, summed over time.
        latest: Lines of all ranks for the last interval.
        looked: Number of bytes looked up by all ranks.
    """
    entries = [line.tables[name] for line in group if name in line.tables]
    plan, (rows, dim) = run.planned(name), run.table_size(name) or (nan, nan)
    on = plan.get("ranks") or [line.rank for line in group if name in line.tables]
    load = sum(entry.get("lookup_bytes") or 0.0 for entry in entries) / looked if looked else nan
    figures = run.combine_ranks(latest, name)
    return {
        "table": Cell(name),
        "rows": _number_cell(rows),
        "dim": _number_cell(dim),
        "sharding_type": Cell(str(plan.get("sharding_type") or "")),
        "compute_kernel": Cell(str(plan.get("compute_kernel") or "")),
        "ranks": Cell(format_rank_ranges(on) if isinstance(on, list) else str(on)),
        "memory": _bytes(sum(map(aggregate.sum_table_bytes, entries)) if entries else nan),
        "lookups": _share(load),
        "distinct ids": _share(figures["unique_ratio"]),
        "never trained": _share(figures["dead_share"]),
        "row norm, median": _number_cell(figures["row_norm_p50"]),
        "row norm, max": _number_cell(figures["row_norm_max"]),
        "max |w|": _number_cell(figures["max_abs"]),
        "gradient norm": _number_cell(figures["gradient_norm"]),
        "update norm": _number_cell(figures["update_norm"]),
        "state norm": _number_cell(figures["state_norm"]),
        "ids changed": _share(figures["changed_share"]),
        "cache hits": _share(figures["cache_hit_rate"]),
        "collisions": _share(figures["collision_rate"]),
        "rows with an id": _share(figures["occupancy"]),
        "ids admitted": _number_cell(figures["admitted_ids"]),
        "ids evicted": _number_cell(figures["evicted_ids"]),
        "fallback share": _share(figures["fallback_share"]),
        "steps since last use": _number_cell(figures["id_age"]),
    }


def checks(run: RunFolder) -> DataTable | None:
    """Return a table with the passes, failures and last outcome of each check, or None if no check was recorded."""
    outcomes: dict[str, list[Outcome]] = {}
    for line in run.checks:
        outcomes.setdefault(line.check, []).append(line)
    rows = (
        {
            "check": Cell(check),
            "passed": _number_cell(sum(line.passed for line in lines)),
            "failed": _number_cell(sum(not line.passed for line in lines)),
            "last at step": _number_cell(lines[-1].step),
            "value": _number_cell(parse_number(lines[-1].figure)),
            "limit": _number_cell(parse_number(lines[-1].limit)),
            "last message": Cell(lines[-1].text),
        }
        for check, lines in outcomes.items()
    )
    return _build_slice_table(rows) if outcomes else None


def events(run: RunFolder) -> DataTable | None:
    """Return a table of the last MAX_EVENTS events other than successful saves, by time; None if there are none."""
    record = build_timeline(run)
    items = [(mark.at_s, mark.kind, mark.step, mark.text) for mark in record.marks if mark.kind != "saved"]
    items += [(g.begin_s, "started", None, _started(g.workers, g.resumed_after_s)) for g in record.groups]
    rows = (
        {
            "after": Cell(format_duration(at), at),
            "event": Cell(kind),
            "step": _number_cell(parse_number(step)),
            "details": Cell(text),
        }
        for at, kind, step, text in sorted(items, key=lambda each: each[0])[-MAX_EVENTS:]
    )
    return _build_slice_table(rows) if items else None


def saves(run: RunFolder) -> str:
    """Return a sentence with the number of successful saves, last step and mean wait, or that there are none."""
    good = [event for event in run.events if isinstance(event, Saved) and not event.error]
    if not good:
        return "No checkpoint was recorded."
    wait_ms = 1e3 * sum(event.blocked_s for event in good) / len(good)
    wait = f"each save blocked training for {wait_ms:.0f} ms on average"
    return f"Saved {format_count(len(good), 'time')}, last at step {good[-1].step:,}; {wait}."


def _build_slice_table(rows: Iterable[dict[str, Cell]]) -> DataTable:
    """Return rows with equal columns as a DataTable, without the columns that are empty in all rows."""
    rows = list(rows)
    filled = [name for name in (rows or [{}])[0] if any(row[name].text not in ("", "–") for row in rows)]
    return DataTable(filled, [[row[name] for name in filled] for row in rows])


def _number_cell(value: float) -> Cell:
    return Cell(format_figure(value), value)


def _share(value: float) -> Cell:
    return Cell(format_percent(value), value)


def _bytes(value: float) -> Cell:
    return Cell(format_bytes(value), value)


def _step_ms_cell(line: RankLine, seconds: float) -> Cell:
    value = seconds / max(1, line.steps) * 1e3
    return Cell(f"{value:.1f}", value)


def _started(workers: int, resumed_after_s: float | None) -> str:
    later = f", resumed after {format_duration(resumed_after_s)}" if resumed_after_s else ""
    return format_count(workers, "worker") + later
