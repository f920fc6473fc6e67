"""Which exports `POST /promote` may name: those in one folder."""

from __future__ import annotations

import os
from urllib.parse import unquote

from raytrec.common.errors import RunError
from raytrec.common.storage import absolute, chooses_server, open_filesystem
from raytrec.serving.bodies import Refused


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
