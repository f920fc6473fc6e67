"""Private names of MLflow (3.17, 3.18).

Loggers, tags that its pages read, packages that it does not need.
"""

from __future__ import annotations

import logging
import os
import sys
from importlib.metadata import entry_points

PARENT_RUN = "mlflow.parentRunId"
# Else MLflow's pages show what training has measured as evaluations of an agent.
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
# The caller tries again by itself, so MLflow's client need not for minutes (by default 7 times, 120 s each).
# One more try is for connections that an idle server has closed. Nothing is printed, nothing is sent to
# MLflow's makers. Settings of the user stay.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",  # seconds without an answer
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
QUIET = {  # the caller reports an outage
    "alembic": logging.WARNING,  # the migrations of a new database, line by line
    "mlflow.pyfunc": logging.WARNING,  # that it tries a model
    "mlflow.store": logging.WARNING,
    "mlflow.store.db.utils": logging.CRITICAL,
    "urllib3.connectionpool": logging.ERROR,
}


SCHEMES = ("", "file", "http", "https", "databricks", "databricks-uc", "uc")
DATABASES = ("sqlite", "postgresql", "mysql", "mssql")  # with the name of a driver, such as mysql+pymysql
PLUGINS = "mlflow.tracking_store"  # entry points of packages that bring stores


def has_store(uri: str) -> bool:
    """Whether MLflow, or a plugin that is installed, has stores of such addresses; without importing it."""
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""
    known = (*SCHEMES, *(plugin.name for plugin in entry_points(group=PLUGINS)))
    return scheme in known or scheme.partition("+")[0] in DATABASES


def server_failed(error: BaseException) -> bool:
    """Whether a server has answered 5xx to the end: since 3.18 MLflow's exception, before requests'."""
    from mlflow.exceptions import MlflowException, RestException

    if isinstance(error, RestException):  # its status is 500, too, where the answer has no code
        return "error_code" in error.json and error.get_http_status_code() >= 500
    return isinstance(error, MlflowException) and "failed with error code 5" in str(error)


# MLflow imports these where they are installed, and writes records without them, as its skinny edition does.
DISPENSABLE = ("pandas", "numpy", "scipy")


def leave_out_dispensable() -> None:
    """Has MLflow load without packages that writing records does not need: 50 MiB less, in half the time.

    Afterwards they cannot be imported in this process.
    """
    sys.modules.update(dict.fromkeys(DISPENSABLE))  # type: ignore[arg-type]


def load_quietly() -> None:
    """Imports MLflow, which takes seconds and makes no call; without its retries and its output."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    import mlflow  # noqa: F401
