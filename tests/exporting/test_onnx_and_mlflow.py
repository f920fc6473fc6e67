"""ONNX and MLflow exports of a run, with a real onnxruntime and a real MLflow store on sqlite."""

import os
import pickletools
import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import mlflow
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from exports import SmallModelCase, score_with_onnx_and_torch, train_for_export, train_tracked_run
from packaging.requirements import Requirement
from stores import reuse_first_store
from test_models import CASES, ModelCase

import raytrec
from raytrec.common.errors import ConfigError, RaytrecError, RunError
from raytrec.exporting.mlflow_model import REQUIRED_PACKAGES, make_signature
from raytrec.exporting.programs import Program, make_onnx
from raytrec.scoring.manifest import Input


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train, track and export a run with two tasks; return its rows, predictions and export."""
    folder, before = tmp_path_factory.mktemp("tracked") / "run", os.environ.get("MLFLOW_TRACKING_URI")
    with reuse_first_store():
        table, predictions = train_tracked_run("din", folder)
        export = raytrec.export(folder, str(folder.parent / "export"), onnx=True, mlflow=True)
        assert os.environ.get("MLFLOW_TRACKING_URI") == before
        mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
        yield SimpleNamespace(
            folder=folder,
            table=table,
            predictions=predictions,
            export=Path(export.path),
            model=export.metrics["mlflow_model"],
        )
    mlflow.set_tracking_uri(before)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 3, 50])
def test_onnxruntime_matches_the_model(run, rows):
    assert_equal_with_onnx(run.export, run.table, rows)


def assert_equal_with_onnx(export, table, rows):
    found, expected = score_with_onnx_and_torch(export, table.take(np.arange(rows) % len(table)))
    for got, values in zip(found, expected, strict=True):
        assert got.shape == values.shape and len(got) == rows
        np.testing.assert_allclose(got, values, rtol=1e-5, atol=1e-5)


@pytest.mark.survive
@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_matches_every_model(name, tmp_path):
    folder, table, _, _ = train_for_export(ModelCase(name, (1, 1)), tmp_path)
    golden_rows = 0 if name == "dcn" else 5
    export = raytrec.export(folder, str(tmp_path / "export"), onnx=True, golden_rows=golden_rows)
    for rows in (1, 3, 50):
        assert_equal_with_onnx(Path(export.path), table, rows)


def test_bf16_runs_export_fp32_programs(tmp_path):
    """onnxruntime has no bfloat16 products on CPUs; training in bfloat16 differs by rounding only."""
    case = SmallModelCase({"name": "dcn", "cross_layers": 1, "top_mlp": [6]}, train={"matmul": "bf16"})
    folder, table, predictions, _ = train_for_export(case, tmp_path)
    export = raytrec.export(folder, str(tmp_path / "export"), onnx=True, golden_rows=5)  # compares onnxruntime's scores
    found = raytrec.load(export.path).predict(table)["score"].to_numpy()
    assert 1e-5 < np.abs(found - predictions["y"].numpy()).max() < 0.01


class Bessel(torch.nn.Module):
    def forward(self, dense):
        return (torch.special.bessel_j0(dense).sum(1),)


@pytest.mark.slow
def test_export_names_operators_missing_in_onnx():
    rows = {0: torch.export.Dim("rows", min=1)}
    program = torch.export.export(Bessel(), (torch.ones(3, 2),), dynamic_shapes=(rows,))
    with pytest.raises(ConfigError, match=r"cannot be exported to ONNX: ONNX does not support prims\.bessel_j0"):
        make_onnx(Program(program, (Input(kind="dense", width=2),), Bessel()), ["score"])


@pytest.mark.survive
def test_export_fails_if_onnx_scores_differ(run, tmp_path, monkeypatch):
    """Convert a changed model to ONNX, as if the export of torch were wrong."""
    from raytrec.exporting import export as module

    def shifted(program, outputs):
        weight = next(iter(program.exported.state_dict.values()))
        with torch.no_grad():
            weight.add_(0.1)
            try:
                return make_onnx(program, outputs)
            finally:
                weight.sub_(0.1)

    monkeypatch.setattr(module, "make_onnx", shifted)
    with pytest.raises(RunError, match="output 0 of onnxruntime differs from the model's by"):
        raytrec.export(run.folder, str(tmp_path / "out"), onnx=True)
    assert not (tmp_path / "out").exists()


def assert_scores(found, expected):
    for name, values in expected.items():
        got = np.array(found[f"score_{name}"].tolist(), np.float32)
        np.testing.assert_allclose(got, values, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_mlflow_model_matches_the_export_without_pickles(run, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_PICKLE_DESERIALIZATION", "false")
    model = mlflow.pyfunc.load_model(run.model)
    assert_scores(model.predict(run.table.to_pandas()), run.predictions)
    assert_scores(model.predict(model.input_example), {k: v[:3] for k, v in run.predictions.items()})
    folder = Path(mlflow.artifacts.download_artifacts(run.model))
    files = list(filter(Path.is_file, folder.rglob("*")))
    assert len(files) > 100 and not [file for file in files if is_pickle(file.read_bytes())]
    pinned = (folder / "requirements.txt").read_text().split()
    assert f"torch=={torch.__version__.partition('+')[0]}" in pinned


def is_pickle(content):
    try:
        return any(operation.name == "STOP" for operation, _, _ in pickletools.genops(content))
    except (ValueError, UnicodeDecodeError):
        return False


def test_mlflow_requirements_match_the_score_extra():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["score"]]
    assert {Requirement(each).name for each in needed} == set(REQUIRED_PACKAGES)


def test_signature_types_accept_nulls():
    columns = {"id": [1, None], "whole": [1, 2], "ids": [[1], None], "price": [0.5, None], "score": [0.5, 0.5]}
    signature = make_signature(pa.table(columns), ["score"])
    kinds = [each["type"] for each in signature.inputs.to_dict()]
    assert kinds == ["any", "long", "array", "double"]
    assert [each["name"] for each in signature.outputs.to_dict()] == ["score"]
    columns.pop("score")
    with_nulls = pa.table(columns).to_pandas()
    assert is_valid_input(with_nulls, signature)


def is_valid_input(rows, signature):
    """Return True if MLflow accepts the rows for this signature."""
    model = mlflow.pyfunc.PyFuncModel(mlflow.models.Model(signature=signature), IdentityModel())
    return len(model.predict(rows)) == len(rows)


class IdentityModel:
    def predict(self, rows, params=None):
        return rows


@pytest.mark.slow
def test_mlflow_model_belongs_to_its_unchanged_run(run):
    client = mlflow.MlflowClient()
    (found,) = client.search_runs([client.get_experiment_by_name("films").experiment_id])
    assert client.get_logged_model(run.model.removeprefix("models:/")).source_run_id == found.info.run_id
    assert [f"models:/{each.model_id}" for each in found.outputs.model_outputs] == [run.model]
    assert found.info.status == "FAILED"  # there is no result.json


@pytest.mark.survive
def test_mlflow_model_refuses_a_replaced_export(run, tmp_path):
    moved = shutil.move(run.export, tmp_path / "export")
    try:
        raytrec.export(run.folder, str(run.export), golden_rows=3)
        with pytest.raises(RaytrecError, match="differs from the logged export: it has version small-2-"):
            mlflow.pyfunc.load_model(run.model)
    finally:
        shutil.rmtree(run.export, ignore_errors=True)
        shutil.move(moved, run.export)


@pytest.mark.survive
def test_embedded_export_works_without_the_original(run, tmp_path):
    export = raytrec.export(run.folder, str(tmp_path / "export"), golden_rows=0, mlflow=True, embed=True)
    shutil.rmtree(export.path)
    model = mlflow.pyfunc.load_model(export.metrics["mlflow_model"])
    assert_scores(model.predict(run.table.to_pandas()), run.predictions)
    assert model.input_example is None, "the model contains rows of the data"


@pytest.mark.slow
def test_export_refuses_a_run_missing_in_mlflow(run, tmp_path):
    folder, out = tmp_path / "run", str(tmp_path / "out")
    shutil.copytree(run.folder, folder)
    (folder / "mlflow.json").unlink()
    with pytest.raises(RunError, match=r"the run does not exist in MLflow(?s:.*)raytrec track"):
        raytrec.export(folder, out, mlflow=True)
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["tracking"] = {"enabled": False}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError, match="this run is not tracked"):
        raytrec.export(folder, out, mlflow=True)
    with pytest.raises(ConfigError, match="can be embedded only in an MLflow model"):
        raytrec.export(folder, out, embed=True)
    assert not Path(out).exists()
