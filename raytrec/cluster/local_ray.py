"""Private files and processes of a local Ray, and `raytrec head`: a cluster of one node on loopback.

Ray 2.60 keeps its sessions in /tmp/ray for ever, makes these folders writable by everybody, and puts there
which cluster was started last. Its processes belong to the process group of the driver, so a
signal to that group (`timeout`, batch systems, containers) ends them before the driver can save.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import NoReturn

from raytrec.cluster.access import PATH, token_file, use_token
from raytrec.common.errors import RunError, os_errors
from raytrec.common.processes import lock
from raytrec.compat.ray_start import CURRENT_CLUSTER, REPORTS_SELDOM, SOCKET, popen_replaced

PREFIX, OWNER = "raytrec-", "owner"
TMPDIR = "RAY_TMPDIR"
# How long the address of a Unix socket may be (sys/un.h).
LONGEST = 107 if sys.platform == "linux" else 103
ABANDONED_S = 3600.0  # a folder without owner is not one that is just being made
WORDS, MOST_WORDS = 8_000, 200_000  # bytes of a file, characters of all, that are kept of Ray's logs
STOP_WAIT_S = 60  # `ray job stop` kills after 3 s otherwise, which is short for a checkpoint
LINGER_S = 2.0  # that Ray's processes may take to end by themselves


@contextmanager
def private_folder() -> Iterator[Path]:
    """A folder for one Ray, which its user alone can enter; removed at the end of the block.

    It is in RAY_TMPDIR, TMPDIR or /tmp, as Ray's own would. What owners who were killed have left there is
    removed first.
    """
    folder, owner = make_folder()
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(owner)


def make_folder() -> tuple[Path, int]:
    """A private folder, and a file descriptor that holds it: the folder is swept once that is closed.

    Raises:
        RunError: there is no place for it.
    """
    base = base_folder()
    do = f"set {TMPDIR} to a folder on a local disk that you can write to"
    with os_errors("there is no place for Ray's files", where=str(base), do=do):
        sweep(base)
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))  # of mode 0700
        owner = os.open(folder / f".{OWNER}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    if lock(owner):  # without a lock, the folder is never swept
        with suppress(OSError):
            (folder / f".{OWNER}").rename(folder / OWNER)
    return folder, owner


def base_folder() -> Path:
    """Where private folders are: short enough for the sockets below, whose addresses have little room."""
    for name in (TMPDIR, "TMPDIR"):
        if given := os.environ.get(name):
            base = Path(given).absolute()
            base = base.parent if base.name.startswith(PREFIX) else base  # of a Ray around this process
            room = LONGEST - len(f"/{PREFIX}12345678{SOCKET}")
            if len(os.fsencode(base)) <= room:
                base.mkdir(parents=True, exist_ok=True, mode=0o700)
                return base
            if name == TMPDIR:
                raise RunError(
                    f"the path of Ray's folder is too long: {len(os.fsencode(base))} bytes",
                    where=f"{TMPDIR}={given}",
                    expected=f"at most {room} bytes, because Ray makes Unix sockets below it",
                    do="set it to a shorter path, or a link with one",
                )
    return Path("/tmp")


def sweep(base: Path) -> None:
    """Removes the folders of this user's Rays whose owners are gone, however they ended."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            _sweep_one(folder)


def heads() -> list[str]:
    """HOST:PORT of the clusters that this user has started with `raytrec head`, as far as they answer."""
    found = []
    for note in base_folder().glob(f"{PREFIX}*/{CURRENT_CLUSTER}"):
        with suppress(OSError, ValueError):
            if note.stat().st_uid == os.getuid():
                host, _, port = (address := note.read_text().strip()).rpartition(":")
                found += [address] if listens(host, int(port)) else []
    return found


def listens(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Return True if a connection to this port is accepted in time."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def _sweep_one(folder: Path) -> None:
    about = folder.lstat()
    if about.st_uid != os.getuid() or folder.is_symlink() or not folder.is_dir():
        return
    try:
        owner = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time() - about.st_mtime > ABANDONED_S and (folder / f".{OWNER}").exists():
            _remove(folder)
        return
    try:
        if lock(owner):
            _remove(folder)
    except BlockingIOError:  # its owner lives
        return
    finally:
        os.close(owner)


def _remove(folder: Path) -> None:
    """Removes a folder into which the last of Ray's processes may still be writing."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        sleep(0.2)


@contextmanager
def own_sessions(
    folder: Path, environment: dict[str, str], on_raylet: Callable[[int], None]
) -> Iterator[Callable[[], None]]:
    """Lets the Ray that the block starts have its files in a folder, and its processes in their own sessions.

    They still end with this process, which the kernel sees to (Ray's PR_SET_PDEATHSIG).

    Args:
        environment: variables that its processes have in addition.
        on_raylet: called with the raylet's process id when it has been started.

    Yields:
        A function that ends those that remain after ray.shutdown().
    """
    started: list[int] = []

    def began(pid: int, is_raylet: bool) -> None:
        started.append(pid)
        if is_raylet:
            on_raylet(pid)

    environment = REPORTS_SELDOM | environment | {TMPDIR: str(folder)}
    with popen_replaced({"start_new_session": True}, environment, began):
        yield lambda: end_sessions(started)


def last_words(logs: Path) -> str:
    """What processes of a Ray wrote to stderr last, file by file: crashes, and where threads stood."""
    told = []
    for file in sorted(logs.glob("*.err"), key=lambda file: file.stat().st_mtime):
        with suppress(OSError), open(file, "rb") as said:
            said.seek(max(0, file.stat().st_size - WORDS))
            if text := said.read().decode(errors="replace").strip():
                told.append(f"\n{file.name}:\n{text}\n")
    return "".join(told)[-MOST_WORDS:]


def end_sessions(leaders: list[int], linger_s: float = LINGER_S) -> None:
    """Ends all processes of some sessions: after `linger_s`, by force.

    The raylet's agents outlive it for up to a minute otherwise. No process can take the number of a session
    that has processes.

    Args:
        leaders: process ids of those who began the sessions.
    """
    for patience_s in (linger_s, 1.0):  # a process that cannot be ended within a second is left to the system
        deadline = monotonic() + patience_s
        while (left := _members(set(leaders))) and monotonic() < deadline:
            sleep(0.05)
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _members(sessions: set[int]) -> list[int]:
    """Living processes of these sessions, but for this process's own."""
    import psutil

    others, found = sessions - {os.getsid(0)}, []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) in others and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found


def start_head(
    root: Path, *, port: int, dashboard_port: int, client_port: int, cpus: int | None = None
) -> NoReturn:
    """Becomes `ray start --head --block`; Ctrl-C or SIGTERM ends it with all that it has started.

    Args:
        root: RAYTREC_ROOT of the cluster.
        port, dashboard_port, client_port: of the cluster itself, of its job API and of Ray client.
        cpus: logical CPUs; default: what the machine has.

    Raises:
        RunError: there is no `ray` next to this Python; a port is taken, or two are the same.
    """
    check_ports({"--port": port, "--dashboard-port": dashboard_port, "--client-port": client_port})
    program = Path(sys.executable).with_name("ray")
    if not program.exists():
        raise RunError("there is no `ray` command", where=str(program.parent), expected="ray[default]")
    use_token(create=True)
    environment = os.environ | _environment(root)
    print(f"job API      http://127.0.0.1:{dashboard_port}")
    print(f"Ray client   ray://127.0.0.1:{client_port}")
    print(f"token        {token_file()}", flush=True)
    arguments = ["start", "--head", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1"]
    arguments += ["--dashboard-host=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard_port}"]
    with socket.create_server(("127.0.0.1", 0)) as probe:  # another Ray here may have the default port
        arguments += [f"--dashboard-agent-listen-port={probe.getsockname()[1]}"]
    arguments += [f"--ray-client-server-port={client_port}", *([f"--num-cpus={cpus}"] if cpus else [])]
    # Any free ports, as a local Ray's workers take them: the default, 10002 to 19999, may be taken.
    arguments += ["--min-worker-port=0", "--max-worker-port=0"]
    os.execve(program, [str(program), *arguments], environment)


def check_ports(ports: dict[str, int]) -> None:
    """Looks, before anything starts, whether a cluster can listen on these ports.

    Args:
        ports: option → port.

    Raises:
        RunError: it cannot; Ray itself reports that in a traceback, or after a minute.
    """
    options: dict[int, str] = {}
    for option, port in ports.items():
        if (other := options.setdefault(port, option)) != option:
            raise RunError(
                f"port {port} is given twice", where=f"{other}, {option}", expected="a port for each"
            )
        if why := _why_not(port):
            raise RunError(
                f"port {port} cannot be used: {why}",
                where=f"{option} {port}",
                expected="a port from 1024 to 65535 on which nothing listens on this machine",
                do="end what listens there (another `raytrec head`?), or give another port",
            )


def _why_not(port: int) -> str | None:
    if not 1024 <= port <= 65535:
        return "it is not a port that a user may listen on"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just let go of is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror
    return None


def _environment(root: Path) -> dict[str, str]:
    from raytrec.cluster.session import loopback_environment

    # Held by the program that this process becomes; the next Ray here removes it.
    folder, owner = make_folder()
    os.set_inheritable(owner, True)
    environment = {TMPDIR: str(folder)} | loopback_environment() | {PATH: str(token_file().absolute())}
    # `python` in jobs is the one of this environment.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return environment | {
        "PATH": path,
        "RAYTREC_ROOT": str(root.expanduser().absolute()),
        "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # there is no other node that could take over
    }
