"""Replacement for Ray's setup_worker.py that requests a worker forked from the warm process (warm_process.py).

This process asks the warm process to fork a worker, and exits when the worker ends.

    python forked_worker.py default_worker.py ... --serialized-runtime-env-context=JSON --language=PYTHON

Ray runs this file as a script, which imports as few modules as possible. The script runs Ray's own script if there is
no warm process, if the warm process has ended or refuses, and for workers with another interpreter or command.
"""

import json
import os
import socket
import struct
import sys

CONTEXT, LANGUAGE, PLACE = "--serialized-runtime-env-context=", "--language=", "RAYTREC_WARM"


def main() -> None:
    """Request a forked worker and wait for its end; if no worker can be forked, run Ray's setup_worker.py."""
    context = next((a[len(CONTEXT) :] for a in sys.argv if a.startswith(CONTEXT)), "") or "{}"
    settings = json.loads(context)
    plain = not settings.get("command_prefix") and not settings.get("override_worker_entrypoint")
    command = [a for a in sys.argv[1:] if not a.startswith((CONTEXT, LANGUAGE))]
    plain = plain and settings.get("py_executable") in (None, sys.executable) and command[0].endswith(".py")
    if not (plain and _run_forked(command, settings.get("env_vars") or {}, os.environ.get(PLACE, ""))):
        script = os.path.join(os.path.dirname(command[0]), "setup_worker.py")
        arguments = [a for a in sys.argv[1:] if not a.startswith(CONTEXT)]
        os.execv(sys.executable, [sys.executable, script, *arguments, CONTEXT + _quote_interpreter(settings)])


def _quote_interpreter(settings: dict) -> str:
    """Return a runtime environment as JSON; quote the path of its interpreter, which Ray 2.60 puts into a command."""
    from shlex import quote

    interpreter = settings.get("py_executable") or sys.executable
    is_file = os.path.isfile(interpreter)  # otherwise it is a command, such as `uv run`
    return json.dumps(settings | {"py_executable": quote(interpreter) if is_file else interpreter})


def _run_forked(command: list, overrides: dict, place: str) -> bool:
    """Request a forked worker, and return True when it has ended; return False if no worker was forked.

    Args:
        command: Command line of the worker without the interpreter.
        overrides: Environment variables that the worker's runtime environment sets.
        place: Path of the warm process's Unix socket; empty: no warm process.
    """
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    worker = {"command": command, "env": dict(os.environ), "set": overrides, "folder": os.getcwd()}
    message = json.dumps({**worker, "nice": nice}).encode()
    connection = socket.socket(socket.AF_UNIX)
    forked = False
    try:
        connection.connect(place)
        socket.send_fds(connection, [struct.pack("!I", len(message))], [0, 1, 2])
        connection.sendall(message)
        forked = connection.recv(1) == b"!"
        connection.recv(1)  # returns when the worker has ended
    except OSError:
        return forked
    return forked


if __name__ == "__main__":
    main()
