"""An export as a model of its run's MLflow run, in a real store on sqlite."""

import pytest
import yaml
from exports import trained
from stores import made_once
from test_models import Modelled

import raytrec
from raytrec.driver.track import track


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(a run folder with a checkpoint, whose MLflow run there is; rows)."""
    folder = tmp_path_factory.mktemp("tracked")
    _, table, _, _ = trained(Modelled("din", (1, 1)), folder)
    values = {
        "run": {"name": "small", "dir": str(folder)},
        "data": {"train": f"{folder}/data"},
        "tracking": {"uri": f"sqlite:///{folder}/mlflow.db", "experiment": "films"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    with made_once():
        track(folder)
        yield folder, table


def test_the_model_scores_as_the_export_does(run, tmp_path):
    folder, table = run
    export = raytrec.export(folder, str(tmp_path / "export"), mlflow=True)
    uri = export.metrics["mlflow_model"]
    print(uri)
