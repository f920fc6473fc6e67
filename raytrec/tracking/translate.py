"""What MLflow has of a run: metrics of its messages, parameters, tags."""

from __future__ import annotations

import getpass
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from raytrec.common.formatting import flatten
from raytrec.common.machine import installed_versions
from raytrec.common.messages import Final, Measured, Message, Outcome, RankLine, Result
from raytrec.common.redaction import hide, hide_all
from raytrec.config.run_config import RunConfig
from raytrec.tracking.aggregate import ADDED, FIGURES, combine_shards, table_bytes
from raytrec.tracking.history import StepGroups

# MLflow 3.17 shows metrics whose names begin with system/ on its page "System metrics", under these names and
# in these units where its own monitor (mlflow/system_metrics) has them.
MLFLOW_NAMES = {
    "cpu_percent": ("cpu_utilization_percentage", 1),
    "rss_bytes": ("process_memory_usage_megabytes", 1e-6),
    "host_memory_percent": ("system_memory_usage_percentage", 1),
    "network_sent_bytes_per_s": ("network_transmit_megabytes_per_s", 1e-6),
    "network_received_bytes_per_s": ("network_receive_megabytes_per_s", 1e-6),
    "gpu_percent": ("gpu_utilization_percentage", 1),
    "gpu_memory_bytes": ("gpu_memory_usage_megabytes", 1e-6),
}


SECTIONS = {"train": "train/", "eval": "eval/", "compared": ""}  # kind → what its names begin with
NOT_IN_NAMES = re.compile(r"[^\w\-. :/]", re.ASCII)  # MLflow takes letters, digits and these in names
NAME_LENGTH = 250
# A store takes about 1,000 metrics in a call; the run folder has all.
MOST_TABLES = 200  # the largest tables have series
MOST_RANK_TABLES = 64  # up to so many ranks × tables, each table has series of each rank
TEXTS = 100  # parameters or tags that MLflow takes in one call
ACCELERATOR = "accelerator_type:"  # the resource by which Ray names a node's kind of GPU


class Record(NamedTuple):
    """Metrics of one step: MLflow's names → values, all at one time."""

    figures: dict[str, float]
    step: int
    unix_ms: int


class Translator:
    """Makes a Record of a message, or of the lines of all ranks at a step, once the last of them is there."""

    def __init__(self) -> None:
        self._groups = StepGroups()

    def record(self, message: Message, begin: int) -> Record | None:
        """The metrics of a message; None: it has none, or none yet.

        Args:
            begin: the first byte of the message's line in its file.
        """
        if not isinstance(message, RankLine):
            return _of(message)
        lines = self._groups.add(message, begin)
        return None if lines is None else _record(rank_metrics(lines), message.step, message.unix_s)

    def begin_of_waiting(self) -> int | None:
        """Where in ranks.jsonl the first of the lines begins that wait for other ranks' lines."""
        return self._groups.begin_of_waiting()


def _of(message: Message) -> Record | None:
    if isinstance(message, Outcome):
        place = f"watch/check/{message.check}"
        named = {place: int(message.passed), f"{place}_figure": message.figure}
    elif not isinstance(message, Measured) or isinstance(message, Final):  # its figures are in the result
        return None
    elif isinstance(message, Result):  # whose names begin with their section
        named = {name.replace(".", "/", 1): value for name, value in message.figures.items()}
    else:
        section = SECTIONS[message.KIND]
        named = {section + name: value for name, value in message.figures.items()}
    return _record(named, message.step, message.unix_s)


def _record(figures: Mapping[str, Any], step: int, unix_s: float) -> Record:
    """Without figures that are None or not finite; names as MLflow takes them."""
    known = {
        NOT_IN_NAMES.sub("_", name)[:NAME_LENGTH]: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and isfinite(value)
    }
    return Record(known, step, round(unix_s * 1000))


def rank_metrics(lines: list[RankLine]) -> dict[str, float | None]:
    """MLflow's figures of one step.

    Args:
        lines: of all recorded ranks.

    Returns:
        watch/rank/R/…: load, memory and milliseconds of each phase a step; watch/table/NAME/…: figures of a
        table over ranks (aggregate.combine_shards); watch/rank/R/table/NAME/…; system/rank_R/….
    """
    out: dict[str, float | None] = {}
    held: dict[str, float] = {}
    for line in lines:
        out |= _of_rank(line)
        for name, entry in line.tables.items():
            held[name] = held.get(name, 0.0) + table_bytes(entry)
    if len(lines) * len(held) <= MOST_RANK_TABLES:
        for line in lines:
            for name, figures in line.tables.items():
                place = f"watch/rank/{line.rank}/table/{name}"
                out |= {f"{place}/{key}": figures.get(key) for key in FIGURES}
    for name in sorted(held, key=lambda name: (-held[name], name))[:MOST_TABLES]:
        figures = combine_shards(lines, name)
        out |= {f"watch/table/{name}/{key}": figures[key] for key in FIGURES}
    return out


def _of_rank(line: RankLine) -> dict[str, float | None]:
    place, steps = f"watch/rank/{line.rank}", max(1, line.steps)
    out: dict[str, float | None] = {
        f"{place}/{phase}_ms": 1e3 * seconds / steps for phase, seconds in line.phases_s.items()
    }
    out[f"{place}/step_ms"] = 1e3 * line.seconds / steps
    out |= {f"{place}/{key}": line.added(key) for key in ADDED}
    return out | system_metrics(line.rank, line.system)


def system_metrics(rank: int, sample: Mapping[str, float | None]) -> dict[str, float]:
    """A sample of `System` as MLflow metrics: system/rank_R/NAME; without what is None.

    Example:
        >>> system_metrics(1, {"cpu_percent": 98.0, "gpu_percent": None})
        {'system/rank_1/cpu_utilization_percentage': 98.0}
    """
    return {
        f"system/rank_{rank}/{name}": sample[key] * factor
        for key, (name, factor) in MLFLOW_NAMES.items()
        if sample.get(key) is not None
    }


def run_tags() -> dict[str, str]:
    """Tags of a run that is started here and now; unknown ones are skipped.

    Nothing of the environment or of the command's arguments is in them, so no secrets.

    Returns:
        version.PACKAGE, version.python; mlflow.source.git.commit and mlflow.source.git.dirty (the working
        directory's, where it is a git checkout); mlflow.user, mlflow.source.name; where Ray runs:
        cluster.nodes, cluster.cpus, cluster.gpus, cluster.gpu_types (such as '8 x H200').
    """
    versions = {"python": platform.python_version(), **installed_versions("mlflow")}
    tags = {f"version.{name}": text for name, text in versions.items()}
    return tags | _commit() | _who() | _cluster()


def _commit() -> dict[str, str]:
    command = ["git", "--no-optional-locks", "status", "--porcelain=2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # no git here, no checkout, or a very slow disk
        return {}
    head, changes = "", False
    for line in lines.splitlines():
        if line.startswith("# branch.oid "):
            head = line.split()[-1]
        changes |= not line.startswith("#")
    if not head or head == "(initial)":
        return {}
    return {"mlflow.source.git.commit": head, "mlflow.source.git.dirty": str(changes).lower()}


def _who() -> dict[str, str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container whose user has no name
        user = f"uid {os.getuid()}"
    program = Path(sys.argv[0]).name
    if not program or program.startswith("-"):  # python -c
        program = "python"
    return {"mlflow.user": user, "mlflow.source.name": program, "mlflow.source.type": "LOCAL"}


def _cluster() -> dict[str, str]:
    """The nodes that are alive now. Does not import Ray: without it there is no cluster."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = Counter()
    for resources in nodes:
        kinds = [name.removeprefix(ACCELERATOR) for name in resources if name.startswith(ACCELERATOR)]
        gpus[kinds[0] if kinds else "GPU"] += int(resources.get("GPU", 0))
    tags = {
        "cluster.nodes": str(len(nodes)),
        "cluster.cpus": f"{sum(resources.get('CPU', 0) for resources in nodes):g}",
        "cluster.gpus": str(gpus.total()),
    }
    if gpus.total():
        tags["cluster.gpu_types"] = ", ".join(f"{n} x {kind}" for kind, n in sorted(gpus.items()) if n)
    return tags


def parameters(config: RunConfig) -> dict[str, str]:
    """Every knob as section.key → text, without secrets; patterns of tables, which MLflow does not take as
    names, stay together with what they hold."""
    values = hide_all(config.model_dump(by_alias=True))
    flat = flatten(values, whole=lambda inner: any(NOT_IN_NAMES.search(name) for name in inner))
    return {key: str(value) for key, value in flat.items()}


def in_parts(texts: Mapping[str, str], length: int) -> list[dict[str, str]]:
    """As many at a time as MLflow takes, and as long; without secrets in addresses."""
    items = [(key, hide(value)[:length]) for key, value in texts.items()]
    return [dict(items[i : i + TEXTS]) for i in range(0, len(items), TEXTS)]
