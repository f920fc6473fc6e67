"""Errors for users, in four parts: what, where, expected, do.

Errors of these classes have causes that a user can fix; the command line prints them without a traceback. They
are sent between Ray processes, so pickling preserves all their parts. They reach terminals, logs and files that other
users read, so passwords, tokens and other secrets are replaced by ***.
"""

import re
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NotRequired

from typing_extensions import TypedDict

from raytrec.common.redaction import hide

MAX_WORD_LENGTH = 200  # characters; the time to search for similar words grows with the square of the length
MAX_PART_BYTES = {"what": 2200, "where": 700, "expected": 500, "do": 450}  # maximum size of each part in bytes of UTF-8
# Characters that move a terminal's cursor or change the direction of text, and surrogates, which UTF-8 cannot encode.
CONTROL = re.compile("[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]")


class ErrorParts(TypedDict):
    """Parts of a RaytrecError, in the form in which they are stored and sent."""

    what: str
    where: NotRequired[str | None]
    expected: NotRequired[str | None]
    do: NotRequired[str | None]


class RaytrecError(Exception):
    """Base class of errors that are shown to users, without a traceback.

    In each part, secrets are hidden and control characters are escaped. Parts over MAX_PART_BYTES are truncated.

    Args:
        what: Clause, without a final period, that states the fault and the received value.
        where: Location of the fault, such as a file, row group, column, table, rank or configuration key.
        expected: Noun phrase that describes a correct value.
        do: Advice to the user, as an imperative.

    Example:
        >>> print(RaytrecError("no column clicks", where="data/train", expected="one of click, price"))
        no column clicks
          where:    data/train
          expected: one of click, price
    """

    def __init__(self, what: str, *, where: str | None = None, expected: str | None = None, do: str | None = None):
        self.what = _sanitize_part(what, "what")
        self.where = where and _sanitize_part(where, "where")
        self.expected = expected and _sanitize_part(expected, "expected")
        self.do = do and _sanitize_part(do, "do")
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.what]
        for label in ("where", "expected", "do"):
            if value := getattr(self, label):
                parts.append(f"  {label + ':':<10}{value}")
        return "\n".join(parts)

    @property
    def parts(self) -> ErrorParts:
        """Parts of the error by name, including parts that are None; `type(error)(**parts)` creates an equal error."""
        return {"what": self.what, "where": self.where, "expected": self.expected, "do": self.do}

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows for the error; they contain no traceback."""
        return [f"error: {self}"]

    def __reduce__(self):
        return partial(type(self), **self.parts), (), self.__dict__


class ConfigError(RaytrecError):
    """Error for an invalid configuration file, override, option or combination of keys."""


class GpuFailedError(ConfigError):
    """Error for a GPU that must not be used until it has recovered.

    Attributes:
        place: (Ray's node id, Ray's GPU id on that node); an id is "" until it is known.
    """

    place = "", ""


class SchemaError(RaytrecError):
    """Error for a schema that is missing, contradicts itself, cannot be parsed, or differs from a checkpoint's."""


class DataError(RaytrecError):
    """Error for data that does not match the schema or cannot be read, or for an invalid path."""


class RunError(RaytrecError):
    """Error for a run that cannot start, has failed, or cannot be loaded."""


def shorten_repr(value: object) -> str:
    """Return the repr of a value, in which reprlib shortens long strings, integers and containers."""
    return _REPR.repr(value)


def join_first_lines(lines: list[str], count: int | None = None) -> str:
    """Join as many lines as fit in the `what` of an error; if lines are omitted, append "… and N more".

    Args:
        lines: All lines, or only the first lines. A line over 500 bytes is truncated.
        count: Total number of lines; default: the length of `lines`.
    """
    count, first_lines, room = count or len(lines), [], MAX_PART_BYTES["what"] - 100
    for line in lines:
        line = _truncate_middle(line, 500)
        room -= len(line.encode(errors="replace")) + 1
        if room < 0:
            break
        first_lines.append(line)
    more = count - len(first_lines)
    return "\n".join([*first_lines, *([f"… and {more:,} more"] if more else [])])


def _sanitize_part(part: object, name: str) -> str:
    """Return a part of an error as text without secrets, with control characters escaped, within MAX_PART_BYTES."""
    text = str(part)
    if len(text) > 1 << 20:  # the search for secrets takes time
        text = text[: 1 << 19] + " … " + text[-(1 << 19) :]
    return _truncate_middle(CONTROL.sub(_escape_match, hide(text)), MAX_PART_BYTES[name])


def _escape_match(match: re.Match) -> str:
    character = match.group()
    return "  " if character == "\t" else ascii(character)[1:-1]


def _truncate_middle(text: str, limit: int) -> str:
    """Return a text of at most `limit` bytes of UTF-8; the middle of a longer text is omitted."""
    data = text.encode(errors="replace")
    if len(data) <= limit:
        return text
    mark = f" … ({len(data):,} bytes) … "
    room = limit - len(mark.encode())
    begin, end = data[: room * 2 // 3], data[-(room - room * 2 // 3) :]
    return begin.decode(errors="ignore") + mark + end.decode(errors="ignore")


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother, _REPR.maxlong = 3, 80, 80, 40


def find_similar_word(word: str, known_words: list[str]) -> str | None:
    """Return the known word most similar to a misspelled word.

    The result is None if no known word is similar, or if the word is longer than MAX_WORD_LENGTH.
    """
    from difflib import get_close_matches

    if len(word) > MAX_WORD_LENGTH:
        return None
    near = get_close_matches(word, known_words, n=1, cutoff=0.6)
    return near[0] if near else None


def format_suggestion(word: str, known_words: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?" with the most similar known word, or "" if `find_similar_word` finds none."""
    near = find_similar_word(word, list(known_words))
    return f"; did you mean '{near}'?" if near else ""


def make_unknown_word_error(
    what: str,
    word: str,
    known_words: Iterable[str],
    where: str,
    expected: str = "",
    do: str | None = None,
    kind: type[RaytrecError] = ConfigError,
) -> RaytrecError:
    """Return the error for an unknown word, which suggests the most similar known word.

    Args:
        what: Clause that states the fault and the unknown word; see RaytrecError.
        word: Unknown word.
        known_words: Words that are accepted.
        where: File or configuration key that contains the word; see RaytrecError.
        expected: Description of a correct word; default: "one of" and the known words, if there are any.
        do: Advice to the user; see RaytrecError.
        kind: Class of the returned error.
    """
    known_words = list(known_words)
    expected = expected or (f"one of {', '.join(known_words)}" if known_words else "")
    return kind(what + format_suggestion(word, known_words), where=where, expected=expected, do=do)


def get_first_line(error: BaseException) -> str:
    """Return the first nonblank line of an error's text, or the name of the error's class if the text is blank."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def convert_os_errors(what: str, kind: type[RaytrecError] = RunError, **parts: str) -> Iterator[None]:
    """Convert an OSError raised in the block to a RaytrecError, which states `what` and the reason.

    Args:
        what: Start of the message; a colon and the reason are appended.
        kind: Class of the RaytrecError.
        **parts: Arguments where, expected and do of the RaytrecError.

    Raises:
        RaytrecError: The block has raised an OSError; the RaytrecError is an instance of `kind`.
    """
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: {error.strerror or get_first_line(error)}", **parts) from None


def get_last_line(text: str, otherwise: str) -> str:
    """Return the last nonblank line of a text, such as a traceback, or `otherwise` if all lines are blank."""
    return (text.strip().splitlines() or [otherwise])[-1].strip()


def get_root_cause(error: BaseException) -> BaseException:
    """Return the RaytrecError inside wrappers such as Ray's errors, or `error` if the wrappers contain none.

    Of several, the one with the fewest wrappers is returned. Wrappers store the wrapped error in `cause` (Ray's
    RayTaskError), `worker_failures` (Ray's training errors), `failures` (torch's CheckpointException), `__cause__` or
    `__context__`.
    """
    visited: set[int] = set()
    queue = [error]
    while queue:
        current = queue.pop(0)
        if id(current) in visited:
            continue
        visited.add(id(current))
        # Ray's wrapper is also an instance of the wrapped error's class.
        wrapped = isinstance(getattr(current, "cause", None), BaseException)
        if isinstance(current, RaytrecError) and not wrapped:
            return current
        inner = [getattr(current, name, None) for name in ("cause", "__cause__", "__context__")]
        for name in ("worker_failures", "failures"):
            if isinstance(failures := getattr(current, name, None), dict):
                inner += [f[0] if isinstance(f, tuple) else f for f in failures.values()]
        queue += [e for e in inner if isinstance(e, BaseException)]
    return error
