"""MLflow and the report show the same figures for the same messages."""

from math import isnan
from random import Random

import pytest
import recorded

from raytrec.common import messages
from raytrec.driver.recorder import Record
from raytrec.report import sheets
from raytrec.tracking.mlflow_records import RecordReader
from raytrec.tracking.run_folder import RunFolder

TABLES = ("user", "item", "city")
STEPS = (100, 200, 300)


class DeliveredFigures:
    """Figures of a run folder that are delivered to MLflow."""

    def __init__(self, folder):
        self.figures, feed = {}, RecordReader(folder)
        while batch := feed.next_batch():
            for record in batch.records:
                self.figures.setdefault(record.step, {}).update(record.figures)
            feed.mark_batch_written()
        assert (feed.dropped, feed.waiting) == (0, 0)


def make_random_rank_line(rank, step, random):
    """Return a line of a rank with random rows, lookups and figures."""
    found = recorded.rank_line([], rank, 2, step)
    for name in TABLES:
        shard = recorded.shard_statistics(1, 1)
        shard |= {key: random.uniform(0.1, 0.9) for key, value in shard.items() if isinstance(value, float)}
        shard |= {key: random.uniform(0, 1) for key in shard if shard[key] is None}
        shard |= {
            key: random.randrange(10, 10**6) for key in ("rows", "lookups", "lookup_bytes", "read_ids", "touched_rows")
        }
        if name == "city":  # one rank has no figures of this table
            shard |= {key: None for key in ("unique_ratio", "gradient_norm", "touched_rows") if rank}
        found["tables"][name] = shard | {"replicated": name == "item"}
    found["system"] |= {"gpu_percent": 40.0 + rank, "gpu_memory_bytes": 2**30, "network_sent_bytes_per_s": 1e6}
    return found


@pytest.fixture(scope="module")
def delivered_and_report(tmp_path_factory):
    """Return the figures delivered to MLflow and the run as the report reads it."""
    folder, random = tmp_path_factory.mktemp("same"), Random(0)
    said: list[str] = []
    record = Record(folder, said.append)
    plan = [{"table": t, "ranks": [0, 1]} for t in TABLES]
    record.store_message(messages.Start(step=0, workers=2, total=300, plan=plan))
    for step in STEPS:
        figures = {"logloss": random.random(), "ne": random.random(), "rows_per_s": random.random()}
        record.store_message(messages.Train(step=step, figures=figures))
        if step < 300:  # the last evaluation is in the result
            record.store_message(messages.Eval(step=step, figures={**figures, "auc": random.random()}))
        record.store_message(
            messages.Outcome(check="parity", step=step, passed=step != 200, figure=random.random(), limit=1.0, text="")
        )
        for rank in (0, 1):
            record.store_message(messages.RankLine(**make_random_rank_line(rank, step, random)))
    assert record.result({"train.steps": 300, "eval.auc": 0.75, "eval.ne": 0.5}, None) is None
    record.close()
    assert not [text for text in said if "lacks" in text]
    return DeliveredFigures(folder), RunFolder.read(folder)


def figures_are_equal(one, other):
    """Return True if two figures are equal; None equals NaN."""
    one, other = (float("nan") if value is None else value for value in (one, other))
    return one == pytest.approx(other, rel=1e-12, nan_ok=True)


TABLE_METRIC_KEYS = {
    "distinct ids": "unique_ratio",
    "never trained": "dead_share",
    "row norm, median": "row_norm_p50",
    "row norm, max": "row_norm_max",
    "max |w|": "max_abs",
    "gradient norm": "gradient_norm",
    "update norm": "update_norm",
    "state norm": "state_norm",
    "ids changed": "changed_share",
    "cache hits": "cache_hit_rate",
    "collisions": "collision_rate",
    "rows with an id": "occupancy",
    "ids admitted": "admitted_ids",
    "ids evicted": "evicted_ids",
    "fallback share": "fallback_share",
    "steps since last use": "id_age",
}


def test_report_and_mlflow_agree_on_tables(delivered_and_report):
    kept, history = delivered_and_report
    sheet = sheets.build_table_sheet(history)
    for row in sheet.rows:
        cells = dict(zip(sheet.columns, row, strict=True))
        name = cells["table"].text
        for column, key in TABLE_METRIC_KEYS.items():
            assert figures_are_equal(cells[column].value, kept.figures[300][f"watch/table/{name}/{key}"]), (
                name,
                column,
            )
        held = [kept.figures[300][f"watch/table/{name}/{key}"] for key in ("weight_bytes", "state_bytes")]
        assert figures_are_equal(cells["memory"].value, sum(held))
        load = [sum(kept.figures[s][f"watch/table/{t}/lookup_bytes"] for s in STEPS) for t in (name, *TABLES)]
        assert figures_are_equal(cells["lookups"].value, load[0] / sum(load[1:]))


def test_report_and_mlflow_agree_on_ranks(delivered_and_report):
    kept, history = delivered_and_report
    sheet = sheets.ranks(history)
    looked = [sum(kept.figures[s][f"watch/rank/{rank}/lookup_bytes"] for s in STEPS[1:]) for rank in (0, 1)]
    for rank, row in enumerate(sheet.rows):
        cells = dict(zip(sheet.columns, row, strict=True))
        seen = {
            k.rpartition("/")[2]: v
            for k, v in kept.figures[300].items()
            if f"rank/{rank}/" in k or f"rank_{rank}/" in k
        }
        assert figures_are_equal(cells["ms per step"].value, seen["step_ms"])
        assert figures_are_equal(cells["data wait"].value, seen["data_ms"] / seen["step_ms"])
        assert figures_are_equal(cells["lookups"].value, looked[rank] / sum(looked))
        assert figures_are_equal(cells["process"].value, 1e6 * seen["process_memory_usage_megabytes"])
        assert figures_are_equal(cells["CPU"].value, seen["cpu_utilization_percentage"] / 100)
        assert figures_are_equal(cells["GPU"].value, seen["gpu_utilization_percentage"] / 100)
        assert figures_are_equal(cells["GPU memory"].value, 1e6 * seen["gpu_memory_usage_megabytes"])
        assert figures_are_equal(cells["host memory"].value, seen["system_memory_usage_percentage"] / 100)
        assert figures_are_equal(cells["sent/s"].value, 1e6 * seen["network_transmit_megabytes_per_s"])


def test_report_and_mlflow_agree_on_losses_checks_and_results(delivered_and_report):
    kept, history = delivered_and_report
    for measured in history.figures(messages.Train, messages.Eval):
        for key, value in measured.figures.items():
            assert figures_are_equal(kept.figures[measured.step][f"{measured.KIND}/{key}"], value)
    for check in history.checks:
        figures = kept.figures[check.step]
        assert figures["watch/check/parity"] == check.passed
        assert figures_are_equal(figures["watch/check/parity_figure"], check.figure)
    assert {k: kept.figures[300][k.replace(".", "/")] for k in history.result} == history.result
    assert not isnan(history.result["eval.auc"])
