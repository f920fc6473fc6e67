"""Ray's token: asked for by default, found where Ray looks for it, and readable by its owner alone.

Without it, any client that reaches a cluster's ports runs code there (docs/security.md). Ray 2.60 looks for a
token in RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH, and ~/.ray/auth_token, where RAY_AUTH_MODE=token.
No Ray is imported here, because Ray reads that variable when it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

from raytrec.common.errors import RunError
from raytrec.compat.ray_core import JOB_CONFIG, read_token_again

MODE, TOKEN, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
NO_HOME = "/dev/null"  # where files cannot be made


def use_token(*, create: bool = False, own: bool = False) -> None:
    """Makes this process, and those it starts, ask for and send Ray's token; to be called before Ray is used.

    RAY_AUTH_MODE, where it is set, is the user's choice; a job's driver has that of its cluster.

    Args:
        create: makes a token where there is none, for a new cluster.
        own: the new cluster is for this process and those it starts alone: where its token cannot be kept in
            a file, because the home cannot be written to or read, it is kept in their environment.

    Raises:
        RunError: there is no token, and none is to be made, or it cannot be kept.
    """
    if os.path.expanduser("~") == "~":  # a user in no list; Ray Train cannot even be imported without a home
        os.environ["HOME"] = NO_HOME
    if MODE not in os.environ and JOB_CONFIG in os.environ:
        return
    if os.environ.get(MODE, "token").lower() != "token":
        return
    if not os.environ.get(TOKEN):
        _find_file(create, own)
    os.environ[MODE] = "token"
    if "ray" in sys.modules:  # which has read its settings
        read_token_again()


def token_file() -> Path:
    """The file in which Ray looks for the token."""
    named = os.environ.get(PATH)
    # Without a home (a container's user who is in no list), `~` stays as it is, and there is no such file.
    return Path(os.path.expanduser(named or "~/.ray/auth_token"))


def token_source() -> str:
    """Where the token that is used comes from, for people."""
    return (
        f"the environment variable {TOKEN}"
        if os.environ.get(TOKEN)
        else f"{token_file()}, or set {PATH}=FILE"
    )


def _make(file: Path) -> None:
    """Makes a token, unless there is one that can be read.

    Raises:
        OSError: it can be neither made nor read.
    """
    if not file.is_absolute():
        raise FileNotFoundError(errno.ENOENT, "there is no home folder")
    if file.exists():
        file.open("rb").close()
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    # Not write_text and chmod: between the two, others could read it.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_hex(32))


def _find_file(create: bool, own: bool) -> None:
    file = token_file()
    try:
        if create:
            _make(file)
        there = file.is_file() and os.access(file, os.R_OK)
    except OSError as error:
        if create and own:
            os.environ[TOKEN] = secrets.token_hex(32)
            return
        raise RunError(
            f"the token for the Ray cluster cannot be {'kept' if create else 'read'}: {error.strerror}",
            where=str(file),
            expected="a file that this user can write and read, or a token in the environment",
            do=f"set {PATH}=FILE to a place that can be written to, or {TOKEN}",
        ) from None
    if not there:
        raise RunError(
            "there is no token for the Ray cluster",
            where=f"{TOKEN} is not set, and there is no file {file}",
            expected="the token of the cluster, which its owner has",
            do=f"put it into {file} (chmod 600), or set {PATH}=FILE; for a cluster of your own that "
            f"asks for none set {MODE}=disabled",
        )
    if file.stat().st_uid == os.getuid() and file.stat().st_mode & 0o077:
        with suppress(OSError):  # a file system that cannot be written to
            file.chmod(0o600)  # `ray get-auth-token --generate` writes it readable by all
