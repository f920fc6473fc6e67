"""Private files and processes of a local Ray cluster, and `raytrec head`, a single-node cluster on loopback.

Ray 2.60 keeps the files of its sessions in /tmp/ray forever, makes these folders world-writable, and records the
most recently started cluster there. Ray's processes belong to the driver's process group. A signal to this group, as
sent by `timeout`, batch systems and containers, would end these processes before the driver can save.
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
from errno import EADDRNOTAVAIL
from pathlib import Path
from time import monotonic, sleep, time
from typing import NoReturn

from raytrec.cluster.access import TOKEN_PATH_VARIABLE, token_file, use_token
from raytrec.common.errors import RunError, convert_os_errors
from raytrec.common.processes import lock_file
from raytrec.compat.ray_start import CURRENT_CLUSTER_FILE, INFREQUENT_REPORTS_ENV, LONGEST_SOCKET_PATH, replace_popen

FOLDER_PREFIX, OWNER = "raytrec-", "owner"
RAY_TMPDIR_VARIABLE = "RAY_TMPDIR"
FOLDER_ADVICE = f"set {RAY_TMPDIR_VARIABLE} to a folder on a local disk that you can write to"
MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103  # maximum length of a Unix socket address (sys/un.h)
MIN_ABANDONED_AGE_S = 3600.0  # a younger folder without an owner file may be in creation
# Maximum length of the text kept from the logs: bytes per file, and characters in total.
MAX_TAIL_BYTES, MAX_LOG_CHARACTERS = 8_000, 200_000
JOB_STOP_TIMEOUT_S = 60  # by default, `ray job stop` kills after 3 s, which is too short for a checkpoint
LINGER_S = 2.0  # time for Ray's processes to exit by themselves before they are killed


@contextmanager
def create_private_folder() -> Iterator[Path]:
    """Create a folder for a local Ray cluster that only this user can access; remove it after the block.

    Folders left by killed processes are removed first. Errors are those of `make_folder`.
    """
    folder, owner = make_folder()
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(owner)


def make_folder() -> tuple[Path, int]:
    """Create a private folder after a `sweep`; return (folder, file descriptor). `sweep` keeps it while this is open.

    Raises:
        RunError: The folder cannot be created, or the path in RAY_TMPDIR is too long.
    """
    base = find_base_folder()
    with convert_os_errors("cannot create a folder for Ray's files", where=str(base), do=FOLDER_ADVICE):
        sweep(base)
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))  # mode 0700
        owner = os.open(folder / f".{OWNER}", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    lock_file(owner)  # on a file system without locks, `sweep` does not remove the folder
    with suppress(OSError):
        (folder / f".{OWNER}").rename(folder / OWNER)
    return folder, owner


def find_base_folder() -> Path:
    """Return the folder in which private folders are created, and create it if necessary.

    The folder is RAY_TMPDIR, else TMPDIR if it is short enough for Unix sockets, else /tmp. If the variable names an
    enclosing cluster's private folder, the parent is used.

    Raises:
        RunError: The path in RAY_TMPDIR is too long, or the folder cannot be created.
    """
    for name in (RAY_TMPDIR_VARIABLE, "TMPDIR"):
        if value := os.environ.get(name):
            base = Path(value).absolute()
            base = base.parent if base.name.startswith(FOLDER_PREFIX) else base  # set by an enclosing Ray
            max_bytes = MAX_SOCKET_PATH_BYTES - len(f"/{FOLDER_PREFIX}12345678{LONGEST_SOCKET_PATH}")
            if len(os.fsencode(base)) <= max_bytes:
                with convert_os_errors("cannot create Ray's folder", where=f"{name}={value}", do=FOLDER_ADVICE):
                    base.mkdir(parents=True, exist_ok=True, mode=0o700)
                return base
            if name == RAY_TMPDIR_VARIABLE:
                raise RunError(
                    f"the path of Ray's folder is too long: {len(os.fsencode(base))} bytes",
                    where=f"{RAY_TMPDIR_VARIABLE}={value}",
                    expected=f"at most {max_bytes} bytes, because Ray creates Unix sockets in it",
                    do=f"set {RAY_TMPDIR_VARIABLE} to a shorter path, or to a symbolic link with a shorter path",
                )
    return Path("/tmp")


def sweep(base: Path) -> None:
    """Remove this user's private folders in `base` whose owner processes have exited; ignore errors."""
    for folder in base.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            _sweep_folder(folder)


def list_local_heads() -> list[str]:
    """Return HOST:PORT of each `raytrec head` of this user in `find_base_folder()` that accepts connections."""
    addresses = []
    for note in find_base_folder().glob(f"{FOLDER_PREFIX}*/{CURRENT_CLUSTER_FILE}"):
        with suppress(OSError, ValueError):
            if note.stat().st_uid == os.getuid():
                host, _, port = (address := note.read_text().strip()).rpartition(":")
                addresses += [address] if listens(host, int(port)) else []
    return addresses


def listens(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Return True if a host accepts a connection to a port within `timeout_s` seconds."""
    with suppress(OSError):
        socket.create_connection((host, port), timeout_s).close()
        return True
    return False


def _sweep_folder(folder: Path) -> None:
    about = folder.lstat()
    if about.st_uid != os.getuid() or folder.is_symlink() or not folder.is_dir():
        return
    try:
        owner = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        if time() - about.st_mtime > MIN_ABANDONED_AGE_S and (folder / f".{OWNER}").exists():
            _remove(folder)
        return
    try:
        if lock_file(owner):  # raises an OSError if the owner is running
            _remove(folder)
    finally:
        os.close(owner)


def _remove(folder: Path) -> None:
    """Remove a folder; retry, because Ray's last processes may still be writing files. Ignore errors."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        sleep(0.2)


@contextmanager
def isolate_sessions(folder: Path, environment: dict[str, str], on_raylet: Callable[[int], None]) -> Iterator[None]:
    """Make a Ray cluster that is started in the block use `folder` for its files, and separate process sessions.

    If this process ends, the kernel still kills Ray's processes (Ray sets PR_SET_PDEATHSIG). After the block, which
    must shut Ray down, the remaining processes are killed.

    Args:
        folder: Folder for Ray's files.
        environment: Additional environment variables of Ray's processes.
        on_raylet: Function called with the raylet's process id after its start.
    """
    started: list[int] = []

    def began(pid: int, is_raylet: bool) -> None:
        started.append(pid)
        if is_raylet:
            on_raylet(pid)

    environment = INFREQUENT_REPORTS_ENV | environment | {RAY_TMPDIR_VARIABLE: str(folder)}
    with replace_popen({"start_new_session": True}, environment, began):
        try:
            yield
        finally:
            end_sessions(started)


def read_stderr_tails(logs: Path) -> str:
    """Return the ends of nonempty *.err files (crashes, stack traces) in Ray's log folder as one text, newest last."""
    parts = []
    for file in sorted(logs.glob("*.err"), key=lambda file: file.stat().st_mtime):
        with suppress(OSError), open(file, "rb") as stream:
            stream.seek(max(0, file.stat().st_size - MAX_TAIL_BYTES))
            if text := stream.read().decode(errors="replace").strip():
                parts.append(f"\n{file.name}:\n{text}\n")
    return "".join(parts)[-MAX_LOG_CHARACTERS:]


def end_sessions(leaders: list[int], linger_s: float = LINGER_S) -> None:
    """Wait up to `linger_s` seconds for all processes of sessions to end, then kill the remaining processes.

    Without this function, a raylet's agents outlive the raylet for up to a minute. `leaders` are the session ids, i.e.
    the process ids of the session leaders. The kernel does not reuse an id while its session has processes.
    """
    for patience_s in (linger_s, 1.0):  # a process that survives SIGKILL for a second is left to the system
        deadline = monotonic() + patience_s
        while (remaining := _members(set(leaders))) and monotonic() < deadline:
            sleep(0.05)
        for pid in remaining:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _members(sessions: set[int]) -> list[int]:
    """Return the ids of all processes in these sessions, except zombies and the session of this process."""
    import psutil

    others, members = sessions - {os.getsid(0)}, []
    for pid in psutil.pids():
        with suppress(OSError, psutil.Error):
            if os.getsid(pid) in others and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
    return members


def start_head(root: Path, *, port: int, dashboard_port: int, client_port: int, cpus: int | None = None) -> NoReturn:
    """Print the addresses of a new cluster, and replace this process with `ray start --head --block`.

    Ctrl-C or SIGTERM ends the cluster.

    Args:
        root: RAYTREC_ROOT of the cluster, to which the paths of jobs are relative.
        port: Port of the GCS.
        dashboard_port: Port of the dashboard and the job API.
        client_port: Port of the Ray client server.
        cpus: Number of logical CPUs; default: all CPUs of the machine.

    Raises:
        RunError: A port cannot be used or is given twice, the token cannot be created or read, or as for `make_folder`.
    """
    check_ports({"--port": port, "--dashboard-port": dashboard_port, "--client-port": client_port})
    use_token(create=True)
    python, environment = _build_environment(root)
    print(f"job API      http://127.0.0.1:{dashboard_port}")
    print(f"Ray client   ray://127.0.0.1:{client_port}")
    print(f"token        {token_file()}", flush=True)
    arguments = [python, "-P", "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    arguments += ["--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"]
    arguments += [f"--port={port}", f"--dashboard-port={dashboard_port}"]
    with socket.create_server(("127.0.0.1", 0)) as probe:  # another Ray may use the default port
        arguments += [f"--dashboard-agent-listen-port={probe.getsockname()[1]}"]
    arguments += [f"--ray-client-server-port={client_port}", *([f"--num-cpus={cpus}"] if cpus else [])]
    # Workers use any free ports, as with a local Ray cluster; the default ports 10002 to 19999 may be taken.
    arguments += ["--min-worker-port=0", "--max-worker-port=0"]
    os.execve(python, arguments, os.environ | environment)


def check_ports(ports: dict[str, int], host: str = "127.0.0.1") -> None:
    """Check that a process can listen on these ports of an address of this machine, given as option → port.

    Ray itself reports unusable ports in a traceback, or after a minute.

    Raises:
        RunError: A port cannot be used, or is given twice.
    """
    options: dict[int, str] = {}
    for option, port in ports.items():
        if (other := options.setdefault(port, option)) != option:
            raise RunError(f"port {port} is used twice", where=f"{other}, {option}", expected="two different ports")
        if why := _explain_unusable_port(port, host):
            raise RunError(
                f"port {port} cannot be used: {why}",
                where=f"{option} {port}",
                expected="a free port from 1024 to 65535 on this machine",
                do=f"choose another port with {option}"
                + f", or stop the process that uses port {port}, e.g. `raytrec head`" * (1024 <= port < 65536),
            )


def _explain_unusable_port(port: int, host: str) -> str | None:
    if not 1024 <= port <= 65535:
        return "it is outside the range of ports that a user may listen on"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # recently closed ports count as free
        try:
            probe.bind((host, port))
        except OSError as error:
            is_elsewhere = isinstance(error, socket.gaierror) or error.errno == EADDRNOTAVAIL  # on another node
            return None if is_elsewhere else error.strerror
    return None


def _build_environment(root: Path) -> tuple[str, dict[str, str]]:
    """Return a path of this Python interpreter without spaces, and the environment variables for `ray start`."""
    from raytrec.cluster.session import get_loopback_environment

    # The `ray` program that replaces this process keeps the descriptor open. After it has ended, the next local
    # cluster of this user removes the folder.
    folder, owner = make_folder()
    os.set_inheritable(owner, True)
    python = Path(sys.executable)
    if " " in str(python):  # Ray (2.60.0) writes this path unquoted into shell commands
        (folder / "python").symlink_to(sys.prefix)
        python = folder / "python" / "bin" / python.name
    return str(python), get_loopback_environment() | {
        RAY_TMPDIR_VARIABLE: str(folder),
        TOKEN_PATH_VARIABLE: str(token_file().absolute()),
        "PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}",  # jobs use the `python` of this environment
        "RAYTREC_ROOT": str(root.expanduser().absolute()),
        "RAY_JOB_STOP_WAIT_TIME_S": str(JOB_STOP_TIMEOUT_S),
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # a single-node cluster has nowhere to drain to
    }
