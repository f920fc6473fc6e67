"""Classify and describe the errors of MLflow stores."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from raytrec.common.redaction import hide
from raytrec.compat.mlflow_ import is_server_failure

TRANSIENT_SQLITE_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
TRANSIENT_HTTP_CODES = (401, 403, 408, 409, 429, 499)  # 4xx status codes that do not depend on the request's content


def is_transient(error: BaseException) -> bool:
    """Return True if the call may succeed later, because the store is unreachable, locked or failing.

    All other errors are permanent, e.g. because the store rejects the record or a file is missing.
    """
    if _is_unavailable(error):
        return True
    if (status := _get_http_status(error)) is not None:
        return status >= 500 or status in TRANSIENT_HTTP_CODES
    return isinstance(error, OSError) and not isinstance(
        error, (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
    )


def is_unreachable(error: BaseException) -> bool:
    """Return True if the store does not respond; False if its address is invalid or it refuses access.

    Use this function only for errors of the first call to a store.
    """
    from requests.exceptions import SSLError

    return _is_unavailable(error) and not any(isinstance(cause, SSLError) for cause in _iterate_causes(error))


def is_access_denied(error: BaseException) -> bool:
    """Return True if the store requires other credentials."""
    return _get_http_status(error) in (401, 403)


def reason(error: BaseException) -> str:
    """Return the first line of the innermost nonempty error text, at most 200 characters, without secrets."""
    messages = [str(cause).strip() for cause in _iterate_causes(error)]
    text = next((message for message in reversed(messages) if message), type(error).__name__)
    return hide(text.splitlines()[0])[:200]


def _is_unavailable(error: BaseException) -> bool:
    """Return True if the server gives no valid response or the database is unavailable.

    The cases are: no connection, a timeout, only 5xx responses, or a database that is locked, down or out of
    disk space.
    """
    from requests.exceptions import ConnectionError, RetryError, Timeout
    from sqlalchemy.exc import OperationalError

    kinds = (ConnectionError, RetryError, Timeout, OperationalError)
    return is_server_failure(error) or any(
        isinstance(cause, kinds) or _get_sqlite_code(cause) in TRANSIENT_SQLITE_CODES
        for cause in _iterate_causes(error)
    )


def _get_sqlite_code(error: BaseException) -> int | None:
    """Return SQLite's primary result code; None for other errors."""
    code = getattr(error, "sqlite_errorcode", None) if isinstance(error, sqlite3.Error) else None
    return None if code is None else code & 0xFF


def _get_http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an MLflow or upload error; None for other errors."""
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
