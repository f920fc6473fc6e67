"""Configurations from elsewhere are data, never code.

A configuration can name code that its run imports (`module:name`), and a cluster with whose processes it
exchanges pickles. Both are honoured in a configuration that you wrote. In one from a URI, a run folder or a
checkpoint, which may be somebody else's, they are refused without --allow-code.

Your own run folders carry a mark: a MAC of their config.yaml under a key in your home that only you can read.
It travels with the folder, and is void when somebody changes the configuration.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raytrec.common.errors import ConfigError
from raytrec.common.reading import read_bytes, read_text

MARK = "config.yaml.mark"
OF_RUNS = ("driver.json", "events.jsonl", "plan.json", "checkpoints", MARK)  # what is beside a run's config
MLFLOW_SECRETS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_AUTH")


def code_in(values: dict[str, Any]) -> dict[str, str]:
    """What of a configuration's plain values is code, or leads to it: key → value; not checked yet."""
    found = {}
    model, data, scaling = (_mapping(values.get(section)) for section in ("model", "data", "scaling"))
    if ":" in str(model.get("name", "")):
        found["model.name"] = str(model["name"])
    transforms = data.get("transforms")
    for number, transform in enumerate(transforms if isinstance(transforms, list) else []):
        do = str(_mapping(transform).get("do", ""))
        if ":" in do:
            found[f"data.transforms[{number}].do"] = do
    for place, name in _of_tasks(values.get("tasks")):
        if ":" in name:
            found[place] = name
    for check in _mapping(_mapping(values.get("checks")).get("custom")):
        found[f"checks.custom.{check}"] = str(check)
    address = scaling.get("address")
    if address not in (None, "auto", "local") and not _is_here(str(address)):
        found["scaling.address"] = str(address)
    store = str(_mapping(values.get("tracking")).get("uri") or "")
    if _would_be_told_a_secret(store):
        found["tracking.uri"] = store
    return found


def own_code(values: dict[str, Any]) -> list[str]:
    """The user's code that a configuration names, as module:name."""
    servers = ("scaling.address", "tracking.uri")
    return list(dict.fromkeys(name for key, name in code_in(values).items() if key not in servers))


def refuse_code(before: dict[str, str], values: dict[str, Any], where: str) -> None:
    """Refuses what a configuration from elsewhere names; what overrides put in its place is the user's.

    Args:
        before: code_in the values as they came.
        values: with overrides.

    Raises:
        ConfigError: lists all of it.
    """
    now = code_in(values)
    named = [f"{key}: {value}" for key, value in before.items() if now.get(key) == value]
    if named:
        servers = " or servers to trust" if {"scaling.address", "tracking.uri"} & before.keys() else ""
        raise ConfigError(
            f"a configuration from elsewhere names code to run{servers}: {'; '.join(named)}",
            where=where,
            expected="data alone: no module:name, no cluster, no MLflow server while one's password is set",
            do="if you trust its source, say --allow-code, or make a copy of your own; else set these keys "
            "to something of your own",
        )


def mark(folder: Path) -> None:
    """Marks a run folder, whose config.yaml this user has just written or approved, as this user's.

    Where no key can be kept (a home that cannot be written to) or the folder is full, there is no mark.
    """
    with suppress(OSError, RuntimeError):
        (folder / MARK).write_text(_mac(folder, _key(create=True)))


def is_ours(folder: Path) -> bool:
    """Whether this user wrote a run folder's config.yaml, as it is now, with this home."""
    try:
        found = read_text(folder / MARK)
        return hmac.compare_digest(found.encode(), _mac(folder, _key(create=False)).encode())
    except (OSError, RuntimeError):  # no mark, no key, or no home
        return False


def strange_run(config: str) -> str | None:
    """Where a configuration comes from, if it is that of a run that is not this user's; else None."""
    path = Path(config)
    if path.name != "config.yaml" or not any((path.parent / name).exists() for name in OF_RUNS):
        return None
    return None if is_ours(path.parent) else not_ours(path.parent)


def not_ours(folder: Path) -> str:
    """The place of a configuration in a run folder that is not this user's, for errors."""
    return f"{folder / 'config.yaml'}, which you have not written with this home, or which was changed since"


def _mac(folder: Path, key: bytes) -> str:
    text = read_bytes(folder / "config.yaml")
    return hmac.new(key, b"raytrec run\0" + text, hashlib.sha256).hexdigest()


def _key(*, create: bool) -> bytes:
    """The key of this user's marks.

    Raises:
        OSError, RuntimeError: there is none; or others could have read or written it.
    """
    home = os.environ.get("XDG_CONFIG_HOME")
    file = (Path(home) if home else Path.home() / ".config") / "raytrec" / "key"
    if create and not file.exists():
        _make_key(file)
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as opened:
        found = os.fstat(opened.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise PermissionError(f"{file} is not for this user alone")
        key = opened.read(64)
    if len(key) != 64:
        raise OSError(f"{file} is damaged")
    return key


def _make_key(file: Path) -> None:
    """Appears whole, for this user alone, and never in place of one that another process has just made."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f"key.{secrets.token_hex(8)}")
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_hex(32))
    try:
        os.link(partial, file)
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _would_be_told_a_secret(store: str) -> bool:
    """Whether an MLflow server elsewhere would be sent the password or token that is meant for another."""
    if not store.startswith(("http://", "https://")) or _is_here(store):
        return False
    mine = os.environ.get("MLFLOW_TRACKING_URI", "")
    with suppress(ValueError):
        if mine and urlsplit(mine).netloc.rpartition("@")[2] == urlsplit(store).netloc.rpartition("@")[2]:
            return False
    file = os.path.expanduser("~/.mlflow/credentials")
    return any(os.environ.get(name) for name in MLFLOW_SECRETS) or os.path.exists(file)


def _is_here(address: str) -> bool:
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, or no address at all
        return False


def _of_tasks(tasks: Any) -> Iterator[tuple[str, str]]:
    """(key, value) of each loss and metric."""
    for number, task in enumerate(tasks if isinstance(tasks, list) else []):
        task = _mapping(task)
        yield f"tasks[{number}].loss", str(task.get("loss", ""))
        metrics = task.get("metrics")
        for place, metric in enumerate(metrics if isinstance(metrics, list) else []):
            yield f"tasks[{number}].metrics[{place}]", str(metric)


def _mapping(value: Any) -> dict:
    return value if isinstance(value, dict) else {}
