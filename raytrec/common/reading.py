"""Reads files and text that others may have written. No torch.

Every YAML or JSON that raytrec reads comes through here: configurations, schemas, run folders, indexes of
checkpoints. A file has to be a file: opening a pipe waits for ever. Text that is small and means a lot
(anchors in anchors, brackets in brackets) is refused before anything is made of it."""

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
from yaml.constructor import SafeConstructor
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import Resolver
from yaml.scanner import Scanner

MOST_DEPTH = 64  # brackets in brackets; ours have fewer than 10
MOST_VALUES = 200_000  # of a YAML file, with what its anchors stand for
TEXT_OF_A_VALUE = 100  # characters; longer text counts as several
MOST_YAML_BYTES = 16 << 20
MOST_JSON_BYTES = 1 << 30  # the index of a checkpoint of many TiB

FILE_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
T = TypeVar("T")
# Seconds before the second, third and last try to read from a store that does not answer.
WAITS_S = (0.2, 1.0, 3.0)


class NotReadable(ValueError):
    """Text that is not YAML or JSON, or that should not be parsed; its words are one line for people."""


def open_regular(path: str | Path) -> FileIO:
    """A local file, opened for reading; neither a pipe nor a device, which would wait or never end.

    Raises:
        OSError: there is none, it cannot be read, or it is something else than a file.
    """
    try:
        _check_kind(os.stat(path).st_mode, path)  # first: opening some devices does something
        file = FileIO(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC))
    except ValueError as error:  # a path with a zero byte
        raise OSError(errno.EINVAL, str(error), repr(str(path))) from None
    try:
        _check_kind(os.fstat(file.fileno()).st_mode, path)
    except OSError:
        file.close()
        raise
    return file


def read_bytes(path: str | Path, most: int = MOST_JSON_BYTES) -> bytes:
    """The content of a local file.

    Raises:
        OSError: as `open_regular`, or it has more bytes than `most`.
    """
    with open_regular(path) as file:
        data = file.read(most + 1)  # may be cut short by the system only beyond 2 GiB
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return data


def read_text(path: str | Path, most: int = MOST_YAML_BYTES) -> str:
    """The text of a local file; bytes that are not UTF-8 become a mark.

    Raises:
        OSError: as `read_bytes`.
    """
    return read_bytes(path, most).decode(errors="replace")


def yaml_values(text: str | bytes) -> Any:
    """The values of a YAML text.

    Raises:
        NotReadable: not YAML; a key that stands twice; anchors that stand for more than `MOST_VALUES`, or for
            themselves; more than `MOST_DEPTH` levels.
    """
    if len(text) > MOST_YAML_BYTES:
        raise NotReadable(f"it is larger than {MOST_YAML_BYTES >> 20} MiB")
    try:
        if isinstance(text, bytes):
            text = text.decode()
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except NotReadable:
        raise
    except UnicodeError as error:
        raise NotReadable(f"it is not UTF-8 text: {_line(error)}") from None
    except yaml.YAMLError as error:
        raise NotReadable(_line(error)) from None
    except (ValueError, KeyError, OverflowError, AttributeError) as error:  # of dates, numbers and tags
        raise NotReadable(f"it has a value that is none: {_line(error)}") from None


def json_values(text: str | bytes) -> Any:
    """The values of a JSON text.

    Raises:
        NotReadable: not JSON, or more than `MOST_DEPTH` levels.
    """
    try:
        values = json.loads(text)
    except RecursionError:
        raise NotReadable(f"it has more than {MOST_DEPTH} levels") from None
    except ValueError as error:
        raise NotReadable(_line(error)) from None
    opened = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    count = sum(text.count(each) for each in opened)  # type: ignore[arg-type, misc]
    if count > MOST_DEPTH and _is_deep(values):
        raise NotReadable(f"it has more than {MOST_DEPTH} levels")
    return values


if yaml.__with_libyaml__:  # several times as fast
    from yaml.cyaml import CParser as _Parser
else:

    class _Parser(Reader, Scanner, Parser):  # type: ignore[no-redef]
        def __init__(self, text: str):
            Reader.__init__(self, text)
            Scanner.__init__(self)
            Parser.__init__(self)


class _Loader(Composer, _Parser, SafeConstructor, Resolver):  # type: ignore[misc, valid-type]
    """PyYAML's safe loader with limits, and without a second value for a key."""

    def __init__(self, text: str):
        _Parser.__init__(self, text)
        Composer.__init__(self)
        SafeConstructor.__init__(self)
        Resolver.__init__(self)
        self._depth = 0
        self._open: set[str] = set()  # anchors of what is being composed
        self._sizes: dict[int, int] = {}  # id of a node → values that it stands for

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self._open:
                raise NotReadable(f"anchor {event.anchor} stands for itself{_at(event.start_mark)}")
            return super().compose_node(parent, index)
        if self._depth == MOST_DEPTH:
            raise NotReadable(f"it has more than {MOST_DEPTH} levels{_at(event.start_mark)}")
        if event.anchor:
            self._open.add(event.anchor)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        self._open.discard(event.anchor)
        self._measure(node)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node, seen = super().compose_mapping_node(anchor), {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if first := seen.get((key.tag, key.value)):
                raise NotReadable(
                    f"key '{key.value}' stands twice: in line {first.line + 1} and in line "
                    f"{key.start_mark.line + 1}"
                )
            seen[key.tag, key.value] = key.start_mark
        return node

    def _measure(self, node: Any) -> None:
        inner = node.value if isinstance(node, yaml.CollectionNode) else []
        parts = (part for each in inner for part in (each if isinstance(each, tuple) else (each,)))
        own = 1 if inner else 1 + len(node.value) // TEXT_OF_A_VALUE
        size = self._sizes[id(node)] = own + sum(self._sizes[id(part)] for part in parts)
        if size > MOST_VALUES:
            raise NotReadable(f"it stands for more than {MOST_VALUES:,} values{_at(node.start_mark)}")


def _check_kind(mode: int, path: str | Path) -> None:
    if not stat.S_ISREG(mode):
        kind = FILE_KINDS.get(stat.S_IFMT(mode), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"it is {kind}, and not a file", str(path))


def _is_deep(values: Any) -> bool:
    level = [values]
    for _ in range(MOST_DEPTH + 1):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        level = [each for several in inner for each in several if isinstance(each, dict | list)]
        if not level:
            return False
    return True


def _at(mark: Any) -> str:
    return f" (line {mark.line + 1})" if mark else ""


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def retry_read(uri: str, read: Callable[[], T]) -> T:
    """The result of reading a file, tried again with growing pauses where the storage fails.

    A file that is not there is so the next time, too; and pyarrow's OSErrors about local files that come
    without an errno speak of their content.

    Raises:
        OSError: of the last try.
    """
    for wait in WAITS_S:
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
    """What else is expected of a remote place: pyarrow has one error for no answer and for bad content."""
    return f"storage that answers (it was asked {len(WAITS_S) + 1} times), and " if "://" in uri else ""
