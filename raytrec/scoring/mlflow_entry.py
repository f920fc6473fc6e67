"""Code that MLflow runs to load an exported model.

The artifact `export` is the export's folder, or a JSON file that refers to an export by uri, version and
checksum.
"""

import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
from mlflow.models import set_model
from mlflow.pyfunc import PythonModel

import raytrec


class ExportedModel(PythonModel):
    """MLflow model that maps a DataFrame of rows to a DataFrame of their predictions."""

    def load_context(self, context):
        """Load the export.

        Raises:
            RaytrecError: The export cannot be loaded (see `raytrec.load`), or differs from the logged export.
        """
        place, allow_code = Path(context.artifacts["export"]), bool(context.model_config.get("allow_code"))
        logged = None if place.is_dir() else json.loads(place.read_text(encoding="utf-8"))
        self._model = raytrec.load(logged["uri"] if logged else place, allow_code=allow_code)
        manifest = self._model.manifest
        if logged and manifest.checksum != logged["checksum"]:
            raise raytrec.RaytrecError(
                f"the export differs from the logged export: it has version {manifest.version}",
                where=logged["uri"],
                expected=f"version {logged['version']}",
                do="restore the logged export, or log this one with `raytrec export RUN --out URI --mlflow`",
            )

    def predict(self, context, model_input: pd.DataFrame, params=None):
        """Return the predictions of rows in a column score or, with several tasks, a column score_TASK per task.

        Additional columns are ignored. Times must be in UTC, because MLflow does not support time zones.

        Raises:
            DataError, ArrowException: A column or value is missing or invalid.
        """
        columns = pa.schema([field for field in self._model.columns if field.name in model_input.columns])
        rows = pa.Table.from_pandas(model_input, columns, preserve_index=False)
        return self._model.predict(rows).to_pandas()


set_model(ExportedModel())
