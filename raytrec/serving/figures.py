"""What replicas count: /metrics of all of them, and the course of the last hour."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from math import ceil, inf
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raytrec.serving.versions import Loaded

# Bounds of the histogram of times: 0.5 ms to 7 s, close enough for percentiles.
SECONDS = (5e-4, *(m * 10**e for e in (-3, -2, -1, 0) for m in (1, 1.5, 2, 3, 5, 7)))
BATCH_ROWS = tuple(2**e for e in range(14))
SCORED = ("/predict", "/vectors")  # paths whose requests the course shows
STEP_S, STEPS, POINTS = 5.0, 720, 180  # of the course, which is an hour; a picture has so many points


class Figures:
    """What a process counts."""

    def __init__(self) -> None:
        self._registry = of = CollectorRegistry()
        self.requests = Counter(
            "raytrec_requests", "Requests by path and status.", ["path", "status"], registry=of
        )
        self.rows = Counter("raytrec_rows", "Rows that were scored.", registry=of)
        self.logged = Counter("raytrec_logged_rows", "Rows written to the request log.", registry=of)
        self.not_logged = Counter("raytrec_log_dropped_rows", "Rows that the log lost.", registry=of)
        self.seconds = Histogram(
            "raytrec_seconds", "Time of a request.", ["path"], buckets=SECONDS, registry=of
        )
        self.batch_rows = Histogram(
            "raytrec_batch_rows", "Rows that were scored together.", buckets=BATCH_ROWS, registry=of
        )

    def collect(self, about: Mapping[str, Any], waiting: int) -> list[Metric]:
        """What was counted until now, and what is.

        Args:
            about: the model that answers, of about_model. waiting: rows that wait.
        """
        version = GaugeMetricFamily("raytrec_version", "1 of the version that answers.", labels=["version"])
        version.add_metric([about["version"]], 1)
        age = GaugeMetricFamily(
            "raytrec_model_age_seconds", "Time since the export was made.", about["age_s"]
        )
        waits = GaugeMetricFamily("raytrec_waiting_rows", "Rows that wait to be scored.", waiting)
        counted = list(self._registry.collect())
        for metric in counted:
            metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
        return [*counted, waits, version, age]


def about_model(now: Loaded) -> dict[str, Any]:
    """Version, run and step of a model; when it was exported, and how long ago."""
    manifest = now.scorer.manifest
    age = (datetime.now(UTC) - datetime.fromisoformat(manifest.made)).total_seconds()
    source = manifest.source
    return {
        "version": now.version,
        "run": source.run,
        "step": source.step,
        "made": manifest.made,
        "age_s": max(0.0, age),
    }


class _Merged(Collector):
    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def write_metrics(of_replicas: Mapping[str, Collection[Metric]]) -> bytes:
    """The text of /metrics: the series of all replicas.

    Each has a label `replica`, as Prometheus expects it of processes: a counter only rises, and ends with its
    replica, so sum(rate(…)) is right. Sums made here would fall when a replica ends, or when the coordinator
    that remembered it is started again, and rate() takes every fall for a new beginning.
    """
    merged: dict[str, Metric] = {}
    for replica, metrics in of_replicas.items():
        for metric in metrics:
            into = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            into.samples += [s._replace(labels=s.labels | {"replica": replica}) for s in metric.samples]
    replicas = GaugeMetricFamily("raytrec_replicas", "Replicas of the service.", len(of_replicas))
    return generate_latest(_Merged([*merged.values(), replicas]))


# ("requests", status), ("seconds", bound of a bucket) or ("rows", "") → how many.
Tally = Mapping[tuple[str, str], float]


def counts_of(metrics: Iterable[Metric]) -> Tally:
    """What the course shows, of a replica's metrics since it began."""
    found: dict[tuple[str, str], float] = defaultdict(float)
    for sample in (each for metric in metrics for each in metric.samples):
        if sample.name == "raytrec_rows_total":
            found["rows", ""] += sample.value
        elif sample.labels.get("path") in SCORED:
            if sample.name == "raytrec_requests_total":
                found["requests", sample.labels["status"]] += sample.value
            elif sample.name == "raytrec_seconds_bucket":
                found["seconds", sample.labels["le"]] += sample.value
    return found


class Course:
    """What all replicas did in each step of the last hour. Times are those of one monotonic clock."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[tuple[str, str], float]] = {}

    def add(self, began: float, ended: float, counts: Tally) -> None:
        """Spreads what a replica did between two reports over the steps in between."""
        began = max(began, ended - STEPS * STEP_S)
        for step in range(int(began // STEP_S), int(ended // STEP_S) + 1):
            inside = min(ended, (step + 1) * STEP_S) - max(began, step * STEP_S)
            if inside > 0:
                into = self._steps.setdefault(step, defaultdict(float))
                for key, count in counts.items():
                    into[key] += count * inside / (ended - began)
        for step in [each for each in self._steps if each < ended // STEP_S - STEPS]:
            del self._steps[step]

    def read(self, until: float, span_s: float) -> dict[str, Any]:
        """Figures of points in time, evenly apart.

        Returns:
            step_s: between points; requests_per_s: by status; rows_per_s; p50_s and p99_s: None where
            none came. The last point ends at `ended`, at most `until`.
        """
        width = max(1, ceil(span_s / STEP_S / POINTS))  # steps in a point
        end = int(until // STEP_S) // width * width  # so that points stay what they are as time goes on
        first = max(end - ceil(span_s / STEP_S), min(self._steps, default=end) // width * width)
        points = [self._sum(range(step, step + width)) for step in range(first, end, width)]
        seconds = width * STEP_S
        statuses = sorted({status for point in points for kind, status in point if kind == "requests"})
        return {
            "ended": end * STEP_S,
            "step_s": seconds,
            "requests_per_s": {
                status: [point["requests", status] / seconds for point in points] for status in statuses
            },
            "rows_per_s": [point["rows", ""] / seconds for point in points],
            "p50_s": [percentile(point, 0.5) for point in points],
            "p99_s": [percentile(point, 0.99) for point in points],
        }

    def _sum(self, steps: Iterable[int]) -> Tally:
        total: dict[tuple[str, str], float] = defaultdict(float)
        for step in steps:
            for key, count in self._steps.get(step, {}).items():
                total[key] += count
        return total


def percentile(counts: Tally, share: float) -> float | None:
    """Seconds within which this share of requests was answered, as Prometheus' histogram_quantile estimates
    it from buckets; None: there was none."""
    buckets = sorted((float(bound), count) for (kind, bound), count in counts.items() if kind == "seconds")
    wanted = share * buckets[-1][1] if buckets else 0.0
    low, below = 0.0, 0.0
    for bound, count in buckets:
        if count >= wanted > 0:
            return low if bound == inf else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return None
