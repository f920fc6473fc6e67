"""Messages decoded from a run folder's lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from math import isnan
from typing import Any

from raytrec.common import messages
from raytrec.common.documents import typed
from raytrec.common.formatting import number, or_0
from raytrec.common.messages import Event, Measured, Message, Outcome, RankLine

CLASSES: dict[str, type[Message]] = {
    each.KIND: each
    for each in vars(messages).values()
    if isinstance(each, type) and issubclass(each, Message) and "KIND" in vars(each)
}
OF_FILE = {messages.CHECKS: Outcome, messages.RANKS: RankLine}  # whose lines do not need their kind


def from_line(file: str, values: Mapping[str, Any]) -> Message:
    """The message that a line of a run folder was written from, but for LEFT_OUT.

    Every field has its type; figures that are not numbers are None.

    Raises:
        ValueError: it is not a line of that file.
    """
    try:
        kind, fields_of_line = _kind_of(file, values)
    except KeyError as error:
        raise ValueError(f"no {error}") from None
    message = typed(_fields(kind, fields_of_line), kind)
    if isinstance(message, Measured):
        return replace(message, figures={name: _number(value) for name, value in message.figures.items()})
    if isinstance(message, RankLine):
        return replace(message, tables={name: _entry(entry) for name, entry in message.tables.items()})
    return message


def _kind_of(file: str, values: Mapping[str, Any]) -> tuple[type[Message], Mapping[str, Any]]:
    """The class of a line's message, and the values of its fields."""
    if file in OF_FILE:
        return OF_FILE[file], values
    tag = "event" if file == messages.EVENTS else "kind"
    kind = CLASSES.get(values[tag]) if isinstance(values[tag], str) else None
    if kind is None or tag != kind.TAG:
        return Event, values
    return kind, {k: v for k, v in values.items() if k != tag}


def _number(value: Any) -> float | None:
    """A number as it is, a truth as 0 or 1, anything else as None."""
    if isinstance(value, bool):
        return int(value)
    return None if isnan(number(value)) else value


def _entry(values: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a table's shards: numbers, but for three; None for anything else."""
    sound: dict[str, Any] = {key: _number(value) for key, value in values.items()}
    if isinstance(device := values.get("device"), str):
        sound["device"] = device
    if isinstance(replicated := values.get("replicated"), bool):
        sound["replicated"] = replicated
    if isinstance(counts := values.get("row_norm_counts"), list):
        sound["row_norm_counts"] = [or_0(count) for count in counts]
    return sound


def _fields(kind: type[Message], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a class; other values are collected in its flat field, if it has one."""
    names = {each.name: each for each in fields(kind)}
    flat = next((each.name for each in names.values() if each.metadata.get("flat")), None)
    known = {k: v for k, v in values.items() if k in names and (k != flat or isinstance(v, Mapping))}
    if flat and flat not in known:
        known[flat] = {k: v for k, v in values.items() if k not in known}
    return known
