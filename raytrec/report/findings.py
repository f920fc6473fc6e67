"""What somebody who reads a report should look at first, as sentences."""

from __future__ import annotations

from math import isnan, nan

from raytrec.common.formatting import duration, number, percent
from raytrec.metrics.results import EVAL
from raytrec.report.diagnostics import hot_rank, low_utilisation, straggler
from raytrec.report.history import History
from raytrec.report.run_timeline import story
from raytrec.tracking.aggregate import by_step, load_order, over_time, skip_warmup

DEAD = 0.9  # share of a table's rows: more, and its size is worth a thought
CHANGED = 0.01  # share of ids that were clamped or hashed
COLLIDED = 0.1
MISSED = 0.5  # of a cached table's lookups
OFF = 0.1  # of what should be 1
MOST_OF_A_KIND = 5
BAD = {"failed": "a failure", "hang": "a hang", "not saved": "a checkpoint was not saved"}


def findings(history: History) -> list[str]:
    """Sentences, the most urgent first; empty where all is well."""
    return [
        *_shortened(_checks(history), "failed checks"),
        *_shortened(_story(history), "events"),
        *_model(history),
        *_ranks(history),
        *_tables(history),
    ]


def _checks(history: History) -> list[str]:
    return [f"check {c.get('check')} failed at step {c['step']:,}: {c.get('text')}" for c in history.failures]


def _story(history: History) -> list[str]:
    told = story(history)
    bad = [mark for mark in told.marks if mark.bad]
    said = [
        f"{BAD[mark.kind]} after {duration(mark.at_s)}: {mark.text.splitlines()[0]}"
        for mark in bad
        if mark.text
    ]
    if history.events and not history.result:
        said.append("there is no result: the run is still on, or was interrupted (raytrec train --resume)")
    return said


def _model(history: History) -> list[str]:
    found = []
    for metric in history.metrics_of_tasks:
        measured = [line.get(metric.key) for line in history.figures("eval", "final")]
        written = [history.result.get(EVAL + metric.key), *measured]
        values = [value for value in map(number, written) if not isnan(value)]
        if metric.is_ratio and values and abs(values[-1] - 1) > OFF:
            found.append(f"predictions are off: {metric.title} is {percent(values[-1])}")
    return found


def _ranks(history: History) -> list[str]:
    lines = over_time(skip_warmup(history.ranks))
    return [said for advise in (straggler, low_utilisation, hot_rank) if (said := advise(lines))]


def _tables(history: History) -> list[str]:
    lines = list(by_step(history.ranks).values())[-1] if history.ranks else []
    last = {name: history.over_ranks(lines, name) for name in load_order(lines)}
    for name, figures in last.items():
        if history.table_spec(name).get("out_of_range") == "hash":  # as text is: collisions are what it costs
            figures["changed_share"] = nan
    found = []
    for key, limit, text in (
        ("dead_share", DEAD, "table {}: {} of rows never trained"),
        ("changed_share", CHANGED, "table {}: {} of ids were outside the table, and clamped"),
        ("collision_rate", COLLIDED, "table {}: {} of ids share a row with others (collisions)"),
    ):
        over = {n: t[key] for n, t in last.items() if t[key] > limit}
        ordered = sorted(over, key=lambda name: -over[name])
        found += _shortened([text.format(n, percent(over[n])) for n in ordered], "tables like that")
    hits = {n: t["cache_hit_rate"] for n, t in last.items() if not isnan(t["cache_hit_rate"])}
    text = "table {}: its cache has {} of the rows that are looked up"
    cold = [text.format(n, percent(h)) for n, h in hits.items() if h < MISSED]
    return found + _shortened(cold, "tables like that")


def _shortened(sentences: list[str], what: str) -> list[str]:
    more = len(sentences) - MOST_OF_A_KIND
    if more <= 1:
        return sentences
    return [*sentences[:MOST_OF_A_KIND], f"and {more:,} more {what}"]
