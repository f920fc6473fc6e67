"""Paths and URIs of folders and their files."""

import pytest

from raytrec.common.output_folder import ClaimedFolder
from raytrec.common.storage import extract_path, get_sibling, join_uri, read_bytes, split_query


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


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("/data/a b?/x%20y.parquet", "/data/a b?/x%20y.parquet"),
        ("s3://key:se=cr@bucket/train/day=1/a.parquet?region=eu/x=1", "train/day=1/a.parquet"),
        ("gs://bucket/at=10%253A00/a%20b.parquet", "at=10%3A00/a b.parquet"),
        ("s3://bucket", ""),
    ],
)
def test_path_of_a_uri_is_decoded_without_bucket_and_query(uri, path):
    assert extract_path(uri) == path


@pytest.mark.parametrize(
    ("folder", "inside"),
    [
        (
            "s3://key:secret@bucket/train/?endpoint_override=a:9&scheme=http",
            "s3://key:secret@bucket/train/{}?endpoint_override=a:9&scheme=http",
        ),
        ("hdfs://host:9000/", "hdfs://host:9000/{}"),
        ("file:///", "file:///{}"),
        ("file:///data#x", "file:///data/{}"),
    ],
)
def test_names_in_uris_are_quoted(folder, inside):
    assert join_uri(folder, "at=10%3A00/a b#?.parquet") == inside.format("at=10%253A00/a%20b%23%3F.parquet")
    assert extract_path(join_uri(folder, "at=10%3A00/a b#?.parquet")).endswith("at=10%3A00/a b#?.parquet")


def test_names_in_uris_of_fsspec_are_not_quoted():
    uri = join_uri("hf://datasets/me/clicks", "a b%20.parquet")
    assert uri == "hf://datasets/me/clicks/a b%20.parquet" and extract_path(uri) == "me/clicks/a b%20.parquet"


def test_output_folder_can_be_held_by_its_file_uri(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = ClaimedFolder(f"file://{tmp_path}/out", "raytrec export")
    with folder.hold():
        folder.write("a.txt", b"content")
        folder.write("at=10%3A00/a b#?.txt", b"more")
    assert (tmp_path / "out" / "a.txt").read_bytes() == b"content"
    assert read_bytes(folder.uri_of("at=10%3A00/a b#?.txt")) == b"more"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
