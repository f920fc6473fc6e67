"""Overrides of a configuration: `section.key=value`, or a whole section.

`tasks.NAME.key=value` sets a key of the task of that name. Values are YAML. From Python, a mapping does as
well: {"train.epochs": 3, "model": {"name": "deepfm"}}.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

from raytrec.common.errors import ConfigError, some, unknown
from raytrec.common.reading import NotReadable, yaml_values
from raytrec.common.redaction import hide, hide_yaml
from raytrec.config.schema import scalar

Overrides = Iterable[str] | Mapping[str, Any]


def as_texts(overrides: Overrides | None) -> list[str]:
    """Overrides as the command line has them.

    Raises:
        ConfigError: a value of a mapping is not plain.
    """
    if not isinstance(overrides, Mapping):
        return [*(overrides or [])]
    with plain_values("overrides"):
        return [f"{key}={scalar(value)}" for key, value in overrides.items()]


@contextmanager
def plain_values(where: str) -> Iterator[None]:
    """A block that writes values as YAML, which a ConfigError ends where one cannot be written."""
    try:
        yield
    except (yaml.YAMLError, NotReadable, RecursionError) as error:
        raise ConfigError(
            f"a value is not plain: {' '.join(str(error).split()) or 'it contains itself'}",
            where=where,
            expected="mappings, lists, text, numbers, true, false and None",
        ) from None


def apply_override(values: dict, override: str, sections: Collection[str]) -> None:
    """Sets one key of a configuration's plain values, or replaces a whole section.

    Raises:
        ConfigError: the text is not an override, its value is not YAML, or its key leads into a value or to a
            task that does not exist.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        shown = some(key.strip()) if equals else some(hide(override))  # what is after = may be a secret
        raise ConfigError(f"{shown} is not an override", where="command line", expected="section.key=value")
    if len(parts) == 1 and parts[0] not in sections:
        expected = "section.key=value, or section={key: value, …} for a whole section"
        what = f"there is no section {some(parts[0])}"
        raise unknown(what, parts[0], sections, "command line", expected)
    try:
        value = yaml_values(text) if text else None
    except NotReadable as error:
        raise ConfigError(
            f"{some(text)} is not a YAML value: {error}", where=f"command line, {some(key)}"
        ) from None
    for part in parts[:-1]:
        if isinstance(values, list):
            values = _entry(values, part, key)
            continue
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, (dict, list)):
            raise ConfigError(f"'{part}' is a value, not a section", where=f"command line, {key}")
    if isinstance(values, list):
        raise ConfigError(
            f"'{parts[-2]}' is a list, which has no keys",
            where=f"command line, {key}",
            expected="tasks.NAME.KEY, or the list as a whole",
        )
    values[parts[-1]] = value


def _entry(values: list, name: str, key: str) -> dict[str, Any]:
    """The entry of a list, such as tasks, with this name; a task without a name has that of its label."""
    entries = [each for each in values if isinstance(each, dict)]
    names = [str(each.get("name") or each.get("label")) for each in entries]
    if name not in names:
        expected = "" if names else "a section"
        raise unknown(f"there is no '{name}'", name, names, f"command line, {key}", expected)
    return entries[names.index(name)]


def section_of(override: str) -> str:
    """The section that an override changes."""
    return override.partition("=")[0].strip().partition(".")[0]


def without_secrets(override: str) -> str:
    """An override as an error may show it."""
    key, equals, text = override.partition("=")
    return f"{key}{equals}{hide_yaml(text).strip().removesuffix(chr(10) + '...')}"
