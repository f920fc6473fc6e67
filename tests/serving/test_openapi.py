"""openapi.json describes each endpoint, and the answers match their descriptions."""

import json
from datetime import UTC, datetime
from types import SimpleNamespace

import jsonschema
import pyarrow as pa
import pytest
from described import assert_described, iterate_references
from test_inference_protocol import http, infer, served_export, to_lists, to_matrices  # noqa: F401

from raytrec.scoring.request_rows import to_table
from raytrec.serving.bodies import ARROW, JSON
from raytrec.serving.inference_protocol import OCTET_STREAM
from raytrec.serving.openapi import make_example_text

READ_PATHS = ["/", "/health", "/ready", "/-/healthz", "/openapi.json", "/example", "/v2", "/v2/health/live"]
READ_PATHS += ["/v2/health/ready", "/v2/models/films", "/v2/models/films/ready"]


@pytest.fixture(scope="module")
def document(http):  # noqa: F811
    return json.loads(http.ask("/openapi.json")[1])


@pytest.mark.slow
def test_document_is_consistent(http, document):  # noqa: F811
    """References resolve, schemas are valid, and every parameter of a path is declared."""
    for reference in iterate_references(document):
        target = document
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for path, methods in document["paths"].items():
        declared = {each["name"] for each in methods.get("parameters", ())}
        assert declared == {part.strip("{}") for part in path.split("/") if part.startswith("{")}
        for method in methods.keys() - {"parameters"}:
            operation = methods[method]
            assert operation["summary"] and "default" in operation["responses"]
            assert (method == "post") == ("requestBody" in operation)
            is_open = operation.get("security") == []
            assert is_open != ("401" in operation["responses"])
            answered = http.ask(path.format(name="films", version="1"), token="", method=method.upper())[0]
            assert (answered != 401) == is_open
    assert document["info"] == {"title": "small", "version": http.service.versions.version}


@pytest.mark.parametrize("path", READ_PATHS)
def test_answers_match_their_descriptions(http, document, path):  # noqa: F811
    assert_described(document, "get", path, *http.ask(path))


def test_predictions_and_errors_match_their_descriptions(http, document, served_export):  # noqa: F811
    table = served_export[1]
    for body, accept in (({"rows": table.to_pylist()}, JSON), ({"columns": table.to_pydict()}, ARROW), ({}, JSON)):
        assert_described(document, "post", "/predict", *http.ask("/predict", body, accept=accept), body)
    for options in ({"token": ""}, {"kind": "text/csv"}, {"body": b" " * 200_001}):
        assert_described(document, "post", "/predict", *http.ask("/predict", **({"body": b"{}"} | options)))
    tensors = [*to_matrices(table), *to_lists(table)]
    for path in ("/v2/models/films/infer", f"/v2/models/small/versions/{http.service.versions.version}/infer"):
        for binary in (True, False):
            parameters = {"binary_data_output": binary}
            status, answer, _, received = infer(http, tensors, path, binary, id="7", parameters=parameters)
            headers = received.copy()
            assert headers["Content-Type"] == (OCTET_STREAM if binary else JSON)
            headers["Content-Type"], content = JSON, json.dumps(answer).encode()  # the binary data are cut off
            assert_described(document, "post", path, status, content, headers)
    for path in ("/v2/models/other", "/v2/models/other/ready", "/v2/models/films/versions/1"):
        status, content, headers = http.ask(path)
        assert status == 404
        assert_described(document, "get", path, status, content, headers)
    for path in ("/v2/models/other/infer", "/v2/models/films/infer"):
        assert_described(document, "post", path, *http.ask(path, b"{}"))


@pytest.mark.parametrize("rows", [0, 1])
def test_example_with_times_and_durations_can_be_sent(rows):
    """A duration is sent as a whole number of the unit of its column."""
    values = {
        "age": pa.array([90], pa.duration("s")),
        "exact": pa.array([1], pa.duration("ns")),
        "ages": pa.array([[5, None]], pa.list_(pa.duration("ms"))),
        "seen": pa.array([datetime(2026, 5, 31, 12, tzinfo=UTC)], pa.timestamp("ms", "UTC")),
    }
    golden = pa.table(values)[:rows]
    sent = json.loads(make_example_text(SimpleNamespace(golden=golden, columns=golden.schema)))["rows"]
    assert sent[0]["age"] == 90 * rows
    assert to_table(sent, golden.schema)[:rows].equals(golden)
