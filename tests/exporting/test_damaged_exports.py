"""Damaged and malicious exports raise an error with a clear message, and nothing is unpickled."""

import hashlib
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from checkpoints import flip_lowest_bit
from exports import train_for_export
from test_models import ModelCase

import raytrec
from raytrec.common.errors import ConfigError, RaytrecError, RunError


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    root = tmp_path_factory.mktemp("damaged")
    folder, _, _, _ = train_for_export(ModelCase("two_tower", (1, 1)), root)
    return Path(raytrec.export(folder, str(root / "export")).path)


@pytest.fixture
def copy(export, tmp_path):
    return Path(shutil.copytree(export, tmp_path / "copy"))


def list_export_files(export):
    return sorted(str(path.relative_to(export)) for path in export.rglob("*") if path.is_file())


@pytest.mark.slow
def test_load_rejects_pipes_and_devices(copy):
    """Neither is opened, because reading from a pipe blocks and reading from a device may never end."""
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (copy / "golden.arrow").unlink()
        make(copy / "golden.arrow")
        with pytest.raises(RunError, match=r"golden\.arrow differs from the exported file"):
            raytrec.load(copy)


def test_load_rejects_truncated_changed_or_missing_files(export, copy):
    for name in list_export_files(export):
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
            flip_lowest_bit(file, place)
            with pytest.raises(RunError) as caught:
                raytrec.load(copy, check_tables=True)
            assert name in caught.value.what or name == "manifest.json", caught.value
            file.write_bytes(content)
    assert raytrec.load(copy, check_tables=True).check() <= 1e-6


def edit_manifest(copy, edit):
    manifest = json.loads((copy / "manifest.json").read_text())
    edit(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "edit, message",
    [
        (lambda m: m["files"].update({"../secret": m["files"]["golden.arrow"]}), "outside the folder"),
        (lambda m: m["files"].update({"/etc/passwd": m["files"]["golden.arrow"]}), "outside the folder"),
        (lambda m: m["files"].update({"a\0b": m["files"]["golden.arrow"]}), "not a valid file name"),
        (lambda m: m["files"].update({"a\ud800": m["files"]["golden.arrow"]}), "not a valid file name|surrogates"),
        (lambda m: m["programs"]["predict"].update(file="other.pt2"), "there is no entry for other.pt2"),
        (lambda m: m.update(format=2), "format"),
        (lambda m: m.pop("tasks"), "tasks"),
        (lambda m: m["stacks"][0]["tables"].remove("tag"), "must be listed once: user, tag"),
        (lambda m: m["stacks"][0]["tables"].append("tag"), "must be listed once: user, tag"),
        (lambda m: m["stacks"].append(m["stacks"][0]), "must be listed once: user, tag"),
        (lambda m: m["stacks"].append(m["stacks"][0] | {"tables": []}), "stacks.1.tables"),
        (lambda m: m["stacks"][0].update(first_rows=[0, -5]), "first_rows"),
        (lambda m: m["stacks"][0].update(block_rows=-1), "block_rows"),
        (
            lambda m: m["stacks"][0].update(files=["golden.arrow"]),
            "golden.arrow does not contain the rows of user, tag",
        ),
        (lambda m: m["stacks"][0].update(precision="fp16"), "safetensors does not contain the rows"),
        (lambda m: m["schema"]["tables"]["user"].update(rows=2**40), "number of files does not match the 1,099,511,"),
        (lambda m: m["schema"]["tables"]["tag"].update(dim=16), "number of files does not match|different dims"),
        (lambda m: m["programs"]["predict"]["inputs"].pop(), "predict.pt2"),
        (lambda m: m["stacks"][0].update(block_rows=1), "the number of files does not match"),
    ],
)
def test_load_rejects_inconsistent_manifest(copy, edit, message):
    edit_manifest(copy, edit)
    with pytest.raises(RaytrecError, match=message):
        raytrec.load(copy)


def test_code_in_transforms_is_refused(copy):
    code = {"do": "os:system", "reads": ["a"], "writes": ["a"]}
    edit_manifest(copy, lambda m: m["transforms"].append(code))
    with pytest.raises(ConfigError, match="run user code: os:system"):
        raytrec.load(copy)


def replace_file(copy, name, content):
    """Replace a file of an export, with its size and checksum in the manifest."""
    (copy / name).write_bytes(content)
    about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit_manifest(copy, lambda m: m["files"].update({name: about}))


def test_pickles_are_refused(copy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    file, harm = copy / "predict.pt2", b"cos\nsystem\n(S'touch harm'\ntR."
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    (sample,) = [name for name in entries if "sample_inputs" in name]
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in (entries | {sample: harm}).items():
            archive.writestr(name, content)
    replace_file(copy, "predict.pt2", file.read_bytes())
    with pytest.raises(RunError, match="pickled sample inputs"):
        raytrec.load(copy)
    assert not Path("harm").exists()


@pytest.mark.parametrize(
    "edit",
    [
        lambda m: m["schema"]["dense"].clear(),
        lambda m: m["schema"]["dense"].__setitem__(0, "other"),
        lambda m: m["schema"]["dense"].__setitem__(0, "\0"),
        lambda m: m["schema"]["sparse"]["user"].update(table="\ud800"),
        lambda m: m["schema"]["sparse"]["tags"].update(weights="\x1b[2J"),
        lambda m: m["schema"]["sparse"]["user"].update(column="\ud800"),
        lambda m: m["lists"].clear(),
        lambda m: m["towers"].clear(),
        lambda m: m["tasks"].clear(),
        lambda m: m["tasks"][0].update(column="user"),
        lambda m: m["programs"]["predict"]["inputs"][1].update(width=7),
        lambda m: m["programs"]["predict"]["inputs"][1].update(feature="friends"),
        lambda m: m.update(sequences={"user": 3}),
        lambda m: m.update(metrics={"auc": {"int8": float("nan")}}),
        lambda m: m.update(golden_rows=2**62),
        lambda m: m.update(ids={"user": "golden.arrow"}),
    ],
)
def test_mismatched_manifest_raises_a_clear_error(copy, edit):
    edit_manifest(copy, edit)
    try:
        raytrec.load(copy)
    except (RunError, ConfigError) as error:
        assert str(copy) in error.where or "manifest" in error.what or "export" in error.what


@pytest.mark.parametrize("name", ["golden.arrow", "tables/dim8-00000.safetensors", "query.pt2"])
def test_corrupt_files_with_valid_checksums_raise_an_error(copy, name):
    original = (copy / name).read_bytes()
    flipped = original[:8] + bytes(byte ^ 0xFF for byte in original[8:-8]) + original[-8:]
    for content in (b"", b"1", original[: len(original) // 2], flipped):
        replace_file(copy, name, content)
        with pytest.raises((RunError, ConfigError)):
            raytrec.load(copy)


def test_version_omits_unsafe_characters_of_the_run_name(copy):
    edit_manifest(copy, lambda m: m["source"].update(run="é\r\nSet-Cookie: a\x1b[2J"))
    assert re.fullmatch(r"[\w.-]+-2-[0-9a-f]{8}", raytrec.load(copy).manifest.version, re.ASCII)


def test_exports_contain_no_local_paths(export):
    root = str(export.parent).encode()
    assert [name for name in list_export_files(export) if root in (export / name).read_bytes()] == []


def test_golden_rows_with_wrong_offsets_are_refused(copy):
    content = (copy / "golden.arrow").read_bytes()
    golden = pa.ipc.open_file(pa.py_buffer(content)).read_all()
    offsets = golden["friends"].chunk(0).buffers()[1].to_pybytes()[:52]
    assert content.count(offsets) >= 1
    replace_file(copy, "golden.arrow", content.replace(offsets, offsets[:-4] + b"\xff\xff\xff\x7f"))
    with pytest.raises(RunError, match="the export cannot be loaded"):
        raytrec.load(copy)
