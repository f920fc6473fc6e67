"""A run on a cluster, followed from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from time import monotonic, sleep, time
from typing import Any

import numpy as np

from raytrec.client import queries
from raytrec.client.notebook import Page, Pictures, display
from raytrec.common.errors import RaytrecError, RunError
from raytrec.common.messages import Eval, Measured, Train
from raytrec.tracking.history import History

ENDED = ("finished", "stopped", "failed", "interrupted")
HOW_IT_ENDED = {
    "stopped": "the run was stopped; its state is saved",
    "interrupted": "the run was interrupted: its driver exited without reporting an error",
}


class Run:
    """A run; `Cluster.train` and `Cluster.run` return it.

    Attributes:
        state: starting, running, finished, stopped (its state is saved), failed, or interrupted (its driver
            died).
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
        figures = {name: last.get(name) for name in ("rows_per_s", *self.keys(Train))}
        known = {"step": self.history.step, "total": self.history.total_steps or None, **figures}
        return known | {
            "state": self.state,
            "eta_s": self._remaining_s() if self.state == "running" else None,
        }

    def metrics(self) -> dict[str, dict[str, list]]:
        """The figures so far: "train" (step, rows_per_s, metrics) and "eval" (step, metrics).

        `pandas.DataFrame(run.metrics()["train"])` is a table of them. Of a job, only its log counts.
        """
        self._poll()
        return {
            "train": self._series(Train, "rows_per_s", *self.keys(Train)),
            "eval": self._series(Eval, *self.keys(Eval)),
        }

    def keys(self, kind: type[Measured]) -> list[str]:
        """The metrics that training, or evaluations, have given so far."""
        given = {key for line in self.history.figures(kind) for key in line.figures}
        return [figure.key for figure in self.history.metrics_of_tasks if figure.key in given]

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
        """Shows progress and curves until the run ends. Interrupting detaches; the run continues.

        Returns:
            As `wait`; None when it was interrupted.

        Raises:
            RunError: as `wait`.
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
        deadline = monotonic() + (timeout if timeout is not None else 1e18)
        while self._poll() not in ENDED:
            if monotonic() > deadline:
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

    def _series(self, kind: type[Measured], *names: str) -> dict[str, list]:
        lines = self.history.figures(kind)
        steps = {"step": [line.step for line in lines]}
        return steps | {name: [line.figures.get(name) for line in lines] for name in names}

    def _outcome(self) -> dict[str, Any]:
        if self.state == "finished":
            return self.history.result
        if self.state == "failed" and self.error:
            raise self.error
        what = HOW_IT_ENDED.get(self.state, f"the run {self.state}")
        do = "train the same config again: it resumes from its last checkpoint"
        raise RunError(what, where=self.job or self.name, do=do)
