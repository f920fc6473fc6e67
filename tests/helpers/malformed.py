"""Malformed JSON, Arrow and HTTP requests that a service must survive."""

import json
import socket
import struct
import zlib

import numpy as np
import pyarrow as pa
from served import ARROW, JSON, TOKEN, to_arrow_stream

MIB = 1 << 20
JSON_NESTING_DEPTH = 100_000


def malformed_json_bodies(rows):
    """Return [(name, type, body)] of malformed JSON bodies, derived from valid rows."""
    good = json.dumps({"rows": rows})
    first = rows[0]
    dense = next(column for column, value in first.items() if isinstance(value, float))
    ids = next(column for column, value in first.items() if isinstance(value, list))

    def with_text(column, text):
        return json.dumps({"rows": [first | {column: "HERE"}]}).replace('"HERE"', text).encode()

    found = [
        ("nothing", b""),
        ("a list 100,000 deep", b"[" * JSON_NESTING_DEPTH + b"]" * JSON_NESTING_DEPTH),
        ("an object 100,000 deep", b'{"rows":' * JSON_NESTING_DEPTH + b"1" + b"}" * JSON_NESTING_DEPTH),
        ("a row 100,000 deep", b'{"rows":[' + b'{"a":' * JSON_NESTING_DEPTH + b"1" + b"}" * JSON_NESTING_DEPTH + b"]}"),
        ("16 MiB of [", b"[" * (16 * MIB)),
        ("16 MiB of {}", b'{"rows":[' + b"{}," * (5 * MIB) + b"{}]}"),
        ("more than 16 MiB", b" " * (16 * MIB + 1)),
        ("keys twice", b'{"rows":[],' + good.encode()[1:]),
        ("a row's keys twice", b'{"rows":[{"%s":"x",' % dense.encode() + json.dumps(first).encode()[1:] + b"]}"),
        ("bytes other than UTF-8", b'{"rows":[{"a":"\xff\xfe"}]}'),
        ("half a surrogate", b'{"rows":[{"\\ud800":1}]}'),
        ("UTF-16", good.encode("utf-16")),
        ("a mark of byte order", b"\xef\xbb\xbf" + good.encode()),
        ("gzip", zlib.compress(good.encode())),
        ("10⁶ ids", json.dumps({"rows": [first | {ids: [1] * 10**6}]}).encode()),
        ("10⁶ ids of a user", json.dumps({"user": {ids: [1] * 10**6}, "candidates": rows}).encode()),
        ("10⁶ rows", json.dumps({"columns": {dense: [1.0] * 10**6}}).encode()),
        ("10⁶ empty candidates", json.dumps({"user": {dense: 1.0}, "candidates": [{}] * 10**6}).encode()),
        ("10⁶ columns", json.dumps({"rows": [{str(i): 0 for i in range(10**6)}]}).encode()),
    ]
    for text in ("NaN", "Infinity", "1e400", "-1e400", "1e39", "9" * 4000, "9" * MIB, "1e999999999", "null", "true"):
        found += [(f"{text[:12]} in {column}", with_text(column, text)) for column in (dense, ids)]
    for text in (2**63, -(2**63) - 1, 2**64, 2**40, -1, 1.5, '"3"', "[1]", "null", "{}"):
        found.append((f"an id {text}", with_text(ids, f"[{text}]")))
    return [(name, JSON, body) for name, body in found]


def malformed_arrow_bodies(table):
    """Return [(name, type, body)] of malformed Arrow bodies, derived from one valid row."""
    row = table.slice(0, 1)
    dense = next(f.name for f in table.schema if pa.types.is_floating(f.type))
    ids = next(f.name for f in table.schema if pa.types.is_list(f.type))

    def with_column(name, array):
        count = len(array)
        whole = row.take(pa.array(np.zeros(count, np.int64)))
        return to_arrow_stream(whole.set_column(whole.column_names.index(name), name, array))

    def lists(values):
        return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)

    deep = pa.array([1.0])
    for _ in range(60):
        deep = pa.StructArray.from_arrays([deep], ["x"])
    union = pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1.0])])
    good = to_arrow_stream(row)
    found = [
        ("nothing", b""),
        ("the end of a stream", b"\xff\xff\xff\xff\0\0\0\0"),
        ("a schema alone", to_arrow_stream(row.slice(0, 0))),
        ("no columns", to_arrow_stream(pa.table({}))),
        (
            "a column twice",
            to_arrow_stream(pa.Table.from_arrays([*row.columns, row[dense]], [*row.column_names, dense])),
        ),
        ("10⁵ columns", to_arrow_stream(pa.table({str(i): pa.nulls(1) for i in range(10**5)}))),
        ("2³⁰ nulls", to_arrow_stream(pa.table({dense: pa.nulls(1 << 30)}))),
        ("structs in structs", to_arrow_stream(pa.table({dense: deep}))),
        ("a message that claims 2 GiB", good[:4] + struct.pack("<i", 2**31 - 1) + good[8:]),
        ("a file in the place of a stream", b"ARROW1\0\0" + good),
        ("a delta of a dictionary", stream_with_dictionary_delta(dense)),
    ]
    kinds = {
        "a union": union,
        "text": pa.array(["x"]),
        "a view of text": pa.array(["x"], pa.string_view()),
        "an interval": pa.array([None], pa.month_day_nano_interval()),
        "a decimal": pa.array([1], pa.decimal128(10, 2)),
        "run ends": pa.RunEndEncodedArray.from_arrays(pa.array([1], pa.int32()), pa.array([1.0])),
        "a struct": pa.array([{"x": 1}]),
        "a map": pa.array([[("x", 1)]], pa.map_(pa.string(), pa.int64())),
        "a tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((1, 3))),
        "JSON": pa.array(["1"], pa.json_()),
        "nulls": pa.nulls(1),
        "2⁶⁴": pa.array([2**64 - 1], pa.uint64()),
        "NaN": pa.array([float("nan")]),
        "a dictionary": pa.array(["x"]).dictionary_encode(),
    }
    for name, array in kinds.items():
        found += [(f"{name} in {dense}", with_column(dense, array)), (f"{name} in {ids}", with_column(ids, array))]
        if not isinstance(array, pa.RunEndEncodedArray | pa.ExtensionArray):
            found.append((f"lists of {name}", with_column(ids, lists(array))))
    return [(name, ARROW, body) for name, body in found]


def stream_with_dictionary_delta(name):
    """Return an Arrow stream with a dictionary delta in the second batch."""
    sink = pa.BufferOutputStream()
    first, more = (pa.array(values).dictionary_encode() for values in (["a", "b"], ["a", "b", "c"]))
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.ipc.new_stream(sink, pa.schema([(name, first.type)]), options=options) as writer:
        for array in (first, more):
            writer.write_batch(pa.record_batch([array], [name]))
    return sink.getvalue().to_pybytes()


def corrupt_body(draw, body):
    """Return a body that is truncated at, or has bytes replaced at, a random position."""
    at, length = int(draw.integers(len(body))), int(draw.integers(1, 9))
    if draw.random() < 0.3:
        return body[:at]
    return body[:at] + draw.bytes(int(draw.integers(0, 9))) + body[at + length :]


def rows_with_wrong_type(draw, rows):
    """Return rows as JSON in which one value has another type."""
    row = dict(rows[draw.integers(len(rows))])
    column = str(draw.choice(sorted(row)))
    values = [None, True, "", "x" * 50, 2**63, -1, 1e308, [], [None], [[]], {}, [2**40], ["3"], [1.5], {"a": [1]}]
    row[column] = values[draw.integers(len(values))]
    if draw.random() < 0.2:
        del row[column]
    whole = {"rows": [rows[0], row]} if draw.random() < 0.5 else {"columns": {k: [v] for k, v in row.items()}}
    if draw.random() < 0.2:
        whole = {"user": row, "candidates": rows}
    return json.dumps(whole).encode()


def send_raw_bytes(url, data, wait_s=5.0, close=False):
    """Send bytes to a service and return the HTTP status, or None if it closes the connection or waits.

    Args:
        url: URL of the service.
        data: bytes to send.
        wait_s: socket timeout in seconds.
        close: close the connection without waiting for an answer.
    """
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=wait_s) as connection:
        try:
            connection.sendall(data)
            answer = b"" if close else connection.recv(4096)
        except OSError:
            return None
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else None


def malformed_http_requests(body):
    """Return [(name, bytes)] of malformed HTTP requests, some with a valid body."""
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    head += f"Content-Type: {JSON}\r\n".encode()
    size = b"Content-Length: %d\r\n"
    upgrade = b"GET /predict HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    key = b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    return [
        ("noise", b"\x16\x03\x01\x02\x00" + bytes(range(256))),
        ("half a head", head[:40]),
        ("no end of the head", head),
        ("a body that is cut", head + size % len(body) + b"\r\n" + body[:-20]),
        ("a length that is too small", head + size % 10 + b"\r\n" + body),
        ("a length below 0", head + size % -5 + b"\r\n" + body),
        ("a length in words", head + b"Content-Length: many\r\n\r\n" + body),
        ("two lengths", head + size % 5 + size % len(body) + b"\r\n" + body),
        ("a length of 2⁶⁴", head + size % 2**64 + b"\r\n" + body),
        ("a length and chunks", head + size % 5 + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"),
        ("a cut chunk", head + b"Transfer-Encoding: chunked\r\n\r\nffff\r\n" + body),
        ("a chunk of no size", head + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body),
        ("a chunk of 2⁶⁴", head + b"Transfer-Encoding: chunked\r\n\r\n" + b"f" * 16 + b"\r\n" + body),
        ("a header of 1 MiB", head + b"X: " + b"x" * MIB + b"\r\n\r\n"),
        ("100,000 headers", head + b"X: y\r\n" * 100_000 + b"\r\n"),
        ("a path of 1 MiB", b"POST /" + b"x" * MIB + b" HTTP/1.1\r\nHost: x\r\n\r\n"),
        ("a path with %00", head.replace(b"/predict", b"/%00%ff..") + size % 0 + b"\r\n"),
        ("HTTP/9", head.replace(b"HTTP/1.1", b"HTTP/9.9") + size % len(body) + b"\r\n" + body),
        ("a claim of gzip", head + b"Content-Encoding: gzip\r\n" + size % len(body) + b"\r\n" + body),
        ("a token of other bytes", head.replace(TOKEN.encode(), b"\xff\xfe") + size % len(body) + b"\r\n" + body),
        ("Expect", head + b"Expect: 100-continue\r\n" + size % len(body) + b"\r\n" + body),
        ("an upgrade", upgrade + b"\r\n"),
        ("a websocket", upgrade + key + b"\r\n"),
    ]
