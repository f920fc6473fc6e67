"""Loading next to a model that answers: damage and failed child processes are reported, replaced tables are freed."""

import gc
import json
import os
import re
import threading
import weakref
from pathlib import Path

import psutil
import pytest
from exports import train_for_export
from test_models import ModelCase
from waiting import wait_for

import raytrec
from raytrec.common.errors import ConfigError, DataError, RunError
from raytrec.scoring import load as loading
from raytrec.scoring.load import hash_in_child
from raytrec.scoring.manifest import read_manifest
from raytrec.serving.options import ServiceOptions, token_file


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    root = tmp_path_factory.mktemp("load")
    folder, table, _, _ = train_for_export(ModelCase("two_tower", (1, 1)), root)
    return Path(raytrec.export(folder, str(root / "export")).path), table


@pytest.mark.parametrize("made", ["yesterday", "2026-01-01T00:00:00", 7])
def test_invalid_time_of_an_export_is_rejected(export, tmp_path, made):
    values = json.loads((export[0] / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(values | {"made": made}))
    with pytest.raises(RunError, match="made"):
        read_manifest(str(tmp_path))


@pytest.mark.parametrize("run", ["\\ud800", b"\xed\xa0\x80"])
def test_manifest_with_half_a_surrogate_pair_is_rejected(export, tmp_path, run):
    values = json.loads((export[0] / "manifest.json").read_text())
    values["source"]["run"] = "films"
    text = json.dumps(values).encode().replace(b"films", run if isinstance(run, bytes) else run.encode())
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(RunError, match=r"manifest\.json of the export cannot be read"):
        read_manifest(str(tmp_path))
    (tmp_path / "manifest.json").write_bytes(json.dumps(values).encode().replace(b"films", b"\\ud83c\\udfac"))
    assert read_manifest(str(tmp_path)).source.run == "\N{CLAPPER BOARD}"


@pytest.mark.parametrize("run", ["\x1b]0;owned\x07films", "a/../../known", "a\0b", "größe"])
def test_default_name_of_a_service_is_plain(export, tmp_path, run, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    values = json.loads((export[0] / "manifest.json").read_text())
    values["source"]["run"] = run
    (tmp_path / "manifest.json").write_text(json.dumps(values))
    name = ServiceOptions(uri=str(tmp_path)).fill_name().name
    assert re.fullmatch(r"[A-Za-z0-9_.-]+", name)
    assert token_file(name).parent == tmp_path / "raytrec"


def list_children():
    """Return the child processes that compute checksums."""
    children = [each for each in psutil.Process().children() if "file_hashes" in " ".join(each.cmdline())]
    return [each for each in children if each.status() != psutil.STATUS_ZOMBIE]


def load_in_background(path):
    return raytrec.load(path, check_tables=True, background=True)


@pytest.mark.slow
def test_background_load_scores_like_load(export):
    path, table = export
    assert load_in_background(path).predict(table) == raytrec.load(path).predict(table)


def test_background_load_rejects_a_damaged_table(export):
    path, _ = export
    file = path / read_manifest(str(path)).stacks[0].files[0]
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(RunError, match=f"{file.name} differs from the exported file"):
            load_in_background(path)
        file.unlink()
        with pytest.raises(RunError, match=rf"{file.name} cannot be read: No such file or directory"):
            load_in_background(path)
        file.mkdir()
        with pytest.raises(RunError, match=rf"{file.name} differs from the exported file"):
            load_in_background(path)
        file.rmdir()
    finally:
        file.write_bytes(content)


def kill_child():
    wait_for(list_children, "a child process", 60)
    list_children()[0].kill()


def test_killed_child_is_an_error(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    threading.Thread(target=kill_child).start()
    with pytest.raises(RunError, match=r"cannot be computed: died with <Signals\.SIGKILL: 9>") as caught:
        hash_in_child(tmp_path, ["pipe"], "an export")
    assert caught.value.where == "an export"


def test_hanging_child_ends_at_the_time_limit(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(loading, "CHILD_BASE_S", 0.5)
    with pytest.raises(RunError, match=r"cannot be computed: timed out after 0\.5 seconds"):
        hash_in_child(tmp_path, ["pipe"], "an export")
    assert not list_children()


def test_last_reference_frees_the_tables(export):
    path, table = export
    model = raytrec.load(path)
    user_columns = {*model.manifest.data_schema.select_features(model.manifest.towers["query"]).inputs}
    rows = table.to_pylist()
    model.predict(rows)
    user = {name: rows[3][name] for name in user_columns if name in model.columns.names}
    model.predict(user=user, candidates=[{k: v for k, v in row.items() if k not in user} for row in rows])
    tables = weakref.ref(model.lookups)
    gc.disable()
    try:
        del model
        assert tables() is None
    finally:
        gc.enable()


def test_vectors_name_an_unknown_tower(export):
    with pytest.raises(ConfigError, match="there is no tower 'user'") as error:
        raytrec.load(export[0]).vectors({}, tower="user")
    assert error.value.expected == "query or item"


def test_missing_candidates_are_named_in_the_error(export):
    path, table = export
    model = raytrec.load(path)
    names = model.manifest.data_schema.select_features(model.manifest.towers["query"]).inputs
    user = {name: value for name, value in table.to_pylist()[0].items() if name in names}
    with pytest.raises(DataError, match="there are no rows") as error:
        model.predict(user=user, candidates=[])
    assert error.value.where == "candidates"
