"""Storage of tensors for torch.distributed.checkpoint, as raw bytes with checksums, without pickle.

Each rank writes its chunks (whole tensors or shards) to one file, ATTEMPT-RANK.bin. A chunk consists of
little-endian values in row-major order, and starts at a multiple of 64 bytes. The index stores the location of
each chunk, and a CRC-32 of each of its blocks. Data is read block by block, so memory use does not depend on the
size of tables.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from raytrec.checkpoint.blocks import DTYPES, Target, blocks, to_metadata
from raytrec.checkpoint.index import INDEX, CheckpointError, convert_write_errors, read_index, write_index
from raytrec.checkpoint.rawfile import RawFileWriter, Source, StoredChunk, check_files, make_folder, open_data_file
from raytrec.checkpoint.state import State
from raytrec.common.errors import RaytrecError, get_root_cause
from raytrec.common.storage import join_uri

BLOCK_BYTES = 4 << 20  # unit of checksums and of reading; a multiple of every dtype's size


class _OneCheckpoint:
    """Storage of one checkpoint, whose folder only the constructor sets."""

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: the folder does not change."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Return True; torch does not choose this storage by the folder."""
        return True


class ShardWriter(_OneCheckpoint, StorageWriter):
    """Writer of the tensors and ShardedTensors of a state dict, for `torch.distributed.checkpoint.save`.

    The checkpoint exists as soon as rank 0 has written the index:

        {"format": 1, "attempt": str, "block_bytes": int, "about": dict, "sha256": of all the rest,
         "tensors": {name: {"dtype": "float32", "shape": [...], "chunks": [
            {"offsets": [...], "sizes": [...], "file": str, "start": bytes, "crc32": [of each block]}]}}}

    An existing index in the folder is replaced; other files are not. All local files are synced to disk before the
    index is written. Errors are raised on all ranks within torch's CheckpointException. Errors of files are
    CheckpointErrors; errors of `confirm` and `read` keep their types.

    Args:
        folder: URI, or local path of a folder that is created if missing; the same for all ranks.
        attempt: Prefix of file names, which must not have been used before in this folder.
        about: Entry "about" of the index, as JSON values.
        confirm: Function called on rank 0 before the commit; an error prevents the commit.
        read: Function that yields a tensor's blocks of a given number of bytes; default: blocks.blocks.

    Raises:
        CheckpointError: `about` is not JSON.
    """

    def __init__(
        self,
        folder: str,
        attempt: str,
        about: dict,
        confirm: Callable[[], None] = lambda: None,
        read: Callable[[torch.Tensor, int], Iterator[memoryview]] = blocks,
    ):
        self._folder, self._attempt, self._confirm = folder.rstrip("/"), attempt, confirm
        try:  # converted as by JSON: tuples become lists, and keys become strings
            self._about = json.loads(json.dumps(about, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the index cannot be written as JSON: {error}",
                where=f"{join_uri(self._folder, INDEX)}: about",
                expected="dicts, lists, strings, finite numbers, booleans and None",
            ) from None
        self._block_bytes, self._read = BLOCK_BYTES, read

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        """Create the checkpoint's folder; raise as `make_folder`."""
        make_folder(self._folder)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan without empty shards of nonempty tensors.

        An empty shard may start at the same offset as another rank's shard. torch's planner would take both for
        copies of the same shard, and write only one of them.

        Raises:
            CheckpointError: A value is not a tensor, or its dtype is not supported.
        """
        items = []
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                what = f"only tensors can be saved, but {item.index.fqn!r} is not a tensor"
                raise CheckpointError(what, where=self._folder)
            dtype = item.tensor_data.properties.dtype
            if dtype not in DTYPES.values():
                what = f"cannot save {item.index.fqn!r} with dtype {dtype}"
                expected = f"one of {', '.join(DTYPES)}"
                raise CheckpointError(what, where=self._folder, expected=expected)
            if math.prod(item.tensor_data.chunk.sizes) or not math.prod(item.tensor_data.size):
                items.append(item)  # tensors without any values remain in the plan
        return dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Assign each rank the name of its file."""
        return [
            dataclasses.replace(plan, storage_data=f"{self._attempt}-{rank:05d}.bin") for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks to its file (no file if there are none), and return their locations in the file."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint on rank 0 after all ranks have written their files.

        Raises:
            CheckpointError: The index cannot be written, or other ranks' files are not visible to this rank.
            Exception: `confirm` has raised this error.
        """
        written = [result for rank_results in results for result in rank_results]
        chunks = {result.index: result.storage_data for result in written}
        tensors = {}
        for fqn, saved in metadata.state_dict_metadata.items():
            parts = [chunks[MetadataIndex(fqn, chunk.offsets)] for chunk in saved.chunks]
            name = str(saved.properties.dtype).removeprefix("torch.")
            tensors[fqn] = {"dtype": name, "shape": list(saved.size), "chunks": parts}
        sizes: dict[str, int] = {}
        for result in written:
            file, end = result.storage_data["file"], result.storage_data["start"] + result.size_in_bytes
            sizes[file] = max(sizes.get(file, 0), end)
        check_files(self._folder, sizes)
        self._confirm()
        content = {"attempt": self._attempt, "block_bytes": self._block_bytes}
        write_index(self._folder, {**content, "tensors": tensors, "about": self._about})

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        results = []
        with ExitStack() as stack:
            stack.enter_context(convert_write_errors(join_uri(self._folder, plan.storage_data)))
            file = stack.enter_context(RawFileWriter(self._folder, plan.storage_data))
            checks = stack.enter_context(ThreadPoolExecutor(1))
            for item in plan.items:
                tensor = planner.resolve_data(item).detach().as_subclass(torch.Tensor)
                start, crc32 = file.align(), []
                for block in self._read(tensor, self._block_bytes):
                    crc = checks.submit(zlib.crc32, block)  # in parallel with the write
                    file.write(block)
                    crc32.append(crc.result())
                chunk = item.tensor_data.chunk
                place: dict[str, Any] = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                place |= {"file": plan.storage_data, "start": start, "crc32": crc32}
                results.append(WriteResult(item.index, file.size - start, place))
            file.sync()
        return results


class ShardReader(_OneCheckpoint, StorageReader):
    """Reader of a checkpoint into the tensors of a state dict, for `torch.distributed.checkpoint.load`.

    Shards may differ from the saved shards. Values are cast if a tensor's dtype differs from the saved dtype.
    Tensors are written in place while blocks are checked, so their content is undefined after an error. Errors of
    files are raised as CheckpointErrors, on all ranks within torch's CheckpointException.

    Args:
        folder: Local path or URI.
        rows: Table → number of leading rows to present. Other tables are presented as a whole.
    """

    def __init__(self, folder: str, rows: Mapping[str, int] | None = None):
        self._folder, self._rows = folder.rstrip("/"), rows or {}
        self._error: RaytrecError | None = None
        self._chunks: dict[MetadataIndex, StoredChunk] = {}
        self._block_bytes = BLOCK_BYTES

    def read_metadata(self, *args) -> Metadata:
        """Return the metadata of the tensors in the checkpoint; it is empty if the index cannot be read.

        torch's loader would replace an error raised here with an error without location and advice. The error
        is therefore raised later, in `set_up_storage_reader`.
        """
        try:
            index = read_index(self._folder)
            self._block_bytes = index["block_bytes"]
            return to_metadata(index, self._rows)
        except RaytrecError as error:
            self._error = error
            return Metadata({}, storage_data={})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args) -> None:
        """Store the locations of chunks from the metadata, or raise the error that `read_metadata` has stored."""
        if self._error is not None:
            raise self._error
        self._chunks = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Remove the reads of empty shards from the plan."""
        return dataclasses.replace(plan, items=[item for item in plan.items if math.prod(item.lengths)])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned parts of chunks into their tensors, file by file, in the order of their offsets."""
        items_by_chunk: dict[StoredChunk, list[ReadItem]] = {}
        for item in plan.items:
            items_by_chunk.setdefault(self._chunks[item.storage_index], []).append(item)
        in_order = sorted(items_by_chunk, key=lambda chunk: (chunk.file, chunk.start))
        for _, chunks in groupby(in_order, key=lambda chunk: chunk.file):
            self._read_file(list(chunks), items_by_chunk, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(self, chunks: list[StoredChunk], items_by_chunk: dict, planner: LoadPlanner) -> None:
        source = open_data_file(self._folder, chunks[0].file, chunks[0].where(self._folder))
        buffers: SimpleQueue[torch.Tensor] = SimpleQueue()
        largest = max(min(chunk.nbytes, self._block_bytes) for chunk in chunks)
        for _ in range(source.reads):
            buffers.put(torch.empty(largest, dtype=torch.uint8))
        with source, ThreadPoolExecutor(source.reads) as pool:
            for chunk in chunks:
                items = items_by_chunk[chunk]
                targets = [Target(chunk, item, planner.resolve_tensor(item)) for item in items]
                size = self._block_bytes
                numbers = {n for t in targets for n in range(t.begin // size, math.ceil(t.end / size))}
                read = partial(self._read_block, source, chunk, targets, buffers)
                for _ in pool.map(read, sorted(numbers)):
                    pass  # raises the first error and cancels the rest
                for item, target in zip(items, targets, strict=True):
                    planner.commit_tensor(item, target.tensor)

    def _read_block(
        self, source: Source, chunk: StoredChunk, targets: list[Target], buffers: SimpleQueue, number: int
    ) -> None:
        """Read a block, verify its checksum, and copy it to the overlapping targets; called in several threads."""
        begin = number * self._block_bytes
        end = min(begin + self._block_bytes, chunk.nbytes)
        overlapping = [target for target in targets if target.begin < end and begin < target.end]
        if len(overlapping) == 1 and (into := overlapping[0].memory(begin, end)) is not None:
            chunk.read_block(source, self._folder, number, self._block_bytes, into)
            return
        buffer = buffers.get()
        try:
            into = memoryview(buffer.numpy())[: end - begin]
            chunk.read_block(source, self._folder, number, self._block_bytes, into)
            for target in overlapping:
                target.take(buffer[: end - begin].view(DTYPES[chunk.dtype]), begin)
        finally:
            buffers.put(buffer)


def load(folder: str, tensors: State, rows: dict[str, int] | None = None) -> None:
    """Fill tensors in place with values from a checkpoint.

    If torch.distributed is initialized, this is a collective operation: every rank must call it.

    Args:
        folder: Folder of the checkpoint.
        tensors: Name → destination; the checkpoint must contain every name, with the same shape.
        rows: Table → number of leading rows to read, which is also the destination's number of rows. Other
            tables are read as a whole.

    Raises:
        CheckpointError: Data is damaged or missing, or a tensor has another shape; raised on every rank.
        DataError: The path is not valid, or a rank cannot reach the store; raised on every rank.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecations within torch, on which users cannot act
            dcp.load(tensors, storage_reader=ShardReader(folder, rows))
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        cause = get_root_cause(error)
        if isinstance(cause, RaytrecError):
            raise cause from None
        # torch's message for a tensor that is missing or has another shape
        errors = [failure[0] for failure in getattr(error, "failures", {}).values()] or [error]
        first_lines = [(str(each).splitlines() or [""])[0] for each in errors]
        mismatches = [line for line in first_lines if "Missing key in checkpoint" in line or "ize mismatch" in line]
        if not mismatches:
            raise
        raise CheckpointError(
            f"the checkpoint does not match the model: {mismatches[0]}",
            where=folder,
            expected="all tensors that the configuration and schema require, in the same shapes",
            do="use another checkpoint, its run's model and schema or, for dense layers, warm_start.dense=matching",
        ) from None
