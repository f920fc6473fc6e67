"""Hides the secrets that addresses and settings may hold, before others see them."""

from __future__ import annotations

import re
from typing import Any

import yaml

HIDDEN = "***"
USER_INFO = re.compile(r"(://[^/@\s:]*):[^/@\s]*@")
PARAMETER = re.compile(
    r"([?&][\w-]*(?:password|secret|token|credential|key)[\w-]*=)[^\s&'\"]+", re.IGNORECASE
)
SECRET_NAME = re.compile(r"password|passwd|secret|token|credential|api_?key|access_?key", re.IGNORECASE)
TRACE = re.compile(rf"(:{re.escape(HIDDEN)}@)|(={re.escape(HIDDEN)})(&|$)|^{re.escape(HIDDEN)}$")


def hide(text: str) -> str:
    """A text whose addresses have no passwords and no secret parameters.

    Example:
        >>> hide("s3://me:pass@bucket?secret_key=abc&region=eu")
        's3://me:***@bucket?secret_key=***&region=eu'
    """
    return PARAMETER.sub(rf"\1{HIDDEN}", USER_INFO.sub(rf"\1:{HIDDEN}@", text))


def hide_all(value: Any) -> Any:
    """The same for every text within lists and mappings; texts whose names say what they are go altogether.

    Example:
        >>> hide_all({"uri": "http://me:pass@host", "tags": {"api_key": "abc", "team": "ads"}})
        {'uri': 'http://me:***@host', 'tags': {'api_key': '***', 'team': 'ads'}}
    """
    if isinstance(value, str):
        return hide(value)
    if isinstance(value, list | tuple):
        return type(value)(hide_all(each) for each in value)
    if isinstance(value, dict):
        return {
            key: HIDDEN if isinstance(each, str) and SECRET_NAME.search(str(key)) else hide_all(each)
            for key, each in value.items()
        }
    return value


def hide_yaml(text: str) -> str:
    """The same for a file of settings; comments go, too. Text that is not YAML is only looked at as text."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError:
        return hide(text)
    hidden = hide_all(values)
    return text if hidden == values else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True)


def hidden_keys(value: Any, key: str = "") -> list[str]:
    """Names, such as `tracking.uri`, of the texts in nested settings that something has been hidden in."""
    if isinstance(value, dict):
        return [found for k, each in value.items() for found in hidden_keys(each, f"{key}.{k}".strip("."))]
    if isinstance(value, list | tuple):
        return list(dict.fromkeys(found for each in value for found in hidden_keys(each, key)))
    return [key] if isinstance(value, str) and TRACE.search(value) else []
