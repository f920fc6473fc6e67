"""What replicas count, added up: /metrics, the course of an hour, percentiles. No Ray."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from raytrec.serving.figures import (
    SECONDS,
    STEP_S,
    STEPS,
    Course,
    Figures,
    counts_of,
    percentile,
    write_metrics,
)

ABOUT = {"version": "films-9", "age_s": 60.0}


def figures(requests, seconds=0.004, path="/predict"):
    made = Figures()
    for status, count in requests.items():
        made.requests.labels(path, status).inc(count)
        for _ in range(count):
            made.seconds.labels(path).observe(seconds)
    made.rows.inc(3)
    made.batch_rows.observe(3)
    return made


def test_metrics_have_the_series_of_every_replica():
    of = {"a": figures({200: 3, 400: 1}).collect(ABOUT, 7), "b": figures({200: 2}).collect(ABOUT, 0)}
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(write_metrics(of).decode())
        for sample in family.samples
    }

    def value(name, **labels):
        return found[(name, *sorted(labels.items()))]

    assert value("raytrec_requests_total", replica="a", path="/predict", status="200") == 3
    assert value("raytrec_requests_total", replica="b", path="/predict", status="200") == 2
    assert value("raytrec_seconds_bucket", replica="a", path="/predict", le="0.005") == 4
    assert value("raytrec_seconds_bucket", replica="a", path="/predict", le="0.003") == 0
    assert value("raytrec_batch_rows_bucket", replica="b", le="4.0") == 1
    assert value("raytrec_rows_total", replica="b") == 3
    assert value("raytrec_waiting_rows", replica="a") == 7
    assert value("raytrec_version", replica="a", version="films-9") == 1
    assert value("raytrec_model_age_seconds", replica="a") == 60
    assert value("raytrec_replicas") == 2


def test_the_course_counts_each_request_once_wherever_steps_begin():
    made, course, at, before = Figures(), Course(), 1003.0, counts_of([])
    for requests, span in ((10, 5.0), (0, 2.5), (40, 7.0), (6, 0.5), (4, 100.0)):
        made.requests.labels("/predict", 200).inc(requests)
        made.requests.labels("/metrics", 200).inc(99)
        made.rows.inc(2 * requests)
        after = counts_of(made.collect(ABOUT, 0))
        course.add(at, at + span, {key: count - before.get(key, 0) for key, count in after.items()})
        at, before = at + span, after
    read = course.read(at + STEP_S, 900)
    assert sum(read["requests_per_s"]["200"]) * read["step_s"] == pytest.approx(60)
    assert sum(read["rows_per_s"]) * read["step_s"] == pytest.approx(120)
    assert read["requests_per_s"]["200"][0] == pytest.approx(4 / STEP_S)  # 2 of the first 5 s are in its step
    hour = course.read(at + 4 * STEP_S, 3600)
    assert hour["step_s"] == 4 * STEP_S and hour["ended"] % hour["step_s"] == 0
    assert sum(hour["requests_per_s"]["200"]) * hour["step_s"] == pytest.approx(60)


def test_the_course_keeps_an_hour_alone():
    course = Course()
    for second in range(0, 3 * 3600, 10):
        course.add(second, second + 10, {("requests", "200"): 10})
    course.add(0, 3 * 3600, {("requests", "200"): 0})
    assert len(course._steps) <= STEPS + 1
    read = course.read(3 * 3600, 3600)
    assert read["ended"] == 3 * 3600 and read["requests_per_s"]["200"] == pytest.approx([1.0] * 180)


@pytest.mark.parametrize("share, wanted", [(0.5, 0.0045), (0.99, 0.06)])
def test_percentiles_are_those_of_the_requests_to_within_a_bucket(share, wanted):
    made = Figures()
    for place in range(1000):
        made.seconds.labels("/predict").observe(0.0045 if place < 950 else 0.06)
    found = percentile(counts_of(made.collect(ABOUT, 0)), share)
    low = max(bound for bound in SECONDS if bound < wanted)
    assert low < found <= min(bound for bound in SECONDS if bound >= wanted)


def test_percentiles_of_nothing_and_of_what_is_longer_than_all_bounds():
    assert percentile({}, 0.5) is None
    assert percentile(counts_of(Figures().collect(ABOUT, 0)), 0.5) is None
    assert percentile(counts_of(figures({200: 1}, seconds=60).collect(ABOUT, 0)), 0.99) == SECONDS[-1]
