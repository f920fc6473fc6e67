"""What a run was made with: versions, commit, cluster."""

from __future__ import annotations

from pathlib import Path

from raytrec.checkpoint.files import FOLDER, newest
from raytrec.common.reading import NotReadable, json_values, read_bytes

TAGS = "tags.json"  # {tag: text}: the tags of the MLflow run, where the driver has left them


def versions(folder: Path) -> dict[str, str]:
    """Package → version, and further tags: of tags.json, else of the newest checkpoint in the run folder."""
    return _tags(folder) or _of_checkpoint(folder)


def _tags(folder: Path) -> dict[str, str]:
    try:
        tags = json_values(read_bytes(folder / TAGS))
    except (OSError, NotReadable):
        return {}
    return _texts(tags, prefix="version.")


def _of_checkpoint(folder: Path) -> dict[str, str]:
    """Only of one that lies beside the report: a report asks no object store."""
    if not (folder / FOLDER).is_dir():
        return {}
    _, index, _ = newest(str(folder / FOLDER))
    about = index.get("about")
    return _texts(about.get("versions")) if isinstance(about, dict) else {}


def _texts(values: object, prefix: str = "") -> dict[str, str]:
    if not isinstance(values, dict):
        return {}
    return {str(key).removeprefix(prefix): str(value) for key, value in values.items()}
