"""Replay the transcripts in the docs in a shell and compare the output.

In a transcript, lines that begin with `$ ` are typed, `...` matches any lines, and `^C` is typed after the
line before it was printed. Numbers, dates, folders and generated name suffixes may differ. Warnings are
ignored.
"""

from __future__ import annotations

import re
from pathlib import Path

import pexpect

PROMPT = "raytrec-prompt> "
ANSI_COLORS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Text that may differ between runs: a job name suffix, a folder, a number.
VARYING_TEXT = re.compile(r"(-\d{8}-\d{6}(?:-[0-9a-f]{4})?)|((?<![\w.])/[\w./-]+)|(\d[\d,.:]*)")


def console_blocks(page: Path) -> list[str]:
    """Return the transcripts (```console blocks) of a page."""
    return re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def parse_transcript(transcript: str) -> list[tuple[str, list[str]]]:
    """Return (command, expected lines) of each command in a transcript."""
    out: list[tuple[str, list[str]]] = []
    for line in transcript.splitlines():
        if line.startswith("$ "):
            out.append((line[2:], []))
        else:
            out[-1][1].append(line)
    return out


def line_pattern(line: str) -> str:
    """Return a regular expression that matches a line up to varying text."""
    parts, last = [], 0
    for found in VARYING_TEXT.finditer(line):
        parts.append(re.escape(line[last : found.start()]))
        name, folder, _ = found.groups()
        parts.append(r"-\d{8}-\d{6}(?:-[0-9a-f]{4})?" if name else r"/[\w./-]+" if folder else r"\d[\d,.:]*")
        last = found.end()
    return "".join([*parts, re.escape(line[last:])])


def describe_difference(expected: list[str], got: list[str]) -> str | None:
    """Describe the first difference between expected and printed lines; None if they match."""
    lines = [line.rstrip() for line in got if not line.startswith("warning: ")]
    text = "".join(f"{line}\n" for line in lines)
    parts = [r"(?:.*\n)*?" if line == "..." else line_pattern(line.rstrip()) + r"\n" for line in expected]
    if re.fullmatch("".join(parts), text):
        return None
    come = max(n for n in range(len(parts) + 1) if re.match("".join(parts[:n]), text))
    rest = text[re.match("".join(parts[:come]), text).end() :].partition("\n")[0]
    return f"expected: {[*expected, 'the end'][come]}\ngot:      {rest or 'the end'}"


class TerminalShell:
    """Shell on a pseudo-terminal."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str], timeout: float):
        self._shell = pexpect.spawn(
            command[0],
            command[1:],
            cwd=str(cwd),
            env=env | {"PS1": PROMPT, "TERM": "dumb", "COLUMNS": "1000"},
            encoding="utf-8",
            timeout=timeout,
            dimensions=(50, 1000),
            echo=False,
        )
        self._shell.expect_exact(PROMPT)

    def type(self, command: str, expected: list[str]) -> list[str]:
        """Type a command, and ^C if the transcript has it; return the printed lines."""
        printed = ""
        self._shell.sendline(command)
        if "^C" in expected:
            line = expected[expected.index("^C") - 1]
            came = self._shell.expect([line_pattern(line), re.escape(PROMPT)])
            printed = self._shell.before + self._shell.after
            assert came == 0, f"$ {command}\nended without printing: {line}\n--- output:\n{printed}"
            self._shell.sendintr()
        self._shell.expect_exact(PROMPT)
        lines = ANSI_COLORS.sub("", printed + self._shell.before).replace("\r", "").splitlines()
        return [line for line in lines if line.strip() and line != "^C"]

    def close(self) -> None:
        """End the shell and its processes."""
        self._shell.close(force=True)
