"""The driver of `raytrec predict` with fake workers: refused settings, kept files and counters."""

import json
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import checkpoints
import numpy as np
import parquet
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from raytrec.checkpoint.files import get_step_folder
from raytrec.cli import app
from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError
from raytrec.common.processes import get_owner_name
from raytrec.config.run_config import load_config
from raytrec.prediction import predict as predicting
from raytrec.prediction.folder import Counts, PredictionFolder
from raytrec.prediction.inputs import cut_spans
from raytrec.prediction.predict import predict
from raytrec.prediction.worker import SpanWriter, group_by_file, join_parts


def save_checkpoint_index(root, step, auc, **changes):
    """Write the part of a checkpoint that the driver reads."""
    config = load_config(parquet.config_values("/data", root.parent) | changes, ["data.global_batch_size=16"])
    checkpoints.write_index_only(
        root,
        step,
        config=config.model_dump(by_alias=True, mode="json"),
        schema=parquet.SCHEMA_YAML.replace("user: {rows: 40, dim: 8}", HASHED_USER_TABLE),
        progress=checkpoints.progress_values(step, evaluation={"auc": auc}),
        evaluation={"auc": auc},
    )


HASHED_USER_TABLE = "user: {rows: 40, dim: 8, out_of_range: hash}"


@pytest.fixture
def run(tmp_path):
    """Return a run folder with checkpoints of steps 10 and 20. The first has the better AUC."""
    changes = {"checkpoint": {"best_metric": "auc"}, "run": {"dir": str(tmp_path / "run"), "name": "r"}}
    for step, auc in ((10, 0.8), (20, 0.7)):
        save_checkpoint_index(tmp_path / "run" / "checkpoints", step, auc, **changes)
    return tmp_path / "run"


@pytest.fixture
def data(tmp_path):
    """Write three files without labels, one of them without rows."""
    folder = parquet.write_split(tmp_path / "data" / "in", 500, 4, row_group=50)
    pq.write_table(parquet.make_tiny_table(1, 1).slice(0, 0), folder / "none.parquet")
    for path in folder.glob("*.parquet"):
        pq.write_table(pq.read_table(path).drop(["label"]), path, row_group_size=50)
    return folder


@pytest.fixture(autouse=True)
def fake_group(monkeypatch):
    """Replace the workers: record calls, write 0.5 for every row and fail after `stop_after` spans."""

    class Group(list):
        stop_after = None

        def __call__(self, worker, task, watch, *, restarts):
            (predictions,) = worker.args
            self.append((task.checkpoint, predictions))
            assert restarts and watch.console
            folder = PredictionFolder(predictions.out)
            names = folder.list_names()
            complete = folder.find_finished(predictions, names)
            spans = cut_spans(task.datasets["predict"], predictions.batch_rows, predictions.span_rows)
            todo = [s for s in spans if s.path not in complete and predictions.part_of(s) not in names]
            writer = SpanWriter(predictions, False)
            for span in todo[: self.stop_after]:
                scores = [np.full(span.rows, 0.5, np.float32) for _ in predictions.manifest.scores]
                counts = Counts(span.rows, 0, {"user": [1, span.rows]})
                writer.put(span, scores, np.ones(span.rows, bool), counts)
            writer.close()
            if self.stop_after is not None:
                raise RunError("the workers have died")
            for parts in group_by_file([s for s in spans if s.path not in complete]).values():
                join_parts(predictions, parts)
            return {"predicted": sum(s.rows for s in todo), "predict_s": 2.0, "world_size": 2}

    made = Group()
    monkeypatch.setattr(predicting, "run_group", made)
    monkeypatch.setattr(predicting, "open_session", lambda config: nullcontext())
    monkeypatch.setattr(predicting, "MIN_SPAN_ROWS", 60)
    return made


def read_score_files(out):
    return pa.concat_tables([pq.ParquetFile(path).read() for path in sorted(Path(out).glob("*.parquet"))])


def test_predict_command_writes_files_and_reports_metrics(run, data, tmp_path, fake_group):
    out = tmp_path / "out"
    words = ["predict", str(run), "--data", str(data), "--out", str(out), "--columns", "row,tags", "--json"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.exception
    figures = json.loads(said.stdout)
    names = "_predictions.json", "none.parquet", "part-0.parquet", "part-1.parquet"
    assert sorted(p.name for p in out.iterdir()) == [*names]
    table = read_score_files(out)
    assert table.column_names == ["row", "tags", "score"]
    assert table["row"].to_pylist() == list(range(500))
    assert table["tags"].to_pylist() == parquet.make_tiny_table(500, 4)["tags"].to_pylist()
    assert (figures["predict.rows"], figures["predict.files"]) == (500, 3)
    assert figures["predict.rows_per_s"] == 250.0
    assert (figures["predict.ids"], figures["predict.changed_ids"]) == (500, figures["changed"]["user"])
    assert figures["checkpoint"].endswith("step-0000000020")
    shown = CliRunner().invoke(app, words[:-1])
    assert "all rows were already predicted" in shown.stdout and "ids clamped or hashed" in shown.stdout
    assert len(fake_group) == 1


@pytest.mark.slow
def test_predict_keeps_written_spans_after_a_failure(run, data, tmp_path, fake_group):
    out, fake_group.stop_after = tmp_path / "out", 5
    with pytest.raises(RunError, match="died"):
        predict(run, data, out, columns=["row"])
    assert len(list(out.glob("_parts/*/*/*.parquet"))) == 5 and not list(out.glob("part-*.parquet"))
    none, fake_group.stop_after = (out / "none.parquet").stat().st_mtime_ns, None
    made = predict(run, data, out, columns=["row"])
    assert made.metrics["predict.rows"] == 500 and not (out / "_parts").exists()
    assert made.metrics["predict.rows_per_s"] == 25, "only one of six spans is left"
    assert (out / "none.parquet").stat().st_mtime_ns == none
    assert read_score_files(out)["row"].to_pylist() == list(range(500))
    (out / "part-0.parquet").write_bytes((out / "part-0.parquet").read_bytes()[:-9])
    assert predict(run, data, out, columns=["row"]).metrics["predict.rows_per_s"] == 125, "not rewritten"
    fake_group.stop_after = 0
    assert predict(run, data, out, columns=["row"]).metrics["predict.rows_per_s"] is None


def test_predict_removes_temporary_files_of_killed_writers(run, data, tmp_path, fake_group):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    gone = re.sub(r"\d+$", str(ended.pid), get_owner_name())
    out, fake_group.stop_after = tmp_path / "out", 2
    with pytest.raises(RunError, match="died"):
        predict(run, data, out, columns=["row"])
    left = [out / f"_parts/1.{gone}.tmp", out / f"_predictions.json.{gone}.tmp"]
    others = [out / f"_parts/1.{get_owner_name()}.tmp", out / "notes.tmp"]
    for path in left + others:
        path.touch()
    with pytest.raises(RunError, match="died"):
        predict(run, data, out, columns=["row"])
    assert [path.exists() for path in left + others] == [False, False, True, True]


def test_other_batch_sizes_discard_unfinished_parts(run, data, tmp_path, fake_group):
    out, fake_group.stop_after = tmp_path / "out", 2
    with pytest.raises(RunError, match="died"):
        predict(run, data, out)
    (before,) = out.glob("_parts/*")
    fake_group.stop_after = None
    assert predict(run, data, out, workers=5).metrics["predict.rows"] == 500
    assert fake_group[0][1].plan == before.name != fake_group[1][1].plan
    assert (fake_group[0][1].batch_rows, fake_group[1][1].batch_rows) == (8, 4)


@pytest.mark.slow
def test_predict_selects_the_checkpoint(run, data, tmp_path, fake_group):
    predict(run, data, tmp_path / "a")
    predict(run, data, tmp_path / "b", checkpoint="best")
    predict(run, data, tmp_path / "c", checkpoint=10)
    predict(get_step_folder(str(run / "checkpoints"), 10), data, tmp_path / "d")
    assert [checkpoint[-2:] for checkpoint, _ in fake_group] == ["20", "10", "10", "10"]


def test_predict_writes_columns_of_the_run_and_of_every_task(tmp_path, data, fake_group):
    tasks = [{"label": "label", "name": "buys"}, {"label": "label", "name": "looks", "loss": "mse"}]
    carry = parquet.config_values("/data", tmp_path / "run")["data"] | {"reserve_columns": ["row", "user"]}
    save_checkpoint_index(tmp_path / "run" / "checkpoints", 10, 0.5, data=carry, tasks=tasks)
    made = predict(tmp_path / "run", data, tmp_path / "out")
    assert made.columns == ["row", "user", "score_buys", "score_looks"] == read_score_files(made.path).column_names
    assert predict(tmp_path / "run", data, tmp_path / "none", columns=[""]).columns == made.columns[2:]


@pytest.mark.slow
def test_predict_refuses_invalid_settings(run, data, tmp_path):
    out = tmp_path / "out"
    predict(run, data, out, columns=["row"])

    def refused(kind, *says, place=run, data=data, out=out, **options):
        with pytest.raises(RaytrecError) as error:
            predict(place, data, out, **{"columns": ["row"], **options})
        assert isinstance(error.value, kind), error.value
        for text in says:
            assert text in str(error.value)

    refused(RunError, "no complete checkpoint in this folder", place=tmp_path)
    refused(RunError, "no checkpoint of step 7", "one of the steps 10, 20", checkpoint=7)
    refused(ConfigError, "'last' is not a checkpoint", checkpoint="last")
    refused(
        DataError, "column 'rwo' does not exist in the input; did you mean 'row'", out=tmp_path / "o", columns=["rwo"]
    )
    refused(ConfigError, "'row' is repeated", columns=["row", "row"])
    refused(ConfigError, "'score' conflicts with an output column", columns=["score"])
    refused(ConfigError, "into the folder of their input", out=data / "scores")
    refused(ConfigError, "into the folder of their input", data=data / "part-0.parquet", out=data)
    refused(ConfigError, "different carried columns (--columns): row", "choose another --out", columns=["row", "price"])
    refused(ConfigError, "contains predictions of checkpoint", "step-0000000020", checkpoint=10)
    refused(ConfigError, "tables.user.out_of_range=hash", overrides=["tables.user.out_of_range=clamp"])
    refused(ConfigError, "does not apply to a trained model", overrides=["model.top_mlp=[3]"])
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.csv").write_text("a")
    refused(DataError, "no Parquet files", data=tmp_path / "text")
    refused(ConfigError, "contains other files, such as a.csv", out=tmp_path / "text")
    other = parquet.write_split(tmp_path / "other", 500, 4)
    refused(ConfigError, f"predictions of other files, or with other transforms: {data}", data=other)
    with PredictionFolder(str(out)).hold():
        refused(RunError, "another process is writing to this folder")


@pytest.mark.slow
def test_damaged_prediction_manifest_raises_a_clear_error(run, data, tmp_path):
    manifest = tmp_path / "out" / "_predictions.json"
    predict(run, data, tmp_path / "out", columns=["row"])
    values = json.loads(manifest.read_text())
    changes = {"columns": 5}, {"columns": ["row", None]}, {"scores": "score"}, {"rules": ["error"]}
    changes += {"vectors": [1]}, {"checkpoint_id": None}
    changed = [json.dumps(values | change).encode() for change in changes]
    for damaged in (b"{", b"\xff\xfe{", b"[]", b'{"format": 1}', *changed):
        manifest.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"cannot read _predictions\.json: ") as error:
            predict(run, data, tmp_path / "out", columns=["row"])
        assert "choose another --out, or remove the folder" in error.value.do, damaged


@pytest.mark.slow
def test_predict_refuses_changed_input(run, data, tmp_path):
    predict(run, data, tmp_path / "out", columns=["row"])
    table = pq.read_table(data / "part-1.parquet")
    price = pa.array(np.zeros(len(table), np.float32))
    at = table.column_names.index("price")
    pq.write_table(table.set_column(at, "price", price), data / "part-1.parquet", row_group_size=50)
    with pytest.raises(ConfigError, match=r"the input files or data\.transforms have changed"):
        predict(run, data, tmp_path / "out", columns=["row"])
