#!/usr/bin/env python3.11
"""Check the health of a container: exit code 0 or 1, and a message.

The script queries the server of the role that role.sh has recorded. It runs every few seconds, so it imports
only the standard library.
"""

import sys
import urllib.error
import urllib.request
from pathlib import Path

RAYLET = "http://127.0.0.1:52365/api/local_raylet_healthz"
QUESTIONS = {
    "head": ["http://127.0.0.1:8265/api/gcs_healthz", RAYLET],
    "worker": [RAYLET],
    "mlflow": ["http://127.0.0.1:5000/health"],
    "notebook": ["http://127.0.0.1:8888/login"],  # the only page that requires no token
}


def main() -> int:
    """Return 0 if the services of this container's role answer, else 1."""
    role = Path("/tmp/role")
    if not role.exists():  # a command, which exits by itself
        return 0
    for url in QUESTIONS[role.read_text(encoding="utf-8").strip()]:
        try:
            with urllib.request.urlopen(url, timeout=8):
                pass
        except (urllib.error.URLError, OSError) as error:
            print(f"{url}: {error}")
            return 1
    print("healthy")
    return 0


if __name__ == "__main__":
    sys.exit(main())
