"""A service on Ray Serve: replicas that each answer HTTP, behind Serve's proxy."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError
from raytrec.config.base import Section
from raytrec.serving.app import Service, make_app
from raytrec.serving.bodies import JSON, Refused
from raytrec.serving.command import TOKEN
from raytrec.serving.coordinator import FOLLOW_S, Coordinator, Order, Report
from raytrec.serving.request_log import RequestLog
from raytrec.serving.versions import Loaded, Versions

log = logging.getLogger(__name__)
NAMESPACE = "raytrec-serve"
MOST_ONGOING = 256  # requests that a replica works on; the proxy keeps others
# Serve's own switches for throughput, but that replicas do not listen themselves (direct ingress): that takes
# HAProxy, which listens on all interfaces.
THROUGHPUT = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1000",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
}


class Replica:
    """A replica: loads what the coordinator names, answers, and follows its orders in a thread."""

    def __init__(
        self, name: str, token: str | None, allow_code: bool, log_requests: str | None, log_sample: float
    ):
        import ray
        import torch
        from ray import serve

        from raytrec.compat.ray_serve import keep_replica_on_loopback

        keep_replica_on_loopback()
        torch.set_num_threads(1)
        self._coordinator = ray.get_actor(name, NAMESPACE)
        self._id = serve.get_replica_context().replica_id.unique_id
        versions = Versions(ray.get(self._coordinator.uri.remote()), allow_code)
        self.service = Service(versions, token)
        if log_requests:
            figures = self.service.figures
            self.service.request_log = RequestLog(
                log_requests, log_sample, self._id, figures.logged, figures.not_logged
            )
        Thread(target=self._follow, name="follow", daemon=True).start()

    def __del__(self):
        """Serve calls it when the replica is to end."""
        service = getattr(self, "service", None)
        if service and service.request_log:
            service.request_log.close()

    def __serve_build_asgi_app__(self):
        more = {("POST", "/promote"): self._promote, ("GET", "/versions"): self._versions}
        return make_app(self.service, more)

    async def _promote(self, request: Request, now: Loaded) -> Response:
        """POST /promote {"uri": …}, or {} for the version before."""
        values = await request.json()
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

    def _follow(self) -> None:
        """Carries out the coordinator's orders, until the process ends."""
        import ray

        versions, done = self.service.versions, Report(-1, "", "")
        while True:
            now = versions.current
            done = replace(done, uri=now.uri, version=now.version)
            try:
                order = ray.get(self._coordinator.follow.remote(self._id, done), timeout=4 * FOLLOW_S)
            except Exception:  # the coordinator is being started again, or this process ends
                time.sleep(1)
                continue
            if order.number != done.done:
                done = self._carry_out(order, done)

    def _carry_out(self, order: Order, before: Report) -> Report:
        versions, prepared, error = self.service.versions, before.prepared, None
        try:
            if order.kind == "prepare":
                prepared = versions.prepare(order.target)
            elif order.kind == "commit" and versions.current.version != order.target:
                versions.commit(order.target)
            elif order.kind == "forget":
                versions.forget()
        except RaytrecError as failed:
            prepared, error = None, failed
        except Exception as failed:
            log.exception("an order could not be carried out")
            prepared, error = None, RunError(f"{type(failed).__name__}: {failed}", where=order.target)
        return replace(before, done=order.number, prepared=prepared, error=error)


def _json(values: Any) -> Response:
    from pydantic_core import to_json

    return Response(to_json(values), media_type=JSON)


class Served(Section):
    """What `app` makes a service of."""

    uri: str
    """Of the export; every node must reach it. Another one is promoted, on the replicas that there are."""
    name: str
    no_token: bool = False
    """Answer without a token; else RAYTREC_SERVE_TOKEN is it."""
    allow_code: bool = False
    """Transforms of the export may name code."""
    log_requests: str | None = None
    """Folder of a sample of requests and their scores."""
    log_sample: float = Field(default=0.01, gt=0, le=1)


def app(args: dict[str, Any]) -> Any:
    """The application of Ray Serve, for configuration files of Serve and KubeRay:
    `import_path: raytrec.serving.deployment:app`, with the keys of `Served` as `args`.

    Raises:
        ConfigError: there is no token.
    """
    served, token = Served.model_validate(args), os.environ.get(TOKEN)
    if not (token or served.no_token):
        raise ConfigError(
            f"{TOKEN} is not set",
            where="the node that builds the application",
            expected="the token that clients send",
            do=f"set {TOKEN} on all nodes, from a Secret; or no_token: true, where others guard the service",
        )
    return build(served, None if served.no_token else token)


def build(served: Served, token: str | None, **scaling: Any) -> Any:
    """Starts the service's coordinator, and gives its application.

    Args:
        scaling: num_replicas or autoscaling_config.

    Raises:
        RunError: replicas that there are cannot load the export; they answer as before.
    """
    import ray
    from ray import serve
    from ray.serve.schema import LoggingConfig

    actor = (
        ray.remote(num_cpus=0, max_restarts=-1)(Coordinator)
        .options(
            name=coordinator_of(served.name),
            namespace=NAMESPACE,
            lifetime="detached",
            max_concurrency=1000,
            get_if_exists=True,
        )
        .remote(served.uri)
    )
    ray.get(actor.declare.remote(served.uri))
    deployment = serve.deployment(
        serve.ingress()(Replica),
        name="raytrec",
        max_ongoing_requests=MOST_ONGOING,
        ray_actor_options={"num_cpus": 1},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **scaling,
    )
    return deployment.bind(
        coordinator_of(served.name), token, served.allow_code, served.log_requests, served.log_sample
    )


def deploy(served: Served, *, host: str, port: int, replicas: tuple[int, int], token: str | None) -> None:
    """Starts a service on the Ray that this process uses, and returns when it answers.

    Args:
        replicas: the least and the most; between them, as many as requests need.
    """
    from ray import serve
    from ray.serve.config import AutoscalingConfig, HTTPOptions, ProxyLocation
    from ray.serve.schema import LoggingConfig

    refuse_haproxy(host)
    least, most = replicas
    scaling: dict[str, Any] = {"num_replicas": least}
    if least != most:
        config = AutoscalingConfig(min_replicas=least, max_replicas=most, target_ongoing_requests=8)
        scaling = {"autoscaling_config": config}
    serve.start(
        proxy_location=ProxyLocation.HeadOnly,
        http_options=HTTPOptions(host=host, port=port),
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
    )
    serve.run(build(served, token, **scaling), name=served.name, route_prefix="/")


def end(name: str) -> None:
    """Ends what `deploy` has started."""
    import ray
    from ray import serve

    serve.shutdown()
    with suppress(ValueError):  # it was not reached
        ray.kill(ray.get_actor(coordinator_of(name), NAMESPACE))


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
