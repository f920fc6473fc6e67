"""Convert messages, configuration and environment of a run to MLflow metrics, parameters and tags."""

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
from raytrec.common.machine import get_installed_versions
from raytrec.common.messages import Final, Measured, Message, Outcome, RankLine, Result
from raytrec.common.redaction import hide, hide_all
from raytrec.config.run_config import RunConfig
from raytrec.tracking.aggregate import FIGURES, RANK_SUM_KEYS, combine_shards, sum_table_bytes

# MLflow 3.17 shows metrics with the prefix system/ on its page "System metrics". Names and units are those of
# MLflow's monitor (mlflow/system_metrics) if it has the metric.
MLFLOW_NAMES = {
    "cpu_percent": ("cpu_utilization_percentage", 1),
    "rss_bytes": ("process_memory_usage_megabytes", 1e-6),
    "host_memory_percent": ("system_memory_usage_percentage", 1),
    "network_sent_bytes_per_s": ("network_transmit_megabytes_per_s", 1e-6),
    "network_received_bytes_per_s": ("network_receive_megabytes_per_s", 1e-6),
    "gpu_percent": ("gpu_utilization_percentage", 1),
    "gpu_memory_bytes": ("gpu_memory_usage_megabytes", 1e-6),
}


SECTIONS = {"train": "train/", "eval": "eval/", "compared": ""}  # kind of message → prefix of metric names
# Characters that MLflow does not allow in names.
INVALID_NAME_CHARACTERS = re.compile(r"[^\w\-. :/]", re.ASCII)
MAX_NAME_LENGTH = 250
# Limits on the metrics of one step, because a store accepts about 1,000 metrics per call. The run folder contains all
# metrics.
MAX_TABLES = 200  # maximum number of tables whose metrics are delivered, the largest first
MAX_RANK_TABLES = 64  # maximum of ranks × tables up to which table metrics of each rank are delivered
MAX_TEXTS_PER_CALL = 100  # maximum number of parameters or tags in one call to MLflow
ACCELERATOR_PREFIX = "accelerator_type:"  # prefix of the Ray resource that names a node's GPU type


class Record(NamedTuple):
    """Metrics (MLflow name → value) of one step, with their time in milliseconds since 1970."""

    figures: dict[str, float]
    step: int
    unix_ms: int


def to_record(message: Message | None) -> Record | None:
    """Return the metrics of a message other than a rank line; None if there are none."""
    if isinstance(message, Outcome):
        place = f"watch/check/{message.check}"
        named = {place: int(message.passed), f"{place}_figure": message.figure}
    elif not isinstance(message, Measured) or isinstance(message, Final):  # Final is part of the result
        return None
    elif isinstance(message, Result):  # result names begin with their section
        named = {name.replace(".", "/", 1): value for name, value in message.figures.items()}
    else:
        section = SECTIONS[message.KIND]
        named = {section + name: value for name, value in message.figures.items()}
    return make_record(named, message.step, message.unix_s)


def make_record(figures: Mapping[str, Any], step: int, unix_s: float) -> Record:
    """Return a record with valid MLflow names; values that are not finite numbers are omitted."""
    valid = {
        INVALID_NAME_CHARACTERS.sub("_", name)[:MAX_NAME_LENGTH]: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and isfinite(value)
    }
    return Record(valid, step, round(unix_s * 1000))


def to_rank_metrics(lines: list[RankLine]) -> dict[str, float | None]:
    """Return the MLflow metrics for the rank lines of one step.

    Args:
        lines: Lines of all recorded ranks.

    Returns:
        watch/rank/R/…: load, memory, and milliseconds per step for each phase; watch/table/NAME/…: statistics
        of a table over all ranks (aggregate.combine_shards), for the MAX_TABLES largest tables;
        watch/rank/R/table/NAME/…: statistics of a rank's shards, if ranks × tables is at most
        MAX_RANK_TABLES; system/rank_R/…: see `system_metrics`.
    """
    out: dict[str, float | None] = {}
    table_bytes: dict[str, float] = {}
    for line in lines:
        place, steps = f"watch/rank/{line.rank}", max(1, line.steps)
        out |= {f"{place}/{phase}_ms": 1e3 * seconds / steps for phase, seconds in line.phases_s.items()}
        out |= {f"{place}/step_ms": 1e3 * line.seconds / steps}
        out |= {f"{place}/{key}": line.added(key) for key in RANK_SUM_KEYS}
        out |= system_metrics(line.rank, line.system)
        for name, entry in line.tables.items():
            table_bytes[name] = table_bytes.get(name, 0.0) + sum_table_bytes(entry)
    if len(lines) * len(table_bytes) <= MAX_RANK_TABLES:
        for line in lines:
            for name, figures in line.tables.items():
                place = f"watch/rank/{line.rank}/table/{name}"
                out |= {f"{place}/{key}": figures.get(key) for key in FIGURES}
    for name in sorted(table_bytes, key=lambda name: (-table_bytes[name], name))[:MAX_TABLES]:
        figures = combine_shards(lines, name)
        out |= {f"watch/table/{name}/{key}": figures[key] for key in FIGURES}
    return out


def system_metrics(rank: int, sample: Mapping[str, float | None]) -> dict[str, float]:
    """Convert a sample of `SystemMonitor` to MLflow metrics system/rank_R/NAME; None values are omitted.

    Example:
        >>> system_metrics(1, {"cpu_percent": 98.0, "gpu_percent": None})
        {'system/rank_1/cpu_utilization_percentage': 98.0}
    """
    return {
        f"system/rank_{rank}/{name}": sample[key] * factor
        for key, (name, factor) in MLFLOW_NAMES.items()
        if sample.get(key) is not None
    }


def collect_run_tags() -> dict[str, str]:
    """Return the MLflow tags for a run started by this process; unknown values are omitted.

    The tags contain no command arguments, and of the environment variables only the name of the user.

    Returns:
        version.PACKAGE, version.python; mlflow.source.git.commit and mlflow.source.git.dirty of the working
        directory if it is a git checkout; mlflow.user, mlflow.source.name, mlflow.source.type; with Ray:
        cluster.nodes, cluster.cpus, cluster.gpus, cluster.gpu_types (such as '8 x H200').
    """
    versions = {"python": platform.python_version(), **get_installed_versions("mlflow")}
    tags = {f"version.{name}": text for name, text in versions.items()}
    return tags | _collect_git_tags() | _collect_user_tags() | _collect_cluster_tags()


def _collect_git_tags() -> dict[str, str]:
    command = ["git", "--no-optional-locks", "status", "--porcelain=2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or a very slow disk
        return {}
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if heads in ([], ["(initial)"]):
        return {}
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"mlflow.source.git.commit": heads[0], "mlflow.source.git.dirty": str(is_dirty).lower()}


def _collect_user_tags() -> dict[str, str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # the user id in a container may have no name
        user = f"uid {os.getuid()}"
    program = Path(sys.argv[0]).name
    if not program or program.startswith("-"):  # python -c
        program = "python"
    return {"mlflow.user": user, "mlflow.source.name": program, "mlflow.source.type": "LOCAL"}


def _collect_cluster_tags() -> dict[str, str]:
    """Return tags that describe the cluster's alive nodes; {} if this process does not use Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = Counter()
    for resources in nodes:
        kinds = [name.removeprefix(ACCELERATOR_PREFIX) for name in resources if name.startswith(ACCELERATOR_PREFIX)]
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
    """Return all settings as section.key → text, without secrets.

    MLflow does not allow table patterns in names, so a mapping with patterns becomes a single parameter.
    """
    values = hide_all(config.model_dump(by_alias=True))
    flat = flatten(values, whole=lambda inner: any(INVALID_NAME_CHARACTERS.search(name) for name in inner))
    return {key: str(value) for key, value in flat.items()}


def split_texts(texts: Mapping[str, str], length: int) -> list[dict[str, str]]:
    """Split texts into parts for one MLflow call each, hide secrets, and truncate each text to `length` characters."""
    items = [(key, hide(value)[:length]) for key, value in texts.items()]
    return [dict(items[i : i + MAX_TEXTS_PER_CALL]) for i in range(0, len(items), MAX_TEXTS_PER_CALL)]
