"""Open Inference Protocol v2 over HTTP, which clients of Triton, KServe, MLServer and TorchServe use.

Requests and responses are named tensors in JSON, or in binary after the JSON (Triton's binary tensor data
extension). Each tensor becomes a column of a table, which is read like a body of /predict.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import types
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response

from raytrec.common.errors import DataError, get_first_line, shorten_repr
from raytrec.common.formatting import format_count
from raytrec.data.arrow import is_list, value_type
from raytrec.scoring.matrices import DENSE_MATRIX, ID_MATRIX, ROWS_PLACE
from raytrec.scoring.request_rows import to_array
from raytrec.scoring.scorer import Scorer
from raytrec.serving.batching import VersionedScores
from raytrec.serving.bodies import JSON, Limits, Query, check_object_count, check_type, make_query

OCTET_STREAM, HEADER_LENGTH = "application/octet-stream", "Inference-Header-Content-Length"
MODEL_PATH = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?(|/ready|/infer)")
MODEL_TEMPLATES = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
MAX_TENSORS = 10_000
LENGTHS = ".lengths"  # suffix of the tensor with the lengths of the lists in another tensor
INTEGERS = [f"{sign}INT{bits}" for sign in ("", "U") for bits in (8, 16, 32, 64)]
ARROW_TYPES = {name: pa.type_for_alias(name.lower()) for name in ("BOOL", *INTEGERS)}
ARROW_TYPES |= {"FP16": pa.float16(), "FP32": pa.float32(), "FP64": pa.float64(), "BYTES": pa.string()}
DATATYPES = {kind: name for name, kind in ARROW_TYPES.items()}
Tensor = tuple[np.ndarray | pa.Array, list[int]]  # values in row-major order, and shape (one or two dimensions)


class Message(BaseModel):
    """JSON object of the protocol; additional keys are ignored."""

    model_config = ConfigDict(strict=True)


class Parameters(Message):
    """Parameters of a request, an input or an output; additional parameters are ignored."""

    binary_data_size: int | None = Field(None, ge=0)
    binary_data: bool | None = None
    binary_data_output: bool = False


class InputTensor(Message):
    """Input tensor; `data` is None if the values follow the JSON in binary (binary_data_size bytes)."""

    name: str
    shape: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1, max_length=2)
    datatype: str
    parameters: Parameters = Parameters()
    data: list[Any] | None = None


class OutputTensor(Message):
    """Requested output tensor."""

    name: str
    parameters: Parameters = Parameters()


class InferenceRequest(Message):
    """JSON part of an inference request."""

    id: str | None = None
    parameters: Parameters = Parameters()
    inputs: Annotated[list[InputTensor], FailFast()] = Field(max_length=MAX_TENSORS)
    outputs: Annotated[list[OutputTensor], FailFast()] = Field([], max_length=MAX_TENSORS)


class Inference(NamedTuple):
    """Decoded inference request.

    Attributes:
        query: Rows to score.
        id: Identifier that the response repeats; None: the request has no identifier.
        outputs: Requested output tensors, in order → True if the tensor is returned in binary.
    """

    query: Query
    id: str | None
    outputs: dict[str, bool]

    def encode(self, model: str, scores: VersionedScores, headers: dict[str, str]) -> Response:
        """Return the response to the request.

        Args:
            model: Name of the model.
            scores: Scores of each task.
            headers: Headers of the response; HEADER_LENGTH is added if a tensor is returned in binary.
        """
        parts, outputs = [], []
        values = self.query.name_scores(scores)
        for column, is_binary in self.outputs.items():
            content: dict[str, Any] = {"data": values[column].ravel().tolist()}
            if is_binary:
                parts.append(values[column].tobytes())
                content = {"parameters": {"binary_data_size": len(parts[-1])}}
            outputs.append({"name": column, "datatype": "FP32", "shape": values[column].shape} | content)
        answer = {"model_name": model, "model_version": scores.version, "outputs": outputs}
        head = to_json(answer | ({} if self.id is None else {"id": self.id}), inf_nan_mode="null")
        headers |= {HEADER_LENGTH: str(len(head))} if parts else {}
        return Response(b"".join([head, *parts]), headers=headers, media_type=OCTET_STREAM if parts else JSON)


def match_path(path: str) -> tuple[str, dict[str, str | None]]:
    """Return (template, {name, version or None}) for the path of a model, and (path, {}) for any other path."""
    if not (match := MODEL_PATH.fullmatch(path)):
        return path, {}
    return MODEL_TEMPLATES[match["version"] is not None] + match[3], match.groupdict()


def describe_tensors(scorer: Scorer) -> dict[str, Any]:
    """Return the version, inputs and outputs of a model, as in a metadata response of the protocol.

    The parameter `matrix` of an input names the matrix tensor that can contain the values of the input instead.
    """
    matrices = {column: {"matrix": name} for name, columns in scorer.reader.matrices.items() for column in columns}
    inputs, outputs = [], []
    for field in scorer.reader.columns:
        kind, shape = value_type(field.type), [-1] * (1 + is_list(field.type))
        datatype = "INT64" if types.is_duration(kind) else DATATYPES.get(kind, "BYTES")
        parameters = matrices.get(field.name, {})
        inputs.append({"name": field.name, "datatype": datatype, "shape": shape, "parameters": parameters})
    for task in scorer.manifest.tasks:
        shape = [-1] if task.classes == 1 else [-1, task.classes]
        outputs.append({"name": task.column, "datatype": "FP32", "shape": shape})
    return {"versions": [scorer.version], "platform": "raytrec_export", "inputs": inputs, "outputs": outputs}


def decode_inference(headers: Headers, body: bytes, scorer: Scorer, limits: Limits) -> Inference:
    """Decode and check an inference request.

    Args:
        headers: Headers of the request; HEADER_LENGTH: size in bytes of the JSON part; default: size of the body.
        body: Body of the request.
        scorer: Model that serves the request.
        limits: Limits of requests.

    Raises:
        RefusedRequest: The content type is not supported, there are no rows, or the body exceeds a limit.
        DataError: The body is malformed, or a value does not fit its column.
    """
    check_type(headers.get("content-type", OCTET_STREAM), JSON, OCTET_STREAM)
    header_length = headers.get(HEADER_LENGTH, str(len(body)))
    size = int(header_length) if re.fullmatch("[0-9]{1,18}", header_length) else len(body) + 1
    if size > len(body):
        expected = f"the size of the JSON, at most {len(body):,}"
        raise DataError(f"invalid length '{header_length}'", where=HEADER_LENGTH, expected=f"{expected} bytes")
    check_object_count(body[:size], limits)
    try:
        message = InferenceRequest.model_validate_json(body[:size])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place, expected = ".".join(map(str, first["loc"])), "a request of the Open Inference Protocol"
        raise DataError(f"invalid request: {first['msg']}", where=place or "the body", expected=expected) from None
    names, is_binary = [task.column for task in scorer.manifest.tasks], message.parameters.binary_data_output
    requested = {each.name: each.parameters.binary_data for each in message.outputs} or dict.fromkeys(names)
    unknown = sorted(requested.keys() - set(names))
    if len(requested) < len(message.outputs) or unknown:
        what = f"there is no output {shorten_repr(unknown[0])}" if unknown else "an output is requested twice"
        raise DataError(what, where="outputs", expected=f"at most one output for each name: {', '.join(names)}")
    tensors = read_tensors(message.inputs, memoryview(body)[size:], scorer.columns)
    is_all = tensors.keys() <= scorer.reader.matrices.keys()
    matrices = {name: np.asarray(values).reshape(shape) for name, (values, shape) in tensors.items() if is_all}
    query = make_query(matrices, lambda: to_table(tensors, scorer.columns), scorer, "predict", limits)
    outputs = {name: is_binary if own is None else own for name, own in requested.items()}
    return Inference(query, message.id, outputs)


def read_tensors(inputs: Iterable[InputTensor], binary: memoryview, columns: pa.Schema) -> dict[str, Tensor]:
    """Return the tensors of a request by name.

    Args:
        inputs: Descriptions of the tensors.
        binary: Binary values of the tensors, one tensor after the other.
        columns: Columns of the model's data, which determine the types of times.

    Raises:
        DataError: A tensor has an unsupported datatype, a null, or values that do not match its description; a name
            occurs twice; or bytes are left over.
    """
    tensors: dict[str, Tensor] = {}
    for entry in inputs:
        size, has_data = entry.parameters.binary_data_size, entry.data is not None
        if entry.name in tensors:
            raise DataError("the name occurs twice", where=f"input {entry.name}", expected="one input for each name")
        try:
            if entry.datatype not in ARROW_TYPES:
                raise ValueError(f"the datatype '{entry.datatype}' is not supported")
            if (size is not None) == has_data:
                raise ValueError("the values are both in data and in binary" if has_data else "the values are missing")
            if (size or 0) > len(binary):
                raise ValueError(f"binary_data_size is {size}, above the remaining {format_count(len(binary), 'byte')}")
            kind, place = ARROW_TYPES[entry.datatype], columns.get_field_index(entry.name)
            element = value_type(columns.field(place).type) if place >= 0 else kind
            is_duration = types.is_duration(element)
            if entry.datatype == "BYTES" and types.is_temporal(element) and not is_duration:
                kind = element  # times are text, as in JSON
            # A copy of binary values is aligned for NumPy and Arrow.
            parts = _flatten(entry.data, entry.shape) if size is None else bytes(binary[:size])
            values = _from_bytes(parts, kind) if isinstance(parts, bytes) else to_array(parts, kind)
            if entry.datatype == "INT64" and is_duration:
                values = pa.array(values).cast(element)
            if isinstance(values, pa.Array) and values.null_count:
                raise ValueError("a value is null, which the protocol does not support")
            if len(values) != math.prod(entry.shape):
                raise ValueError(f"the input has {format_count(len(values), 'value')}")
        except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
            is_known, what = entry.datatype in ARROW_TYPES, get_first_line(error)
            expected = f"{entry.datatype} values of shape {entry.shape}" if is_known else ", ".join(ARROW_TYPES)
            raise DataError(what, where=f"input {entry.name}", expected=expected) from None
        tensors[entry.name], binary = (values, entry.shape), binary[size or 0 :]
    if len(binary):
        what = f"the binary data is too long by {len(binary):,} B"
        raise DataError(what, where="the body", expected="the binary_data_size bytes of each input")
    return tensors


def _flatten(data: list[Any], shape: list[int]) -> list[Any]:
    """Return the values of a tensor, flattened if they are nested rows of its shape; other nesting is refused later."""
    is_nested = len(shape) == 2 and all(isinstance(row, list) and len(row) == shape[1] for row in data)
    return list(chain.from_iterable(data)) if is_nested else data


def _from_bytes(data: bytes, kind: pa.DataType) -> np.ndarray | pa.Array:
    """Decode booleans of 1 byte, little-endian numbers, or texts and times that each follow their length in 4 bytes.

    Raises:
        ValueError, ArrowException: The bytes end within a value, or a text is not UTF-8 or not a time.
    """
    if kind == pa.bool_():
        return np.frombuffer(data, np.uint8).astype(bool)
    if not types.is_string(kind) and not types.is_temporal(kind):
        return np.frombuffer(data, kind.to_pandas_dtype())
    texts, place = [], 0
    while place < len(data):
        start, place = place + 4, place + 4 + int.from_bytes(data[place : place + 4], "little")
        texts.append(data[start:place].decode())
    if place > len(data):
        raise ValueError("the last text is incomplete")
    return to_array(texts, kind)


def to_table(tensors: Mapping[str, Tensor], columns: pa.Schema) -> pa.Table:
    """Return rows with a column for each tensor that has the name of a column or of a matrix.

    A tensor [B] becomes a column of values, as does [B, 1] unless the model's column has lists. A tensor [B, L]
    becomes a column of lists. If there is a tensor NAME.lengths, integers [B], the tensor NAME [N] contains the
    values of B lists of these lengths.

    Raises:
        DataError: No tensor has such a name, the numbers of rows differ, or lengths do not match the values.
    """
    arrays, places = {}, {name: columns.get_field_index(name) for name in tensors}
    for name, (array, shape) in tensors.items():
        values = pa.array(array) if isinstance(array, np.ndarray) else array
        lengths, _ = tensors.get(name + LENGTHS, (None, None))
        if places[name] < 0 and name not in (DENSE_MATRIX, ID_MATRIX):
            continue
        if lengths is not None and places[name + LENGTHS] < 0:
            lengths_B = np.asarray(lengths)
            is_valid = lengths_B.dtype.kind in "iu" and ((lengths_B >= 0) & (lengths_B <= len(values))).all()
            if not is_valid or lengths_B.sum() != len(values):
                expected = f"nonnegative integers that add up to {len(values):,}"
                what = "the lengths do not match the values"
                raise DataError(what, where=f"input {name}{LENGTHS}", expected=expected)
            offsets = np.concatenate([[0], np.cumsum(lengths_B)]).astype(np.int32)
            arrays[name] = pa.ListArray.from_arrays(offsets, values)
        elif len(shape) == 1 or (shape[1] == 1 and (places[name] < 0 or not is_list(columns.field(name).type))):
            arrays[name] = values
        else:
            arrays[name] = pa.Array.from_buffers(pa.list_(values.type, shape[1]), shape[0], [None], children=[values])
    if tensors and not arrays:
        raise DataError("no input is one of the model's inputs", where="inputs", expected=", ".join(columns.names))
    if len(names := {len(array): name for name, array in arrays.items()}) > 1:
        what = "different numbers of rows: " + ", ".join(f"{rows:,} in {name}" for rows, name in names.items())
        raise DataError(f"the inputs have {what}", where=ROWS_PLACE, expected="the same number in all inputs")
    return pa.table(arrays)
