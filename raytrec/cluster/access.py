"""Ray's token, and checks that a cluster responds and accepts the token.

By default, a token is required. raytrec stores the token in the file in which Ray looks for it, readable by its
owner alone. Without a token, any client that reaches a cluster's ports can run code there (docs/security.md). With
RAY_AUTH_MODE=token, Ray 2.60 looks for a token in RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, and
~/.ray/auth_token. Ray reads RAY_AUTH_MODE at import, so this module does not import Ray. The checks report
in seconds the problems that Ray itself reports after minutes.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from raytrec.common.errors import RunError
from raytrec.common.formatting import format_address
from raytrec.common.processes import create_file
from raytrec.compat.ray_core import (
    CLIENT_PROBE_METHOD,
    GCS_PROBE_METHOD,
    JOB_CONFIG_VARIABLE,
    get_token_metadata,
    parse_version_mismatch,
    resolve_bootstrap_address,
)
from raytrec.compat.ray_start import read_token_again
from raytrec.compat.versions import SUPPORTED_VERSIONS

(RAY,) = SUPPORTED_VERSIONS["ray"]  # raytrec uses private parts of Ray that were checked for this version only
ANSWER_TIMEOUT_S = 30.0  # a busy machine may respond late; machines that do not listen are detected earlier
SCHEME = "ray://"
STARTUP_TIMEOUT_S = 5.0  # time for a cluster that is starting to listen at its address
AUTH_MODE_VARIABLE, TOKEN, TOKEN_PATH_VARIABLE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
UNWRITABLE_HOME = "/dev/null"  # a home folder in which files cannot be created


def use_token(*, create: bool = False, is_local_only: bool = False) -> None:
    """Make this process and its child processes require and send Ray's token. Call this function before using Ray.

    The function sets environment variables, and removes other users' access to a token file of this user. If
    RAY_AUTH_MODE is set to a mode other than token, no token is used. In the driver of a job, this also holds if
    RAY_AUTH_MODE is not set, because Ray passes on the mode of the cluster.

    Args:
        create: True to create a token for a new cluster if there is none.
        is_local_only: True if only this process and its children use the new cluster. If the file cannot be written
            or read, a new token is then kept in their environment. Ignored unless `create` is True.

    Raises:
        RunError: The token is missing and must not be created, or its file cannot be created or read.
    """
    if os.path.expanduser("~") == "~":  # user without passwd entry; importing Ray Train requires a home
        os.environ["HOME"] = UNWRITABLE_HOME
    default_mode = "disabled" if JOB_CONFIG_VARIABLE in os.environ else "token"
    if os.environ.get(AUTH_MODE_VARIABLE, default_mode).lower() != "token":
        return
    if not os.environ.get(TOKEN):
        _require_token_file(create, is_local_only)
    os.environ[AUTH_MODE_VARIABLE] = "token"
    if "ray" in sys.modules:  # Ray has already read its settings
        read_token_again()


def token_file() -> Path:
    """Return the path of the file in which Ray looks for the token."""
    # Without a home (e.g. a container user without passwd entry), `~` is not expanded and no file exists.
    return Path(os.path.expanduser(os.environ.get(TOKEN_PATH_VARIABLE) or "~/.ray/auth_token"))


def describe_token_source() -> str:
    """Return a noun phrase that names the place in which Ray looks for the token; the token may be missing there."""
    if os.environ.get(TOKEN):
        return f"the environment variable {TOKEN}"
    return f"{token_file()} (or in the file that {TOKEN_PATH_VARIABLE} names)"


def load_or_create_token(file: Path) -> str:
    """Return the token in a file, without surrounding whitespace; "" if the file is empty.

    If the file is missing, create its folder, and the file with a new token, readable by its owner alone.

    Raises:
        OSError: The file or its folder cannot be created, or the file cannot be read.
    """
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        create_file(file, secrets.token_hex(32))
    return file.read_text(encoding="utf-8", errors="replace").strip()


def _require_token_file(create: bool, local_only: bool) -> None:
    file = token_file().absolute()
    if os.environ.get(TOKEN_PATH_VARIABLE):  # Ray's processes have other working directories, and do not expand `~`
        os.environ[TOKEN_PATH_VARIABLE] = str(file)
    try:
        if create:
            load_or_create_token(file)
        is_readable = file.is_file() and os.access(file, os.R_OK)
    except OSError as error:
        if create and local_only:
            os.environ[TOKEN] = secrets.token_hex(32)
            return
        raise RunError(
            f"cannot {'create or ' * create}read the token of the Ray cluster: {error.strerror}",
            where=str(file),
            expected=f"a file that this user can {'create or ' * create}read, or a token in the environment",
            do=f"set {TOKEN_PATH_VARIABLE}=FILE to such a file, or set {TOKEN} to the token",
        ) from None
    if not is_readable:
        raise RunError(
            f"the token of the Ray cluster {'cannot be read' if file.is_file() else 'is missing'}",
            where=f"{file}; {TOKEN} is not set",
            expected="the token of the cluster, which its owner can provide",
            do=f"store the token in {file} (chmod 600), or set {TOKEN_PATH_VARIABLE}=FILE; "
            f"if the cluster requires no token, set {AUTH_MODE_VARIABLE}=disabled",
        )
    if file.stat().st_uid == os.getuid() and file.stat().st_mode & 0o077:
        with suppress(OSError):  # read-only file system
            file.chmod(0o600)  # `ray get-auth-token --generate` makes it readable for all users


def check_cluster(address: str, address_source: str) -> None:
    """Check that a cluster listens at its address and accepts this process's token, before Ray connects.

    A malformed address passes, as does 'auto' if Ray finds no cluster; Ray reports these errors when it connects.

    Args:
        address: HOST:PORT of the head, ray://HOST:PORT of its Ray client server, or 'auto'.
        address_source: Source of the address for errors: KEY=ADDRESS, such as scaling.address=auto, or the address.

    Raises:
        RunError: No process listens at the address; or, without TLS (RAY_USE_TLS), no Ray cluster responds there, or
            the cluster refuses the token, requires a token that this process lacks, or (except with ray://) was
            started without a token that this process has.
    """
    _check_listening(address, address_source)
    _check_token(address, address_source)


def _check_listening(address: str, source: str) -> None:
    places = _list_addresses(address)  # if empty, Ray reports the error in the address
    deadline, why = monotonic() + STARTUP_TIMEOUT_S, ""
    while places and not (why and monotonic() > deadline):
        for host, port in places:
            try:
                return socket.create_connection((host, port), STARTUP_TIMEOUT_S).close()
            except OSError as error:
                why = error.strerror or str(error)
        sleep(0.3)
    if not places:
        return None
    tried = [format_address(host, port) for host, port in places]
    raise RunError(
        f"cannot connect to a Ray cluster at {' or '.join(tried)}: {why}",
        where=source,
        expected="the address of a running cluster that this machine can reach",
        do=get_start_hint(source),
    )


def get_start_hint(source: str) -> str:
    """Return the advice, an imperative, for an address without a cluster.

    Args:
        source: Source of the address, as in `check_cluster`. If it names no key, the advice is for Ray client.
    """
    option, equals, _ = source.partition("=")
    if equals:
        other = f"unset RAY_ADDRESS{' and omit the address' * (option != 'RAY_ADDRESS')} to use this machine alone"
    else:
        other = "forward the port of a running cluster"
    return f"start the cluster (on this machine: `raytrec head`), or {other}"


def _check_token(address: str, source: str) -> None:
    import grpc

    encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    if encrypted or (target := _find_address(address)) is None:
        return
    method = CLIENT_PROBE_METHOD if address.startswith(SCHEME) else GCS_PROBE_METHOD
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        code = _call_cluster(channel, method, get_token_metadata())
        if code is grpc.StatusCode.UNAUTHENTICATED:
            no_token = "" if get_token_metadata() else ", and do not set RAY_AUTH_MODE to disabled"
            raise RunError(
                "the cluster requires a token" if no_token else "the cluster refuses the token",
                where=source,
                expected="the token with which the cluster was started",
                do=f"store this token in {describe_token_source()}{no_token}",
            )
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
            raise RunError(
                f"no Ray cluster responds at {target}",
                where=source,
                expected="a Ray cluster at this address (default port: 6379; with ray://: 10001)",
                do="correct the address or retry; for a cluster with TLS, set RAY_USE_TLS=1 and Ray's certificates",
            )
        # A cluster calls a driver back, and the driver would refuse calls without its token. Ray clients are
        # not called back.
        if method == GCS_PROBE_METHOD and get_token_metadata() and _call_cluster(channel, method, ()) is None:
            raise RunError(
                "the cluster was started without a token, so it cannot call this process, which requires one",
                where=source,
                expected=f"a cluster that was started with the token in {describe_token_source()}",
                do="start the cluster with the token, as `raytrec head` does, or set RAY_AUTH_MODE to "
                "disabled if the network of the cluster is private",
            )


def _call_cluster(channel: Any, method: str, token: tuple[tuple[str, str], ...]) -> Any:
    """Call a gRPC method with a token. Return None on success, else the status code."""
    import grpc

    try:
        channel.unary_unary(method)(b"", timeout=ANSWER_TIMEOUT_S, metadata=token)
    except grpc.RpcError as error:
        return error.code()
    return None


def _list_addresses(address: str) -> list[tuple[str, int]]:
    """Return the (host, port) of the address and of Ray's replacement for it; invalid and missing ones are omitted."""
    addresses = []
    for target in (address.removeprefix(SCHEME), _find_address(address)):
        host, _, port = (target or "").partition("/")[0].rpartition(":")
        if host and port.isdigit() and int(port) < 2**16 and (host.strip("[]"), int(port)) not in addresses:
            addresses.append((host.strip("[]"), int(port)))
    return addresses


def _find_address(address: str) -> str | None:
    """Return HOST:PORT for an address such as auto, or None if it is invalid or Ray finds no cluster."""
    if address.startswith(SCHEME):
        return address.removeprefix(SCHEME)
    try:
        return resolve_bootstrap_address(address)
    except (ConnectionError, ValueError):
        return None


def check_version_mismatch(reported: str, *, where: str, expected: str, do: str) -> None:
    """Check that an error of Ray does not report a cluster with another version of Ray or Python.

    Args:
        reported: Text of the error.
        where: Address of the cluster or its source, for the error.
        expected: Field `expected` of the error if the Python versions differ.
        do: Field `do` of the error if the Python versions differ.

    Raises:
        RunError: The error reports that the versions differ.
    """
    if versions := parse_version_mismatch(reported):
        check_cluster_version(versions[0], where=where)
        own_python = ".".join(map(str, sys.version_info[:3]))
        what = f"the cluster runs Python {versions[1]}, but this process runs Python {own_python}"
        raise RunError(what, where=where, expected=expected, do=do)


def check_cluster_version(cluster: str, *, where: str) -> None:
    """Check that a cluster runs the supported version of Ray.

    Args:
        cluster: Ray version of the cluster.
        where: Address of the cluster or its source, for the error.

    Raises:
        RunError: The versions differ.
    """
    if cluster != RAY:
        raise RunError(
            f"the cluster runs Ray {cluster}, but this raytrec requires Ray {RAY}",
            where=where,
            expected=f"Ray {RAY} on every node",
            do="install requirements/cuda.txt (or cpu.txt) of this raytrec on the cluster, or use the "
            "raytrec that the cluster was set up with",
        )
