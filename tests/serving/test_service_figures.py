"""Counters of replicas in the text of /metrics, without Ray."""

from raytrec.serving.replica_metrics import ReplicaMetrics, write_metrics

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
    lines = write_metrics(of).decode().splitlines()
    for line in (
        'raytrec_requests_total{path="/predict",replica="a",status="200",version="films-9"} 3.0',
        'raytrec_requests_total{path="/predict",replica="b",status="200",version="films-9"} 2.0',
        'raytrec_seconds_bucket{le="0.005",path="/predict",replica="a",version="films-9"} 4.0',
        'raytrec_seconds_bucket{le="0.003",path="/predict",replica="a",version="films-9"} 0.0',
        'raytrec_batch_rows_bucket{le="4.0",replica="b"} 1.0',
        'raytrec_rows_total{replica="b",version="films-9"} 3.0',
        'raytrec_waiting_rows{replica="a"} 7.0',
        'raytrec_version{replica="a",version="films-9"} 1.0',
        'raytrec_model_age_seconds{replica="a"} 60.0',
        "raytrec_replicas 2.0",
    ):
        assert line in lines
