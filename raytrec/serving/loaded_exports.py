"""Exports that a process has loaded (current, previous, prepared, challenger), and the folder of exports to promote."""

from __future__ import annotations

import logging
import os
from copy import copy
from functools import partial
from typing import NamedTuple
from urllib.parse import unquote

from raytrec.common.errors import RaytrecError, RunError, get_first_line
from raytrec.common.storage import chooses_server, make_absolute, open_filesystem, split_query
from raytrec.scoring.load import LookupMaker, load
from raytrec.scoring.manifest import read_manifest
from raytrec.scoring.scorer import Scorer
from raytrec.serving.bodies import RefusedRequest
from raytrec.serving.replica_state import Challenger, Export, ReplicaCommand, ReplicaState

_log = logging.getLogger(__name__)


class LoadedExport(NamedTuple):
    """Export in memory.

    Attributes:
        uri: Location of the export.
        scorer: Model of the export.
        challenger: Share and mode if the export is the challenger; else None.
    """

    uri: str
    scorer: Scorer
    challenger: Challenger | None = None


class LoadedExports:
    """Exports that a process has loaded. A request is served to its end by the export that it started with.

    Args:
        uri: URI of the first export.
        allow_code: True if transforms of exports may name code.
        background: True if this process serves requests while the export is loaded; see scoring.load.load.
        make_lookups: Function that makes the lookups in tables; None: tables are mapped into memory.

    Attributes:
        current: Export that is served.
        previous: Export that was served before; None if there was none, or if `replace` has released it.
        challenger: Export that serves or scores a share of requests; None if there is none.

    Raises:
        RaytrecError: The export cannot be loaded; see scoring.load.load.
    """

    def __init__(
        self, uri: str, allow_code: bool = False, background: bool = False, make_lookups: LookupMaker | None = None
    ):
        self._load = partial(load, check_tables=True, allow_code=allow_code, make_lookups=make_lookups)
        self.current = LoadedExport(uri, self._load(uri, background=background))
        self.previous: LoadedExport | None = None
        self.challenger: LoadedExport | None = None
        self._prepared: LoadedExport | None = None

    @property
    def version(self) -> str:
        """Return the served version."""
        return self.current.scorer.version

    @property
    def loaded(self) -> list[LoadedExport]:
        """Return all exports in memory."""
        return [each for each in (self.current, self.previous, self.challenger, self._prepared) if each]

    def prepare(self, uri: str | None) -> str | None:
        """Load and check another export, unless its present version is in memory, and return the version.

        Args:
            uri: URI of the export; None: release the prepared export and return None.

        Raises:
            RaytrecError: The export cannot be used.
        """
        if uri is None:
            self._prepared = None
            return None
        key = uri, read_manifest(uri).version
        loaded = next((each for each in self.loaded if (each.uri, each.scorer.version) == key), None)
        self._prepared = loaded or LoadedExport(uri, self._load(uri, background=True))
        return self._prepared.scorer.version

    def commit(self, version: str) -> None:
        """Serve the prepared export, which must have this version, and keep the current export as the previous one.

        Raises:
            RunError: The prepared export has another version.
        """
        if self._prepared is None or self._prepared.scorer.version != version:
            found = self._prepared.scorer.version if self._prepared else "no export"
            what, do = f"the replica has prepared {found} instead of {version}", "promote the export again"
            raise RunError(what, where="the service", do=do)
        self.current, self.previous, self._prepared = self._prepared, self.current, None

    def replace(self, loaded: LoadedExport) -> None:
        """Serve an export of another LoadedExports, and release the current and the previous export."""
        self.current, self.previous = loaded, None

    def set_challenger(self, challenger: Challenger | None) -> str | None:
        """Set, change or remove (None) the challenger. An export that is not in memory is loaded.

        Returns:
            Reason why the export cannot be used, in which case the challenger is removed; else None.
        """
        loaded = self.challenger
        try:
            if challenger and (loaded is None or loaded.scorer.version != challenger.version):
                if (version := self.prepare(challenger.uri)) != challenger.version:
                    raise RunError(f"{challenger.uri} has been changed in place from {challenger.version} to {version}")
                loaded = self._prepared
        except Exception as error:
            self.challenger = None
            _log.warning("this replica serves without the challenger %s: %s", challenger.version, error)
            return get_first_line(error)
        self.challenger = loaded._replace(challenger=challenger) if challenger else None
        return None


def load_either(
    current_export: Export, previous_export: Export | None, allow_code: bool, make_lookups: LookupMaker | None = None
) -> tuple[LoadedExports, str | None]:
    """Load the current export, or the previous export if the current one cannot be loaded.

    An export whose files have another version than `version` counts as not loadable.

    Returns:
        The loaded export, and the reason why the current export could not be loaded, or None if it was loaded.

    Raises:
        RaytrecError: Neither export can be loaded; the error is that of the current export.
    """
    errors: list[RaytrecError] = []
    for export in filter(None, (current_export, previous_export)):
        try:
            versions = LoadedExports(export.uri, allow_code, make_lookups=make_lookups)
            if (version := versions.version) == export.version:
                return versions, errors[0].what if errors else None
            what = f"the export has been changed in place from version {export.version} to {version}"
            errors.append(RunError(what, where=export.uri, do="write each export to a new folder, and promote it"))
        except RaytrecError as error:
            errors.append(error)
    raise errors[0]


def execute_command(versions: LoadedExports, order: ReplicaCommand, last_report: ReplicaState) -> ReplicaState:
    """Execute a command of the coordinator, and return the replica's report, with the error if an export is unusable.

    Args:
        versions: Exports of the process.
        order: Command to execute.
        last_report: Report on the previous command.
    """
    answer, prepared, error, challenger_error = order.answer, None, None, None
    try:
        if versions.version != answer.version:
            if last_report.prepared != answer.version:
                versions.prepare(answer.uri)
            versions.commit(answer.version)
        challenger_error = versions.set_challenger(order.challenger)
        prepared = versions.prepare(order.prepare)
    except RaytrecError as failed:
        error = copy(failed)  # the traceback would keep the exports of its frames alive
    except Exception as failed:
        _log.exception("a command of the coordinator failed")
        what = f"the export cannot be loaded: {type(failed).__name__}: {failed}"
        error = RunError(what, where=order.prepare or answer.uri)
    return ReplicaState(order.number, versions.version, prepared, error, challenger_error)


def get_containing_folder(uri: str) -> str:
    """Return the folder that contains an export, or the bucket if the export fills it."""
    place, query = _split(uri)
    parent = place.rpartition("/")[0] or "/"
    return (place if parent.endswith(":/") else parent) + query


def resolve_export(uri: str, folder: str) -> str:
    """Return the location of an export, with links resolved, if it is in a folder and on the folder's server.

    Args:
        uri: Local path or URI sent by a client.
        folder: Local path or URI of the folder.

    Raises:
        RefusedRequest: The export is elsewhere, or the URI selects another server.
        DataError: The path or URI is not valid.
    """
    (place, query), (root, root_query) = _split(uri), _split(folder)
    root, same_server = root.rstrip("/") + "/", not (chooses_server(uri) or chooses_server(folder))
    inner = unquote(place.removeprefix(root)).split("/")
    is_inside = place.startswith(root) and not {"", ".", ".."} & {*inner}
    has_fragment = "://" in place and "#" in uri  # would hide the parameters of a server
    if is_inside and not has_fragment and (same_server or query == root_query):
        return place + query
    fault = "on another server than" if is_inside else "outside"
    what = f"the export is {fault} the folder of the service"
    raise RefusedRequest(403, RunError(what, where=uri, expected=f"an export in {folder}"))


def _split(uri: str) -> tuple[str, str]:
    """Return (path with links resolved, "") of a local location, or (location without query, ?query) of a URI."""
    if "://" not in uri or uri.startswith("file:///"):
        return os.path.realpath(open_filesystem(make_absolute(uri))[1]), ""
    return split_query(uri)
