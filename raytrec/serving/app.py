"""The service's HTTP: one process that scores, without Ray."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError, SchemaError
from raytrec.scoring.manifest import ProgramName
from raytrec.serving.batching import Batcher
from raytrec.serving.bodies import JSON, Limits, Refused, read_body, write_body
from raytrec.serving.openapi import describe
from raytrec.serving.request_log import RequestLog
from raytrec.serving.versions import Loaded, Versions

log = logging.getLogger(__name__)
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # bounds of the histogram
OPEN = {"/health", "/ready"}  # answered without a token


@dataclass
class Figures:
    """What /metrics shows of this process."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        by, of = ["path", "status"], self.registry
        self.requests = Counter("raytrec_requests", "Requests by path and status.", by, registry=of)
        self.rows = Counter("raytrec_rows", "Rows that were scored.", registry=of)
        self.logged = Counter("raytrec_logged_rows", "Rows written to the request log.", registry=of)
        self.not_logged = Counter("raytrec_log_dropped_rows", "Rows that the log lost.", registry=of)
        self.seconds = Histogram(
            "raytrec_seconds", "Time of a request.", ["path"], buckets=SECONDS, registry=of
        )
        self.waiting = Gauge("raytrec_waiting_rows", "Rows that wait to be scored.", registry=of)
        self.version = Gauge("raytrec_version", "1 of the version that answers.", ["version"], registry=of)


class Service:
    """Answers requests by the current version.

    Args:
        token: that every request has to bear; None: none.
    """

    def __init__(self, versions: Versions, token: str | None, limits: Limits | None = None):
        self.versions, self.limits = versions, limits or Limits()
        self.batcher, self.figures = Batcher(), Figures()
        self._token = token
        self.request_log: RequestLog | None = None

    async def predict(self, request: Request, now: Loaded) -> Response:
        """POST /predict."""
        asked, scorer = await self._asked(request, now), now.scorer
        names = [task.column for task in now.scorer.manifest.tasks]
        if asked.rows is None:
            count = max(1, len(asked.candidates))
            found = await self.batcher.call(count, lambda: scorer.rank(asked.user, asked.candidates))
        else:
            rows = scorer.reader.read(asked.rows)
            count = len(rows)
            found = await self.batcher.score(scorer, "predict", rows)
        self.figures.rows.inc(count)
        answer = _answer(request, now, names, found)
        if self.request_log and (logged := self.request_log.offer(request.url.path, now, asked, found)):
            answer.headers["X-Request-Id"] = logged
        return answer

    async def vectors(self, request: Request, now: Loaded) -> Response:
        """POST /vectors?tower=query."""
        tower: ProgramName = "item" if request.query_params.get("tower", "query") == "item" else "query"
        reader = now.scorer.reader_of(tower)
        asked = await self._asked(request, now)
        if asked.rows is None:
            raise Refused(400, DataError("vectors are of rows", where="the body", expected="rows or columns"))
        rows = reader.read(asked.rows)
        self.figures.rows.inc(len(rows))
        return _answer(request, now, ["vector"], await self.batcher.score(now.scorer, tower, rows))

    async def _asked(self, request: Request, now: Loaded):
        body, most = bytearray(), self.limits.body_bytes
        async for part in request.stream():
            body += part
            if len(body) > most:
                raise Refused(
                    413,
                    DataError("the body is too large", where="the body", expected=f"at most {most:,} bytes"),
                )
        kind = request.headers.get("content-type", "")
        return read_body(kind, bytes(body), now.scorer.columns, self.limits)

    async def health(self, request: Request, now: Loaded) -> Response:
        """GET /health and /ready: the golden rows were scored when the version was loaded."""
        return Response(to_json({"version": now.version}), media_type=JSON)

    async def metrics(self, request: Request, now: Loaded) -> Response:
        """GET /metrics, of Prometheus."""
        self.figures.waiting.set(self.batcher.waiting)
        self.figures.version.clear()
        self.figures.version.labels(now.version).set(1)
        return Response(generate_latest(self.figures.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def openapi(self, request: Request, now: Loaded) -> Response:
        """GET /openapi.json."""
        return Response(to_json(describe(now.scorer)), media_type=JSON)

    def allow(self, request: Request) -> None:
        """Raises Refused where a request bears no token, or another."""
        if self._token is None or request.url.path in OPEN:
            return
        given = request.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
            raise Refused(
                401,
                RunError(
                    "no token, or another", where="Authorization", expected="Authorization: Bearer TOKEN"
                ),
                **{"WWW-Authenticate": "Bearer"},
            )


def _answer(request: Request, now: Loaded, names: list[str], values: list) -> Response:
    kind, body = write_body(request.headers.get("accept", ""), now.version, names, values)
    return Response(body, media_type=kind, headers={"X-Model-Version": now.version})


Endpoint = Callable[[Request, Loaded], Awaitable[Response]]


def make_app(service: Service, more: dict[tuple[str, str], Endpoint] | None = None) -> Starlette:
    """The application of ASGI.

    Args:
        more: (method, path) → further endpoints.
    """
    endpoints = {
        ("POST", "/predict"): service.predict,
        ("POST", "/vectors"): service.vectors,
        ("GET", "/health"): service.health,
        ("GET", "/ready"): service.health,
        ("GET", "/metrics"): service.metrics,
        ("GET", "/openapi.json"): service.openapi,
        **(more or {}),
    }
    routes = [
        Route(path, _endpoint(service, path, endpoint), methods=[method])
        for (method, path), endpoint in endpoints.items()
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _other})


def _endpoint(service: Service, path: str, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint whose errors are answers: what a client did is a 4xx that names field and reason."""

    async def run(request: Request) -> Response:
        began = perf_counter()
        try:
            service.allow(request)
            response = await endpoint(request, service.versions.current)
        except Refused as refused:
            response = Response(refused.body, refused.status, refused.headers, JSON)
        except (DataError, ConfigError, SchemaError) as error:
            response = Response(Refused(400, error).body, 400, media_type=JSON)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            log.exception("a request failed")
            own = (
                error if isinstance(error, RaytrecError) else RunError("the service failed", do="see its log")
            )
            response = Response(Refused(500, own).body, 500, media_type=JSON)
        service.figures.requests.labels(path, response.status_code).inc()
        service.figures.seconds.labels(path).observe(perf_counter() - began)
        return response

    return run


async def _other(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    what = DataError(f"{request.method} {request.url.path}: {error.detail}", expected="see /openapi.json")
    return Response(Refused(error.status_code, what).body, error.status_code, error.headers, JSON)
