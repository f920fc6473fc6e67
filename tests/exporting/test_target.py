"""The target folder of an export while the run continues or another export writes to it."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from exports import train_for_export
from test_models import ModelCase

import raytrec
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.output_folder import ClaimedFolder
from raytrec.config.transforms import Sample
from raytrec.exporting.export_folder import ExportFolder

exporting = import_module("raytrec.exporting.export")


@pytest.fixture(scope="module")
def saved_checkpoints(tmp_path_factory):
    """A folder with the checkpoints of step 2 of two models: a/checkpoints and b/checkpoints."""
    root = tmp_path_factory.mktemp("target")
    for name in ("a", "b"):
        (root / name).mkdir()
        train_for_export(ModelCase("two_tower", (1, 1)), root / name)
    return root


@pytest.fixture
def run(saved_checkpoints, tmp_path):
    return Path(shutil.copytree(saved_checkpoints / "a", tmp_path / "run"))


def save_next_checkpoint(run, saved, step=3):
    """Save another checkpoint and remove the earlier ones, as checkpoint.keep_last=1 does."""
    root = run / "checkpoints"
    shutil.copytree(saved / "b/checkpoints/step-0000000002", root / f"step-{step:010d}")
    for folder in root.iterdir():
        if folder.name != f"step-{step:010d}":
            shutil.rmtree(folder)


def call_before_tables(monkeypatch, act):
    """Call `act` before the first table of each export is written."""
    write = exporting._write_tables

    def acting(*parts):
        act()
        return write(*parts)

    monkeypatch.setattr(exporting, "_write_tables", acting)


@pytest.mark.slow
def test_interrupted_export_restarts_with_the_newest_checkpoint(run, saved_checkpoints, tmp_path, monkeypatch):
    out = str(tmp_path / "out")
    with monkeypatch.context() as patch:
        call_before_tables(patch, lambda: save_next_checkpoint(run, saved_checkpoints))
        with pytest.raises(RunError, match="the checkpoint cannot be read"):
            raytrec.export(run, out)
    assert Path(out, "predict.pt2").exists()
    for source, other in (run, {"quantize": "int8"}), (run, {"golden_rows": 3}), (saved_checkpoints / "b", {}):
        with pytest.raises(ConfigError, match="an interrupted export of another run"):
            raytrec.export(source, out, **other)
    found = raytrec.export(run, out)
    assert found.metrics["checkpoint"].endswith("step-0000000003")
    assert raytrec.load(out, check_tables=True).check() <= 1e-6
    assert raytrec.export(run, out).metrics["version"] == found.metrics["version"]
    with pytest.raises(ConfigError, match="the folder contains another export"):
        raytrec.export(run, out, quantize="int8")
    assert not {"_export.json", "_parts"} & set(os.listdir(out))


@pytest.mark.slow
def test_export_refuses_a_folder_in_use(run, tmp_path):
    out = tmp_path / "out"
    with ClaimedFolder(str(out), "raytrec export").hold(), pytest.raises(RunError, match="another process is writing"):
        raytrec.export(run, str(out))
    assert raytrec.export(run, str(out)).path == str(out)


@pytest.mark.survive
def test_failed_export_removes_its_new_empty_folder(tmp_path):
    """The folder is kept if it existed before or contains files."""
    (tmp_path / "before").mkdir()
    for name, files, stays in (("new", [], False), ("new", ["a"], True), ("before", [], True)):
        with suppress(RunError), ClaimedFolder(str(tmp_path / name), "raytrec export").hold():
            for file in files:
                (tmp_path / name / file).touch()
            raise RunError("no export")
        assert (tmp_path / name).exists() is stays


@pytest.mark.survive
def test_two_processes_export_into_one_folder_at_once(run, tmp_path):
    out = tmp_path / "out"
    code = "import raytrec, sys\ntry: raytrec.export(*sys.argv[1:])\n"
    code += "except raytrec.RaytrecError as error: sys.exit(str(error))"
    words = [sys.executable, "-c", code, str(run), str(out)]
    both = [subprocess.Popen(words, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [each.communicate(timeout=120)[1] for each in both]
    codes = [each.returncode for each in both]
    assert 0 in codes, said
    assert all(not code or "another process is writing" in text for code, text in zip(codes, said, strict=True)), said
    assert raytrec.load(out, check_tables=True).check() <= 1e-6


@pytest.mark.slow
def test_export_accepts_an_identical_concurrent_export(run, tmp_path, monkeypatch):
    """Object stores have no locks, so that two exports can be committed."""
    monkeypatch.setattr(ClaimedFolder, "hold", lambda folder: nullcontext())
    commit, out = ExportFolder.commit, str(tmp_path / "out")

    def after_another(self, manifest):
        commit(self, manifest)
        commit(self, manifest)

    monkeypatch.setattr(ExportFolder, "commit", after_another)
    raytrec.export(run, out)
    assert raytrec.load(out, check_tables=True).check() <= 1e-6


def test_vocabulary_of_a_uri_is_copied_without_its_query(tmp_path):
    pq.write_table(pa.table({"item": ["a", "b"], "count": [1, 2]}), tmp_path / "items.parquet")
    uri = f"file://{tmp_path}/items.parquet?region=eu-north-1"
    sample = Sample(do="sample", column="negatives", count=3, vocabulary=uri, frequency="count")
    target = ExportFolder(str(tmp_path / "out"), "raytrec export", "binding", "request")
    with target.folder.hold():
        (copied,) = exporting._copy_vocabularies(target, [sample])
    assert copied.vocabulary == "vocabularies/0-items.parquet"
    assert Sample.model_validate(copied.model_dump()) == copied
    assert pq.read_table(tmp_path / "out" / copied.vocabulary).num_rows == 2
