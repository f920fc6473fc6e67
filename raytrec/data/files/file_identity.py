"""Compute fingerprints of a dataset's files, which are compared on resume.

Names and row counts alone would not detect flipped labels or rewritten files. A fingerprint therefore covers
each file's size, its footer (byte for byte: layout, sizes and statistics of every column) and its content.
Small datasets are hashed completely; for large datasets, samples of the columns are hashed. Modification
times and object-store versions differ between copies and are not covered; they only show whether a file was
rewritten. This module does not import torch.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.common.errors import DataError, get_first_line
from raytrec.common.formatting import format_count
from raytrec.common.reading import retry_read, storage_hint
from raytrec.common.storage import extract_path, open_filesystem
from raytrec.config.features import resolve_input_columns
from raytrec.config.transforms import VOCABULARY_TRANSFORMS
from raytrec.data.files.partitions import parse_folder_values
from raytrec.data.fragments import Dataset
from raytrec.data.read_plans import ResolvedReadPlan

MAX_FULL_HASH_BYTES = 1 << 30  # files of up to MAX_FULL_HASH_BYTES ÷ number of files are read completely
SAMPLES, SAMPLE_BYTES = 4096, 64 << 10  # for larger files: number of samples in the whole dataset, bytes per sample
READ_BYTES = 4 << 20
# Keys of an object's metadata that identify its version.
OBJECT_VERSION_KEYS = ("ETag", "crc32c", "generation")


@dataclass(frozen=True)
class FileIdentity:
    """Identity of a file's content. Two instances are equal if their names and (sampled) contents are equal.

    Modification times, object-store versions and folders other than those in `name` are not compared.

    Attributes:
        name: File name, preceded by the partition folders that supply columns; for a vocabulary, its config
            key.
        groups: [index, rows] of each row group with rows; [] for a vocabulary.
        size: Size in bytes.
        footer: SHA-256 of the Parquet footer; "" for a vocabulary.
        data: SHA-256 of all bytes or of sampled ranges.
        whole: True if `data` covers all bytes.
        modified_ns: Modification time in nanoseconds since 1970; None if the storage does not report it.
        version: Version of the file in an object store; None if the storage has no versions.
    """

    name: str
    groups: list[list[int]]
    size: int
    footer: str
    data: str
    whole: bool = field(compare=False)
    modified_ns: int | None = field(default=None, compare=False)
    version: str | None = field(default=None, compare=False)

    def is_rewritten(self, other: FileIdentity) -> bool:
        """Return True if the file may have been rewritten between this identity and `other`, and was only sampled."""
        if self.whole or (self.version and self.version == other.version):
            return False
        return (self.modified_ns, self.version) != (other.modified_ns, other.version)

    def describe_difference(self, other: FileIdentity) -> str:
        """Return a description of how the file's current content `other` differs from this earlier content."""
        if self.groups != other.groups:
            now, was = ((sum(r for _, r in c.groups), len(c.groups)) for c in (other, self))
            if now == was:
                return "the same numbers of rows and row groups, but different sizes of row groups"
            rows, groups = format_count(now[0], "row"), format_count(now[1], "row group")
            return f"{rows} in {groups}, previously {was[0]:,} in {was[1]:,}"
        if self.size != other.size:
            return f"{other.size:,} bytes, previously {self.size:,}"
        if self.footer != other.footer:
            return "a different footer, such as other sizes or statistics of columns"
        return f"the same number of {'rows and ' * bool(self.groups)}bytes, but different values"


def identify_files(dataset: Dataset) -> list[FileIdentity]:
    """Return the identities of a dataset's files that have rows, in order, then of its transforms' vocabularies.

    Raises:
        DataError: A file or vocabulary cannot be read.
    """
    files: dict[str, list[list[int]]] = {}
    for group in dataset.groups:
        files.setdefault(group.path, []).append([group.index, group.rows])
    vocabularies = {
        f"data.transforms[{number}].vocabulary": transform.vocabulary
        for number, transform in enumerate(dataset.form.plan.transforms)
        if isinstance(transform, VOCABULARY_TRANSFORMS) and transform.vocabulary
    }
    remote = any("://" in path for path in files)
    with ThreadPoolExecutor(64 if remote else min(16, 4 + (os.cpu_count() or 1))) as pool:
        identify = partial(_identify_file, dataset.form, len(files))
        identities = pool.map(identify, files, files.values(), range(len(files)))
        return [*identities, *(_identify_vocabulary(name, path) for name, path in vocabularies.items())]


def identify_datasets(datasets: dict[str, Dataset]) -> dict[str, list[FileIdentity]]:
    """Return the result of `identify_files` for each dataset, by name.

    Raises:
        DataError: A file or vocabulary cannot be read.
    """
    return {name: identify_files(dataset) for name, dataset in datasets.items()}


def fingerprint(contents: Iterable[FileIdentity] | None) -> str:
    """Return "2-" and the SHA-256 of the names and contents in a list of identities, in order; "" for None."""
    if contents is None:
        return ""
    digest = hashlib.sha256()
    for c in contents:
        digest.update(f"{(c.name, c.groups, c.size, c.footer, c.data)}\n".encode())
    return f"2-{digest.hexdigest()}"  # format of fingerprints in checkpoints


def list_differences(before: list[FileIdentity], after: list[FileIdentity]) -> list[str]:
    """Return the differences between two lists of identities: a line for each file removed, added or changed.

    If only the order of the files differs, the result is a single line that describes this difference.
    """
    was, now = (_by_name(contents) for contents in (before, after))
    lines = [f"{was[key].name}: removed" for key in was if key not in now]
    lines += [f"{now[key].name}: added" for key in now if key not in was]
    changed = [(was[key], now[key]) for key in was if key in now and was[key] != now[key]]
    lines += [f"{old.name}: {old.describe_difference(new)}" for old, new in changed]
    if not lines and [c.name for c in before] != [c.name for c in after]:
        lines = ["the order of the files has changed"]
    return lines


def list_rewritten_files(before: list[FileIdentity], after: list[FileIdentity]) -> list[str]:
    """Return the names of files that may have been rewritten, and whose contents were compared only by samples."""
    was, now = (_by_name(contents) for contents in (before, after))
    return [was[key].name for key in was if key in now and was[key].is_rewritten(now[key])]


def _by_name(contents: list[FileIdentity]) -> dict[tuple, FileIdentity]:
    """Return a mapping from (name, n) to the identity of the n-th file of this name; folders may share file names."""
    counts, by_name = Counter[str](), {}
    for content in contents:
        counts[content.name] += 1
        by_name[content.name, counts[content.name]] = content
    return by_name


def _identify_file(form: ResolvedReadPlan, share: int, path: str, groups: list[list[int]], number: int) -> FileIdentity:
    """Return the identity of a file.

    Args:
        form: Resolved read plan of the dataset.
        share: Number of files in the dataset, which share the limits on hashed bytes and samples.
        path: Path or URI of the file.
        groups: [index, rows] of each row group with rows.
        number: Index of the file in the dataset.
    """

    def read(file: pa.NativeFile, modified_ns: int | None) -> FileIdentity:
        size = file.size()
        footer = _read_raw_footer(file, size)
        is_whole = size <= MAX_FULL_HASH_BYTES // share
        samples = max(2, SAMPLES // share)
        pieces = _whole_file_range(size) if is_whole else _choose_samples(footer, size, form, samples, number)
        folders = "".join(f"{k}={v}/" for k, v in parse_folder_values(path).items() if k in form.from_folders)
        digest = hashlib.sha256(footer).hexdigest()
        name, version = folders + extract_path(path).rpartition("/")[2], _read_object_version(file)
        return FileIdentity(name, groups, size, digest, _digest(file, pieces), is_whole, modified_ns, version)

    return _read_with_retry(path, read)


def _identify_vocabulary(name: str, path: str) -> FileIdentity:
    def read(file: pa.NativeFile, _: int | None) -> FileIdentity:
        return FileIdentity(name, [], file.size(), "", _digest(file, _whole_file_range(file.size())), True)

    return _read_with_retry(path, read)


def _read_with_retry(path: str, read: Callable[[pa.NativeFile, int | None], FileIdentity]) -> FileIdentity:
    """Return read(open file, modification time in nanoseconds); raise DataError if all attempts to read fail."""

    def attempt() -> FileIdentity:
        filesystem, inner = open_filesystem(path)
        info = filesystem.get_file_info(inner)
        with filesystem.open_input_file(inner) as file:
            return read(file, info.mtime_ns)

    try:
        return retry_read(path, attempt)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"cannot read the file: {get_first_line(error)}",
            where=path,
            expected=storage_hint(path) + "a readable and complete file that does not change while it is read",
        ) from None


def _read_raw_footer(file: pa.NativeFile, size: int) -> bytes:
    """Return the raw footer, including its length field and magic number."""
    length = int.from_bytes(file.read_at(8, size - 8)[:4], "little") + 8
    return file.read_at(min(length, size), max(0, size - length))


def _whole_file_range(size: int) -> Iterator[tuple[int, int]]:
    return ((at, min(READ_BYTES, size - at)) for at in range(0, size, READ_BYTES))


def _choose_samples(
    footer: bytes, size: int, form: ResolvedReadPlan, max_samples: int, number: int
) -> list[tuple[int, int]]:
    """Return (offset, number of bytes) of each sample to read.

    Samples are taken at the start of column chunks, labels first, and then at equal intervals in the file. A
    chunk starts with its dictionary (if any), which may be the only changed part if labels are flipped.

    Args:
        footer: Raw footer of the file.
        size: Size of the file in bytes.
        form: Resolved read plan of the dataset.
        max_samples: Number of samples, at least 2.
        number: Index of the file; files with different indexes are sampled at different row groups and
            columns.
    """
    metadata = pq.read_metadata(pa.BufferReader(footer))
    labels = resolve_input_columns(form.plan.transforms, form.schema.labels)
    other_names = [name for name in form.trained_columns if name not in labels]
    label_ranges, other_ranges = (_column_chunk_ranges(metadata, names) for names in (labels, other_names))
    ranges = _choose_evenly(label_ranges, max(1, max_samples // 2), number)
    ranges = ranges + _choose_evenly(other_ranges, max_samples - len(ranges), number)
    count = max_samples - len(ranges)
    return ranges + [(at, min(SAMPLE_BYTES, size - at)) for at in (size * i // count for i in range(count))]


def _column_chunk_ranges(metadata: pq.FileMetaData, names: list[str]) -> list[tuple[int, int]]:
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    columns = {name.partition(".")[0] for name in names}  # a field stands for its whole column
    leaf_indexes = [i for i, path in enumerate(paths) if path.partition(".")[0] in columns]
    ranges = []
    for group in range(metadata.num_row_groups):
        for i in leaf_indexes:
            chunk = metadata.row_group(group).column(i)
            begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else None
            begin = chunk.data_page_offset if begin is None else min(begin, chunk.data_page_offset)
            ranges.append((begin, min(SAMPLE_BYTES, chunk.total_compressed_size)))
    return ranges


def _choose_evenly(chunks: list[tuple[int, int]], max_chunks: int, number: int) -> list[tuple[int, int]]:
    """Return at most `max_chunks` evenly spaced chunks, beginning with chunk `number` if chunks are omitted."""
    if len(chunks) <= max_chunks:
        return chunks
    return [chunks[(number + i * len(chunks) // max_chunks) % len(chunks)] for i in range(max_chunks)]


def _digest(file: pa.NativeFile, pieces: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for at, length in pieces:
        digest.update(file.read_at(length, at))
    return digest.hexdigest()


def _read_object_version(file: pa.NativeFile) -> str | None:
    metadata = file.metadata()
    versions = (f"{key} {metadata[key].decode(errors='replace')}" for key in OBJECT_VERSION_KEYS if key in metadata)
    return "; ".join(versions) or None
