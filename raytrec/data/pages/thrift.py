"""Thrift's compact protocol, as far as Parquet's headers use it. No torch here."""

from __future__ import annotations

from struct import unpack_from
from typing import Any

DEEPEST = 16  # structs within one another; Parquet's own are at most 8 deep
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)


class Truncated(ValueError):
    """The bytes end within a value."""


def read_struct(data: bytes, at: int = 0, depth: int = 0) -> tuple[dict[int, Any], int]:
    """(field id → value of the struct that begins at byte `at`, the byte after it).

    Raises:
        Truncated: the bytes end before the struct. ValueError: they are not a struct.
    """
    if depth > DEEPEST:
        raise ValueError("structs too deep for a header of Parquet")
    fields: dict[int, Any] = {}
    last = 0
    try:
        while True:
            head, at = data[at], at + 1
            if head == 0:
                return fields, at
            if head >> 4:
                last += head >> 4
            else:
                last, at = _integer(data, at)
            kind = head & 15
            fields[last], at = (kind == TRUE, at) if kind in (TRUE, FALSE) else _value(data, at, kind, depth)
    except IndexError:
        raise Truncated("the bytes end within a header") from None


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (I16, I32, I64):
        return _integer(data, at)
    if kind == STRUCT:
        return read_struct(data, at, depth + 1)
    if kind == BINARY:
        size, at = _varint(data, at)
        if at + size > len(data):
            raise IndexError
        return data[at : at + size], at + size
    if kind in (LIST, SET):
        return _list(data, at, depth)
    if kind in (BYTE, TRUE, FALSE):  # in a list, a truth value is a byte
        return data[at], at + 1
    if kind == DOUBLE:
        if at + 8 > len(data):
            raise IndexError
        return unpack_from("<d", data, at)[0], at + 8
    raise ValueError(f"type {kind} in a header of Parquet")


def _list(data: bytes, at: int, depth: int) -> tuple[list, int]:
    head, at = data[at], at + 1
    size = head >> 4
    if size == 15:
        size, at = _varint(data, at)
    values = []
    for _ in range(size):  # each takes at least a byte, so a wrong size ends with the bytes
        value, at = _value(data, at, head & 15, depth)
        values.append(value)
    return values, at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number too long for a header of Parquet")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    """A number, zigzag."""
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at
