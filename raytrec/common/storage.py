"""Local, s3:// and gs:// places, through pyarrow."""

from __future__ import annotations

import errno
import os
import re
import shlex
from pathlib import Path
from typing import Any

from raytrec.common import reading
from raytrec.common.errors import ConfigError, DataError
from raytrec.common.reading import MOST_JSON_BYTES, MOST_YAML_BYTES, yaml_values

ROOT = "RAYTREC_ROOT"
COPIES = "/runtime_resources/working_dir_files/"  # where Ray unpacks the working directories of jobs
# URIs whose server is this machine, or the store's own. pyarrow takes others from parameters such as
# endpoint_override, scheme and blob_storage_authority, and from the host of abfs:// and hdfs://.
OWN_SERVER = re.compile(
    r"file:///(?s:.*)"
    r"|(?:s3|gs|gcs)://(?:[^@/?#\s]*@)?[\w.-]+(?:/[^?#]*)?(?:\?region=[\w-]+)?"
    r"|abfss?://(?:[\w$-]+@)?[\w$-]+(?:\.(?:blob|dfs)\.core\.windows\.net)?(?:/[^?#]*)?",
    re.ASCII,
)


def open_filesystem(uri: str):
    """The pyarrow filesystem of a path or URI, and the path inside it.

    Args:
        uri: a local path (relative ones are taken from the working directory; `~` is the home) or a URI
            such as `s3://bucket/folder` or `gs://bucket/folder`.

    Returns:
        (pyarrow.fs.FileSystem, str): the filesystem and the path without scheme or trailing slash.

    Raises:
        DataError: when pyarrow knows no such scheme or cannot reach the store.
    """
    from pyarrow import fs

    try:
        if "://" in uri:
            filesystem, path = fs.FileSystem.from_uri(uri)
        else:
            filesystem, path = fs.LocalFileSystem(), os.path.abspath(os.path.expanduser(uri))
            path.encode()  # pyarrow takes UTF-8 alone
            if "\0" in path:
                raise ValueError("a zero byte is in its name")
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot open this place: {error}",
            where=uri,
            expected="a local path, s3://bucket/folder or gs://bucket/folder",
        ) from None
    return filesystem, path.rstrip("/") or "/"


def file_info(uri: str):
    """Return pyarrow's FileInfo of a path or URI; its type is NotFound if nothing is there."""
    filesystem, path = open_filesystem(uri)
    return filesystem.get_file_info(path)


def chooses_server(uri: str) -> bool:
    """Whether a URI decides which server is asked, and sent the credentials of this user.

    Example:
        >>> chooses_server("s3://bucket/train?region=eu-north-1")
        False
        >>> chooses_server("s3://bucket/train?endpoint_override=storage.example:9000")
        True
    """
    return "://" in uri and not OWN_SERVER.fullmatch(uri)


def read_bytes(uri: str, most: int = MOST_YAML_BYTES) -> bytes:
    """The content of a file.

    Raises:
        FileNotFoundError: when there is none. OSError: it cannot be read, is a pipe, a device or
            a folder, or has more bytes than `most`.
    """
    filesystem, path = open_filesystem(uri)
    if filesystem.type_name == "local":
        return reading.read_bytes(path, most)
    with filesystem.open_input_stream(path) as stream:
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", uri)
    return data


def read_text(uri: str) -> str:
    """The UTF-8 text of a file.

    Raises:
        OSError: as `read_bytes`. UnicodeDecodeError: it is something else.
    """
    return read_bytes(uri, MOST_JSON_BYTES).decode()


def read_yaml(uri: str) -> Any:
    """The values of a YAML file.

    Raises:
        OSError: as `read_bytes`. NotReadable: it is not YAML, or should not be parsed.
    """
    return yaml_values(read_bytes(uri))


def absolute(uri: str, root: str | None = None) -> str:
    """A local path made absolute (workers run in another directory); URIs are left alone.

    Args:
        root: the folder that relative paths are taken from; default: RAYTREC_ROOT, which the nodes of a
            cluster have, else the working directory.

    Raises:
        ConfigError: in a Ray job, whose working directory is a copy that is soon removed, without a root.
    """
    if "://" in uri:
        return uri
    place = os.path.expanduser(uri)
    root = root or os.environ.get(ROOT)
    if not root and not os.path.isabs(place) and COPIES in os.getcwd():
        raise ConfigError(
            f"'{uri}' is a relative path, and this job's working directory is a copy of what was submitted",
            where=os.getcwd(),
            expected="a folder that all nodes of the cluster share",
            do=f"set run.root=FOLDER, or {ROOT} where the cluster is started; or give an absolute path",
        )
    return os.path.abspath(os.path.join(os.path.expanduser(root or ""), place))


def in_shell(place: str | Path) -> str:
    """Return a path as one word of a shell, for commands that people copy."""
    return shlex.quote(str(place))


def relative(path: Path) -> str:
    """A path, as short as it is from here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def sync(path: str | Path) -> None:
    """Makes a local file, or the names in a local folder, outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def join_uri(uri: str, name: str) -> str:
    """Return the place of a file or folder inside a folder.

    Example:
        >>> join_uri("s3://bucket/train?region=eu-north-1", "part-0.parquet")
        's3://bucket/train/part-0.parquet?region=eu-north-1'
    """
    path, query = split_query(uri)
    return f"{path}/{name}{query}"


def split_query(uri: str) -> tuple[str, str]:
    """Return a place without slashes at its end, and the query of a URI: "" or "?key=value"."""
    path, mark, query = uri.partition("?") if "://" in uri else (uri, "", "")
    return path.rstrip("/"), mark + query


def sibling(uri: str, name: str) -> str:
    """Return the place of `name` in the folder that contains `uri`."""
    path, query = split_query(uri)
    return f"{path.rpartition('/')[0]}/{name}{query}"


def train_part(uri: str) -> str:
    """The train/ folder inside a folder that has one; else the place itself."""
    inner = join_uri(uri, "train")
    return inner if file_info(inner).type.name == "Directory" else uri


def parts_beside(uri: str) -> dict[str, str]:
    """Validation and test data next to a folder train/ (or a file train.parquet): name → place."""
    name = split_query(uri)[0].rpartition("/")[2]
    if name.partition(".")[0] != "train":
        return {}
    found = {}
    for part in ("valid", "val", "validation", "test", "eval"):
        place = sibling(uri, name.replace("train", part, 1))
        if file_info(place).type.name != "NotFound":
            found[part] = place
    return found
