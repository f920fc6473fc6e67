"""Says that a cluster refuses our token; Ray itself waits for minutes and then speaks of a timeout."""

from __future__ import annotations

import os

from raytrec.errors import RunError
from raytrec.remote.token import token_file

ANSWER_S = 10.0
# Calls that exist on the two kinds of servers and change nothing; what matters is whether they are refused.
OF_GCS, OF_CLIENT_SERVER = "/ray.rpc.NodeInfoGcsService/CheckAlive", "/ray.rpc.RayletDriver/ClusterInfo"
SCHEME = "ray://"


def check_token(address: str) -> None:
    """Asks a cluster whether it takes our token, before Ray connects to it.

    Args:
        address: HOST:PORT of its head, ray://HOST:PORT of its Ray client server, or 'auto'.

    Raises:
        RunError: it does not. One that does not answer, or is not there, raises nothing: Ray says so.
    """
    import grpc

    target = _target(address)
    if target is None:
        return
    method = OF_CLIENT_SERVER if address.startswith(SCHEME) else OF_GCS
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=ANSWER_S, metadata=_token())
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                raise _refused(address) from None


def _target(address: str) -> str | None:
    """HOST:PORT; None where Ray knows of no cluster, or what is said to it is encrypted."""
    from ray._private.services import canonicalize_bootstrap_address

    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return None
    if address.startswith(SCHEME):
        return address.removeprefix(SCHEME)
    try:
        return canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError):
        return None


def _token() -> tuple[tuple[str, str], ...]:
    """What Ray sends with each call; nothing where it asks for no token."""
    from ray._private.authentication import grpc_authentication_client_interceptor as interceptor

    return interceptor._get_authentication_metadata_tuple()


def _refused(address: str) -> RunError:
    return RunError(
        "the cluster refuses the token" if _token() else "the cluster asks for a token",
        where=f"scaling.address={address}",
        expected="the token with which the cluster was started",
        do=f"bring it into {token_file()} (chmod 600), or set RAY_AUTH_TOKEN_PATH=FILE"
        + ("" if _token() else "; and do not set RAY_AUTH_MODE=disabled"),
    )
