"""Consoles without markup, and streams that tolerate failures of their terminal, reader or disk.

Markup is disabled because names of runs, tables and folders may contain [brackets] and :words:.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from raytrec.common.redaction import hide

if TYPE_CHECKING:  # the command line uses this module's streams before it needs rich
    from rich.console import Console
    from rich.text import Text

PIPE_WIDTH = 10_000  # maximum characters of a line in files and pipes; tables are only as wide as their content
# Control characters, which can move the cursor or set titles, except tabs and line feeds. rich removes only five of
# them, such as bells and carriage returns.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_console(*, stderr: bool = False) -> Console:
    """Open a rich console on stdout or stderr that shows text unchanged: without markup, emoji or highlighting.

    Output errors are not raised (FaultTolerantStream). In files and pipes, lines have up to PIPE_WIDTH characters
    unless the environment variable COLUMNS sets a width.
    """
    from rich.console import Console

    stream = FaultTolerantStream(lambda: sys.stderr if stderr else sys.stdout)
    console = Console(file=cast("TextIO", stream), markup=False, emoji=False, highlight=False)
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = PIPE_WIDTH
    return console


def to_plain_text(text: object) -> str:
    """Convert an object, such as an untrusted name, to text; control characters become �, and secrets become ***."""
    return CONTROL.sub("�", hide(str(text)))


def to_bold_text(text: object) -> Text:
    """Convert an object to bold rich text, with control characters and secrets replaced as in `to_plain_text`."""
    from rich.text import Text

    return Text(to_plain_text(text), style="bold")


class FaultTolerantStream:
    """Text stream that drops text instead of raising an error when its terminal, reader or disk fails.

    Characters that the stream's encoding cannot represent are replaced.

    Args:
        current: Function that returns the current underlying stream, or None if there is no stream.

    Attributes:
        error: Last error of the underlying stream; None if no error has occurred.
    """

    def __init__(self, current: Callable[[], TextIO | None]):
        self._current = current
        self.error: Exception | None = None

    def write(self, text: str) -> int:
        """Write text to the underlying stream, or drop the text if writing fails; return the length of the text."""
        stream = self._current()
        encoding = getattr(stream, "encoding", None) or "utf-8"
        with self._dropped():
            if stream is not None:
                stream.write(text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the underlying stream; an error is stored in `error`, not raised."""
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
    """Suppress output errors in the block; at its end, exit with status 1 if output to stdout was lost.

    Output does not count as lost if the reader of a pipe has closed it, as `head` does. In the block, sys.stdout and
    sys.stderr are replaced.

    Raises:
        SystemExit: Output to stdout was lost; replaces an error raised in the block.
    """
    previous = out, err = sys.stdout, sys.stderr
    tolerant = FaultTolerantStream(lambda: out)
    sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (tolerant, FaultTolerantStream(lambda: err)))
    try:
        yield
    finally:
        tolerant.flush()
        is_lost = tolerant.error and getattr(tolerant.error, "errno", None) != errno.EPIPE
        if is_lost:
            print(f"error: the output is incomplete: {tolerant.error}", file=sys.stderr)
        sys.stdout, sys.stderr = previous
        if is_lost:
            sys.exit(1)
