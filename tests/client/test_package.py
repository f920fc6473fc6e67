"""Test the upload of a job: it contains the requested files, and nothing else is written."""

import os
from pathlib import Path

import pytest

from raytrec.client import package
from raytrec.common.errors import ConfigError


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Working directory with sibling folders; packages are built in a separate folder."""
    work, made = tmp_path / "work", tmp_path / "made"
    for folder in (work / "mine", tmp_path / "x", made):
        folder.mkdir(parents=True)
    (work / "mine/features.py").write_text("a = 1\n")
    (tmp_path / "x/lists.txt").write_text("b\n")
    (tmp_path / "one.txt").write_text("c\n")
    monkeypatch.chdir(work)
    monkeypatch.setattr(package.tempfile, "tempdir", str(made))
    return tmp_path


def pack(*include):
    with package.code(list(map(Path, include)), reserved_names=("run.yaml",)) as folder:
        files = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
        beside = [p.name for p in folder.parent.iterdir() if p != folder]
    assert beside == [] and not folder.exists()
    return {f for f in files if not f.startswith(("raytrec/", "raytrec_datasets/"))}


def test_outside_paths_are_packed_at_the_top_level(workspace):
    assert pack("../x", "../one.txt") == {"x/lists.txt", "one.txt"}
    assert pack(workspace / "x", "mine/../../one.txt") == {"x/lists.txt", "one.txt"}
    assert pack("mine") == pack("./mine/../mine") == pack(".") == {"mine/features.py"}


def test_packing_follows_links_and_keeps_their_names(workspace):
    (workspace / "work/linked").symlink_to(workspace / "x")
    assert pack("linked") == {"linked/lists.txt"}


@pytest.mark.parametrize(
    "include,what",
    [
        (["nowhere"], "the file or folder does not exist"),
        (["..", "mine"], "the folder contains the working directory"),
        (["/"], "the folder contains the working directory"),
        (["../raytrec"], "a file of raytrec itself"),
        (["../run.yaml"], "the name of the uploaded config"),
        (["../x", "../y/x"], "is included twice"),
        (["../pipe"], "neither a regular file nor a folder"),
        (["../odd"], "is not a regular file"),
        (["../broken"], "is a broken symbolic link"),
        (["../circle"], "is a link to one of its parent folders"),
        (["a\0b"], "the file or folder does not exist"),
    ],
)
def test_packing_rejects_unsupported_paths(workspace, include, what):
    for name in ("raytrec", "y/x", "odd", "broken", "circle"):
        (workspace / name).mkdir(parents=True)
    (workspace / "raytrec/__main__.py").write_text("")
    (workspace / "run.yaml").write_text("")
    (workspace / "y/x/lists.txt").write_text("")
    os.mkfifo(workspace / "pipe")
    os.mkfifo(workspace / "odd/pipe")
    (workspace / "broken/link").symlink_to("nowhere")
    (workspace / "circle/back").symlink_to(workspace / "circle")
    with pytest.raises(ConfigError) as error:
        pack(*include)
    assert what in str(error.value) and "upload of " in str(error.value)
    assert list((workspace / "made").iterdir()) == []


def test_large_folder_is_rejected_before_copying(workspace, monkeypatch):
    monkeypatch.setattr(package, "MAX_UPLOAD_BYTES", 100)
    with pytest.raises(ConfigError, match="the files to upload are too large"):
        pack("../x")
    assert list((workspace / "made").iterdir()) == []
