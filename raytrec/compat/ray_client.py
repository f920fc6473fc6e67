"""Private names of Ray client and of Ray's Job API (2.60.0), and texts of their errors."""

from __future__ import annotations

import logging
import re
from typing import Any

NOT_TAKEN = "Initialization failure from server"  # Ray client's error, with the server's traceback
NOT_STARTED = "Starting Ray client server failed"  # the traceback, when a process has died
NO_AGENT = "No available agent"  # the Job API's error while a cluster starts


def server_version(client: Any) -> str:
    """The version of Ray that a JobSubmissionClient has asked its cluster for."""
    from raytrec.compat.versions import private

    return private(client, "_server_ray_version", "ray")


def quiet_uploads() -> None:
    """Silences the line for each file that is uploaded with a job."""
    for talkative in (
        "ray.dashboard.modules.job.sdk",
        "ray.dashboard.modules.dashboard_sdk",
        "ray._private.runtime_env.packaging",
    ):
        logging.getLogger(talkative).setLevel(logging.WARNING)


def version_mismatch(text: str) -> tuple[str, str] | None:
    """Ray's and Python's version of a cluster that does not take this client's; None: it is another error."""
    found = re.findall(r"(Ray|Python): (\S+)", text) if "ersion mismatch" in text else []
    return (found[0][1], found[1][1]) if len(found) > 1 else None
