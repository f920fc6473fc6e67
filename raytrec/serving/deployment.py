"""A service on Ray Serve: replicas that each answer HTTP, without a proxy."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from raytrec.common.errors import DataError, RaytrecError, RunError
from raytrec.serving.app import App, Service
from raytrec.serving.bodies import JSON, Refused
from raytrec.serving.coordinator import FOLLOW_S, Coordinator, Order, Report
from raytrec.serving.listener import Listener
from raytrec.serving.versions import Loaded, Versions

log = logging.getLogger(__name__)
NAMESPACE = "raytrec-serve"
BUSY = 0.6  # share of the time that replicas score, which their number is kept near


class Replica:
    """A replica: loads what the coordinator names, answers, and follows its orders in a thread."""

    def __init__(self, name: str, host: str, port: int, token: str | None, allow_code: bool):
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
        more = {("POST", "/promote"): self._promote, ("GET", "/versions"): self._versions}
        self._busy = perf_counter(), 0.0
        gc.collect()
        gc.freeze()  # what a model is made of is not looked through again
        self._listener = Listener(App(self.service, more), host, port)
        Thread(target=self._follow, name="follow", daemon=True).start()

    def check_health(self) -> None:
        """Raises where HTTP has ended: Serve starts another replica then."""
        if not self._listener.alive:
            raise RunError("the replica does not listen any more", where="HTTP")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """busy: which share of the time since the last call it has scored."""
        (then, before), now = self._busy, (perf_counter(), self.service.batcher.busy_s)
        self._busy = now
        return {"busy": (now[1] - before) / max(now[0] - then, 1e-3)}

    def __del__(self) -> None:
        self._listener.close()  # Serve calls it before it ends the process

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


def replicas_for(context: Any) -> tuple[float, dict]:
    """Serve's policy of a service by load: so many replicas that each is busy BUSY of the time."""
    busy = (context.aggregated_metrics or {}).get("busy", {})
    return (sum(busy.values()) / BUSY if busy else context.current_num_replicas), {}


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
        host, port: on each node that has a replica.
        replicas: the least and the most; between them, as many as requests need.
    """
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation
    from ray.serve.schema import LoggingConfig

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
        policy = AutoscalingPolicy(policy_function=f"{__name__}:{replicas_for.__name__}")
        scaling = {
            "autoscaling_config": AutoscalingConfig(min_replicas=least, max_replicas=most, policy=policy)
        }
    deployment = serve.deployment(
        Replica,
        name="raytrec",
        ray_actor_options={"num_cpus": 1},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **scaling,
    )
    serve.start(proxy_location=ProxyLocation.Disabled)
    bound = deployment.bind(coordinator_of(name), host, port, token, allow_code)
    serve.run(bound, name=name, route_prefix=None)


def coordinator_of(name: str) -> str:
    """The name of a service's actor."""
    return f"raytrec-serve-{name}"
