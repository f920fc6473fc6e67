"""Exports of a process: the current, next and previous one, and where others may be."""

from __future__ import annotations

import gc
import logging
import os
from copy import copy
from threading import Lock
from typing import NamedTuple
from urllib.parse import unquote

from raytrec.common.errors import RaytrecError, RunError
from raytrec.common.storage import absolute, chooses_server, open_filesystem
from raytrec.scoring.load import load
from raytrec.scoring.manifest import read_manifest
from raytrec.scoring.scorer import Scorer
from raytrec.serving.bodies import Refused
from raytrec.serving.coordinator import Export, Order, Report

_log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """An export in memory."""

    uri: str
    scorer: Scorer


class Versions:
    """Changes which export answers. A request keeps the one that it began with.

    Args:
        uri: of the first.

    Attributes:
        current: answers. previous: answered before; None: there was none.
    """

    def __init__(self, uri: str, allow_code: bool = False):
        self._allow_code, self._lock = allow_code, Lock()
        self.current = self._load(uri)
        self.previous: Loaded | None = None
        self._prepared: Loaded | None = None

    def _load(self, uri: str) -> Loaded:
        return Loaded(uri, load(uri, check_tables=True, allow_code=self._allow_code))

    @property
    def version(self) -> str:
        """The version that answers."""
        return self.current.scorer.version

    def prepare(self, uri: str) -> str:
        """Loads a further export, and compares checksums and golden rows; its version.

        Raises:
            RunError, ConfigError: it cannot be used.
        """
        with self._lock:
            wanted, known = (uri, read_manifest(uri).version), (self.current, self.previous, self._prepared)
            found = next((each for each in known if each and (each.uri, each.scorer.version) == wanted), None)
            self._prepared = found or self._load(uri)
            return self._prepared.scorer.version

    def commit(self, version: str) -> None:
        """Lets the prepared export answer.

        Raises:
            RunError: it is not that one.
        """
        with self._lock:
            if self.version != version:
                if self._prepared is None or self._prepared.scorer.version != version:
                    raise RunError(f"{version} is not prepared", where="the service", do="prepare it first")
                self.current, self.previous = self._prepared, self.current
            self._prepared = None
            gc.collect()  # programs are cycles, and until they are collected their files stay mapped

    def forget(self) -> None:
        """Lets go of what was prepared."""
        with self._lock:
            self._prepared = None
            gc.collect()


def load_either(now: Export, before: Export | None, allow_code: bool) -> tuple[Versions, str | None]:
    """Load the current export, or the one before it if the current one is not whole any more.

    Returns:
        The loaded export, and the reason if it is the one before.

    Raises:
        RaytrecError: The reason, if there is no export before or it cannot be loaded either.
    """
    errors: list[RaytrecError] = []
    for export in filter(None, (now, before)):
        try:
            versions = Versions(export.uri, allow_code)
            if (found := versions.version) == export.version:
                return versions, str(errors[0]) if errors else None
            what = f"the export has been changed in place, from {export.version} to {found}"
            errors.append(RunError(what, where=export.uri))
        except RaytrecError as error:
            errors.append(error)
    raise errors[0]


def carry_out(versions: Versions, order: Order, before: Report) -> Report:
    """Carries out an order.

    Args:
        before: the report of the order before it.
    """
    answer, prepared, error = order.answer, None, None
    try:
        if versions.version != answer.version:
            if before.prepared != answer.version:
                versions.prepare(answer.uri)
            versions.commit(answer.version)
        if order.prepare:
            prepared = versions.prepare(order.prepare)
        else:
            versions.forget()
    except RaytrecError as failed:
        error = copy(failed)  # its traceback would keep the exports of its frames
    except Exception as failed:
        _log.exception("an order could not be carried out")
        error = RunError(f"{type(failed).__name__}: {failed}", where=order.prepare or answer.uri)
    return Report(order.number, versions.version, prepared, error)


def containing_folder(uri: str) -> str:
    """Return the folder that contains an export; the bucket if the export fills a bucket."""
    place, query = _split(uri)
    parent = place.rpartition("/")[0] or "/"
    return (place if parent.endswith(":/") else parent) + query


def resolve_export(uri: str, folder: str) -> str:
    """Return the place of an export, with links resolved, if it is in a folder and on the folder's server.

    Args:
        uri: Local path or URI that a client has sent.
        folder: Local path or URI of the folder.

    Raises:
        Refused: The export is elsewhere, or the URI chooses another server.
    """
    (place, query), (root, own_query) = _split(uri), _split(folder)
    root, same_server = root.rstrip("/") + "/", not (chooses_server(uri) or chooses_server(folder))
    inner = unquote(place.removeprefix(root)).split("/")
    if place.startswith(root) and (same_server or query == own_query) and not {"", ".", ".."} & {*inner}:
        return place + query
    what = "the export is not in the folder of the service, or on another server"
    raise Refused(403, RunError(what, where=uri, expected=f"an export in {folder} (--promote-from)"))


def _split(uri: str) -> tuple[str, str]:
    """Return (path with links resolved, nothing) of a local place, (the rest, ?query) of a URI."""
    if "://" not in uri or uri.startswith("file:///"):
        return os.path.realpath(open_filesystem(absolute(uri))[1]), ""
    place, mark, query = uri.partition("?")
    return place.rstrip("/"), mark + query
