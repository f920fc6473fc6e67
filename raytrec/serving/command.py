"""`raytrec serve` and `raytrec promote`."""

from __future__ import annotations

import json
import os
import secrets
import shlex
import signal
import urllib.error
import urllib.request
from pathlib import Path
from threading import Event
from typing import Any

from raytrec.cluster.head import check_ports
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.locks import create_file
from raytrec.common.storage import absolute, open_filesystem
from raytrec.scoring.manifest import read_manifest
from raytrec.serving.bodies import JSON

TOKEN = "RAYTREC_SERVE_TOKEN"
PROMOTION_S = 1800  # that a promotion may take, in which all replicas load tables


def serve(
    uri: str,
    *,
    name: str | None = None,
    address: str | None = None,
    replicas: str = "1",
    host: str = "127.0.0.1",
    port: int = 8000,
    no_token: bool = False,
    allow_code: bool = False,
    log_requests: str | None = None,
    log_sample: float = 0.01,
    promote_from: str | None = None,
) -> None:
    """Serves an export until SIGINT or SIGTERM.

    Args:
        uri: of the export; all nodes must reach it.
        name: of the service; default: the run's.
        address: of a Ray cluster; default: a new local one, which ends with the service.
        replicas: processes that answer: N, or MIN:MAX by load.
        host: that replicas listen on.
        no_token: answer without a token.
        allow_code: transforms of the export may name code.
        log_requests: folder of a sample of requests and their scores; all nodes must reach it.
        log_sample: the share of requests that is written.
        promote_from: Folder of the exports that `promote` may name; default: the one that contains `uri`.

    Raises:
        RunError: there is no export, Ray Serve is not installed, or the port is taken. ConfigError: replicas.
        DataError: the folder's address is none.
    """
    least, most = _numbers(replicas)
    uri, log_requests = absolute(uri), log_requests and absolute(log_requests)
    if log_requests:
        open_filesystem(log_requests)
    name = name or read_manifest(uri).source.run
    check_ports({"--port": port})
    token = None if no_token else _token(name)
    _require_serve()
    from raytrec.cluster.session import ray_session
    from raytrec.serving.deployment import Served, deploy, end, print_news

    served = Served(
        uri=uri,
        name=name,
        host=host,
        port=port,
        allow_code=allow_code,
        log_requests=log_requests,
        log_sample=log_sample,
        promote_from=promote_from and absolute(promote_from),
    )
    with ray_session(address, 1 + most):
        stop = Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        try:
            deploy(served, (least, most), token)
            _say(name, f"http://{host}:{port}", token is not None)
            print_news(name, stop)
        finally:
            end(name)


def _numbers(replicas: str) -> tuple[int, int]:
    parts = replicas.split(":")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ConfigError(
            f"--replicas is '{replicas}'", where="--replicas", expected="N or MIN:MAX, such as 2 or 1:4"
        )
    least, most = int(parts[0]), int(parts[-1])
    if least > most:
        raise ConfigError(f"--replicas is '{replicas}'", where="--replicas", expected="MIN at most MAX")
    return least, most


def _require_serve() -> None:
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise RunError(
            f"Ray Serve cannot be imported: {error}",
            where="raytrec serve",
            expected="raytrec[serve]",
            do="pip install --no-deps -r requirements/serve.txt (docs/serving.md)",
        ) from None


def token_file(name: str) -> Path:
    """Where this user's token of a service is."""
    home = os.environ.get("XDG_CONFIG_HOME")
    return (Path(home) if home else Path.home() / ".config") / "raytrec" / f"serve-{name}.token"


def _token(name: str) -> str:
    """RAYTREC_SERVE_TOKEN, else that of the service's file, which is made where there is none."""
    if given := os.environ.get(TOKEN):
        return given
    file = token_file(name)
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        create_file(file, secrets.token_urlsafe(32) + "\n")
    return file.read_text().strip()


def _say(name: str, url: str, has_token: bool) -> None:
    bearer = ""
    if has_token:
        value = f"${TOKEN}" if os.environ.get(TOKEN) else f"$(cat {shlex.quote(str(token_file(name)))})"
        bearer = f' -H "Authorization: Bearer {value}"'
    print(f"service      {url} ({name})")
    print(f"example      curl{bearer} {url}/openapi.json")
    print(f"page         {url}/ (asks for the token)" if has_token else f"page         {url}/")
    print(f"another      raytrec promote URI --service {url} --name {name}", flush=True)


def promote(uri: str | None, *, service: str, name: str | None, rollback: bool = False) -> str:
    """Has a service answer with another export; the version.

    Args:
        uri: of the export. service: its address.
        name: of the service, by whose file its token is found; default: RAYTREC_SERVE_TOKEN.
        rollback: to the version before instead.

    Raises:
        ConfigError: neither, or both. RunError: the service refuses it, and answers as before.
    """
    if (uri is None) != rollback:
        raise ConfigError(
            "promote takes a URI, or --rollback", where="raytrec promote", expected="one of the two"
        )
    token = os.environ.get(TOKEN) or (name and token_file(name).exists() and _token(name)) or ""
    headers = {"Content-Type": JSON} | ({"Authorization": f"Bearer {token}"} if token else {})
    body = json.dumps({} if uri is None else {"uri": absolute(uri)}).encode()
    request = urllib.request.Request(f"{service.rstrip('/')}/promote", body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PROMOTION_S) as answer:
            return json.loads(answer.read())["version"]
    except urllib.error.HTTPError as error:
        raise _refused(error.read(), service) from None
    except (OSError, ValueError, KeyError) as error:
        raise RunError(f"the service does not answer: {error}", where=service) from None


def _refused(body: bytes, service: str) -> RunError:
    try:
        parts: dict[str, Any] = json.loads(body)
        what = parts.pop("error")
        return RunError(what, **{key: parts.get(key) for key in ("where", "expected", "do")})
    except (ValueError, KeyError, TypeError, AttributeError):
        return RunError("the service refuses it", where=service)
