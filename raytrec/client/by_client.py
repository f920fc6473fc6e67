"""Ray client (ray://): the cluster as if it were here. What is started lives as long as this connection."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from time import sleep
from typing import Any

from raytrec.client import queries as peek
from raytrec.client.drive import Driver
from raytrec.client.known_run import Seen
from raytrec.client.package import code, config_name, user_modules
from raytrec.cluster.ray_version import RAY, check_ray, check_ray_here
from raytrec.cluster.refused import check_answers, check_token
from raytrec.cluster.token import use_token
from raytrec.common.errors import RaytrecError, RunError, root_cause
from raytrec.compat.ray_client import NOT_STARTED, NOT_TAKEN, version_mismatch
from raytrec.compat.ray_core import head_nodes
from raytrec.config.run_config import RunConfig, load_config

Source = str | Path | dict | RunConfig
LOOK_S = 1.0  # how often news are worth asking for
ANSWER_S = 120  # for what takes a second, while a cluster may first start a process for it


class ByClient:
    """A cluster behind ray://HOST:PORT.

    Args:
        address: as `ray start --head` gives it.

    Raises:
        RunError: it cannot be reached, refuses the token, or is of another version of Ray or Python.
    """

    def __init__(self, address: str):
        self.address = address
        self._connections: dict[tuple[Path, ...], _Connection] = {(): _Connection(address, ())}

    def call(self, name: str, *arguments: Any) -> Any:
        """What a function of `peek` gives."""
        return self._connections[()].call(name, *arguments)

    def begin(self, source: Source, overrides: list[str], include: tuple[Path, ...]) -> Begun:
        """Starts a run, or resumes it where it was interrupted."""
        config = load_config(source, overrides)
        places = tuple(path.absolute() for path in (*user_modules(config), *include))
        if places not in self._connections:  # whose processes have other code
            self._connections[places] = _Connection(self.address, places)
        connection = self._connections[places]
        driver = connection.actor(Driver)
        folder = connection.ask(driver.begin, config_name(source), config.to_yaml())
        return Begun(self, connection, driver, folder)

    def attach(self, news: dict[str, Any]) -> Seen:
        """A run that somebody has started, of which this is the news."""
        return Seen(self, news["folder"], LOOK_S)

    def evaluate(self, run: str, data: str, options: dict[str, Any]) -> dict[str, Any]:
        """Evaluates a run's newest checkpoint."""
        connection = self._connections[()]
        driver = connection.actor(Driver)
        return connection.ask(driver.evaluate, run, data, options, timeout=None)

    def predict(self, run: str, data: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
        """Predicts with a checkpoint of a run."""
        connection = self._connections[()]
        driver = connection.actor(Driver)
        return connection.ask(driver.predict, run, data, out, options, timeout=None)

    def index(self, run: str, items: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
        """Writes an index of items."""
        connection = self._connections[()]
        driver = connection.actor(Driver)
        return connection.ask(driver.index, run, items, out, options, timeout=None)

    def close(self) -> None:
        """Ends the connections, and with them the runs that were started here."""
        for connection in self._connections.values():
            connection.close()


class Begun(Seen):
    """A run that was started here."""

    def __init__(self, way: ByClient, connection: _Connection, driver: Any, folder: str):
        super().__init__(way, folder, LOOK_S)
        self._connection, self._driver = connection, driver  # an actor without a handle ends
        with connection.used():
            self._result = driver.train.remote()

    def stop(self) -> None:
        """Asks the run to save and to end, as soon as it has begun."""
        while self.news({})["state"] == "starting":
            sleep(self.polls_s)
        super().stop()

    def news(self, since: dict[str, int]) -> dict[str, Any]:
        """As `queries.news`; "starting" until the driver has begun. Ends with the last message."""
        ended = self._connection.is_done(self._result)
        failure = self._failure() if ended else None
        try:
            news = super().news(since)
        except RunError:
            if ended and not failure:
                raise
            news = {"since": since, "folder": self._folder, "state": "starting"}
        if failure:
            return news | {"state": "failed", "error": failure.parts}
        if not ended and news["state"] != "running":  # that of the run before, or it is closing down
            news["state"] = "running" if news["state"] == "finished" else "starting"
        return news

    def _failure(self) -> RaytrecError | None:
        try:
            self._connection.result(self._result)
        except RaytrecError as error:
            return error
        return None


class _Connection:
    """One connection of Ray client, beside whatever else this process does with Ray."""

    def __init__(self, address: str, places: tuple[Path, ...]):
        self.address, self._lock, self._remote = address, RLock(), {}
        use_token()
        check_ray_here()
        check_answers(address, address)
        check_token(address)

        with code(places) as folder:
            self._context = _connect(address, folder)
        check_ray(self._context.ray_version, where=address)
        with self.used():
            self._head = _head_node()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Ray in this block is this connection's. Not by two threads at a time: the context is swapped."""
        with self._lock, self._context:
            yield

    def call(self, name: str, *arguments: Any) -> Any:
        import ray

        with self.used():
            if name not in self._remote:
                self._remote[name] = ray.remote(peek.CALLS[name]).options(**self._placed())
        return self.ask(self._remote[name], *arguments)

    def ask(self, function: Any, *arguments: Any, timeout: float | None = ANSWER_S) -> Any:
        """The answer of a remote function or method, its errors as they were raised there."""
        with self.used():
            reference = function.remote(*arguments)
        return self.result(reference, timeout)

    def actor(self, kind: type) -> Any:
        import ray

        with self.used():
            return ray.remote(kind).options(**self._placed()).remote()

    def is_done(self, reference: Any) -> bool:
        import ray

        with self.used():
            return bool(ray.wait([reference], timeout=0)[0])

    def result(self, reference: Any, timeout: float | None = ANSWER_S) -> Any:
        import ray
        from ray.exceptions import GetTimeoutError, RayError

        try:
            with self.used():
                return ray.get(reference, timeout=timeout)
        except GetTimeoutError:
            raise RunError(f"the cluster has not answered for {timeout} s", where=self.address) from None
        except ConnectionError as error:
            raise RunError(
                f"the connection to the cluster is lost: {_first_line(error)}",
                where=self.address,
                do="connect again: Cluster(ADDRESS); what was started here has ended, and resumes from "
                "its last checkpoint when it is started again",
            ) from None
        except RayError as error:
            cause = root_cause(error)
            if cause is error or isinstance(cause, RayError):
                cause = RunError(f"the cluster says: {_first_line(cause)}", where=self.address)
            raise cause from None

    def close(self) -> None:
        self._context.disconnect()

    def _placed(self) -> dict[str, Any]:
        """On the head, where ray:// ends, whatever else is busy there."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(self._head, soft=False),
        }


def _connect(address: str, folder: Path) -> Any:
    """A connection whose processes work in a copy of a folder.

    On a busy machine, the process that Ray 2.60 starts for a client may end before it has begun, without a
    word (`proxier.start_specific_server`); so that is worth another try.
    """
    import ray

    for again in (True, True, False):
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
            if not (again and NOT_STARTED in str(error)):
                raise _not_connected(address, error) from None


def _head_node() -> str:
    if not (heads := head_nodes()):
        raise RunError("the cluster has no head node")
    return heads[0]


def _not_connected(address: str, error: Exception) -> RunError:
    """Why Ray client did not come up, for people."""
    text = str(error)
    if found := version_mismatch(text):
        ray, python = found
        try:
            check_ray(ray, where=address)
        except RunError as skew:
            return skew
        here = ".".join(map(str, sys.version_info[:2]))
        return RunError(
            f"the cluster runs Python {python}, and this is Python {here}",
            where=address,
            expected="the same Python, X.Y, on both sides: with ray:// they exchange code",
            do="use that Python here; or the job API, Cluster('http://HOST:8265'), which does not care",
        )
    if NOT_TAKEN in text:
        return RunError(
            f"the cluster does not take this connection: {_last_line(text)}",
            where=address,
            expected=f"Ray {RAY} on the cluster, as here, and room for one more process on its head",
            do="look at ray_client_server*.err among the logs of the head",
        )
    return RunError(
        f"cannot connect: {_first_line(error)}",
        where=address,
        expected="the address of Ray client, such as ray://127.0.0.1:10001, and the cluster's token",
        do="forward its port (`ray attach -p 10001 cluster.yaml`, `kubectl port-forward`)",
    )


def _last_line(text: str) -> str:
    """Of a traceback, what went wrong."""
    return [line.strip() for line in text.splitlines() if line.strip()][-1]


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
