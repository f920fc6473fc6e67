"""13: the run of the block `train` has complete records: system metrics, phases and report."""

from __future__ import annotations

import re
from pathlib import Path

from here import BlockCannotRun, BlockContext, read_json_records


def run(here: BlockContext) -> None:
    left = here.shared / "train.run"
    if not left.exists():
        raise BlockCannotRun("there is no run of the block train")
    folder = Path(left.read_text())
    ranks = read_json_records(folder / "ranks.jsonl")
    assert ranks, "ranks.jsonl is empty"
    wanted = ["cpu_percent", "rss_bytes", *(["gpu_percent", "gpu_memory_bytes"] if here.real else [])]
    for name in wanted:
        values = [line["system"][name] for line in ranks[1:] or ranks]
        assert all(value is not None for value in values), f"{name} could not be read"
        here.found[name] = max(values)
    for line in ranks:
        below = {phase: s for phase, s in line["phases_s"].items() if s < 0}
        assert not below, f"negative phase durations in the interval up to step {line['step']}: {below}"
    page = (folder / "report.html").read_text()
    assert not re.search(r"\b(nan|NaN)\b", page), "the report shows NaN"
    pictures = page.count("<svg") + page.count("<img")
    here.found |= {"lines": len(ranks), "pictures": pictures}
    assert pictures, "the report has no pictures"
