"""10: a run recovers from a rank stuck in a kernel and from a killed rank, and names both causes."""

from __future__ import annotations

import json
from time import monotonic, sleep

from here import BlockContext, read_json_records

HANG_TIMEOUT_S, MAX_STEPS = 8, 24


def run(here: BlockContext) -> None:
    from raytrec.driver import run as driver

    before = _gpu_memory(here)
    values = here.settings(
        "disturbed",
        scaling__hang_timeout_s=HANG_TIMEOUT_S,
        checkpoint__every_steps=5,
        train__epochs=2,
        train__max_steps=MAX_STEPS,
        tracking__every_steps=None,
    )
    values["model"] = {"name": "disturbed:FaultyModel", "options": {"folder": str(here.folder), "at": 8}}
    with here.ray():
        result = driver.train(values)
    steps = result.metrics["train.steps"]
    assert steps == MAX_STEPS, f"trained {steps:,.0f} steps instead of {MAX_STEPS}"
    events = read_json_records(result.path / "events.jsonl")
    stuck, killed = (json.loads((here.folder / f"{what}.json").read_text()) for what in ("stuck", "killed"))
    hangs = [e for e in events if e["event"] == "hang"]
    assert len(hangs) == 1, f"{len(hangs)} hangs were reported instead of one"
    cause, found_s = hangs[0]["cause"], hangs[0]["unix_s"] - stuck["unix_s"]
    here.found |= {"found_after_s": round(found_s, 1), "printed": cause}
    assert "rank 0" in cause and "NCCL" not in cause, f"the cause is: {cause}"
    assert found_s < HANG_TIMEOUT_S + 10, (
        f"hang reported after {found_s:.0f} s; scaling.hang_timeout_s is {HANG_TIMEOUT_S}"
    )
    starts = [e["unix_s"] for e in events if e["event"] == "started"]
    assert len(starts) == 3, f"{len(starts)} starts instead of 3 (initial, after the hang, after the kill)"
    here.found["again_after_s"] = [round(starts[1] - hangs[0]["unix_s"], 1), round(starts[2] - killed["unix_s"], 1)]
    died = [e["cause"] for e in events if e["event"] == "failed"][-1]
    assert "died" in died and "NCCL" not in died, f"the cause reported for the killed worker is: {died}"
    for what in (stuck, killed):
        assert not _alive(what["pid"]), f"process {what['pid']} is still running"
    _check_memory(here, before)


def _alive(pid: int) -> bool:
    """Return True if a process is running; zombies do not count."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _gpu_memory(here: BlockContext) -> int:
    """Return the GPU memory in use by all processes, in bytes."""
    if not here.real:
        return 0
    import pynvml

    from blocks.environment import nvml_handle

    return pynvml.nvmlDeviceGetMemoryInfo(nvml_handle()).used


def _check_memory(here: BlockContext, before: int, wait_s: float = 15, slack: int = 256 << 20) -> None:
    """Wait until the driver has freed the GPU memory of ended processes."""
    deadline = monotonic() + wait_s
    while (now := _gpu_memory(here)) > before + slack and monotonic() < deadline:
        sleep(0.5)
    assert now <= before + slack, f"{(now - before) / 2**20:.0f} MiB of GPU memory are still allocated"
