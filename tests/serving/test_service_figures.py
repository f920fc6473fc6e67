"""Counters of replicas in the text of /metrics, without Ray."""

from prometheus_client.parser import text_string_to_metric_families

from raytrec.serving.replica_state import ReplicaMetrics, write_metrics

MODEL_INFO = {"version": "films-9", "age_s": 60.0}


def make_replica_figures(requests, seconds=0.004, path="/predict"):
    made = ReplicaMetrics()
    for status, count in requests.items():
        made.requests.labels(path, status, "films-9").inc(count)
        for _ in range(count):
            made.seconds.labels(path, "films-9").observe(seconds)
    made.rows.labels("films-9").inc(3)
    made.batch_rows.observe(3)
    return made


def test_metrics_have_the_series_of_every_replica():
    of = {
        "a": make_replica_figures({200: 3, 400: 1}).collect(MODEL_INFO, 7),
        "b": make_replica_figures({200: 2}).collect(MODEL_INFO, 0),
    }
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(write_metrics(of).decode())
        for sample in family.samples
    }

    def value(name, **labels):
        return found[(name, *sorted(labels.items()))]

    of_version = {"version": "films-9"}

    assert value("raytrec_requests_total", replica="a", **of_version, path="/predict", status="200") == 3
    assert value("raytrec_requests_total", replica="b", **of_version, path="/predict", status="200") == 2
    assert value("raytrec_seconds_bucket", replica="a", **of_version, path="/predict", le="0.005") == 4
    assert value("raytrec_seconds_bucket", replica="a", **of_version, path="/predict", le="0.003") == 0
    assert value("raytrec_batch_rows_bucket", replica="b", le="4.0") == 1
    assert value("raytrec_rows_total", replica="b", **of_version) == 3
    assert value("raytrec_waiting_rows", replica="a") == 7
    assert value("raytrec_version", replica="a", version="films-9") == 1
    assert value("raytrec_model_age_seconds", replica="a") == 60
    assert value("raytrec_replicas") == 2
