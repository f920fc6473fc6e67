"""The tables of a report, as rows of text with what they are sorted by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isnan
from typing import Any

from raytrec.common.formatting import bytes_text, count, duration, figure, number, or_0, percent, ranges
from raytrec.metrics.slice_tables import slice_tables
from raytrec.report.history import History
from raytrec.report.run_timeline import story
from raytrec.tracking.aggregate import (
    added,
    by_step,
    count_tables,
    entry_of,
    last_group,
    load_order,
    lookup_bytes,
    over_time,
    own_time,
    phases_of,
    skip_warmup,
    table_bytes,
    tables_of,
)

MOST_EVENTS = 200


@dataclass(frozen=True)
class Cell:
    """A cell: what it says, and what a column is sorted by (None: by the text)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Sheet:
    """A table: names of columns, and rows of cells. Columns in which all rows are empty are dropped."""

    columns: list[str]
    rows: list[list[Cell]]


def bound_sentence(history: History) -> str:
    """What has bounded the run; empty where its result does not say."""
    said = history.result.get("bound.sentence")
    return said if isinstance(said, str) else ""


def bounds(history: History) -> Sheet:
    """One row for each part of the run's time (report.bounds)."""
    found = history.result.get("bound.parts")
    rows = [(str(name), part) for name, part in _items(found) if isinstance(part, dict)]
    columns: dict[str, Callable[[tuple[str, dict]], Cell]] = {
        "part": lambda row: Cell(row[0]),
        "seconds": lambda row: _number(number(row[1].get("seconds"))),
        "share of the time": lambda row: _share(number(row[1].get("share"))),
    }
    return _sheet(columns, rows)


def _items(values: Any) -> list[tuple[Any, Any]]:
    return list(values.items()) if isinstance(values, dict) else []


def slices(history: History) -> list[tuple[str, Sheet]]:
    """A title and a table for each task and column of eval.slices: its largest and its worst slices."""
    return [
        (
            made.title,
            Sheet(
                made.columns,
                [[Cell(name), *(Cell(*each) for each in rest)] for (name, _), *rest in made.rows],
            ),
        )
        for made in slice_tables(history.result)
    ]


def ranks(history: History) -> Sheet | None:
    """One row for each rank of the last group of workers."""
    lines = over_time(skip_warmup(history.ranks))
    if not lines:
        return None
    total = sum(lookup_bytes(line) for line in lines)
    columns: dict[str, Callable[[dict], Cell]] = {
        "rank": lambda line: Cell(str(line["rank"]), line["rank"]),
        "ms a step": lambda line: _a_step(line, or_0(line.get("seconds"))),
        "of its own": lambda line: _a_step(line, own_time(line)),
        "data wait": lambda line: _share(phases_of(line)["data"] / max(1e-12, or_0(line.get("seconds")))),
        "lookups": lambda line: _share(lookup_bytes(line) / total if total else float("nan")),
        "tables": lambda line: Cell(str(count_tables(line)), count_tables(line)),
        "memory of tables": lambda line: _bytes(added(line, "weight_bytes") + added(line, "state_bytes")),
        "process": lambda line: _bytes(_system(line, "rss_bytes")),
        "CPU": lambda line: _share(_system(line, "cpu_percent") / 100),
        "host memory": lambda line: _share(_system(line, "host_memory_percent") / 100),
        "GPU": lambda line: _share(_system(line, "gpu_percent") / 100),
        "GPU memory": lambda line: _bytes(_system(line, "gpu_memory_bytes")),
        "sent/s": lambda line: _bytes(_system(line, "network_sent_bytes_per_s")),
        "received/s": lambda line: _bytes(_system(line, "network_received_bytes_per_s")),
    }
    return _sheet(columns, lines)


def tables(history: History) -> Sheet | None:
    """One row for each table: its plan, and the figures of the last interval; load since the group began."""
    group = over_time(last_group(history.ranks))
    latest = list(by_step(history.ranks).values())[-1] if history.ranks else []
    names = list(dict.fromkeys([*load_order(group), *(str(entry.get("table")) for entry in history.plan)]))
    looked = sum(lookup_bytes(line) for line in group)
    rows = [_about(history, name, group, latest, looked) for name in names]
    columns: dict[str, Callable[[dict], Cell]] = {
        "table": lambda row: Cell(row["name"]),
        "rows": lambda row: _number(row["size"][0]),
        "dim": lambda row: _number(row["size"][1]),
        "sharding_type": lambda row: Cell(row["sharding_type"]),
        "compute_kernel": lambda row: Cell(row["compute_kernel"]),
        "ranks": lambda row: Cell(row["ranks"]),
        "memory": lambda row: _bytes(row["bytes"]),
        "lookups": lambda row: _share(row["load"]),
        "distinct ids": lambda row: _share(row["unique_ratio"]),
        "never trained": lambda row: _share(row["dead_share"]),
        "row norm, median": lambda row: _number(row["row_norm_p50"]),
        "row norm, max": lambda row: _number(row["row_norm_max"]),
        "max |w|": lambda row: _number(row["max_abs"]),
        "gradient norm": lambda row: _number(row["gradient_norm"]),
        "update norm": lambda row: _number(row["update_norm"]),
        "state norm": lambda row: _number(row["state_norm"]),
        "ids changed": lambda row: _share(row["changed_share"]),
        "cache hits": lambda row: _share(row["cache_hit_rate"]),
        "collisions": lambda row: _share(row["collision_rate"]),
        "rows with an id": lambda row: _share(row["occupancy"]),
        "ids admitted": lambda row: _number(row["admitted_ids"]),
        "ids evicted": lambda row: _number(row["evicted_ids"]),
        "at the fallback": lambda row: _share(row["fallback_share"]),
        "steps since seen": lambda row: _number(row["id_age"]),
    }
    return _sheet(columns, rows) if rows else None


def checks(history: History) -> Sheet | None:
    """One row for each check: how often it passed and failed, and its last figure."""
    seen: dict[str, list[dict]] = {}
    for line in history.checks:
        seen.setdefault(str(line.get("check")), []).append(line)
    columns: dict[str, Callable[[list[dict]], Cell]] = {
        "check": lambda lines: Cell(str(lines[0].get("check"))),
        "passed": lambda lines: _number(sum(line.get("passed") is True for line in lines)),
        "failed": lambda lines: _number(sum(line.get("passed") is False for line in lines)),
        "last at step": lambda lines: _number(lines[-1]["step"]),
        "figure": lambda lines: _number(number(lines[-1].get("figure"))),
        "limit": lambda lines: _number(number(lines[-1].get("limit"))),
        "last said": lambda lines: Cell(str(lines[-1].get("text") or "")),
    }
    return _sheet(columns, list(seen.values())) if seen else None


def events(history: History) -> Sheet | None:
    """What happened, without the saves that went well; the last MOST_EVENTS."""
    told = story(history)
    rows = [(mark.at_s, mark.kind, mark.step, mark.text) for mark in told.marks if mark.kind != "saved"]
    rows += [(g.begin_s, "started", None, _started(g.workers, g.resumed_after_s)) for g in told.groups]
    if not rows:
        return None
    columns: dict[str, Callable[[tuple], Cell]] = {
        "after": lambda row: Cell(duration(row[0]), row[0]),
        "event": lambda row: Cell(row[1]),
        "step": lambda row: _number(number(row[2])),
        "what": lambda row: Cell(row[3]),
    }
    return _sheet(columns, sorted(rows, key=lambda row: row[0])[-MOST_EVENTS:])


def saves(history: History) -> str:
    """One sentence about checkpoints."""
    good = [e for e in history.events if e.get("event") == "saved" and not e.get("error")]
    if not good:
        return "No checkpoint was recorded."
    waits = [w for e in good if not isnan(w := number(e.get("blocked_s")))]
    wait = f"; a save held training up for {1e3 * sum(waits) / len(waits):.0f} ms on average" if waits else ""
    return f"Saved {count(len(good), 'time')}, last at step {good[-1].get('step')}{wait}."


def _about(
    history: History, name: str, group: list[dict], latest: list[dict], looked: float
) -> dict[str, Any]:
    """All that a row of `tables` says."""
    held = [entry for line in group if (entry := entry_of(line, name)) is not None]
    plan, nan = history.planned(name), float("nan")
    on = plan.get("ranks") or [line["rank"] for line in group if name in tables_of(line)]
    figures = history.over_ranks(latest, name)
    return {
        "name": name,
        "size": history.table_size(name) or (nan, nan),
        "sharding_type": str(plan.get("sharding_type") or ""),
        "compute_kernel": str(plan.get("compute_kernel") or ""),
        "ranks": ranges(on) if isinstance(on, list) else str(on),
        "bytes": sum(map(table_bytes, held)) if held else nan,
        "load": sum(or_0(e.get("lookup_bytes")) for e in held) / looked if looked else nan,
        **figures,
    }


def _sheet(columns: dict[str, Callable[[Any], Cell]], things: list) -> Sheet:
    rows = [[make(thing) for make in columns.values()] for thing in things]
    said = [any(row[i].text not in ("", "–") for row in rows) for i in range(len(columns))]
    names = [name for name, wanted in zip(columns, said, strict=True) if wanted]
    return Sheet(names, [[c for c, wanted in zip(row, said, strict=True) if wanted] for row in rows])


def _number(value: float) -> Cell:
    return Cell(figure(value), value)


def _share(value: float) -> Cell:
    return Cell(percent(value), value)


def _bytes(value: float) -> Cell:
    return Cell(bytes_text(value), value)


def _a_step(line: dict, seconds: float) -> Cell:
    value = seconds / max(1.0, or_0(line.get("steps"))) * 1e3
    return Cell(f"{value:.1f}", value)


def _system(line: dict, key: str) -> float:
    system = line.get("system")
    return number(system.get(key)) if isinstance(system, dict) else float("nan")


def _started(workers: int, resumed_after_s: float | None) -> str:
    later = f", resumed after {duration(resumed_after_s)}" if resumed_after_s else ""
    return count(workers, "worker") + later
