"""Runs over Ray client (ray://), which end with its connection.

The cluster is used as if it were here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from time import sleep
from typing import Any

from raytrec.client import queries
from raytrec.client.connection import Connection
from raytrec.client.package import Source, config_name, user_modules
from raytrec.client.run import ENDED, Run
from raytrec.common.errors import RaytrecError, RunError, root_cause
from raytrec.config.run_config import RunConfig, load_config
from raytrec.driver.driver_state import ASKED, LOG
from raytrec.tracking.progress_log import for_people
from raytrec.tracking.run_folder import decode


class RayClient:
    """A cluster behind ray://HOST:PORT.

    Args:
        address: as `ray start --head` prints it.

    Raises:
        RunError: it cannot be reached, refuses the token, or is of another version of Ray or Python.
    """

    def __init__(self, address: str):
        self.address = address
        self._connections: dict[tuple[Path, ...], Connection] = {(): Connection(address, ())}

    def train(self, source: Source, overrides: list[str], include: tuple[Path, ...]) -> Run:
        """Starts a run, or resumes it where it was interrupted."""
        config = load_config(source, overrides)
        places = tuple(path.absolute() for path in (*user_modules(config), *include))
        if places not in self._connections:  # its processes have other code
            self._connections[places] = Connection(self.address, places)
        connection = self._connections[places]
        driver = connection.actor(Driver)
        folder = connection.ask(driver.begin, config_name(source), config.to_yaml())
        return ClientRun(connection, folder, driver)

    def run(self, run: str) -> Run:
        """An existing run, by its name or folder."""
        connection = self._connections[()]
        return ClientRun(connection, connection.call(queries.news, run, {})["folder"])

    def runs(self) -> list[dict[str, Any]]:
        """As `queries.runs`."""
        return self._connections[()].call(queries.runs)

    def close(self) -> None:
        """Ends the connections, and with them the runs that were started here."""
        for connection in self._connections.values():
            connection.close()


class ClientRun(Run):
    """A run in a folder on the cluster.

    Args:
        connection: through which the cluster is asked.
        folder: of the run.
        driver: the Driver, if the run is to begin here.
    """

    def __init__(self, connection: Connection, folder: str, driver: Any = None):
        super().__init__()
        self._connection, self._folder, self._since = connection, folder, {}
        self._driver, self._result = driver, None  # an actor without a handle ends
        if driver is None:
            self._poll()
            return
        with connection.used():
            self._result = driver.train.remote()

    @property
    def folder(self) -> str:
        return self._folder

    def stop(self) -> None:
        while self._poll() == "starting":
            sleep(self.poll_s)
        self._ask(queries.stop)

    def _read(self) -> None:
        ended = self._result is None or self._connection.is_done(self._result)
        failure = self._failure() if ended and self._result is not None else None
        try:
            state = self._take_news()
        except RunError:
            if ended and not failure:
                raise
            state = "starting"
        if failure:
            self.error, state = failure, "failed"
        elif not ended and state != "running":  # that of the run before, or it is closing down
            self.error, state = None, "running" if state == "finished" else "starting"
        self.state = state

    def _take_news(self) -> str:
        """Takes all that is new; the state of the run folder."""
        while True:
            news = self._ask(queries.news, self._since)
            self.log += for_people(news["lines"].pop(LOG))
            for file, text in news["lines"].items():
                for line in text.splitlines():
                    with suppress(ValueError):  # it is not a line of that file
                        if message := decode(file, line):
                            self.history.add(message)
            before, self._since = self._since, news["since"]
            if self._since == before or news["state"] not in ENDED:  # nothing is left, or more will come
                break
        self.history.result = news["result"]
        self.error = RunError(**news["error"]) if news["error"] else None
        return news["state"]

    def _command(self, name: str, places: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
        driver = self._connection.actor(Driver)
        return self._connection.ask(driver.command, name, self._folder, places, options, timeout=None)

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        return self._connection.call(question, self._folder, *arguments)

    def _failure(self) -> RaytrecError | None:
        try:
            self._connection.result(self._result)
        except RaytrecError as error:
            return error
        return None


class Driver:
    """Drives a run as an actor on the cluster, in its main thread, where signal handlers can be installed.

    What goes back are plain values and RaytrecErrors: who is connected may have neither torch nor torchrec.
    """

    def begin(self, name: str, text: str) -> str:
        """Decides which run this is: one that was interrupted, or a new one.

        Args:
            name: of the config's file, after which a new run is named.
            text: the config as YAML.

        Returns:
            The run's folder.
        """
        from raytrec.driver.prepare import resolve_config

        path = Path(mkdtemp(prefix="raytrec-")) / name
        path.write_text(text)
        self._config: RunConfig = _raising_ours(resolve_config, path, [], resume_latest=True)[0]
        return self._config.run.dir

    def train(self) -> dict[str, Any] | None:
        """Trains; the content of result.json, or None when the run was asked to stop."""
        import raytrec

        try:
            return _raising_ours(raytrec.train, self._config, resume_latest=True).metrics
        except ASKED:  # to Ray it would mean that this call is cancelled
            return None

    def command(self, name: str, run: str, places: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
        """The figures of raytrec.evaluate, predict or index with the newest checkpoint of a run."""
        import raytrec

        call = {"evaluate": raytrec.evaluate, "predict": raytrec.predict, "index": raytrec.index}[name]
        return _raising_ours(call, queries.run_folder(run), **places, **options).metrics


def _raising_ours(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a call returns; any error becomes a RaytrecError, which can be read anywhere."""
    try:
        return call(*arguments, **options)
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, RaytrecError):
            raise cause from None
        raise RunError(f"{type(cause).__name__}: {cause}") from None
