"""Load checkpoints into live models under any sharding plan, and gather and load managed ids.

Managed ids are saved as tensors that depend neither on the sharding plan nor on the number of ranks:

    ids/TABLE/id            int64 [n], ids that have a row
    ids/TABLE/row, sightings, last
                            int64 [n], for each id: row, number of sightings, step of the last sighting
    ids/TABLE/waiting_id, waiting_sightings, waiting_last
                            int64 [m], the same for ids that have not been seen often enough to get a row
    ids/TABLE/left          int64 [l], rows of removed ids, in the order in which the rows will be reassigned

Ids are sorted by their keys (embeddings/hashing.py). Empty tensors are not saved. The index stores the
lengths of the tensors and other values of each map under `ids`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from raytrec.checkpoint.files import iterate_indexes
from raytrec.checkpoint.index import CheckpointError
from raytrec.checkpoint.state import LogicalState, State, find_nonfinite, summarize_over_ranks
from raytrec.checkpoint.storage import load
from raytrec.common.collectives import Peers, RoundTrip
from raytrec.compat.torch_ import Shard, ShardedTensor, ShardMetadata, make_sharded_tensor
from raytrec.config.schema import Table
from raytrec.embeddings.hashing import count_by_owner, ids_to_keys, unhash_bits
from raytrec.embeddings.managed.key_map import FreeRows, KeyEntries, MapState
from raytrec.embeddings.managed.row_map import RowMap
from raytrec.scoring.lookups import IdRows

ROWS, WAITING = ("row", "sightings", "last"), ("sightings", "last")


@dataclass
class RestoreResult:
    """Result of `restore`.

    Attributes:
        folder: Folder of the restored checkpoint; None if there is no usable checkpoint.
        about: Entry "about" of the checkpoint's index.
        skip_reasons: Reason for each checkpoint that was skipped, newest first.
    """

    folder: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    skip_reasons: list[str] = field(default_factory=list)


def restore(
    root: str,
    state: LogicalState,
    maps: Mapping[str, RowMap] | None = None,
    find_obstacle: Callable[[dict[str, Any]], str | None] = lambda about: None,
    on_load: Callable[[], None] = lambda: None,
) -> RestoreResult:
    """Load the newest valid checkpoint into a model and its maps of managed ids.

    This is a collective operation: every rank must call it. Checkpoints that are incomplete or damaged, contain NaN or
    infinity, do not match the model, or cannot be resumed are skipped.

    Args:
        root: Folder of all checkpoints.
        state: State of the model, which is overwritten; its content is undefined after an error.
        maps: Table → this rank's part of its map; None if no table has managed ids.
        find_obstacle: Function that returns why a run cannot resume from an index's `about`, or None; called on rank 0.
        on_load: Function called before each attempt to load a checkpoint.

    Raises:
        CheckpointError: At least one checkpoint has a usable index, but none can be loaded with finite values.
        DataError: The path is not valid, or a rank cannot reach the store.
        OSError: Rank 0 cannot list the checkpoints; the other ranks then wait until their collective times out.
        KeyError: As in `load_with_ids`.
    """
    checkpoints: list[Any] = [None]
    if dist.get_rank() == 0:
        checkpoints[0] = [
            (folder, index.get("about", {}), error and f"{error.what} ({error.where})")
            for folder, index, error in iterate_indexes(root, find_obstacle)
        ]
    dist.broadcast_object_list(checkpoints)
    result, unreadable = RestoreResult(), 0
    for folder, about, reason in checkpoints[0]:
        if reason:
            result.skip_reasons.append(reason)
            continue
        try:
            on_load()
            load_with_ids(folder, state.tensors(), maps or {}, about)
            # Training cannot recover from NaN or infinity in its state.
            if nonfinite := summarize_over_ranks(find_nonfinite(state.tensors(), state.unbounded)):
                raise CheckpointError(f"the checkpoint contains NaN or infinity: {nonfinite}", where=folder)
        except CheckpointError as error:
            result.skip_reasons.append(f"{error.what} ({error.where})")
            unreadable += 1
            continue
        state.refresh_kernels()
        result.folder, result.about = folder, about
        return result
    if unreadable:
        raise CheckpointError(
            f"no checkpoint can be restored ({unreadable} tried): " + "; ".join(result.skip_reasons),
            where=root,
            expected="at least one checkpoint that can be read, matches the model and contains only finite values",
            do="correct the causes, restore a checkpoint from a backup, or remove all checkpoints to start over",
        )
    return result


def gather_ids(maps: Mapping[str, RowMap]) -> tuple[State, dict[str, Any]]:
    """Return the managed ids of the tables in `maps` as tensors, and the index entry that describes them.

    This is a collective operation: every rank must call it.

    Args:
        maps: Table → this rank's part of its map. No pipeline may have mapped ids of batches that the
            model has not been trained on.

    Returns:
        (tensors in host memory, which do not change when training continues; {"ids": table → entry} for the index's
        `about`). An entry has the lengths of the tensors (rows, waiting, left) and FreeRows.handed. Both parts are
        empty if `maps` is empty.
    """
    peers, tensors, about = Peers(), {}, {}
    for table, part in maps.items():
        state = part.state()
        rows, waiting = state.rows.in_order(), state.waiting.in_order()
        device = rows.keys.device
        sizes = peers.stack(torch.tensor([len(rows), len(waiting)], device=device)).T.tolist()
        tensors |= _to_columns(f"ids/{table}/", rows, ROWS, sizes[0], peers)
        tensors |= _to_columns(f"ids/{table}/waiting_", waiting, WAITING, sizes[1], peers)
        if len(state.free.left):
            tensors[f"ids/{table}/left"] = state.free.left.cpu().clone()
        about[table] = {
            "rows": sum(sizes[0]),
            "waiting": sum(sizes[1]),
            "left": len(state.free.left),
            "handed": state.free.handed,
        }
    return tensors, {"ids": about} if about else {}


def load_with_ids(
    folder: str,
    tensors: State,
    maps: Mapping[str, RowMap],
    about: Mapping[str, Any],
    rows: dict[str, int] | None = None,
    *,
    new_run: bool = False,
) -> None:
    """Read tensors, and the managed ids of the tables in `maps`, from a checkpoint.

    This is a collective operation: every rank must call it.

    Args:
        folder: Folder of the checkpoint.
        tensors: As in `load`.
        maps: Table → this rank's part of its map, whose content is replaced.
        about: Entry "about" of the checkpoint's index.
        rows: As in `load`.
        new_run: True if a new run starts from the checkpoint; all ids then count as last seen before its first step.

    Raises:
        CheckpointError, DataError: As in `load`.
        KeyError: `about` does not describe the managed ids of a table.
    """
    sizes_of, ids = about.get("ids", {}), {}
    for table in maps:
        ids |= _allocate_ids(table, sizes_of[table])
    load(folder, tensors | ids, rows)
    for table, part in maps.items():
        sizes, device = sizes_of[table], part.device
        own_ids, waiting = (_send_to_owners(names, ids, device) for names, _ in _list_tensor_names(table, sizes))
        free_rows = ids.get(f"ids/{table}/left", torch.empty(0, dtype=torch.int64)).to(device)
        if new_run:
            for entries in (own_ids, waiting):
                entries.fields["last"].fill_(-1)
        part.load(MapState(own_ids, waiting, FreeRows(sizes["handed"], free_rows)))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # the pipeline reads the map on another stream


def _allocate_ids(table: str, sizes: Mapping[str, int]) -> State:
    """Allocate the tensors into which this rank reads its part of a table's saved ids, and all rows of removed ids.

    `sizes` is the table's entry for managed ids in the index (see `gather_ids`).
    """
    peers, tensors = Peers(), {}
    for names, count in _list_tensor_names(table, sizes):
        starts = [count * rank // peers.world for rank in range(peers.world + 1)]
        parts = [end - start for start, end in pairwise(starts)]
        for name in names if count else ():
            tensors[name] = _to_sharded(torch.empty(parts[peers.rank], dtype=torch.int64), parts, peers)
    if sizes["left"]:
        tensors[f"ids/{table}/left"] = torch.empty(sizes["left"], dtype=torch.int64)
    return tensors


def read_id_rows(folder: str, index: Mapping[str, Any], name: str, table: Table | None) -> IdRows:
    """Return the mapping from managed ids to rows of a table in a checkpoint.

    No process group is needed.

    Args:
        folder: Folder of the checkpoint.
        index: Index of the checkpoint.
        name: Name of the table.
        table: Settings of the table; None if only ids with their own row are needed.

    Raises:
        CheckpointError, DataError: As in `load`.
        KeyError: The index does not describe the managed ids of the table.
    """
    saved = read_stored_ids(folder, index, name, ("id", "row"))
    return IdRows(table, ids_to_keys(saved["id"]), saved["row"])


def read_stored_ids(
    folder: str, index: Mapping[str, Any], table: str, kinds: tuple[str, ...] = ("id", *ROWS)
) -> dict[str, torch.Tensor]:
    """Return columns of the ids that have a row in a checkpoint: kind → int64 [n].

    The values are sorted by the ids' keys. No process group is needed.

    Args:
        folder: Folder of the checkpoint.
        index: Index of the checkpoint.
        table: Name of the table.
        kinds: Columns to read: "id", "row", "sightings" or "last".

    Raises:
        CheckpointError, DataError: As in `load`.
        KeyError: The index does not describe the managed ids of the table.
    """
    count = index["about"]["ids"][table]["rows"]
    columns = {kind: torch.empty(count, dtype=torch.int64) for kind in kinds}
    if count:
        load(folder, {f"ids/{table}/{kind}": values for kind, values in columns.items()})
    return columns


def _list_tensor_names(table: str, sizes: Mapping[str, int]) -> list[tuple[list[str], int]]:
    """Return (tensor names, length of each tensor) for ids with a row, and then for waiting ids."""
    of_rows = [f"ids/{table}/{name}" for name in ("id", *ROWS)]
    of_waiting = [f"ids/{table}/waiting_{name}" for name in ("id", *WAITING)]
    return [(of_rows, sizes["rows"]), (of_waiting, sizes["waiting"])]


def _to_columns(prefix: str, entries: KeyEntries, names: tuple[str, ...], sizes: list[int], peers: Peers) -> State:
    """Return the entries of all ranks in rank order: name → sharded int64 [Σ sizes]; {} if there are none."""
    if not sum(sizes):
        return {}
    columns = {"id": unhash_bits(entries.keys)} | {name: entries.fields[name].long() for name in names}
    return {f"{prefix}{name}": _to_sharded(values.cpu(), sizes, peers) for name, values in columns.items()}


def _to_sharded(values: torch.Tensor, sizes: list[int], peers: Peers) -> ShardedTensor:
    """Return a sharded tensor [Σ sizes], in which rank r holds sizes[r] consecutive values."""
    metadata, start, local_shards = [], 0, []
    for rank, size in enumerate(sizes):
        if size:
            metadata.append(ShardMetadata([start], [size], f"rank:{rank}/cpu"))
            local_shards += [Shard(values, metadata[-1])] if rank == peers.rank else []
        start += size
    return make_sharded_tensor(local_shards, metadata, (start,), values.dtype)


def _send_to_owners(names: list[str], tensors: State, device: torch.device) -> KeyEntries:
    """Send the entries that this rank has read to their owners, and return the entries that this rank owns.

    This is a collective operation: every rank must call it.
    """
    peers = Peers()
    local = [tensors[name].local_shards() if name in tensors else [] for name in names]
    empty = torch.empty(0, dtype=torch.int64)
    columns = torch.stack([shards[0].tensor if shards else empty for shards in local], 1).to(device)
    keys = ids_to_keys(columns[:, 0])
    sizes = count_by_owner(torch.zeros_like(keys), keys, 1, peers.world)
    ids, *fields = RoundTrip(columns, sizes, peers).received.unbind(1)
    kinds = [name.rpartition("/")[2].removeprefix("waiting_") for name in names[1:]]
    return KeyEntries(ids_to_keys(ids), dict(zip(kinds, fields, strict=True)))
