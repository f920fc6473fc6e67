"""Lookups in table shards over Arrow Flight, without Ray: equal results, missing shards, and refused requests."""

import json
import os
import random
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
import torch
from drawn_lookups import draw_rows, look_up_one_by_one, models
from exports import train_for_export
from hypothesis import given, settings
from hypothesis import strategies as st
from local_shards import local_shards
from served import TOKEN, ServedApp, assert_predictions_equal
from test_models import ModelCase
from waiting import wait_for

import raytrec
from raytrec.common.errors import RunError
from raytrec.scoring.load import load
from raytrec.scoring.manifest import Manifest, StackEntry
from raytrec.scoring.stored_tables import PRECISIONS, RowStack
from raytrec.serving.app import Service
from raytrec.serving.loaded_exports import LoadedExports
from raytrec.serving.table_shards import lookups, pooling
from raytrec.serving.table_shards import shard as shard_module
from raytrec.serving.table_shards.connection import FAILURES, ShardConnection, TableState
from raytrec.serving.table_shards.loaded_tables import load_tables
from raytrec.serving.table_shards.messages import StackRequest, decode_key, decode_request, encode_request
from raytrec.serving.table_shards.pooling import RowCache, ShardedStack


@pytest.fixture(scope="module")
def shards():
    with local_shards(3) as shards:
        yield shards


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    """Distribute the rows of small tables over all shards."""
    monkeypatch.setattr(pooling, "PAGE_BYTES", 32)


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Return the paths of a DLRM's export, and of its int8 version, and a table of rows."""
    root = tmp_path_factory.mktemp("shards")
    folder, table, _, _ = train_for_export(ModelCase("dlrm", (1, 1)), root)
    small = raytrec.export(folder, str(root / "small"), quantize="int8").path
    return raytrec.export(folder, str(root / "whole")).path, small, table


def serve_drawn_tables(shards, features, stored, precision):
    """Serve drawn tables, with a stack for each dim, and return a manifest."""
    by_dim = {}
    for name, table in features.schema.tables.items():
        by_dim.setdefault(table.dim, []).append(name)
    name = next(each for each, known in PRECISIONS.items() if known == precision)
    entries = [StackEntry(tables=names, precision=name, block_rows=100, files=["x"]) for names in by_dim.values()]
    values = {"data_schema": features.schema, "sequences": features.sequences, "files": {}, "binding": "b"}
    source = SimpleNamespace(run="run", step=3)
    manifest = Manifest.model_construct(stacks=entries, source=source, **values)
    stacks = [RowStack(torch.cat([stored[name] for name in names]), precision) for names in by_dim.values()]
    shards.serve_stacks(manifest.version, stacks, manifest.stack_shapes, manifest.stack_precisions)
    return manifest


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_lookups_in_shards_equal_lookups_one_by_one(shards, data):
    """Weighted and mean bags, sequences, managed ids, and tables in all precisions."""
    features, stored, ids, precision = data.draw(models())
    manifest = serve_drawn_tables(shards, features, stored, precision)
    lookups = shards.make_lookups("", manifest, ids, cache_bytes=data.draw(st.sampled_from([0, 200, 10**6])))
    for _ in range(4):
        rows, needed = draw_rows(data.draw, features)
        found, expected = lookups(rows, needed), look_up_one_by_one(features, stored, ids, precision, rows, needed)
        assert found.keys() == expected.keys()
        lengths = dict(zip(rows.bags.keys, rows.bags.lengths.view(len(rows.bags.keys), -1), strict=True))
        for (kind, name), values in expected.items():
            torch.testing.assert_close(found[kind, name], values, rtol=1e-6, atol=1e-6)
            if kind != "bag" or (lengths[name] == 1).all():
                assert torch.equal(found[kind, name], values), (kind, name)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["whole", "small"])
def test_scores_equal_those_of_mapped_tables(shards, exports, precision):
    export, table = exports[precision == "small"], exports[2]
    model, mapped = load(export, make_lookups=shards.make_lookups), load(export)
    for _ in range(3):  # more and more rows are in the cache
        assert_predictions_equal(model.predict(table).to_pydict(), mapped.predict(table))
    rows = table.select(model.columns.names).to_pylist()
    user = {name: rows[0][name] for name in ("a", "user")}
    candidates = [{name: value for name, value in row.items() if name not in user} for row in rows]
    ranked, expected = (each.predict(user=user, candidates=candidates) for each in (model, mapped))
    assert_predictions_equal(ranked.to_pydict(), expected)


@pytest.fixture
def body(exports):
    return {"rows": exports[2].to_pylist()}


def serve(shards, export, **options):
    """Return an HTTP service whose tables are in shards."""
    versions = LoadedExports(export, make_lookups=partial(shards.make_lookups, **options))
    return ServedApp(Service(versions, TOKEN, figures=shards.figures, threads=2))


@pytest.mark.slow
def test_missing_shard_fails_requests_until_it_is_back(exports, body):
    with local_shards(2) as shards, serve(shards, exports[0], cache_bytes=0) as http:
        expected = http.scores(body)
        shards.stop(1)
        status, content, headers = http.ask("/predict", body)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(content)["error"] == "table shards are unavailable or late: 1"
        assert http.ask("/ready")[0] == 200 and shards.count("raytrec_missing_shards_total", shard="1") >= 1
        shards.replace(1)
        wait_for(lambda: http.ask("/predict", body)[0] == 200, "the shard", 60)
        assert http.scores(body) == expected
        assert shards.count("raytrec_table_seconds_count", outcome="complete") >= 3


def test_missing_shard_is_replaced_by_zeros_if_desired(exports, body):
    export, _, table = exports
    with local_shards(2) as shards, serve(shards, export, cache_bytes=0, fallback="zeros") as http:
        expected = http.scores(body)
        assert http.ask("/predict", body)[2]["X-Missing-Shards"] is None
        for number, missing in ((1, "1"), (0, "0, 1")):
            shards.stop(number)
            status, content, headers = http.ask("/predict", body)
            assert (status, headers["X-Missing-Shards"]) == (200, missing)
        zeros = load(export)
        zeros.lookups._tables = [  # of all features
            each.__class__(RowStack(torch.zeros(1000, 8), PRECISIONS["fp32"])) for each in zeros.lookups._tables
        ]
        predictions = json.loads(content)["predictions"]
        assert_predictions_equal(predictions, zeros.predict(table))
        assert predictions != expected and shards.count("raytrec_missing_shards_total", shard="0") == 1


def test_golden_rows_need_all_shards(exports):
    """A version whose golden rows cannot be compared is not loaded, whatever the fallback."""
    with local_shards(2) as shards:
        shards.shards[0].answer = lambda request: pa.py_buffer(b"")
        with pytest.raises(RunError, match="table shards are unavailable or late: 0"):
            load(exports[0], make_lookups=partial(shards.make_lookups, fallback="zeros"))


@pytest.mark.slow
def test_hanging_shard_delays_requests_by_the_timeout_only(exports, body):
    hanging = threading.Event()
    with local_shards(2) as shards, serve(shards, exports[0], cache_bytes=0, timeout_s=0.3) as http:
        answer = shards.shards[0].answer
        wait_for(lambda: http.ask("/predict", body)[0] == 200, "an answer", 60)
        shards.shards[0].answer = lambda request: hanging.wait(60) and answer(request)
        assert http.ask("/predict", body)[0] == 503 and not hanging.is_set()
        hanging.set()
        wait_for(lambda: http.ask("/predict", body)[0] == 200, "the shard", 60)


@pytest.mark.slow
def test_silent_port_delays_no_request():
    """A port that accepts connections and never responds fails `connect`, which no request waits for."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        location = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
        connection = ShardConnection(0, lambda state, timeout_s: (location, "token"), TableState("x", "v", "fp32"))
        connecting = ThreadPoolExecutor(1).submit(connection.connect, connection.state, 60.0)
        sleep(0.1)
        began = monotonic()
        assert connection.send(b"", began + 60) is None and monotonic() < began + 1
        with pytest.raises(FAILURES):
            connecting.result(15)
        assert connection.is_away


@pytest.mark.slow
def test_late_answer_fails_only_its_request(exports, body, caplog):
    """One slow request, such as one with very many rows, does not make the shard unavailable for others."""
    slow = threading.Event()
    with local_shards(2) as shards, serve(shards, exports[0], cache_bytes=0, timeout_s=1.0) as http:
        answer, waits = shards.shards[0].answer, [True]
        expected = http.scores(body)
        shards.shards[0].answer = lambda request: (waits and waits.pop() and slow.wait(60)) or answer(request)
        assert http.ask("/predict", body)[0] == 503 and not waits
        assert http.scores(body) == expected and "is unavailable" not in caplog.text
        slow.set()


def test_request_with_too_many_vectors_is_an_error_of_the_client(exports, body, monkeypatch):
    with local_shards(2) as shards, serve(shards, exports[0]) as http:
        expected = http.scores(body)
        monkeypatch.setattr(lookups, "MAX_VALUE_BYTES", 10_000)
        status, content, _ = http.ask("/predict", {"rows": body["rows"] * 50})
        assert status == 400 and "the vectors of all ids take" in json.loads(content)["error"]
        assert http.scores(body) == expected


@pytest.mark.slow
def test_versions_are_served_side_by_side(exports, body):
    whole, small, table = exports
    with local_shards(2) as shards, serve(shards, whole) as http:
        versions, first = http.service.versions, http.scores(body)
        versions.commit(versions.prepare(small))
        assert_predictions_equal(http.scores(body), load(small).predict(table))
        assert [len(shard._tables) for shard in shards.shards] == [2, 2]
        versions.commit(versions.prepare(whole))  # the previous version, still in memory
        assert http.scores(body) == first
        for shard in shards.shards:
            shard._tables = [each for each in shard._tables if f"{versions.version} " not in each.keys[0]]
        wait_for(lambda: http.ask("/predict", body)[0] == 200, "the version, which is loaded again", 60)
        assert http.scores(body) == first


def test_shard_refuses_another_version_in_place(exports):
    with local_shards(1) as shards, pytest.raises(RunError, match="changed in place from version other to "):
        shards.shards[0].open(TableState(exports[0], "other", "fp32"))


def test_calls_do_not_pile_up_while_tables_are_loaded(exports, monkeypatch):
    loading, done = threading.Event(), threading.Event()
    monkeypatch.setattr(shard_module, "MAX_WAIT_S", 0.1)
    monkeypatch.setattr(
        shard_module, "load_tables", lambda *words: loading.set() or (done.wait(60) and load_tables(*words))
    )
    state = TableState(exports[0], load(exports[0]).manifest.version, "fp32")
    with local_shards(1) as shards:
        thread = threading.Thread(target=shards.shards[0].open, args=(state,))
        thread.start()
        assert loading.wait(60) and shards.shards[0].open(state) is None
        done.set()
        thread.join(60)
        assert shards.shards[0].open(state)[0] == shards.shards[0].server.location


def open_stream(shard, token=None):
    """Return (writer, reader) of a stream to a shard."""
    client = flight.FlightClient(shard.server.location)
    header = f"Bearer {shard._token if token is None else token}".encode()
    options = flight.FlightCallOptions(headers=[(b"authorization", header)], timeout=30)
    return client.do_exchange(flight.FlightDescriptor.for_command(b"lookup"), options)


def ask(shard, request, token=None):
    """Return the answer of a shard as bytes."""
    writer, reader = open_stream(shard, token)
    writer.write_metadata(request)
    return reader.read_chunk().app_metadata.to_pybytes()


@pytest.fixture(scope="module")
def numbers():
    """Return a shard with one stack of 10 rows of dim 4, and a valid request and its answer."""
    rows = torch.arange(40.0).view(10, 4)
    with local_shards(1) as shards:
        shards.serve_stacks("v", [RowStack(rows, PRECISIONS["fp32"])], [(10, 4)])
        stack = StackRequest(np.array([9, 1, 2]), np.array([2]), np.array([1, 2], np.float32))
        answer = torch.stack([rows[9], rows[1] + 2 * rows[2]]).numpy().tobytes()
        yield shards.shards[0], encode_request("v fp32", [stack]), answer


@pytest.mark.parametrize("token", ["", "wrong"])
def test_wrong_token_is_refused(numbers, token):
    shard, request, _ = numbers
    with pytest.raises(flight.FlightUnauthenticatedError, match="token is missing or wrong"):
        ask(shard, request, token)


def put_number(request, place, value):
    """Return a request with another integer in a place of 8 bytes."""
    changed = bytearray(request)
    changed[8 * place : 8 * place + 8] = int(value).to_bytes(8, "little", signed=True)
    return bytes(changed)


HEADER, ROWS, LENGTHS = 0, 8, 11  # places of integers in the request of `numbers`
BAD_REQUESTS = {
    "empty": lambda good: b"",
    "short": lambda good: good[:16],
    "truncated": lambda good: good[:-4],
    "longer": lambda good: good + bytes(8),
    "another format": lambda good: put_number(good, 0, 2),
    "long version": lambda good: put_number(good, 1, 2**40),
    "no stacks": lambda good: put_number(good, 2, 0),
    "too many stacks": lambda good: put_number(good, 2, 2**60),
    "negative rows": lambda good: put_number(good, 3, -1),
    "too many rows": lambda good: put_number(good, 3, 2**40),
    "huge number of bags": lambda good: put_number(good, 5, 2**62),
    "row out of range": lambda good: put_number(good, ROWS, 10),
    "negative row": lambda good: put_number(good, ROWS, -1),
    "huge row": lambda good: put_number(good, ROWS + 2, 2**62),
    "empty bag": lambda good: put_number(good, LENGTHS, 0),
    "huge bag": lambda good: put_number(good, LENGTHS, 2**62),
    "negative bag": lambda good: put_number(good, LENGTHS, -2),
    "another version": lambda good: good.replace(b"v fp32", b"w fp32"),
    "invalid UTF-8": lambda good: good.replace(b"v fp32", b"\xff fp32"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_malformed_request_is_refused_and_the_shard_lives(numbers, name):
    shard, request, answer = numbers
    with pytest.raises((pa.ArrowException, OSError, StopIteration)) as refusal:
        ask(shard, BAD_REQUESTS[name](request))
    if name == "another version":
        assert "shard 0 has v fp32, not w fp32" in str(refusal.value)
    assert ask(shard, request) == answer


def test_other_calls_and_record_batches_are_refused(numbers):
    shard, request, answer = numbers
    writer, reader = open_stream(shard)
    batch = pa.record_batch([pa.array([1])], names=["a"])
    writer.begin(batch.schema)
    writer.write_batch(batch)
    with pytest.raises((pa.ArrowException, OSError), match="not a request"):
        reader.read_chunk()
    client = flight.FlightClient(shard.server.location)
    with pytest.raises((pa.ArrowException, OSError)):
        list(client.do_action(flight.Action("x", b"")))
    assert ask(shard, request) == answer


def test_random_bytes_never_reach_the_tables(numbers):
    """Decoding either raises ValueError, or returns rows within the stack and bags that match the rows."""
    _, request, _ = numbers
    draw, accepted = random.Random(0), 0
    for _ in range(3000):
        changed = bytearray(request)
        for _ in range(draw.randrange(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        if draw.randrange(4) == 0:
            changed = bytearray(os.urandom(draw.randrange(200)))
        try:
            decode_key(memoryview(changed))
            (stack,) = decode_request(memoryview(changed), [(10, 4)])
        except ValueError:
            continue
        accepted += 1
        assert ((stack.rows >= 0) & (stack.rows < 10)).all() and (stack.lengths > 0).all()
        assert stack.lengths.sum() <= len(stack.rows) <= 12
    assert accepted


def test_cache_keeps_frequent_rows_and_drops_changed_ones():
    cache, rows = RowCache(1000, 4, 40 * (4 * 4 + 17)), np.arange(1000)
    vectors = np.repeat(rows[:, None], 4, 1).astype(np.float32)
    assert len(cache._rows) == 32
    hot = np.array([3, 700])
    for _ in range(30):
        for part in (hot, np.random.default_rng(0).integers(0, 1000, 5), hot):
            found, values, new, drops = cache.find(part)
            assert (values == vectors[part[found]]).all()
            cache.insert(part[new], vectors[part[new]], drops)
    assert cache.find(hot)[0].all()
    *_, drops = cache.find(hot)
    cache.drop(hot[:1])
    assert cache.find(hot)[0].tolist() == [False, True]
    cache.insert(hot[:1], vectors[hot[:1]], drops)  # looked up before the row changed
    assert cache.find(hot)[0].tolist() == [False, True]


def test_rows_are_balanced_over_shards_whatever_their_frequency(monkeypatch):
    monkeypatch.setattr(pooling, "PAGE_BYTES", 4096)
    draw = np.random.default_rng(0)
    for row_bytes in (256, 72, 40):
        stack = ShardedStack(64, row_bytes, 4, RowCache(1, 1, 0))
        ids = np.minimum(draw.zipf(1.3, (20_000, 26)) - 1, 99_999) + np.arange(26) * 100_000
        counts = np.bincount(stack.find_shards(ids.ravel()), minlength=4)
        assert counts.min() > 0.1 * counts.sum(), (row_bytes, counts)
        pages = np.unique(np.arange(200_000) * row_bytes // 4096 * 8 + stack.find_shards(np.arange(200_000)))
        assert len(pages) <= 200_000 * row_bytes / 4096 * 1.02, "shards share pages"
