"""Paths and URIs of local files and of object stores (s3://, gs://), accessed through pyarrow."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from raytrec.common import reading
from raytrec.common.errors import ConfigError, DataError
from raytrec.common.reading import MAX_JSON_BYTES, MAX_YAML_BYTES, parse_yaml

ROOT = "RAYTREC_ROOT"
UNQUOTED = "/=:@!$&'()*+,;~"  # characters, besides letters, digits and -._, that are not special in the path of a URI
RAY_JOB_COPIES = "/runtime_resources/working_dir_files/"  # folder in which Ray unpacks jobs' working directories
# URIs of files on this machine or on the cloud provider's own servers. Other servers can be chosen by parameters
# such as endpoint_override, scheme and blob_storage_authority, and by the host in abfs:// and hdfs://.
OWN_SERVER_URI = re.compile(
    r"file:///(?s:.*)"
    r"|(?:s3|gs|gcs)://(?:[^@/?#\s]*@)?[\w.-]+(?:/[^?#]*)?(?:\?region=[\w-]+)?"
    r"|abfss?://(?:[\w$-]+@)?[\w$-]+(?:\.(?:blob|dfs)\.core\.windows\.net)?(?:/[^?#]*)?",
    re.ASCII,
)


def open_filesystem(uri: str):
    """Return the pyarrow filesystem of a path or URI, and the path in that filesystem.

    Args:
        uri: Local path, which may be relative to the working directory or begin with `~`, or a URI such as
            `s3://bucket/folder` or `gs://bucket/folder`.

    Returns:
        (pyarrow.fs.FileSystem, str): The filesystem, and the path without scheme, query and trailing slash. A local
        path is absolute.

    Raises:
        DataError: The path is not valid, the scheme is unknown to pyarrow, or the store cannot be reached.
    """
    from pyarrow import fs

    try:
        if "://" in uri:
            filesystem, path = fs.FileSystem.from_uri(uri)
        else:
            filesystem, path = fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(uri))
            path.encode()  # pyarrow accepts only UTF-8
            if "\0" in path:
                raise ValueError("the path contains a null byte")
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot open the path: {error}",
            where=uri,
            expected="a local path, or a URI such as s3://bucket/folder or gs://bucket/folder in a reachable store",
        ) from None
    return filesystem, path.rstrip("/") or "/"


def query_file_info(uri: str):
    """Return pyarrow's FileInfo for a path or URI; its type is NotFound if no file or folder exists there.

    Raises:
        DataError: As for `open_filesystem`.
        OSError: The path cannot be accessed, or the store does not respond.
    """
    filesystem, path = open_filesystem(uri)
    return filesystem.get_file_info(path)


def chooses_server(uri: str) -> bool:
    """Return True if a URI may select a server other than its cloud provider's.

    Such a server would receive this user's credentials. The result is False for a local path.

    Example:
        >>> chooses_server("s3://bucket/train?region=eu-north-1")
        False
        >>> chooses_server("s3://bucket/train?endpoint_override=storage.example:9000")
        True
    """
    return "://" in uri and not OWN_SERVER_URI.fullmatch(uri)


def read_bytes(uri: str, max_file_bytes: int = MAX_YAML_BYTES) -> bytes:
    """Read the content of the file at a path or URI.

    Raises:
        FileNotFoundError: The file does not exist.
        OSError: The file cannot be read; is a pipe, a device or a folder; or is larger than `max_file_bytes`.
        DataError: As for `open_filesystem`.
    """
    filesystem, path = open_filesystem(uri)
    if filesystem.type_name == "local":
        return reading.read_bytes(path, max_file_bytes)
    with filesystem.open_input_stream(path) as stream:
        data = stream.read(max_file_bytes + 1)
    if len(data) > max_file_bytes:
        raise OSError(errno.EFBIG, f"the file is larger than {max_file_bytes >> 20} MiB", uri)
    return data


def read_text(uri: str) -> str:
    """Read the UTF-8 text of the file at a path or URI, at most MAX_JSON_BYTES.

    Raises:
        OSError, DataError: As for `read_bytes`.
        UnicodeDecodeError: The content is not UTF-8.
    """
    return read_bytes(uri, MAX_JSON_BYTES).decode()


def read_yaml(uri: str) -> Any:
    """Read and parse the YAML file at a path or URI.

    Raises:
        OSError, DataError: As for `read_bytes`.
        UnreadableError: As for `reading.parse_yaml`.
    """
    return parse_yaml(read_bytes(uri))


def make_absolute(uri: str, root: str | None = None) -> str:
    """Make a local path absolute, because workers run in other directories; return a URI unchanged.

    Args:
        uri: Path or URI.
        root: Folder to which relative paths refer; default: the environment variable RAYTREC_ROOT, which can be
            set on the nodes of a cluster, else the working directory.

    Raises:
        ConfigError: The path is relative and no root is set, but this process runs in a Ray job, whose working
            directory is a temporary copy.
    """
    if "://" in uri:
        return uri
    place = os.path.expanduser(uri)
    root = root or os.environ.get(ROOT)
    if not root and not os.path.isabs(place) and RAY_JOB_COPIES in os.getcwd():
        raise ConfigError(
            f"'{uri}' is a relative path, but this job's working directory is a copy of the submitted files",
            where=os.getcwd(),
            expected="an absolute path, or a path relative to a folder that all nodes of the cluster share",
            do=f"use an absolute path, or set {ROOT} on the nodes of the cluster, or run.root in a run's configuration",
        )
    return os.path.abspath(os.path.join(os.path.expanduser(root or ""), place))


def quote_for_shell(place: str | Path) -> str:
    """Quote a path as a single shell word, for commands that users copy."""
    return shlex.quote(str(place))


def make_relative(path: Path) -> str:
    """Return an absolute path as text, relative to the working directory if it is inside that folder."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def sync_to_disk(path: str | Path) -> None:
    """Flush a local file, or the directory entries of a local folder, to disk (fsync); raise OSError on failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def join_uri(uri: str, name: str) -> str:
    """Return the path or URI of a file or folder inside a folder. In a URI, special characters of the name are quoted.

    Example:
        >>> join_uri("s3://bucket/train?region=eu-north-1", "at=10%3A00/a b.parquet")
        's3://bucket/train/at=10%253A00/a%20b.parquet?region=eu-north-1'
    """
    path, query = split_query(uri)
    return f"{path}/{quote(name, safe=UNQUOTED) if _is_decoded(uri) else name}{query}"


def split_query(uri: str) -> tuple[str, str]:
    """Return a path or URI without query, fragment and trailing slashes, and the query: "" or "?key=value"."""
    if "://" not in uri:
        return uri.rstrip("/"), ""
    path, mark, query = (uri.partition("#")[0] if _is_decoded(uri) else uri).partition("?")
    scheme, _, rest = path.partition("://")
    return f"{scheme}://{rest.rstrip('/')}", mark + query


def _is_decoded(uri: str) -> bool:
    """Return True if pyarrow decodes the path of a URI; it passes URIs of fsspec on unchanged."""
    return "://" in uri and not uri.startswith(("hf://", "fsspec+"))


def extract_path(uri: str) -> str:
    """Return a local path unchanged, or the decoded path of a URI, without bucket or host, and query.

    Example:
        >>> extract_path("s3://bucket/train/at=10%253A00/a%20b.parquet?region=eu-north-1")
        'train/at=10%3A00/a b.parquet'
    """
    if "://" not in uri:
        return uri
    path = split_query(uri)[0].partition("://")[2].partition("/")[2]
    return unquote(path) if _is_decoded(uri) else path


def get_sibling(uri: str, name: str) -> str:
    """Return the path or URI of `name` in the folder that contains `uri`."""
    path, query = split_query(uri)
    folder, slash, _ = path.rpartition("/")
    return f"{folder}{slash}{name}{query}"  # without a slash: in the working directory


def find_train_folder(uri: str) -> str:
    """Return the path or URI of a folder's subfolder train/ if it exists, else of the folder itself.

    Raises:
        OSError, DataError: As for `query_file_info`.
    """
    inner = join_uri(uri, "train")
    return inner if query_file_info(inner).type.name == "Directory" else uri


def find_sibling_parts(uri: str) -> dict[str, str]:
    """Return name → path or URI of the validation and test data next to a folder train/ or a file train.*.

    The names are valid, val, validation, test and eval; names without a file or folder are omitted. The result is empty
    for other paths.

    Raises:
        OSError, DataError: As for `query_file_info`.
    """
    name = split_query(uri)[0].rpartition("/")[2]
    if name.partition(".")[0] != "train":
        return {}
    places = {}
    for part in ("valid", "val", "validation", "test", "eval"):
        place = get_sibling(uri, name.replace("train", part, 1))
        if query_file_info(place).type.name != "NotFound":
            places[part] = place
    return places
