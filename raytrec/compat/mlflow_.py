"""Private names of MLflow (3.17, 3.18): loggers, tags read by its pages, and unneeded packages."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points

PARENT_RUN_TAG = "mlflow.parentRunId"
# Without this tag, MLflow's pages show training metrics as evaluations of an agent.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
# The caller retries by itself, so MLflow's client must not retry for minutes (by default 7 times with 120 s
# each). One retry is kept for connections that an idle server has closed. Nothing is printed, and no
# telemetry is sent. Settings of the user take precedence.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds without an answer
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
QUIET = {  # the caller reports outages itself
    "alembic": logging.WARNING,  # one line per migration of a new database
    "mlflow.pyfunc": logging.WARNING,  # lines about trying a model
    "mlflow.store": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}


STORE_SCHEMES = ("", "file", "http", "https", "databricks", "databricks-uc", "uc")
# Optionally with a driver, such as mysql+pymysql.
DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
STORE_ENTRY_POINT_GROUP = "mlflow.tracking_store"  # entry points of packages that provide stores


def has_store(uri: str) -> bool:
    """Return True if MLflow or an installed plugin has a store for a URI's scheme; MLflow is not imported."""
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""
    schemes = (*STORE_SCHEMES, *(plugin.name for plugin in entry_points(group=STORE_ENTRY_POINT_GROUP)))
    return scheme in schemes or scheme.partition("+")[0] in DATABASE_SCHEMES


def is_server_failure(error: BaseException) -> bool:
    """Return True if a server answered 5xx until the last retry and MLflow raised its own exception.

    Before 3.18, MLflow passes on an exception of requests instead, which the caller checks.
    """
    from mlflow.exceptions import MlflowException, RestException

    if isinstance(error, RestException):  # the status is also 500 if the answer has no error code
        return "error_code" in error.json and error.get_http_status_code() >= 500
    return isinstance(error, MlflowException) and "failed with error code 5" in str(error)


# MLflow imports these packages if installed, but writes records without them, as its skinny edition does.
UNNEEDED_PACKAGES = ("pandas", "numpy", "scipy")


def block_unneeded_packages() -> None:
    """Load MLflow without packages that are not needed to write records: 50 MiB less, in half the time.

    Afterwards these packages cannot be imported in this process.
    """
    sys.modules.update(dict.fromkeys(UNNEEDED_PACKAGES))  # type: ignore[arg-type]


def import_quietly() -> None:
    """Import MLflow with few retries and little output; the import takes seconds and makes no calls."""
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    import mlflow  # noqa: F401
