"""Open Inference Protocol v2 over HTTP, which clients of Triton, KServe, MLServer and TorchServe speak.

Requests and answers are named tensors in JSON, or in binary after the JSON (Triton's binary tensor data
extension). Tensors become a table with one column each, which is read as the body of /predict is read.

https://github.com/kserve/open-inference-protocol/blob/main/specification/protocol/inference_rest.md
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import FailFast, Field, ValidationError
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from raytrec import __version__
from raytrec.common.errors import DataError
from raytrec.data.arrow import list_element_type
from raytrec.scoring.scorer import Scorer
from raytrec.serving.bodies import (
    JSON,
    Limits,
    Query,
    RefusedRequest,
    check_object_count,
    check_type,
    json_response,
    make_table_query,
)
from raytrec.serving.openapi import Endpoint
from raytrec.serving.tensors import DATATYPES, InputTensor, Message, Parameters, read_tensors, to_table

BINARY, HEADER_LENGTH = "application/octet-stream", "Inference-Header-Content-Length"
MODEL_PATH = re.compile(r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?(?P<action>|/ready|/infer)")
MODEL_TEMPLATE, VERSION_TEMPLATE = "/v2/models/{name}", "/v2/models/{name}/versions/{version}"
MAX_TENSORS, DIGITS = 10_000, re.compile("[0-9]{1,18}")


class OutputTensor(Message):
    """Requested output tensor."""

    name: str
    parameters: Parameters = Parameters()


class InferenceRequest(Message):
    """JSON part of a request for an inference."""

    id: str | None = None
    parameters: Parameters = Parameters()
    inputs: Annotated[list[InputTensor], FailFast()] = Field(max_length=MAX_TENSORS)
    outputs: Annotated[list[OutputTensor], FailFast()] = Field([], max_length=MAX_TENSORS)


class Inference(NamedTuple):
    """Decoded request for an inference.

    Attributes:
        query: Rows to score.
        id: Identifier that the answer repeats; None: the request has none.
        outputs: Requested output tensors, in order → True if the tensor is returned in binary.
    """

    query: Query
    id: str | None
    outputs: dict[str, bool]


class InferenceEndpoints:
    """Endpoints of the protocol.

    Args:
        name: Name of the service, by which clients may address the model; None: only the run's name.
        limits: Limits of requests.
        read: Function that returns the body of a request.
        score: Function (request, query) → (scores of each task, headers of the answer).
    """

    def __init__(
        self,
        name: str | None,
        limits: Limits,
        read: Callable[[Request], Awaitable[bytes]],
        score: Callable[[Request, Query], Awaitable[tuple[list[np.ndarray], dict[str, str]]]],
    ):
        self._name, self._limits, self._read, self._score = name, limits, read, score

    def make_endpoints(self) -> list[Endpoint]:
        """Return the endpoints; the paths of models are templates, as returned by `match_path`."""
        endpoints = [
            Endpoint("GET", "/v2", self._server, "Name, version and extensions of the server."),
            Endpoint("GET", "/v2/health/live", self._live, "Liveness of the server.", True),
            Endpoint("GET", "/v2/health/ready", self._live, "Readiness of the server.", True),
        ]
        for path in (MODEL_TEMPLATE, VERSION_TEMPLATE):
            endpoints += [
                Endpoint("GET", path, self._model, "Tensors of the model."),
                Endpoint("GET", f"{path}/ready", self._model_ready, "Readiness of the model."),
                Endpoint("POST", f"{path}/infer", self._infer, "Predictions for rows in tensors."),
            ]
        return endpoints

    async def _server(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"name": "raytrec", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"live": True})

    async def _model(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"name": self._check_name(request, scorer)} | describe_tensors(scorer))

    async def _model_ready(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"name": self._check_name(request, scorer), "ready": True})

    async def _infer(self, request: Request, scorer: Scorer) -> Response:
        name = self._check_name(request, scorer)
        check_type(request.headers.get("content-type", BINARY), JSON, BINARY)
        body = await self._read(request)
        inference = decode_inference(request.headers.get(HEADER_LENGTH), body, scorer, self._limits)
        scores, headers = await self._score(request, inference.query)
        return encode_inference(name, inference, scores, headers)

    def _check_name(self, request: Request, scorer: Scorer) -> str:
        """Return the model's name in a path.

        Raises:
            RefusedRequest: The name or the version is not that of the current model.
        """
        name, version, run = *request.path_params.values(), scorer.manifest.source.run
        for value, names in ((name, {self._name or run: 0, run: 0}), (version, [scorer.version])):
            if value not in (None, *names):
                missing = DataError(f"'{value}' not found", where="the path", expected=" or ".join(names))
                raise RefusedRequest(404, missing)
        return name


def match_path(path: str) -> tuple[str, dict[str, str]]:
    """Return (template of a model's path, its parameters), or any other path without parameters."""
    if not (match := MODEL_PATH.fullmatch(path)):
        return path, {}
    return (VERSION_TEMPLATE if match["version"] else MODEL_TEMPLATE) + match["action"], match.groupdict()


def describe_tensors(scorer: Scorer) -> dict[str, Any]:
    """Return the model's version and its tensors; `matrix` is the tensor that may contain a column instead."""
    matrices = {column: name for name, columns in scorer.reader.matrices.items() for column in columns}
    inputs: list[dict[str, Any]] = []
    for field in scorer.reader.columns:
        element = list_element_type(field.type)
        shape = [-1] if element is None else [-1, -1]
        inputs.append({"name": field.name, "datatype": DATATYPES.get(element or field.type, "BYTES"), "shape": shape})
        if field.name in matrices:
            inputs[-1]["parameters"] = {"matrix": matrices[field.name]}
    outputs = [
        {"name": task.column, "datatype": "FP32", "shape": [-1] if task.classes == 1 else [-1, task.classes]}
        for task in scorer.manifest.tasks
    ]
    return {"versions": [scorer.version], "platform": "raytrec_export", "inputs": inputs, "outputs": outputs}


def decode_inference(header_length: str | None, body: bytes, scorer: Scorer, limits: Limits) -> Inference:
    """Return the inference that a body requests.

    Args:
        header_length: Size in bytes of the JSON before the binary data; None: the body is JSON.
        body: Body of the request.
        scorer: Model that answers.
        limits: Limits of requests.

    Raises:
        RefusedRequest: The body is malformed, or exceeds a limit.
        DataError: A value does not fit its column.
    """
    size = len(body) if header_length is None else int(header_length) if DIGITS.fullmatch(header_length) else -1
    if not 0 <= size <= len(body):
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
    query = make_table_query(to_table(tensors, scorer.columns, limits.rows), scorer, "predict", limits)
    outputs = {name: is_binary if own is None else own for name, own in requested.items()}
    return Inference(query, message.id, outputs)


def encode_inference(
    name: str, inference: Inference, scores: Sequence[np.ndarray], headers: Mapping[str, str]
) -> Response:
    """Return the answer to a request.

    Args:
        name: Name of the model.
        inference: Decoded request.
        scores: Scores of each task.
        headers: Headers of the answer.
    """
    scorer, parts, outputs = inference.query.scorer, [], []
    values = dict(zip((task.column for task in scorer.manifest.tasks), scores, strict=True))
    for column, is_binary in inference.outputs.items():
        output: dict[str, Any] = {"name": column, "datatype": "FP32", "shape": values[column].shape}
        if is_binary:
            parts.append(values[column].astype("<f4").tobytes())
            output["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            output["data"] = values[column].ravel().tolist()
        outputs.append(output)
    answer = {"model_name": name, "model_version": scorer.version, "outputs": outputs}
    answer |= {} if inference.id is None else {"id": inference.id}
    head, headers = to_json(answer, inf_nan_mode="null"), dict(headers)
    if parts:
        headers[HEADER_LENGTH] = str(len(head))
    return Response(b"".join([head, *parts]), headers=headers, media_type=BINARY if parts else JSON)
