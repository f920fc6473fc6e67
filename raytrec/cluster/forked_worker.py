"""In the place of Ray's setup_worker.py: asks the warm process for a worker, and is there as long as that is.

    python forked_worker.py default_worker.py ... --serialized-runtime-env-context=JSON --language=PYTHON

It is run as a file, and imports as little as it can. Where the warm process does not answer, or refuses,
and for workers with an interpreter of their own, it does what Ray's own does.
"""

import json
import os
import socket
import stat
import struct
import sys

CONTEXT, LANGUAGE, PLACE = "--serialized-runtime-env-context=", "--language=", "RAYTREC_WARM"


def main() -> None:
    context = next((a[len(CONTEXT) :] for a in sys.argv if a.startswith(CONTEXT)), "") or "{}"
    mine = json.loads(context)
    plain = not mine.get("command_prefix") and not mine.get("override_worker_entrypoint")
    command = [a for a in sys.argv[1:] if not a.startswith((CONTEXT, LANGUAGE))]
    plain = plain and mine.get("py_executable") in (None, sys.executable) and command[0].endswith(".py")
    if not (plain and _forked(command, mine.get("env_vars") or {}, os.environ.get(PLACE, ""))):
        script = os.path.join(os.path.dirname(command[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])


def forked_on_node(arguments: list) -> bool:
    """The same for a worker of a cluster that was joined, where a node's warm process answers.

    Args:
        arguments: of Python: default_worker.py and its own.
    """
    place = node_place(os.environ)
    return is_private(os.path.dirname(place)) and _forked(arguments, {}, place)


def node_place(env) -> str:
    """Where a node's warm process listens for the workers of a job, whose raylet has set these variables."""
    ids = "-".join(str(env.get(name)) for name in ("RAY_JOB_ID", "RAY_RAYLET_PID"))
    return f"{env.get('TMPDIR') or '/tmp'}/raytrec-node-{os.getuid()}-{ids}/warm"


def is_private(folder: str) -> bool:
    """Whether it is a folder that its owner, who is this user, alone can enter."""
    try:
        about = os.lstat(folder)
    except OSError:
        return False
    return about.st_uid == os.getuid() and about.st_mode == stat.S_IFDIR | 0o700


def _forked(command: list, set_for_it: dict, place: str) -> bool:
    """Waits for the worker's end; False at once where there is none.

    Args:
        set_for_it: variables that its runtime environment sets.
        place: where the warm process listens.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    worker = {"command": command, "env": dict(os.environ), "set": set_for_it, "folder": os.getcwd()}
    message = json.dumps({**worker, "nice": nice}).encode()
    connection = socket.socket(socket.AF_UNIX)
    forked = False
    try:
        connection.connect(place)
        socket.send_fds(connection, [struct.pack("!I", len(message))], [0, 1, 2])
        connection.sendall(message)
        forked = connection.recv(1) == b"!"
        connection.recv(1)  # nothing comes, until the worker has ended
    except OSError:
        return forked
    return forked


if __name__ == "__main__":
    main()
