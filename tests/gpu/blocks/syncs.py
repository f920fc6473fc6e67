"""8: raytrec's own code does not synchronize with the GPU between two logging steps."""

from __future__ import annotations

import json

from here import BlockCannotRun, BlockContext

FIRST_WATCHED_STEP, LAST_WATCHED_STEP = (30, 50)  # watched steps; raytrec does not log, record or check in between


def run(here: BlockContext) -> None:
    from raytrec.driver import run as driver

    if here.kind == "cpu":
        raise BlockCannotRun("there is no GPU to wait for")
    values = here.settings(
        "watched",
        train__epochs=3,
        train__max_steps=LAST_WATCHED_STEP + 5,
        train__log_every_steps=100,
        tracking__every_steps=100,
        checks__every_steps=500,
    )
    values["model"] = {
        "name": "disturbed:WaitRecordingModel",
        "options": {"folder": str(here.folder), "first": FIRST_WATCHED_STEP, "last": LAST_WATCHED_STEP},
    }
    with here.ray():
        driver.train(values)
    waits = json.loads((here.folder / "waits.json").read_text())
    ours = sorted({place for whose, place in waits if whose == "raytrec"})
    upstream = [place for whose, place in waits if whose == "upstream"]
    here.found |= {
        "upstream_waits_a_step": len(upstream) / (LAST_WATCHED_STEP - FIRST_WATCHED_STEP),
        "upstream": sorted(set(upstream)),
    }
    assert not ours, f"the host waits for the GPU at {', '.join(ours)}"
