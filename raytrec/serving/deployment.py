"""A service on Ray Serve: replicas that each answer HTTP, without a proxy."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic_core import from_json, to_json
from starlette.requests import Request
from starlette.responses import Response

from raytrec.common.errors import DataError, RaytrecError, RunError
from raytrec.serving.app import App, Endpoint, Service
from raytrec.serving.bodies import JSON, Refused
from raytrec.serving.coordinator import FOLLOW_S, LOAD_S, Coordinator, Export, Order, Report
from raytrec.serving.figures import about_model
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
        versions = Versions(ray.get(self._coordinator.current.remote()).uri, allow_code)
        self.service = Service(versions, token)
        self._join()
        more: dict[tuple[str, str], Endpoint] = {
            ("POST", "/promote"): self._promote,
            ("GET", "/versions"): self._versions,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/figures"): self._figures,
        }
        self._busy = perf_counter(), 0.0
        gc.collect()
        gc.freeze()  # what a model is made of is not looked through again
        self._listener = Listener(App(self.service, more), host, port)

    def _join(self) -> None:
        """Follows the coordinator from now on: promotions wait for this replica, too. Returns when it has the
        version that all answer with, because another may have been promoted while it loaded."""
        # Orders are carried out one after the other in a thread; meanwhile another one reports.
        self._loads, self._reports = ThreadPoolExecutor(1, "load"), Lock()
        self._done, self._settled = Report(-1, self.service.versions.current.version), Event()
        Thread(target=self._follow, name="follow", daemon=True).start()
        if not self._settled.wait(LOAD_S):
            raise self._done.error or RunError("the coordinator does not answer", where="the service")

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
        try:
            values = from_json(await request.body())
        except ValueError:
            values = None
        if not isinstance(values, dict) or not isinstance(values.get("uri", ""), str):
            raise Refused(400, DataError("no uri", where="the body", expected='{"uri": "URI"}, or {}'))
        version = await self._asking(lambda: self._coordinator.promote.remote(values.get("uri")))
        return _json({"version": version})

    async def _versions(self, request: Request, now: Loaded) -> Response:
        """GET /versions: what each replica answers with."""
        return _json(await self._asking(self._coordinator.versions.remote))

    async def _metrics(self, request: Request, now: Loaded) -> Response:
        """GET /metrics, of Prometheus: all replicas, as of their last reports."""
        text = await self._asking(self._coordinator.metrics.remote)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _figures(self, request: Request, now: Loaded) -> Response:
        """GET /figures?minutes=15, or 60: versions, model and course of the service, for its page."""
        minutes = request.query_params.get("minutes", "15")
        if minutes not in ("15", "60"):
            raise Refused(400, DataError(f"minutes is '{minutes}'", where="minutes", expected="15 or 60"))
        seen = await self._asking(lambda: self._coordinator.overview.remote(60 * int(minutes)))
        return _json(seen | {"model": about_model(now)})

    async def _asking(self, ask: Callable[[], Any]) -> Any:
        """What the coordinator answers; its errors are the client's."""
        from ray.exceptions import RayActorError

        try:
            return await ask()
        except RayActorError:
            lost = RunError("the coordinator is being started again", where="the service", do="try again")
            raise Refused(503, lost, **{"Retry-After": "1"}) from None
        except Exception as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, RaytrecError):
                raise Refused(409, cause) from None
            raise

    def _follow(self) -> None:
        """Hands on the coordinator's orders, and reports, until the process ends."""
        import ray

        versions, given, work = self.service.versions, -1, None
        while True:
            try:
                with self._reports:
                    asked = self._coordinator.follow.remote(self._id, self._report(), given)
                order = ray.get(asked, timeout=4 * FOLLOW_S)
            except Exception:  # the coordinator is being started again, or this process ends
                time.sleep(1)
                continue
            failed = work and work.done() and versions.current.version != order.answer.version
            if order.number != given or failed:
                given, work = order.number, self._loads.submit(self._carry_out, order)

    def _carry_out(self, order: Order) -> None:
        done = carry_out(self.service.versions, order, self._done)
        with self._reports:  # reports come in the order in which they are made
            self._done = done
            self._coordinator.hear.remote(self._id, self._report())
        if done.version == order.answer.version:
            self._settled.set()

    def _report(self) -> Report:
        service, now = self.service, self.service.versions.current
        figures = tuple(service.figures.collect(about_model(now), service.batcher.waiting))
        return replace(self._done, version=now.version, figures=figures)


def carry_out(versions: Versions, order: Order, before: Report) -> Report:
    """Carries out an order.

    Args:
        before: the report of the order before it.
    """
    answer, prepared, error = order.answer, None, None
    try:
        if versions.current.version != answer.version:
            if before.prepared != answer.version:
                versions.prepare(answer.uri)
            versions.commit(answer.version)
        if order.prepare:
            prepared = versions.prepare(order.prepare)
        else:
            versions.forget()
    except RaytrecError as failed:
        error = failed
    except Exception as failed:
        log.exception("an order could not be carried out")
        error = RunError(f"{type(failed).__name__}: {failed}", where=order.prepare or answer.uri)
    return Report(order.number, versions.current.version, prepared, error)


def _json(values: Any) -> Response:
    return Response(to_json(values), media_type=JSON)


def replicas_for(context: Any) -> tuple[float, dict]:
    """Serve's policy of a service by load: so many replicas that each is busy BUSY of the time."""
    busy = (context.aggregated_metrics or {}).get("busy", {})
    return (sum(busy.values()) / BUSY if busy else context.current_num_replicas), {}


def deploy(
    export: Export,
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

    from raytrec.compat.ray_core import keep_for_actor, kept_for_actor

    actor = ray.remote(num_cpus=0, max_restarts=-1)(Coordinator)
    actor.options(
        name=coordinator_of(name),
        namespace=NAMESPACE,
        lifetime="detached",
        max_concurrency=1000,
        get_if_exists=True,
    ).remote(export, kept_for_actor, keep_for_actor)
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


def end(name: str) -> None:
    """Ends a service, as far as it has been started."""
    import ray
    from ray import serve

    serve.shutdown()
    with suppress(ValueError):  # there is none
        ray.kill(ray.get_actor(coordinator_of(name), NAMESPACE))


def coordinator_of(name: str) -> str:
    """The name of a service's actor."""
    return f"raytrec-serve-{name}"
