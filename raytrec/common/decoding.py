"""Messages decoded: from another process, or a run folder's line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from math import isnan
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from raytrec.common import messages
from raytrec.common.formatting import is_step, number, or_0
from raytrec.common.messages import Event, Measured, Message, Outcome, RankLine

CLASSES: dict[str, type[Message]] = {
    each.KIND: each
    for each in vars(messages).values()
    if isinstance(each, type) and issubclass(each, Message) and "KIND" in vars(each)
}
OF_FILE = {messages.CHECKS: Outcome, messages.RANKS: RankLine}  # whose lines do not need their kind
LATEST_UNIX_S = 1e11  # in the year 5138


def from_json(values: Mapping[str, Any]) -> Message:
    """The message that `to_json` made; a KeyError or TypeError where it is none."""
    return _make(CLASSES[values["kind"]], {k: v for k, v in values.items() if k != "kind"})


def from_line(file: str, values: Mapping[str, Any]) -> Message:
    """The message that a line of a run folder was written from, but for LEFT_OUT.

    Every field has its type; figures that are not numbers are None.

    Raises:
        ValueError: it is not a line of that file.
    """
    try:
        message = _make(*_kind_of(file, values))
    except (KeyError, TypeError) as error:
        raise ValueError(f"{type(error).__name__} {error}") from None
    for name, hint in _hints(message.KIND).items():
        if not _fits(value := getattr(message, name), hint):
            raise ValueError(f"{name} is {value!r:.60}")
    unix_s = getattr(message, "unix_s", None)
    if unix_s is not None and not 0 <= unix_s < LATEST_UNIX_S:
        raise ValueError(f"unix_s is {unix_s}")
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
    kind = CLASSES.get(values[tag])
    if kind is None or tag != kind.TAG:
        return Event, values
    return kind, {k: v for k, v in values.items() if k != tag}


@cache
def _hints(kind: str) -> dict[str, Any]:
    """Field → its type."""
    hints = get_type_hints(CLASSES[kind])
    return {each.name: hints[each.name] for each in fields(CLASSES[kind])}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type; whole numbers of messages are counts, floats are finite."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return any(_fits(value, each) for each in inner)
    if hint in (Any, NoneType):
        return hint is Any or value is None
    if hint is int:
        return is_step(value)
    if hint is float:
        return not isnan(number(value))
    if not isinstance(value, origin or hint):
        return False
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return all(_fits(part, inner[-1]) for part in parts)


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


def _make(kind: type[Message], values: Mapping[str, Any]) -> Message:
    """Values of fields as such; with those that are none in the flat field, if the class has one."""
    names = {each.name: each for each in fields(kind)}
    flat = next((each.name for each in names.values() if each.metadata.get("flat")), None)
    known = {k: v for k, v in values.items() if k in names and (k != flat or isinstance(v, Mapping))}
    others = {k: v for k, v in values.items() if k not in known}
    if flat and flat not in known:
        known[flat] = others
    return kind(**known)
