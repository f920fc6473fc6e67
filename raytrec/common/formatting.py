"""Format numbers and names for users, and convert untrusted values from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite, isnan, nan
from typing import Any

MAX_ABSOLUTE_VALUE = 1e60  # numbers in files whose absolute value is not below this limit are treated as invalid
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_number(value: Any) -> float:
    """Return a value from a file as a float, or NaN if it is not an int or float below MAX_ABSOLUTE_VALUE in magnitude.

    A bool is not accepted as a number.
    """
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_ABSOLUTE_VALUE
    return float(value) if usable else nan


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value from a file if it is a dict, else an empty dict."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a value from a file if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def null_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a mapping whose top-level NaN and infinite values, which JSON cannot represent, are None."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}


def parse_number_or_zero(value: Any) -> float:
    """Return a value from a file as a float, or 0 if `parse_number` returns NaN."""
    return 0.0 if isnan(found := parse_number(value)) else found


def is_step(value: Any) -> bool:
    """Return True if a value is an int, but not a bool, in [0, 2**53)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def format_percent(share: float) -> str:
    """Format a fraction as a percentage: 0.708 → "71 %", with more digits near 0 and 1; NaN → "–"."""
    if isnan(share):
        return "–"
    if 0 < abs(share) < 0.0005:
        return f"{share * 100:.2g} %"
    if 0.995 <= share < 1:
        digits = next((digits for digits in range(1, 6) if round(share * 100, digits) < 100), 0)
    else:
        digits = 0 if abs(share) >= 0.0995 or share == 0 else 1
    return f"{share * 100:.{digits}f} %"


def format_bytes(count: float) -> str:
    """Format a number of bytes in the largest suitable binary unit: 2_500_000 → "2.38 MiB"; NaN → "–"."""
    if isnan(count):
        return "–"
    for unit in UNITS:
        if abs(count) < 1024 or unit == UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.3g} {unit}"


def format_figure(value: float) -> str:
    """Format a number: "1,234,567", "0.8104"; NaN → "–".

    Integers below 1e15 are exact, other numbers from 1,000 are rounded to integers, and the rest have up to 4 digits.
    """
    if isnan(value):
        return "–"
    if abs(value) < 1e15 and value == int(value):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def format_count(number: int, what: str) -> str:
    """Format a number with a singular noun, to which "s" is added unless the number is 1: "1 failure", "2 failures"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_address(host: str, port: int) -> str:
    """Format an address as HOST:PORT, with brackets around IPv6 addresses as in URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def format_duration(seconds: float) -> str:
    """Format a duration, a finite number of seconds, as "12 s", "3 min 5 s" or "2 h 7 min"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def shorten_name(name: object, max_characters: int = 20) -> str:
    """Shorten a name to at most `max_characters`, with "…" for its middle; unprintable characters become "?"."""
    text = "".join(c if c.isprintable() else "?" for c in str(name))
    if len(text) <= max_characters:
        return text
    tail = (max_characters - 1) // 2
    return f"{text[: max_characters - 1 - tail]}…{text[-tail:]}"


def format_rank_ranges(ranks: list) -> str:
    """Format ranks as sorted ranges: [0, 1, 2, 5] → "0–2, 5"; duplicates and values that are not ints are omitted."""
    whole = sorted({rank for rank in ranks if isinstance(rank, int)})
    parts: list[list[int]] = []
    for rank in whole:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)


def flatten(
    values: Mapping[str, Any], prefix: str = "", whole: Callable[[dict], bool] = lambda inner: False
) -> dict[str, Any]:
    """Flatten nested dicts to one dict with keys such as section.key; empty dicts are dropped.

    Args:
        values: Nested dicts.
        prefix: Prefix of all keys in the result.
        whole: Function that returns True for a dict that is kept as a value; default: all dicts are flattened.

    Example:
        >>> flatten({"run": {"seed": 1, "name": "a"}, "tags": {}})
        {'run.seed': 1, 'run.name': 'a'}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and not whole(value):
            flat |= flatten(value, f"{prefix}{key}.", whole)
        else:
            flat[f"{prefix}{key}"] = value
    return flat
