"""The tables of a report, with values for sorting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raytrec.common.formatting import as_dict, bytes_text, count, duration, figure, number, percent, ranges
from raytrec.common.messages import Outcome, RankLine, Saved
from raytrec.metrics.results import slice_tables
from raytrec.report.run_timeline import story
from raytrec.tracking import aggregate
from raytrec.tracking.run_folder import RunFolder

MOST_EVENTS = 200


@dataclass(frozen=True)
class Cell:
    """A cell: its text, and the value that a column is sorted by (None: the text)."""

    text: str
    value: float | None = None


@dataclass(frozen=True)
class Sheet:
    """A table: names of columns, and rows of cells. Columns in which all rows are empty are dropped."""

    columns: list[str]
    rows: list[list[Cell]]


def bound_sentence(run: RunFolder) -> str:
    """The sentence about the run's bound; empty where its result has none."""
    sentence = run.result.get("bound.sentence")
    return sentence if isinstance(sentence, str) else ""


def bounds(run: RunFolder) -> Sheet:
    """One row for each part of the run's time (report.findings)."""
    found = as_dict(run.result.get("bound.parts"))
    rows = [(str(name), part) for name, part in found.items() if isinstance(part, dict)]
    columns: dict[str, Callable[[tuple[str, dict]], Cell]] = {
        "part": lambda row: Cell(row[0]),
        "seconds": lambda row: _number(number(row[1].get("seconds"))),
        "share of the time": lambda row: _share(number(row[1].get("share"))),
    }
    return _sheet(columns, rows)


def slices(run: RunFolder) -> list[tuple[str, Sheet]]:
    """A title and a table for each task and column of eval.slices: its largest and its worst slices."""
    return [
        (
            made.title,
            Sheet(
                made.columns,
                [[Cell(name), *(Cell(*each) for each in rest)] for (name, _), *rest in made.rows],
            ),
        )
        for made in slice_tables(run.result)
    ]


def ranks(run: RunFolder) -> Sheet | None:
    """One row for each rank of the last group of workers."""
    lines = aggregate.sum_over_time(aggregate.skip_warmup(run.ranks))
    if not lines:
        return None
    total = sum(line.added("lookup_bytes") for line in lines)
    columns: dict[str, Callable[[RankLine], Cell]] = {
        "rank": lambda line: Cell(str(line.rank), line.rank),
        "ms a step": lambda line: _a_step(line, line.seconds),
        "own time": lambda line: _a_step(line, aggregate.own_time(line)),
        "data wait": lambda line: _share(line.phase_s("data") / max(1e-12, line.seconds)),
        "lookups": lambda line: _share(line.added("lookup_bytes") / total if total else float("nan")),
        "tables": lambda line: Cell(str(len(line.tables)), len(line.tables)),
        "memory of tables": lambda line: _bytes(line.added("weight_bytes") + line.added("state_bytes")),
        "process": lambda line: _bytes(_system(line, "rss_bytes")),
        "CPU": lambda line: _share(_system(line, "cpu_percent") / 100),
        "host memory": lambda line: _share(_system(line, "host_memory_percent") / 100),
        "GPU": lambda line: _share(_system(line, "gpu_percent") / 100),
        "GPU memory": lambda line: _bytes(_system(line, "gpu_memory_bytes")),
        "sent/s": lambda line: _bytes(_system(line, "network_sent_bytes_per_s")),
        "received/s": lambda line: _bytes(_system(line, "network_received_bytes_per_s")),
    }
    return _sheet(columns, lines)


def table_sheet(run: RunFolder) -> Sheet | None:
    """One row for each table: its plan, and the figures of the last interval; load since the group began."""
    group = aggregate.sum_over_time(aggregate.last_group(run.ranks))
    latest = list(aggregate.by_step(run.ranks).values())[-1] if run.ranks else []
    names = list(dict.fromkeys([*aggregate.order_by_load(group), *run.plan]))
    looked = sum(line.added("lookup_bytes") for line in group)
    rows = [_about(run, name, group, latest, looked) for name in names]
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


def checks(run: RunFolder) -> Sheet | None:
    """One row for each check: how often it passed and failed, and its last figure."""
    seen: dict[str, list[Outcome]] = {}
    for line in run.checks:
        seen.setdefault(line.check, []).append(line)
    columns: dict[str, Callable[[list[Outcome]], Cell]] = {
        "check": lambda lines: Cell(lines[0].check),
        "passed": lambda lines: _number(sum(line.passed for line in lines)),
        "failed": lambda lines: _number(sum(not line.passed for line in lines)),
        "last at step": lambda lines: _number(lines[-1].step),
        "figure": lambda lines: _number(number(lines[-1].figure)),
        "limit": lambda lines: _number(number(lines[-1].limit)),
        "last text": lambda lines: Cell(lines[-1].text),
    }
    return _sheet(columns, list(seen.values())) if seen else None


def events(run: RunFolder) -> Sheet | None:
    """The last MOST_EVENTS events, without saves that went well."""
    told = story(run)
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


def saves(run: RunFolder) -> str:
    """One sentence about checkpoints."""
    good = [event for event in run.events if isinstance(event, Saved) and not event.error]
    if not good:
        return "No checkpoint was recorded."
    wait_ms = 1e3 * sum(event.blocked_s for event in good) / len(good)
    wait = f"a save held training up for {wait_ms:.0f} ms on average"
    return f"Saved {count(len(good), 'time')}, last at step {good[-1].step}; {wait}."


def _about(
    run: RunFolder, name: str, group: list[RankLine], latest: list[RankLine], looked: float
) -> dict[str, Any]:
    """The values of a row of `tables`."""
    held = [line.tables[name] for line in group if name in line.tables]
    plan, nan = run.planned(name), float("nan")
    on = plan.get("ranks") or [line.rank for line in group if name in line.tables]
    figures = run.over_ranks(latest, name)
    return {
        "name": name,
        "size": run.table_size(name) or (nan, nan),
        "sharding_type": str(plan.get("sharding_type") or ""),
        "compute_kernel": str(plan.get("compute_kernel") or ""),
        "ranks": ranges(on) if isinstance(on, list) else str(on),
        "bytes": sum(map(aggregate.table_bytes, held)) if held else nan,
        "load": sum(entry.get("lookup_bytes") or 0.0 for entry in held) / looked if looked else nan,
        **figures,
    }


def _sheet(columns: dict[str, Callable[[Any], Cell]], things: list) -> Sheet:
    rows = [[make(thing) for make in columns.values()] for thing in things]
    filled = [any(row[i].text not in ("", "–") for row in rows) for i in range(len(columns))]
    names = [name for name, wanted in zip(columns, filled, strict=True) if wanted]
    return Sheet(names, [[c for c, wanted in zip(row, filled, strict=True) if wanted] for row in rows])


def _number(value: float) -> Cell:
    return Cell(figure(value), value)


def _share(value: float) -> Cell:
    return Cell(percent(value), value)


def _bytes(value: float) -> Cell:
    return Cell(bytes_text(value), value)


def _a_step(line: RankLine, seconds: float) -> Cell:
    value = seconds / max(1, line.steps) * 1e3
    return Cell(f"{value:.1f}", value)


def _system(line: RankLine, key: str) -> float:
    return number(line.system.get(key))


def _started(workers: int, resumed_after_s: float | None) -> str:
    later = f", resumed after {duration(resumed_after_s)}" if resumed_after_s else ""
    return count(workers, "worker") + later
