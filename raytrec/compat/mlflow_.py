"""MLflow (3.17, 3.18): private names, such as loggers and tags that its UI reads, and the errors of its stores."""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points

from raytrec.common.redaction import hide

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
    """Return True for a local path, or if MLflow or a plugin has a store for the URI's scheme. Do not import MLflow."""
    scheme = uri.partition("://")[0].lower() if "://" in uri else ""
    schemes = (*STORE_SCHEMES, *(plugin.name for plugin in entry_points(group=STORE_ENTRY_POINT_GROUP)))
    return scheme in schemes or scheme.partition("+")[0] in DATABASE_SCHEMES


# MLflow imports these packages if they are installed, but can write records without them, as mlflow-skinny does.
UNNEEDED_PACKAGES = ("pandas", "numpy", "scipy")


def block_unneeded_packages() -> None:
    """Make MLflow load without packages that are not needed for writing records; call this before importing MLflow.

    MLflow then loads in half the time and takes 50 MiB less. The imports of UNNEEDED_PACKAGES raise an ImportError for
    the rest of this process.
    """
    sys.modules.update(dict.fromkeys(UNNEEDED_PACKAGES))  # type: ignore[arg-type]


def import_quietly() -> None:
    """Import MLflow with few retries and little output.

    The function sets the variables of CLIENT_ENVIRONMENT that are not set, and the levels of the loggers in QUIET. The
    import takes seconds, and does not contact a server.

    Raises:
        ImportError: MLflow is not installed.
    """
    for name, value in CLIENT_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, level in QUIET.items():
        logging.getLogger(name).setLevel(level)
    import mlflow  # noqa: F401


TRANSIENT_SQLITE_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
TRANSIENT_HTTP_CODES = (401, 403, 408, 409, 429, 499)  # 4xx status codes that do not depend on the request's content


def is_transient(error: BaseException) -> bool:
    """Return True if an MLflow call that raised this error may succeed when it is repeated.

    Errors are transient if the store is unreachable, its database is unavailable, locked or out of space, or the
    error's `get_http_status` is 5xx or one of TRANSIENT_HTTP_CODES. An OSError without a status is also transient,
    unless it reports a missing file, denied access or a wrong type of file. All other errors are permanent, e.g.
    because the store rejects the record.
    """
    if _is_unavailable(error):
        return True
    if (status := get_http_status(error)) is not None:
        return status >= 500 or status in TRANSIENT_HTTP_CODES
    return isinstance(error, OSError) and not isinstance(
        error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    )


def is_unreachable(error: BaseException) -> bool:
    """Return True if an error of the first call to a store means that the store is unavailable.

    The result is False for other errors, such as a malformed address, denied access or an untrusted certificate.
    """
    from requests.exceptions import SSLError

    return _is_unavailable(error) and not any(isinstance(cause, SSLError) for cause in _iterate_causes(error))


def reason(error: BaseException) -> str:
    """Return the first line of the innermost cause that has a text, at most 200 characters, without secrets.

    If no cause has a text, the result is the name of the error's class.
    """
    messages = [str(cause).strip() for cause in _iterate_causes(error)]
    text = next((message for message in reversed(messages) if message), type(error).__name__)
    return hide(text.splitlines()[0])[:200]


def _is_unavailable(error: BaseException) -> bool:
    """Return True if an error means that the server gives no valid response or the database is unavailable.

    The cases are: no connection, a timeout, only 5xx responses, or a database that is locked, down or out of
    disk space.
    """
    from requests.exceptions import ConnectionError, RetryError, Timeout
    from sqlalchemy.exc import OperationalError

    kinds = (ConnectionError, RetryError, Timeout, OperationalError)
    return _is_server_failure(error) or any(
        isinstance(cause, kinds) or getattr(cause, "sqlite_errorcode", 0) & 0xFF in TRANSIENT_SQLITE_CODES
        for cause in _iterate_causes(error)
    )


def get_http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of an upload or of MLflow, or None for other errors.

    MLflow also assigns a status to errors without a server, by default 500.
    """
    from mlflow.exceptions import MlflowException
    from requests.exceptions import HTTPError

    if isinstance(error, MlflowException):
        return error.get_http_status_code()
    if isinstance(error, HTTPError) and error.response is not None:
        return error.response.status_code
    return None


def _iterate_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and then its causes in the order of the chain."""
    visited: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in visited:
        visited.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _is_server_failure(error: BaseException) -> bool:
    """Return True if an error is MLflow's exception for a server that returned 5xx up to the last retry.

    Before 3.18, an exception of the requests library is raised instead, which the caller checks.
    """
    from mlflow.exceptions import MlflowException, RestException

    if isinstance(error, RestException):  # the status is also 500 if the response contains no error code
        return "error_code" in error.json and error.get_http_status_code() >= 500
    return isinstance(error, MlflowException) and "failed with error code 5" in str(error)
