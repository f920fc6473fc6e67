"""What every part of a configuration has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the configuration; unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, validate_default=True)
