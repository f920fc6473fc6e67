"""Private names of MLflow (3.17, 3.18): loggers, tags that its UI reads, and unneeded packages."""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points

PARENT_RUN_TAG = "mlflow.parentRunId"
# Without this tag, MLflow's UI shows training metrics as evaluations of an agent.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
# The caller retries calls, so MLflow's client must not retry for minutes (by default 7 times, 120 s each). One
# retry is kept for connections that an idle server has closed. No text is printed, and no telemetry is sent. The
# user's settings take precedence.
CLIENT_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds without a response
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
QUIET = {  # logger → level; the caller reports outages
    "alembic": logging.WARNING,  # logs one line per migration of a new database
    "mlflow.pyfunc": logging.WARNING,  # logs lines about test predictions of a model
    "mlflow.store": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}


STORE_SCHEMES = ("", "file", "http", "https", "databricks", "databricks-uc", "uc")
# A driver may follow, as in mysql+pymysql.
DATABASE_SCHEMES = ("sqlite", "postgresql", "mysql", "mssql")
STORE_ENTRY_POINT_GROUP = "mlflow.tracking_store"  # entry points of packages that provide stores


def has_store(uri: str) -> bool:
    """Return True if MLflow or an installed plugin has a store for a URI's scheme; MLflow is not imported."""
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""
    schemes = (*STORE_SCHEMES, *(plugin.name for plugin in entry_points(group=STORE_ENTRY_POINT_GROUP)))
    return scheme in schemes or scheme.partition("+")[0] in DATABASE_SCHEMES


def is_server_failure(error: BaseException) -> bool:
    """Return True if an error is MLflow's exception for a server that returned 5xx up to the last retry.

    Before 3.18, an exception of the requests library is raised instead, which the caller checks.
    """
    from mlflow.exceptions import MlflowException, RestException

    if isinstance(error, RestException):  # the status is also 500 if the response contains no error code
        return "error_code" in error.json and error.get_http_status_code() >= 500
    return isinstance(error, MlflowException) and "failed with error code 5" in str(error)


# MLflow imports these packages if they are installed, but can write records without them, as mlflow-skinny does.
UNNEEDED_PACKAGES = ("pandas", "numpy", "scipy")


def block_unneeded_packages() -> None:
    """Make MLflow load without packages that are not needed for writing records.

    MLflow then loads in half the time and takes 50 MiB less. These packages can no longer be imported in this
    process.
    """
    sys.modules.update(dict.fromkeys(UNNEEDED_PACKAGES))  # type: ignore[arg-type]


def import_quietly() -> None:
    """Import MLflow with settings for few retries and little output.

    The import takes seconds, and does not contact a server.
    """
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    import mlflow  # noqa: F401
