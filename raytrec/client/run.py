"""Start and follow runs on a Ray cluster from notebooks and other programs (docs/notebooks.md).

The module requires Ray in the cluster's version, but neither torch nor torchrec.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from time import monotonic, sleep, time
from typing import Any

import numpy as np

from raytrec.client import queries
from raytrec.client.notebook import Page, Pictures, find_notebook_display
from raytrec.client.package import Source
from raytrec.common.errors import ConfigError, RaytrecError, RunError
from raytrec.common.messages import Eval, Measured, Train
from raytrec.config.overrides import Overrides, to_override_texts
from raytrec.tracking.history import History

ENDED = ("finished", "stopped", "failed", "interrupted")


class Cluster:
    """Connection to a Ray cluster on which a notebook or program starts and follows runs.

    Args:
        address: ray://HOST:PORT (Ray client: runs end with this connection) or http(s)://HOST:PORT (job API of the
            dashboard: runs are jobs, and continue when this process ends).

    Raises:
        ConfigError: The address has another form.
        RunError: The token is missing, or the cluster cannot be reached, refuses it, or runs another version of Ray or
            (with ray://) Python.
    """

    def __init__(self, address: str):
        if address.startswith("ray://"):
            from raytrec.client.ray_client import RayClient as Backend
        elif address.startswith(("http://", "https://")):
            from raytrec.client.job_run import JobApi as Backend  # type: ignore[assignment]
        else:
            what = f"'{address}' is not a cluster address"
            raise ConfigError(what, expected="ray://HOST:10001 (Ray client) or http(s)://HOST:8265 (job API)")
        logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)  # the module recommends ipywidgets
        self.address, self._backend = address, Backend(address)

    def train(self, source: Source, overrides: Overrides | None = None, include: list[str | Path] | tuple = ()) -> Run:
        """Start a run, and return without waiting for its end. If the same run was interrupted before, it is resumed.

        This machine's raytrec code and the modules that the config names are uploaded.

        Args:
            source: Path of a config file, a mapping of its values, or a RunConfig; paths in it refer to the cluster,
                and relative paths to its RAYTREC_ROOT.
            overrides: `section.key=value` strings, or a mapping such as {"train.epochs": 3}.
            include: Additional files and folders that the run needs.

        Raises:
            ConfigError: The configuration is invalid, or a file cannot be uploaded.
            RaytrecError: The cluster does not respond, or rejects the run.
        """
        return self._backend.train(source, to_override_texts(overrides), tuple(map(Path, include)))

    def run(self, run: str | Path) -> Run:
        """Return an existing run, given its name in RAYTREC_ROOT/runs or its folder; over http://, its job id.

        Raises:
            RunError: There is no such run, or the cluster does not respond.
        """
        return self._backend.run(str(run))

    def runs(self) -> list[dict[str, Any]]:
        """Return a dictionary {name, folder, state, unix_s} for each run in RAYTREC_ROOT/runs, last started first.

        unix_s is the Unix time at which the run was last started or resumed. Over http://, return the submitted jobs of
        the cluster: name is the job id, folder is None, and unix_s is the job's start (0 if unknown).

        Raises:
            RunError: The cluster does not respond.
        """
        return self._backend.runs()

    def close(self) -> None:
        """End the connection; with ray://, also end the runs that were started over the connection."""
        self._backend.close()

    def __repr__(self) -> str:
        return f"<Cluster {self.address}>"


class Run:
    """Run on a cluster, returned by `Cluster.train` and `Cluster.run`.

    Methods that query the cluster raise a RunError if the cluster does not respond. Methods that execute a command,
    such as `evaluate`, also raise the command's errors. Methods marked "ray:// only" raise a RunError over http://.

    Attributes:
        state: starting, running, finished, stopped (by a user or the cluster), failed, or interrupted (the driver
            was killed).
        history: Metrics and result that have been read so far.
        log: Lines of the log for users that have been read so far, each with its line break.
        error: Error of a failed run; None otherwise.
        poll_s: Seconds between two queries of the cluster.
        job: Id of the run's job; None with ray://.
    """

    job: str | None = None
    poll_s = 1.0

    def __init__(self) -> None:
        self.state, self.history, self.log = "starting", History(), list[str]()
        self.error: RaytrecError | None = None
        self._first: tuple[float, int] | None = None  # time and step when a step was first read

    @property
    def folder(self) -> str:
        """Return the run folder on the cluster."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """Return the last part of the run folder's path."""
        return PurePosixPath(self.folder).name

    def stop(self) -> None:
        """Ask the run to save a checkpoint and end. `Cluster.train` with the same config then resumes the run.

        Raises:
            RunError: The run has already ended, or the cluster does not respond.
        """
        raise NotImplementedError

    def _read(self) -> None:
        """Update state, history, log and error with new data."""
        raise NotImplementedError

    def _command(self, name: str, places: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
        """Run evaluate, predict or index on the cluster, and return the metrics; `places` maps options to paths."""
        raise NotImplementedError

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of `queries` on the cluster with the run folder, and return its result."""
        raise NotImplementedError

    def progress(self) -> dict[str, Any]:
        """Query the cluster, and return step, total steps, rows_per_s, training metrics, state and eta_s by name.

        eta_s is the estimated remaining time in seconds. Values that are not known yet are None.
        """
        self._poll()
        return self.get_last_progress()

    def get_last_progress(self) -> dict[str, Any]:
        """Return the values of `progress` as of the last query, without querying the cluster again."""
        trained, step, total = self.history.figures(Train), self.history.step, self.history.total_steps
        latest, eta_s = trained[-1].figures if trained else {}, None
        if self.state == "running" and self._first is not None and total and step > self._first[1]:
            eta_s = (time() - self._first[0]) / (step - self._first[1]) * (total - step)
        return {
            "step": step,
            "total": total or None,
            **{name: latest.get(name) for name in ("rows_per_s", *self.keys(Train))},
            "state": self.state,
            "eta_s": eta_s,
        }

    def metrics(self) -> dict[str, dict[str, list]]:
        """Return the metrics so far as columns: "train" (step, rows_per_s, metrics) and "eval" (step, metrics).

        `pandas.DataFrame(run.metrics()["train"])` creates a table. A run that is a job provides only the metrics in
        the job's log.
        """
        self._poll()
        series: dict[str, dict[str, list]] = {}
        for name, kind, more in (("train", Train, ["rows_per_s"]), ("eval", Eval, [])):
            lines = self.history.figures(kind)
            series[name] = {"step": [line.step for line in lines]}
            series[name] |= {key: [line.figures.get(key) for line in lines] for key in more + self.keys(kind)}
        return series

    def keys(self, kind: type[Measured]) -> list[str]:
        """Return the keys of the metrics that messages of a kind, Train or Eval, have contained so far."""
        recorded = {key for line in self.history.figures(kind) for key in line.figures}
        return [figure.key for figure in self.history.recorded_metrics if figure.key in recorded]

    def logs(self) -> Iterator[str]:
        """Yield the lines of the run's log with their line breaks, from its beginning until the run ends."""
        line_count = 0
        for _ in self._updates():
            yield from self.log[line_count:]
            line_count = len(self.log)

    def watch(self) -> dict[str, Any] | None:
        """Show progress and curves (in notebooks) or the log on stderr until the run ends.

        An interrupt ends the display, and the run continues.

        Returns:
            Content of result.json as returned by `wait`, or None after an interrupt (Ctrl-C).

        Raises:
            RaytrecError: The run failed (its error is raised), was stopped, or was interrupted.
        """
        show = find_notebook_display(self.name)
        try:
            if show:
                for _ in self._updates():
                    show(self)
            else:
                for line in self.logs():
                    print(line, end="", file=sys.stderr, flush=True)
        except KeyboardInterrupt:
            print("detached; the run continues. Call run.watch() to reattach, or run.stop() to stop the run")
            return None
        return self._outcome()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for the end of the run, and return the content of result.json.

        Args:
            timeout: Maximum time to wait, in seconds; None: no limit.

        Raises:
            RaytrecError: The run failed (its error is raised), was stopped, was interrupted, or has not ended after
                `timeout` seconds; or the cluster does not respond.
        """
        began = monotonic()
        for _ in self._updates():
            if timeout is not None and monotonic() - began > timeout and self.state not in ENDED:
                what = f"the run has not ended after {timeout} s: its state is {self.state}"
                raise RunError(what, where=self.job or self.name, do="wait again, or pass a larger timeout")
        return self._outcome()

    def evaluate(self, data: str, **options: Any) -> dict[str, Any]:
        """Evaluate the newest checkpoint on the cluster.

        Args:
            data: Parquet folder or file, as a path or URI on the cluster.
            options: workers and batch_size (default: as in training), and overrides, such as
                ["data.on_error=skip"].

        Returns:
            Metrics by name: eval.NAME for each metric, eval.rows and more (raytrec.evaluate).
        """
        return self._command("evaluate", {"data": data}, options)

    def predict(self, data: str, out: str, **options: Any) -> dict[str, Any]:
        """Predict the scores of all rows of Parquet data on the cluster, by default with the newest checkpoint.

        Each input file yields an output file of the same name. Repeat the call to resume an interrupted prediction.

        Args:
            data: Parquet folder or file, as a path or URI on the cluster.
            out: Folder to write to, as a path or URI on the cluster.
            options: columns (list of columns to copy to the output; default: data.reserve_columns), workers,
                checkpoint (a step or "best"), and overrides, such as ["data.on_error=skip"].

        Returns:
            Metrics by name: predict.rows, predict.files and more (raytrec.predict).
        """
        return self._command("predict", {"data": data, "out": out}, options)

    def index(self, items: str, out: str, **options: Any) -> dict[str, Any]:
        """Write an index of items on the cluster, by default with the newest checkpoint.

        `raytrec.load_index` reads the index from a path that this machine can access. If the call is interrupted,
        repeat it to continue.

        Args:
            items: Parquet folder or file with one row per item, as a path or URI on the cluster.
            out: Folder to write to, as a path or URI on the cluster.
            options: item, columns, faiss, queries, workers, checkpoint and overrides, as in raytrec.index.

        Returns:
            Metrics by name: index.items, index.recall@10 and more (raytrec.index).
        """
        return self._command("index", {"items": items, "out": out}, options)

    def report(self) -> Page:
        """Return the run's report.html as a page that notebooks display (ray:// only); Page.text is the HTML."""
        return Page(self._ask(queries.file, "report.html").decode())

    def pictures(self) -> Pictures:
        """Return a mapping from name to PNG bytes of the report's pictures, which notebooks display (ray:// only)."""
        return Pictures(self._ask(queries.pictures))

    def file(self, name: str) -> str:
        """Return the text of a file in `queries.FILES`, such as config.yaml or error.txt (ray:// only)."""
        return self._ask(queries.file, name).decode()

    def tables(self) -> dict[str, list[int]]:
        """Return the shapes of the embedding tables in the newest checkpoint (ray:// only): name → [rows, dim]."""
        return self._ask(queries.tables)

    def rows(self, table: str, numbers: Sequence[int]) -> np.ndarray:
        """Return rows of a table in the newest checkpoint (ray:// only): float32 [len(numbers), dim]."""
        return self._ask(queries.rows, table, [int(number) for number in numbers])

    def __repr__(self) -> str:
        return f"<Run {self.job or self.name}: {self.state}>"

    def _poll(self) -> str:
        """Read new data unless the run is known to have ended, and return the state of the run."""
        if self.state not in ENDED:
            self._read()
            if self._first is None and self.history.step:
                self._first = time(), self.history.step
        return self.state

    def _updates(self) -> Iterator[None]:
        """Read new data every `poll_s` seconds until the run has ended, and yield after each read."""
        while self._poll() not in ENDED:
            yield
            sleep(self.poll_s)
        yield

    def _outcome(self) -> dict[str, Any]:
        if self.state == "finished":
            return self.history.result
        if self.state == "failed" and self.error:
            raise self.error
        do = "start the same run or command again; a run resumes from its last checkpoint"
        what = {
            "stopped": "the run was stopped",
            "interrupted": "the run was interrupted: its driver exited without reporting an error",
        }.get(self.state, f"the run {self.state}")
        raise RunError(what, where=self.job or self.name, do=do)
