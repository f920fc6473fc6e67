"""Small Arrow bodies that expand to large data are refused before they are decoded."""

from struct import pack_into, unpack_from
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from served import ARROW, to_arrow_stream

from raytrec.common.errors import DataError
from raytrec.data.arrow import _find_field, _find_table
from raytrec.serving.bodies import Limits, RefusedRequest, decode_request

MODEL = SimpleNamespace(
    get_plain_reader=lambda program: None, columns=pa.schema([("ids", pa.list_(pa.int64())), ("text", pa.string())])
)
LIMITS = Limits(body_bytes=1 << 20, rows=2_000, ids=1_000)
ROWS, TEXT = 2_000, "x" * 500_000
REPEATED_INDICES = np.zeros(ROWS, np.int32)  # every row has the first value
IDS = pa.array(np.zeros(1_000, np.int64))


def make_text_views(text):
    """Return a string_view array in which every row refers to the same bytes."""
    one = pa.array([text], pa.string_view())
    _, view, *data = one.buffers()
    return pa.Array.from_buffers(one.type, ROWS, [None, pa.py_buffer(view.to_pybytes() * ROWS), *data])


SHARED_VALUE_ARRAYS = {
    "text of a dictionary": pa.DictionaryArray.from_arrays(REPEATED_INDICES, pa.array([TEXT])),
    **{
        f"{kind} of a dictionary": pa.DictionaryArray.from_arrays(REPEATED_INDICES, pa.array([TEXT.encode()], kind))
        for kind in (pa.binary(), pa.large_binary(), pa.binary(len(TEXT)))
    },
    "views of one text": make_text_views(TEXT),
    "run-end encoded text": pa.RunEndEncodedArray.from_arrays(pa.array([ROWS], pa.int32()), [TEXT]),
    "lists of a dictionary": pa.DictionaryArray.from_arrays(
        REPEATED_INDICES, pa.ListArray.from_arrays([0, 1_000], IDS)
    ),
    "dictionary in an extension type": pa.ExtensionArray.from_storage(
        pa.opaque(pa.dictionary(pa.int32(), pa.string()), "type", "vendor"),
        pa.DictionaryArray.from_arrays(REPEATED_INDICES, pa.array([TEXT])),
    ),
    "extension type in a dictionary": pa.DictionaryArray.from_arrays(
        REPEATED_INDICES, pa.ExtensionArray.from_storage(pa.opaque(pa.string(), "type", "vendor"), pa.array([TEXT]))
    ),
    "views of one list": pa.ListViewArray.from_arrays(REPEATED_INDICES, REPEATED_INDICES + 1_000, IDS),
}


@pytest.mark.parametrize("array", SHARED_VALUE_ARRAYS.values(), ids=SHARED_VALUE_ARRAYS)
def test_shared_values_count_once_per_row(array):
    body = to_arrow_stream(pa.table({"ids" if "list" in str(array.type) else "text": array}))
    assert len(body) < LIMITS.body_bytes
    before = pa.total_allocated_bytes()
    with pytest.raises((RefusedRequest, DataError), match=r"after decoding|unsupported type"):
        decode_request(ARROW, body, MODEL, "predict", LIMITS)
    assert pa.total_allocated_bytes() - before < 4 << 20


def to_version_4(stream):
    """Name the compression of the only batch in custom_metadata, as streams before version 5 did, and nowhere else."""
    content = bytearray(stream)
    message = content.rindex(b"ARROW:experimental_compression")
    start = content.rindex(b"\xff\xff\xff\xff", 0, message) + 8
    metadata = bytes(content[start : start + unpack_from("<i", content, start - 4)[0]])
    root = unpack_from("<I", metadata)[0]
    pack_into("<h", content, start + _find_field(metadata, root, 0), 3)
    batch = _find_table(metadata, root, 2)
    pack_into("<H", content, start + batch - unpack_from("<i", metadata, batch)[0] + 4 + 2 * 3, 0)
    return bytes(content)


def test_compression_named_in_custom_metadata_is_refused():
    batch, sink = pa.record_batch({"text": ["x" * (64 << 20)]}), pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "ZSTD"})
    body = to_version_4(sink.getvalue().to_pybytes())
    assert len(body) < LIMITS.body_bytes
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="compressed"):
        decode_request(ARROW, body, MODEL, "predict", LIMITS)
    assert pa.total_allocated_bytes() - before < 1 << 20


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_compressed_buffers_are_refused(codec):
    body = to_arrow_stream(pa.table({"text": ["x" * (64 << 20)]}), compression=codec)
    assert len(body) < LIMITS.body_bytes
    before = pa.total_allocated_bytes()
    with pytest.raises(DataError, match="compressed"):
        decode_request(ARROW, body, MODEL, "predict", LIMITS)
    assert pa.total_allocated_bytes() - before < 1 << 20
