"""Check that subjects of recent commits are imperative sentences of at most 72 characters.

    python benchmarks/commits.py [COUNT]

Reads the last 20 (or COUNT) commits, except merges. Ruff's rule D401, applied to each subject as the
docstring of a function, decides whether the subject is imperative. `make lint` runs this script, which does nothing
outside a git checkout.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[1]
MAX_SUBJECT_LENGTH = 72
RULES = {"D401": "is not imperative, such as 'Fix …' or 'Add …'", "D403": "does not begin with a capital letter"}


def read_subjects(count: int, folder: Path = REPO) -> list[str]:
    """Return the subjects of the last `count` commits except merges, newest first; [] outside a checkout."""
    command = ["git", "-C", str(folder), "log", "--no-merges", "--format=%s", f"-{count}"]
    log = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return log.stdout.splitlines() if log.returncode == 0 else []


def find_faults(subjects: list[str]) -> list[str]:
    """Return a line for each fault in a subject, in the order of the subjects."""
    source = "".join(f"def commit_{n}():\n    {json.dumps(s + '.')}\n" for n, s in enumerate(subjects))
    command = [sys.executable, "-m", "ruff", "check", "--isolated", f"--select={','.join(RULES)}", "-"]
    ruff = subprocess.run([*command, "--output-format=json"], input=source, capture_output=True, text=True, timeout=60)
    faults = [(hit["location"]["row"] // 2 - 1, RULES[hit["code"]]) for hit in json.loads(ruff.stdout)]
    for number, subject in enumerate(subjects):
        if len(subject) > MAX_SUBJECT_LENGTH:
            faults.append((number, f"has {len(subject)} characters, the limit is {MAX_SUBJECT_LENGTH}"))
        if subject.endswith("."):
            faults.append((number, "ends with a period"))
    return [f"{subjects[number]!r} {fault}" for number, fault in sorted(faults)]


def main(arguments: list[str]) -> int:
    """Print the faults in recent subjects; return 1 if there are faults, else 0."""
    subjects = read_subjects(int(arguments[0]) if arguments else 20)
    faults = find_faults(subjects)
    print("\n".join(faults) or f"{len(subjects)} commit subjects are imperative and short")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
