"""Consoles whose text is not markup.

Names of runs, tables and folders may have [brackets] and :words:.
"""

from __future__ import annotations

import re
import sys
from typing import TextIO, cast

from rich.console import Console
from rich.text import Text

from raytrec.common.redaction import hide
from raytrec.common.streams import LastingStream

# Escapes move the cursor, set titles and more; rich itself takes away bells and carriage returns.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_console(*, stderr: bool = False) -> Console:
    """Open a console that shows text as it is: without markup, emoji and highlighting."""
    stream = LastingStream(lambda: sys.stderr if stderr else sys.stdout)
    return Console(file=cast("TextIO", stream), markup=False, emoji=False, highlight=False)


def plain(text: object) -> str:
    """Text without control characters and secrets, for names that others have chosen."""
    return CONTROL.sub("�", hide(str(text)))


def bold(text: object) -> Text:
    """Text in bold."""
    return Text(plain(text), style="bold")
