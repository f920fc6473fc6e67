"""A run on a cluster, in the hands of somebody who sits elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import PurePosixPath
from time import monotonic, sleep
from typing import Any

import numpy as np

from raytrec.client.items import Items
from raytrec.client.points import ENDED, Points
from raytrec.common.errors import RunError

HOW_IT_ENDED = {
    "stopped": "the run was stopped; its state is saved",
    "interrupted": "the run was interrupted: its driver ended without a word",
}


class Run:
    """A run; `Cluster.train` and `Cluster.run` give it.

    Args:
        way: ByClient or ByJob, how the cluster is reached.
        handle: of the run, which the way has given.
        news: the last answer of `queries.news`.
    """

    def __init__(self, way: Any, handle: Any, news: dict[str, Any] | None = None):
        self._way, self._handle, self._points = way, handle, Points()
        if news:
            self._points.take(news if handle.counts_bytes else news | {"since": {}, "metrics": []})

    @property
    def folder(self) -> str:
        """The run's folder on the cluster."""
        return self._handle.folder()

    @property
    def name(self) -> str:
        """What the run is called."""
        return PurePosixPath(self.folder).name

    @property
    def job(self) -> str | None:
        """The id of the job that it is; None with ray://."""
        return getattr(self._handle, "job", None)

    def progress(self) -> dict[str, Any]:
        """How it stands: step, total, rows_per_s, the metrics of training, eta_s, state; None for what is not
        known yet.

        The state is starting, running, finished, stopped (saved), failed, or interrupted (its driver died).
        """
        if self._points.state not in ENDED:
            self._points.take(self._handle.news(self._points.since))
        return self._points.progress()

    def metrics(self) -> dict[str, dict[str, list]]:
        """The figures so far: "train" (step, rows_per_s, metrics) and "eval" (step, metrics).

        `pandas.DataFrame(run.metrics()["train"])` is a table of them. Over the job API this takes
        some seconds.
        """
        points = Points()
        points.take(self._ask("news", {}))
        return points.curves()

    def watch(self) -> dict[str, Any]:
        """Shows progress and curves until the run ends. Interrupting detaches; the run continues.

        Returns:
            As `wait`; None when it was interrupted.

        Raises:
            RunError: as `wait`.
        """
        from raytrec.client.live import display

        with display(self.name) as show:
            try:
                while self.progress()["state"] not in ENDED:
                    show(self._points)
                    sleep(self._handle.polls_s)
                self._complete()
                show(self._points)
            except KeyboardInterrupt:
                show.note("detached; the run continues: run.watch(), or run.stop()")
                return None
        return self._outcome()

    def wait(self, timeout: float | None = None) -> dict[str, Any]:
        """Waits for the end; the content of result.json.

        Args:
            timeout: seconds; None: as long as it takes.

        Raises:
            RunError: the run failed, with its own message; or it was stopped or interrupted, or is still on.
        """
        deadline = monotonic() + (timeout if timeout is not None else 1e18)
        while self.progress()["state"] not in ENDED:
            if monotonic() > deadline:
                raise RunError(f"the run is still on after {timeout} s", where=self.name, do="wait longer")
            sleep(self._handle.polls_s)
        self._complete()
        return self._outcome()

    def stop(self) -> None:
        """Asks the run to checkpoint and to end. The same `Cluster.train` again resumes it."""
        self._handle.stop()

    def logs(self) -> Iterator[str]:
        """What the run has said, in pieces of text; of a job, until its end."""
        return self._handle.logs()

    def report(self) -> Frame:
        """The run's report.html, for a notebook; its `text` is the page."""
        return Frame(self._ask("file", "report.html").decode())

    def pictures(self) -> Pictures:
        """The pictures of the report: name → PNG. A notebook shows them all."""
        return Pictures(self._ask("pictures"))

    def file(self, name: str) -> str:
        """A file of the run: config.yaml, schema.yaml, plan.json, result.json, error.txt."""
        return self._ask("file", name).decode()

    def evaluate(self, data: str, **options: Any) -> dict[str, Any]:
        """Evaluates the newest checkpoint on the cluster.

        Args:
            data: folder or file of Parquet, as the cluster sees it.
            options: workers, batch_size; default: as in training. overrides: such as data.on_error=skip.

        Returns:
            eval.NAME of each metric, eval.rows and more.
        """
        return self._way.evaluate(self.folder, data, options)

    def predict(self, data: str, out: str, **options: Any) -> dict[str, Any]:
        """Predicts every row of some Parquet on the cluster, with the newest checkpoint: for each file one of
        the same name. Interrupted, it continues when it is called again.

        Args:
            data: folder or file of Parquet, as the cluster sees it.
            out: the folder to write to, likewise.
            options: columns, a list of those to keep (default: data.reserve_columns); workers; checkpoint, a
                step or "best"; overrides: such as data.on_error=skip.

        Returns:
            predict.rows, predict.files and more (raytrec.prediction.predict.Predictions).
        """
        return self._way.predict(self.folder, data, out, options)

    def index(self, items: str, out: str, **options: Any) -> dict[str, Any]:
        """Writes an index of items on the cluster, with the newest checkpoint; `raytrec.load_index` reads it,
        where its folder can be reached. Interrupted, it continues when it is called again.

        Args:
            items: folder or file of Parquet with one row for each item, as the cluster sees it.
            out: the folder to write to, likewise.
            options: item, columns, faiss, queries, workers, checkpoint, overrides: as `raytrec index`.

        Returns:
            index.items, index.recall@10 and more (raytrec.retrieval.build.Indexed).
        """
        return self._way.index(self.folder, items, out, options)

    def tables(self) -> dict[str, list[int]]:
        """Embedding tables of the newest checkpoint: name → [rows, dim]."""
        return self._ask("tables")["tables"]

    def rows(self, table: str, numbers: Sequence[int]) -> np.ndarray:
        """Rows of a table: float32 [len(numbers), dim]."""
        return self._ask("rows", table, [int(number) for number in numbers])

    def items(self, table: str, titles: Mapping[int, str] | None = None) -> Items:
        """A table whose rows have titles.

        Args:
            table: its name.
            titles: row → title; rows may be missing.
        """
        return Items(self, table, {} if titles is None else titles)

    def nearest(self, table: str, row: int, k: int = 10) -> dict[str, list]:
        """The rows nearest to a row by cosine, in the newest checkpoint: "rows" and "cosines"."""
        return self._ask("nearest", table, int(row), k)

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self._points.state}>"

    def _ask(self, call: str, *arguments: Any) -> Any:
        return self._way.call(call, self.folder, *arguments)

    def _complete(self) -> None:
        """The figures as the run's files have them, where only its log has been read."""
        if self._points.result is None and self._points.state == "finished":
            self._points = Points()
            self._points.take(self._ask("news", {}))

    def _outcome(self) -> dict[str, Any]:
        state = self._points.state
        if state == "finished":
            return self._points.result
        if state == "failed" and self._points.error:
            raise RunError(**self._points.error)
        what = HOW_IT_ENDED.get(state, f"the run {state}")
        raise RunError(
            what, where=self.name, do="train the same config again: it resumes from its last checkpoint"
        )


class Pictures(dict):
    """Name → PNG."""

    def __repr__(self) -> str:
        return f"<Pictures {', '.join(self)}>"

    def _repr_html_(self) -> str:
        from base64 import b64encode

        style = "width:420px;max-width:100%;margin:4px;background:white"
        data = {
            escape(name): f"data:image/png;base64,{b64encode(png).decode()}" for name, png in self.items()
        }
        tags = (f'<img alt="{name}" style="{style}" src="{url}">' for name, url in data.items())
        return f'<div style="display:flex;flex-wrap:wrap;align-items:flex-start">{"".join(tags)}</div>'


class Frame:
    """A page within a notebook, which cannot reach the notebook: a sandbox of its own.

    Attributes:
        text: the page.
    """

    def __init__(self, text: str):
        self.text = text

    def _repr_html_(self) -> str:
        return (
            '<iframe sandbox="allow-scripts" style="width:100%;height:720px;border:1px solid #8884" '
            f'srcdoc="{escape(self.text)}"></iframe>'
        )
