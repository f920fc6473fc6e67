"""List the files of a dataset, and the reasons why other files are skipped."""

from __future__ import annotations

import os
from collections import Counter, defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from stat import S_ISDIR, S_ISREG
from typing import Any

from pyarrow import fs

from raytrec.common.errors import DataError, get_first_line
from raytrec.common.formatting import format_count
from raytrec.common.storage import extract_path, join_uri, open_filesystem, split_query
from raytrec.config.data import to_folder_list
from raytrec.data.files.partitions import (
    ALL_PARTITIONS,
    PartitionBounds,
    check_no_table_format,
    compute_path_key,
    parse_folder_values,
    select_partitions,
)

PARQUET_MAGIC = (b"PAR1", b"PARE")  # first and last bytes of a file; PARE: the footer is encrypted
TEMPORARY_SUFFIXES = (".tmp", ".temp", ".part", ".crdownload", ".inprogress", "._copying_", ".swp", ".bak", ".old", "~")
REASON_HIDDEN, REASON_DUPLICATE, REASON_OUTSIDE_PARTITIONS = ("hidden", "reached twice", "outside data.partitions")
SERVER_PARAMETERS = ("endpoint_override", "scheme", "blob_storage_authority", "dfs_storage_authority")
MAX_LINKS = 40  # maximum number of links that lead from one to the next, as in Linux
MAX_NAMES_PER_REASON = 100  # maximum number of names per reason in the run folder
UNREADABLE_KINDS = "pipes, devices, broken links, files without permission, or names that are not UTF-8"
REASON_UNREADABLE = f"unreadable: {UNREADABLE_KINDS}"


@dataclass(frozen=True)
class Listing:
    """Parquet files of a dataset's folders, and other entries with the reasons why they are not read.

    Attributes:
        files: Parquet files to read, in order.
        left_out: Reason → paths of files (and hidden folders) that are not read.
    """

    files: tuple[str, ...] = ()
    left_out: dict[str, list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return a summary of the counts with one example for each reason."""
        text = format_count(len(self.files), "Parquet file")
        reasons = (f"{len(paths):,} {why} ({_name(paths[0])})" for why, paths in self.left_out.items())
        return f"{text}; left out: {', '.join(reasons)}" if self.left_out else text

    def record(self) -> dict[str, Any]:
        """Return text (a summary), counts ("read" and by reason) and left_out (reason → paths) for the run folder."""
        counts = {"read": len(self.files)} | {why: len(paths) for why, paths in self.left_out.items()}
        left_out = {why: paths[:MAX_NAMES_PER_REASON] for why, paths in self.left_out.items()}
        return {"text": str(self), "counts": counts, "left_out": left_out}


def list_files(places: str | list[str], key: str, between: PartitionBounds = ALL_PARTITIONS) -> Listing:
    """List the Parquet files of folders, in the given order of folders and by path within each folder.

    Folders are searched recursively. A file is read if its name ends with .parquet (in upper or lower case), or if
    it begins and ends with Parquet's magic bytes and its name does not end with one of TEMPORARY_SUFFIXES. Hidden
    files and folders are skipped: names that begin with `.`, or with `_` if they contain no `=`.

    Args:
        places: A folder or file, or a list of them. A single file is read whatever its name.
        key: Config key that names the folders, for messages.
        between: First and last partition, both included; default: all partitions.

    Raises:
        DataError: A path is invalid or neither a folder nor a regular file; a folder cannot be listed, contains no
            Parquet files, or belongs to a table format; `between` does not fit the folders (`select_partitions`) or
            is set for a file; an entry named *.parquet is not a readable file; or a file is in several of the places.
    """
    files, left_out = [], defaultdict[str, list[str]](list)
    for place in to_folder_list(places):
        listing = _list_folder(place, key, between)
        files += listing.files
        for why, paths in listing.left_out.items():
            left_out[why] += paths
    if len(to_folder_list(places)) > 1:
        counts = Counter(locate_file(file) for file in files)
        if duplicates := [file for file, count in counts.items() if count > 1]:
            raise DataError(
                f"{format_count(len(duplicates), 'file')} would be read more than once, such as {duplicates[0]}",
                where=f"{key}={join_folder_names(places)}",
                expected="folders and files that do not overlap",
                do="list each folder once, and omit folders and files inside another listed folder",
            )
    return Listing(tuple(files), dict(left_out))


def locate_file(file: str) -> str:
    """Return a text that is equal for two paths or URIs of one file, which may differ in links, keys or regions."""
    if "://" not in file:
        return os.path.realpath(file)
    scheme, _, place = file.partition("://")
    user, _, host = place.partition("/")[0].rpartition("@")
    container = user.partition(":")[0] if scheme in ("abfs", "abfss") else ""  # elsewhere, a user or a key
    server = [each for each in split_query(file)[1][1:].split("&") if each.startswith(SERVER_PARAMETERS)]
    return f"{scheme}://{container}@{host}/{extract_path(file)}?{'&'.join(sorted(server))}"


def join_folder_names(places: str | list[str]) -> str:
    """Return the names of one or several folders, joined by commas."""
    return ", ".join(to_folder_list(places))


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _list_folder(uri: str, key: str, between: PartitionBounds) -> Listing:
    filesystem, path = open_filesystem(uri)
    prefix = uri.partition("://")[0] + "://" if "://" in uri else ""
    where = f"{key}={uri}"
    try:
        kind = filesystem.get_file_info(path).type
        if kind == fs.FileType.NotFound:
            raise DataError(
                "the path does not exist",
                where=where,
                expected="a folder of .parquet files, or a file; globs are not expanded",
                do="correct the path" + "; list several as [a, b]; or run `raytrec prepare`" * key.startswith("data."),
            )
        if kind == fs.FileType.Unknown:
            raise DataError("the path is neither a folder nor a regular file", where=where, expected="a folder or file")
        local, linked = filesystem.type_name == "local", set[str]()
        left_out = defaultdict[str, list[str]](list)
        entries: list[ListedFile] = []
        if kind == fs.FileType.Directory:
            entries = list_local_folder(path, linked, left_out) if local else _list_store(filesystem, path)
    except OSError as error:
        raise DataError(f"cannot access or list the path: {error}", where=where, expected="a readable path") from None
    top = os.path.abspath(path) if local else path
    check_no_table_format(filesystem, top, (found for found, *_ in entries), where, prefix)
    checked = {top, os.path.dirname(top)}
    for folder in sorted((linked | _find_link_folders(top)) - checked if local else ()):
        check_no_table_format(filesystem, folder, (), where)
    if kind == fs.FileType.File:
        if any(between):
            what, expected = "a single file has no partitions to select from", "a folder of key=value folders"
            do = "remove data.partitions, or set data.train to a folder"
            raise DataError(what, where=f"data.partitions, {where}", expected=expected, do=do)
        return Listing((uri if prefix else path,))
    files = _select_parquet_files(filesystem, path, entries, left_out, where)
    if not files:
        raise DataError(
            "the folder contains no Parquet files",
            where=where,
            expected="files named *.parquet, or other files that begin and end with Parquet's magic bytes",
            do=f"check the folder, in which there are {Listing((), dict(left_out))}" if left_out else None,
        )
    if any(between):
        chosen = select_partitions(files, path, between, uri)
        left_out[REASON_OUTSIDE_PARTITIONS] += set(files) - set(chosen)
        files = chosen
    return Listing(
        tuple(join_uri(uri, file.removeprefix(path).lstrip("/")) for file in files) if prefix else tuple(files),
        {why: [prefix + file for file in sorted(paths)] for why, paths in left_out.items() if paths},
    )


ListedFile = tuple[str, int | None]  # (path, size in bytes; None: not readable, see REASON_UNREADABLE)


def list_local_folder(root: str, linked: set[str], left_out: dict[str, list[str]]) -> list[ListedFile]:
    """Return the files in a local folder and its subfolders. A hidden file or folder is a single entry of size 0.

    Symbolic links are followed after all other entries have been visited. Hidden folders are not entered.
    Hard links to one file from several partitions count as several files, because their partition columns
    differ.

    Args:
        root: Path of the folder.
        linked: Set that receives the folders of `_find_link_folders` for each symbolic link.
        left_out: Reason → paths; receives the entries that are reached a second time through links.
    """
    entries: list[ListedFile] = []
    first_paths: dict[tuple[int, int], str] = {}
    pending_folders, pending_links = deque[str](), deque[str]()

    def visit(path: str, is_link: bool) -> None:
        try:
            stat = os.stat(path)
        except OSError:
            entries.append((path, None))
            return
        is_folder = S_ISDIR(stat.st_mode)
        first_path = first_paths.setdefault((stat.st_dev, stat.st_ino or hash(path)), path)
        if first_path != path and (
            is_link or is_folder or parse_folder_values(first_path) == parse_folder_values(path)
        ):
            left_out[REASON_DUPLICATE].append(to_utf8(path))
        elif is_folder:
            pending_folders.append(path)
        else:
            entries.append((path, stat.st_size if S_ISREG(stat.st_mode) else None))

    visit(root, False)
    while pending_folders or pending_links:
        if not pending_folders:
            link = pending_links.popleft()
            linked.update(_find_link_folders(link))
            visit(link, True)
            continue
        for entry in sorted(os.scandir(pending_folders.popleft()), key=lambda entry: entry.name):
            if is_hidden(entry.name):
                entries.append((entry.path, 0))
            elif entry.is_symlink():
                pending_links.append(entry.path)
            else:
                visit(entry.path, False)
    decoded = [(to_utf8(path), path, size) for path, size in entries]
    return [(text, size if text == path else None) for text, path, size in decoded]


def _find_link_folders(link: str) -> set[str]:
    """Return all folders through which a symbolic link leads and in which it ends, or the parents of linked files."""
    paths = {os.path.realpath(link)}
    for _ in range(MAX_LINKS):
        if not os.path.islink(link):
            break
        link = os.path.join(os.path.realpath(os.path.dirname(link)), os.readlink(link))
        paths.add(link)
    return {os.path.abspath(path if os.path.isdir(path) else os.path.dirname(path)) for path in paths}


def to_utf8(path: str) -> str:
    """Return a path with bytes that are not valid UTF-8 replaced by escape sequences."""
    return path.encode(errors="backslashreplace").decode()


def _list_store(filesystem: fs.FileSystem, root: str) -> list[ListedFile]:
    """Return the objects below a folder of an object store; each hidden folder is a single entry."""
    entries: dict[str, int | None] = {}
    for info in filesystem.get_file_info(fs.FileSelector(root, recursive=True)):
        parts = info.path.removeprefix(root).split("/")
        hidden = next((at for at, part in enumerate(parts) if is_hidden(part)), None)
        if hidden is not None:
            entries[root + "/".join(parts[: hidden + 1])] = 0
        elif info.type != fs.FileType.Directory:
            entries[info.path] = info.size if info.type == fs.FileType.File else None
    return list(entries.items())


def is_hidden(name: str) -> bool:
    """Return True if a file or folder name is hidden, as in Spark and Hive; `_key=value` is a partition."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


def _select_parquet_files(
    filesystem: fs.FileSystem, root: str, entries: list[ListedFile], left_out: dict[str, list[str]], where: str
) -> list[str]:
    """Return the Parquet files among the entries, sorted, and add the other entries to `left_out`.

    Raises:
        DataError: An entry named *.parquet is not a readable file.
    """
    files, candidates, unreadable = [], [], []
    for path, size in entries:
        name = _name(path).lower()
        if is_hidden(name):
            left_out[REASON_HIDDEN].append(path)
        elif size is None:
            unreadable.append(path)
        elif name.endswith(".parquet"):
            files.append(path)
        elif not size:
            left_out["empty"].append(path)
        elif name.endswith(TEMPORARY_SUFFIXES):
            left_out["temporary or backup"].append(path)
        else:
            candidates.append(path)
    if unreadable_parquet := sorted(path for path in unreadable if path.lower().endswith(".parquet")):
        raise DataError(
            f"cannot read {format_count(len(unreadable_parquet), 'file')} named *.parquet: {UNREADABLE_KINDS}",
            where=f"{where}, {unreadable_parquet[0]}",
            expected="readable regular files with UTF-8 names",
            do="make each such file readable, remove it, or rename it with a leading _",
        )
    if unreadable:
        left_out[REASON_UNREADABLE] += unreadable
    with ThreadPoolExecutor(16) as pool:
        reasons = pool.map(partial(_find_rejection_reason, filesystem), candidates)
        for path, why in zip(candidates, reasons, strict=True):
            (files if why is None else left_out[why]).append(path)
    return sorted(files, key=lambda path: (compute_path_key(path), path))


def _find_rejection_reason(filesystem: fs.FileSystem, path: str) -> str | None:
    """Return the reason why a file is not read, according to its first and last bytes; None for a Parquet file."""
    try:
        with filesystem.open_input_file(path) as file:
            size = file.size()
            first, last = file.read_at(4, 0), file.read_at(4, max(0, size - 4))
    except OSError as error:
        return f"unreadable: {get_first_line(error)}"
    if first not in PARQUET_MAGIC:
        return "not Parquet"
    return None if last in PARQUET_MAGIC else "cut off or still being written"
