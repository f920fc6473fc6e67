"""Configurations from elsewhere are data, never code.

A configuration can name code that its run imports (`module:name`), and a cluster whose processes the driver
talks to in pickles. In one that you wrote into a file of yours, this is your word. In one that comes out of a
URI, or out of a run folder or checkpoint (which may be somebody else's), it is not, unless you say so.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from raytrec.errors import ConfigError


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
    address = scaling.get("address")
    if address not in (None, "auto", "local") and not _is_here(str(address)):
        found["scaling.address"] = str(address)
    return found


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
        raise ConfigError(
            f"a configuration from elsewhere names code to run: {'; '.join(named)}",
            where=where,
            expected="data alone: no module:name, no address of a cluster",
            do="if you trust its source, say --allow-code; else set these keys to something of your own",
        )


def _is_here(address: str) -> bool:
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname or ""
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:  # a name, or no address at all
        return False


def _mapping(value: Any) -> dict:
    return value if isinstance(value, dict) else {}
