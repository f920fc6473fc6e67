"""Detect code and servers in configurations that other users may have written.

A configuration can name code that its run imports (`module:name`) and servers that receive the user's credentials. It
can also name a cluster with which the run exchanges pickles and Ray's token. All of these are accepted in a
configuration that the user wrote. Configurations from a URI, a checkpoint, or the folder of a run or search may be
another user's. Code and servers in these configurations are refused without --allow-code.

Configurations in the user's own run and search folders carry a mark: a MAC of the file. Its key is in the
home folder, where only this user can read it. The mark moves with the folder, and becomes invalid if another
user changes the file.
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
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from raytrec.common.errors import ConfigError
from raytrec.common.formatting import as_dict, as_list
from raytrec.common.processes import create_file
from raytrec.common.reading import parse_yaml, read_bytes, read_text
from raytrec.common.redaction import hide_all
from raytrec.common.storage import chooses_server
from raytrec.compat.ray_core import is_head

if TYPE_CHECKING:
    from psutil import Process

CONFIG, MARK = "config.yaml", ".mark"
# Files that raytrec writes next to the configurations of a run and of a search.
RUN_FILES = ("driver.json", "events.jsonl", "plan.json", "checkpoints", CONFIG + MARK)
SEARCH = "search.json"
SEARCH_FILES = (SEARCH, "trials.json", "outcome.json")
SEARCH_CONFIG_FILES = ("best.yaml", "space.yaml")
MLFLOW_SECRETS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_AUTH")
# Sections that are not searched for URIs: their values are checked separately, or are links or code.
SECTIONS_WITHOUT_PLACES = ("tracking", "scaling", "tasks")


def find_foreign_code(values: dict[str, Any]) -> dict[str, str]:
    """Return a mapping from key (such as tasks[0].loss) to the code, server or cluster that a configuration names.

    Omitted are the user's own clusters on this machine, the addresses auto and local, and MLflow servers that would not
    receive another server's password or token. The values need not be validated.
    """
    places = {section: each for section, each in values.items() if section not in SECTIONS_WITHOUT_PLACES}
    foreign_code = _find_modules(values) | dict(_iterate_places(places))
    address = as_dict(values.get("scaling")).get("address")
    if address not in (None, "auto", "local") and not _is_own_head(str(address)):
        foreign_code["scaling.address"] = str(address)
    store = _to_text(as_dict(values.get("tracking")).get("uri"))
    if _receives_secret(store):
        foreign_code["tracking.uri"] = store
    return foreign_code


def list_user_code(values: dict[str, Any]) -> list[str]:
    """Return the user-defined code that a configuration names, each once, as module:name."""
    return list(dict.fromkeys(_find_modules(values).values()))


def refuse_code(original_code: dict[str, str], values: dict[str, Any], where: str) -> None:
    """Raise an error if an untrusted configuration names code or servers that overrides have not replaced.

    Args:
        original_code: Result of `find_foreign_code` for the values before overrides.
        values: Values with overrides applied.
        where: Origin of the configuration, for errors.

    Raises:
        ConfigError: The configuration names code or servers; the message lists all of them.
    """
    now = find_foreign_code(values) if original_code else {}
    named = [f"{key}: {value}" for key, value in original_code.items() if now.get(key) == value]
    if named:
        raise ConfigError(
            f"an untrusted file names code to run or servers to contact: {'; '.join(named)}",
            where=where,
            expected="a file without code (module:name), and without clusters and servers that may be another user's",
            do="if you trust it, add --allow-code (allow_code=True) where available, or use your own copy of the "
            "file; else override these keys",
        )


def mark_as_own(file: Path) -> None:
    """Mark a settings file, which this user has just written or approved, as this user's own.

    The mark is written to a second file next to the settings file. If there is no key yet, the function creates the
    key. The file is not marked if the key or the mark cannot be stored, e.g. in a read-only home or on a full disk.
    """
    with suppress(OSError, RuntimeError):
        file.with_name(file.name + MARK).write_text(_compute_mac(file, _read_key(create=True)), encoding="ascii")


def is_own_file(file: Path) -> bool:
    """Return True if the current content of a settings file is marked with this user's key."""
    try:
        stored_mac = read_text(file.with_name(file.name + MARK))
        return hmac.compare_digest(stored_mac.encode(), _compute_mac(file, _read_key(create=False)).encode())
    except (OSError, RuntimeError):  # no mark, no key, or no home
        return False


def find_origin(place: str) -> str | None:
    """Return the origin of a settings file that another user may have written, else None.

    Such a file has a URI, or is in the folder of a run or search without this user's valid mark. `place` is its path
    or URI.
    """
    if "://" in place:
        return place
    file = Path(place).absolute()
    is_stored = file.name in SEARCH_CONFIG_FILES and _contains_any(file.parent, SEARCH_FILES)
    if file.name == CONFIG:
        in_search = _contains_any(file.parent.parent, SEARCH_FILES)
        is_stored = is_stored or in_search or _contains_any(file.parent, RUN_FILES)
    return describe_foreign_file(file) if is_stored and not is_own_file(file) else None


def find_checkpoint_origin(folder: str, values: dict[str, Any]) -> str | None:
    """Return the origin of a checkpoint's configuration, or None if the configuration is trusted.

    The configuration is trusted if the run's config.yaml belongs to this user, and names all code and servers
    that the checkpoint's configuration names.

    Args:
        folder: Folder or URI of the checkpoint.
        values: Configuration of the checkpoint, without secrets.
    """
    run = Path(folder).parent.parent / CONFIG
    if "://" in folder or not is_own_file(run):
        return folder
    own = find_foreign_code(hide_all(parse_yaml(read_bytes(run))))
    return None if find_foreign_code(values).items() <= own.items() else folder


def describe_foreign_file(file: Path) -> str:
    """Return a description, for errors, of a settings file that is not this user's."""
    return f"{file}, which was not written from this home directory, or has been changed since"


def _contains_any(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).exists() for name in names)


def _compute_mac(file: Path, key: bytes) -> str:
    return hmac.new(key, b"raytrec run\0" + read_bytes(file), hashlib.sha256).hexdigest()


def _read_key(*, create: bool) -> bytes:
    """Return the key that authenticates this user's files (HMAC); with `create`, create a missing key file.

    Raises:
        OSError, RuntimeError: There is no home folder or key, the key is damaged, or others could have accessed it.
    """
    home = os.environ.get("XDG_CONFIG_HOME")
    file = (Path(home) if home else Path.home() / ".config") / "raytrec" / "key"
    if create and not file.exists():
        _make_key(file)
    with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
        status = os.fstat(stream.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{file} must be accessible only to this user")
        key = stream.read(64)
    if len(key) != 64:
        raise OSError(f"{file} does not contain a key of 64 bytes")
    return key


def _make_key(file: Path) -> None:
    """Create the key atomically, for this user only, without replacing a key that another process has created."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = file.with_name(f"key.{secrets.token_hex(8)}")
    create_file(partial, secrets.token_hex(32))
    try:
        os.link(partial, file)
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def _find_modules(values: dict[str, Any]) -> dict[str, str]:
    """Return a mapping from key to module:name for all code that a configuration names."""
    model, data, checks = (as_dict(values.get(section)) for section in ("model", "data", "checks"))
    names = {"model.name": model.get("name")}
    for number, transform in enumerate(as_list(data.get("transforms"))):
        names[f"data.transforms[{number}].do"] = as_dict(transform).get("do")
    for number, task in enumerate(map(as_dict, as_list(values.get("tasks")))):
        names[f"tasks[{number}].loss"] = task.get("loss")
        for place, metric in enumerate(as_list(task.get("metrics"))):
            names[f"tasks[{number}].metrics[{place}]"] = metric
    modules = {key: str(name) for key, name in names.items() if ":" in str(name)}
    return modules | {f"checks.custom.{check}": str(check) for check in as_dict(checks.get("custom"))}


def _iterate_places(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield (key, URI) for each URI that may select the server to contact (chooses_server)."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _iterate_places(each, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _iterate_places(each, f"{key}[{number}]")
    elif chooses_server(_to_text(value)):
        yield key, _to_text(value)


def _receives_secret(store: str) -> bool:
    """Return True if an MLflow server would receive a password or token meant for another server."""
    file = os.path.expanduser("~/.mlflow/credentials")
    if not any(os.environ.get(name) for name in MLFLOW_SECRETS) and not os.path.exists(file):
        return False
    server, own_server = _split_server(store), _split_server(os.environ.get("MLFLOW_TRACKING_URI", ""))
    if server is None:
        return True
    if server.scheme not in ("http", "https") or _find_own_listeners(server):
        return False
    address = server.scheme, server.hostname, server.port
    return not own_server or (own_server.scheme, own_server.hostname, own_server.port) != address


def _is_own_head(address: str) -> bool:
    """Return True if an address belongs to a Ray cluster that this user started on this machine."""
    server = _split_server(address if "://" in address else f"//{address}")
    listeners = _find_own_listeners(server) if server else []
    return bool(listeners) and all(is_head(process.cmdline()) for process in listeners)


def _find_own_listeners(server: SplitResult) -> list[Process]:
    """Return the processes that listen at a loopback address; [] if one is another user's, or for other addresses."""
    import psutil

    try:
        if server.hostname != "localhost" and not ip_address(server.hostname).is_loopback:
            return []
        sockets = [each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        pids = [each.pid for each in sockets if each.laddr.port == server.port]  # None: not visible
        processes = [psutil.Process(pid) for pid in pids if pid is not None]
        is_own = None not in pids and all(process.uids().effective == os.geteuid() for process in processes)
        return processes if is_own else []
    except (ValueError, psutil.Error):  # a host name; a process that has ended or is not accessible
        return []


def _split_server(uri: str) -> SplitResult | None:
    """Return the parts of a URI, or None if its host or port is invalid."""
    with suppress(ValueError):
        split = urlsplit(uri)
        return split if split.port != 0 else None
    return None


def _to_text(value: Any) -> str:
    """Return a value as text, or "" if it is not text. Bytes are decoded, as pydantic does."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else ""
