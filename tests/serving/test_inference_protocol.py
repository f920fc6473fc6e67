"""The Open Inference Protocol over HTTP: the scores of /predict in every form, and no server errors."""

import json
import re
import struct
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import small
import urllib3
from exports import ROWS, train_for_export
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import ARROW, TOKEN, ServedApp, to_arrow_stream

import raytrec
from raytrec.common.errors import DataError
from raytrec.serving.app import Service
from raytrec.serving.bodies import Limits
from raytrec.serving.inference_protocol import HEADER_LENGTH, InputTensor, describe_tensors, read_tensors, to_table
from raytrec.serving.loaded_exports import LoadedExports
from raytrec.serving.request_log import RequestLog

LIMITS = Limits(body_bytes=200_000, rows=100, ids=50)
DENSE, IDS = ["a", "b", "n"], ["user", "film"]
SPARSE = {
    "user": {"table": "user"},
    "film": {"table": "film", "column": "film"},
    "tags": {"table": "tag", "pooling": "mean"},
}
TABLES = {"user": {"rows": 23, "dim": 8}, "film": {"rows": 40, "dim": 8}, "tag": {"rows": 5, "dim": 8}}
CLASSES = {"name": "kind", "label": "y", "loss": "cross_entropy", "options": {"classes": 2}}
MODEL = {"name": "shared_bottom", "bottom_mlp": [6], "tower_mlp": [4]}


@dataclass(frozen=True)
class ProtocolCase:
    """Model with dense columns, ids and lists, and a task with two classes."""

    def schema(self):
        return small.make_small_schema(dense=DENSE, sparse=SPARSE, tables=TABLES)

    def config(self):
        return small.make_small_config(1, {"sharding_type": "table_wise"}, model=MODEL, tasks=[{"label": "y"}, CLASSES])


@pytest.fixture(scope="module")
def served_export(tmp_path_factory):
    """Return the path of an export and a table of rows, whose values fit both float32 and float64."""
    root, rng = tmp_path_factory.mktemp("protocol"), np.random.default_rng(1)
    folder, table, _, _ = train_for_export(ProtocolCase(), root)
    columns = {"y": table["y"]} | {name: rng.normal(size=ROWS).astype(np.float32) for name in ("a", "b")}
    columns |= {"n": rng.integers(0, 9, ROWS), "user": rng.integers(0, 23, ROWS), "film": rng.integers(0, 40, ROWS)}
    columns |= {"tags": [rng.integers(0, 5, n % 4).tolist() for n in range(ROWS)]}
    table = pa.table(columns)
    pq.write_table(table, root / "data/rows.parquet")
    return raytrec.export(folder, str(root / "export")).path, table.drop_columns(["y"])


@pytest.fixture(scope="module")
def http(served_export):
    with ServedApp(Service(LoadedExports(served_export[0]), TOKEN, LIMITS, name="films")) as http:
        yield http


def make_tensor(name, values, datatype, shape=None, **parameters):
    """Return the description of a tensor with JSON data, or with binary data if `values` are bytes."""
    binary = {"parameters": {"binary_data_size": len(values)} | parameters} if isinstance(values, bytes) else {}
    data = {} if binary else {"data": np.asarray(values).tolist()}
    shape = list(np.asarray(values).shape) if shape is None else list(shape)
    return {"name": name, "datatype": datatype, "shape": shape} | data | binary


def infer(http, tensors, path="/v2/models/films/infer", binary=False, token=TOKEN, tail=b"", size=None, **request):
    """Send tensors, (name, array, datatype), and return (status, answer, binary data, headers)."""
    inputs, parts = [], []
    for name, array, datatype in tensors:
        data = array.tobytes() if binary else array
        parts.append(data if binary else b"")
        inputs.append(make_tensor(name, data, datatype, array.shape))
    head = json.dumps({"inputs": inputs} | request).encode()
    body, headers = b"".join([head, *parts, tail]), {"Authorization": f"Bearer {token}"}
    if binary:
        headers |= {HEADER_LENGTH: str(len(head) if size is None else size)}
    answer = urllib3.request("POST", http.url + path, body=body, headers=headers, retries=False, timeout=60)
    length = int(answer.headers.get(HEADER_LENGTH, len(answer.data)))
    return answer.status, json.loads(answer.data[:length]), answer.data[length:], answer.headers


def to_matrices(table):
    """Return the tensors dense [B, 3] and ids [B, 2]."""
    stacked = [np.stack([table[name].to_numpy() for name in names], 1) for names in (DENSE, IDS)]
    return [("dense", stacked[0].astype(np.float64), "FP64"), ("ids", stacked[1], "INT64")]


def to_lists(table):
    """Return the tensors of the column with lists."""
    tags = table["tags"].combine_chunks()
    return [
        ("tags", tags.flatten().to_numpy(), "INT64"),
        ("tags.lengths", np.diff(tags.offsets.to_numpy()).astype(np.int32), "INT32"),
    ]


def to_columns(table, shape=(-1,)):
    """Return a tensor for each column that has no lists."""
    datatypes = {name: "FP32" if name in "ab" else "INT64" for name in (*DENSE, *IDS)}
    return [(name, table[name].to_numpy().reshape(shape), datatype) for name, datatype in datatypes.items()]


def read_outputs(answer, data):
    """Return task column → scores of an answer."""
    found = {}
    for output in answer["outputs"]:
        assert output["datatype"] == "FP32"
        if size := output.get("parameters", {}).get("binary_data_size"):
            values, data = np.frombuffer(data[:size], "<f4"), data[size:]
        else:
            values = np.array(output["data"], np.float32)
        found[output["name"]] = values.reshape(output["shape"])
    assert not data
    return found


def assert_same_scores(found, expected):
    """Assert that scores equal predictions of /predict bit for bit."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], np.array(values, np.float32), strict=True)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("binary_output", [True, False])
def test_tensors_in_every_form_give_the_scores_of_predict(http, served_export, binary, binary_output):
    _, table = served_export
    expected, lists = http.scores({"rows": table.to_pylist()}), to_lists(table)
    for tensors in (
        [*to_matrices(table), *lists],
        [*to_columns(table), *lists],
        [*to_columns(table, (-1, 1)), *lists],
        [to_matrices(table)[1], *to_columns(table)[:3], *lists],
        [*to_matrices(table), *lists, ("other", np.zeros((2, 5)), "FP64")],
    ):
        options = {"id": "7", "parameters": {"binary_data_output": binary_output}}
        status, answer, data, headers = infer(http, tensors, binary=binary, **options)
        assert status == 200, answer
        assert bool(data) == binary_output and answer["id"] == "7" and answer["model_name"] == "films"
        assert answer["model_version"] == headers["X-Model-Version"]
        assert_same_scores(read_outputs(answer, data), expected)


def test_lists_of_equal_lengths_need_no_lengths(http, served_export):
    table = served_export[1].slice(0, 4)
    tags = np.array([[0, 1], [4, 4], [2, 3], [1, 0]])
    for lists in (tags, tags[:, :0]):
        rows = [row | {"tags": ids} for row, ids in zip(table.to_pylist(), lists.tolist(), strict=True)]
        _, answer, data, _ = infer(http, [*to_matrices(table), ("tags", lists, "INT64")], binary=True)
        assert_same_scores(read_outputs(answer, data), http.scores({"rows": rows}))


@pytest.mark.parametrize("make_type", [pa.list_, lambda kind, _: pa.list_(kind), lambda kind, _: pa.large_list(kind)])
def test_arrow_matrices_give_the_scores_of_predict(http, served_export, make_type):
    _, table = served_export
    columns = {"tags": table["tags"]}
    for name, values, _ in to_matrices(table):
        columns[name] = pa.array(list(values), make_type(pa.from_numpy_dtype(values.dtype), values.shape[1]))
    expected = http.scores({"rows": table.to_pylist()})
    assert http.scores(to_arrow_stream(pa.table(columns)), kind=ARROW) == expected
    whole = table.append_column("dense", pa.nulls(len(table))).append_column("ids", table["user"])
    assert http.scores(to_arrow_stream(whole), kind=ARROW) == expected  # additional columns are ignored


def test_matrices_take_the_values_and_messages_of_columns(http, served_export):
    """Rows that are not plain are read as columns: nulls, other integers, halves, and ids out of range."""
    table = served_export[1].slice(0, 3)
    dense, ids = (values for _, values, _ in to_matrices(table))
    halves, small_ids = dense.astype(np.float16), ids.astype(np.uint64)
    changed = table
    for place, name in enumerate(("a", "b")):
        changed = changed.set_column(place, name, pa.array(halves[:, place].astype(np.float64)))
    tensors = [("dense", halves, "FP16"), ("ids", small_ids, "UINT64"), *to_lists(table)]
    _, answer, data, _ = infer(http, tensors, binary=True)
    assert_same_scores(read_outputs(answer, data), http.scores({"rows": changed.to_pylist()}))
    ids = ids.copy()
    ids[1, 1] = 40
    status, answer, _, _ = infer(http, [("dense", dense, "FP64"), ("ids", ids, "INT64"), *to_lists(table)])
    rows = [row | {"film": int(film)} for row, film in zip(table.to_pylist(), ids[:, 1], strict=True)]
    refused = json.loads(http.ask("/predict", {"rows": rows})[1])
    assert status == 400 and answer["error"].startswith(refused["error"]) and refused["where"] in answer["error"]
    columns = {"dense": [[1.0, None, 2.0]], "ids": [[1, 2]], "tags": [[1]]}
    status, content, _ = http.ask("/predict", to_arrow_stream(pa.table(columns)), kind=ARROW)
    assert status == 400 and "column 'b' contains a null" in json.loads(content)["error"]


def test_requested_outputs_are_returned_in_order(http, served_export):
    tensors = [*to_matrices(served_export[1]), *to_lists(served_export[1])]
    outputs = [{"name": "score_kind", "parameters": {"binary_data": True}}, {"name": "score_y"}]
    status, answer, data, _ = infer(http, tensors, outputs=outputs)
    assert [(each["name"], "data" in each) for each in answer["outputs"]] == [("score_kind", False), ("score_y", True)]
    assert_same_scores(read_outputs(answer, data), http.scores({"rows": served_export[1].to_pylist()}))
    for outputs, words in (([{"name": "y"}], "no output 'y'"), ([{"name": "score_y"}] * 2, "is requested twice")):
        status, answer, _, _ = infer(http, tensors, outputs=outputs)
        assert status == 400 and words in answer["error"]


def test_metadata_describe_the_model_that_answers(http):
    version = http.service.versions.version
    for name, path in (("films", ""), ("small", f"/versions/{version}")):
        status, content, _ = http.ask(f"/v2/models/{name}{path}")
        model = json.loads(content)
        assert (status, model["name"], model["versions"]) == (200, name, [version])
        matrices = {"dense": [], "ids": []}
        for each in model["inputs"]:
            if each["name"] != "tags":
                matrices[each["parameters"]["matrix"]].append(each["name"])
        assert matrices == {"dense": DENSE, "ids": IDS}
        shapes = {each["name"]: each["shape"] for each in model["outputs"]}
        assert shapes == {"score_y": [-1], "score_kind": [-1, 2]}
    for path in ("/v2/models/other", "/v2/models/films/versions/1/ready", "/v2/models/other/infer"):
        status, content, _ = http.ask(path, method="POST" if path.endswith("infer") else "GET")
        assert status == 404 and (version if "versions" in path else "films or small") in json.loads(content)["error"]
    assert http.ask("/v2/health/live", token="")[0] == http.ask("/v2/health/ready", token="")[0] == 200
    for path in ("/v2", "/v2/models/films", "/v2/models/films/ready"):
        status, content, _ = http.ask(path, token="")
        assert status == 401 and json.loads(content).keys() == {"error"}


def test_names_in_paths_add_no_series_to_metrics(http, served_export):
    requests = http.service.figures.requests
    for number in range(5):
        http.ask(f"/v2/models/{number}/infer", b"{}")
        http.ask(f"/v2/models/{number}/other", b"{}")
    paths = {sample.labels["path"] for metric in requests.collect() for sample in metric.samples}
    assert "/v2/models/{name}/infer" in paths and not [path for path in paths if re.search("models/[0-4]", path)]


def test_rows_of_tensors_are_logged(served_export, tmp_path):
    export, table = served_export
    with ServedApp(Service(LoadedExports(export), TOKEN)) as http:
        log = http.service.request_log = RequestLog(str(tmp_path), 1.0, "writer", http.service.figures)
        for binary in (True, False):
            tensors = [*to_matrices(table), *to_lists(table)]
            status, _, _, headers = infer(http, tensors, "/v2/models/small/infer", binary)
            assert status == 200 and headers["X-Request-Id"]
        log.close()
        columns = http.service.versions.current.scorer.reader.columns
    (file,) = tmp_path.rglob("*.parquet")
    logged = pq.read_table(file)
    assert set(logged["_path"].to_pylist()) == {"/v2/models/small/infer"}
    assert logged.select(columns.names) == pa.concat_tables([table.select(columns.names).cast(columns)] * 2)


TENSOR = make_tensor("a", [1.0, 2.0], "FP64")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"datatype": "FP8"}, "'FP8' is not supported"),
        ({"datatype": 3}, "valid string"),
        ({"shape": [3]}, "the input has 2 values"),
        ({"shape": [2**31]}, "less than 2147483648"),
        ({"shape": [2**30, 2**30]}, "the input has 2 values"),
        ({"shape": [-2]}, "greater than or equal to 0"),
        ({"shape": [True]}, "valid integer"),
        ({"shape": []}, "at least 1 item"),
        ({"shape": [1, 1, 2]}, "at most 2 items"),
        ({"data": [1.0, None]}, "which the protocol does not support"),
        ({"data": ["1", "2"]}, "Could not convert"),
        ({"data": [[1.0], [2.0]]}, "Could not convert"),
        ({"data": None}, "the values are missing"),
        ({"parameters": {"binary_data_size": 16}}, "both in data and in binary"),
        ({"data": None, "parameters": {"binary_data_size": 17}}, "above the remaining 16 bytes"),
        ({"data": None, "parameters": {"binary_data_size": -1}}, "greater than or equal to 0"),
        ({"data": None, "parameters": {"binary_data_size": 8}}, "the input has 1 value"),
        ({"data": None, "parameters": {"binary_data_size": 15}}, "multiple of element size"),
        ({"datatype": "BYTES", "data": None, "parameters": {"binary_data_size": 3}}, "the last text is incomplete"),
        ({"datatype": "BYTES", "data": None, "parameters": {"binary_data_size": 5}}, "the last text is incomplete"),
        ({"name": "b", "datatype": "INT64", "data": [1.0, 2.0]}, "decimal point"),
    ],
)
def test_invalid_tensor_error_names_the_cause(http, change, words):
    tensor = {name: value for name, value in (TENSOR | change).items() if value is not None}
    head = json.dumps({"inputs": [tensor]}).encode()
    tail = b"\x02\0\0\0ab" + b"\xff" * 10 if "binary_data_size" in str(change) else b""
    headers = {"Authorization": f"Bearer {TOKEN}", HEADER_LENGTH: str(len(head))}
    answer = urllib3.request("POST", f"{http.url}/v2/models/films/infer", body=head + tail, headers=headers)
    assert answer.status == 400 and words in answer.json()["error"], answer.data


@pytest.mark.parametrize(
    "change, status, words",
    [
        ({"tail": b"x"}, 400, "the binary data is too long by 1 B"),
        ({"size": "abc"}, 400, "invalid length 'abc'"),
        ({"size": -1}, 400, "invalid length"),
        ({"size": 10**9}, 400, "invalid length"),
        ({"size": "9" * 5000}, 400, "invalid length"),
        ({"size": 0}, 400, "Invalid JSON"),
        ({"inputs": []}, 400, "there are no rows"),
        ({"inputs": [make_tensor("other", [1.0], "FP64")]}, 400, "no input is one of the model's inputs"),
        ({"outputs": {}}, 400, "valid array"),
        ({"id": 7}, 400, "valid string"),
        ({"parameters": {"binary_data_output": "yes"}}, 400, "valid boolean"),
        ({"inputs": [TENSOR, TENSOR]}, 400, "the name occurs twice"),
        ({"inputs": [TENSOR, make_tensor("b", [1.0], "FP64")]}, 400, "different numbers of rows"),
        ({"inputs": [TENSOR]}, 400, "column 'b' is missing"),
        ({"inputs": [make_tensor("dense", [[1.0], [2.0]], "FP64")]}, 400, "'dense' has 1 value in row 0"),
        ({"inputs": [make_tensor("a", [0.0] * 101, "FP64")]}, 413, "there are 101 rows"),
        ({"inputs": [make_tensor("tags", [[]], "INT64", [2**30, 0])]}, 413, "there are 1,073,741,824 rows"),
        ({"inputs": [make_tensor("tags", [[1] * 51], "INT64")]}, 413, "a list in column 'tags' has 51 values"),
        ({"inputs": [{}] * 1001}, 413, "too many objects"),
        *(
            ({"inputs": [make_tensor("tags", [1, 2], "INT64"), make_tensor("tags.lengths", *lengths)]}, 400, "lengths")
            for lengths in (
                ([1, 2], "INT32"), ([1, -1, 2], "INT64"), ([2.0], "FP32"), (["2"], "BYTES"),
                (np.array([2**63, 2**63, 2], np.uint64), "UINT64"),
            )
        ),
    ],
)  # fmt: skip
def test_invalid_request_error_names_the_cause(http, served_export, change, status, words):
    tensors = [*to_matrices(served_export[1]), *to_lists(served_export[1])]
    found, answer, _, _ = infer(http, tensors, **({"binary": "inputs" not in change} | change))
    assert (found, answer.keys()) == (status, {"error"}) and words in answer["error"], answer


def test_texts_and_times_are_read_as_in_json():
    types = {"word": pa.string(), "at": pa.timestamp("us"), "words": pa.list_(pa.string()), "on": pa.bool_()}
    columns = pa.schema(types)
    texts, flags = b"".join(struct.pack("<I", len(text)) + text for text in (b"", "ö".encode(), b"a" * 300)), b"\1\0\1"
    inputs = [
        make_tensor("word", texts, "BYTES", [3]),
        make_tensor("on", flags, "BOOL", [3]),
        make_tensor("words", ["x", "y", "z"], "BYTES"),
        make_tensor("words.lengths", [0, 3, 0], "UINT8"),
        make_tensor("at", ["2026-11-07T00:00:00"] * 3, "BYTES"),
    ]
    tensors = read_tensors(map(InputTensor.model_validate, inputs), memoryview(texts + flags), columns)
    table = to_table(tensors, columns)
    assert table.schema.field("at").type == pa.timestamp("us")
    assert table.select(["word", "on", "words"]).to_pydict() == {
        "word": ["", "ö", "a" * 300], "on": [True, False, True], "words": [[], ["x", "y", "z"], []],
    }  # fmt: skip
    invalid = struct.pack("<I", 1) + b"\xc3"
    with pytest.raises(DataError, match="codec can't decode"):
        entry = InputTensor.model_validate(make_tensor("word", invalid, "BYTES", [1]))
        read_tensors([entry], memoryview(invalid), columns)


def test_durations_are_integers_of_the_unit_of_their_column():
    columns = pa.schema({"age": pa.duration("s"), "gaps": pa.list_(pa.duration("ms"))})
    scorer = SimpleNamespace(
        reader=SimpleNamespace(matrices={}, columns=columns), manifest=SimpleNamespace(tasks=[]), version="v"
    )
    assert [each["datatype"] for each in describe_tensors(scorer)["inputs"]] == ["INT64", "INT64"]
    binary = struct.pack("<2q", 90, -1)
    inputs = [
        make_tensor("age", binary, "INT64", [2]),
        make_tensor("gaps", [5, 6, 7], "INT64"),
        make_tensor("gaps.lengths", [1, 2], "INT64"),
    ]
    table = to_table(read_tensors(map(InputTensor.model_validate, inputs), memoryview(binary), columns), columns)
    assert table == pa.table({"age": [90, -1], "gaps": [[5], [6, 7]]}, columns)


VALUES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3)
NESTED_VALUES = st.recursive(VALUES, lambda inner: st.lists(inner, max_size=4), max_leaves=6)
KEYS = ("name", "datatype", "shape", "parameters", "data")


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_malformed_requests_never_cause_server_errors(http, served_export, data):
    table = served_export[1].slice(0, 2)
    binary, tensors = data.draw(st.booleans()), [*to_matrices(table), *to_lists(table)]
    parts = [array.tobytes() for _, array, _ in tensors]
    inputs = [
        make_tensor(name, part if binary else array, datatype, array.shape)
        for (name, array, datatype), part in zip(tensors, parts, strict=True)
    ]
    for _ in range(data.draw(st.integers(0, 2))):
        entry, key = data.draw(st.sampled_from(inputs)), data.draw(st.sampled_from(KEYS))
        drawn = {
            "name": st.sampled_from(["a", "dense", "ids", "tags", "tags.lengths", ""]),
            "datatype": st.sampled_from(["BOOL", "INT8", "UINT64", "FP16", "FP32", "BYTES", "", "int64"]),
            "shape": st.lists(st.integers(-1, 8) | st.sampled_from([2**30, 2**31 - 1, 2**64]), max_size=3),
            "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 100) | st.just(2**70)}),
            "data": st.lists(NESTED_VALUES, max_size=6),
        }[key]
        entry[key] = data.draw(drawn | NESTED_VALUES)
    head = json.dumps({"inputs": inputs} | data.draw(st.sampled_from([{}, {"outputs": [{}]}, {"id": None}]))).encode()
    body = head + (b"".join(parts) if binary else b"")
    cut = data.draw(st.integers(0, len(body)) | st.just(len(body)))
    body = body[:cut] + data.draw(st.binary(max_size=4)) + body[cut + data.draw(st.integers(0, 4)) :]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    if binary:
        headers[HEADER_LENGTH] = str(len(head) + data.draw(st.sampled_from([0, 0, 0, 1, -1])))
    answer = urllib3.request("POST", f"{http.url}/v2/models/films/infer", body=body, headers=headers, timeout=60)
    assert answer.status < 500, (body, answer.data)
    assert answer.status == 200 or answer.json()["error"]


def test_documented_client_scores_rows(http, served_export):
    """The client of the documentation needs tritonclient, which is not among the requirements."""
    client = pytest.importorskip("tritonclient.http")
    page = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    (block,) = re.findall(r"(?m)^    import tritonclient.http\b.*\n(?:(?:    .*)?\n)+", page)
    _, table = served_export
    block = block.replace('("ids", ids, "INT64")', '("ids", ids, "INT64"), ("tags", tags, "INT64")')
    block = textwrap.dedent(block).replace("127.0.0.1:8000", http.url.removeprefix("http://"))
    names = {name: values for name, values, _ in to_matrices(table)}
    names |= {"token": TOKEN, "tags": np.ones((len(table), 1), np.int64), "tritonclient": client}
    exec(block, names)
    rows = [row | {"tags": [1]} for row in table.to_pylist()]
    np.testing.assert_array_equal(names["scores"], np.array(http.scores({"rows": rows})["score_y"], np.float32))
