"""Exports that POST /promote accepts (only exports in one folder on the same server), and failed deployments."""

import os
import traceback
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError

from raytrec.common.errors import DataError, RunError
from raytrec.serving.bodies import RefusedRequest
from raytrec.serving.deployment import _explain_failed_start
from raytrec.serving.loaded_exports import get_containing_folder, resolve_export


@pytest.fixture
def root(tmp_path):
    """Create exports/films, exports-2/films and outside, and links to films and outside."""
    for name in ("exports/films", "exports-2/films", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "exports/current").symlink_to("films")
    (tmp_path / "exports/away").symlink_to(tmp_path / "outside")
    (tmp_path / "link").symlink_to("exports/films")
    return tmp_path


def test_exports_in_the_folder_are_accepted_with_links_resolved(root):
    folder, films = str(root / "exports"), str(root / "exports/films")
    for place in ("exports/films", "exports/films/", "exports/current", "link", "outside/../exports/films"):
        assert resolve_export(f"{root}/{place}", folder) == films
        assert resolve_export(f"file://{root}/{place}", f"file://{folder}/") == films
    assert resolve_export(f"{root}/exports/films%20", folder) == f"{films}%20", "the path was decoded"


@pytest.mark.parametrize(
    "place",
    ["outside", "exports/../outside", "exports/away", "exports/away/x", "exports-2/films", "exports/films/../.."],
)
def test_paths_outside_the_folder_are_refused(root, place):
    for uri in (f"{root}/{place}", f"file://{root}/{place}", f"file://{root}/{place.replace('.', '%2e')}"):
        with pytest.raises(RefusedRequest, match="outside the folder"):
            resolve_export(uri, str(root / "exports"))


STORE = "s3://bucket/exports"


@pytest.mark.parametrize(
    "uri, folder",
    [
        ("s3://bucket/exports/films", STORE),
        ("s3://bucket/exports/films/", STORE + "/"),
        ("s3://bucket/exports/a/films?region=eu-north-1", STORE),
        ("s3://bucket/exports/films", STORE + "?region=eu-north-1"),
        ("s3://bucket/exports/new%20films", STORE),
        ("s3://bucket/films", "s3://bucket"),
        ("s3://b/exports/films?endpoint_override=own:9000", "s3://b/exports?endpoint_override=own:9000"),
    ],
)
def test_exports_in_an_object_store_folder_are_accepted(uri, folder):
    assert resolve_export(uri, folder) == uri.rstrip("/")


@pytest.mark.parametrize(
    "uri, folder",
    [
        ("s3://bucket/exports-2/films", STORE),
        ("s3://bucket/exports/../other", STORE),
        ("s3://bucket/exports/%2e%2E/other", STORE),
        ("s3://bucket/exports/%2e%2e%2fother", STORE),
        ("s3://bucket/exports//other", STORE),
        ("s3://bucket/other", STORE),
        ("s3://bucket-2/films", "s3://bucket"),
        ("s3://user:key@bucket/exports/films", STORE),
        ("gs://bucket/exports/films", STORE),
        ("S3://bucket/exports/films", STORE),
        ("s3://bucket/exports/films?endpoint_override=evil.example", STORE),
        ("s3://bucket/exports/films?region=x&endpoint_override=evil.example", STORE),
        ("s3://bucket/exports/films?scheme=http", STORE),
        ("s3://bucket/exports/films?end%70oint_override=evil.example", STORE),
        ("s3://bucket/exports/films#x?endpoint_override=evil.example", STORE),
        ("s3://b/exports/films?endpoint_override=evil", "s3://b/exports?endpoint_override=own:9000"),
        ("s3://b/exports/films", "s3://b/exports?endpoint_override=own:9000"),
        ("hdfs://host/exports/films", STORE),
        ("/etc", STORE),
        ("file:///etc", STORE),
        ("s3://bucket/exports/films", "/"),
        ("file://host/exports/films", "/"),
        ("FILE:///etc", "/exports"),
        ("", STORE),
        ("a\0b", "/"),
    ],
)
def test_other_stores_and_servers_are_refused(uri, folder):
    with pytest.raises((RefusedRequest, DataError)):
        resolve_export(uri, folder)


def test_containing_folder_resolves_links_and_store_uris(root):
    assert get_containing_folder(f"{root}/link") == get_containing_folder(f"file://{root}/link") == f"{root}/exports"
    assert get_containing_folder("s3://bucket/exports/films/?region=x") == "s3://bucket/exports?region=x"
    assert get_containing_folder("s3://bucket/films") == "s3://bucket"
    assert get_containing_folder("s3://bucket") == get_containing_folder("s3://bucket/") == "s3://bucket"
    os.chdir(root)
    assert get_containing_folder("exports/films") == f"{root}/exports"


def test_failed_start_is_explained_by_the_error_of_the_replica(monkeypatch):
    def explain(message, is_local=False):
        deployments = {"raytrec": SimpleNamespace(message=f"The deployment failed to start. Error:\n{message}")}
        applications = {"films": SimpleNamespace(deployments=deployments)} if message else {}
        monkeypatch.setattr("ray.serve.status", lambda: SimpleNamespace(applications=applications))
        return _explain_failed_start(RuntimeError("Deploying application films failed."), "films", is_local)

    failure = RunError("the export is damaged:\na file is missing", where="/films", do="write the export again")
    for inner in (failure, OSError("No space left on device")):
        try:
            raise inner
        except Exception:
            failed = RuntimeError(traceback.format_exc())
        trace = f'ray::Replica()\n  File "replica.py", line 1\nRuntimeError: {failed}'
        error = explain(str(RayTaskError("f", trace, failed, "t", 1, "127.0.0.1").as_instanceof_cause()))
        if inner is failure:
            assert error.parts == failure.parts | {"what": f"the service cannot start: {failure.what}"}
    assert error.what == "the service cannot start: OSError: No space left on device"
    assert error.do.startswith("read logs/serve") and "--address auto" in explain("KeyError: 'x'", is_local=True).do
    assert explain("").what == "the service cannot start: Deploying application films failed."
