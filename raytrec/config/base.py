"""Base class, number types and marks of configuration sections, and the JSON Schema of a configuration."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache
from inspect import getsource
from itertools import pairwise
from typing import Annotated, Any, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticKnownError

from raytrec.common.errors import RaytrecError
from raytrec.common.reading import UnreadableError
from raytrec.common.redaction import hide_all
from raytrec.common.registry import PYTHON_PATH
from raytrec.common.storage import read_yaml

MAX_COUNT = 2**53  # larger integers lose precision in JSON
MAX_AMOUNT = 1e9  # largest float setting (seconds, GiB, rates, norms); a thread can still wait this many seconds


def reword_message(message: str) -> str:
    """Return a message of pydantic in which mappings are not called dictionaries or instances of classes."""
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping of keys", message)


def _reject_bool(value: Any) -> Any:
    """Raise pydantic's error for YAML's true and false, which it would accept as 1 and 0; return other values."""
    if isinstance(value, bool):
        raise PydanticKnownError("float_type")
    return value


# Strict integers reject true, "3" and 3.0. Floats accept 1e-3, which YAML 1.1 reads as text.
PositiveInt = Annotated[int, Field(strict=True, gt=0, le=MAX_COUNT)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0, le=MAX_COUNT)]
SmallCount = Annotated[int, Field(strict=True, gt=0, le=2**16)]  # counts of objects that each take memory or a process
Number = Annotated[float, BeforeValidator(_reject_bool)]
PositiveFloat = Annotated[Number, Field(gt=0, le=MAX_AMOUNT)]
NonNegativeFloat = Annotated[Number, Field(ge=0, le=MAX_AMOUNT)]


class Mark(Enum):
    """Mark in the Annotated type of a configuration key or section. The keys of a section inherit its marks.

    Attributes:
        FREE: A resumed run may change the key, because the key does not affect the trained model.
        FIXED: A resumed run must not change the key, although its section is FREE.
        COMMON: A hyperparameter search must not vary the key, so that the metrics of the trials are comparable
            and each trial writes separate files.
    """

    FREE = "free"
    FIXED = "fixed"
    COMMON = "common"


class Section(BaseModel):
    """Base class of the configuration's sections. Unknown keys and non-finite numbers are errors.

    The docstring under a key is its description in `raytrec config --schema`.
    """

    model_config = ConfigDict(extra="forbid", populate_by_name=True, validate_default=True, allow_inf_nan=False)

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield (name, value) of each field with secrets hidden, because reprs reach logs and Ray's dashboard."""
        for name, value in super().__repr_args__():
            yield name, hide_all({name: value})[name]


def build_section_union(
    sections: Mapping[str, type[Section]], key: str, user_code_key: str, error_type_name: str, default: str = ""
) -> Any:
    """Return a type for pydantic: the union of several sections, of which the value of one key selects one.

    Args:
        sections: Value of the key → section class.
        key: Name of the discriminating key, such as "name".
        user_code_key: Key of `sections` for user-defined code, which is selected by a path such as module:Class.
        error_type_name: Type of the pydantic error for an unknown value.
        default: Value of the key that is assumed for a mapping without the key.
    """
    built_in = [name for name in sections if name != user_code_key]

    def get_tag(value: Any) -> str | None:
        kind = value.get(key, default) if isinstance(value, dict) else getattr(value, key, None)
        if isinstance(kind, str) and kind in built_in:
            return kind
        return user_code_key if PYTHON_PATH.fullmatch(str(kind)) else None

    members = tuple(Annotated[section, Tag(name)] for name, section in sections.items())
    message = f"expected a mapping with {{key}} set to one of {{names}}, or {user_code_key}"
    texts: Any = {"custom_error_message": message, "custom_error_context": {"key": key, "names": ", ".join(built_in)}}
    choice = Discriminator(get_tag, custom_error_type=error_type_name, **texts)
    return Annotated[Union[members], choice]  # noqa: UP007


def read_settings(uri: str, what: str, missing: RaytrecError) -> Any:
    """Read a YAML settings file and return its content.

    Args:
        uri: Path or URI of the file.
        what: Kind of the file, named in errors, such as "config".
        missing: Error to raise if the file does not exist; other errors are of the same type.

    Raises:
        RaytrecError: The file does not exist, cannot be read, or is not YAML. The error has the type of `missing`.
        DataError: The URI is invalid, or its store cannot be reached.
    """
    try:
        return read_yaml(uri)
    except UnreadableError as error:
        raise type(missing)(f"cannot parse the YAML: {error}", where=uri) from None
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    except OSError as error:
        raise type(missing)(f"cannot read the {what}: {error.strerror or error}", where=uri) from None


def build_json_schema(config: type[Section]) -> dict[str, Any]:
    """Return the JSON Schema of a configuration, with the docstring below each key as the key's description.

    Editors use the schema to complete and check configuration files. Pydantic's use_attribute_docstrings is not used,
    because it would parse the docstrings in every process that imports these modules (0.1 s).
    """
    schema = config.model_json_schema(by_alias=True)
    parts = {**schema["$defs"], config.__name__: schema}
    for section in _iterate_subclasses(Section):
        properties = parts.get(section.__name__, {}).get("properties", {})
        for base in reversed(section.__mro__):
            for name, text in _parse_docstrings(base.__module__).get(base.__name__, {}).items():
                if key := properties.get(section.model_fields[name].alias or name):
                    key["description"] = text
        if do := properties.get("do", {}).get("const"):
            properties["do"].setdefault("description", do)
    return schema


def _iterate_subclasses(section: type[Section]) -> Iterator[type[Section]]:
    for each in section.__subclasses__():
        yield each
        yield from _iterate_subclasses(each)


@cache
def _parse_docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return class → key → one-line docstring below the key, for a module of this package; {} for other modules."""
    docstrings: dict[str, dict[str, str]] = {}
    if not module.startswith(__package__):
        return docstrings
    tree = ast.parse(getsource(sys.modules[module]))
    for section in (part for part in tree.body if isinstance(part, ast.ClassDef)):
        for key, text in pairwise(section.body):
            match key, text:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    docstrings.setdefault(section.name, {})[name] = " ".join(words.split())
    return docstrings
