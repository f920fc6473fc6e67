"""The driver of a run as an actor on the cluster, for whoever is connected with Ray client."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from raytrec.common.errors import RaytrecError, RunError, root_cause
from raytrec.config.run_config import RunConfig
from raytrec.driver.driver_state import ASKED


class Driver:
    """Drives a run in the actor's main thread, where signal handlers can be installed: methods run there.

    What goes back are plain values and RaytrecErrors: who is connected may have neither torch nor torchrec.
    """

    def begin(self, name: str, text: str) -> str:
        """Settles which run this is: one that was interrupted, or a new one.

        Args:
            name: of the config's file, after which a new run is called.
            text: the config as YAML.

        Returns:
            The run's folder.
        """
        from raytrec.driver.prepare import resolve_config

        path = Path(mkdtemp(prefix="raytrec-")) / name
        path.write_text(text)
        self._config: RunConfig = _ours(resolve_config, path, [], resume_latest=True)[0]
        return self._config.run.dir

    def train(self) -> dict[str, Any] | None:
        """Trains; the content of result.json, or None when the run was asked to stop."""
        from raytrec.driver.run import train

        try:
            return _ours(train, self._config, resume_latest=True).metrics
        except ASKED:  # to Ray it would mean that somebody cancels this call
            return None

    def evaluate(self, run: str, data: str, options: dict[str, Any]) -> dict[str, Any]:
        """Evaluates the newest checkpoint of a run; the figures."""
        from raytrec.client.queries import run_folder
        from raytrec.driver.evaluation import evaluate

        return _ours(evaluate, run_folder(run), data, **options).metrics

    def predict(self, run: str, data: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
        """Predicts with a checkpoint of a run; the figures."""
        from raytrec.client.queries import run_folder
        from raytrec.prediction.predict import predict

        return _ours(predict, run_folder(run), data, out, **options).metrics

    def index(self, run: str, items: str, out: str, options: dict[str, Any]) -> dict[str, Any]:
        """Writes an index of items; its figures."""
        from raytrec.client.queries import run_folder
        from raytrec.retrieval.build import index

        return _ours(index, run_folder(run), items, out, **options).metrics


def _ours(call: Any, *arguments: Any, **options: Any) -> Any:
    """What a call gives; whatever it raises becomes an error of ours, which can be read anywhere."""
    try:
        return call(*arguments, **options)
    except Exception as error:
        cause = root_cause(error)
        if isinstance(cause, RaytrecError):
            raise cause from None
        raise RunError(f"{type(cause).__name__}: {cause}") from None
