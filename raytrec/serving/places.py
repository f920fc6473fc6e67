"""Which exports `POST /promote` may name: those in one folder."""

from __future__ import annotations

import os
from urllib.parse import unquote

from raytrec.common.errors import RunError
from raytrec.common.storage import absolute, chooses_server, open_filesystem


def containing_folder(uri: str) -> str:
    """Return the folder that contains an export; a bucket for an export that fills the bucket."""
    if _is_local(uri):
        return os.path.dirname(_real_path(uri))
    place, mark, query = uri.partition("?")
    scheme, _, path = place.partition("://")
    path = path.rstrip("/")
    return f"{scheme}://{path.rpartition('/')[0] or path}{mark}{query}"


def resolve_export(uri: str, folder: str) -> str:
    """Return the place of an export, with links resolved, if it is in a folder and on the folder's server.

    Args:
        uri: Local path or URI that a client has sent.
        folder: Local path or URI of the folder.

    Raises:
        RunError: The export is elsewhere, or the URI chooses another server.
    """
    if _is_local(uri) and _is_local(folder):
        place, root = _real_path(uri), _real_path(folder)
        if os.path.commonpath((place, root)) == root:
            return place
    elif not _is_local(uri) and not _is_local(folder):
        (place, _, query), (root, _, own_query) = uri.partition("?"), folder.partition("?")
        same_server = query == own_query or not (chooses_server(uri) or chooses_server(folder))
        root = root.rstrip("/") + "/"
        inner = unquote(place.removeprefix(root)).rstrip("/").split("/")
        if same_server and place.startswith(root) and not {"", ".", ".."} & {*inner}:
            return uri
    raise RunError(
        "the export is not in the folder of the service, or on another server",
        where=uri,
        expected=f"an export in {folder}",
        do="move it there, or start the service with another --promote-from",
    )


def _is_local(uri: str) -> bool:
    return "://" not in uri or uri.startswith("file:///")


def _real_path(uri: str) -> str:
    return os.path.realpath(open_filesystem(absolute(uri))[1])
