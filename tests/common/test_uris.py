"""Paths and URIs of folders and their files."""

import pytest

from raytrec.common.output_folder import ClaimedFolder
from raytrec.common.storage import get_sibling, join_uri, split_query


@pytest.mark.parametrize(
    ("folder", "inside", "neighbour"),
    [
        ("/data/a b?/train", "/data/a b?/train/x", "/data/a b?/x"),  # in a path, ? is a normal character
        ("data/train//", "data/train/x", "data/x"),
        ("train", "train/x", "x"),
        ("s3://bucket/data/train", "s3://bucket/data/train/x", "s3://bucket/data/x"),
        ("s3://bucket/train/?region=eu-1", "s3://bucket/train/x?region=eu-1", "s3://bucket/x?region=eu-1"),
        ("gs://bucket/train?a=b/c&d=?", "gs://bucket/train/x?a=b/c&d=?", "gs://bucket/x?a=b/c&d=?"),
    ],
)
def test_join_uri_inserts_names_before_the_query(folder, inside, neighbour):
    assert (join_uri(folder, "x"), get_sibling(folder, "x")) == (inside, neighbour)
    assert split_query(inside)[1] == split_query(folder)[1]


def test_output_folder_can_be_held_by_its_file_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = ClaimedFolder(f"file://{tmp_path}/out", "raytrec export")
    with folder.hold():
        folder.write("a.txt", b"content")
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"content"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
