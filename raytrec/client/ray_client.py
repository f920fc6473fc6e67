"""Runs started over Ray client (ray://), which end with the client's connection.

The functions of queries.py run on the head node of the cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import RLock
from time import sleep
from typing import Any

from raytrec.client import queries
from raytrec.client.package import Source, code, find_user_modules, get_config_file_name
from raytrec.client.run import ENDED, Run
from raytrec.cluster.access import RAY, check_cluster, check_cluster_version, check_version_mismatch, use_token
from raytrec.cluster.session import pin_to_node
from raytrec.common.errors import RaytrecError, RunError, get_first_line, get_last_line, get_root_cause
from raytrec.compat.ray_core import CLIENT_NOT_STARTED_TEXT, CLIENT_REJECTED_TEXT, find_head_nodes
from raytrec.compat.versions import require_versions
from raytrec.config.run_config import load_config
from raytrec.driver.driver_state import LOG_FILE
from raytrec.tracking.progress_log import strip_messages
from raytrec.tracking.run_folder import decode

ANSWER_TIMEOUT_S = 120  # most calls take a second, but the cluster may have to start a process first


class RayClient:
    """Client of a Ray cluster at ray://HOST:PORT, which starts runs and reads their folders.

    Args:
        address: ray://HOST:PORT of the Ray client server; for a local cluster, `raytrec head` prints the address.

    Raises:
        RunError: The cluster cannot be reached, refuses the token, or runs another version of Ray or Python; the token
            is missing; or a package here has an unsupported version.
    """

    def __init__(self, address: str):
        self.address = address
        self._connections: dict[tuple[Path, ...], Connection] = {(): Connection(address, ())}

    def train(self, source: Source, overrides: list[str], include: tuple[Path, ...]) -> Run:
        """Start a run, or resume the same interrupted run, and return the run without waiting; see Cluster.train."""
        config = load_config(source, overrides)
        places = tuple(path.absolute() for path in (*find_user_modules(config), *include))
        if places not in self._connections:  # each connection has its own copy of the user's code
            self._connections[places] = Connection(self.address, places)
        connection = self._connections[places]
        driver = connection.actor(queries.Driver)
        folder = connection.ask(driver.begin, get_config_file_name(source), config.to_yaml())
        return ClientRun(connection, folder, driver)

    def run(self, run: str) -> Run:
        """Return an existing run, given its name in RAYTREC_ROOT/runs or its folder; see Cluster.run for errors."""
        return ClientRun(self._connections[()], run)

    def runs(self) -> list[dict[str, Any]]:
        """Return {name, folder, state, unix_s} of each run in RAYTREC_ROOT/runs (`queries.runs`)."""
        return self._connections[()].call(queries.runs)

    def close(self) -> None:
        """End all connections, and with them the runs that this client has started."""
        for connection in self._connections.values():
            connection.close()


class ClientRun(Run):
    """Run whose folder on the cluster is read over Ray client.

    Args:
        connection: Connection to the cluster.
        folder: Run folder, or the name of an existing run.
        driver: Actor (queries.Driver) that has prepared the run, and that this object asks to train it; None for an
            existing run.
    """

    def __init__(self, connection: Connection, folder: str, driver: Any = None):
        super().__init__()
        self._connection, self._folder, self._since = connection, folder, {}
        self._driver = driver  # Ray ends an actor when its last handle is deleted
        self._result = None if driver is None else connection.start(driver.train)
        if driver is None:
            self._poll()

    @property
    def folder(self) -> str:
        """Return the run folder on the cluster."""
        return self._folder

    def stop(self) -> None:
        """Wait until the run has started, and ask the run to save a checkpoint and end; see Run.stop for errors."""
        while self._poll() == "starting":
            sleep(self.poll_s)
        self._ask(queries.stop)

    def _read(self) -> None:
        ended = self._result is None or self._connection.is_done(self._result)
        failure: RaytrecError | None = None
        if ended and self._result is not None:
            try:
                self._connection.result(self._result)
            except RaytrecError as error:
                failure = error
        try:
            state = self._take_news()
        except RunError:
            if ended and not failure:
                raise
            state = "starting"
        if failure:
            self.error, state = failure, "failed"
        elif not ended and state != "running":  # state of an earlier run, or the run is closing down
            self.error, state = None, "running" if state == "finished" else "starting"
        self.state = state

    def _take_news(self) -> str:
        """Read data that the run has written since the last call, and return the run's state.

        If the run has ended, all remaining data is read. Otherwise, a call reads a limited number of bytes per file.
        """
        while True:
            news = self._ask(queries.news, self._since)
            self.log += strip_messages(news["lines"].pop(LOG_FILE))
            for file, text in news["lines"].items():
                for line in text.splitlines():
                    with suppress(ValueError):  # not a message of this file
                        if message := decode(file, line):
                            self.history.add(message)
            before, self._since, self._folder = self._since, news["since"], news["folder"]
            if self._since == before or news["state"] not in ENDED:  # all data is read, or later calls read more
                break
        self.history.result = news["result"]
        self.error = RunError(**news["error"]) if news["error"] else None
        return news["state"]

    def _command(self, name: str, places: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
        driver = self._connection.actor(queries.Driver)
        return self._connection.ask(driver.command, name, self._folder, places, options, timeout=None)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        return self._connection.call(question, self._folder, *arguments)


class Connection:
    """Ray client connection that does not affect other Ray connections of this process.

    All methods except `close` raise a RunError if the connection was lost.

    Args:
        address: ray://HOST:PORT of the cluster.
        places: Files and folders of the user that are uploaded to the cluster, in addition to raytrec's code.

    Raises:
        ConfigError: The files cannot be uploaded (`package.code`).
        RunError: As in RayClient.
    """

    def __init__(self, address: str, places: tuple[Path, ...]):
        self.address, self._remote = address, {}
        self._lock = RLock()  # a call makes the connection Ray's current context, so only one thread at a time can call
        use_token()
        require_versions()
        check_cluster(address, address)

        with code(places) as folder:
            self._context = _connect(address, folder)
        check_cluster_version(self._context.ray_version, where=address)
        with self._make_current():
            self._head, *_ = find_head_nodes()

    @contextmanager
    def _make_current(self) -> Iterator[Any]:
        """Make this connection Ray's current one, and yield the module ray.

        Raises:
            RunError: The connection was lost.
        """
        import ray

        try:
            with self._lock, self._context:
                yield ray
        except ConnectionError as error:
            raise RunError(
                f"lost the connection to the cluster: {get_first_line(error)}",
                where=self.address,
                do="reconnect with Cluster(ADDRESS), and start the runs of this connection again: they have "
                "ended, and resume from their last checkpoints",
            ) from None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function on the head node, and return its result; raise the errors of `result`."""
        with self._make_current() as ray:
            if function not in self._remote:
                self._remote[function] = ray.remote(function).options(**pin_to_node(self._head))
        return self.ask(self._remote[function], *arguments)

    def ask(self, remote: Any, *arguments: Any, timeout: float | None = ANSWER_TIMEOUT_S) -> Any:
        """Call a remote function or actor method, and return its result; raise the errors of `result`."""
        return self.result(self.start(remote, *arguments), timeout)

    def start(self, remote: Any, *arguments: Any) -> Any:
        """Call a remote function or actor method, and return the object reference of its result without waiting."""
        with self._make_current():
            return remote.remote(*arguments)

    def actor(self, kind: type) -> Any:
        """Start an actor of class `kind` on the head node, and return its handle."""
        with self._make_current() as ray:
            return ray.remote(kind).options(**pin_to_node(self._head)).remote()

    def is_done(self, reference: Any) -> bool:
        """Return True if the result of an object reference is available."""
        with self._make_current() as ray:
            return bool(ray.wait([reference], timeout=0)[0])

    def result(self, reference: Any, timeout: float | None = ANSWER_TIMEOUT_S) -> Any:
        """Return the result of an object reference.

        Args:
            reference: Object reference.
            timeout: Maximum time to wait, in seconds; None: no limit.

        Raises:
            RunError: The cluster did not respond in time, or Ray reports an error.
            Exception: The remote call raised this error.
        """
        from ray.exceptions import GetTimeoutError, RayError

        try:
            with self._make_current() as ray:
                return ray.get(reference, timeout=timeout)
        except GetTimeoutError:
            raise RunError(f"the cluster did not respond within {timeout} s", where=self.address) from None
        except RayError as error:
            cause = get_root_cause(error)
            if cause is error or isinstance(cause, RayError):
                cause = RunError(f"Ray reports: {get_first_line(cause)}", where=self.address)
            raise cause from None

    def close(self) -> None:
        """Disconnect from the cluster, which ends the runs started over this connection."""
        self._context.disconnect()


def _connect(address: str, folder: Path) -> Any:
    """Connect to a cluster, whose processes use a copy of `folder` as working directory; return the Ray client context.

    On a busy machine, the process that Ray 2.60 starts for a client may end during its start, without an
    error (`proxier.start_specific_server`). Therefore, up to three attempts to connect are made.
    """
    import ray

    for may_retry in (True, True, False):
        try:
            return ray.init(
                address,
                namespace="raytrec",
                allow_multiple=True,
                log_to_driver=False,
                logging_level=logging.ERROR,
                runtime_env={"working_dir": str(folder)},
            )
        except Exception as error:
            if not (may_retry and CLIENT_NOT_STARTED_TEXT in str(error)):
                raise _explain_connect_error(address, error) from None


def _explain_connect_error(address: str, error: Exception) -> RunError:
    """Return an error for users that states why Ray client could not connect.

    Raises:
        RunError: The cluster runs another version of Ray or Python.
    """
    text = str(error)
    check_version_mismatch(
        text,
        where=address,
        expected="the same Python version, X.Y, on both sides, because ray:// exchanges code",
        do="use that Python version here, or the job API, Cluster('http://HOST:8265'), with any version",
    )
    if CLIENT_REJECTED_TEXT in text:
        return RunError(
            f"the cluster rejected the connection: {get_last_line(text, '')}",
            where=address,
            expected=f"Ray {RAY} on the cluster, as here, and capacity for one more process on the head node",
            do="check ray_client_server*.err in the logs of the head node",
        )
    return RunError(
        f"cannot connect to the cluster: {get_first_line(error)}",
        where=address,
        expected="a Ray client address such as ray://127.0.0.1:10001, and the cluster's token",
        do="use the Ray client port, forwarded if needed (`ray attach -p 10001 cluster.yaml`, `kubectl port-forward`)",
    )
