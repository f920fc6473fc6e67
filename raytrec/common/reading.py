"""Read files and text from untrusted sources. Does not import torch.

YAML and JSON files that other users may have written, such as configurations, schemas, run folders and indexes of
checkpoints, are read through this module. Pipes and devices are refused, because opening a pipe can block forever.
YAML whose nested anchors expand to many values is refused before it is expanded, as is deeply nested text.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import yaml
from yaml.composer import Composer

MAX_DOCUMENT_DEPTH = 64  # levels of nesting; files written by raytrec have fewer than 10
MAX_VALUES = 200_000  # values in a YAML file, with its anchors expanded
TEXT_OF_A_VALUE = 100  # characters; each 100 characters of a text count as an additional value
MAX_YAML_BYTES = 16 << 20
MAX_JSON_BYTES = 1 << 30  # sufficient for the index of a checkpoint of many TiB

FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
T = TypeVar("T")
# Seconds before the second, third and fourth (last) attempt to read from a store that does not respond.
RETRY_DELAYS_S = (0.2, 1.0, 3.0)


class UnreadableError(ValueError):
    """Error for text that is not valid or exceeds a limit; its message is a single line for users."""


def open_regular(path: str | Path) -> FileIO:
    """Open a local regular file for reading; refuse pipes and devices, which could block or never end.

    Raises:
        OSError: The file does not exist, cannot be read, or is not a regular file.
    """
    try:
        _check_kind(os.stat(path).st_mode, path)  # before open(), which has side effects on some devices
        file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except ValueError as error:  # a path with a null byte
        raise OSError(errno.EINVAL, str(error), repr(str(path))) from None
    try:
        _check_kind(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, max_file_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Read the content of a local regular file.

    Raises:
        OSError: The file does not exist, cannot be read, is not a regular file, or is larger than `max_file_bytes`.
    """
    with open_regular(path) as file:
        data = file.read(max_file_bytes + 1)  # the system returns fewer bytes only beyond 2 GiB
    if len(data) > max_file_bytes:
        raise OSError(errno.EFBIG, f"the file is larger than {max_file_bytes >> 20} MiB", str(path))
    return data


def read_text(path: str | Path, max_file_bytes: int = MAX_YAML_BYTES) -> str:
    """Read the text of a local regular file; bytes that are not UTF-8 are replaced by U+FFFD.

    Raises:
        OSError: As for `read_bytes`.
    """
    return read_bytes(path, max_file_bytes).decode(errors="replace")


def parse_yaml(text: str | bytes) -> Any:
    """Parse a YAML text with PyYAML's safe types; return None for an empty text.

    Raises:
        UnreadableError: The text is longer than `MAX_YAML_BYTES` (characters, if it is a str), is not UTF-8 or valid
            YAML, contains an invalid date, number or tag, repeats a key, has an anchor that contains itself, expands to
            more than `MAX_VALUES` values, or has more than `MAX_DOCUMENT_DEPTH` levels of nesting.
    """
    if len(text) > MAX_YAML_BYTES:
        raise UnreadableError(f"the text is larger than {MAX_YAML_BYTES >> 20} MiB")
    try:
        return yaml.load(text.decode() if isinstance(text, bytes) else text, _Loader)
    except UnreadableError:
        raise
    except UnicodeError as error:
        raise UnreadableError(f"the text is not UTF-8: {_format_error_line(error)}") from None
    except yaml.YAMLError as error:
        raise UnreadableError(_format_error_line(error)) from None
    except (ValueError, KeyError, OverflowError, AttributeError) as error:  # from dates, numbers and tags
        raise UnreadableError(f"the text contains an invalid value: {_format_error_line(error)}") from None


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; NaN and Infinity are accepted.

    Raises:
        UnreadableError: The text is not valid JSON, or has more than `MAX_DOCUMENT_DEPTH` levels of nesting.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise UnreadableError(f"the text exceeds {MAX_DOCUMENT_DEPTH} levels of nesting") from None
    except ValueError as error:
        raise UnreadableError(_format_error_line(error)) from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    count = sum(text.count(bracket) for bracket in brackets)  # type: ignore[arg-type, misc]
    if count > MAX_DOCUMENT_DEPTH and _is_deep(values):
        raise UnreadableError(f"the text exceeds {MAX_DOCUMENT_DEPTH} levels of nesting")
    return values


# libyaml's parser is several times as fast, but its own composer would bypass the methods of _Loader.
_LOADERS: Any = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)


class _Loader(*_LOADERS):  # type: ignore[misc]
    """PyYAML's safe loader with limits; a repeated key is an error."""

    def __init__(self, text: str):
        _LOADERS[-1].__init__(self, text)
        Composer.__init__(self)
        self._depth = 0
        self._open: set[str] = set()  # anchors of the nodes that are being composed
        self._sizes: dict[int, int] = {}  # id of a node → its number of values after expansion

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise UnreadableError(f"anchor {event.anchor} refers to itself{_format_position(event.start_mark)}")
            return super().compose_node(parent, index)
        if self._depth == MAX_DOCUMENT_DEPTH:
            raise UnreadableError(
                f"the text exceeds {MAX_DOCUMENT_DEPTH} levels of nesting{_format_position(event.start_mark)}"
            )
        if event.anchor:
            self._open.add(event.anchor)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._open.discard(event.anchor)
        self._measure(node)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, marks = super().compose_mapping_node(anchor), {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if first := marks.get((key.tag, key.value)):
                raise UnreadableError(
                    f"duplicate key '{key.value}'{_format_position(key.start_mark)}; first in line {first.line + 1}"
                )
            marks[key.tag, key.value] = key.start_mark
        return node

    def _measure(self, node: Any) -> None:
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = (part for each in inner for part in (each if isinstance(each, tuple) else (each,)))
        own_size = 1 if inner else 1 + len(node.value) // TEXT_OF_A_VALUE
        size = self._sizes[id(node)] = own_size + sum(self._sizes[id(part)] for part in parts)
        if size > MAX_VALUES:
            raise UnreadableError(
                f"the text expands to more than {MAX_VALUES:,} values{_format_position(node.start_mark)}"
            )


def _check_kind(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = FILE_KINDS.get(stat.S_IFMT(mode), "a special file")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"the path is {kind}, not a regular file", str(path))


def _is_deep(values: Any) -> bool:
    level = [values]
    for _ in range(MAX_DOCUMENT_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [each for several in inner for each in several if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _format_position(mark: Any) -> str:
    return f" (line {mark.line + 1})" if mark else ""


def _format_error_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def retry_read(uri: str, read: Callable[[], T]) -> T:
    """Call a function that reads a file, and retry after each of RETRY_DELAYS_S if it raises an OSError.

    Reading is not retried if the file is missing or a folder, or if access is denied. For a local file, an
    OSError without errno (pyarrow's error for malformed content) is not retried either. Errors of other classes are
    passed on.

    Args:
        uri: Path or URI of the file.
        read: Function that reads the file; its result is returned.

    Raises:
        OSError: The last attempt failed, or the error is not retried.
    """
    for wait in RETRY_DELAYS_S:
        try:
            return read()
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except OSError as error:
            if "://" not in uri and error.errno is None:
                raise
            time.sleep(wait)
    return read()


def storage_hint(uri: str) -> str:
    """Return the start of the `expected` of an error raised through `retry_read`; "" for a local path.

    The text asks for reachable storage, because pyarrow raises the same error for a store that does not respond and
    for malformed content.
    """
    return f"reachable storage (up to {len(RETRY_DELAYS_S) + 1} attempts are made), and " if "://" in uri else ""
