"""The service's HTTP: one process that scores, without Ray."""

from __future__ import annotations

import hmac
import logging
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from time import perf_counter
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError, SchemaError
from raytrec.scoring.manifest import ProgramName
from raytrec.scoring.scorer import Scorer
from raytrec.serving.batching import Batcher, too_busy
from raytrec.serving.bodies import JSON, Limits, Refused, decode_request, encode_response
from raytrec.serving.figures import Figures
from raytrec.serving.openapi import Endpoint, describe, example_text
from raytrec.serving.request_log import RequestLog
from raytrec.serving.versions import Versions

log = logging.getLogger(__name__)


class Service:
    """ASGI application that answers requests with the current version.

    A client's mistake is answered with a 4xx that names field and reason.

    Args:
        versions: Exports of which one answers.
        token: Token that requests must bear; None: no token is required.
        limits: Limits of requests.
        more: Further endpoints.
    """

    def __init__(
        self, versions: Versions, token: str | None, limits: Limits = Limits(), more: Sequence[Endpoint] = ()
    ):
        self.versions, self.limits, self._token, self._reading = versions, limits, token, 0
        self.figures = Figures()
        self.batcher = Batcher(observe=self.figures.batch_rows.observe)
        self.request_log: RequestLog | None = None
        self.endpoints = [
            Endpoint("POST", "/predict", self._predict, "Predictions of rows, or of one user's candidates."),
            Endpoint("POST", "/vectors", self._vectors, "Vectors of rows, of a model of two towers."),
            Endpoint("GET", "/", self._page, "A page that shows the model and sends an example.", True),
            # The golden rows were scored when the version was loaded.
            Endpoint("GET", "/health", self._health, "The version that answers.", True),
            Endpoint("GET", "/ready", self._health, "The version that answers.", True),
            Endpoint("GET", "/-/healthz", self._healthz, "Health check that KubeRay sends to proxies.", True),
            Endpoint("GET", "/openapi.json", self._openapi, "This document."),
            Endpoint("GET", "/example", self._example, "A body of /predict, to be sent unchanged."),
            *more,
        ]
        self._table = {(each.method, each.path): each for each in self.endpoints}
        self._open = {each.path for each in self.endpoints if each.is_open}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, path = perf_counter(), scope["path"]
        response = await self._answer(Request(scope, receive))
        path = path if any(path == known for _, known in self._table) else "other"
        self.figures.requests.labels(path, response.status_code).inc()
        await response(scope, receive, send)
        self.figures.seconds.labels(path).observe(perf_counter() - began)

    async def _answer(self, request: Request) -> Response:
        try:
            return await self._endpoint(request).answer(request, self.versions.current.scorer)
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
        """Return the endpoint of a request.

        Raises:
            Refused: There is none, or the request bears no token, or a wrong one.
        """
        method, path = request.method, request.scope["path"]
        if self._token is not None and path not in self._open:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                expected = "Authorization: Bearer TOKEN"
                error = RunError("no token, or another", where="Authorization", expected=expected)
                raise Refused(401, error, **{"WWW-Authenticate": "Bearer"})
        if endpoint := self._table.get((method, path)):
            return endpoint
        methods = ", ".join(sorted(known for known, of in self._table if of == path))
        what = DataError(
            f"{method} {path}: " + ("another method" if methods else "no such path"),
            expected=methods or "see /openapi.json",
        )
        raise Refused(405, what, Allow=methods) if methods else Refused(404, what)

    async def read(self, request: Request) -> bytes:
        """Return the body of a request.

        Raises:
            Refused: The body is too large, or others take all the room that bodies have together.
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

    async def _predict(self, request: Request, scorer: Scorer) -> Response:
        return await self._scored(request, scorer, "predict", [task.column for task in scorer.manifest.tasks])

    async def _vectors(self, request: Request, scorer: Scorer) -> Response:
        tower: ProgramName = "item" if request.query_params.get("tower", "query") == "item" else "query"
        scorer.reader_of(tower)  # before the body is read
        return await self._scored(request, scorer, tower, ["vector"])

    async def _scored(
        self, request: Request, scorer: Scorer, program: ProgramName, names: list[str]
    ) -> Response:
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
        return Response(example_text(scorer), media_type=JSON)


def json_response(values: Any) -> Response:
    """Return a response of JSON."""
    return Response(to_json(values), media_type=JSON)


@cache
def make_page() -> tuple[str, dict[str, str]]:
    """Return the page, which contains no data, and its headers.

    The headers allow a browser only the page's own script and style and requests to this service, and forbid
    showing the page inside another one.
    """
    loader = ChoiceLoader([PackageLoader("raytrec.serving"), PackageLoader("raytrec.report")])
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    style = "\n" + pages.get_template("style.css").render() + "\n" + pages.get_template("page.css").render()
    script = "\n" + pages.get_template("page.js").render()
    html = pages.get_template("page.html.j2").render(style=Markup(style), script=Markup(script))
    policy = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html, {
        "Content-Security-Policy": "; ".join(f"{what} {allowed}" for what, allowed in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
