"""Client for one run in an MLflow store. Every call waits for the store, and may raise MLflow's errors."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

from raytrec.common.errors import ConfigError
from raytrec.common.processes import lock_file
from raytrec.common.redaction import hide, hide_yaml
from raytrec.compat.mlflow_ import (
    EXPERIMENT_TAGS,
    PARENT_RUN_TAG,
    get_http_status,
    has_store,
    import_quietly,
    is_transient,
    reason,
)
from raytrec.config.run_config import RunConfig
from raytrec.tracking.mlflow_records import MAX_METRICS_PER_CALL, Record

KEY, PARENT_NAME_TAG = "raytrec.key", "raytrec.parent_run"
URI_HINT = "correct tracking.uri (or MLFLOW_TRACKING_URI), or use a local store with tracking.uri=sqlite:///FILE"
LOGIN_HINT = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"


class Store:
    """Client for one run in an MLflow store.

    Args:
        config: Configuration with the address of the store (tracking.uri) and the names of run, experiment and parent
            run; a missing experiment or parent run is created.
        folder: Run folder. Artifacts of a new experiment in an sqlite store are stored next to the store if the run
            folder is below the store's folder, else next to the run folder. (Folders of a search's trials are nested
            more deeply than other run folders.)
        key: Value of a tag, by which the run is found if the store created the run without responding.
        previous_run_id: Id of a run to continue, or None; if the store has no such run, or the run is deleted, a new
            run is created.

    Attributes:
        uri: Address of the store.
        run_id: Id of the run; None until `open` has found or created the run.
    """

    def __init__(self, config: RunConfig, folder: Path, key: str = "", previous_run_id: str | None = None):
        tracking = config.tracking
        self.uri, self._experiment, self._parent = tracking.uri, tracking.experiment, tracking.parent_run
        self.run_id: str | None = None
        store_folder = Path(tracking.uri.removeprefix("sqlite:///")).parent
        parent = store_folder if store_folder in folder.parents else folder.parent
        self._name, self._artifacts = config.run.name, parent / "mlartifacts"
        self._is_file = self.uri.startswith("sqlite")
        self._previous_id, self._key = previous_run_id, key
        self._created_parent: str | None = None

    def open(self) -> None:
        """Find or create the experiment and the run; the call can be repeated after a failure.

        Raises:
            ConfigError: The experiment has been deleted.
            OSError, sqlite3.DatabaseError: The sqlite file cannot be created, opened or written.
        """
        self._connect()
        self.run_id = self._reopen_run() or self._find_by_key() or self._create(self._name, KEY, self._key)

    def open_parent(self) -> None:
        """Find or create the parent run named run.name, and select it for all further calls; raise errors as `open`."""
        self._parent = self._name
        self._connect()
        self.run_id = self._find_parent()

    def _connect(self) -> None:
        import_quietly()
        from mlflow import MlflowClient

        with _initialize_sqlite_file(self.uri) if self._is_file else nullcontext():
            self._client = MlflowClient(tracking_uri=self.uri)
        self._experiment_id = self._find_experiment()

    def write_metrics(self, records: list[Record]) -> None:
        """Write metrics in calls of MAX_METRICS_PER_CALL; metrics already in a database are not duplicated."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, record.unix_ms, record.step)
            for record in records
            for name, value in record.figures.items()
        ]
        for i in range(0, len(metrics), MAX_METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=metrics[i : i + MAX_METRICS_PER_CALL])

    def write_params(self, params: Mapping[str, str]) -> None:
        """Write at most 100 parameters of the run; the store rejects another value for an existing parameter."""
        from mlflow.entities import Param

        self._client.log_batch(self.run_id, params=[Param(k, v) for k, v in params.items()])

    def write_tags(self, tags: Mapping[str, str]) -> None:
        """Write at most 100 tags of the run; existing tags are overwritten."""
        from mlflow.entities import RunTag

        self._client.log_batch(self.run_id, tags=[RunTag(k, v) for k, v in tags.items()])

    def upload(self, path: Path, folder: str) -> None:
        """Upload a file to a folder of the run's artifacts ('' for the top level), without secrets in .yaml files.

        Raises:
            OSError: The file cannot be read.
        """
        if path.suffix == ".yaml":  # a configuration may contain passwords
            self._client.log_text(
                self.run_id, hide_yaml(path.read_text(encoding="utf-8")), str(Path(folder) / path.name)
            )
        else:
            self._client.log_artifact(self.run_id, str(path), folder or None)

    def end(self, status: str) -> None:
        """End the run with a status: FINISHED, FAILED or KILLED."""
        self._client.set_terminated(self.run_id, status)

    def join_parent(self) -> None:
        """Make the run a child of the oldest parent run named tracking.parent_run, which is created if missing.

        The method does nothing if tracking.parent_run is not set. Runs that start at the same time may each create a
        parent. Therefore the delivery calls this method again at the end of the run. The run then joins the oldest
        parent, and deletes the younger parent that it has created.
        """
        if not self._parent:
            return
        oldest = self._find_parent()
        self._client.set_tag(self.run_id, PARENT_RUN_TAG, oldest)
        if self._created_parent not in (None, oldest):
            self._client.delete_run(self._created_parent)
            self._created_parent = None

    def _find_parent(self) -> str:
        """Return the id of the oldest parent run with the parent's name; create such a run if none exists."""
        runs = self._client.search_runs([self._experiment_id], f"tags.`{PARENT_NAME_TAG}` LIKE '%'")
        named = [run.info for run in runs if run.data.tags[PARENT_NAME_TAG] == self._parent]
        if named:
            return min((info.start_time, info.run_id) for info in named)[1]
        self._created_parent = self._create(self._parent, PARENT_NAME_TAG, self._parent)
        self._client.set_terminated(self._created_parent)  # nothing else is written to the parent
        return self._find_parent()

    def _find_experiment(self) -> str:
        """Return the id of the experiment; create the experiment if it does not exist.

        Raises:
            ConfigError: The experiment has been deleted.
        """
        from mlflow.exceptions import MlflowException

        local = self._artifacts.as_uri() if self._is_file else None
        if experiment := self._client.get_experiment_by_name(self._experiment):
            if experiment.lifecycle_stage == "deleted":
                raise ConfigError(
                    f"the experiment {self._experiment} has been deleted in MLflow",
                    where=hide(self.uri),
                    expected="an experiment that is not deleted, or a new name",
                    do="set another tracking.experiment, or set MLFLOW_TRACKING_URI to this address and run "
                    f"`mlflow experiments restore --experiment-id {experiment.experiment_id}`",
                )
            return experiment.experiment_id
        try:
            return self._client.create_experiment(self._experiment, artifact_location=local, tags=EXPERIMENT_TAGS)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return self._client.get_experiment_by_name(self._experiment).experiment_id  # created concurrently

    def _reopen_run(self) -> str | None:
        """Set the status of the run `previous_run_id` to RUNNING, and return its id; None if it cannot be continued."""
        from mlflow.exceptions import MlflowException

        if not self._previous_id:
            return None
        try:
            self._client.update_run(self._previous_id, status="RUNNING")
        except MlflowException as error:
            if is_transient(error):
                raise
            return None
        return self._previous_id

    def _find_by_key(self) -> str | None:
        """Return the id of the run with this client's key, which an earlier call may have created, or None."""
        runs = self._client.search_runs([self._experiment_id], f"tags.`{KEY}` = '{self._key}'")
        return runs[0].info.run_id if runs else None

    def _create(self, name: str, tag: str, value: str) -> str:
        run = self._client.create_run(self._experiment_id, run_name=name, tags={tag: value})
        return run.info.run_id


def check_tracking_uri(uri: str) -> None:
    """Check that MLflow supports an address, without importing MLflow.

    Raises:
        ConfigError: MLflow has no store for addresses of this kind.
    """
    if not has_store(uri):
        raise make_open_error(uri, "MLflow does not support this address")


def explain_open_error(uri: str, error: BaseException) -> ConfigError:
    """Return the error for users if opening a store has raised `error`; status 401 or 403 means denied access."""
    return make_open_error(uri, reason(error), is_access_denied=get_http_status(error) in (401, 403))


def make_open_error(uri: str, why: str, is_access_denied: bool = False) -> ConfigError:
    """Return the error for a store that cannot be opened; `why` states the reason.

    If `is_access_denied`, the error asks for other credentials, else for another address.
    """
    expected, do = "a writable sqlite:///FILE, or a reachable MLflow server or database", URI_HINT
    if is_access_denied:
        expected, do = "credentials that the server accepts", LOGIN_HINT
    return ConfigError(f"cannot open the MLflow store: {why}", where=hide(uri), expected=expected, do=do)


@contextmanager
def _initialize_sqlite_file(uri: str) -> Iterator[None]:
    """Check a database file, create its tables if it is new, and lock its folder for the duration of the block.

    MLflow 3.17 tries for 100 s to open a file that is not a database. Processes that concurrently create the
    tables of a new database fail, because the constructor (SqlAlchemyStore.__init__) takes no lock. The lock on the
    folder leaves no file behind; on file systems without such locks, no lock is taken. MLflow cannot complete the
    tables if a process was killed while it created them, so they are created in another file, which then replaces
    the empty file.

    Raises:
        OSError, sqlite3.DatabaseError: The folder cannot be created or opened, or the file is not a writable database.
    """
    from mlflow import MlflowClient
    from sqlalchemy.engine import make_url

    url = make_url(uri)
    path = url.database
    if not path or path == ":memory:":
        yield
        return
    folder = Path(path).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        lock_file(handle, wait=True)  # file systems without locks are accepted
        _check_writable(path)
        if not os.path.getsize(path):
            path = os.path.realpath(path)
            new = f"{path}.new"
            for left in (new, f"{new}-journal"):  # left by a killed process
                Path(left).unlink(missing_ok=True)
            MlflowClient(tracking_uri=url.set(database=new).render_as_string(hide_password=False))
            os.replace(new, path)
        yield
    finally:
        os.close(handle)


def _check_writable(path: str) -> None:
    with closing(sqlite3.connect(path, timeout=20)) as database:
        try:
            database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):  # a locked database is a transient error
                raise
