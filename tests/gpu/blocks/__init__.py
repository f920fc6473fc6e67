"""The blocks of `make gpu-check`, in order. Each module has run(here), which asserts, or raises CannotRun."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """A block: its module in this folder (with a dot: elsewhere), and the seconds that it may take."""

    name: str
    limit_s: int
    asserts: str


BLOCKS = (
    Block("environment", 60, "versions, driver and GPU go together"),
    Block("collectives", 90, "NCCL and gloo work, and listen on loopback alone"),
    Block("parts", 90, "checks, checkpoints and batches on the device"),
    Block("parity", 240, "the sharded model is the single process, for every kernel and optimizer"),
    Block("train", 240, "a whole run ends with the AUC that it has on CPU"),
    Block("resume", 300, "evaluated and resumed on the other device, or from half way: the same model"),
    Block("adam", 60, "evaluating in between changes no table"),
    Block("not_finite", 240, "no state with a NaN is saved, and no run ends well with one"),
    Block("syncs", 120, "raytrec's own code never makes the host wait in a step"),
    Block("phases", 60, "the phases of a step are its whole time"),
    Block("hang", 240, "a stuck kernel and a killed worker are found, named and survived"),
    Block("uvm", 90, "tables in host memory with a cache: what is saved is what is looked up"),
    Block("speed", 300, "steps take the time that the device needs"),
    Block("figures", 60, "the run's figures and its report are whole"),
)
