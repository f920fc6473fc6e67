"""The program of the warm process (warm.py).

It imports what workers import, then forks them on request.

Not imported by anything: it is run as a file, with one end of a socket pair as its standard input. Two
messages come through it: where Python looks for modules, and which to import; then, when the raylet has been
started, variables of the environment that Ray's workers will have, the modules that import Ray, and the
socket to listen on. When a byte comes, or the other end is closed, this process and all that it has forked
end; without that byte the driver was killed, and the raylet's agents end, too.

Ray may be imported before the fork, under two conditions. It reads the ids of its job and its raylet once and
for ever, so these have to be known; other settings are read again in what is forked. And the generator of the
ids of tasks and objects must not have been seeded: workers would give out the same ids and mistake each
other's data. Importing Ray's libraries draws ids of actor classes from it; here they come from the system.
Before anything is served, two processes are forked that compare what they would draw.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    about, _ = _receive(control)
    own_path, sys.path[:] = list(sys.path), about["path"]
    with _no_gpu_asked_for():
        _import(about["modules"])
    ready = _forks_can_use_gpus()
    about, (listener,) = _receive(control)
    os.environ.update(about["env"])
    if ready:  # else workers, which begin by themselves then, are not to wait for it
        _import_ray(about["modules"])
        # Forked processes whose generators are alike would mistake each other's objects.
        ready = _forks_can_use_gpus() and _answer_of_fork(_draw) != _answer_of_fork(_draw)
    sys.path[:] = own_path
    gc.collect()
    gc.freeze()  # what is here stays: collections in those who are forked leave its pages shared
    _serve(control, socket.socket(fileno=listener), ready)


def _import(modules: list[str]) -> None:
    """One that is missing, or fails, is left to the worker, which reports it."""
    for module in modules:
        with suppress(Exception):
            import_module(module)


def _import_ray(modules: list[str]) -> None:
    from raytrec.compat.ray_start import actor_class_ids_from, keep_loopback, loopback_setting

    os.environ.update(loopback_setting())
    keep_loopback()
    with actor_class_ids_from(os.urandom), _no_gpu_asked_for():
        _import(modules)


def _no_gpu_asked_for() -> AbstractContextManager[None]:
    try:
        from raytrec.compat.torch_ import no_gpu_asked_for
    except ImportError:  # is left to the worker, which reports it
        return nullcontext()
    return no_gpu_asked_for()


def _forks_can_use_gpus() -> bool:
    """Whether CUDA has not begun here: its state does not survive a fork, and torch refuses such processes.
    GPUs of WSL 2 have no device file."""
    places = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    for place in places:
        with suppress(OSError):
            if os.readlink(place).startswith("/dev/nvidia"):
                return False
    return _answer_of_fork(_refuses_gpus) == b"no"


def _refuses_gpus() -> bytes:
    from raytrec.compat.torch_ import refuses_gpus

    return b"yes" if refuses_gpus() else b"no"


def _draw() -> bytes:
    from ray import ObjectRef

    return ObjectRef.from_random().binary()


def _answer_of_fork(ask: Callable[[], bytes]) -> bytes:
    """What a forked process answers; nothing where it fails."""
    reads, writes = os.pipe()
    if not (pid := os.fork()):
        with suppress(BaseException):
            os.write(writes, ask())
        os._exit(0)
    os.close(writes)
    with open(reads, "rb") as file:
        answer = file.read()
    os.waitpid(pid, 0)
    return answer


def _serve(control: socket.socket, listener: socket.socket, ready: bool) -> None:
    """Forks on request, until the other end of `control` is closed.

    Args:
        ready: else every request is refused, and the worker starts from the beginning.
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
            return _end(pids, driver_killed=not control.recv(1))
        if ended in places:
            ended.recv(4096)
            _reap(pids)
        if listener in places:
            with suppress(EOFError, OSError, ValueError):
                _answer(listener, ready, pids, [selector, control, listener, ended, wake])


def _answer(listener: socket.socket, ready: bool, pids: set[int], mine: list) -> None:
    connection = listener.accept()[0]
    with connection:
        request, fds = _receive(connection)
        if ready and _is_like_here(request["env"], request["set"]):
            if not (pid := os.fork()):
                _leave(mine)
                _begin(connection, request, fds)
            pids.add(pid)
            connection.sendall(b"!")
        for fd in fds:
            os.close(fd)


def _is_like_here(env: dict[str, str], set_for_it: dict[str, str]) -> bool:
    """Whether what is loaded here would be the same in a process that had begun with these variables.

    Args:
        env: what Ray starts its workers with.
        set_for_it: what the worker's runtime environment adds.
    """
    from raytrec.compat.ray_start import READ_AT_ONCE, READ_FOR_EVER, READ_LATER

    early = {
        name: value
        for name, value in set_for_it.items()
        if name.startswith(READ_AT_ONCE) and not name.startswith(READ_LATER)
    }
    early |= {name: env.get(name) for name in READ_FOR_EVER}
    return all(os.environ.get(name) == value for name, value in early.items())


def _receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """A message, and the file descriptors that came with it.

    Raises:
        EOFError: the other end is closed.
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


def _leave(mine: list) -> None:
    """What is forked gives up what belongs to this process."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for place in mine:
        place.close()


def _reap(pids: set[int]) -> None:
    while pids:
        pid, _ = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        pids.discard(pid)


def _end(pids: set[int], driver_killed: bool) -> None:
    """Ends all workers and, where the driver was killed, Ray's agents, which would stay for a minute.

    Not otherwise: a raylet ends with its agents.
    """
    agents = _agents(int(os.environ["RAY_RAYLET_PID"])) if driver_killed else []
    for pid in [*pids, *agents]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _agents(raylet: int) -> list[int]:
    """Processes of a raylet's session that have a title of Ray's."""
    found = []
    for name in os.listdir("/proc"):
        with suppress(OSError, ValueError), open(f"/proc/{int(name)}/cmdline", "rb") as file:
            if os.getsid(int(name)) == raylet and file.read().startswith(b"ray::"):
                found.append(int(name))
    return found


def _begin(connection: socket.socket, request: dict, fds: list[int]) -> None:
    """All that a forked process does; leaves nothing of this process's to be cleaned up by it."""
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
    """What `python default_worker.py ...` would be."""
    os.setsid()  # the raylet ends whole process groups
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.nice(max(0, request["nice"] - os.getpriority(os.PRIO_PROCESS, 0)))
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"] | request["set"])
    if "numpy.random" in sys.modules:  # Python's own generator is seeded again by itself
        sys.modules["numpy"].random.seed()
    sys.modules["raytrec.compat.ray_start"].read_token_again()
    Thread(target=_end_with, args=(connection,), daemon=True).start()
    sys.argv[:] = request["command"]
    sys.path.insert(0, os.path.dirname(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


def _end_with(connection: socket.socket) -> None:
    """The worker ends with the process that the raylet has started in its place (forked_worker.py)."""
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    with suppress(EOFError):  # the driver has ended before it used this process
        main()
