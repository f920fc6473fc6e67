"""Figures of a run on Ray's dashboard and for Prometheus."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from math import isfinite
from threading import Event, Lock, Thread
from typing import Any

# Ray 2.60 forgets a gauge that has not been set for two of its reports (metrics_report_interval_ms, 10 s).
REPEAT_S = 5.0


class Gauges:
    """Figures of one run as gauges of Ray's node, which Ray exports to Prometheus and its dashboard shows.

    They keep their last value until `close`, however rarely they are set: a thread repeats them.

    Args:
        run: name of the run, the gauges' only tag.

    Example:
        >>> gauges = Gauges("dlrm-1")
        >>> gauges.set({"step": 20, "rows_per_s": 25_000.0})  # exported as ray_raytrec_step{run="dlrm-1"} 20
    """

    def __init__(self, run: str):
        self._run = run
        self._gauges: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._lock, self._over = Lock(), Event()
        self._thread: Thread | None = None

    def set(self, figures: Mapping[str, float | None]) -> None:
        """Sets raytrec_NAME for each figure; those that are None or not finite stay as they were.

        Without a Ray that runs in this process, nothing happens.
        """
        if not _ray_runs():
            return
        with self._lock:
            self._values |= {
                name: value
                for name, value in figures.items()
                if isinstance(value, (int, float)) and isfinite(value)
            }
        self._record()
        if self._thread is None:
            self._thread = Thread(target=self._repeat, name="gauges", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ends the repeating: within half a minute Ray shows the run no longer."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _repeat(self) -> None:
        while not self._over.wait(REPEAT_S):
            if _ray_runs():
                self._record()

    def _record(self) -> None:
        with self._lock:
            for name, value in self._values.items():
                self._gauge(name).set(value, {"run": self._run})

    def _gauge(self, name: str) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            metric = "raytrec_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            self._gauges[name] = Gauge(metric, f"{name} of a raytrec run", tag_keys=("run",))
        return self._gauges[name]


def _ray_runs() -> bool:
    """Whether this process has started or joined a Ray; does not import it."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()
