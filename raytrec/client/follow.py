"""A job followed from a terminal: its log, until it ends or Ctrl-C detaches."""

from __future__ import annotations

import sys

from raytrec.client.jobs import ENDED, Jobs
from raytrec.common.errors import RunError
from raytrec.driver.progress_log import for_people

LAST_LINES = 4  # of a job that was stopped: the signal, the save, where it has stopped, how to resume


def follow(jobs: Jobs, job: str) -> int:
    """Shows a job's log, from its beginning. Ctrl-C detaches; the job continues.

    Returns:
        The exit code of the job, 143 where it was stopped, 130 after Ctrl-C.
    """
    try:
        for piece in for_people(jobs.logs(job)):
            print(piece, end="", flush=True)
        code = jobs.exit_code(job)
    except KeyboardInterrupt:
        print(
            f"\ndetached; the job continues: raytrec follow {job} --address {jobs.address}",
            file=sys.stderr,
        )
        return 130
    status = jobs.status(job)
    print(f"job {job} {'succeeded' if code == 0 else status.lower()}", file=sys.stderr)
    if status == "FAILED" and "exit code" not in (why := jobs.message(job)):
        print(f"Ray says: {why}", file=sys.stderr)  # not of the program, which has said what it had to
    return code


def stop(jobs: Jobs, job: str) -> None:
    """Asks a job to save and to end, and shows what it still writes.

    Raises:
        RunError: it has ended already.
    """
    if (status := jobs.status(job)) in ENDED:
        raise RunError(f"the job has ended: {status}", where=job)
    jobs.stop(job)
    jobs.exit_code(job)
    last = "".join(for_people(jobs.logs(job))).splitlines()[-LAST_LINES:]
    print("\n".join(last))
    print(f"job {job} {jobs.status(job).lower()}", file=sys.stderr)
