"""Open Inference Protocol v2 over HTTP, which clients of Triton, KServe, MLServer and TorchServe use.

Requests and responses are named tensors in JSON, or in binary after the JSON (Triton's binary tensor data
extension). Each tensor becomes a column of a table, which is read like a body of /predict.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import re
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import FailFast, Field, ValidationError
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.responses import Response

from raytrec.common.errors import DataError
from raytrec.data.arrow import is_list, value_type
from raytrec.scoring.scorer import Scorer
from raytrec.serving.batching import VersionedScores
from raytrec.serving.bodies import JSON, Limits, Query, check_object_count, check_type, make_query
from raytrec.serving.tensors import DATATYPES, InputTensor, Message, Parameters, read_tensors, to_table

OCTET_STREAM, HEADER_LENGTH = "application/octet-stream", "Inference-Header-Content-Length"
MODEL_PATH = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?(|/ready|/infer)")
MODEL_TEMPLATES = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
MAX_TENSORS = 10_000


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
        datatype, shape = DATATYPES.get(value_type(field.type), "BYTES"), [-1] * (1 + is_list(field.type))
        parameters = matrices.get(field.name, {})
        inputs.append({"name": field.name, "datatype": datatype, "shape": shape, "parameters": parameters})
    for task in scorer.manifest.tasks:
        shape = [-1] if task.classes == 1 else [-1, task.classes]
        outputs.append({"name": task.column, "datatype": "FP32", "shape": shape})
    return {"versions": [scorer.version], "platform": "raytrec_export", "inputs": inputs, "outputs": outputs}


def decode_inference(headers: Headers, body: bytes, scorer: Scorer, limits: Limits) -> Inference:
    """Decode and check an inference request.

    Args:
        headers: Headers of the request; HEADER_LENGTH is the size in bytes of the JSON before binary data.
        body: Body of the request.
        scorer: Model that serves the request.
        limits: Limits of requests.

    Raises:
        RefusedRequest: The content type is not supported, or the body exceeds a limit.
        DataError: The body is malformed, or a value does not fit its column.
    """
    check_type(headers.get("content-type", OCTET_STREAM), JSON, OCTET_STREAM)
    header_length = headers.get(HEADER_LENGTH, str(len(body)))
    size = int(header_length) if re.fullmatch("[0-9]{1,18}", header_length) else len(body) + 1
    if size > len(body):
        expected = f"the size of the JSON, at most {len(body):,}"
        raise DataError(f"invalid length '{header_length}'", where=HEADER_LENGTH, expected=expected)
    check_object_count(body[:size], limits)
    try:
        message = InferenceRequest.model_validate_json(body[:size])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place, expected = ".".join(map(str, first["loc"])), "a request of the Open Inference Protocol"
        raise DataError(first["msg"], where=place or "the body", expected=expected) from None
    names, is_binary = [task.column for task in scorer.manifest.tasks], message.parameters.binary_data_output
    requested = {each.name: each.parameters.binary_data for each in message.outputs} or dict.fromkeys(names)
    if len(requested) < len(message.outputs) or not requested.keys() <= set(names):
        what, expected = "an output is unknown or requested twice", f"some of {', '.join(names)}"
        raise DataError(what, where="outputs", expected=expected)
    tensors = read_tensors(message.inputs, memoryview(body)[size:], scorer.columns)
    is_all = tensors.keys() <= scorer.reader.matrices.keys()
    matrices = {name: np.asarray(values).reshape(shape) for name, (values, shape) in tensors.items() if is_all}
    query = make_query(matrices, lambda: to_table(tensors, scorer.columns), scorer, "predict", limits)
    outputs = {name: is_binary if own is None else own for name, own in requested.items()}
    return Inference(query, message.id, outputs)
