"""ASGI application of a service in one process, without Ray."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from raytrec import __version__
from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError, SchemaError, shorten_repr
from raytrec.scoring.manifest import ProgramName
from raytrec.scoring.scorer import Scorer
from raytrec.serving.batching import Batcher, UnavailableError, VersionedScores, make_busy_refusal
from raytrec.serving.bodies import JSON, Limits, Query, RefusedRequest, decode_request, encode_response, json_response
from raytrec.serving.inference_protocol import MODEL_TEMPLATES, decode_inference, describe_tensors, match_path
from raytrec.serving.loaded_exports import LoadedExport, LoadedExports
from raytrec.serving.openapi import Endpoint, describe, make_example_text, make_page
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.request_log import RequestLog
from raytrec.serving.shadow_queue import ShadowQueue

if TYPE_CHECKING:
    from raytrec.serving.follow import Follower

log = logging.getLogger(__name__)
ADVICE = {  # by status, for errors that contain no advice
    400: "compare the request with GET /example and GET /openapi.json",
    401: "send the service's token in a header, such as -H 'Authorization: Bearer TOKEN'",
    403: "copy the export into the expected folder, or start the service with another --promote-from (promote_from)",
    404: "see GET /openapi.json for all paths",
    405: "see GET /openapi.json for the methods of each path",
    413: "send fewer rows or shorter lists in each request",
    415: "send the body in an expected type, and name the type in the header Content-Type",
}
Decoder = Callable[[Scorer], Query]


class Service:
    """ASGI application that scores the rows of requests with the current export or its challenger (an export on trial).

    Invalid requests are rejected with a 4xx status and a body that states the fault and, if known, its place.

    Args:
        versions: Exports of the process; the current one is served.
        token: Token required in requests; None: no token is required.
        limits: Limits of requests.
        extra_endpoints: Endpoints in addition to those that every service has.
        name: Name of the service, by which clients of the Open Inference Protocol may address the model in addition
            to the run's name; None: only the run's name.
        figures: Metrics of the process; None: new metrics.
        threads: Number of threads that score; 0: the event loop scores.

    Attributes:
        request_log: Log of a sample of requests; None: requests are not logged.
        follower: Follower that applies a run's deltas to the current model in place; None: the model does not change.
    """

    def __init__(
        self,
        versions: LoadedExports,
        token: str | None,
        limits: Limits = Limits(),
        extra_endpoints: Sequence[Endpoint] = (),
        name: str | None = None,
        figures: ReplicaMetrics | None = None,
        threads: int = 0,
    ):
        self.versions, self.limits, self._token, self._reading, self._name = versions, limits, token, 0, name
        self.figures = figures or ReplicaMetrics()
        self.batcher = Batcher(observe=self.figures.batch_rows.observe, threads=threads)
        self.request_log: RequestLog | None = None
        self.follower: Follower | None = None
        self._shadows = ShadowQueue(self.figures, lambda: self.batcher.waiting > 0)
        self._shadow_batcher = Batcher(budget_s=0.005, threads=threads)  # a new request may have to wait this long
        self.endpoints = [
            Endpoint("POST", "/predict", self._predict),
            Endpoint("POST", "/vectors", self._vectors),
            Endpoint("GET", "/", self._page, True),
            # These checks score no rows, because the golden rows were compared when the version was loaded.
            Endpoint("GET", "/health", self._health, True),
            Endpoint("GET", "/ready", self._health, True),
            Endpoint("GET", "/-/healthz", self._healthz, True),
            Endpoint("GET", "/openapi.json", self._openapi),
            Endpoint("GET", "/example", self._example),
            Endpoint("GET", "/v2", self._server),
            Endpoint("GET", "/v2/health/live", self._live, True),
            Endpoint("GET", "/v2/health/ready", self._live, True),
            *extra_endpoints,
        ]
        for path in MODEL_TEMPLATES:
            self.endpoints += [
                Endpoint("GET", path, self._model_tensors),
                Endpoint("GET", f"{path}/ready", self._model_ready),
                Endpoint("POST", f"{path}/infer", self._infer),
            ]
        self._by_path = {each.path: each for each in self.endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve an HTTP request (ASGI)."""
        began = perf_counter()
        path, scope["path_params"] = match_path(scope["path"])
        request = Request(scope, receive)
        response = await self._answer(request, path)
        response.headers["X-Model-Version"] = getattr(request.state, "version", self.versions.version)
        # Metrics use the export's version, because deltas change the model's version every few seconds.
        version = getattr(request.state, "scorer", self.versions.current.scorer).export_version
        path = path if path in self._by_path else "other"
        self.figures.requests.labels(path, response.status_code, version).inc()
        await response(scope, receive, send)
        self.figures.seconds.labels(path, version).observe(perf_counter() - began)

    async def _answer(self, request: Request, path: str) -> Response:
        """Return the response to a request; `path` is the request's path or path template."""
        try:
            return await self._endpoint(request, path).answer(request, await self._choose_scorer(request))
        except RefusedRequest as error:
            refused = error
        except (DataError, ConfigError, SchemaError) as error:
            refused = RefusedRequest(400, error)
        except UnavailableError as error:
            refused = error.to_refusal()
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            log.exception("a request failed")
            unknown = RunError("an internal error occurred", do="read the log of the service")
            refused = RefusedRequest(500, error if isinstance(error, RaytrecError) else unknown)
        failure = refused.error
        failure.do = failure.do or ADVICE.get(refused.status)
        parts: dict[str, Any] = {"error": str(failure)}
        if not f"{path}/".startswith("/v2/"):  # the Open Inference Protocol defines no other parts
            parts = {"error" if name == "what" else name: text for name, text in failure.parts.items() if text}
        return Response(to_json(parts), refused.status, refused.headers, JSON)

    def _endpoint(self, request: Request, path: str) -> Endpoint:
        """Return the endpoint of a request, given its path or path template, after checking the token.

        Raises:
            RefusedRequest: The token is missing or wrong, or no endpoint has the path and the method.
        """
        endpoint = self._by_path.get(path)
        if self._token is not None and not (endpoint and endpoint.is_open):
            authorization = request.headers.get("authorization", "")
            if not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
                what = f"the token is {'wrong' if authorization else 'missing'}"
                expected = "Authorization: Bearer TOKEN"
                error = RunError(what, where="the header Authorization", expected=expected)
                raise RefusedRequest(401, error, **{"WWW-Authenticate": "Bearer"})
        if endpoint and request.method == endpoint.method:
            return endpoint
        what = f"the path {request.scope['path']}"
        if endpoint is None:
            raise RefusedRequest(404, DataError(f"{what} does not exist", expected="a path listed in /openapi.json"))
        refused = DataError(f"{what} does not support {request.method}", expected=endpoint.method)
        raise RefusedRequest(405, refused, Allow=endpoint.method)

    async def _choose_scorer(self, request: Request) -> Scorer:
        """Return the model that serves a request, and store the model and its version in the request's state."""
        current, challenger, named = self.versions.current, self.versions.challenger, request.path_params.get("version")
        if challenger and named != challenger.scorer.version:
            is_decided = request.method != "POST" or named
            challenger = None if is_decided else await self._find_challenger(request, "canary")
        scorer = (challenger or current).scorer
        request.state.version, request.state.scorer = scorer.version, scorer
        return scorer

    async def _find_challenger(self, request: Request, mode: str) -> LoadedExport | None:
        """Return the challenger if it has this mode and the request is in its share, else None.

        The share is computed from the header X-Request-Key or, without this header, from the body.

        Raises:
            RefusedRequest, ClientDisconnect: As in `read`.
        """
        loaded = self.versions.challenger
        if not loaded or loaded.challenger.mode != mode:
            return None
        key = request.headers.get("x-request-key", "").encode() or await self.read(request)
        return loaded if loaded.challenger.includes(key) else None

    async def read(self, request: Request) -> bytes:
        """Return the body of a request; further calls return the same bytes.

        Raises:
            RefusedRequest: The body is compressed or too large, or all bodies being received are too large in total.
            ClientDisconnect: The client has disconnected before the end of the body.
        """
        if hasattr(request.state, "body"):
            return request.state.body
        body, limits, encoding = bytearray(), self.limits, request.headers.get("content-encoding", "")
        if encoding.strip().lower() not in ("", "identity"):
            what = f"the content encoding '{encoding}' is not supported"
            error = DataError(what, where="Content-Encoding", expected="identity", do="send an uncompressed body")
            raise RefusedRequest(415, error)
        try:
            if int(request.headers.get("content-length", 0)) > limits.body_bytes:  # before the body is received
                raise self._make_size_refusal()
            async for part in request.stream():
                body += part
                self._reading += len(part)
                if len(body) > limits.body_bytes:
                    raise self._make_size_refusal()
                if self._reading > limits.all_bodies_bytes:
                    raise make_busy_refusal("the request bodies being received are too large in total")
            request.state.body = bytes(body)
            return request.state.body
        finally:
            self._reading -= len(body)

    def _make_size_refusal(self) -> RefusedRequest:
        what, expected = "the request body is too large", f"at most {self.limits.body_bytes:,} bytes"
        return RefusedRequest(413, DataError(what, where="the body", expected=expected))

    async def _predict(self, request: Request, scorer: Scorer) -> Response:
        return await self._answer_rows(request, scorer, "predict", [task.column for task in scorer.manifest.tasks])

    async def _vectors(self, request: Request, scorer: Scorer) -> Response:
        tower: Any = request.query_params.get("tower", "query")
        if tower not in ("query", "item"):
            raise DataError(f"there is no tower '{tower}'", where="tower", expected="query or item")
        scorer.get_reader(tower)  # before the body is read
        return await self._answer_rows(request, scorer, tower, ["vector"])

    async def _answer_rows(self, request: Request, scorer: Scorer, program: ProgramName, names: list[str]) -> Response:
        body, content_type = await self.read(request), request.headers.get("content-type", "")
        decode = partial(decode_request, content_type, body, program=program, limits=self.limits)
        scores, headers = await self._score(request, decode(scorer), decode)
        kind, content = encode_response(request.headers.get("accept", ""), scores.version, names, scores)
        return Response(content, media_type=kind, headers=headers)

    async def _score(self, request: Request, query: Query, decode: Decoder) -> tuple[VersionedScores, dict[str, str]]:
        """Score and count the rows of a request. Offer predictions, but not vectors, to the log and shadow challenger.

        Args:
            request: Request whose body has been read.
            query: Rows of the request for the model that serves it.
            decode: Function that returns the query of the same request for another model.

        Returns:
            The scores, and additional headers of the response.
        """
        scores, headers = await self.batcher.score(query), {}
        request.state.version = scores.version
        self.figures.rows.labels(query.scorer.export_version).inc(len(scores[0]))
        if query.missing_shards:
            headers["X-Missing-Shards"] = ", ".join(map(str, sorted(query.missing_shards)))
        if query.program == "predict":
            log_id = self.request_log.offer(request.url.path, query, scores) if self.request_log else None
            headers |= {"X-Request-Id": log_id} if log_id else {}
            if challenger := await self._find_challenger(request, "shadow"):
                score = partial(self._compare_challenger, challenger.scorer, decode, query.name_scores(scores), log_id)
                self._shadows.add(challenger.scorer.version, len(request.state.body), score)
        return scores, headers

    async def _infer(self, request: Request, scorer: Scorer) -> Response:
        name, body = self._check_model(request, scorer), await self.read(request)
        decode = partial(decode_inference, request.headers, body, limits=self.limits)
        inference = decode(scorer)
        scores, headers = await self._score(request, inference.query, lambda other: decode(other).query)
        self._check_model(request, scorer)  # the version may have changed
        return inference.encode(name, scores, headers)

    def _check_model(self, request: Request, scorer: Scorer) -> str:
        """Return the model name in the path of a request of the Open Inference Protocol.

        Raises:
            RefusedRequest: The name is not that of the service or run, or another version serves the request.
        """
        (name, version), run = request.path_params.values(), scorer.manifest.source.run
        names, current = dict.fromkeys([self._name or run, run]), request.state.version
        for what, value, known in (("model", name, names), ("version", version or current, [current])):
            if value not in known:
                expected = " or ".join(known)
                missing, do = f"there is no {what} {shorten_repr(value)}", f"use an expected {what} in the path"
                raise RefusedRequest(404, DataError(missing, where="the path", expected=expected, do=do))
        return name

    async def _model_tensors(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"name": self._check_model(request, scorer)} | describe_tensors(scorer))

    async def _model_ready(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"name": self._check_model(request, scorer), "ready": True})

    async def _server(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"name": "raytrec", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"live": True})

    async def _compare_challenger(self, scorer: Scorer, decode: Decoder, answers: dict, log_id: str | None) -> None:
        """Score a completed request with the challenger, and count the differences from the scores of the response.

        The scores are logged unless `log_id` is None. Columns of one model only or of different shapes are skipped.

        Raises:
            RefusedRequest, RaytrecError: The challenger cannot score the request, or a score is not finite.
        """
        began, figures, version = perf_counter(), self.figures, scorer.version
        query = decode(scorer)
        scores = await self._shadow_batcher.score(query)
        figures.shadow_seconds.labels(version).observe(perf_counter() - began)
        figures.shadow_rows.labels(version).inc(len(scores[0]))
        if self.request_log and log_id:
            self.request_log.offer("shadow", query, scores, log_id)
        for column, values in query.name_scores(scores).items():
            answer = answers.get(column)
            if answer is not None and answer.shape == values.shape:
                difference = float(np.abs(values - answer).mean()) * len(values)
                if not np.isfinite(difference):
                    culprit = "the served version" if np.isfinite(values).all() else "the challenger"
                    what = f"a score of {culprit} in column '{column}' is not finite"
                    raise RunError(what, where=f"challenger {version}")
                figures.shadow_difference.labels(version, column).inc(difference)

    async def _health(self, request: Request, scorer: Scorer) -> Response:
        freshness = {"freshness": self.follower.describe()} if self.follower else {}
        return json_response({"version": scorer.version} | freshness)

    async def _healthz(self, request: Request, scorer: Scorer) -> Response:
        return Response("success", media_type="text/plain")

    async def _page(self, request: Request, scorer: Scorer) -> Response:
        html, headers = make_page()
        return Response(html, media_type="text/html", headers=headers)

    async def _openapi(self, request: Request, scorer: Scorer) -> Response:
        return json_response(describe(scorer, self.endpoints))

    async def _example(self, request: Request, scorer: Scorer) -> Response:
        # The page shows this text as is, because a browser that parsed the JSON would round large ids.
        return Response(make_example_text(scorer), media_type=JSON)
