"""13: what the run of the block `train` has recorded is whole: NVML's figures, phases, the report."""

from __future__ import annotations

import re
from pathlib import Path

from here import CannotRun, Here, lines


def run(here: Here) -> None:
    left = here.shared / "train.run"
    if not left.exists():
        raise CannotRun("the block train has left no run")
    folder = Path(left.read_text())
    ranks = lines(folder / "ranks.jsonl")
    assert ranks, "no rank has recorded anything"
    wanted = ["cpu_percent", "rss_bytes", *(["gpu_percent", "gpu_memory_bytes"] if here.real else [])]
    for name in wanted:
        values = [line["system"][name] for line in ranks[1:] or ranks]
        assert all(value is not None for value in values), f"{name} could not be read"
        here.found[name] = max(values)
    for line in ranks:
        below = {phase: s for phase, s in line["phases_s"].items() if s < 0}
        assert not below, f"phases below 0 up to step {line['step']}: {below}"
    page = (folder / "report.html").read_text()
    assert not re.search(r"\b(nan|NaN)\b", page), "the report shows NaN"
    pictures = page.count("<svg") + page.count("<img")
    here.found |= {"lines": len(ranks), "pictures": pictures}
    assert pictures, "the report has no pictures"
