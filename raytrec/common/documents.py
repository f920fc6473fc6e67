"""Our own JSON documents: written from typed objects, read back with one check and one error. No torch."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from raytrec.common.errors import RunError, first_line
from raytrec.common.reading import MOST_JSON_BYTES, NotReadable, json_values
from raytrec.common.storage import join_uri, read_bytes

T = TypeVar("T")


_adapter_of: Any = cache(TypeAdapter)


def document(value: Any) -> bytes:
    """Return a dataclass or pydantic model as JSON text; NaN becomes null."""
    return _adapter_of(type(value)).dump_json(value, indent=2, by_alias=True) + b"\n"


def typed(values: Any, kind: type[T]) -> T:
    """Return values of JSON as an object of a type.

    Args:
        values: Values of a JSON text.
        kind: Dataclass, pydantic model, TypedDict or any other type that pydantic validates.

    Raises:
        NotReadable: The values do not fit the type; the message names the first key that differs.
    """
    try:
        return _adapter_of(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part)[:80] for part in first["loc"])
        raise NotReadable(f"{place}: {first['msg']}"[:300] if place else first["msg"][:300]) from None


def find_document(uri: str, kind: type[T]) -> T | None:
    """Return a document, or None if the file does not exist or cannot be read as this type."""
    try:
        return typed(json_values(read_bytes(uri, MOST_JSON_BYTES)), kind)
    except (OSError, NotReadable):
        return None


def read_document(folder: str, name: str, kind: type[T], what: str, made_by: str, do: str | None = None) -> T:
    """Return the document that describes the content of a folder.

    Args:
        folder: Path or URI of the folder.
        name: Name of the document.
        kind: Type of the document; see `typed`.
        what: Noun for the content of the folder, such as "index".
        made_by: Command that writes the folder, such as "raytrec index".
        do: Advice for a missing document.

    Raises:
        RunError: The folder has no such document, or it cannot be read.
    """
    uri = join_uri(folder, name)
    try:
        return typed(json_values(read_bytes(uri)), kind)
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(
            f"there is no {what} here",
            where=folder,
            expected=f"a folder that `{made_by}` has filled, with its {name}",
            do=do,
        ) from None
    except (OSError, NotReadable, UnicodeError) as error:
        raise RunError(
            f"{name} of the {what} cannot be read: {first_line(error)}",
            where=uri,
            expected=f"the file as this version's `{made_by}` writes it",
            do=f"restore the file, or run `{made_by}` again",
        ) from None
