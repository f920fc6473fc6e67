"""Consoles that take no text for markup.

Names of runs, tables and folders may have [brackets] and :words:.
"""

from __future__ import annotations

import re

from rich.console import Console
from rich.text import Text

from raytrec.common.redaction import hide

# Escapes move the cursor, set titles and more; rich itself takes away bells and carriage returns.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def open_console(*, stderr: bool = False) -> Console:
    """A console that takes nothing of what it is given for markup, an emoji or something to highlight."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def plain(text: object) -> str:
    """Text without control characters and secrets, for names that others have chosen."""
    return CONTROL.sub("�", hide(str(text)))


def bold(text: object) -> Text:
    """Text in bold."""
    return Text(plain(text), style="bold")
