"""Findings, which a report of a run shows first, and the part of the run that takes the most time.

The functions find_straggler, find_low_utilization and find_hot_rank take one line of ranks.jsonl per rank: either all
lines of one step, or each rank's lines summed over steps. They return a sentence, which training also shows, or None.
The time of a run, from its start to its result, has five parts: dense model, tables, exchange, ingest and start
(docs/monitoring.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isnan, nan
from statistics import fmean, median
from typing import Any

from raytrec.common.formatting import as_dict, format_duration, format_percent, parse_number
from raytrec.common.messages import PHASES, Eval, Final, RankLine, Train
from raytrec.metrics.selection import EVAL_PREFIX, NE
from raytrec.report.run_timeline import build_timeline
from raytrec.tracking import aggregate
from raytrec.tracking.history import select_recorded_ranks
from raytrec.tracking.run_folder import RunFolder

MIN_INTERVAL_S = 60.0  # no straggler is reported in shorter intervals, in which starting processes can occupy CPUs
STRAGGLER_EXCESS_SHARE = 0.15  # a straggler's own time exceeds the others' median by this share of the interval
IDLE_GPU_PERCENT = 50  # mean utilization below which low GPU utilization is reported
MAX_DATA_WAIT_SHARE = 0.30  # share of the time above which waiting for data is reported
HOT_RANK_FACTOR = 1.5  # a hot rank exceeds the mean lookup bytes by this factor

LARGER_BATCH_HINT = "raise data.global_batch_size"
# Phase → noun phrase for use in a sentence, and remedy if the phase takes too long.
PHASE_TEXTS = {
    "data": ("waiting for data", "raise data.readers"),
    "copy": ("copying batches to the device", LARGER_BATCH_HINT),
    "input_exchange": (
        "exchanging ids",
        f"{LARGER_BATCH_HINT}, or place tables that are looked up together on one rank (plan.colocate)",
    ),
    "tables": ("lookups and updates of tables", "spread tables over more ranks (plan.tables), or reduce their dim"),
    "forward": ("the dense model's forward pass", f"{LARGER_BATCH_HINT}, or make the dense model smaller"),
    "backward": ("the dense model's backward pass", f"{LARGER_BATCH_HINT}, or make the dense model smaller"),
    "optimizer": ("the optimizer", f"{LARGER_BATCH_HINT}, or set compute_kernel to fused in plan.tables"),
    "collectives": (
        "collectives, including waits for other ranks",
        f"balance the tables (plan.tables), {LARGER_BATCH_HINT}, or use fewer workers",
    ),
    "other": (
        "work outside the step (evaluation, saving, reports)",
        "evaluate, save or report less often (train.eval_every_steps, checkpoint.every_s, train.log_every_steps)",
    ),
}
MAX_DEAD_SHARE, MIN_DEAD_BYTES = (0.9, 2**26)  # a table with a larger share and size of untrained rows is reported
MAX_CHANGED_SHARE = 0.01  # share of clamped ids above which a table is reported
MAX_COLLISION_RATE = 0.1  # share of colliding distinct ids above which a table is reported
MIN_CACHE_HIT_RATE = 0.5  # hit rate of a cached table below which the table is reported
MAX_RATIO_ERROR = 0.1  # distance from 1 above which a metric that should be 1 is reported
# A model overfits if evaluation NE ÷ mean training NE of the last windows exceeds this ratio.
OVERFIT_NE_RATIO, OVERFIT_WINDOWS = 1.2, 5
MAX_FINDINGS_PER_KIND = 5
BAD_EVENT_TEXTS = {"failed": "a failure", "hang": "a hang", "not saved": "a failed save"}


def findings(run: RunFolder) -> list[str]:
    """Return sentences about the problems of a run, the most urgent first; [] if no problem is found."""
    failed = [f"check {each.check} failed at step {each.step:,}: {each.text}" for each in run.failures]
    lines = aggregate.sum_over_time(aggregate.skip_warmup(run.ranks))
    return [
        *_model(run),
        *_shorten(failed, "failed checks"),
        *_shorten(_describe_events(run), "events"),
        *(text for find in (find_straggler, find_low_utilization, find_hot_rank) if (text := find(lines))),
        *_tables(run),
    ]


def _describe_events(run: RunFolder) -> list[str]:
    texts = [
        f"{BAD_EVENT_TEXTS[mark.kind]} after {format_duration(mark.at_s)}: {mark.text.splitlines()[0]}"
        for mark in build_timeline(run).marks
        if mark.bad and mark.text
    ]
    if run.events and not run.result:
        texts.append("there is no result: the run is running or did not finish (resume: raytrec train --resume RUN)")
    return texts


def _model(run: RunFolder) -> list[str]:
    texts = []
    for metric in run.recorded_metrics:
        value = _get_last_value(run, metric.key)
        if metric.is_ratio and abs(value - 1) > MAX_RATIO_ERROR:
            texts.append(f"predictions are miscalibrated: {metric.title} is {format_percent(value)}")
    return find_poor_fit(run) + texts


def _get_last_value(run: RunFolder, key: str) -> float:
    """Return a metric's last defined value in evaluations, or else in result.json; NaN if neither has a value."""
    measured = [value for line in run.figures(Eval, Final) if not isnan(value := line.figure(key))]
    return measured[-1] if measured else parse_number(run.result.get(EVAL_PREFIX + key))


def find_poor_fit(run: RunFolder) -> list[str]:
    """Return a sentence for each NE that is above 1, or above OVERFIT_NE_RATIO × the NE in training.

    NE is the normalized entropy: log loss ÷ the log loss of predicting the label's mean for every row (He et al.,
    "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014). The last evaluation is compared with the mean
    of the last OVERFIT_WINDOWS intervals of training, but not if train.early_stopping.restore_best is set.
    """
    texts = []
    stopping = as_dict(as_dict(run.config.get("train")).get("early_stopping"))
    restores = stopping.get("restore_best")  # if set, the weights are not from the last steps
    for metric in run.recorded_metrics:
        if metric.key.rpartition(".")[2] != NE:
            continue
        value = _get_last_value(run, metric.key)
        trained = [v for line in run.figures(Train) if not isnan(v := line.figure(metric.key))]
        if value > 1:
            text = f"{metric.label} is {metric.text(value)}: worse than predicting the label's mean"
            texts.append(f"{text} for every row, which has NE 1")
        elif trained and not restores and value > OVERFIT_NE_RATIO * (last := fmean(trained[-OVERFIT_WINDOWS:])):
            text = f"{metric.label} is {metric.text(value)} in evaluation and {metric.text(last)} in"
            texts.append(f"{text} training: the model overfits; see data.holdout and train.early_stopping")
    return texts


def _tables(run: RunFolder) -> list[str]:
    lines = list(aggregate.by_step(run.ranks).values())[-1] if run.ranks else []
    last = {name: run.combine_ranks(lines, name) for name in aggregate.order_by_load(lines)}
    for figures in last.values():
        if figures["dead_share"] * figures["weight_bytes"] < MIN_DEAD_BYTES:
            figures["dead_share"] = nan
    texts = []
    for key, limit, text in (
        ("dead_share", MAX_DEAD_SHARE, "table {}: {} of the rows were never trained"),
        ("changed_share", MAX_CHANGED_SHARE, "table {}: {} of the ids were out of range and were clamped"),
        ("collision_rate", MAX_COLLISION_RATE, "table {}: {} of the distinct ids collide with an earlier id"),
    ):
        over = {n: t[key] for n, t in last.items() if t[key] > limit}
        ordered = sorted(over, key=lambda name: -over[name])
        texts += _shorten([text.format(n, format_percent(over[n])) for n in ordered], "tables with this problem")
    hits = {n: t["cache_hit_rate"] for n, t in last.items() if not isnan(t["cache_hit_rate"])}
    text = "table {}: only {} of the lookups hit the cache"
    cold = [text.format(n, format_percent(h)) for n, h in hits.items() if h < MIN_CACHE_HIT_RATE]
    return texts + _shorten(cold, "tables with this problem")


def _shorten(sentences: list[str], noun: str) -> list[str]:
    more = len(sentences) - MAX_FINDINGS_PER_KIND
    if more <= 1:
        return sentences
    return [*sentences[:MAX_FINDINGS_PER_KIND], f"and {more:,} more {noun}"]


def find_straggler(lines: list[RankLine]) -> str | None:
    """Return a sentence about a rank whose own time far exceeds the other ranks' median, with the phase to blame.

    The excess must be more than STRAGGLER_EXCESS_SHARE of the interval. Own time excludes the phases in which ranks
    wait for each other (aggregate.WAIT_PHASES). The result is None if there is no such rank, or if the interval is
    shorter than MIN_INTERVAL_S. `lines` contains one line per rank.
    """
    timed = [line for line in lines if line.seconds > 0]
    if len(timed) < 2:
        return None
    slow = max(timed, key=aggregate.get_own_time_s)
    if slow.seconds < MIN_INTERVAL_S:
        return None
    others = [line for line in timed if line is not slow]
    excess = aggregate.get_own_time_s(slow) - median(aggregate.get_own_time_s(line) for line in others)
    if excess <= STRAGGLER_EXCESS_SHARE * slow.seconds:
        return None
    phase_excess = {
        phase: slow.phase_s(phase) - median(other.phase_s(phase) for other in others)
        for phase in PHASES
        if phase not in aggregate.WAIT_PHASES
    }
    phase = max(phase_excess, key=lambda p: phase_excess[p])
    own_ms, excess_ms, phase_ms = (
        seconds / max(1, slow.steps) * 1e3 for seconds in (aggregate.get_own_time_s(slow), excess, phase_excess[phase])
    )
    return (
        f"rank {slow.rank} is slow: {own_ms:.1f} ms per step without waiting for other ranks, {excess_ms:.1f} ms more "
        f"than the median of the other ranks, mostly in the phase {phase} (+{phase_ms:.1f} ms)"
    )


def find_low_utilization(lines: list[RankLine]) -> str | None:
    """Return a sentence with a remedy if GPUs are idle (IDLE_GPU_PERCENT) or ranks wait long for data, else None."""
    seconds = sum(line.seconds for line in lines)
    if seconds <= 0:
        return None
    shares = {phase: sum(line.phase_s(phase) for line in lines) / seconds for phase in PHASES}
    busy = [v for line in lines if (v := line.system.get("gpu_percent")) is not None]
    if busy and fmean(busy) < IDLE_GPU_PERCENT:
        phase = max(PHASES, key=lambda p: shares[p])
        return (
            f"GPUs are busy {format_percent(fmean(busy) / 100)} of the time; "
            f"ranks spend {format_percent(shares[phase])} of the time on {': '.join(PHASE_TEXTS[phase])}"
        )
    if shares["data"] > MAX_DATA_WAIT_SHARE:
        return f"ranks wait for data {format_percent(shares['data'])} of the time: {PHASE_TEXTS['data'][1]}"
    return None


def find_hot_rank(lines: list[RankLine]) -> str | None:
    """Return a sentence about the rank whose lookup bytes exceed HOT_RANK_FACTOR × the mean over ranks, or None."""
    loads = {line.rank: line.added("lookup_bytes") for line in lines}
    total = sum(loads.values())
    if len(loads) < 2 or not total:
        return None
    rank = max(loads, key=lambda r: loads[r])
    times = loads[rank] / (total / len(loads))
    if times <= HOT_RANK_FACTOR:
        return None
    return (
        f"rank {rank} looked up {format_percent(loads[rank] / total)} of all bytes, {times:.1f} "
        "times the mean: spread its tables over more ranks (plan.tables)"
    )


INGEST, START = "ingest", "start"
PART_PHASES = {
    "dense model": ("forward", "backward", "optimizer"),
    "tables": ("tables",),
    "exchange": ("input_exchange", "collectives"),
    INGEST: ("data", "copy"),
}


@dataclass
class Times:
    """Time spent in the steps of a run, averaged over the recorded ranks.

    The first step of each group of workers is excluded, because it includes setup.

    Attributes:
        seconds: Phase → seconds.
        steps: Number of timed steps; a step that was trained twice counts twice.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    steps: float = 0.0

    def add(self, line: RankLine) -> None:
        """Add the times of a line of ranks.jsonl."""
        ranks = max(1, len(select_recorded_ranks(line.world)))
        for phase, seconds in line.phases_s.items():
            own = max(0.0, seconds - line.first_s.get(phase, 0.0))
            self.seconds[phase] = self.seconds.get(phase, 0.0) + own / ranks
        self.steps += (line.steps - bool(line.first_s)) / ranks


def find_bound(times: Times, wall_s: float, rows_per_s: float | None) -> dict[str, Any]:
    """Return the entries of result.json about the part of the run that takes the most time; {} if no step was timed.

    Args:
        times: Time spent in each phase of the steps.
        wall_s: Seconds from the start of the run to its result.
        rows_per_s: Training throughput in rows per second; None: unknown.

    Returns:
        bound.by: name of the part; bound.share: its share of the run; bound.sentence: text for users; and bound.parts:
        name of each part → {"seconds", "share"}.
    """
    if not times.steps:
        return {}
    seconds = {part: sum(times.seconds.get(phase, 0.0) for phase in phases) for part, phases in PART_PHASES.items()}
    in_steps = sum(seconds.values())
    seconds[START] = max(0.0, wall_s - in_steps)
    whole = max(wall_s, in_steps, 1e-9)
    by = max(seconds, key=lambda part: seconds[part])
    return {
        "bound.by": by,
        "bound.share": seconds[by] / whole,
        "bound.sentence": _describe_bound(seconds, by, whole, rows_per_s),
        "bound.parts": {part: {"seconds": s, "share": s / whole} for part, s in seconds.items()},
    }


def _describe_bound(seconds: Mapping[str, float], by: str, whole: float, rows_per_s: float | None) -> str:
    """Return a sentence about the part `by` of the run; for `start`, also about the longest part of the steps."""
    if by != START:
        return f"bound by {_words(seconds, by, whole, rows_per_s, 'the time')}"
    text = f"bound by start: {format_percent(seconds[START] / whole)} of the time, {format_duration(seconds[START])}, "
    text += "went into start-up, restarts, checkpoints and evaluation"
    steps = {part: s for part, s in seconds.items() if part != START}
    if not (whole := sum(steps.values())):
        return text
    by = max(steps, key=lambda part: steps[part])
    return f"{text}; steps are bound by {_words(steps, by, whole, rows_per_s, 'their time')}"


def _words(seconds: Mapping[str, float], part: str, whole: float, rows_per_s: float | None, of: str) -> str:
    text = f"{part}: {format_percent(seconds[part] / whole)} of {of}"
    if part != INGEST:
        return text
    return f"{text}, waiting for batches" + (f", at {rows_per_s:,.0f} rows/s" if rows_per_s else "")
