"""What is known of a run from outside: its figures so far, and how it stands."""

from __future__ import annotations

from contextlib import suppress
from time import time
from typing import Any

from raytrec.common.messages import EVENTS, METRICS, from_line
from raytrec.metrics.selection import Figure, figures_of
from raytrec.tracking.run_folder import History

ENDED = ("finished", "stopped", "failed", "interrupted")


class Points:
    """Collects what `news` of a run says.

    Attributes:
        state: starting, running, finished, stopped, failed or interrupted.
        result: the content of result.json, once it is there.
        error: the parts of the error of a run that failed.
        fresh: whether figures have come since `drawn` was called.
    """

    def __init__(self) -> None:
        self.state, self.result, self.error = "starting", None, None
        self.since: dict[str, int] = {}
        self.fresh, self._total, self._events = False, 0, []
        self._lines: dict[str, list[dict[str, Any]]] = {}
        self._first: tuple[float, int] | None = None  # when, and at which step, looking began

    def take(self, news: dict[str, Any]) -> None:
        """Takes over what is new."""
        for line in news.get("metrics", []):
            series = self._lines.setdefault(line["kind"], [])
            while series and series[-1]["step"] >= line["step"]:  # trained again after a restart
                series.pop()
            series.append(line)
            self.fresh = True
        self._events += news.get("events", [])
        starts = [event for event in self._events if event.get("event") == "start"]
        self._total = starts[-1]["total"] if starts else self._total
        self.since, self.state = news["since"], news["state"]
        self.result, self.error = news.get("result"), news.get("error")
        if self._first is None and self.step:
            self._first = time(), self.step

    @property
    def step(self) -> int:
        """The last step that has been reported."""
        return max((series[-1]["step"] for series in self._lines.values()), default=0)

    def progress(self) -> dict[str, Any]:
        """step, total, rows_per_s, metrics of training, state and eta_s; None for what is not known yet."""
        last = (self._lines.get("train") or [{}])[-1]
        figures = {name: last.get(name) for name in ("rows_per_s", *self.keys("train"))}
        known = {"step": self.step, "total": self._total or None, **figures, "state": self.state}
        return known | {"eta_s": self._left() if self.state == "running" else None}

    def curves(self) -> dict[str, dict[str, list]]:
        """kind → figure → its values, all of a kind equally long."""
        names = {"train": ("step", "rows_per_s", *self.keys("train")), "eval": ("step", *self.keys("eval"))}
        return {
            kind: {name: [line.get(name) for line in self._lines.get(kind, [])] for name in names[kind]}
            for kind in names
        }

    def keys(self, kind: str) -> list[str]:
        """The metrics that training, or an evaluation, has given so far."""
        given = {key for line in self._lines.get(kind, []) for key in line}
        return [figure.key for figure in self.figures if figure.key in given]

    @property
    def figures(self) -> list[Figure]:
        """The metrics of the run's tasks, as it has described them; until then raytrec's own."""
        return figures_of(*reversed([event for event in self._events if event.get("event") == "start"]))

    def evaluation(self) -> dict[str, Any]:
        """The figures of the last evaluation; empty before the first."""
        return (self._lines.get("final") or self._lines.get("eval") or [{}])[-1]

    def history(self) -> History:
        """As pictures of a report take it."""
        metrics = [line for series in self._lines.values() for line in series]
        run = History()
        for file, lines in ((EVENTS, self._events), (METRICS, metrics)):
            for line in lines:
                with suppress(ValueError):
                    run.add(from_line(file, line))
        return run

    def _left(self) -> float | None:
        """Seconds, at the speed since somebody has looked."""
        if self._first is None or not self._total or self.step <= self._first[1]:
            return None
        return (time() - self._first[0]) / (self.step - self._first[1]) * (self._total - self.step)
