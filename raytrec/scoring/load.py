"""Load exports: copy files from a store, compare checksums, and open programs and tables."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow import fs

from raytrec.common import file_hashes
from raytrec.common.errors import ConfigError, RunError, convert_os_errors, get_first_line, get_last_line
from raytrec.common.formatting import format_bytes, format_count
from raytrec.common.processes import get_owner_name, remove_leftovers
from raytrec.common.storage import make_absolute, open_filesystem
from raytrec.config.transforms import Python
from raytrec.embeddings.hashing import ids_to_keys
from raytrec.scoring.lookups import IdRows, Lookups
from raytrec.scoring.manifest import GOLDEN, MANIFEST_FILE, FileEntry, Manifest, read_manifest
from raytrec.scoring.program_archive import load_program
from raytrec.scoring.scorer import Scorer
from raytrec.scoring.stored_tables import open_tables

COPY_PREFIX = "raytrec-export-"  # prefix of the names of temporary folders with copies of exports
# Time limit for checksums: CHILD_BASE_S plus size ÷ CHILD_BYTES_PER_S. A child process at low priority may be slow.
CHILD_BASE_S, CHILD_BYTES_PER_S = 300.0, 20e6
# Function of (URI, manifest, table → rows of managed ids) that returns lookups in tables of other processes.
LookupMaker = Callable[[str, Manifest, Mapping[str, IdRows]], Lookups]


def load(
    uri: str | Path,
    *,
    check_tables: bool = False,
    allow_code: bool = False,
    background: bool = False,
    make_lookups: LookupMaker | None = None,
) -> Scorer:
    """Load a model written by `raytrec export`. Neither Ray, TorchRec nor the run folder is needed.

    Tables are mapped into memory. Rows that have been looked up stay in memory as long as the system has free memory.
    The golden rows (rows stored with their scores) are scored to check the model.

    Args:
        uri: Local path, s3:// or gs:// URI. Files in a store are first copied to a temporary folder, whose space is
            freed when the process ends or the model is no longer used.
        check_tables: True to also compare the checksums of tables, which reads all of their files.
        allow_code: True to import the code that transforms of the export name (module:name).
        background: True if this process serves requests in the meantime. Checksums are then computed in a child
            process at low priority.
        make_lookups: Function that returns the lookups; the files of tables are then not read. None: the files of
            tables are mapped.

    Raises:
        RunError: There is no export, it is damaged or cannot be copied, code of its transforms cannot be imported, or
            this process computes other scores for its golden rows.
        ConfigError: A transform names code, and `allow_code` is False; or a Ray job passes a relative path.
        DataError: The URI is not valid, or the store cannot be reached.

    Example:
        >>> model = raytrec.load("films-export")
        >>> user, films = {"user_id": 3, "history": [1, 2]}, [{"item_id": 7}, {"item_id": 9}]
        >>> model.predict(user=user, candidates=films).column_names
        ['score']
    """
    place = make_absolute(str(uri))
    manifest = read_manifest(place)
    refuse_code(manifest, place, allow_code)
    with ExitStack() as copies:
        table_files = list_table_names(manifest)
        local = select_files(manifest, manifest.files.keys() - table_files) if make_lookups else manifest
        folder, copied = copy_to_disk(place, local, copies)
        check_files(folder, local, check_tables, place, background)
        try:
            scorer = open_export(folder, manifest, make_lookups and partial(make_lookups, place))
            scorer.check()
            scorer.lookups.finish_loading()
        except (RunError, ConfigError):
            raise
        except Exception as error:  # a manifest that does not match its files can cause any error
            raise RunError(
                f"the export cannot be loaded: {get_first_line(error)}",
                where=place,
                expected=f"files that match {MANIFEST_FILE}, and code of the transforms that can be imported",
                do="correct the code, if the error is in a transform module:name; otherwise, export the run again",
            ) from error
        if copied:
            unlink_files(folder, local.files.keys() & table_files)
        weakref.finalize(scorer, copies.pop_all().close)
    return scorer


def select_files(manifest: Manifest, names: Iterable[str]) -> Manifest:
    """Return a copy of the manifest that lists only the named files."""
    return manifest.model_copy(update={"files": {name: manifest.files[name] for name in names}})


def unlink_files(folder: Path, names: Iterable[str]) -> None:
    """Remove mapped files from a folder, so that their space is freed when the process ends, even if it is killed."""
    for name in names:
        (folder / name).unlink()


def refuse_code(manifest: Manifest, where: str, allow_code: bool) -> None:
    """Check that no transform of the export runs user code, unless code is allowed.

    Raises:
        ConfigError: A transform names code, and `allow_code` is False.
    """
    code_names = [each.do for each in manifest.transforms if isinstance(each, Python)]
    if code_names and not allow_code:
        raise ConfigError(
            f"the transforms of the export run user code: {', '.join(code_names)}",
            where=where,
            expected="built-in transforms only",
            do="if you trust the export, set --allow-code or allow_code (of the service, load() or model_config)",
        )


def list_table_names(manifest: Manifest) -> set[str]:
    """Return the names of the files that contain rows of tables, relative to the export's folder."""
    return {name for stack in manifest.stacks for name in stack.files}


def copy_to_disk(place: str, manifest: Manifest, copies: ExitStack) -> tuple[Path, bool]:
    """Copy an export from a store to a temporary folder.

    Args:
        place: Folder or URI of the export.
        manifest: Manifest of the export.
        copies: Exit stack to which a callback is added that deletes the copies.

    Returns:
        (local folder with the export's files, True if they are copies). A local export is not copied.

    Raises:
        RunError: A file cannot be read from the store, or there is not enough disk space.
        DataError: The URI is not valid, or the store cannot be reached.
    """
    filesystem, path = open_filesystem(place)
    if filesystem.type_name == "local":
        return Path(path), False
    remove_leftovers(tempfile.gettempdir(), f"{COPY_PREFIX}{{owner}}-*")
    folder = Path(tempfile.mkdtemp(prefix=f"{COPY_PREFIX}{get_owner_name()}-"))
    copies.callback(shutil.rmtree, folder, ignore_errors=True)
    needed, available = sum(entry.bytes for entry in manifest.files.values()), shutil.disk_usage(folder).free
    if needed > available:
        raise RunError(
            f"a copy of the export needs {format_bytes(needed)}, but only {format_bytes(available)} are free",
            where=str(folder.parent),
            expected=f"at least {format_bytes(needed)} of free disk space",
            do="free disk space, or set TMPDIR to a folder on a larger disk",
        )
    for name in manifest.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with convert_os_errors(
            f"{name} cannot be copied",
            where=place,
            expected=f"a readable file in a reachable store, and free disk space in {folder.parent}",
            do="retry; if the file is missing, export the run again",
        ):
            fs.copy_files(f"{path}/{name}", str(folder / name), filesystem, fs.LocalFileSystem())
    return folder, True


def check_files(folder: Path, manifest: Manifest, tables: bool, where: str, background: bool = False) -> None:
    """Compare the sizes and checksums of all files with the manifest.

    Args:
        folder: Local folder of the export.
        manifest: Manifest of the export.
        tables: True to also compare the checksums of tables; their sizes are always compared.
        where: Location of the export in error messages.
        background: True to compute checksums in a child process at low priority.

    Raises:
        RunError: A file is missing or differs, or its checksum cannot be computed.
    """
    lazy = set() if tables else list_table_names(manifest)

    def compare(compared: Callable[[str, FileEntry], bool], names: Iterable[str]) -> None:
        for name in names:
            entry, what = manifest.files[name], f"the export is damaged: {name} differs from the exported file"
            try:
                intact = compared(name, entry)
            except OSError as error:
                intact, what = False, f"{name} cannot be read: {error.strerror or error}"
            if not intact:
                raise RunError(
                    what,
                    where=where,
                    expected=f"a readable file of {entry.bytes:,} bytes with the checksum in {MANIFEST_FILE}",
                    do="copy the folder again, or export the run again",
                )

    def has_size(name: str, entry: FileEntry) -> bool:
        status = (folder / name).stat()
        return S_ISREG(status.st_mode) and status.st_size == entry.bytes

    compare(has_size, manifest.files)  # first, so that no pipe, device or unexpectedly large file is read
    names = [name for name in manifest.files if name not in lazy]
    sums = hash_in_child(folder, names, where) if background else {}
    compare(lambda name, entry: (sums.get(name) or compute_sha256(folder / name)) == entry.sha256, names)


def compute_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content as hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_in_child(folder: Path, files: Iterable[str], where: str) -> dict[str, str]:
    """Return name → SHA-256, in hexadecimal, of files, computed in a child process at low priority.

    Args:
        folder: Local folder of the export.
        files: Names of the files.
        where: Location of the export in error messages.

    Raises:
        RunError: A file cannot be read, or the child process cannot start, was killed or exceeded its time limit.
    """
    try:
        limit_s = CHILD_BASE_S + sum((folder / name).stat().st_size for name in files) / CHILD_BYTES_PER_S
        command, names = [sys.executable, "-I", "-S", file_hashes.__file__, str(folder)], json.dumps([*files])
        run = subprocess.run(command, input=names, capture_output=True, check=True, text=True, timeout=limit_s)
        return json.loads(run.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # The text of subprocess errors has the form: Command '…' died with <Signals.SIGKILL: 9>.
        reason = get_last_line(getattr(error, "stderr", None) or "", str(error).rpartition("' ")[2])
        what = f"the checksums of the export cannot be computed: {reason}"
        expected = "readable files, and idle processors and free memory on this host"
        do = "retry when this host is less loaded; if a file cannot be read, copy or export the model again"
        raise RunError(what, where=where, expected=expected, do=do) from None


def open_export(
    folder: Path, manifest: Manifest, make_lookups: Callable[[Manifest, Mapping[str, IdRows]], Lookups] | None = None
) -> Scorer:
    """Return the scorer of an export whose files have been compared with the manifest.

    Args:
        folder: Local folder of the export.
        manifest: Manifest of the export.
        make_lookups: Function of (manifest, table → rows of managed ids) that returns the lookups; None: the files of
            tables are mapped.

    Raises:
        RunError: A program, the file of a table or the managed ids do not match the manifest.
        OSError, ArrowException, ValueError: Another file is missing or damaged. `make_lookups` can raise any error.
    """
    vocabularies = [_resolve_vocabulary(each, folder) for each in manifest.transforms]
    manifest = manifest.model_copy(update={"transforms": vocabularies})
    programs = {name: load_program(folder / each.file, len(each.inputs)) for name, each in manifest.programs.items()}
    ids = {name: read_ids(folder / file, manifest, name) for name, file in manifest.ids.items()}
    with pa.memory_map(str(folder / GOLDEN)) as file:
        golden = pa.ipc.open_file(file).read_all()
    golden.validate(full=True)  # invalid offsets would read memory outside the buffers
    lookups = make_lookups or (lambda manifest, ids: Lookups(manifest.features, open_tables(folder, manifest), ids))
    return Scorer(manifest, programs, lookups(manifest, ids), golden)


def _resolve_vocabulary(transform: Any, folder: Path) -> Any:
    """Return a copy with the path of the vocabulary in `folder`; a transform without vocabulary is unchanged."""
    name = getattr(transform, "vocabulary", None)
    return transform.model_copy(update={"vocabulary": str(folder / name)}) if name else transform


def read_ids(file: Path, manifest: Manifest, table: str) -> IdRows:
    """Read the managed ids of a table and their rows from a Parquet file with columns id and row.

    Raises:
        RunError: There are more ids than rows, or the column `row` does not consist of int64 rows of the table.
        OSError, ArrowException, ValueError, TypeError: The file cannot be read, lacks the column `id` or `row`, or
            contains values of another type.
    """
    schema, parquet = manifest.data_schema.tables[table], pq.ParquetFile(file)
    do = "copy or export the model again"
    if parquet.metadata.num_rows > schema.rows:
        what = f"the file contains {format_count(parquet.metadata.num_rows, 'managed id')} of table {table}"
        expected = f"at most {schema.rows:,}, the number of the table's rows"
        raise RunError(what, where=str(file), expected=expected, do=do)
    ids, rows = (torch.from_numpy(values.to_numpy().copy()) for values in parquet.read(["id", "row"]))
    if rows.dtype != torch.int64 or not ((rows >= 0) & (rows < schema.rows)).all():  # rows of another table
        what = f"column 'row' does not consist of rows of table {table}"
        raise RunError(what, where=str(file), expected=f"int64 values from 0 to {schema.rows - 1:,}", do=do)
    return IdRows(schema, ids_to_keys(ids), rows)
