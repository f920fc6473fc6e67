"""A Ray cluster and its runs, from a notebook or another program (docs/notebooks.md).

Needs Ray in the cluster's version, but neither torch nor torchrec.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from time import monotonic, sleep, time
from typing import Any

import numpy as np

from raytrec.client import queries
from raytrec.client.notebook import Page, Pictures, display
from raytrec.client.package import Source
from raytrec.common.errors import ConfigError, RaytrecError, RunError
from raytrec.common.messages import Eval, Measured, Train
from raytrec.config.overrides import Overrides, as_texts
from raytrec.tracking.history import History

ENDED = ("finished", "stopped", "failed", "interrupted")


class Cluster:
    """A Ray cluster that is running.

    Args:
        address: ray://HOST:PORT (Ray client: runs end with this process) or http(s)://HOST:PORT (the job API
            of the dashboard: runs are jobs, and outlive this process).

    Raises:
        ConfigError: no such address. RunError: no cluster there, no token, or another version of Ray.
    """

    def __init__(self, address: str):
        if address.startswith("ray://"):
            from raytrec.client.ray_client import RayClient as Way
        elif address.startswith(("http://", "https://")):
            from raytrec.client.job_run import JobApi as Way  # type: ignore[assignment]
        else:
            what = f"'{address}' is not the address of a cluster"
            raise ConfigError(what, expected="ray://HOST:10001 (Ray client), or http://HOST:8265 (job API)")
        logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # in notebooks it wants ipywidgets
        self.address, self._way = address, Way(address)

    def train(
        self, source: Source, overrides: Overrides | None = None, include: list[str | Path] | tuple = ()
    ) -> Run:
        """Starts a run, or resumes it if the same one was interrupted; returns at once.

        raytrec's code, as it is here, and modules that the config names go up with it.

        Args:
            source: a config file, its values, or a RunConfig. Its paths are those of the cluster, relative
                ones from its RAYTREC_ROOT.
            overrides: `section.key=value` strings, or a mapping: {"train.epochs": 3}.
            include: further files and folders that it needs.
        """
        return self._way.train(source, as_texts(overrides), tuple(map(Path, include)))

    def run(self, run: str | Path) -> Run:
        """An existing run: by its name in RAYTREC_ROOT/runs or its folder; over http://, by its job's id."""
        return self._way.run(str(run))

    def runs(self) -> list[dict[str, Any]]:
        """The runs in RAYTREC_ROOT/runs, the newest first: name, folder, state, unix_s (when it began); over
        http://, the jobs of the cluster: the name is the job's id, the folder None."""
        return self._way.runs()

    def close(self) -> None:
        """Ends the connection; with ray://, also the runs that it has started."""
        self._way.close()

    def __repr__(self) -> str:
        return f"<Cluster {self.address}>"


class Run:
    """A run; `Cluster.train` and `Cluster.run` return it.

    Attributes:
        state: starting, running, finished, stopped (its state is saved), failed, interrupted (driver died).
        history: the figures that have been read so far; log: lines for people, each with its end.
        error: why it failed.
        poll_s: seconds between two looks at it.
        job: the id of the job that it is; None with ray://.
    """

    job: str | None = None
    poll_s = 1.0

    def __init__(self) -> None:
        self.state, self.history, self.log = "starting", History(), list[str]()
        self.error: RaytrecError | None = None
        self._first: tuple[float, int] | None = None  # when, and at which step, figures were first read

    @property
    def folder(self) -> str:
        """The run's folder on the cluster."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The last part of its folder."""
        return PurePosixPath(self.folder).name

    def stop(self) -> None:
        """Asks the run to checkpoint and to end. The same `Cluster.train` again resumes it."""
        raise NotImplementedError

    def _read(self) -> None:
        """Takes what is new into state, history, log and error."""
        raise NotImplementedError

    def _command(self, name: str, places: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
        """The figures of a command of raytrec that the cluster carries out.

        Args:
            name: evaluate, predict or index.
            places: of the command's data, by option.
        """
        raise NotImplementedError

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """The answer of a function of `queries`, called on the cluster with the run's folder."""
        raise NotImplementedError

    def progress(self) -> dict[str, Any]:
        """step, total, rows_per_s, the metrics of training, state and eta_s; None: not known yet."""
        self._poll()
        return self.known()

    def known(self) -> dict[str, Any]:
        """As `progress`, from what has been read already."""
        trained = self.history.figures(Train)
        last = trained[-1].figures if trained else {}
        return {
            "step": self.history.step,
            "total": self.history.total_steps or None,
            **{name: last.get(name) for name in ("rows_per_s", *self.keys(Train))},
            "state": self.state,
            "eta_s": self._remaining_s(),
        }

    def metrics(self) -> dict[str, dict[str, list]]:
        """The figures so far: "train" (step, rows_per_s, metrics) and "eval" (step, metrics).

        `pandas.DataFrame(run.metrics()["train"])` is a table of them. Of a job, only its log counts.
        """
        self._poll()
        series: dict[str, dict[str, list]] = {}
        for name, kind, more in (("train", Train, ["rows_per_s"]), ("eval", Eval, [])):
            lines = self.history.figures(kind)
            series[name] = {"step": [line.step for line in lines]}
            series[name] |= {key: [line.figures.get(key) for line in lines] for key in more + self.keys(kind)}
        return series

    def keys(self, kind: type[Measured]) -> list[str]:
        """Return the metrics that training, or evaluations, have recorded so far."""
        recorded = {key for line in self.history.figures(kind) for key in line.figures}
        return [figure.key for figure in self.history.metrics_of_tasks if figure.key in recorded]

    def logs(self) -> Iterator[str]:
        """The lines of the run's log, from its beginning until the run ends."""
        seen = 0
        while True:
            ended = self._poll() in ENDED
            yield from self.log[seen:]
            seen = len(self.log)
            if ended:
                return
            sleep(self.poll_s)

    def watch(self) -> dict[str, Any] | None:
        """Show progress and curves until the run ends. Interrupting detaches; the run continues.

        Returns:
            The result of `wait`, with its errors; None if it was interrupted.
        """
        show = display(self.name)
        try:
            while self._poll() not in ENDED:
                show(self)
                sleep(self.poll_s)
            show(self)
        except KeyboardInterrupt:
            print("detached; the run continues: run.watch(), or run.stop()")
            return None
        return self._outcome()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the end; the content of result.json.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            RunError: the run failed, with its own message; it was stopped or interrupted; it still runs.
        """
        began = monotonic()
        while self._poll() not in ENDED:
            if timeout is not None and monotonic() - began > timeout:
                what = f"the run is still running after {timeout} s"
                raise RunError(what, where=self.job or self.name, do="wait longer")
            sleep(self.poll_s)
        return self._outcome()

    def evaluate(self, data: str, **options: Any) -> dict[str, Any]:
        """Evaluates the newest checkpoint on the cluster.

        Args:
            data: folder or file of Parquet, as the cluster sees it.
            options: workers, batch_size; default: as in training. overrides: such as data.on_error=skip.

        Returns:
            eval.NAME of each metric, eval.rows and more.
        """
        return self._command("evaluate", {"data": data}, options)

    def predict(self, data: str, out: str, **options: Any) -> dict[str, Any]:
        """Predicts every row of some Parquet on the cluster, with the newest checkpoint: for each file one of
        the same name. Interrupted, it continues when it is called again.

        Args:
            data: folder or file of Parquet, as the cluster sees it.
            out: the folder to write to, likewise.
            options: columns, a list of those to keep (default: data.reserve_columns); workers; checkpoint, a
                step or "best"; overrides: such as data.on_error=skip.

        Returns:
            predict.rows, predict.files and more (raytrec.predict).
        """
        return self._command("predict", {"data": data, "out": out}, options)

    def index(self, items: str, out: str, **options: Any) -> dict[str, Any]:
        """Writes an index of items on the cluster, with the newest checkpoint; `raytrec.load_index` reads it,
        where its folder can be reached. Interrupted, it continues when it is called again.

        Args:
            items: folder or file of Parquet with one row for each item, as the cluster sees it.
            out: the folder to write to, likewise.
            options: item, columns, faiss, queries, workers, checkpoint, overrides: as `raytrec index`.

        Returns:
            index.items, index.recall@10 and more (raytrec.index).
        """
        return self._command("index", {"items": items, "out": out}, options)

    def report(self) -> Page:
        """The run's report.html, for a notebook; its `text` is the page. ray:// only, as all below."""
        return Page(self._ask(queries.file, "report.html").decode())

    def pictures(self) -> Pictures:
        """The pictures of the report: name → PNG. A notebook shows them all."""
        return Pictures(self._ask(queries.pictures))

    def file(self, name: str) -> str:
        """A file of the run: config.yaml, schema.yaml, plan.json, result.json, error.txt."""
        return self._ask(queries.file, name).decode()

    def tables(self) -> dict[str, list[int]]:
        """Embedding tables of the newest checkpoint: name → [rows, dim]."""
        return self._ask(queries.tables)

    def rows(self, table: str, numbers: Sequence[int]) -> np.ndarray:
        """Rows of a table: float32 [len(numbers), dim]."""
        return self._ask(queries.rows, table, [int(number) for number in numbers])

    def __repr__(self) -> str:
        return f"<Run {self.job or self.name}: {self.state}>"

    def _poll(self) -> str:
        """Reads what is new, until the run has ended; its state."""
        if self.state not in ENDED:
            self._read()
            if self._first is None and self.history.step:
                self._first = time(), self.history.step
        return self.state

    def _remaining_s(self) -> float | None:
        """Seconds until the last step, at the speed since figures were first read."""
        step, total = self.history.step, self.history.total_steps
        if self.state != "running" or self._first is None or not total or step <= self._first[1]:
            return None
        return (time() - self._first[0]) / (step - self._first[1]) * (total - step)

    def _outcome(self) -> dict[str, Any]:
        if self.state == "finished":
            return self.history.result
        if self.state == "failed" and self.error:
            raise self.error
        do = "train the same config again: it resumes from its last checkpoint"
        what = {
            "stopped": "the run was stopped; its state is saved",
            "interrupted": "the run was interrupted: its driver exited without reporting an error",
        }.get(self.state, f"the run {self.state}")
        raise RunError(what, where=self.job or self.name, do=do)
