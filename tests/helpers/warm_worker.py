"""Replacement for Ray's setup_worker.py: requests a worker from warm.py and ends with that worker.

python warm_worker.py default_worker.py ... --serialized-runtime-env-context=JSON --language=PYTHON
"""

import json
import os
import socket
import struct
import sys

CONTEXT_OPTION, LANGUAGE_OPTION = "--serialized-runtime-env-context=", "--language="


def main():
    """Request a forked worker, or run setup_worker.py if the worker needs another interpreter."""
    context = next((a[len(CONTEXT_OPTION) :] for a in sys.argv if a.startswith(CONTEXT_OPTION)), "") or "{}"
    mine = json.loads(context)
    plain = not mine.get("command_prefix") and not mine.get("override_worker_entrypoint")
    command = [a for a in sys.argv[1:] if not a.startswith((CONTEXT_OPTION, LANGUAGE_OPTION))]
    if not (plain and mine.get("py_executable") in (None, sys.executable) and command[0].endswith(".py")):
        script = os.path.join(os.path.dirname(command[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])
    env = dict(os.environ) | mine.get("env_vars", {})
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    worker = {"command": command, "env": env, "folder": os.getcwd(), "nice": nice}
    request_worker(os.environ["RAYTREC_TESTS_WARM"], worker, [0, 1, 2])


def request_worker(place, request, fds):
    """Send a request and wait until the worker or the server ends."""
    message = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    socket.send_fds(connection, [struct.pack("!I", len(message))], fds)
    connection.sendall(message)
    connection.recv(1)


main()
