"""Log an export as an MLflow model in the MLflow run to which its run has been delivered."""

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
from raytrec.common.storage import join_uri, quote_for_shell, read_bytes
from raytrec.compat.mlflow_ import import_quietly, reason
from raytrec.data.arrow import list_element_type
from raytrec.driver.track import load_tracked_config
from raytrec.scoring.manifest import GOLDEN, Manifest
from raytrec.tracking.mlflow_records import DeliveryState
from raytrec.tracking.store import explain_open_error

MODEL_NAME, ARTIFACT_NAME = "model", "export"  # names of the model and of its artifact in MLflow
PACKAGE = Path(raytrec.__file__).parent
ENTRY_FILE = PACKAGE / "scoring/mlflow_entry.py"
# Packages required for scoring: raytrec's requirements and those of its extra `score`.
REQUIRED_PACKAGES = ("numpy", "pandas", "pyarrow", "pydantic", "pyyaml", "rich", "safetensors", "torch", "typer")
EXAMPLE_ROWS = 3  # maximum number of golden rows in the model's input example


@dataclass(frozen=True)
class MlflowRun:
    """MLflow run to which a raytrec run has been delivered.

    Attributes:
        uri: URI of the tracking store.
        run_id: Id of the MLflow run.
        experiment_id: Id of the MLflow experiment.
    """

    uri: str
    run_id: str
    experiment_id: str

    @classmethod
    def from_run_folder(cls, run: str | Path, allow_code: bool) -> MlflowRun:
        """Return the MLflow run to which a run folder has been delivered.

        Raises:
            RunError: The run folder does not exist, or its MLflow run does not exist in the store.
            ConfigError: The run is not tracked, its configuration is invalid or names code although `allow_code` is
                False, or the store cannot be opened.
            ImportError: MLflow is not installed.
        """
        config = load_tracked_config(run, allow_code)
        folder, uri = config.run.dir, config.tracking.uri
        import_quietly()
        from mlflow import MlflowClient

        run_id = DeliveryState.read(Path(folder)).run_id
        try:
            mlflow_run = MlflowClient(uri).get_run(run_id) if run_id else None
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise explain_open_error(uri, error) from None
            mlflow_run = None
        if mlflow_run is None:
            raise RunError(
                "the run does not exist in MLflow",
                where=f"{folder}, tracking.uri={hide(uri)}",
                expected="the MLflow run of this run folder",
                do=f"deliver the run to MLflow: raytrec track {quote_for_shell(folder)}",
            )
        return cls(uri, mlflow_run.info.run_id, mlflow_run.info.experiment_id)

    def log(self, export: str, manifest: Manifest, embed: bool) -> str:
        """Log an export as a model, and return the model's URI.

        The model contains the code that loads the export (scoring/mlflow_entry.py), raytrec itself, versioned
        requirements, a signature, and some golden rows as an example.

        Args:
            export: URI of the export.
            manifest: Manifest of the export.
            embed: True to copy the export's files into the model; False to store only the export's URI.

        Raises:
            ConfigError: The export's URI contains a secret, such as a password, and `embed` is False.
            RunError: MLflow or its store reports an error.
        """
        if not embed and hide(export) != export:
            raise ConfigError(
                "the URI of the export contains a secret, which MLflow would show",
                where=hide(export),
                expected="a URI without secrets, and credentials in the environment",
            )
        import mlflow
        from mlflow.models import Model

        try:
            requirements = [f"{name}=={version(name).partition('+')[0]}" for name in ("mlflow", *REQUIRED_PACKAGES)]
            with TemporaryDirectory() as scratch, _use_store(self.uri):
                artifact = Path(export)
                if not embed:
                    artifact = Path(scratch, "export.json")
                    about = {"uri": export, "version": manifest.version, "checksum": manifest.checksum}
                    artifact.write_text(json.dumps(about), encoding="utf-8")
                logged = mlflow.MlflowClient().create_logged_model(
                    self.experiment_id, MODEL_NAME, self.run_id, params={"version": manifest.version}
                )
                info = Model.log(
                    None,
                    mlflow.pyfunc,
                    run_id=self.run_id,
                    model_id=logged.model_id,
                    step=manifest.source.step,
                    python_model=str(ENTRY_FILE),
                    code_paths=[str(PACKAGE)],
                    artifacts={ARTIFACT_NAME: str(artifact)},
                    model_config={"allow_code": False},
                    pip_requirements=requirements,
                    **_describe_model(export, manifest),
                )
        except Exception as error:  # MLflow and its stores raise exceptions of many types
            raise RunError(
                f"the model cannot be logged in MLflow: {reason(error)}",
                where=f"tracking.uri={hide(self.uri)}",
                do="fix the cause and repeat the command; the complete export is kept",
            ) from error
        return info.model_uri


def _describe_model(export: str, manifest: Manifest) -> dict[str, Any]:
    """Return the arguments `signature` and `input_example` of Model.log, derived from the golden rows."""
    golden = pa.ipc.open_file(pa.py_buffer(read_bytes(join_uri(export, GOLDEN)))).read_all()
    scores = [task.column for task in manifest.tasks]
    example = _remove_time_zones(golden.drop_columns(scores)[:EXAMPLE_ROWS]).to_pandas()
    return {"signature": make_signature(golden, scores), "input_example": example if len(example) else None}


@contextmanager
def _use_store(uri: str) -> Iterator[None]:
    """Make MLflow's functions write to a store for the duration of the block, and restore sys.path afterwards.

    MLflow adds the folders of a model to sys.path when it tests the model.
    """
    import mlflow

    # set_tracking_uri also sets MLFLOW_TRACKING_URI, which child processes would inherit, so both are restored.
    previous_uri, path = os.environ.get("MLFLOW_TRACKING_URI"), list(sys.path)
    mlflow.set_tracking_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(previous_uri)
        sys.path[:] = path


def make_signature(golden: pa.Table, scores: Collection[str]) -> Any:
    """Return the MLflow signature of a model.

    Args:
        golden: Golden rows.
        scores: Names of the score columns in `golden`.
    """
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, Schema
    from mlflow.types.schema import AnyType

    specs = []
    for field, column in zip(golden.schema, golden.columns, strict=True):
        # MLflow does not allow nulls in integer, boolean and date columns.
        plain = types.is_integer(field.type) or types.is_boolean(field.type) or types.is_date(field.type)
        kind = AnyType() if plain and column.null_count else _to_mlflow_type(field.type)
        specs.append(ColSpec(kind, field.name, required=False))
    outputs = [each for each in specs if each.name in scores]
    return ModelSignature(Schema([each for each in specs if each.name not in scores]), Schema(outputs))


def _remove_time_zones(rows: pa.Table) -> pa.Table:
    """Return the rows with timestamps in UTC without a time zone, because MLflow does not support time zones."""
    kinds = [f.with_type(pa.timestamp(f.type.unit)) if types.is_timestamp(f.type) else f for f in rows.schema]
    return rows.cast(pa.schema(kinds))


def _to_mlflow_type(kind: pa.DataType) -> Any:
    """Return the MLflow type for an Arrow type."""
    from mlflow.types.schema import AnyType, Array, DataType

    if (inner := list_element_type(kind)) is not None:
        return Array(_to_mlflow_type(inner))
    mlflow_types = {pa.float32(): DataType.float, pa.bool_(): DataType.boolean, pa.string(): DataType.string}
    if types.is_integer(kind):
        return DataType.long
    if types.is_temporal(kind):
        return DataType.datetime
    return mlflow_types.get(kind, DataType.double if types.is_floating(kind) else AnyType())
