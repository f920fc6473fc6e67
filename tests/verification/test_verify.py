"""`raytrec verify` compares all rows, managed ids and weights of every replica with a checkpoint."""

import json
import shutil
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import small
import torch
from described import assert_described
from exports import SmallModelCase, train_for_export
from served import TOKEN, ServedApp

import raytrec
from raytrec.checkpoint.files import get_step_folder
from raytrec.checkpoint.index import read_index, write_index
from raytrec.cli import main
from raytrec.common.errors import RunError
from raytrec.serving import served_state
from raytrec.serving.app import Service
from raytrec.serving.bodies import json_response
from raytrec.serving.command import promote
from raytrec.serving.listener import Listener
from raytrec.serving.loaded_exports import LoadedExports
from raytrec.serving.openapi import Endpoint
from raytrec.serving.served_state import list_endpoints
from raytrec.verification import stored_state
from raytrec.verification.verify import ReplicaConnection, verify

pytestmark = pytest.mark.slow

PRECISIONS = (None, "fp16", "int8", "int4")


class ManagedTowers(SmallModelCase):
    """Two towers with managed ids, and averages of dense weights."""

    def schema(self):
        tables = {"user": {"rows": 40, "dim": 8, "ids": "managed"}, "tag": {"rows": 5, "dim": 8}}
        return small.make_small_schema(tables=tables)

    def config(self):
        return small.make_small_config(1, {"sharding_type": "row_wise"}, model=self.model, ema=0.5)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a run folder with one checkpoint and exports of all precisions."""
    root = tmp_path_factory.mktemp("run")
    towers = {"query": ["a", "user", "tags"], "item": ["b", "friends"]}
    train_for_export(ManagedTowers({"name": "two_tower", "towers": towers}), root)
    for precision in PRECISIONS:
        raytrec.export(root, str(root / f"export-{precision}"), quantize=precision)
    return root


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    """Set the client's token, short times, and small blocks, so that each table has several."""
    for module in (served_state, stored_state):
        monkeypatch.setattr(module, "MAX_BLOCK_BYTES", 200)
    monkeypatch.setattr("raytrec.compat.uvicorn_.CLOSE_GRACE_S", 0.1)
    monkeypatch.setattr("raytrec.verification.verify.CONNECT_TIMEOUT_S", 3)
    monkeypatch.setenv("RAYTREC_SERVE_TOKEN", TOKEN)


class Replicas:
    """Replicas of a service on one port.

    Args:
        export: export that the replicas serve.
        names: ids of the replicas.
        unreached: ids that are listed but do not listen.
    """

    def __init__(self, export, names=("one",), unreached=()):
        self.on_listing = lambda: None
        versions = Endpoint("GET", "/versions", self._list_versions)
        self.scorers, self._listeners = {}, []
        for name in names:
            service = Service(LoadedExports(str(export)), TOKEN, extra_endpoints=[*list_endpoints(name), versions])
            self.scorers[name] = service.versions.current.scorer
            port = self._listeners[0].port if self._listeners else 0
            self._listeners.append(Listener(service, "127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._listeners[0].port}"
        self._listed = {*names, *unreached}

    async def _list_versions(self, request, scorer):
        self.on_listing()
        return json_response(dict.fromkeys(self._listed, scorer.version))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for listener in self._listeners:
            listener.close()


def flip_row(scorer, table, row):
    """Flip the lowest bit of the first byte of a stored row."""
    stacked = scorer.lookups.tables[table]
    stored = stacked.stack._stored = stacked.stack._stored.clone()
    stored[stacked.first_row + row].view(torch.uint8)[0] ^= 1


@pytest.fixture(scope="module")
def weight(run):
    """Return the name of a weight of the item tower."""
    tensors = read_index(get_step_folder(f"{run}/checkpoints", 2))["tensors"]
    names = (name.removeprefix("dense/head.").removesuffix("/ema") for name in tensors if name.endswith("weight/ema"))
    return min(name for name in names if name.startswith("model.towers.item"))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_service_equals_its_checkpoint_unless_a_row_differs(run, precision):
    with Replicas(run / f"export-{precision}") as service:
        metrics = verify(service.url, str(run)).metrics
        assert metrics["result"] == "equal" and metrics["differences"] == [] and metrics["replicas"] == ["one"]
        assert (metrics["tables"], metrics["rows"]) == (2, 45) and metrics["ids"] > 10 and metrics["weights"] > 10
        flip_row(service.scorers["one"], "user", 33)
        (difference,) = verify(service.url, str(run)).metrics["differences"]
    assert (difference["part"], difference["name"], difference["count"]) == ("rows", "user", 1)
    assert difference["examples"][0].startswith("row 33 by ") and 0 < difference["largest"] < 0.1


def test_changed_ids_and_weights_of_any_program_are_named(run, weight):
    with Replicas(run / "export-None") as service:
        scorer = service.scorers["one"]
        ids = scorer.lookups.ids["user"]
        (first_id, row), (lost_id, lost_row) = ids.read(0, 2**64)[:2].tolist()
        kept = [0, *range(2, len(ids))]
        ids._keys, ids._rows = ids._keys[kept], ids._rows[kept]
        ids._rows[0] = 39
        with torch.no_grad():
            scorer.program_weights[f"item/{weight}"].flatten()[3] += 0.25
        result = verify(service.url, f"{run}/2")
    assert result.metrics["result"] == "different"
    of_ids, of_weight = sorted(result.metrics["differences"], key=lambda each: each["part"] != "ids")
    assert (of_ids["name"], of_ids["count"]) == ("user", 2)
    assert sorted(of_ids["examples"]) == sorted(
        [f"id {first_id} has row 39 instead of row {row}", f"id {lost_id} has no row instead of row {lost_row}"]
    )
    assert (of_weight["name"], of_weight["count"]) == (f"item/{weight}", 1)
    assert of_weight["examples"] == ["value 3 by 0.25"] and of_weight["largest"] == pytest.approx(0.25)
    assert any(f"dense item/{weight}: 1 differs, such as value 3 by 0.25" in line for line in result.next_steps)


def test_service_without_managed_ids_is_different(run):
    with Replicas(run / "export-None") as service:
        del service.scorers["one"].lookups.ids["user"]
        (difference,) = verify(service.url, str(run)).metrics["differences"]
    assert (difference["part"], difference["name"]) == ("ids", "user")
    assert "missing in the service, int64 [" in difference["examples"][0]


def test_other_shapes_and_missing_names_are_named(run, weight, tmp_path):
    folder = str(shutil.copytree(get_step_folder(f"{run}/checkpoints", 2), tmp_path / "step-2"))
    index = {key: value for key, value in read_index(folder).items() if key not in ("format", "sha256")}
    for kind in ("value", "ema"):
        index["tensors"][f"dense/head.{weight}s/{kind}"] = index["tensors"].pop(f"dense/head.{weight}/{kind}")
    del index["about"]["ids"]
    table = index["tensors"]["tables/tag/weight"]
    table["shape"] = table["chunks"][0]["sizes"] = [4, 10]
    write_index(folder, index)
    with Replicas(run / "export-None") as service:
        metrics = verify(service.url, folder).metrics
    assert metrics["result"] == "different" and not any(each["count"] for each in metrics["differences"])
    examples = {f"{each['part']} {each['name']}": each["examples"] for each in metrics["differences"]}
    assert examples["rows tag"] == ["fp32 [5, 8] in the service, fp32 [4, 10] in the checkpoint"]
    assert examples["ids user"][0].startswith("int64 [") and "missing in the checkpoint" in examples["ids user"][0]
    for program in ("predict", "query", "item"):
        assert examples[f"dense {program}/{weight}"][0].endswith("in the service, missing in the checkpoint")
        assert examples[f"dense {program}/{weight}s"][0].startswith("missing in the service, float32 [")
    assert len(examples) == 8


def test_each_replica_is_compared_and_unreached_replicas_are_named(run):
    with Replicas(run / "export-int8", ("one", "two"), unreached=["three"]) as service:
        flip_row(service.scorers["two"], "tag", 4)
        metrics = verify(service.url, str(run)).metrics
        assert sorted(metrics["replicas"]) == ["one", "two"] and metrics["unreached_replicas"] == ["three"]
        (difference,) = metrics["differences"]
        assert (difference["replica"], difference["name"]) == ("two", "tag")
        connection = ReplicaConnection(service.url, TOKEN)
        query = {"part": "rows", "name": "tag", "first": 4, "end": 5}
        digest = connection.get("/state/block", **query)
        for _ in range(10):  # the kernel selects any replica for a new connection
            connection._connection.close()
            assert connection.get("/state/block", **query) == digest


def test_version_change_starts_the_comparison_over(run, monkeypatch):
    monkeypatch.setattr("raytrec.verification.verify.RESTART_DELAY_S", 0)
    with Replicas(run / "export-None") as service:
        scorer, versions = service.scorers["one"], iter(["small-2-00000001"])
        service.on_listing = lambda: setattr(scorer, "version", next(versions, scorer.version))
        assert verify(service.url, str(run)).metrics["version"] == "small-2-00000001"
        versions = iter([f"small-2-{number:08x}" for number in range(2, 9)])
        with pytest.raises(
            RunError, match="3 comparisons was interrupted, the last one because the version has changed from small-2"
        ):
            verify(service.url, str(run))


def test_other_runs_and_steps_and_missing_checkpoints_are_errors(run, tmp_path):
    with Replicas(run / "export-None") as service:
        with pytest.raises(RunError, match="there is no checkpoint of step 7"):
            verify(service.url, f"{run}/7")
        with pytest.raises(RunError, match="no complete checkpoint in this folder"):
            verify(service.url, str(tmp_path))
        service.scorers["one"].version = "small-7-00000000"
        with pytest.raises(RunError, match="serves step 7 of run small, but the checkpoint contains step 2") as error:
            verify(service.url, str(run))
        assert "stop the run or wait for its end" in error.value.do and "reached" not in error.value.do
        for address in (service.url.removeprefix("http://"), "http://[::1", "http://localhost:port", "s3://a"):
            with pytest.raises(RunError, match="is not the address of a service"):
                verify(address, str(run))
            with pytest.raises(RunError, match="is not the address of a service"):
                promote("export", service=address, name=None)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RunError, match="the token is wrong") as error:
            patch.setenv("RAYTREC_SERVE_TOKEN", "wrong")
            verify(service.url, str(run))
        assert "RAYTREC_SERVE_TOKEN" in error.value.do and "--name" in error.value.do
        for version, step in (("other-7-00000000", 7), ("other-2-00000000", 2)):
            service.scorers["one"].version = version
            what = f"serves step {step} of run other, but the checkpoint contains step 2 of run small"
            with pytest.raises(RunError, match=what) as error:
                verify(service.url, str(run))
            assert f"{run}/checkpoints" in error.value.where and "pass the folder of run other" in error.value.do
        service.scorers["one"].version = "small-2-00000000"
        assert verify(service.url, get_step_folder(f"{run}/checkpoints", 2)).metrics["result"] == "equal"
    with pytest.raises(RunError, match=r"the service does not respond: .*refused"):
        verify(service.url, str(run))


def test_server_of_another_kind_is_an_error(tmp_path):
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    (tmp_path / "state").write_text("hello")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            with pytest.raises(RunError, match="the response names no replica"):
                ReplicaConnection(f"http://127.0.0.1:{server.server_port}", "")
        finally:
            server.shutdown()
            thread.join()


def test_damaged_checkpoint_is_an_error(run, tmp_path):
    folder = shutil.copytree(get_step_folder(f"{run}/checkpoints", 2), tmp_path / "step-2")
    (chunk,) = read_index(str(folder))["tensors"]["tables/tag/weight"]["chunks"]
    content = bytearray((folder / chunk["file"]).read_bytes())
    content[chunk["start"] + 3] ^= 1
    (folder / chunk["file"]).write_bytes(content)
    with Replicas(run / "export-None") as service, pytest.raises(RunError, match="the checkpoint cannot be read"):
        verify(service.url, str(folder))


def test_command_exits_with_1_if_a_row_differs(run, capsys):
    with Replicas(run / "export-fp16") as service:
        with pytest.raises(SystemExit) as ended:
            main(["verify", service.url, f"{run}/2"])
        assert ended.value.code == 0 and "equal" in capsys.readouterr().out
        flip_row(service.scorers["one"], "tag", 2)
        with pytest.raises(SystemExit) as ended:
            main(["verify", service.url, str(run), "--json"])
        assert ended.value.code == 1
        assert json.loads(capsys.readouterr().out)["differences"][0]["name"] == "tag"


BLOCK = {"part": "rows", "name": "user", "first": "0", "end": "2"}


@pytest.mark.parametrize(
    "change, where, words",
    [
        ({"part": "tables"}, "part", "'rows', 'ids' or 'dense'"),
        ({"name": "film"}, "name", "there is no name 'film'"),
        ({"part": "ids", "name": "tag"}, "name", "there is no name 'tag'"),
        ({"part": "dense"}, "name", "there is no name 'user'"),
        ({"first": "-1"}, "first", "greater than or equal to 0"),
        ({"first": "x"}, "first", "valid integer"),
        ({"first": "2"}, "first, end", "invalid range from 2 to 2"),
        ({"end": "41", "first": "40"}, "first, end", "invalid range from 40 to 41"),
        ({"end": "8"}, "first, end", "invalid range from 0 to 8"),
        ({"part": "ids", "end": str(2**64)}, "first, end", "invalid range"),
        ({"part": "ids", "end": str(2**64 + 1)}, "end", "less than or equal to"),
        ({"end": None}, "end", "Field required"),
        ({"values": "2"}, "values", "valid boolean"),
        ({"rows": "2"}, "rows", "Extra inputs"),
    ],
)
def test_bad_queries_name_the_parameter(http, document, change, where, words):
    query = "&".join(f"{name}={value}" for name, value in (BLOCK | change).items() if value is not None)
    status, content, headers = http.ask(f"/state/block?{query}")
    assert status == 400 and json.loads(content)["where"] == where and words in json.loads(content)["error"]
    assert_described(document, "get", "/state/block", status, content, headers)


@pytest.fixture(scope="module")
def http(run):
    endpoints = list_endpoints("one")
    with ServedApp(Service(LoadedExports(str(run / "export-None")), TOKEN, extra_endpoints=endpoints)) as http:
        yield http


@pytest.fixture(scope="module")
def document(http):
    return json.loads(http.ask("/openapi.json")[1])


def test_answers_match_their_descriptions(http, document):
    query = "/state/block?" + "&".join(f"{name}={value}" for name, value in BLOCK.items())
    for path in ("/state", query, f"{query}&values=1"):
        for token in (TOKEN, ""):
            status, content, headers = http.ask(path, token=token)
            assert status == (200 if token else 401)
            assert_described(document, "get", path, status, content, headers)
    stored = http.service.versions.current.scorer.lookups.tables["user"].stack._stored
    assert http.ask(f"{query}&values=1")[1] == stored[:2].numpy().tobytes()
