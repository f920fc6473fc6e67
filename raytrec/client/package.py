"""Files that are uploaded to a cluster for a run: code, the configuration and the user's modules."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from raytrec.common.errors import ConfigError, convert_os_errors
from raytrec.config.data import to_run_name
from raytrec.config.run_config import RunConfig
from raytrec.config.trust import list_user_code

Source = str | Path | dict | RunConfig  # a config file, its values, or a RunConfig
OWN_PACKAGE_NAMES = ("raytrec", "raytrec_datasets")
IGNORED_UPLOAD_PATTERNS = shutil.ignore_patterns("__pycache__", "*.pyc", ".git", ".venv", ".ipynb_checkpoints")
MAX_UPLOAD_FILES = 20_000
MAX_UPLOAD_BYTES = 100 << 20  # data must be on storage that all nodes reach; Ray's own limit is 500 MiB


@contextmanager
def code(places: list[Path] | tuple = (), reserved_names: tuple[str, ...] = ()) -> Iterator[Path]:
    """Yield a working directory for Ray that contains this machine's raytrec code and the user's files.

    The cluster then runs the same code, and needs only raytrec's dependencies. The directory is removed after
    the block.

    Args:
        places: Files and folders of the user to add, without IGNORED_UPLOAD_PATTERNS. Paths below the current
            directory keep their relative path; other files and folders are added at the top level under their name.
        reserved_names: Names at the top level that are reserved for other files.

    Raises:
        ConfigError: A file is missing, cannot be read, or would have the path of another file; a folder contains the
            working directory or a cycle of links; there are too many files, or the files are too large.
    """
    package_files = {
        Path(package) / path: file
        for package in OWN_PACKAGE_NAMES
        for path, file in _walk_files(Path(find_spec(package).origin).parent, package)
    }
    uploads: dict[Path, Path] = {}
    for place in places:
        for path, file in _list_place_files(place):
            if path in package_files and not _is_working_directory(place):
                _refuse(place, f"{path} is a file of raytrec itself", "a file or folder with another name")
            if str(path) in reserved_names and not _is_working_directory(place):
                _refuse(place, f"{path} is the name of the uploaded config file", "a file with another name")
            if uploads.setdefault(path, file).resolve() != file.resolve():
                _refuse(place, f"{path} is included twice: {uploads[path]}, {file}", "one file for each path")
            if len(uploads) > MAX_UPLOAD_FILES:
                _refuse(place, f"the upload has more than {MAX_UPLOAD_FILES:,} files", "only the needed files")
    uploads |= package_files
    _check_size(uploads)
    with tempfile.TemporaryDirectory(prefix="raytrec-job-") as folder:  # 0700
        for path, file in uploads.items():
            target, where = Path(folder, path), str(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            with convert_os_errors("cannot copy the file", ConfigError, where=where):
                shutil.copy2(file, target)
        yield Path(folder)


def get_config_file_name(source: Source) -> str:
    """Return the name under which a config file is uploaded; run.yaml if `source` is not the path of a file."""
    return f"{to_run_name(Path(source).stem)}.yaml" if isinstance(source, (str, Path)) else "run.yaml"


def find_user_modules(config: RunConfig) -> list[Path]:
    """Return the files and folders in the working directory that contain modules named by the configuration.

    Other modules are either installed on the cluster or missing. The run reports missing modules.
    """
    modules = list_user_code(config.model_dump(by_alias=True, mode="json"))
    tops = {name.partition(":")[0].partition(".")[0] for name in modules}
    places = [place for top in sorted(tops) for place in (Path(top), Path(f"{top}.py"))]
    return [place for place in places if place.exists() and place.stem not in OWN_PACKAGE_NAMES]


def _list_place_files(place: Path) -> Iterator[tuple[Path, Path]]:
    """Yield (path in the upload, file) for a file, or for each file below a folder."""
    try:
        working_dir = Path.cwd().resolve()
        # If the place is a link, its name is kept. Links in its parent folders are resolved.
        has_name = place.name not in ("", ".", "..")
        source = place.absolute().parent.resolve() / place.name if has_name else place.resolve()
        if not source.exists():
            _refuse(place, "the file or folder does not exist", "a file or folder on this machine")
        top = source.relative_to(working_dir) if source.is_relative_to(working_dir) else Path(source.name)
        if working_dir.is_relative_to(source) and working_dir != source:
            _refuse(place, "the folder contains the working directory", "only the needed files and folders")
        for path, file in _walk_files(source, str(place)):
            yield top / path, file
    except (OSError, RuntimeError, ValueError) as error:  # a cycle of links, or an invalid name
        _refuse(place, f"cannot read the path: {error}", "a readable path")


def _walk_files(source: Path, label: str) -> Iterator[tuple[Path, Path]]:
    """Yield (relative path, file) for a file or each file in a folder; follow links, skip IGNORED_UPLOAD_PATTERNS.

    Args:
        source: Folder or file.
        label: Path as given by the user, for errors.
    """
    if not source.is_dir():
        if not source.is_file():
            _refuse(label, "the path is neither a regular file nor a folder", "a regular file or folder")
        yield Path(), source
        return
    parents: dict[str, tuple[str, ...]] = {str(source): (os.path.realpath(source),)}
    for folder, names, files in os.walk(source, followlinks=True):
        skipped = IGNORED_UPLOAD_PATTERNS(folder, [*names, *files])
        names[:] = sorted(set(names) - skipped)
        for name in names:
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            if real in parents[folder]:
                _refuse(label, f"{path} is a link to one of its parent folders", "links without cycles")
            parents[path] = (*parents[folder], real)
        for name in sorted(set(files) - skipped):
            file = Path(folder, name)
            if not file.is_file():
                what = "is a broken symbolic link" if file.is_symlink() else "is not a regular file"
                _refuse(label, f"{file} {what}", "regular files and folders")
            yield file.relative_to(source), file


def _is_working_directory(place: Path) -> bool:
    """Return True if a path is the whole working directory (e.g. a git checkout).

    In this case, files that raytrec adds take precedence over files with the same path.
    """
    return place.resolve() == Path.cwd().resolve()


def _refuse(place: Path | str, what: str, expected: str) -> NoReturn:
    raise ConfigError(what, where=f"upload of {place}", expected=expected) from None


def _check_size(files: dict[Path, Path]) -> None:
    sizes = {path: file.stat().st_size for path, file in files.items()}
    if (total := sum(sizes.values())) > MAX_UPLOAD_BYTES:
        largest = max(sizes, key=sizes.get)
        raise ConfigError(
            f"the files to upload are too large: {total / 2**20:,.1f} MiB",
            where=f"the largest file is {largest}, {sizes[largest] / 2**20:,.1f} MiB",
            expected=f"at most {MAX_UPLOAD_BYTES >> 20} MiB of code and small files",
            do="store data on storage that all nodes of the cluster can read, and name its path in the config",
        )
