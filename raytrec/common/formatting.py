"""Format numbers and names for users, convert untrusted values from files, and open consoles and streams.

Consoles have no markup, because names of runs, tables and folders may contain [brackets] and :words:. Streams tolerate
failures of their terminal, reader or disk.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, TextIO, cast

from raytrec.common.redaction import hide

if TYPE_CHECKING:  # the command line uses this module's streams before it needs rich
    from rich.console import Console
    from rich.text import Text

MAX_ABSOLUTE_VALUE = 1e60  # numbers in files whose absolute value is not below this limit are treated as invalid
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_number(value: Any) -> float:
    """Return a value from a file as a float, or NaN if it is not a number below MAX_ABSOLUTE_VALUE in magnitude."""
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MAX_ABSOLUTE_VALUE
    return float(value) if usable else nan


def as_dict(value: Any) -> dict[str, Any]:
    """Return a value from a file if it is a mapping, else an empty mapping."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a value from a file if it is a list, else an empty list."""
    return value if isinstance(value, list) else []


def null_nonfinite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a mapping in which NaN and infinity, which JSON cannot represent, are None."""
    return {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}


def parse_number_or_zero(value: Any) -> float:
    """Return a value from a file as a float, or 0 if `parse_number` returns NaN."""
    return 0.0 if isnan(found := parse_number(value)) else found


def is_step(value: Any) -> bool:
    """Return True if a value is an integer in [0, 2**53)."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def format_percent(share: float) -> str:
    """Format a share as a percentage: 0.708 → "71 %", with more digits near 0 and 1; NaN → "–"."""
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
    """Format a number of bytes in the largest suitable unit: 2_500_000 → "2.38 MiB"; NaN → "–"."""
    if isnan(count):
        return "–"
    for unit in UNITS:
        if abs(count) < 1024 or unit == UNITS[-1]:
            break
        count /= 1024
    return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.3g} {unit}"


def format_figure(value: float) -> str:
    """Format an integer exactly, other numbers with about four digits: "1,234,567", "0.8104"; NaN → "–"."""
    if isnan(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"


def format_count(number: int, what: str) -> str:
    """Format a number with its noun in the singular or plural: "1 failure", "2 failures"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def format_duration(seconds: float) -> str:
    """Format a duration in seconds: "12 s", "3 min 5 s", "2 h 7 min"."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60} min"


def shorten_name(name: object, max_characters: int = 20) -> str:
    """Shorten a name to `max_characters` by omitting its middle; unprintable characters become "?"."""
    text = "".join(c if c.isprintable() else "?" for c in str(name))
    if len(text) <= max_characters:
        return text
    tail = (max_characters - 1) // 2
    return f"{text[: max_characters - 1 - tail]}…{text[-tail:]}"


def format_rank_ranges(ranks: list) -> str:
    """Format ranks as sorted ranges: [0, 1, 2, 5] → "0–2, 5"; values that are not integers are omitted."""
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
    """Flatten nested mappings to section.key → value; empty mappings are dropped.

    Args:
        values: Nested mappings.
        prefix: Prefix of all keys.
        whole: Function that returns True for a mapping that is not flattened.

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


PIPE_WIDTH = 10_000  # maximum characters of a line in files and pipes; tables are only as wide as their content
# Control characters, which can move the cursor or set titles, except tabs and line feeds. rich removes only five of
# them, such as bells and carriage returns.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_console(*, stderr: bool = False) -> Console:
    """Open a console that shows text unchanged: without markup, emoji or highlighting.

    In files and pipes, tables are not truncated unless the environment variable COLUMNS sets a width.
    """
    from rich.console import Console

    stream = FaultTolerantStream(lambda: sys.stderr if stderr else sys.stdout)
    console = Console(file=cast("TextIO", stream), markup=False, emoji=False, highlight=False)
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = PIPE_WIDTH
    return console


def to_plain_text(text: object) -> str:
    """Convert an object, such as an untrusted name, to text in which control characters and secrets are replaced."""
    return CONTROL.sub("�", hide(str(text)))


def to_bold_text(text: object) -> Text:
    """Convert an object to bold text in which control characters and secrets are replaced."""
    from rich.text import Text

    return Text(to_plain_text(text), style="bold")


class FaultTolerantStream:
    """Text stream that drops text instead of raising an error when its terminal, reader or disk fails.

    Characters that the stream's encoding cannot represent are replaced.

    Args:
        current: Function that returns the current underlying stream, or None if there is no stream.

    Attributes:
        error: Last error of the underlying stream; None if all text was written.
    """

    def __init__(self, current: Callable[[], TextIO | None]):
        self._current = current
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        """Write text to the underlying stream, or drop the text if writing fails."""
        stream = self._current()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with self._dropped():
            if stream is not None:
                stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the underlying stream; errors are stored, not raised."""
        with self._dropped():
            if (stream := self._current()) is not None:
                stream.flush()

    @contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.error = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._current(), name)


@contextmanager
def tolerate_stream_errors() -> Iterator[None]:
    """Suppress output errors in the block, and then exit with status 1 if output to stdout was lost.

    Output after a reader has closed the pipe does not count as lost.
    """
    previous = out, err = sys.stdout, sys.stderr
    tolerant = FaultTolerantStream(lambda: out)
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (tolerant, FaultTolerantStream(lambda: err)))
    try:
        yield
    finally:
        tolerant.flush()
        is_lost = tolerant.error and getattr(tolerant.error, "errno", None) != errno.EPIPE
        if is_lost:  # False if the reader has closed the pipe, as `head` does
            print(f"error: the output is incomplete: {tolerant.error}", file=sys.stderr)
        sys.stdout, sys.stderr = previous
        if is_lost:
            sys.exit(1)
