"""An export as a model of the run's MLflow run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from pyarrow import types

import raytrec
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.redaction import hide
from raytrec.common.storage import in_shell, join_uri, read_bytes
from raytrec.data.arrow import list_element
from raytrec.driver.track import tracked_config
from raytrec.scoring.manifest import GOLDEN, Manifest
from raytrec.tracking.delivery import LOG_IN
from raytrec.tracking.failures import closed_to_us, reason
from raytrec.tracking.feed import Delivered
from raytrec.tracking.store import CORRECT, cannot_open

MODEL, ARTIFACT = "model", "export"  # their names in MLflow
PACKAGE = Path(raytrec.__file__).parent
ENTRY = PACKAGE / "scoring/mlflow_entry.py"
# What scores: raytrec's own requirements and those of its extra `score`.
REQUIRED = ("numpy", "pandas", "pyarrow", "pydantic", "pyyaml", "rich", "safetensors", "torch", "typer")
EXAMPLE_ROWS = 3


@dataclass(frozen=True)
class MlflowRun:
    """The MLflow run of a run.

    Attributes:
        uri: of the store.
    """

    uri: str
    run_id: str
    experiment_id: str

    @classmethod
    def of(cls, run: str | Path, allow_code: bool) -> MlflowRun:
        """That of a run folder.

        Raises:
            RunError: no run there, or its store has no such run. ConfigError: it is not tracked, or the store
                cannot be opened.
        """
        from raytrec.compat.mlflow_ import load_quietly

        config = tracked_config(run, allow_code)
        folder, uri = config.run.dir, config.tracking.uri
        load_quietly()
        from mlflow import MlflowClient

        run_id = Delivered.read(Path(folder)).run_id
        try:
            found = MlflowClient(uri).get_run(run_id) if run_id else None
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise cannot_open(uri, reason(error), LOG_IN if closed_to_us(error) else CORRECT) from None
            found = None
        if found is None:
            raise RunError(
                "MLflow does not have this run",
                where=f"{folder}, tracking.uri={hide(uri)}",
                expected="the run that it was tracked as",
                do=f"deliver it: raytrec track {in_shell(folder)}",
            )
        return cls(uri, found.info.run_id, found.info.experiment_id)

    def log(self, export: str, manifest: Manifest, embed: bool) -> str:
        """Logs an export as a model: code that loads it (scoring/mlflow_entry.py), raytrec itself,
        requirements with their versions, signature, and as example some of its golden rows.

        Args:
            export: its URI.
            embed: its files are copied into the model; else the model refers to it.

        Returns:
            The model's URI.

        Raises:
            ConfigError: the export's URI has a password. RunError: the store does not take the model.
        """
        if not embed and hide(export) != export:
            raise ConfigError(
                "the export's address has a password, which MLflow would show",
                where=hide(export),
                expected="an address without, and credentials from the environment",
            )
        import mlflow
        from mlflow.models import Model

        try:
            with TemporaryDirectory() as scratch, _store(self.uri):
                artifact = Path(export)
                if not embed:
                    artifact = Path(scratch, "export.json")
                    about = {"uri": export, "version": manifest.version, "checksum": manifest.checksum}
                    artifact.write_text(json.dumps(about))
                made = mlflow.MlflowClient().create_logged_model(
                    self.experiment_id, MODEL, self.run_id, params={"version": manifest.version}
                )
                info = Model.log(
                    None,
                    mlflow.pyfunc,
                    run_id=self.run_id,
                    model_id=made.model_id,
                    step=manifest.source.step,
                    python_model=str(ENTRY),
                    code_paths=[str(PACKAGE)],
                    artifacts={ARTIFACT: str(artifact)},
                    model_config={"allow_code": False},
                    pip_requirements=requirements(),
                    **_described(export, manifest),
                )
        except Exception as error:  # also those of its stores
            raise RunError(
                f"MLflow does not take the model: {reason(error)}",
                where=f"tracking.uri={hide(self.uri)}",
                do="mend that, and give the same command again: the export is complete",
            ) from error
        return info.model_uri


def _described(export: str, manifest: Manifest) -> dict[str, Any]:
    """Signature and example of a model, of the golden rows and their scores."""
    golden = pa.ipc.open_file(pa.py_buffer(read_bytes(join_uri(export, GOLDEN)))).read_all()
    scores = [task.column for task in manifest.tasks]
    example = _without_zones(golden.drop_columns(scores)[:EXAMPLE_ROWS]).to_pandas()
    return {"signature": signature_of(golden, scores), "input_example": example if len(example) else None}


@contextmanager
def _store(uri: str) -> Iterator[None]:
    """MLflow's own functions write to a store while the block runs; sys.path stays as it is, to which MLflow
    adds the folders of a model that it tries."""
    import mlflow

    # set_tracking_uri sets the variable, too, which processes that are started later would inherit.
    before, path = os.environ.get("MLFLOW_TRACKING_URI"), list(sys.path)
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(before)
        sys.path[:] = path


def requirements() -> list[str]:
    """What the model needs, at the versions that are installed, as pip knows them."""
    return [f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", *REQUIRED)]


def signature_of(golden: pa.Table, scores: Collection[str]) -> Any:
    """MLflow's signature of a model.

    Args:
        golden: golden rows. scores: those of their columns that the model gives.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    given = []
    for field, column in zip(golden.schema, golden.columns, strict=True):
        # MLflow takes no null for a whole number, a truth value or a date.
        plain = types.is_integer(field.type) or types.is_boolean(field.type) or types.is_date(field.type)
        kind = AnyType() if plain and column.null_count else _kind(field.type)
        given.append(ColSpec(kind, field.name, required=False))
    outputs = [each for each in given if each.name in scores]
    return ModelSignature(Schema([each for each in given if each.name not in scores]), Schema(outputs))


def _without_zones(rows: pa.Table) -> pa.Table:
    """Rows whose times have no time zones, as MLflow wants them: those are UTC."""
    kinds = [f.with_type(pa.timestamp(f.type.unit)) if types.is_timestamp(f.type) else f for f in rows.schema]
    return rows.cast(pa.schema(kinds))


def _kind(kind: pa.DataType) -> Any:
    """A column's type as MLflow has it."""
    from mlflow.types.schema import AnyType, Array, DataType

    if (inner := list_element(kind)) is not None:
        return Array(_kind(inner))
    known = {pa.float32(): DataType.float, pa.bool_(): DataType.boolean, pa.string(): DataType.string}
    if types.is_integer(kind):
        return DataType.long
    if types.is_temporal(kind):
        return DataType.datetime
    return known.get(kind, DataType.double if types.is_floating(kind) else AnyType())
