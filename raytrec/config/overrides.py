"""Overrides of a configuration: `section.key=value`, or a whole section.

`tasks.NAME.key=value` sets a key of the task with this name. Values are YAML. From Python, overrides may also
be a mapping: {"train.epochs": 3, "model": {"name": "deepfm"}}.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import yaml

from raytrec.common.errors import ConfigError, make_unknown_word_error, shorten_repr
from raytrec.common.reading import UnreadableError, parse_yaml
from raytrec.common.redaction import hide, hide_yaml
from raytrec.config.schema import format_yaml_scalar

Overrides = Iterable[str] | Mapping[str, Any]


def to_override_texts(overrides: Overrides | None) -> list[str]:
    """Return a list of overrides as command line arguments, section.key=value; None yields an empty list.

    Raises:
        ConfigError: A value of a mapping cannot be written as YAML.
    """
    if not isinstance(overrides, Mapping):
        return [*(overrides or [])]
    with convert_yaml_errors("overrides"):
        return [f"{key}={format_yaml_scalar(value)}" for key, value in overrides.items()]


@contextmanager
def convert_yaml_errors(where: str) -> Iterator[None]:
    """Convert errors in reading or writing YAML within the block to a ConfigError with this `where`.

    Raises:
        ConfigError: The block has raised a YAMLError, UnreadableError or RecursionError.
    """
    try:
        yield
    except (yaml.YAMLError, UnreadableError, RecursionError) as error:
        raise ConfigError(
            f"a value cannot be represented in YAML: {' '.join(str(error).split()) or 'the value contains itself'}",
            where=where,
            expected="dictionaries, lists, text, numbers, dates, True, False and None",
        ) from None


def apply_override(values: dict, override: str, sections: Collection[str]) -> None:
    """Set one key of a configuration's plain values, or replace a whole section.

    Args:
        values: Plain values of the configuration; changed in place.
        override: Text of the override.
        sections: Names of all sections.

    Raises:
        ConfigError: The text is not an override, its value is not valid YAML, it replaces a section that does not
            exist, its key names a list entry that does not exist, or a part of the key before the last names a plain
            value or (the last but one) a list.
    """
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    expected = "section.key=value, or section={key: value, …} for a whole section"
    if not equals or not all(parts):
        # The text after = may be a secret.
        shown = shorten_repr(key.strip() if equals else hide(override))
        raise ConfigError(f"{shown} is not an override", where="overrides", expected=expected)
    if len(parts) == 1 and parts[0] not in sections:
        what = f"there is no section {shorten_repr(parts[0])}"
        raise make_unknown_word_error(what, parts[0], sections, "overrides", expected)
    try:
        value = parse_yaml(text) if text else None
    except UnreadableError as error:
        raise ConfigError(
            f"{shorten_repr(text)} is not a YAML value: {error}", where=f"override {shorten_repr(key)}"
        ) from None
    if len(parts) > 1 and parts[0] == "tasks" and not values.get("tasks"):
        raise ConfigError("the configuration lists no tasks", where=f"override {key}", expected="tasks=[{label: …}]")
    for depth, part in enumerate(parts[:-1]):
        if isinstance(values, list):
            values = _find_entry(values, part, key, ".".join(parts[:depth]))
            continue
        if values.get(part) is None:
            values[part] = {}
        values = values[part]
        if not isinstance(values, (dict, list)):
            expected = f"a section, mapping or list at {'.'.join(parts[: depth + 1])}"
            raise ConfigError(f"'{part}' is a value, not a section", where=f"override {key}", expected=expected)
    if isinstance(values, list):
        whole = f"{'.'.join(parts[:-1])}=[…] with the whole list"
        raise ConfigError(
            f"'{parts[-2]}' is a list and has no keys",
            where=f"override {key}",
            expected=f"tasks.NAME.KEY, or {whole}" if parts[:-1] == ["tasks"] else whole,
        )
    values[parts[-1]] = value


def _find_entry(values: list, name: str, key: str, list_key: str) -> dict[str, Any]:
    """Return the entry with this name in the list `list_key`, such as tasks. A task without a name has its label.

    Raises:
        ConfigError: There is no such entry; `key`, the key of the override, is named in the error.
    """
    entries = [each for each in values if isinstance(each, dict) and (each.get("name") or each.get("label"))]
    names = [str(each.get("name") or each.get("label")) for each in entries]
    if name not in names:
        expected = "" if names else f"{list_key}=[…] with the whole list"
        what = f"no entry of {list_key} is named '{name}'"
        raise make_unknown_word_error(what, name, names, f"override {key}", expected)
    return entries[names.index(name)]


def get_section_name(override: str) -> str:
    """Return the name of the section that an override changes."""
    return override.partition("=")[0].strip().partition(".")[0]


def hide_override_secrets(override: str) -> str:
    """Return an override with its secrets hidden, for errors."""
    key, equals, text = override.partition("=")
    return f"{key}{equals}{hide_yaml(text).strip().removesuffix(chr(10) + '...')}"
