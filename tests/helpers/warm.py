"""A process that has imported torch and TorchRec, and forks processes that begin with them.

Importing them takes 6 s of CPU time, more than most tests. A forked process has its own environment, working
directory and output. Forked processes serve as ranks without Ray (ranks.py) and as workers of a local Ray
(fork_ray_workers).

Ray workers import Ray only after the fork, because the import reads environment variables and seeds the
generator of object ids. Workers forked after the import would all create the same ids. Other processes never
connect to Ray. They are forked from a copy of the test process made after collection (`fork_from_copy`),
or from a forked process that has imported Ray.
"""

import atexit
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import traceback
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from time import sleep
from unittest.mock import patch

TORCH_MODULES = ("torchrec", "tensordict", "torch.distributed.checkpoint", "pandas", "pyarrow.dataset", "pydantic")
# Saves 1 s of CPU time per rank. Processes that need another raytrec are not forked from here.
RAY_MODULES = ("ray", "raytrec.worker.build", "raytrec.worker.observers", "raytrec.checks.parity.compare")
SOCKET_VARIABLE = "RAYTREC_TESTS_WARM"  # environment variable with the server address, read by warm_worker.py
_servers = {}


def fork_from_copy():
    """Copy this process with all imported modules; later calls of `fork` fork from the copy.

    Call this function before any torch computation, because threads (e.g. of autograd) are not copied.
    """
    if "with Ray" not in _servers:
        _servers["with Ray"] = _Copy()


def fork(target, *args):
    """Fork a process that runs target(connection, *args) and exits; return (pid, Connection)."""
    if "with Ray" not in _servers:
        _servers["with Ray"] = _Forked()
    return _fork(_servers["with Ray"].address, target, *args)


def _fork(address, target, *args):
    name = f"{target.__module__}:{target.__qualname__}"
    connection = _ask(address, {"target": name, "args": args, "path": sys.path})
    return connection.recv(), connection


def kill_and_wait(pids):
    """Kill forked processes and wait until they have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in pids:
        while os.path.exists(f"/proc/{pid}"):
            sleep(0.002)


@contextmanager
def fork_ray_workers():
    """Fork the workers of a local Ray started in this block, except workers with another interpreter."""
    script = str(Path(__file__).with_name("warm_worker.py"))
    with (
        patch.dict(os.environ, {SOCKET_VARIABLE: _server().address}),
        patch("ray._private.ray_constants.SETUP_WORKER_FILENAME", script),
    ):
        yield


def _ask(address, request):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    message = json.dumps(request).encode()
    connection.sendall(struct.pack("!I", len(message)) + message)
    return Connection(connection.detach())


def _receive(connection):
    head, fds, _, _ = socket.recv_fds(connection, 4, 3)
    size, message = struct.unpack("!I", head)[0], b""
    while len(message) < size:
        if not (part := connection.recv(size - len(message))):
            raise EOFError
        message += part
    return json.loads(message), fds


def _server():
    if "first" not in _servers:
        _servers["first"] = _Server()
    return _servers["first"]


class _Server:
    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self.address = f"{self._folder.name}/socket"
        context = get_context("spawn")
        self._alive, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self.address, TORCH_MODULES), daemon=True)
        self._process.start()
        theirs.close()
        self._alive.recv()

    def close(self):
        self._alive.close()
        self._process.join()
        self._folder.cleanup()


class _Forked:
    """Server process with Ray imported, forked from the process of _Server."""

    def __init__(self):
        self.address = f"{_server().address}-with-ray"
        _, self._alive = _fork(_server().address, _serve, self.address, RAY_MODULES)
        self._alive.recv()

    def close(self):
        self._alive.close()


class _Copy:
    """Server process that is a copy of this process."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._address, (self._alive, theirs) = f"{self._folder.name}/socket", Pipe()
        self._ready, self._pid = False, os.fork()
        if not self._pid:
            self._alive.close()
            gc.freeze()  # garbage collections keep the pages shared with the parent
            _begin(_serve, theirs, self._address, (*TORCH_MODULES, *RAY_MODULES))
        theirs.close()

    @property
    def address(self):
        if not self._ready:
            self._ready = self._alive.recv() is None
        return self._address

    def close(self):
        self._alive.close()
        os.waitpid(self._pid, 0)
        self._folder.cleanup()


def _serve(alive, address, modules):
    """Fork processes on request until the other end of `alive` is closed."""
    for module in modules:
        import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    selector, pids = selectors.DefaultSelector(), set()
    places = [listener, alive, ended]
    for place in places:
        selector.register(place, selectors.EVENT_READ)
    alive.send(None)
    while True:
        ready = [key.fileobj for key, _ in selector.select()]
        if alive in ready:
            return _end(pids)
        if ended in ready:
            ended.recv(4096)
            _reap(pids)
        if listener not in ready:
            continue
        connection = listener.accept()[0]
        with connection, suppress(EOFError, ConnectionError):
            request, fds = _receive(connection)
            if not (pid := os.fork()):
                _leave(selector, *places, wake)
                if "target" in request:
                    _begin(_call, connection, request)
                _begin(_become_ray_worker, connection, request, fds)
            pids.add(pid)
            for fd in fds:
                os.close(fd)


def _enter(env):
    os.environ.clear()
    os.environ.update(env)
    more = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*more, *(path for path in sys.path if path not in more)]


def _leave(*places):
    """Close the parent's sockets and reset its signal handlers in a child process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for place in places:
        place.close()


def _reap(pids):
    while pids:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pids.discard(pid)


def _end(pids):
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    for pid in pids:
        os.waitpid(pid, 0)


def _begin(function, *args):
    """Run a function in a forked process and exit without running the parent's exit handlers."""
    code = 1
    try:
        function(*args)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _call(connection, request):
    sys.path[:] = request["path"]
    channel = Connection(connection.detach())
    channel.send(os.getpid())
    module, _, name = request["target"].partition(":")
    getattr(import_module(module), name)(channel, *request["args"])


def _become_ray_worker(connection, request, fds):
    """Turn this process into the equivalent of `python default_worker.py ...`."""
    os.setsid()  # the raylet kills process groups, and local_ray.py separates sessions
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.nice(max(0, request["nice"] - os.getpriority(os.PRIO_PROCESS, 0)))
    os.chdir(request["folder"])
    _enter(request["env"])
    random.seed()
    Thread(target=_end_with, args=(connection,), daemon=True).start()
    sys.argv[:] = request["command"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _end_with(connection):
    """Exit when the process started by the raylet (warm_worker.py) has ended."""
    connection.recv(1)
    os._exit(1)


@atexit.register
def _close():
    while _servers:
        _servers.popitem()[1].close()  # in reverse order of creation
