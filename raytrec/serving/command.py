"""Commands `raytrec serve` and `raytrec promote`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import HTTPException, InvalidURL
from threading import Event
from time import monotonic, sleep
from typing import Any
from urllib.parse import SplitResult, urlsplit

from raytrec.cluster.local_ray import check_ports
from raytrec.cluster.warm_process import SERVING, keep_warm_process
from raytrec.common.errors import ConfigError, RunError, convert_os_errors
from raytrec.common.formatting import format_address
from raytrec.common.redaction import hide
from raytrec.common.storage import make_absolute, open_filesystem, query_file_info
from raytrec.scoring.manifest import MANIFEST_FILE
from raytrec.serving.options import TOKEN, ServiceOptions, find_token, read_token, token_file

PORT_TIMEOUT_S = 40  # timeout of waiting for a service on the port to end
EXPORT_TIMEOUT_S = 1800  # timeout of waiting for a run's first full export
PROMOTION_TIMEOUT_S = 1800  # timeout of a promotion, during which all replicas load tables


def serve(service_options: ServiceOptions, address: str | None = None, replicas: str = "1") -> None:
    """Serve an export, or the newest state of a run, on Ray Serve until the process receives SIGINT or SIGTERM.

    The address, example commands and changes of the version are printed to stdout. The service ends with this function.

    Args:
        service_options: Options of the service.
        address: Address of a Ray cluster; default: RAY_ADDRESS, or else a new local cluster, which ends with the
            service.
        replicas: Number of serving processes: N, or MIN:MAX depending on the load.

    Raises:
        RunError: There is no export (with `follow`, after EXPORT_TIMEOUT_S), the port is taken, Ray does not start or
            cannot be reached, Ray Serve is not installed, the token's file cannot be read or written, table shards need
            too much memory, or a replica cannot start.
        ConfigError: `replicas` is malformed, or `follow` and `promote_from` are both set.
        DataError: A URI is malformed, or its store cannot be reached.
    """
    min_replicas, max_replicas = _parse_replicas(replicas)
    if service_options.log_requests:
        open_filesystem(service_options.log_requests)
    if service_options.follow and service_options.promote_from:
        what, where = "a service that follows a run does not accept promotions", "--promote-from"
        raise ConfigError(what, where=where, expected="either --follow or --promote-from")
    place = service_options.port, service_options.host
    wait_for_port(*place)
    if service_options.follow:
        wait_for_full_export(service_options.uri)
        wait_for_port(*place)  # another service may have started meanwhile
    service_options = service_options.fill_name()
    token = None if service_options.no_token else read_token(service_options.name)
    from raytrec.cluster.session import ray_session, starts_local_ray

    is_local = starts_local_ray(address)
    with keep_warm_process(is_local, SERVING), ray_session(address, 1 + max_replicas):
        stop = Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        try:
            _call_on_cluster("deploy", service_options, (min_replicas, max_replicas), token, is_local)
            url = f"http://{format_address(service_options.host, service_options.port)}"
            _print_address(service_options.name, url, token is not None, service_options.follow)
            _print_news(service_options.name, stop)
        finally:
            _call_on_cluster("shut_down_service", service_options.name, service_options.table_shards)


def wait_for_full_export(folder: str, interval_s: float = 1.0) -> None:
    """Wait until a folder of deltas contains a full export, and print why the command waits.

    Args:
        folder: Folder of deltas.
        interval_s: Interval at which the folder is read, in seconds.

    Raises:
        RunError: There is no full export after EXPORT_TIMEOUT_S, or the folder has other content or cannot be read.
        DataError: The path is not valid, or its store cannot be reached.
    """
    from raytrec.deltas.chain import find_stream, iterate_exports

    check_is_stream(folder)
    deadline, printed = monotonic() + EXPORT_TIMEOUT_S, ""
    while True:
        with convert_os_errors("cannot read the folder of deltas", where=folder):
            if next(iterate_exports(folder), None) is not None:
                return
            stream = find_stream(folder)
        state = f"run {stream.run} has not written a full export" if stream else "no run has written to the folder"
        if monotonic() > deadline:
            what = f"there is no full export after {EXPORT_TIMEOUT_S} s: {state}"
            do = "check that a run with this folder as export.deltas.to is training and saving checkpoints"
            raise RunError(what, where=folder, expected="a full export", do=do)
        if state != printed:
            printed = state
            print(f"waiting      up to {deadline - monotonic():.0f} s: {state} ({hide(folder)})", flush=True)
        sleep(interval_s)


def check_is_stream(folder: str) -> None:
    """Check that a path or URI is a folder of deltas, an empty folder, or does not exist yet.

    Raises:
        RunError: The path is a file or a folder with other content, or cannot be read.
        DataError: The path is not valid, or its store cannot be reached.
    """
    from raytrec.deltas.chain import find_stream, list_names
    from raytrec.deltas.format import STREAM_FILE

    expected, do = "a run's export.deltas.to folder", None
    with convert_os_errors("the folder of deltas cannot be read", where=folder):
        if query_file_info(folder).is_file:
            raise RunError("the path is a file, not a folder of deltas", where=folder, expected=expected)
        names = list_names(folder)
    # A run may be writing the first file, under a name that begins with STREAM_FILE.
    others = [name for name in names if not name.startswith((".", STREAM_FILE)) and name != "lost+found"]
    if not others or find_stream(folder):
        return
    what = "the folder contains other files, but no deltas"
    if MANIFEST_FILE in names:
        what, do = "the folder contains an export, not deltas", "omit --follow to serve the export"
    raise RunError(what, where=folder, expected=expected, do=do)


def wait_for_port(port: int, host: str = "127.0.0.1") -> None:
    """Check that a port of an address is free. Wait up to PORT_TIMEOUT_S if a service of this user may be ending on it.

    Raises:
        RunError: The port cannot be used, at once or after the wait.
    """
    deadline, waits = monotonic() + PORT_TIMEOUT_S, False
    while True:
        try:
            return check_ports({"--port": port}, host)
        except RunError:
            if monotonic() > deadline or port < 1024 or not _is_shared(port, host):
                raise
        if not waits:
            print(f"waiting      up to {PORT_TIMEOUT_S} s for a service on port {port} to end", flush=True)
        waits = True
        sleep(0.2)


def _is_shared(port: int, host: str) -> bool:
    """Return True if the port is free or held only by processes of this user that share it (SO_REUSEPORT)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe, suppress(OSError, OverflowError):
        for option in (socket.SO_REUSEPORT, socket.SO_REUSEADDR):
            probe.setsockopt(socket.SOL_SOCKET, option, 1)
        probe.bind((host, port))
        return True
    return False


def _parse_replicas(replicas: str) -> tuple[int, int]:
    """Return the minimum and maximum number of replicas in a text N or MIN:MAX; raise ConfigError if it is invalid."""
    parts = replicas.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        expected = "N or MIN:MAX, each at least 1, such as 1:4"
        raise ConfigError(f"invalid value '{replicas}'", where="--replicas", expected=expected)
    min_replicas, max_replicas = int(parts[0]), int(parts[-1])
    if min_replicas > max_replicas:
        raise ConfigError(f"MIN exceeds MAX in '{replicas}'", where="--replicas", expected="MIN ≤ MAX")
    return min_replicas, max_replicas


def _call_on_cluster(function: str, *arguments: Any) -> None:
    """Call a function of deployment.py in a Ray task, so that this process imports neither Ray Serve nor torch.

    Raises:
        RunError: Ray Serve is not installed on the cluster.
        Exception: Error of the function, or of Ray if the task fails.
    """
    import ray
    from ray.exceptions import RayTaskError

    try:
        ray.get(ray.remote(num_cpus=0, max_retries=0)(_call).remote(function, *arguments))
    except RayTaskError as error:
        raise error.cause from None


def _print_news(name: str, stop: Event) -> None:
    """Print the coordinator's messages about versions and deltas until `stop` is set."""
    import ray

    from raytrec.serving.coordinator import FOLLOW_INTERVAL_S, NAMESPACE, get_coordinator_name

    coordinator, printed = ray.get_actor(get_coordinator_name(name), NAMESPACE), ""
    while not stop.wait(FOLLOW_INTERVAL_S):
        with suppress(ray.exceptions.RayError):  # the coordinator is restarting
            if (news := ray.get(coordinator.news.remote(), timeout=FOLLOW_INTERVAL_S)) != printed:
                printed = news
                print(f"version      {news}", flush=True)


def _call(function: str, *arguments: Any) -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        what, expected = f"Ray Serve cannot be imported: {error}", "the extra raytrec[serve]"
        do = "run `pip install --no-deps -r requirements/serve.txt` on all nodes (docs/serving.md)"
        raise RunError(what, where="raytrec serve", expected=expected, do=do) from None
    from raytrec.serving import deployment

    getattr(deployment, function)(*arguments)


def _print_address(name: str, url: str, has_token: bool, follows: bool) -> None:
    bearer = ""
    if has_token:
        value = f"${TOKEN}" if os.environ.get(TOKEN) else f"$(cat {shlex.quote(str(token_file(name)))})"
        bearer = f' -H "Authorization: Bearer {value}"'
    print(f"service      {url} ({name})")
    print(f"example      curl{bearer} {url}/example")
    print(f"page         {url}/ (asks for the token)" if has_token else f"page         {url}/")
    if follows:
        print("version      follows the run; GET /ready returns the step and the seconds behind training", flush=True)
    else:
        print(f"promote      raytrec promote URI --service {url} --name {shlex.quote(name)}", flush=True)


def promote(uri: str | None, *, service: str, name: str | None, rollback: bool = False, **challenger: Any) -> str:
    """Promote another export on a service or make it the challenger, print the result, and return the current version.

    Args:
        uri: URI of the export; None with `rollback`.
        service: Address of the service, http://HOST:PORT.
        name: Name of the service, used to find its token file if RAYTREC_SERVE_TOKEN is not set; None: no
            file is read.
        rollback: True to remove the challenger or, if there is no challenger, to return to the previous version.
        **challenger: share, in (0, 1] or None, and shadow, True or False, as in the body of POST /promote. If either is
            set, the export becomes the challenger.

    Raises:
        ConfigError: Neither or both of `uri` and `rollback` are set, or `rollback` is combined with a challenger.
        RunError: `service` is not an address or not that of a service, the service does not respond, the token's file
            cannot be read, or the service rejects the promotion and keeps its version.
    """
    if (uri is None) != rollback or (rollback and any(challenger.values())):
        what = "promote requires either a URI or --rollback alone"
        raise ConfigError(what, where="raytrec promote", expected="URI [--share SHARE] [--shadow], or --rollback")
    parse_address(service)
    token = find_token(name)
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    body = json.dumps(({} if uri is None else {"uri": make_absolute(uri)}) | challenger).encode()
    request = urllib.request.Request(f"{service.rstrip('/')}/promote", body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PROMOTION_TIMEOUT_S) as answer:
            result = json.loads(answer.read())
            print(f"version      {result['version']}\nresult       {result['news']}")
            return result["version"]
    except urllib.error.HTTPError as error:
        what = f"the service rejected the promotion with status {error.code}"
        raise parse_error(error.read(), what, service, error.code) from None
    except (OSError, InvalidURL) as error:
        reason = getattr(error, "reason", error)
        do = "check the address, and that the service is running"
        raise RunError(f"the service does not respond: {reason}", where=service, do=do) from None
    except (HTTPException, KeyError, TypeError, ValueError) as error:
        what = f"the response is not that of a service: {type(error).__name__}: {error}"
        raise RunError(what, where=service, expected="the address of a raytrec service") from None


def parse_address(service: str) -> SplitResult:
    """Return the parts of a service's address.

    Raises:
        RunError: The text is not an http:// or https:// address with a host.
    """
    with suppress(ValueError):  # an invalid port or IPv6 address
        url = urlsplit(service)
        if url.scheme in ("http", "https") and url.hostname and url.port != 0:
            return url
    raise RunError(f"'{service}' is not the address of a service", expected="http://HOST[:PORT] or https://HOST[:PORT]")


def parse_error(body: bytes, what: str, service: str, status: int) -> RunError:
    """Return the error in the body of a response, or an error with the text `what` if the body contains none.

    If the HTTP status is 401, an error in the body gets the advice how to set the token. `service` is the address of
    the service, for an error with the text `what`.
    """
    try:
        parts: dict[str, Any] = json.loads(body)
        error = parts.pop("error")
        if status == 401:
            parts["do"] = f"set {TOKEN} to the token, or unset it and pass --name NAME for a service of this user"
        return RunError(error, **{key: parts.get(key) for key in ("where", "expected", "do")})
    except (ValueError, KeyError, TypeError, AttributeError):
        return RunError(what, where=service)
