"""The HTTP service in the test process: its responses and its refusals, without Ray."""

import asyncio
import json
import os
import re
import shutil
import textwrap
import threading
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import TOKEN, ServedApp, assert_predictions_equal, to_arrow_stream
from waiting import wait_for

import raytrec
from raytrec.common.errors import DataError, RunError
from raytrec.scoring.manifest import read_manifest
from raytrec.scoring.request_rows import ObjectRows
from raytrec.serving.app import Service
from raytrec.serving.batching import Batcher
from raytrec.serving.bodies import ARROW, JSON, Limits, Query, decode_request
from raytrec.serving.loaded_exports import LoadedExports, execute_command, load_either
from raytrec.serving.openapi import make_page
from raytrec.serving.replica_metrics import describe_model
from raytrec.serving.replica_state import Export, ReplicaCommand, ReplicaState

LIMITS = Limits(body_bytes=200_000, rows=100, ids=50)


@pytest.fixture(scope="module")
def http(served_export):
    with ServedApp(Service(LoadedExports(served_export[0]), TOKEN, LIMITS)) as http:
        yield http


@pytest.fixture(scope="module")
def model(served_export):
    return raytrec.load(served_export[0])


@pytest.mark.slow
def test_service_scores_every_row_format_like_load(http, model, served_export):
    _, table = served_export
    expected = model.predict(table)
    for _, predictions in http.scores_of_forms(table.to_pylist(), table):
        assert_predictions_equal(predictions, expected)


def test_service_scores_candidates_of_one_user(http, model, served_export):
    body = make_ranking_body(model, served_export[1])
    assert_predictions_equal(http.scores(body), model.predict(**body))


def test_service_returns_tower_vectors(http, model, served_export):
    _, table = served_export
    for tower in ("query", "item"):
        status, content, _ = http.ask(f"/vectors?tower={tower}", {"rows": table.to_pylist()})
        assert status == 200
        vectors = json.loads(content)["predictions"]["vector"]
        np.testing.assert_allclose(vectors, model.vectors(table, tower=tower), rtol=1e-6, atol=1e-6)


def get_valid_rows(made):
    return made[1].slice(0, 2).to_pylist()


def make_ranking_body(model, table):
    """Return the user of the first row, and the candidates of all rows."""
    columns = model.get_reader("query").columns.names
    user = {name: table[name][0].as_py() for name in columns}
    return {"user": user, "candidates": table.drop_columns(columns).to_pylist()}


@pytest.mark.parametrize(
    "change, status, words",
    [
        ({"body": b""}, 400, "invalid JSON"),
        ({"body": b'{"rows": [NaN]}'}, 400, "invalid JSON"),
        ({"body": b"[" * 100_000}, 400, "invalid JSON"),
        ({"body": b"\xff\xfe"}, 400, "invalid JSON"),
        ({"body": {}}, 400, "the body is an empty object"),
        ({"body": {"rows": [], "user": {}}}, 400, "the body has the keys [rows, user]"),
        ({"body": {"rows": []}}, 400, "there are no rows"),
        ({"body": {"user": {}, "candidates": []}}, 400, "there are no candidates"),
        ({"body": {"rows": {}}}, 400, "the rows are not a list"),
        ({"body": {"rows": [3]}}, 400, "the row is not a mapping: 3"),
        ({"body": {"columns": {"a": 3}}}, 400, "not an object of lists"),
        ({"body": {"columns": {"c": [3]}}}, 400, "no column is one of the model's columns"),
        ({"body": {"columns": {"a": [1.0], "b": [1.0, 2.0]}}}, 400, "different numbers"),
        ({"body": {"user": {}, "candidates": [{}]}}, 400, "user has none of the model's columns"),
        ({"body": {"user": [], "candidates": [{}]}}, 400, "user is not an object"),
        ({"row": {"a": 2**63}}, 400, "column 'a' has the invalid value"),
        ({"row": {"user": [2**63]}}, 400, "column 'user' has the invalid value"),
        ({"row": {"user": [2**40]}}, 400, "id 1099511627776 of feature 'user' is out of range for table"),
        ({"row": {"user": ["3"]}}, 400, "column 'user' has the invalid value"),
        ({"row": {"a": None}}, 400, "column 'a' contains a null"),
        ({"row": {"user": list(range(51))}}, 413, "a list in column 'user' has 51 values"),
        ({"times": 51}, 413, "there are 102 rows"),
        ({"body": b" " * 200_001}, 413, "the request body is too large"),
        ({"kind": "text/csv"}, 415, "the content type 'text/csv' is not supported"),
        ({"kind": ARROW}, 400, "not a valid Arrow stream"),
        ({"path": "/vectors?tower=items"}, 400, "there is no tower 'items'"),
        ({"headers": {"Content-Encoding": "gzip"}}, 415, "the content encoding 'gzip' is not supported"),
        ({"headers": {"Content-Length": str(10**12)}}, 413, "the request body is too large"),
        ({"token": "another"}, 401, "the token is wrong"),
        ({"path": "/predictions"}, 404, "/predictions"),
        ({"path": "/predict", "method": "GET"}, 405, "/predict does not support GET"),
    ],
)
def test_bad_request_error_names_the_cause(http, served_export, change, status, words):
    rows, change = get_valid_rows(served_export), dict(change)
    if "row" in change:
        rows[1] |= change.pop("row")
    options = {"path": "/predict", "body": {"rows": rows * change.pop("times", 1)}} | change
    got, content, _ = http.ask(**options)
    assert got == status, content
    assert words in json.loads(content)["error"]
    assert json.loads(content)["do"]


@pytest.mark.parametrize("value", ["x", None])
def test_error_names_user_or_candidates(http, model, served_export, value):
    _, table = served_export
    user, candidates = make_ranking_body(model, table).values()
    wrong = [candidates[0], candidates[1] | {"b": value}]
    for each, rows, where in (
        (user | {"a": value}, candidates, "user, column a"),
        (user, wrong, "candidates, column b, row 1"),
    ):
        status, content, _ = http.ask("/predict", {"user": each, "candidates": rows})
        assert (status, json.loads(content)["where"]) == (400, where)
    repeated = [*candidates[:3], candidates[3] | {"a": 0.5}]
    status, content, _ = http.ask("/predict", {"user": user, "candidates": repeated})
    assert (status, json.loads(content)["error"]) == (400, "column 'a' is in both user and candidates")
    lists = {name: table[name].to_pylist() for name in table.column_names}
    status, content, _ = http.ask("/predict", {"columns": lists | {"b": [0.5, *[value] * (len(table) - 1)]}})
    assert (status, json.loads(content)["where"]) == (400, "the rows, column b, row 1")


def test_health_is_public_and_openapi_lists_every_endpoint(http, served_export):
    assert http.ask("/ready", token="")[0] == http.ask("/health", token="")[0] == 200
    assert http.ask("/openapi.json", token="")[0] == 401
    document = json.loads(http.ask("/openapi.json")[1])
    body = document["paths"]["/predict"]["post"]["requestBody"]["content"][JSON]
    assert http.scores(body["example"])["score_y"]
    paths = document["paths"].items()
    documented = {(method.upper(), path) for path, of in paths for method in of.keys() & {"get", "post"}}
    assert documented == {(each.method, each.path) for each in http.service.endpoints}
    example = http.ask("/example")[1]
    assert json.loads(example) == body["example"] and http.scores(example)["score_y"]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_malformed_bodies_never_cause_server_errors(http, served_export, data):
    row, values = get_valid_rows(served_export)[0], data.draw(JSON_VALUES)
    column = data.draw(st.sampled_from(sorted(row)))
    whole = json.dumps({"rows": [row | {column: values}]}).encode()
    arrow = to_arrow_stream(served_export[1])
    cut = data.draw(st.integers(0, len(arrow)))
    bodies = [
        (JSON, whole),
        (JSON, json.dumps(values).encode()),
        (JSON, json.dumps({"user": values, "candidates": [row]}).encode()),
        (JSON, json.dumps({"columns": {column: values}}).encode()),
        (JSON, whole[: data.draw(st.integers(0, len(whole)))]),
        (ARROW, arrow[:cut] + data.draw(st.binary(max_size=4)) + arrow[cut + 2 :]),
    ]
    for kind, body in bodies:
        status, content, _ = http.ask("/predict", body, kind=kind)
        assert status < 500, (body, content)
        assert status == 200 or json.loads(content)["error"]


def test_batched_requests_each_get_their_own_scores(http, model, served_export):
    _, table = served_export
    expected = model.predict(table)

    def ask(place):
        return http.scores({"rows": table.slice(place, 1).to_pylist()})

    places = [number % len(table) for number in range(48)]
    with ThreadPoolExecutor(48) as pool:
        for place, predictions in zip(places, pool.map(ask, places), strict=True):
            assert_predictions_equal(predictions, expected.slice(place, 1))


def test_invalid_row_fails_only_its_own_request(model, served_export):
    rows, expected = (
        get_valid_rows(served_export),
        model.predict(served_export[1].slice(0, len(get_valid_rows(served_export)))),
    )
    schema = model.reader.columns
    wrong = [*rows[:-1], {**rows[-1], schema.names[0]: {}}]

    async def ask():
        batcher = Batcher()
        queries = [Query(model, "predict", ObjectRows(each, schema)) for each in (rows, wrong, rows)]
        return await asyncio.gather(*map(batcher.score, queries), return_exceptions=True)

    first, second, third = asyncio.run(ask())
    assert isinstance(second, DataError) and f"row {len(rows) - 1}" in str(second)
    for scores in (first, third):
        for got, column in zip(scores, expected.columns, strict=True):
            np.testing.assert_allclose(got, column.to_numpy(), rtol=1e-6)


def make_ranking_requests(model, table, columns):
    """Return bodies with different users and numbers of candidates, and the predictions of their full rows."""
    rows, bodies = table.to_pylist(), []
    for at in range(len(rows)):
        few = [{k: v for k, v in row.items() if k not in columns} for row in rows[: at + 1]]
        bodies.append({"user": {name: rows[at][name] for name in columns}, "candidates": few})
    return bodies, [model.predict([row | each["user"] for row in each["candidates"]]) for each in bodies]


def test_candidates_of_concurrent_users_are_scored_together(http, model, served_export, monkeypatch):
    bodies, expected = make_ranking_requests(model, served_export[1], ["user"])
    sizes = []
    monkeypatch.setattr(http.service, "batcher", Batcher(observe=sizes.append))

    def ask_all():
        with ThreadPoolExecutor(len(bodies)) as pool:
            for predictions, table in zip(pool.map(http.scores, bodies), expected, strict=True):
                assert_predictions_equal(predictions, table)
        return max(sizes) > len(bodies)  # more rows than any request has

    wait_for(ask_all, "requests in one batch", 60)


def score_together(bodies, model):
    """Score the users and candidates of several bodies at once; return their scores or errors, and the batch sizes."""
    sizes = []

    async def ask():
        batcher = Batcher(observe=sizes.append)
        queries = [decode_request(JSON, json.dumps(body).encode(), model, "predict", LIMITS) for body in bodies]
        return await asyncio.gather(*map(batcher.score, queries), return_exceptions=True)

    return asyncio.run(ask()), sizes


def assert_scores_equal(scores, expected):
    for values, column in zip(scores, expected.columns, strict=True):
        np.testing.assert_allclose(values, column.to_numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [["user"], ["a", "user"]])
def test_invalid_candidates_fail_only_their_own_user(model, served_export, columns):
    bodies, expected = make_ranking_requests(model, served_export[1], columns)
    bodies[5]["user"]["user"] = [10**6]
    bodies[7]["candidates"][3]["friends"] = [-1]
    found, sizes = score_together(bodies, model)
    for place, (scores, table) in enumerate(zip(found, expected, strict=True)):
        if place in (5, 7):
            assert isinstance(scores, DataError) and "out of range" in str(scores)
        else:
            assert_scores_equal(scores, table)
    assert sizes == [sum(len(body["candidates"]) for body in bodies)]


def test_users_with_other_columns_are_scored_apart(model, served_export):
    parts = [make_ranking_requests(model, served_export[1], columns) for columns in (["user"], ["a", "user"])]
    found, sizes = score_together([bodies[3] for bodies, _ in parts], model)
    for (_, expected), scores in zip(parts, found, strict=True):
        assert_scores_equal(scores, expected[3])
    assert sizes == [4, 4]


def test_changes_of_the_model_wait_for_threads_that_score(model, served_export):
    """The change is made after the rows that threads score, and before all rows that arrive later."""
    rows, events, finish = get_valid_rows(served_export), [], threading.Event()

    class SlowQuery(Query):
        def score(self, parts, users):
            events.append("begin")
            finish.wait(60)
            events.append("end")
            return super().score(parts, users)

    async def ask():
        batcher = Batcher(threads=2)
        make = lambda kind: kind(model, "predict", ObjectRows(rows, model.reader.columns))  # noqa: E731
        asked = [asyncio.create_task(batcher.score(make(SlowQuery))) for _ in range(2)]
        while "begin" not in events:
            await asyncio.sleep(0.01)
        batcher.call_between(lambda: events.append("change"))
        asked += [asyncio.create_task(batcher.score(make(SlowQuery))) for _ in range(3)]
        await asyncio.sleep(0.3)
        assert "change" not in events
        finish.set()
        await asyncio.gather(*asked)
        batcher.call_between(lambda: events.append("last"))

    asyncio.run(ask())
    before, after = events[: events.index("change")], events[events.index("change") + 1 :]
    assert before.count("begin") == before.count("end") >= 1 and after.count("end") >= 1
    assert events[-1] == "last"


def test_full_queue_rejects_requests(served_export, monkeypatch):
    monkeypatch.setattr("raytrec.serving.batching.MAX_QUEUED_ROWS", 3)
    body = {"rows": get_valid_rows(served_export)}
    with ServedApp(Service(LoadedExports(served_export[0]), None)) as http:
        http.service.batcher.waiting = 2
        status, content, headers = http.ask("/predict", body)
        assert status == 429 and headers["Retry-After"] == "1" and "are waiting" in json.loads(content)["error"]
        http.service.batcher.waiting = 0
        assert http.ask("/predict", body)[0] == 200
        assert http.service.batcher.waiting == 0


def test_replica_catches_up_on_missed_promotion(served_export):
    versions, small = LoadedExports(served_export[0]), served_export[0].replace("export", "small")
    first, second = versions.version, read_manifest(small).version
    order = ReplicaCommand(7, Export(small, second), prepare=str(Path(small) / "nothing"))
    report = execute_command(versions, order, ReplicaState(-1, first))
    assert (report.completed_command, report.version, versions.version) == (7, second, second)
    assert report.prepared is None and "there is no export in this folder" in str(report.error)
    report = execute_command(versions, ReplicaCommand(8, Export(small, second), prepare=served_export[0]), report)
    assert (report.version, report.prepared, report.error) == (second, first, None)
    assert execute_command(versions, ReplicaCommand(9, Export(served_export[0], first)), report).version == first


def truncate_one_table(export, _):
    os.truncate(next((export / "tables").iterdir()), 10)


def remove_export(export, _):
    shutil.rmtree(export)


def replace_with_other_export(export, other):
    shutil.rmtree(export)
    shutil.copytree(other, export)


@pytest.mark.parametrize("change", [truncate_one_table, remove_export, replace_with_other_export])
def test_changed_export_falls_back_to_previous_version(served_export, tmp_path, change):
    path = Path(shutil.copytree(served_export[0], tmp_path / "export"))
    small = served_export[0].replace("export", "small")
    now, before = (Export(str(each), read_manifest(str(each)).version) for each in (path, small))
    versions, why = load_either(now, before, False)
    assert (versions.version, why) == (now.version, None)
    del versions
    change(path, small)
    versions, why = load_either(now, before, False)
    assert versions.version == before.version and "export" in why and "\n" not in why
    for other in (None, Export(str(tmp_path / "nothing"), "films-1")):
        with pytest.raises(RunError) as caught:
            load_either(now, other, False)
        assert caught.value.where == str(path)


def test_public_page_omits_the_model_version(http):
    status, content, headers = http.ask("/", token="")
    assert (status, headers["Content-Security-Policy"][:19]) == (200, "default-src 'none';")
    about = describe_model(http.service.versions.current.scorer)
    assert about["version"].encode() not in content
    assert (about["run"], about["step"]) == ("small", 2) and 0 <= about["age_s"] < 600


def count_rejections(service):
    return service.figures.requests.labels("/predict", 429, service.versions.version)._value.get()


def free_queue_after_rejection(service):
    wait_for(lambda: count_rejections(service) > 0, "a 429", 60)
    service.batcher.waiting = 0


def test_documented_client_retries_rejected_requests(http, model, served_export, monkeypatch):
    """The first request gets 429. The soak test covers requests in flight on a killed replica."""
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    (block,) = re.findall(r"(?m)^    import urllib3\n(?:(?:    .*)?\n)+", page)
    monkeypatch.setattr("raytrec.serving.batching.RETRY_AFTER_S", 0)
    monkeypatch.setattr("raytrec.serving.batching.MAX_QUEUED_ROWS", 3)
    http.service.batcher.waiting = 2
    threading.Thread(target=free_queue_after_rejection, args=[http.service]).start()
    names = {"token": TOKEN, "rows": get_valid_rows(served_export)}
    exec(textwrap.dedent(block).replace("http://127.0.0.1:8000", http.url), names)
    assert_predictions_equal(names["answer"]["predictions"], model.predict(get_valid_rows(served_export)))
    assert count_rejections(http.service) > 0


def test_page_loads_no_external_resources_and_inserts_no_html():
    html, _ = make_page()
    assert re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)""", html) == ["data:,"]
    assert not re.search(r"https?://|@import|url\(|//cdn", html)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(", html)


def test_page_policy_allows_only_its_own_script_and_style():
    html, headers = make_page()
    policy = dict(each.split(" ", 1) for each in headers["Content-Security-Policy"].split("; "))
    for tag, what in (("script", "script-src"), ("style", "style-src")):
        ((text),) = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert policy.pop(what) == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert policy == {
        "default-src": "'none'", "img-src": "data:", "connect-src": "'self'",
        "base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert "style=" not in html and not re.search(r"\son[a-z]+=", html)


def test_page_sends_token_only_in_authorization_header():
    html, _ = make_page()
    (line,) = re.findall(r".*\$\{token\}.*", html)
    assert "Authorization: `Bearer ${token}`" in line and "location" not in html
