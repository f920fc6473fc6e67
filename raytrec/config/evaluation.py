"""The section `eval`: how evaluations compute their metrics."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from raytrec.config.base import PositiveInt, Section


class EvalSection(Section):
    slices: list[str] = Field(
        default_factory=list,
        max_length=20,
        description="Columns of data.carry with few values, such as country: of the largest and of the worst "
        "of them, rows, AUC and calibration of each task are reported.",
    )
    slices_shown: Annotated[PositiveInt, Field(le=1000)] = Field(
        10, description="How many of the largest, and of the worst, are reported."
    )
    exact_rows: PositiveInt = Field(
        2_000_000,
        description="Rows of an evaluation that a worker keeps in memory for metrics of an order or of "
        "groups. Beyond, areas under curves come from bins, with a bound on their error, and rows of groups "
        "go to temporary files.",
    )
    window_steps: Annotated[PositiveInt, Field(le=10_000)] | None = Field(
        None,
        description="Metrics of training are over the last so many steps; default: since the last report.",
    )
