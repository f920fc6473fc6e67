"""Conversion of typed objects to and from JSON documents, and of lines in a run folder to messages.

Parsed JSON is validated by pydantic. This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from math import isnan
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raytrec.common import messages
from raytrec.common.errors import RunError, get_first_line
from raytrec.common.formatting import parse_number, parse_number_or_zero
from raytrec.common.messages import Event, Measured, Message, Outcome, RankLine
from raytrec.common.reading import MAX_JSON_BYTES, UnreadableError, parse_json
from raytrec.common.storage import join_uri, read_bytes

CLASSES: dict[str, type[Message]] = {
    each.KIND: each
    for each in vars(messages).values()
    if isinstance(each, type) and issubclass(each, Message) and "KIND" in vars(each)
}
CLASS_OF_FILE = {messages.CHECKS: Outcome, messages.RANKS: RankLine}  # files whose lines have a single class
T = TypeVar("T")


_adapter_of: Any = cache(TypeAdapter)


def to_json_document(value: Any) -> bytes:
    """Serialize a dataclass or pydantic model to indented JSON (UTF-8) and a line feed; NaN and inf become null."""
    return _adapter_of(type(value)).dump_json(value, indent=2, by_alias=True) + b"\n"


def validate_as(values: Any, kind: type[T]) -> T:
    """Convert parsed JSON to an object of a type.

    Args:
        values: Parsed JSON.
        kind: Dataclass, pydantic model, TypedDict or any other type that pydantic validates.

    Raises:
        UnreadableError: The values do not match the type; the message names the first invalid key, if there is one.
    """
    try:
        return _adapter_of(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise UnreadableError(f"{place}: {first['msg']}"[:300] if place else first["msg"][:300]) from None


def find_document(uri: str, kind: type[T], max_document_bytes: int = MAX_JSON_BYTES) -> T | None:
    """Read a JSON document; return None if the file is missing, unreadable, too large, or not of this type.

    Args:
        uri: Path or URI of the file.
        kind: Type of the document; see `validate_as`.
        max_document_bytes: Largest accepted size of the file in bytes.

    Raises:
        DataError: The path is not valid, or the store cannot be reached.
    """
    try:
        return validate_as(parse_json(read_bytes(uri, max_document_bytes)), kind)
    except (OSError, UnreadableError):
        return None


def read_document(folder: str, name: str, kind: type[T], what: str, made_by: str, do: str | None = None) -> T:
    """Read the JSON document that describes the content of a folder.

    Args:
        folder: Path or URI of the folder.
        name: File name of the document.
        kind: Type of the document; see `validate_as`.
        what: Noun for the content of the folder, such as "index".
        made_by: Command that writes the folder, such as "raytrec index".
        do: Advice to the user if the document is missing; default: no advice.

    Raises:
        RunError: The document does not exist, cannot be read, is larger than MAX_YAML_BYTES, or does not match the
            type.
        DataError: The path is not valid, or the store cannot be reached.
    """
    uri = join_uri(folder, name)
    try:
        values = parse_json(read_bytes(uri))
        json.dumps(values, ensure_ascii=False).encode()  # raises for half a surrogate pair, which output cannot have
        return validate_as(values, kind)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"there is no {what} in this folder",
            where=folder,
            expected=f"a folder written by `{made_by}`, with {name}",
            do=do,
        ) from None
    except (OSError, UnreadableError, UnicodeError) as error:
        raise RunError(
            f"{name} of the {what} cannot be read: {get_first_line(error)}",
            where=uri,
            expected=f"a readable file, written by `{made_by}`",
            do=f"make the file readable, restore it, or create a new folder with `{made_by}`",
        ) from None


def from_line(file: str, values: Mapping[str, Any]) -> Message:
    """Return the message in a line of a run folder's file; the inverse of Message.line().

    Fields that the line omits keep their defaults, and fields in the line are validated. In metrics, booleans become 0
    or 1, and values that are not numbers become None, except the device, replicated and row_norm_counts of a table.

    Args:
        file: Name of the file. It determines the message class, except in metrics.jsonl and events.jsonl.
        values: Line, parsed as JSON.

    Raises:
        ValueError: The values are not a valid line of that file.
    """
    try:
        kind, fields_of_line = _resolve_message_class(file, values)
    except KeyError as error:
        raise ValueError(f"missing key {error}") from None
    message = validate_as(_collect_fields(kind, fields_of_line), kind)
    if isinstance(message, Measured):
        return replace(message, figures={name: _to_number(value) for name, value in message.figures.items()})
    if isinstance(message, RankLine):
        return replace(message, tables={name: _clean_table_figures(entry) for name, entry in message.tables.items()})
    return message


def _resolve_message_class(file: str, values: Mapping[str, Any]) -> tuple[type[Message], Mapping[str, Any]]:
    """Return a line's message class, and the line's values without the key that names the class.

    The values are unchanged if the class is Event, as for unknown names, or depends only on the file.

    Raises:
        KeyError: The key that names the class is missing.
    """
    if file in CLASS_OF_FILE:
        return CLASS_OF_FILE[file], values
    tag = "event" if file == messages.EVENTS else "kind"
    kind = CLASSES.get(values[tag]) if isinstance(values[tag], str) else None
    if kind is None or tag != kind.TAG:
        return Event, values
    return kind, {k: v for k, v in values.items() if k != tag}


def _to_number(value: Any) -> float | None:
    """Return 0 or 1 for a bool, a number unchanged if `parse_number` accepts it, and None for any other value."""
    if isinstance(value, bool):
        return int(value)
    return None if isnan(parse_number(value)) else value


def _clean_table_figures(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a table's shards, with None for invalid values and 0 for invalid counts."""
    figures: dict[str, Any] = {key: _to_number(value) for key, value in values.items()}
    if isinstance(device := values.get("device"), str):
        figures["device"] = device
    if isinstance(replicated := values.get("replicated"), bool):
        figures["replicated"] = replicated
    if isinstance(counts := values.get("row_norm_counts"), list):
        figures["row_norm_counts"] = [parse_number_or_zero(count) for count in counts]
    return figures


def _collect_fields(kind: type[Message], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line's values by field of the class.

    Values that match no field are collected in the class's flat field (messages.FLATTENED), or else dropped.
    """
    flat = next((each.name for each in fields(kind) if each.metadata.get("flat")), None)
    names = {each.name for each in fields(kind)} - {flat}
    named = {name: value for name, value in values.items() if name in names}
    return named | ({flat: {k: v for k, v in values.items() if k not in named}} if flat else {})
