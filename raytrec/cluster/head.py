"""`raytrec head`: a Ray cluster of one node on loopback."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from raytrec.cluster.access import PATH, token_file, use_token
from raytrec.common.errors import RunError

STOP_WAIT_S = 60  # `ray job stop` kills after 3 s otherwise, which is short for a checkpoint


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
    from raytrec.cluster.local_ray import TMPDIR, make_folder
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
