"""Whether a cluster answers, takes our token and runs our Ray; Ray itself would take minutes to fail."""

from __future__ import annotations

import os
import socket
from time import monotonic, sleep
from typing import Any

from raytrec.cluster.token import token_file, token_source
from raytrec.common.errors import RunError
from raytrec.compat.ray_core import CLIENT_CALL, GCS_CALL, bootstrap_address, token_metadata
from raytrec.compat.versions import OTHERS

(RAY,) = OTHERS["ray"]  # raytrec touches private parts of Ray, each place read for this version
ANSWER_S = 30.0  # on a busy machine; one that is not there is found by check_answers
SCHEME = "ray://"
COMES_UP_S = 5.0  # a cluster that is being started may take so long to listen
START_ONE = "start one with `raytrec head`, or give no address: a run then starts its own Ray"


def check_answers(address: str, given: str | None = None) -> None:
    """Looks whether something listens at a cluster's address, before Ray connects to it.

    Args:
        address: as of check_token.
        given: where it comes from; default: scaling.address.

    Raises:
        RunError: nothing does.
    """
    places = _places(address)  # none: Ray reports what is wrong with the address
    deadline, why = monotonic() + COMES_UP_S, ""
    while places and not (why and monotonic() > deadline):
        for host, port in places:
            try:
                return socket.create_connection((host, port), COMES_UP_S).close()
            except OSError as error:
                why = error.strerror or str(error)
        sleep(0.3)
    if not places:
        return None
    raise RunError(
        f"no Ray cluster answers at {address.removeprefix(SCHEME)}: {why}",
        where=given or f"scaling.address={address}",
        expected="the address of a cluster that runs, which this machine can reach",
        do=START_ONE + (", if you unset RAY_ADDRESS" if (given or "").startswith("RAY_ADDRESS") else ""),
    )


def check_token(address: str, given: str | None = None) -> None:
    """Asks a cluster whether it takes our token, before Ray connects to it.

    Args:
        address: HOST:PORT of its head, ray://HOST:PORT of its Ray client server, or 'auto'.
        given: where it comes from; default: scaling.address.

    Raises:
        RunError: it does not, or asks for none while we do, or what listens there is no Ray cluster.
    """
    import grpc

    target = _target(address)
    if target is None:
        return
    method = CLIENT_CALL if address.startswith(SCHEME) else GCS_CALL
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        code = _ask(channel, method, _token())
        if code is grpc.StatusCode.UNAUTHENTICATED:
            raise _refused(given or f"scaling.address={address}")
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise RunError(
                f"what listens at {target} does not answer as a Ray cluster does",
                where=given or f"scaling.address={address}",
                expected="HOST:PORT of a cluster's head (by default 6379), or ray://HOST:PORT",
            )
        # A driver is called back, and would refuse calls without its token; a Ray client is not.
        if method == GCS_CALL and _token() and _ask(channel, method, ()) is None:
            raise RunError(
                "the cluster was started without a token, so it could not call this process, which has one",
                where=given or f"scaling.address={address}",
                expected=f"a cluster that was started with {token_source()}",
                do="start the cluster with the token, as `raytrec head` does, or set RAY_AUTH_MODE to "
                "disabled where strangers cannot reach its network",
            )


def _ask(channel: Any, method: str, token: tuple[tuple[str, str], ...]) -> Any:
    """The status with which a call fails; None where it does not."""
    import grpc

    try:
        channel.unary_unary(method)(b"", timeout=ANSWER_S, metadata=token)
    except grpc.RpcError as error:
        return error.code()
    return None


def _target(address: str) -> str | None:
    """HOST:PORT; None where Ray knows of no cluster, or its traffic is encrypted."""
    encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    return None if encrypted else _place(address)


def _places(address: str) -> list[tuple[str, int]]:
    """Where a cluster may listen: Ray turns 127.0.0.1 into the machine's own address."""
    found = []
    for target in (address.removeprefix(SCHEME), _place(address)):
        host, _, port = (target or "").partition("/")[0].rpartition(":")
        if host and port.isdigit() and int(port) < 2**16 and (host.strip("[]"), int(port)) not in found:
            found.append((host.strip("[]"), int(port)))
    return found


def _place(address: str) -> str | None:
    """HOST:PORT; None where Ray knows of no cluster."""
    if address.startswith(SCHEME):
        return address.removeprefix(SCHEME)
    try:
        return bootstrap_address(address)
    except (ConnectionError, ValueError):
        return None


def _token() -> tuple[tuple[str, str], ...]:
    """What Ray sends with each call; nothing where it asks for no token."""
    return token_metadata()


def _refused(given: str) -> RunError:
    return RunError(
        "the cluster refuses the token" if _token() else "the cluster asks for a token",
        where=given,
        expected="the token with which the cluster was started",
        do=f"bring it into {token_file()} (chmod 600), or name its file in RAY_AUTH_TOKEN_PATH"
        + ("" if _token() else "; and do not set RAY_AUTH_MODE to disabled"),
    )


def check_ray(cluster: str, *, where: str) -> None:
    """Compares the version of a cluster's Ray with ours.

    Args:
        cluster: its version.
        where: its address, for the error.

    Raises:
        RunError: it is another one.
    """
    if cluster != RAY:
        raise RunError(
            f"the cluster runs Ray {cluster}, and this raytrec is made for Ray {RAY}",
            where=where,
            expected=f"Ray {RAY} on every node",
            do="install requirements/cuda.txt (or cpu.txt) of this raytrec on the cluster, or use the "
            "raytrec that the cluster was set up with",
        )


def check_ray_here() -> None:
    """Compares the version of Ray that is installed here.

    Raises:
        RunError: it is another one.
    """
    import ray

    if ray.__version__ != RAY:
        raise RunError(
            f"Ray {ray.__version__} is installed here, and this raytrec is made for Ray {RAY}",
            where=str(ray.__file__),
            expected=f"Ray {RAY}, here and on the cluster",
            do="pip install --no-deps -r requirements/notebook.txt",
        )
