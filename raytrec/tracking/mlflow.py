"""The MLflow run: parameters, metrics, the resolved config, the result."""

from __future__ import annotations

import logging
import re
from concurrent.futures import Future, ThreadPoolExecutor
from math import isfinite
from pathlib import Path
from typing import Any

from raytrec.config import RunConfig
from raytrec.errors import ConfigError

NAME = re.compile(r"[\w\-. :/]+", re.ASCII)  # what MLflow takes as the name of a parameter


class Tracker:
    """Writes one MLflow run from a thread of its own, so that the driver never waits for the store.

    Args:
        uri: tracking store or server, for example sqlite:////runs/mlflow.db or http://127.0.0.1:5000.
        experiment: created if it does not exist.
        name: name of the run.
        artifacts: folder for artifacts where the store is a local database.
        run_id: of a run to go on with; if the store does not have it, a new one is made.
    """

    def __init__(self, uri: str, experiment: str, name: str, artifacts: Path, run_id: str | None = None):
        self._before = run_id
        self.uri, self._experiment, self._name, self._artifacts = uri, experiment, name, artifacts
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mlflow")
        self._pending: list[Future] = []
        self._opened = self._thread.submit(self._open)

    def _open(self) -> None:
        for name in ("alembic", "mlflow.store"):  # the migrations of a new database, line by line
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self.uri)
        experiment = self._client.get_experiment_by_name(self._experiment)
        if experiment is None:
            local = self._artifacts.as_uri() if "://" in self.uri and self.uri.startswith("sqlite") else None
            experiment_id = self._client.create_experiment(self._experiment, artifact_location=local)
        else:
            experiment_id = experiment.experiment_id
        if self._before and self._go_on(self._before):
            return
        self._run = self._client.create_run(experiment_id, run_name=self._name).info.run_id

    def _go_on(self, run_id: str) -> bool:
        from mlflow.exceptions import MlflowException

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException:
            return False
        self._run = run_id
        return True

    def ready(self) -> str:
        """Waits until the store has the run; its id.

        Raises:
            ConfigError: when the store cannot be opened.
        """
        try:
            self._opened.result()
        except Exception as error:
            raise ConfigError(
                f"cannot open the MLflow store: {str(error).splitlines()[0]}",
                where=f"tracking.uri={_without_password(self.uri)}",
                expected="sqlite:///FILE or the address of an MLflow server",
                do="correct tracking.uri, or leave it out for a local sqlite store",
            ) from None
        return self._run

    def params(self, config: RunConfig) -> None:
        """Every knob of the configuration as section.key."""
        from mlflow.entities import Param

        values = _flatten(config.model_dump(by_alias=True))
        params = [Param(key, _without_password(str(value))[:6000]) for key, value in values.items()]
        self._submit(lambda: self._client.log_batch(self._run, params=params))

    def metrics(self, figures: dict[str, float | None], step: int) -> None:
        """Metrics of one step; those that are None or not finite are left out."""
        from time import time

        from mlflow.entities import Metric

        now_ms = int(time() * 1000)
        metrics = [
            Metric(name, float(value), now_ms, step)
            for name, value in figures.items()
            if isinstance(value, (int, float)) and isfinite(value)
        ]
        self._submit(lambda: self._client.log_batch(self._run, metrics=metrics))

    def file(self, path: Path) -> None:
        """Keeps a file as an artifact of the run."""
        self._submit(lambda: self._client.log_artifact(self._run, str(path)))

    def close(self, status: str) -> str | None:
        """Writes what is left and ends the run with FINISHED, FAILED or KILLED.

        Returns:
            None, or what could not be recorded (an error that `ready` has raised is not said again).
        """
        if self._opened.exception():
            self._thread.shutdown()
            return None
        self._submit(lambda: self._client.set_terminated(self._run, status))
        self._thread.shutdown(wait=True)
        errors = [str(e).splitlines()[0] for f in self._pending if (e := f.exception())]
        return (
            f"{len(errors)} of {len(self._pending)} records did not reach MLflow: {errors[0]}"
            if errors
            else None
        )

    def _submit(self, call) -> None:
        self._pending.append(self._thread.submit(call))


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.key → value; a mapping with keys that MLflow cannot take (patterns of tables) stays one."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and all(NAME.fullmatch(inner) for inner in value):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _without_password(text: str) -> str:
    """USER:PASSWORD@ of an address, hidden."""
    return re.sub(r"(://[^/@\s:]*):[^/@\s]*@", r"\1:***@", text)
