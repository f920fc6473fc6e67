"""HTTP side of a service in one process, without Ray: the ASGI application and the listening thread."""

from __future__ import annotations

import ctypes
import hmac
import logging
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from threading import Thread
from time import perf_counter, sleep
from typing import Any

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError, SchemaError
from raytrec.scoring.manifest import ProgramName
from raytrec.scoring.scorer import Scorer
from raytrec.serving.batching import Batcher, make_busy_refusal
from raytrec.serving.bodies import JSON, Limits, RefusedRequest, decode_request, encode_response
from raytrec.serving.loaded_exports import LoadedExports
from raytrec.serving.openapi import Endpoint, describe, make_example_text, make_page
from raytrec.serving.replica_metrics import ReplicaMetrics
from raytrec.serving.request_log import RequestLog

log = logging.getLogger(__name__)
# When closing: seconds in which clients may send requests, and answers may finish.
CLOSE_GRACE_S, DRAIN_TIMEOUT_S = 1, 30
LISTEN_BACKLOG = 2048  # maximum number of connections waiting to be accepted
SO_ATTACH_FILTER, BPF_RET = 26, 6  # linux/asm-generic/socket.h, linux/bpf_common.h


class Service:
    """ASGI application that answers requests with the current version.

    Client errors are answered with a 4xx status and a body that names the field and the reason.

    Args:
        versions: Exports of the process; the current one answers.
        token: Token required in requests; None: no token is required.
        limits: Limits of requests.
        extra_endpoints: Additional endpoints.
    """

    def __init__(
        self,
        versions: LoadedExports,
        token: str | None,
        limits: Limits = Limits(),
        extra_endpoints: Sequence[Endpoint] = (),
    ):
        self.versions, self.limits, self._token, self._reading = versions, limits, token, 0
        self.figures = ReplicaMetrics()
        self.batcher = Batcher(observe=self.figures.batch_rows.observe)
        self.request_log: RequestLog | None = None
        self.endpoints = [
            Endpoint("POST", "/predict", self._predict, "Predictions for rows or for one user's candidates."),
            Endpoint("POST", "/vectors", self._vectors, "Query or item vectors of two-tower models."),
            Endpoint("GET", "/", self._page, "Page with the model and an example request.", True),
            # The golden rows were scored when the version was loaded.
            Endpoint("GET", "/health", self._health, "Version of the current model.", True),
            Endpoint("GET", "/ready", self._health, "Version of the current model.", True),
            Endpoint("GET", "/-/healthz", self._healthz, "Health check for KubeRay.", True),
            Endpoint("GET", "/openapi.json", self._openapi, "This document."),
            Endpoint("GET", "/example", self._example, "Example request body for /predict."),
            *extra_endpoints,
        ]
        self._table = {(each.method, each.path): each for each in self.endpoints}
        self._open = {each.path for each in self.endpoints if each.is_open}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        began, path = perf_counter(), scope["path"]
        response = await self._answer(Request(scope, receive))
        path = path if any(path == known for _, known in self._table) else "other"
        self.figures.requests.labels(path, response.status_code).inc()
        await response(scope, receive, send)
        self.figures.seconds.labels(path).observe(perf_counter() - began)

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._endpoint(request).answer(request, self.versions.current.scorer)
        except RefusedRequest as refused:
            return Response(refused.body, refused.status, refused.headers, JSON)
        except (DataError, ConfigError, SchemaError) as error:
            return Response(RefusedRequest(400, error).body, 400, media_type=JSON)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            log.exception("a request failed")
            reported = error if isinstance(error, RaytrecError) else RunError("internal error", do="check the log")
            return Response(RefusedRequest(500, reported).body, 500, media_type=JSON)

    def _endpoint(self, request: Request) -> Endpoint:
        """Return the endpoint of a request.

        Raises:
            RefusedRequest: There is no such endpoint, or the token is missing or wrong.
        """
        method, path = request.method, request.scope["path"]
        if self._token is not None and path not in self._open:
            authorization = request.headers.get("authorization", "")
            if not hmac.compare_digest(authorization.encode(), f"Bearer {self._token}".encode()):
                expected = "Authorization: Bearer TOKEN"
                error = RunError("the token is missing or wrong", where="Authorization", expected=expected)
                raise RefusedRequest(401, error, **{"WWW-Authenticate": "Bearer"})
        if endpoint := self._table.get((method, path)):
            return endpoint
        methods = ", ".join(sorted(verb for verb, known_path in self._table if known_path == path))
        missing = DataError(
            f"{method} {path}: " + ("method not allowed" if methods else "path not found"),
            expected=methods or "a path listed in /openapi.json",
        )
        raise RefusedRequest(405, missing, Allow=methods) if methods else RefusedRequest(404, missing)

    async def read(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            RefusedRequest: The body is too large, or the total size of all bodies being received is.
        """
        body, limits = bytearray(), self.limits
        try:
            async for part in request.stream():
                body += part
                self._reading += len(part)
                if len(body) > limits.body_bytes:
                    expected = f"at most {limits.body_bytes:,} bytes"
                    raise RefusedRequest(
                        413, DataError("the request body is too large", where="the body", expected=expected)
                    )
                if self._reading > limits.all_bodies_bytes:
                    raise make_busy_refusal("too many large request bodies are being received")
            return bytes(body)
        finally:
            self._reading -= len(body)

    async def _predict(self, request: Request, scorer: Scorer) -> Response:
        return await self._score(request, scorer, "predict", [task.column for task in scorer.manifest.tasks])

    async def _vectors(self, request: Request, scorer: Scorer) -> Response:
        tower: ProgramName = "item" if request.query_params.get("tower", "query") == "item" else "query"
        scorer.get_reader(tower)  # before the body is read
        return await self._score(request, scorer, tower, ["vector"])

    async def _score(self, request: Request, scorer: Scorer, program: ProgramName, names: list[str]) -> Response:
        body, headers = await self.read(request), {"X-Model-Version": scorer.version}
        query = decode_request(request.headers.get("content-type", ""), body, scorer, program, self.limits)
        scores = await self.batcher.score(query)
        self.figures.rows.inc(len(scores[0]))
        kind, body = encode_response(request.headers.get("accept", ""), scorer.version, names, scores)
        if self.request_log and program == "predict":
            logged = self.request_log.offer(request.url.path, query, scores)
            headers |= {"X-Request-Id": logged} if logged else {}
        return Response(body, media_type=kind, headers=headers)

    async def _health(self, request: Request, scorer: Scorer) -> Response:
        return json_response({"version": scorer.version})

    async def _healthz(self, request: Request, scorer: Scorer) -> Response:
        return Response("success", media_type="text/plain")

    async def _page(self, request: Request, scorer: Scorer) -> Response:
        html, headers = make_page()
        return Response(html, media_type="text/html", headers=headers)

    async def _openapi(self, request: Request, scorer: Scorer) -> Response:
        return json_response(describe(scorer, self.endpoints))

    async def _example(self, request: Request, scorer: Scorer) -> Response:
        # Text, because a browser that parsed it would round large ids.
        return Response(make_example_text(scorer), media_type=JSON)


def json_response(values: Any) -> Response:
    """Return values as a JSON response."""
    return Response(to_json(values), media_type=JSON)


class Listener:
    """HTTP server that runs an ASGI application in a thread with an event loop until `close` is called.

    Several processes of one user can listen on one port: the kernel distributes connections (SO_REUSEPORT).
    Clients connect directly to the process that scores, because Serve's proxy takes several times longer
    than scoring.

    Args:
        app: ASGI application.
        host: Address to listen on.
        port: Port to listen on; 0: any free port.

    Attributes:
        port: Port of the socket.

    Raises:
        RunError: The server cannot listen on the address.
    """

    def __init__(self, app: Any, host: str, port: int):
        import uvicorn

        from raytrec.compat.uvicorn_ import CLIENT_TIMEOUT_S, BoundedProtocol, abort_slow

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        # REUSEADDR: closed connections, which the kernel remembers for a minute, do not block the port.
        for option in (socket.SO_REUSEPORT, socket.SO_REUSEADDR):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise RunError(
                f"the service cannot listen: {error.strerror}",
                where=f"{host}:{port}",
                expected="an address of this machine and a free port",
            ) from None
        self._socket.listen(LISTEN_BACKLOG)  # connections are queued from now on
        self.port = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=CLIENT_TIMEOUT_S,
            timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
            callback_notify=lambda: abort_slow(self._server),
            timeout_notify=0,
        )
        self._server = uvicorn.Server(config)
        self._thread = Thread(target=self._server.run, args=([self._socket],), name="http", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Return True if the thread is running and thus listens on the socket."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop accepting connections, and return when all requests that have arrived are answered.

        Clients with open connections have CLOSE_GRACE_S to send a request, whose answer closes the
        connection.
        """
        refuse_connections(self._socket)
        closing, state = (b"connection", b"close"), self._server.server_state
        for headers in (self._server.config.encoded_headers, state.default_headers):
            headers.append(closing)
        sleep(CLOSE_GRACE_S)
        self._server.should_exit = True
        self._thread.join(DRAIN_TIMEOUT_S + 5)


def refuse_connections(listening: socket.socket) -> None:
    """Drop the packets of new connections, so that waiting connections can be accepted first.

    Closing a socket resets connections that wait to be accepted. Dropped packets are resent after 1 s.
    """
    drop = ctypes.create_string_buffer(struct.pack("HBBI", BPF_RET, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop))
    with suppress(OSError):  # some containers do not support filters
        listening.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
