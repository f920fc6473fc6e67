"""Parameters and tags of an MLflow run."""

from __future__ import annotations

import getpass
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from raytrec.common.formatting import flatten
from raytrec.common.machine import installed_versions
from raytrec.common.redaction import hide, hide_all
from raytrec.config.run_config import RunConfig
from raytrec.tracking.translate import NOT_IN_NAMES

TEXTS = 100  # parameters or tags that MLflow takes in one call
ACCELERATOR = "accelerator_type:"  # the resource by which Ray names a node's kind of GPU


def run_tags() -> dict[str, str]:
    """Tags of a run that is started here and now; unknown ones are skipped.

    Nothing of the environment or of the command's arguments is in them, so no secrets.

    Returns:
        version.PACKAGE, version.python; mlflow.source.git.commit and mlflow.source.git.dirty (the working
        directory's, where it is a git checkout); mlflow.user, mlflow.source.name; where Ray runs:
        cluster.nodes, cluster.cpus, cluster.gpus, cluster.gpu_types (such as '8 x H200').
    """
    return {**_versions(), **_commit(), **_who(), **_cluster()}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), **installed_versions("mlflow")}
    return {f"version.{name}": text for name, text in versions.items()}


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
