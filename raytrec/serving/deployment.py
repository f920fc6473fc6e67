"""Service on Ray Serve, whose replicas serve HTTP directly, without Serve's proxy."""

from __future__ import annotations

import gc
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event, Lock, Thread
from time import perf_counter, process_time
from typing import Any

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from raytrec.common.errors import ConfigError, RaytrecError, RunError, get_last_line
from raytrec.scoring.manifest import read_manifest
from raytrec.scoring.scorer import Scorer
from raytrec.serving.app import Service
from raytrec.serving.batching import UnavailableError
from raytrec.serving.bodies import JSON, Limits, RefusedRequest, check_type, json_response
from raytrec.serving.coordinator import FOLLOW_INTERVAL_S, LOAD_TIMEOUT_S, NAMESPACE, Coordinator, get_coordinator_name
from raytrec.serving.listener import Listener
from raytrec.serving.loaded_exports import execute_command, get_containing_folder, load_either, resolve_export
from raytrec.serving.openapi import Endpoint
from raytrec.serving.options import TOKEN, Promotion, ServiceOptions
from raytrec.serving.replica_metrics import ReplicaMetrics, describe_model
from raytrec.serving.replica_state import Export, ReplicaCommand, ReplicaState
from raytrec.serving.request_log import RequestLog
from raytrec.serving.served_state import list_endpoints

LOOKUP_THREADS = 2  # batches of a replica with table shards at a time: one waits for vectors, one is being scored
TARGET_BUSY_SHARE = 0.6  # target share of the time during which replicas are busy


class Replica:
    """Replica that loads a service's exports, serves requests, and follows the coordinator in a thread.

    Args:
        service_options: Options of the service.
        token: Token required in requests; None: no token is required.
    """

    def __init__(self, service_options: ServiceOptions, token: str | None):
        import ray
        import torch
        from ray import serve

        from raytrec.compat.ray_core import prepare_replica

        prepare_replica()
        torch.set_num_threads(1)
        self._listener: Listener | None = None
        self._node = ray.get_runtime_context().get_node_id()
        self._coordinator = ray.get_actor(get_coordinator_name(service_options.name), NAMESPACE)
        self._id = serve.get_replica_context().replica_id.unique_id
        figures, make_maker, threads, self._follower = ReplicaMetrics(), None, 0, None
        if service_options.table_shards:
            from raytrec.serving.table_shards.shard import make_lookup_maker

            make_maker, threads = partial(make_lookup_maker, service_options, figures), LOOKUP_THREADS
        if service_options.follow:
            from raytrec.serving.follow import Follower

            self._follower = Follower(service_options.uri, service_options.allow_code, make_maker)
            versions = self._follower.versions
        else:
            current, previous = ray.get(self._coordinator.exports.remote())
            allow_code, make_lookups = service_options.allow_code, make_maker() if make_maker else None
            versions, failed = load_either(current, previous, allow_code, make_lookups)
            if failed:
                ray.get(self._coordinator.fall_back.remote(current, failed))
        gc.collect()
        gc.freeze()  # later collections, which interrupt scoring, then skip modules and programs
        endpoints = [
            Endpoint("POST", "/promote", self._promote),
            Endpoint("GET", "/versions", self._versions),
            Endpoint("GET", "/metrics", self._metrics),
            Endpoint("GET", "/model", self._model),
            *list_endpoints(self._id),
        ]
        self.service = Service(versions, token, Limits(), endpoints, service_options.name, figures, threads)
        if folder := service_options.log_requests:
            self.service.request_log = RequestLog(folder, service_options.log_sample, self._id, self.service.figures)
        self._promote_from = service_options.promote_from
        self._join()
        self._busy = perf_counter(), process_time()
        self._listener = Listener(self.service, service_options.host, service_options.port)
        if self._follower:
            self._follower.start(self.service, self._listener)

    def _join(self) -> None:
        """Start to execute the coordinator's commands, and return once this replica serves the current version.

        Another version may have been promoted while this replica loaded its first one. From now on, promotions wait for
        this replica. A replica that follows a run returns immediately.

        Raises:
            RaytrecError: The replica cannot load the current version or reach the coordinator within LOAD_TIMEOUT_S.
        """
        # One thread executes the commands in order, while another thread continues to report.
        self._load_thread, self._report_lock = ThreadPoolExecutor(1, "load"), Lock()
        self._last_report, self._is_current = ReplicaState(-1, self.service.versions.version), Event()
        if self._follower:  # the run, not the coordinator, determines the version
            self._is_current.set()
        Thread(target=self._follow, name="follow", daemon=True).start()
        if not self._is_current.wait(LOAD_TIMEOUT_S):
            what = f"this replica has not loaded the served version within {LOAD_TIMEOUT_S:.0f} s"
            do = "read the logs of the coordinator and of this replica"
            raise self._last_report.error or RunError(what, where="the service", do=do)

    def check_health(self) -> None:
        """Raise RunError if the HTTP server has ended. Serve then replaces this replica."""
        if not (self._listener and self._listener.alive):
            what, do = "the HTTP server of the replica has ended", "read the log of the replica"
            raise RunError(what, where=f"replica {self._id}", do=do)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return {"busy": CPU seconds of this process per second since the last call}.

        Without table shards, the maximum is about 1, because the replica reads, scores and writes in one thread.
        """
        (last_s, last_cpu_s), now = self._busy, (perf_counter(), process_time())
        self._busy = now
        return {"busy": (now[1] - last_cpu_s) / max(now[0] - last_s, 1e-3)}

    def __del__(self) -> None:
        """Close the listener and the request log; Serve calls this method when it ends a replica gracefully."""
        if listener := getattr(self, "_listener", None):
            listener.close()
            if self.service.request_log:
                self.service.request_log.close()

    async def _promote(self, request: Request, scorer: Scorer) -> Response:
        # JSON only, because a page of another site can make a browser send forms and plain text to a service
        # on loopback that requires no token.
        check_type(request.headers.get("content-type", ""), JSON)
        promotion = Promotion.parse(await self.service.read(request))
        if self._follower:
            what = "exports cannot be promoted, because the service follows the deltas of a run"
            expected, do = "a service of an export", "start a service of the export without --follow or follow: true"
            raise RefusedRequest(409, RunError(what, where="/promote", expected=expected, do=do))
        uri = resolve_export(promotion.uri, self._promote_from) if promotion.uri else None
        arguments = uri, promotion.share, promotion.shadow
        return json_response(await self._ask_coordinator(self._coordinator.promote, *arguments))

    async def _versions(self, request: Request, scorer: Scorer) -> Response:
        return json_response(await self._ask_coordinator(self._coordinator.versions))

    async def _metrics(self, request: Request, scorer: Scorer) -> Response:
        text = await self._ask_coordinator(self._coordinator.metrics)
        return Response(text, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _model(self, request: Request, scorer: Scorer) -> Response:
        overview = await self._ask_coordinator(self._coordinator.overview)
        freshness = {"freshness": self._follower.describe()} if self._follower else {}
        return json_response(overview | {"model": describe_model(scorer)} | freshness)

    async def _ask_coordinator(self, method: Any, *arguments: Any) -> Any:
        """Return the result of a coordinator's method; refuse the request after a RaytrecError or during a restart."""
        from ray.exceptions import RayActorError

        try:
            return await method.remote(*arguments)
        except RayActorError:
            raise UnavailableError("the coordinator is restarting", where="the service", do="retry") from None
        except Exception as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, RaytrecError):
                raise RefusedRequest(409, cause) from None
            raise

    def _follow(self) -> None:
        """Report to the coordinator until the process ends. Unless the replica follows a run, execute its commands."""
        import ray

        versions, received, work = self.service.versions, -1, None
        while True:
            try:
                with self._report_lock:
                    answer = self._coordinator.follow.remote(self._id, self._report(), received)
                order = ray.get(answer, timeout=4 * FOLLOW_INTERVAL_S)
            except Exception:  # the coordinator is restarting, or this process ends
                time.sleep(1)
                continue
            if self._listener:
                self._listener.fair_connections = order.fair_connections
            failed = work and work.done() and versions.version != order.answer.version
            if self._follower:
                received = order.number
            elif order.number != received or failed:
                received, work = order.number, self._load_thread.submit(self._carry_out, order)

    def _carry_out(self, order: ReplicaCommand) -> None:
        report = execute_command(self.service.versions, order, self._last_report)
        with self._report_lock:  # so that reports are sent in order
            self._last_report = report
            self._coordinator.record_report.remote(self._id, self._report())
        if report.version == order.answer.version:
            self._is_current.set()

    def _report(self) -> ReplicaState:
        service, scorer = self.service, self.service.versions.current.scorer
        service.figures.keep_versions({each.scorer.export_version for each in service.versions.loaded})
        # Deltas change the model's version every few seconds, but not the export's.
        about = describe_model(scorer) | {"version": scorer.export_version}
        figures = tuple(service.figures.collect(about, service.batcher.waiting))
        connections = self._listener.count_active_connections() if self._listener else None
        return replace(
            self._last_report,
            version=scorer.version,
            figures=figures,
            node=self._node,
            connections=connections,
            problem=self._follower.problem if self._follower else None,
        )


def compute_replicas(context: Any) -> tuple[float, dict]:
    """Return (number of replicas, {}), as Serve expects of an autoscaling policy.

    Each replica would then be busy for TARGET_BUSY_SHARE of the time. Without metrics, the number does not change.
    """
    busy = (context.aggregated_metrics or {}).get("busy", {})
    return (sum(busy.values()) / TARGET_BUSY_SHARE if busy else context.current_num_replicas), {}


def app(args: dict[str, Any]) -> Any:
    """Return the Ray Serve application, for configuration files of Serve and KubeRay, after starting its coordinator.

    The import path is `raytrec.serving.deployment:app`, with the keys of `ServiceOptions` as `args`. Replicas of an
    earlier version of the application switch to the export.

    Raises:
        ValidationError: `args` contains an unknown key or an invalid value.
        ConfigError: RAYTREC_SERVE_TOKEN is not set, and no_token is not true.
        RaytrecError: There is no export or its URI is not valid, existing replicas cannot load it, or table shards
            need too much memory.
    """
    served, token = ServiceOptions.model_validate(args), os.environ.get(TOKEN)
    if not (token or served.no_token):
        where, expected = "the node that builds the application", "the token that clients send"
        do = f"set {TOKEN} on all nodes from a Secret, or set no_token: true if access is restricted elsewhere"
        raise ConfigError(f"{TOKEN} is not set", where=where, expected=expected, do=do)
    import ray

    served = served.fill_name()
    ray.get(declare(served))
    return build(served, None if served.no_token else token)


def declare(service_options: ServiceOptions) -> Any:
    """Start the missing coordinator and table shards of a service, and make its export the current one.

    Returns:
        Reference for which `ray.get` waits until existing replicas serve the export. It raises a RaytrecError if a
        replica cannot load the export; all replicas then keep their version.

    Raises:
        RunError: There is no export, or the cluster does not have enough memory for table shards.
        DataError: The URI of the export is not valid, or its store cannot be reached.
    """
    import ray

    from raytrec.compat.ray_core import load_actor_value, store_actor_value

    if service_options.table_shards:
        from raytrec.serving.table_shards.shard import start_shards

        start_shards(service_options)
    version = "" if service_options.follow else read_manifest(service_options.uri).version
    export = Export(service_options.uri, version)
    actor = ray.remote(num_cpus=0, max_restarts=-1)(Coordinator).options(
        name=get_coordinator_name(service_options.name),
        namespace=NAMESPACE,
        lifetime="detached",
        max_concurrency=1000,
        get_if_exists=True,
    )
    return actor.remote(export, load_actor_value, store_actor_value).declare.remote(export)


def build(service_options: ServiceOptions, token: str | None, **scaling: Any) -> Any:
    """Return the Ray Serve application of a service whose coordinator exists.

    Args:
        service_options: Options of the service.
        token: Token required in requests; None: no token is required.
        **scaling: Option num_replicas or autoscaling_config of the Serve deployment.
    """
    from ray import serve
    from ray.serve.schema import LoggingConfig

    # The folder is resolved now, because a symbolic link may change later.
    folder = service_options.promote_from or get_containing_folder(service_options.uri)
    service_options = service_options.model_copy(update={"promote_from": folder})
    deployment = serve.deployment(
        Replica,
        name="raytrec",
        ray_actor_options={"num_cpus": 1},
        logging_config=LoggingConfig(enable_access_log=False, log_level="WARNING"),
        **scaling,
    )
    return deployment.bind(service_options, token)


def deploy(service_options: ServiceOptions, replicas: tuple[int, int], token: str | None, is_local: bool) -> None:
    """Start a service on the Ray cluster of this process, and return when its replicas serve requests.

    Args:
        service_options: Options of the service.
        replicas: Minimum and maximum number of replicas; the number in between depends on the load.
        token: Token required in requests; None: no token is required.
        is_local: True if the cluster ends with the command, which removes Ray's logs.

    Raises:
        RaytrecError: There is no export, existing replicas cannot load it, table shards need too much memory, or a
            replica cannot start.
    """
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, ProxyLocation

    min_replicas, max_replicas = replicas
    scaling: dict[str, Any] = {"num_replicas": min_replicas}
    if min_replicas != max_replicas:
        policy = AutoscalingPolicy(policy_function=f"{__name__}:{compute_replicas.__name__}")
        config = AutoscalingConfig(min_replicas=min_replicas, max_replicas=max_replicas, policy=policy)
        scaling = {"autoscaling_config": config}
    declared = declare(service_options)
    serve.start(proxy_location=ProxyLocation.Disabled)
    ray.get(declared)
    try:
        serve.run(build(service_options, token, **scaling), name=service_options.name, route_prefix=None)
    except RuntimeError as error:
        raise _explain_failed_start(error, service_options.name, is_local) from None


def _explain_failed_start(error: RuntimeError, name: str, is_local: bool) -> RunError:
    """Return the error for a service that Serve cannot start; if a replica raised a RaytrecError, with its parts."""
    from ray import serve

    messages: list[str] = []
    with suppress(Exception):  # Serve's controller may have died
        messages = [each.message for each in serve.status().applications[name].deployments.values()]
    text = "\n".join([str(error), *messages]).rstrip()
    # Serve's message ends with the traceback of the replica that failed last.
    *_, last = re.split(r"^raytrec\.[\w.]+: ", text, flags=re.MULTILINE)
    reason, *parts = re.split(r"\n  (where|expected|do): +", get_last_line(text, "") if last == text else last)
    read = "read logs/serve/controller_*.log in the folder of the Ray session on the head node"
    do = f"start `raytrec head`, repeat the command with --address auto, and {read}" if is_local else read
    own = {"where": f"service {name}", "do": do}
    return RunError(f"the service cannot start: {reason}", **own | dict(zip(parts[::2], parts[1::2], strict=True)))


def shut_down_service(name: str, table_shards: int = 0) -> None:
    """Delete a service with its coordinator and table shards, even if the service has only partly started.

    Ray Serve is shut down unless it runs other applications. In this case, the call waits up to 60 s for the deletion,
    and then returns without an error. `table_shards` is the number of table shards with which the service was started.
    """
    import ray
    from ray import serve

    others: set[str] = set()
    with suppress(TimeoutError, ray.exceptions.RayError):  # the deletion takes too long, or Serve's controller has died
        if others := serve.status().applications.keys() - {name}:
            serve.delete(name)
    if not others:
        serve.shutdown()
    with suppress(ValueError):  # the actor does not exist
        ray.kill(ray.get_actor(get_coordinator_name(name), NAMESPACE))
    if table_shards:
        from raytrec.serving.table_shards.shard import end_shards

        end_shards(name, table_shards)
