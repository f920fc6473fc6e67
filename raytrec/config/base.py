"""What every part of a configuration has in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Union

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from raytrec.common.errors import RaytrecError
from raytrec.common.reading import NotReadable
from raytrec.common.redaction import hide_all
from raytrec.common.registry import PYTHON_PATH
from raytrec.common.storage import read_yaml

MOST_COUNT = 2**53  # beyond, numbers in JSON are no longer what they were
MOST_AMOUNT = 1e9  # seconds that a thread can wait; GiB, rates and norms are below it as well


def _no_switch(value: Any) -> Any:
    """YAML's true and false, which Python takes for 1 and 0."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number (got {str(value).lower()})")
    return value


# Whole numbers are whole: neither true nor "3" nor 3.0. (1e-3 is text to YAML 1.1, and a number to us.)
PositiveInt = Annotated[int, Field(strict=True, gt=0, le=MOST_COUNT)]
NonNegativeInt = Annotated[int, Field(strict=True, ge=0, le=MOST_COUNT)]
Few = Annotated[int, Field(strict=True, gt=0, le=2**16)]  # of what each takes memory, or a process
Number = Annotated[float, BeforeValidator(_no_switch)]
PositiveFloat = Annotated[Number, Field(gt=0, le=MOST_AMOUNT)]
NonNegativeFloat = Annotated[Number, Field(ge=0, le=MOST_AMOUNT)]


class Mark(Enum):
    """A mark in the Annotated type of a key or of a section, whose keys then have it, too.

    Attributes:
        FREE: A resumed run may change it, because it does not change what is trained.
        FIXED: A resumed run must not change it; of keys in a section that is FREE.
        COMMON: All trials of a search have the same value, so that their figures can be compared and their
            files are apart.
    """

    FREE = "free"
    FIXED = "fixed"
    COMMON = "common"


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors, and numbers that are not finite.

    The docstring under a key is its description in `raytrec config --schema`.
    """

    model_config = ConfigDict(
        extra="forbid", populate_by_name=True, validate_default=True, allow_inf_nan=False
    )

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """What reaches logs, tracebacks and Ray's dashboard: without secrets."""
        for name, value in super().__repr_args__():
            yield name, hide_all({name: value})[name]


def one_of(sections: Mapping[str, type[Section]], key: str, own: str, what: str, default: str = "") -> Any:
    """Return the type of a section that is one of several, by the value of one of its keys.

    Args:
        sections: Value of the key → section.
        key: The key, such as name.
        own: Entry of `sections` for code of the user's, whose value of the key is a path such as
            module:Class.
        what: Type of pydantic's error.
        default: Value of the key in a mapping without it.
    """
    built_in = [name for name in sections if name != own]

    def kind_of(value: Any) -> str | None:
        kind = value.get(key, default) if isinstance(value, dict) else getattr(value, key, None)
        if isinstance(kind, str) and kind in built_in:
            return kind
        return own if PYTHON_PATH.fullmatch(str(kind)) else None

    members = tuple(Annotated[section, Tag(name)] for name, section in sections.items())
    message = f"{key} is one of {', '.join(built_in)}, or {own}"
    choice = Discriminator(kind_of, custom_error_type=what, custom_error_message=message)
    return Annotated[Union[members], choice]  # noqa: UP007


def read_settings(uri: str, what: str, missing: RaytrecError) -> Any:
    """Return the values of a YAML file of settings.

    Args:
        uri: Path or URI of the file.
        what: Kind of file, for errors: config.
        missing: Error if there is no such file; other errors have its type.

    Raises:
        RaytrecError: The file cannot be read, or is not YAML.
    """
    try:
        return read_yaml(uri)
    except NotReadable as error:
        raise type(missing)(f"not YAML that can be used: {error}", where=uri) from None
    except (FileNotFoundError, NotADirectoryError):
        raise missing from None
    except OSError as error:
        raise type(missing)(f"cannot read the {what}: {error.strerror or error}", where=uri) from None
