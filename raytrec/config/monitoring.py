"""The sections `tracking` and `checks`: what is recorded, and what is verified while training."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from raytrec.common.registry import PYTHON_PATH
from raytrec.config.base import PositiveInt, Section


class TrackingSection(Section):
    enabled: bool = Field(
        True,
        description="Record the run in MLflow. false: only in the run folder, which has everything in any "
        "case.",
    )
    uri: str | None = Field(
        None,
        description="MLflow store or server; default: MLFLOW_TRACKING_URI of the driver's environment, else "
        "mlflow.db (sqlite) next to the run folder.",
    )
    experiment: str = Field("raytrec", description="MLflow experiment.")
    parent_run: str | None = Field(
        None,
        description="Name of the parent run in MLflow, such as a sweep, of which this run becomes a child.",
    )
    tags: dict[str, str] = Field(default_factory=dict, description="Further tags of the MLflow run.")
    every_steps: PositiveInt | None = Field(
        100,
        description="Record statistics of tables, phase times and load of every rank this often, and at "
        "the end; null: never.",
    )
    report: bool = Field(True, description="Write figures and report.html at the end of the run.")


# YAML reads a plain `off` as false.
Reaction = Annotated[
    Literal["off", "warn", "stop"], BeforeValidator(lambda value: "off" if value is False else value)
]
ModuleName = Annotated[str, Field(pattern=f"^{PYTHON_PATH.pattern}$")]


class ChecksSection(Section):
    """Live checks while training, and what a failure does."""

    every_steps: PositiveInt | None = Field(
        500, description="Check every this many steps, in addition to the start; null: only at the start."
    )
    at_checkpoints: bool = Field(True, description="Also check before each checkpoint.")
    same_environment: Reaction = Field(
        "stop", description="Configuration, schema, code and libraries are the same on all ranks."
    )
    shards: Reaction = Field("stop", description="Shards cover every row of every table once.")
    replicas: Reaction = Field(
        "stop", description="Dense layers, data-parallel tables and their state are equal on all ranks."
    )
    parity: Reaction = Field(
        "stop", description="Pooled embeddings and gradients of a live batch are those of one process."
    )
    conservation: Reaction = Field(
        "stop", description="No id and no row is lost between ranks; all ranks are at the same step."
    )
    managed_ids: Reaction = Field(
        "stop", description="Managed ids and their rows are one to one over all ranks."
    )
    finite: Reaction = Field(
        "stop",
        description="No weight and no optimizer state is NaN or infinite. Whatever is set here, such a state "
        "is never saved.",
    )
    numerics: Reaction = Field(
        "warn", description="No NaN or infinite gradient, no exploding norm, no drift of calibration."
    )
    custom: dict[ModuleName, Reaction] = Field(
        default_factory=dict, description="Checks of your own: module:Class to off, warn or stop."
    )
