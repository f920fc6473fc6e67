"""A service on Ray Serve: replicas that each answer HTTP, behind Serve's proxy."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from copy import copy
from threading import Thread
from typing import Any

from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError
from raytrec.serving.app import Service, make_app
from raytrec.serving.bodies import JSON, Refused
from raytrec.serving.coordinator import FOLLOW_S, Coordinator, Order, Report
from raytrec.serving.versions import Loaded, Versions

log = logging.getLogger(__name__)
NAMESPACE = "raytrec-serve"
MOST_URI_BYTES = 1 << 16  # of the body of a promotion
MOST_ONGOING = 256  # requests that a replica works on; the proxy keeps others
# Serve's own switches for throughput, but that replicas do not listen themselves (direct ingress): that takes
# HAProxy, which listens on all interfaces.
THROUGHPUT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_FREEZE_GC_ON_STARTUP": "0",  # it would keep a replica's first export for good
}


class Replica:
    """A replica: loads what the coordinator names, answers, and follows its orders in a thread."""

    def __init__(self, name: str, token: str | None, allow_code: bool):
        import ray
        import torch
        import torch.export.pt2_archive  # with what exports are read by
        from ray import serve

        from raytrec.compat.ray_serve import keep_replica_on_loopback

        keep_replica_on_loopback()
        torch.set_num_threads(1)
        gc.freeze()  # what is imported stays: Versions collects what exports leave, in tens of milliseconds
        self._coordinator = ray.get_actor(name, NAMESPACE)
        self._id = serve.get_replica_context().replica_id.unique_id
        versions = Versions(ray.get(self._coordinator.uri.remote()), allow_code)
        self.service = Service(versions, token)
        # Another version may have been promoted while this one was loaded: it has that one before it answers.
        report = Report(-1, versions.current.uri, versions.current.version)
        order = ray.get(self._coordinator.follow.remote(self._id, report))
        report = self._carry_out(order, report)
        if report.error and order.kind == "commit":
            raise report.error
        Thread(target=self._follow, args=[report], name="follow", daemon=True).start()

    def __serve_build_asgi_app__(self):
        more = {("POST", "/promote"): self._promote, ("GET", "/versions"): self._versions}
        return make_app(self.service, more)

    async def _promote(self, request: Request, now: Loaded) -> Response:
        """POST /promote {"uri": …}, or {} for the version before."""
        body, values = bytearray(), None
        async for part in request.stream():
            body += part
            if len(body) > MOST_URI_BYTES:
                break
        else:
            with suppress(ValueError):
                values = from_json(bytes(body))
        if not isinstance(values, dict) or not isinstance(values.get("uri", ""), str):
            raise Refused(400, DataError("no uri", where="the body", expected='{"uri": "URI"}, or {}'))
        version = await self._asking(lambda: self._coordinator.promote.remote(values.get("uri")))
        return _json({"version": version})

    async def _versions(self, request: Request, now: Loaded) -> Response:
        """GET /versions: what each replica answers with."""
        return _json(await self._asking(self._coordinator.versions.remote))

    async def _asking(self, ask: Callable[[], Any]) -> Any:
        """What the coordinator answers; its errors are the client's."""
        try:
            return await ask()
        except Exception as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, RaytrecError):
                raise Refused(409, cause) from None
            raise

    def _follow(self, done: Report) -> None:
        """Carries out the coordinator's orders, until the process ends. It asks on while it carries one out,
        because a replica that does not is taken for ended."""
        import ray

        worker, work = ThreadPoolExecutor(1, thread_name_prefix="order"), None
        while True:
            if work and work.done():
                done, work = work.result(), None
            try:
                order = ray.get(self._coordinator.follow.remote(self._id, done), timeout=4 * FOLLOW_S)
            except Exception:  # the coordinator is being started again, or this process ends
                time.sleep(1)
                continue
            if order.number != done.done:
                work = work or worker.submit(self._carry_out, order, done)
                wait([work], FOLLOW_S)

    def _carry_out(self, order: Order, before: Report) -> Report:
        versions, prepared, error = self.service.versions, before.prepared, None
        try:
            if order.kind == "prepare":
                prepared = versions.prepare(order.uri)
            elif order.kind == "commit":
                if order.version not in (prepared, versions.current.version):
                    versions.prepare(order.uri)  # it was not there when the others did
                versions.commit(order.version)
            elif order.kind == "forget":
                versions.forget()
        except RaytrecError as failed:
            prepared, error = None, copy(failed)  # its traceback would keep the exports of its frames
        except Exception as failed:
            log.exception("an order could not be carried out")
            prepared, error = None, RunError(f"{type(failed).__name__}: {failed}", where=order.uri)
        now = versions.current
        return Report(order.number, now.uri, now.version, prepared, error)


def _json(values: Any) -> Response:
    return Response(to_json(values), media_type=JSON)


def deploy(
    uri: str,
    *,
    name: str,
    host: str,
    port: int,
    replicas: tuple[int, int],
    token: str | None,
    allow_code: bool = False,
) -> None:
    """Starts a service on the Ray that this process uses, and returns when it answers.

    Args:
        replicas: the least and the most; between them, as many as requests need.
    """
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation
    from ray.serve.schema import LoggingConfig

    refuse_haproxy(host)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Coordinator)
    actor.options(
        name=coordinator_of(name),
        namespace=NAMESPACE,
        lifetime="detached",
        max_concurrency=1000,
        get_if_exists=True,
    ).remote(uri)
    least, most = replicas
    scaling: dict[str, Any] = {"num_replicas": least}
    if least != most:
        config = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=8)
        scaling = {"autoscaling_config": config}
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="raytrec",
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options={"num_cpus": 1},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **scaling,
    )
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=host, port=port),
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    serve.run(deployment.bind(coordinator_of(name), token, allow_code), name=name, route_prefix="/")


def coordinator_of(name: str) -> str:
    """The name of a service's actor."""
    return f"raytrec-serve-{name}"


def refuse_haproxy(host: str) -> None:
    """
    Raises:
        ConfigError: Serve would listen on all interfaces.
    """
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" and host != "0.0.0.0":
        raise ConfigError(
            "Serve's HAProxy mode listens on all interfaces, whatever the host is",
            where="RAY_SERVE_ENABLE_HA_PROXY=1",
            expected=f"--host {host} to hold",
            do="unset it; or, if that is what you want, --host 0.0.0.0",
        )
