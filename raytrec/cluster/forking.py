"""Program of the warm process (warm_process.py), which imports workers' modules and forks workers on request.

The driver runs this file as a script. Its standard input is one end of a socket pair, which delivers two messages.
The first contains Python's module search path and the modules to import. The second, sent after the raylet's
start, contains environment variables of Ray's workers, the modules that import Ray, and the listening socket.
When a byte or the end of the stream arrives, this process ends with every worker that it has forked. If the stream
ends without a byte, the driver was killed, and this process also kills the raylet's agents.

Ray may be imported before the fork under two conditions. First, Ray reads the ids of its job and raylet only
once, so both must be known; other settings are read again in forked processes. Second, the generator of task
and object ids must not be seeded yet. Otherwise, workers would draw identical ids and confuse each other's
data. Importing Ray's libraries usually draws ids of actor classes from this generator; this program takes them
from the operating system instead. Before serving requests, it forks two processes and checks that they draw
different ids.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib import import_module
from threading import Thread


def main() -> None:
    """Import the modules that the driver names, then serve fork requests until the driver ends.

    Raises:
        EOFError: The driver ended before it sent the second message.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    about, _ = _receive(control)
    own_path, sys.path[:] = list(sys.path), about["path"]
    with _hide_gpus():
        _import(about["modules"])
    ready = _forks_can_use_gpus()
    about, (listener,) = _receive(control)
    os.environ.update(about["env"])
    if ready:  # otherwise workers start without forking and must not wait for the import
        _import_ray(about["modules"])
        # Forked processes with equal generators would confuse each other's objects.
        ready = _forks_can_use_gpus() and _call_in_fork(_draw_object_id) != _call_in_fork(_draw_object_id)
    sys.path[:] = own_path
    gc.collect()
    gc.freeze()  # the pages of these objects then stay shared when forked processes collect garbage
    _serve(control, socket.socket(fileno=listener), ready)


def _import(modules: list[str]) -> None:
    """Import modules; ignore errors, because workers repeat failed imports and report the errors."""
    for module in modules:
        with suppress(Exception):
            import_module(module)


def _import_ray(modules: list[str]) -> None:
    from raytrec.compat.ray_start import draw_actor_class_ids_from, get_loopback_env, keep_loopback

    os.environ.update(get_loopback_env())
    keep_loopback()
    with draw_actor_class_ids_from(os.urandom), _hide_gpus():
        _import(modules)


def _hide_gpus() -> AbstractContextManager[None]:
    try:
        from raytrec.compat.torch_ import hide_gpus_during_import
    except ImportError:  # the worker reports the error
        return nullcontext()
    return hide_gpus_during_import()


def _forks_can_use_gpus() -> bool:
    """Return True if CUDA is not initialized in this process, so that forked processes can use GPUs.

    CUDA's state does not survive a fork, and torch refuses GPUs in processes forked after CUDA's initialization.
    An open device file shows that CUDA is initialized. As GPUs in WSL 2 have no device file, torch is asked as well.
    """
    places = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    for place in places:
        with suppress(OSError):
            if os.readlink(place).startswith("/dev/nvidia"):
                return False
    return _call_in_fork(_report_gpu_refusal) == b"no"


def _report_gpu_refusal() -> bytes:
    from raytrec.compat.torch_ import refuses_gpus

    return b"yes" if refuses_gpus() else b"no"


def _draw_object_id() -> bytes:
    from ray import ObjectRef

    return ObjectRef.from_random().binary()


def _call_in_fork(function: Callable[[], bytes]) -> bytes:
    """Return the result of a function that runs in a forked process; b"" if the function fails."""
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        with suppress(BaseException):
            os.write(writes, function())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


def _serve(control: socket.socket, listener: socket.socket, ready: bool) -> None:
    """Serve fork requests until a byte or the end of the stream arrives on `control`.

    Unless `ready` is True, every request is refused, and workers start without forking.
    """
    ended, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector, pids = selectors.DefaultSelector(), set()
    for place in (control, listener, ended):
        selector.register(place, selectors.EVENT_READ)
    while True:
        places = [key.fileobj for key, _ in selector.select()]
        if control in places:
            return _kill_workers_and_exit(pids, driver_killed=not control.recv(1))
        if ended in places:
            ended.recv(4096)
            _reap_workers(pids)
        if listener in places:
            with suppress(EOFError, OSError, ValueError):
                _answer_request(listener, ready, pids, [selector, control, listener, ended, wake])


def _answer_request(listener: socket.socket, ready: bool, pids: set[int], sockets: list) -> None:
    connection = listener.accept()[0]
    with connection:
        request, fds = _receive(connection)
        if ready and _can_fork_for(request["env"], request["set"]):
            if not (pid := os.fork()):
                _detach_child(sockets)
                _run_worker(connection, request, fds)
            pids.add(pid)
            connection.sendall(b"!")
        for fd in fds:
            os.close(fd)


def _can_fork_for(env: dict[str, str], overrides: dict[str, str]) -> bool:
    """Return True if a new process with these environment variables would import modules as this process did.

    Args:
        env: Environment with which Ray starts its workers.
        overrides: Variables added by the worker's runtime environment.
    """
    from raytrec.compat.ray_start import LATE_READ_PREFIXES, LOAD_TIME_PREFIXES, UNCHANGEABLE_VARIABLES

    early = {
        name: value
        for name, value in overrides.items()
        if name.startswith(LOAD_TIME_PREFIXES) and not name.startswith(LATE_READ_PREFIXES)
    }
    early |= {name: env.get(name) for name in UNCHANGEABLE_VARIABLES}
    return all(os.environ.get(name) == value for name, value in early.items())


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """Receive a message with up to three file descriptors, and return the parsed JSON and the descriptors.

    Raises:
        EOFError: The other end of the connection was closed before the end of the message.
    """
    head, fds, _, _ = socket.recv_fds(connection, 4, 3)
    if not head:
        raise EOFError
    size, message = struct.unpack("!I", head)[0], b""
    while len(message) < size:
        if not (part := connection.recv(size - len(message))):
            raise EOFError
        message += part
    return json.loads(message), fds


def _detach_child(sockets: list) -> None:
    """Close the sockets and reset the signal handlers of the warm process in a forked process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place in sockets:
        place.close()


def _reap_workers(pids: set[int]) -> None:
    while pids and (pid := os.waitpid(-1, os.WNOHANG)[0]):
        pids.discard(pid)


def _kill_workers_and_exit(pids: set[int], driver_killed: bool) -> None:
    """Kill all workers and exit; if the driver was killed, also kill Ray's agents.

    After a kill of the driver, the agents would run for another minute. Otherwise, the raylet ends its agents.
    """
    agents = _find_ray_agents(int(os.environ["RAY_RAYLET_PID"])) if driver_killed else []
    for pid in [*pids, *agents]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _find_ray_agents(raylet: int) -> list[int]:
    """Return the ids of the processes in a raylet's session whose titles begin with "ray::"."""
    pids = []
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/cmdline", "rb") as file:
            if os.getsid(int(name)) == raylet and file.read().startswith(b"ray::"):
                pids.append(int(name))
    return pids


def _run_worker(connection: socket.socket, request: dict, fds: list[int]) -> None:
    """Run a worker in this forked process, then exit without the cleanup of the warm process."""
    code = 1
    try:
        _become_worker(connection, request, fds)
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


def _become_worker(connection: socket.socket, request: dict, fds: list[int]) -> None:
    """Run the command line of a request, such as `default_worker.py ...`, in this process."""
    os.setsid()  # the raylet kills whole process groups
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.nice(max(0, request["nice"] - os.getpriority(os.PRIO_PROCESS, 0)))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"] | request["set"])
    if "numpy.random" in sys.modules:  # Python reseeds its own generator after a fork
        sys.modules["numpy"].random.seed()
    sys.modules["raytrec.compat.ray_start"].read_token_again()
    Thread(target=_exit_with_peer, args=(connection,), daemon=True).start()
    sys.argv[:] = request["command"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _exit_with_peer(connection: socket.socket) -> None:
    """Exit when the process that the raylet started in place of the worker (forked_worker.py) ends."""
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    with suppress(EOFError):  # the driver ended before it used this process
        main()
