"""The versions that a run was made with."""

from __future__ import annotations

from pathlib import Path

from raytrec.checkpoint.files import FOLDER, newest


def versions(folder: Path) -> dict[str, str]:
    """Package → version, as the newest checkpoint in the run folder has them.

    Only one that is beside the report is asked: a report reads from no object store.
    """
    if not (folder / FOLDER).is_dir():
        return {}
    _, index, _ = newest(str(folder / FOLDER))
    about = index.get("about")
    found = about.get("versions") if isinstance(about, dict) else None
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
