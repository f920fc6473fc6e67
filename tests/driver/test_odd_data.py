"""What `raytrec inspect` writes of odd columns trains as it stands."""

import parquet
import pytest
from any_parquet import odd_dataset

from raytrec.driver import run as driver
from raytrec.inspection.propose import inspect

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.survive]


@pytest.mark.parametrize("model", ["dlrm", "sequence"])
def test_what_inspect_writes_trains(tmp_path, model):
    folder = odd_dataset(tmp_path / "odd")
    found = inspect(str(folder), dim=8)
    (folder / "schema.yaml").write_text(found.schema_yaml(), encoding="utf-8")
    config = parquet.settings(folder, tmp_path / "run", data__transforms=found.transforms, train__epochs=1)
    config["data"]["valid"] = None
    config["model"] = {"name": model}
    run = driver.train(config)
    assert run.metrics["train.rows"] == 2500 and run.metrics["eval.rows"] == 300
