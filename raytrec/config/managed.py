"""Managed ids: a table whose rows go to ids as they come. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from raytrec.config.base import PositiveInt

Eviction = Literal["lru", "lfu", "distance_lfu", "none"]


class ManagedIds(BaseModel):
    """Who gets a row of a table, and whose row is taken when there is none left."""

    model_config = ConfigDict(extra="forbid")
    admit_after: PositiveInt = Field(
        1, description="An id gets a row at the step in which it has been seen so often, that step included."
    )
    admit_probability: float = Field(
        1.0, gt=0, le=1, description="The probability that a sighting of an id without a row gives it one."
    )
    eviction: Eviction = Field(
        "lru",
        description="Which ids lose their rows when all are taken: those that were not seen for longest, "
        "those seen least often, those with the fewest sightings for each step since the last one, or none: "
        "then ids that come later get no row. With lfu and distance_lfu, at most a 64th of the rows changes "
        "hands at a step.",
    )
    ttl_steps: PositiveInt | None = Field(
        None,
        description="An id that was not seen for more steps than this loses its row, at the latest after an "
        "eighth more.",
    )
    ttl_s: float | None = Field(
        None, gt=0, description="The same in seconds. Which ids leave then depends on how fast a run is."
    )
    fallback_rows: PositiveInt = Field(
        1,
        description="How many of the table's rows, its last ones, are for ids without a row of their own; "
        "a hash of the id chooses among them.",
    )

    @model_validator(mode="after")
    def _one_admission(self) -> ManagedIds:
        if self.admit_after > 1 and self.admit_probability < 1:
            raise ValueError("admit_after and admit_probability exclude each other")
        return self


def _from_word(value: Any) -> Any:
    words: dict[str, dict | None] = {"static": None, "managed": {}}
    if isinstance(value, str) and value not in words:
        raise ValueError(f"expected static, managed, or some of {', '.join(ManagedIds.model_fields)}")
    return words[value] if isinstance(value, str) else value


# `static`, `managed`, or the keys of ManagedIds that are not as by default.
Ids = Annotated[ManagedIds | None, BeforeValidator(_from_word)]
