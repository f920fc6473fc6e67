"""The service's HTTP: one process that scores, without Ray."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable
from time import perf_counter

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError, SchemaError
from raytrec.scoring.manifest import ProgramName
from raytrec.serving.batching import Batcher, too_busy
from raytrec.serving.bodies import JSON, Asked, Limits, Refused, read_body, write_body
from raytrec.serving.figures import Figures
from raytrec.serving.openapi import describe, example_text
from raytrec.serving.page import make_page
from raytrec.serving.request_log import RequestLog
from raytrec.serving.versions import Loaded, Versions

log = logging.getLogger(__name__)
OPEN = {"/", "/health", "/ready", "/-/healthz"}  # answered without a token


class Service:
    """Answers requests by the current version.

    Args:
        token: that every request has to bear; None: none.
    """

    def __init__(self, versions: Versions, token: str | None, limits: Limits | None = None):
        self.versions, self.limits = versions, limits or Limits()
        self.figures = Figures()
        self.batcher = Batcher(observe=self.figures.batch_rows.observe)
        self._token, self._reading = token, 0
        self.request_log: RequestLog | None = None

    async def predict(self, request: Request, now: Loaded) -> Response:
        """POST /predict."""
        names = [task.column for task in now.scorer.manifest.tasks]
        return await self._scored(request, now, "predict", names, await self._asked(request, now))

    async def vectors(self, request: Request, now: Loaded) -> Response:
        """POST /vectors?tower=query."""
        tower: ProgramName = "item" if request.query_params.get("tower", "query") == "item" else "query"
        now.scorer.reader_of(tower)
        asked = await self._asked(request, now)
        if asked.rows is None:
            raise Refused(400, DataError("vectors are of rows", where="the body", expected="rows or columns"))
        return await self._scored(request, now, tower, ["vector"], asked)

    async def _scored(
        self, request: Request, now: Loaded, program: ProgramName, names: list[str], asked: Asked
    ) -> Response:
        found = await self.batcher.score(now.scorer, program, asked)
        self.figures.rows.inc(len(found[0]))
        kind, body = write_body(request.headers.get("accept", ""), now.version, names, found)
        headers = {"X-Model-Version": now.version}
        if self.request_log and program == "predict":
            logged = self.request_log.offer(request.url.path, now, asked, found)
            headers |= {"X-Request-Id": logged} if logged else {}
        return Response(body, media_type=kind, headers=headers)

    async def _asked(self, request: Request, now: Loaded) -> Asked:
        kind = request.headers.get("content-type", "")
        return read_body(kind, await self.read(request), now.scorer.columns, self.limits)

    async def read(self, request: Request) -> bytes:
        """The body.

        Raises:
            Refused: it is too large, or others take all the room that bodies have together.
        """
        body, limits = bytearray(), self.limits
        try:
            async for part in request.stream():
                body += part
                self._reading += len(part)
                if len(body) > limits.body_bytes:
                    most = f"at most {limits.body_bytes:,} bytes"
                    raise Refused(413, DataError("the body is too large", where="the body", expected=most))
                if self._reading > limits.all_bodies_bytes:
                    raise too_busy("too many large requests are coming in")
            return bytes(body)
        finally:
            self._reading -= len(body)

    async def health(self, request: Request, now: Loaded) -> Response:
        """GET /health and /ready: the golden rows were scored when the version was loaded."""
        return Response(to_json({"version": now.version}), media_type=JSON)

    async def healthz(self, request: Request, now: Loaded) -> Response:
        """GET /-/healthz: what KubeRay asks of Serve's proxies, in whose place a replica is."""
        return Response("success", media_type="text/plain")

    async def page(self, request: Request, now: Loaded) -> Response:
        """GET /: a page that asks the other paths; it holds no data itself."""
        html, headers = make_page()
        return Response(html, media_type="text/html", headers=headers)

    async def openapi(self, request: Request, now: Loaded) -> Response:
        """GET /openapi.json."""
        return Response(to_json(describe(now.scorer)), media_type=JSON)

    async def example(self, request: Request, now: Loaded) -> Response:
        """GET /example: a body of /predict, to be sent as it is: a browser would parse large ids wrongly."""
        return Response(example_text(now.scorer), media_type=JSON)

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


Endpoint = Callable[[Request, Loaded], Awaitable[Response]]


class App:
    """The application of ASGI: what a client did wrong is a 4xx that names field and reason.

    Args:
        more: (method, path) → further endpoints.
    """

    def __init__(self, service: Service, more: dict[tuple[str, str], Endpoint] | None = None):
        self.service = service
        self._endpoints: dict[tuple[str, str], Endpoint] = {
            ("POST", "/predict"): service.predict,
            ("POST", "/vectors"): service.vectors,
            ("GET", "/"): service.page,
            ("GET", "/health"): service.health,
            ("GET", "/ready"): service.health,
            ("GET", "/-/healthz"): service.healthz,
            ("GET", "/openapi.json"): service.openapi,
            ("GET", "/example"): service.example,
            **(more or {}),
        }
        self._paths = {path for _, path in self._endpoints}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, path = perf_counter(), scope["path"]
        response = await self._answer(Request(scope, receive))
        path = path if path in self._paths else "other"
        self.service.figures.requests.labels(path, response.status_code).inc()
        await response(scope, receive, send)
        self.service.figures.seconds.labels(path).observe(perf_counter() - began)

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._endpoint(request)(request, self.service.versions.current)
        except Refused as refused:
            return Response(refused.body, refused.status, refused.headers, JSON)
        except (DataError, ConfigError, SchemaError) as error:
            return Response(Refused(400, error).body, 400, media_type=JSON)
        except ClientDisconnect:
            return Response(status_code=499)
        except Exception as error:
            log.exception("a request failed")
            own = (
                error if isinstance(error, RaytrecError) else RunError("the service failed", do="see its log")
            )
            return Response(Refused(500, own).body, 500, media_type=JSON)

    def _endpoint(self, request: Request) -> Endpoint:
        """
        Raises:
            Refused: there is none, or the request bears no token.
        """
        method, path = request.method, request.scope["path"]
        self.service.allow(request)
        if endpoint := self._endpoints.get((method, path)):
            return endpoint
        methods = ", ".join(sorted(known for known, of in self._endpoints if of == path))
        what = DataError(
            f"{method} {path}: " + ("another method" if methods else "no such path"),
            expected=methods or "see /openapi.json",
        )
        raise Refused(405, what, Allow=methods) if methods else Refused(404, what)
