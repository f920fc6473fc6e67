"""Figures of a run on Ray's dashboard and for Prometheus."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from math import isfinite
from typing import Any


class Gauges:
    """Figures of one run as gauges of Ray's node, which Ray exports to Prometheus and its dashboard shows.

    Args:
        run: name of the run, the gauges' only tag.

    Example:
        >>> gauges = Gauges("dlrm-1")
        >>> gauges.set({"step": 20, "rows_per_s": 25_000.0})  # exported as ray_raytrec_step{run="dlrm-1"} 20
    """

    def __init__(self, run: str):
        self._run = run
        self._gauges: dict[str, Any] = {}

    def set(self, figures: Mapping[str, float | None]) -> None:
        """Sets raytrec_NAME for each figure; those that are None or not finite stay as they were.

        Without a Ray that runs in this process, nothing happens.
        """
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        for name, value in figures.items():
            if isinstance(value, (int, float)) and isfinite(value):
                self._gauge(name).set(value, {"run": self._run})

    def _gauge(self, name: str) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            metric = "raytrec_" + re.sub(r"\W", "_", name, flags=re.ASCII)
            self._gauges[name] = Gauge(metric, f"{name} of a raytrec run", tag_keys=("run",))
        return self._gauges[name]
