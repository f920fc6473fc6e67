"""Managed ids: rows that ids get as they appear. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from raytrec.config.base import PositiveInt

Eviction = Literal["lru", "lfu", "none"]


class ManagedIds(BaseModel):
    """Which ids get a row of a table, and which lose theirs when all are taken."""

    model_config = ConfigDict(extra="forbid")
    admit_after: PositiveInt = Field(
        1, description="An id gets a row at the step in which it has been seen so often, that step included."
    )
    eviction: Eviction = Field(
        "lru",
        description="Which ids lose their rows when all are taken: those not seen for longest (lru), those "
        "seen least often (lfu), or none: then later ids get no row. With lfu, at most a 64th of the rows "
        "changes hands at a step.",
    )
    ttl_steps: PositiveInt | None = Field(
        None,
        description="An id that was not seen for more steps than this loses its row, at the latest after an "
        "eighth more.",
    )
    fallback_rows: PositiveInt = Field(
        1,
        description="How many of the table's rows, its last ones, are for ids without their own row; "
        "a hash of the id chooses among them.",
    )


def _from_word(value: Any) -> Any:
    words: dict[str, dict | None] = {"static": None, "managed": {}}
    if isinstance(value, str) and value not in words:
        raise ValueError(f"expected static, managed, or some of {', '.join(ManagedIds.model_fields)}")
    return words[value] if isinstance(value, str) else value


# `static`, `managed`, or the keys of ManagedIds that are not as by default.
Ids = Annotated[ManagedIds | None, BeforeValidator(_from_word)]
