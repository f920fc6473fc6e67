"""10: a rank stuck in a kernel, and then one that is killed: found, named, ended, and the run trains on."""

from __future__ import annotations

import json
from time import monotonic, sleep

from here import Here, lines

HANG_S, STEPS = 8, 24


def run(here: Here) -> None:
    from raytrec.driver import run as driver

    before = _gpu_memory(here)
    values = here.settings(
        "disturbed",
        scaling__hang_timeout_s=HANG_S,
        checkpoint__every_steps=5,
        train__epochs=2,
        train__max_steps=STEPS,
        tracking__every_steps=None,
    )
    values["model"] = {"name": "disturbed:Disturbed", "options": {"folder": str(here.folder), "at": 8}}
    with here.ray():
        result = driver.train(values)
    steps = result.metrics["train.steps"]
    assert steps == STEPS, f"{steps:,.0f} steps were trained, not {STEPS}"
    events = lines(result.path / "events.jsonl")
    stuck, killed = (json.loads((here.folder / f"{what}.json").read_text()) for what in ("stuck", "killed"))
    hangs = [e for e in events if e["event"] == "hang"]
    assert len(hangs) == 1, f"{len(hangs)} hangs were found where there was one"
    cause, found_s = hangs[0]["cause"], hangs[0]["unix_s"] - stuck["unix_s"]
    here.found |= {"found_after_s": round(found_s, 1), "printed": cause}
    assert "rank 0" in cause and "NCCL" not in cause, f"the cause is: {cause}"
    assert found_s < HANG_S + 10, f"found after {found_s:.0f} s, where scaling.hang_timeout_s is {HANG_S}"
    starts = [e["unix_s"] for e in events if e["event"] == "started"]
    assert len(starts) == 3, f"{len(starts)} starts; the first, one after the hang, one after the kill"
    here.found["again_after_s"] = [
        round(starts[1] - hangs[0]["unix_s"], 1),
        round(starts[2] - killed["unix_s"], 1),
    ]
    died = [e["cause"] for e in events if e["event"] == "failed"][-1]
    assert "died" in died and "NCCL" not in died, f"of the killed worker it reports: {died}"
    for what in (stuck, killed):
        assert not _alive(what["pid"]), f"process {what['pid']} is still there"
    _check_memory(here, before)


def _alive(pid: int) -> bool:
    """Whether it still runs; one that has ended and was not waited for does not."""
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _gpu_memory(here: Here) -> int:
    """Bytes of the GPU in use by all processes."""
    if not here.real:
        return 0
    import pynvml

    from blocks.environment import handle

    return pynvml.nvmlDeviceGetMemoryInfo(handle()).used


def _check_memory(here: Here, before: int, wait_s: float = 15, slack: int = 256 << 20) -> None:
    """The driver frees what ended processes had; that takes a moment."""
    deadline = monotonic() + wait_s
    while (now := _gpu_memory(here)) > before + slack and monotonic() < deadline:
        sleep(0.5)
    assert now <= before + slack, f"{(now - before) / 2**20:.0f} MiB of the GPU are still taken"
