"""Sentences about an interval: who is slow, what a GPU waits for, who is hot.

Each function takes the lines of ranks.jsonl of one step (all ranks), or such lines summed over steps, and
gives a sentence, or None where there is nothing to say.
"""

from __future__ import annotations

from math import isnan
from statistics import fmean, median
from typing import Any

from raytrec.common.formatting import number, or_0, percent
from raytrec.tracking.aggregate import PHASES, WAITING, lookup_bytes, own_time, phases_of

SURE_S = 60.0  # of an interval: in less, what starts beside a rank takes a small machine's processors
SLOWER = 0.15  # share of the interval by which a straggler's own time exceeds the median of the others'
IDLE_GPU_PERCENT = 50
DATA_WAIT = 0.30  # share of the time
HOT = 1.5  # times the mean of all ranks' lookup bytes

NAMES = {
    "data": "waiting for data",
    "copy": "copying batches to the device",
    "input_exchange": "exchanging ids",
    "tables": "lookups and updates of tables",
    "forward": "the dense model's forward pass",
    "backward": "the dense model's backward pass",
    "optimizer": "the optimizer",
    "collectives": "collectives, which includes waiting for other ranks",
    "other": "what is outside the step (evaluation, saving, reports)",
}
CURES = {
    "data": "raise data.readers",
    "copy": "raise data.global_batch_size",
    "input_exchange": "raise data.global_batch_size, or place tables that are looked up together on one rank "
    "(plan.colocate)",
    "tables": "spread tables over more ranks (plan.tables), or lower their dim",
    "forward": "raise data.global_batch_size, or lower train.micro_batches",
    "backward": "raise data.global_batch_size, or lower train.micro_batches",
    "optimizer": "raise data.global_batch_size, or set plan.tables kernels to fused",
    "collectives": "balance the tables (plan.tables), raise data.global_batch_size, or take fewer workers",
    "other": "evaluate, save or report less often (train.eval_every_steps, checkpoint.every_s, "
    "train.log_every_steps)",
}


def straggler(lines: list[dict[str, Any]]) -> str | None:
    """Names the rank whose own work takes longer than that of the others, and the phase that does it, of
    SURE_S seconds at least."""
    timed = [line for line in lines if number(line.get("seconds")) > 0]
    if len(timed) < 2:
        return None
    slow = max(timed, key=own_time)
    if slow["seconds"] < SURE_S:
        return None
    others = [line for line in timed if line is not slow]
    excess = own_time(slow) - median(own_time(line) for line in others)
    if excess <= SLOWER * slow["seconds"]:
        return None
    mine = phases_of(slow)
    more = {p: mine[p] - median(phases_of(o)[p] for o in others) for p in PHASES if p not in WAITING}
    phase = max(more, key=lambda p: more[p])
    steps = max(1.0, or_0(slow.get("steps")))
    own, over, added = (seconds / steps * 1e3 for seconds in (own_time(slow), excess, more[phase]))
    return (
        f"rank {slow['rank']} is slow: {own:.1f} ms of its own a step, {over:.1f} ms more than the "
        f"median of the others, most of it in {phase} (+{added:.1f} ms)"
    )


def low_utilisation(lines: list[dict[str, Any]]) -> str | None:
    """Says that GPUs, or all ranks, mostly wait; which phase is to blame, and what to change."""
    shares = _shares(lines)
    if shares is None:
        return None
    busy = [v for line in lines if not isnan(v := number(_gpu_percent(line)))]
    if busy and fmean(busy) < IDLE_GPU_PERCENT:
        phase = max(PHASES, key=lambda p: shares[p])
        return (
            f"GPUs are busy {percent(fmean(busy) / 100)} of the time; {percent(shares[phase])} of it goes "
            f"into {NAMES[phase]}: {CURES[phase]}"
        )
    if shares["data"] > DATA_WAIT:
        return f"ranks wait for data {percent(shares['data'])} of the time: {CURES['data']}"
    return None


def hot_rank(lines: list[dict[str, Any]]) -> str | None:
    """Names the rank that looks up far more bytes than the mean."""
    loads = {line["rank"]: lookup_bytes(line) for line in lines}
    total = sum(loads.values())
    if len(loads) < 2 or not total:
        return None
    rank = max(loads, key=lambda r: loads[r])
    times = loads[rank] / (total / len(loads))
    if times <= HOT:
        return None
    return (
        f"rank {rank} looked up {percent(loads[rank] / total)} of all bytes, {times:.1f} times the mean: "
        "spread its tables over more ranks (plan.tables)"
    )


def _shares(lines: list[dict[str, Any]]) -> dict[str, float] | None:
    """Phase → its share of the time of all ranks; None where no time was measured."""
    seconds = sum(s for line in lines if (s := number(line.get("seconds"))) > 0)
    if not seconds:
        return None
    return {phase: sum(phases_of(line)[phase] for line in lines) / seconds for phase in PHASES}


def _gpu_percent(line: dict[str, Any]) -> Any:
    system = line.get("system")
    return system.get("gpu_percent") if isinstance(system, dict) else None
