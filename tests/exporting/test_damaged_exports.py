"""Exports that are damaged, or made to do harm, end in one message, and nothing of them is unpickled."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from checkpoints import flip
from exports import trained
from test_models import Modelled

import raytrec
from raytrec.common.errors import ConfigError, RaytrecError, RunError


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    root = tmp_path_factory.mktemp("damaged")
    folder, _, _, _ = trained(Modelled("two_tower", (1, 1)), root)
    return Path(raytrec.export(folder, str(root / "export")).path)


@pytest.fixture
def copy(export, tmp_path):
    return Path(shutil.copytree(export, tmp_path / "copy"))


def files(export):
    return sorted(str(path.relative_to(export)) for path in export.rglob("*") if path.is_file())


def test_every_file_cut_changed_or_missing(export, copy):
    for name in files(export):
        file = copy / name
        content = file.read_bytes()
        for damaged in (None, b"", content[: len(content) // 2], content + b"\0"):
            file.unlink()
            if damaged is not None:
                file.write_bytes(damaged)
            with pytest.raises(RunError) as caught:
                raytrec.load(copy)
            assert name in caught.value.what or name == "manifest.json", caught.value
            file.write_bytes(content)
        for place in (0, len(content) // 2, len(content) - 1):
            flip(file, place)
            with pytest.raises(RunError) as caught:
                raytrec.load(copy, check_tables=True)
            assert name in caught.value.what or name == "manifest.json", caught.value
            file.write_bytes(content)
    assert raytrec.load(copy, check_tables=True).check() <= 1e-6


def change(copy, edit):
    manifest = json.loads((copy / "manifest.json").read_text())
    edit(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda m: m["files"].update({"../secret": m["files"]["golden.arrow"]}), "outside of the folder"),
        (lambda m: m["files"].update({"/etc/passwd": m["files"]["golden.arrow"]}), "outside of the folder"),
        (lambda m: m["programs"]["predict"].update(file="other.pt2"), "other.pt2 is missing"),
        (lambda m: m.update(format=2), "format"),
        (lambda m: m.pop("tasks"), "tasks"),
        (lambda m: m["tables"].pop("tag"), "tag"),
        (lambda m: m["programs"]["predict"]["inputs"].pop(), "predict.pt2"),
        (lambda m: m["tables"]["tag"].update(block_rows=1), "tag"),
    ],
)
def test_a_manifest_that_says_something_else(copy, edit, message):
    change(copy, edit)
    with pytest.raises(RaytrecError, match=message):
        raytrec.load(copy)


def test_code_in_transforms_is_refused(copy):
    code = {"do": "os:system", "reads": ["a"], "writes": ["a"]}
    change(copy, lambda m: m["transforms"].append(code))
    with pytest.raises(ConfigError, match="name code to run: os:system"):
        raytrec.load(copy)


def test_pickles_are_refused(copy, tmp_path):
    import hashlib

    file, harm = copy / "predict.pt2", b"cos\nsystem\n(S'touch harm'\ntR."
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (sample,) = [name for name in entries if "sample_inputs" in name]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (entries | {sample: harm}).items():
            archive.writestr(name, content)
    content = file.read_bytes()
    about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    change(copy, lambda m: m["files"].update({"predict.pt2": about}))
    with pytest.raises(RunError, match="sample inputs, which are a pickle"):
        raytrec.load(copy)
    assert not Path("harm").exists()
