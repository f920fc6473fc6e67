"""Metrics of replicas, and the text of /metrics for all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:  # the coordinator does not need torch
    from raytrec.scoring.scorer import Scorer

# Bucket bounds of time histograms in seconds, 0.5 ms to 7 s, dense enough for percentiles.
SECONDS = (5e-4, *(m * 10**e for e in (-3, -2, -1, 0) for m in (1, 1.5, 2, 3, 5, 7)))
BATCH_ROWS = tuple(2**e for e in range(14))  # bucket bounds of the histogram of batch sizes


class ReplicaMetrics:
    """Prometheus metrics of a replica's process, in `registry`. The label `version` is the version of an export."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.requests = counter("raytrec_requests", "Requests by path and status.", ["path", "status", "version"])
        self.rows = counter("raytrec_rows", "Scored rows.", ["version"])
        self.logged = counter("raytrec_logged_rows", "Rows written to the request log.")
        self.not_logged = counter("raytrec_log_dropped_rows", "Rows that the request log dropped.")
        self.seconds = histogram("raytrec_seconds", "Duration of a request.", ["path", "version"], buckets=SECONDS)
        self.batch_rows = histogram("raytrec_batch_rows", "Rows per scored batch.", buckets=BATCH_ROWS)
        self.shadow_requests = counter("raytrec_shadow_requests", "Requests in shadow mode.", ["version", "outcome"])
        self.shadow_rows = counter("raytrec_shadow_rows", "Rows scored in shadow mode.", ["version"])
        self.shadow_seconds = histogram("raytrec_shadow_seconds", "Duration of scoring.", ["version"], buckets=SECONDS)
        self.shadow_difference = counter("raytrec_shadow_difference", "Sum of |score - served|.", ["version", "column"])
        # Only services with table shards have series of the following metrics.
        self.table_seconds = histogram("raytrec_table_seconds", "Duration of a lookup.", ["outcome"], buckets=SECONDS)
        self.table_rows = counter("raytrec_table_rows", "Rows looked up in the cache or in shards.", ["source"])
        self.missing_shards = counter("raytrec_missing_shards", "Lookups without a response.", ["shard"])
        self._by_version = [self.requests, self.rows, self.seconds]
        self._by_version += [self.shadow_requests, self.shadow_rows, self.shadow_seconds, self.shadow_difference]

    def keep_versions(self, versions: Collection[str]) -> None:
        """Remove the series of all versions except `versions`."""
        for family in self._by_version:
            labels = {sample.labels["version"] for metric in family.collect() for sample in metric.samples}
            for version in labels.difference(versions):
                family.remove_by_labels({"version": version})

    def collect(self, about: Mapping[str, Any], waiting: int) -> list[Metric]:
        """Return all metrics of the replica.

        Args:
            about: Result of describe_model for the current model.
            waiting: Batcher.waiting of the replica.
        """
        version = GaugeMetricFamily("raytrec_version", "1 for the current version.", labels=["version"])
        version.add_metric([about["version"]], 1)
        age = GaugeMetricFamily("raytrec_model_age_seconds", "Seconds since the export was created.", about["age_s"])
        waiting_rows = GaugeMetricFamily("raytrec_waiting_rows", "Rows waiting or being scored.", waiting)
        counters = list(self.registry.collect())
        for metric in counters:
            metric.samples = [each for each in metric.samples if not each.name.endswith("_created")]
        return [*counters, waiting_rows, version, age]


def describe_model(scorer: Scorer) -> dict[str, Any]:
    """Return a dict with version, run and step of a model, made (ISO time of its export) and age_s (seconds since)."""
    manifest = scorer.manifest
    age = (datetime.now(UTC) - datetime.fromisoformat(manifest.made)).total_seconds()
    return {
        "version": scorer.version,
        "run": manifest.source.run,
        "step": scorer.step,
        "made": manifest.made,
        "age_s": max(0.0, age),
    }


class _MergedCollector(Collector):
    def __init__(self, metrics: Iterable[Metric]):
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def write_metrics(metrics_by_replica: Mapping[str, Collection[Metric]]) -> bytes:
    """Return the text of /metrics with the series of all replicas.

    Each series has a label `replica`, as Prometheus expects for processes: a counter only rises and ends with
    its replica, so sum(rate(…)) is correct. Sums over replicas would fall when a replica ends, or when the
    coordinator restarts. rate() treats every fall as a restart of the counter.
    """
    merged: dict[str, Metric] = {}
    for replica, metrics in metrics_by_replica.items():
        for metric in metrics:
            family = merged.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            family.samples += [s._replace(labels=s.labels | {"replica": replica}) for s in metric.samples]
    replicas = GaugeMetricFamily("raytrec_replicas", "Replicas of the service.", len(metrics_by_replica))
    return generate_latest(_MergedCollector([*merged.values(), replicas]))
