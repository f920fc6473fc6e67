"""A run writes full exports next to its deltas; an export and the deltas after it lead to the trained model."""

import json
from pathlib import Path

import checkpoints
import numpy as np
import parquet
import pytest
import torch
from safetensors.numpy import load_file
from test_publish import apply_delta, create_stream

from raytrec.common.errors import ConfigError
from raytrec.driver import run as driver

pytestmark = [pytest.mark.usefixtures("ray_cluster"), pytest.mark.survive]


def train(data, place, deltas, **changes):
    values = parquet.config_values(data, place, train__epochs=6, checkpoint__every_steps=8, **changes)
    return driver.train(values, {"export.deltas": deltas})


@pytest.fixture(scope="module")
def followed(tiny_data, tmp_path_factory):
    """Return (result of a run, folder of its deltas)."""
    place = tmp_path_factory.mktemp("followed")
    deltas = {"to": f"{place}/deltas", "every_s": 0.1, "full_every": 2, "keep": 2}
    return train(tiny_data, place / "run", deltas), place / "deltas"


def read_export(folder):
    """Return the fp32 tables of an export."""
    manifest, tables = json.loads((folder / "manifest.json").read_text()), {}
    for stack in manifest["stacks"]:
        rows = np.concatenate([load_file(folder / file)["rows"] for file in stack["files"]])
        for name in stack["tables"]:
            count = manifest["schema"]["tables"][name]["rows"]
            tables[name], rows = rows[:count].copy(), rows[count:]
    return tables, manifest["source"]["step"]


def test_export_and_deltas_lead_to_the_last_checkpoint(followed):
    run, folder = followed
    exports = sorted(path.name for path in (folder / "exports").iterdir())
    assert 1 <= len(exports) <= 2
    assert sorted(path.stem for path in (folder / "deltas").glob("*.json"))[0] == exports[0], "older deltas exist"
    stored = checkpoints.read_tensors(checkpoints.newest_checkpoint(run.path))
    for name in exports:
        (tables, step), dense, number = read_export(folder / "exports" / name), {}, int(name)
        assert json.loads((folder / f"deltas/{number:012d}.json").read_text())["step"] == step
        while (folder / f"deltas/{number + 1:012d}.json").exists():
            number += 1
            manifest = apply_delta(folder, number, tables, {}, dense)
        assert manifest["last"] and manifest["step"] == run.metrics["train.steps"]
        for table, values in tables.items():
            assert torch.equal(torch.from_numpy(values), stored[f"tables/{table}/weight"])
        for weight, values in dense.items():
            assert torch.equal(torch.from_numpy(values.copy()), stored[f"dense/head.{weight}/value"])


def test_run_that_failed_before_its_first_delta_can_be_repeated(tmp_path):
    for _ in range(2):
        create_stream(tmp_path)
        (tmp_path / "run/deltas.json").unlink()  # as a new run does in the folder of an earlier one


def test_folder_of_another_run_is_refused(followed, tiny_data, tmp_path):
    before = sorted(Path(followed[1]).rglob("*"))
    with pytest.raises(ConfigError, match="the deltas of another run"):
        train(tiny_data, tmp_path / "run", {"to": str(followed[1])})
    assert sorted(Path(followed[1]).rglob("*")) == before
    with pytest.raises(ConfigError, match="a separate folder"):
        train(tiny_data, tmp_path / "run", {"to": str(tmp_path / "run")})
