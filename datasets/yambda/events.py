"""Read events of Yambda from its public layout of Parquet files.

flat/SIZE/ has one row per event, sorted by user and time: uid, timestamp (seconds, in steps of 5), item_id,
is_organic and, for listens, played_ratio_pct and track_length_seconds. sequential/SIZE/ has one row per user with
lists of the same values. Both contain multi_event.parquet with event_type, or one file for each type.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raytrec.common.errors import DataError

TYPES = ("listen", "like", "dislike", "unlike", "undislike")
LISTEN, LIKE = 0, 1
FINISHED_PERCENT = 50  # a listen counts as finished from this share of the track on
COLUMNS = ("uid", "timestamp", "item_id", "is_organic")
RENAMED = {"item_ids": "item_id", "timestamps": "timestamp", "event_types": "event_type"}  # sequential layouts


@dataclass(frozen=True)
class Events:
    """Events of all users, sorted by user, then by time; ids are consecutive from 0.

    Attributes:
        user: User of each event, int32 [n].
        time: Seconds since the start of the log, int32 [n].
        item: Item of each event, int32 [n].
        kind: Index in TYPES, int8 [n].
        played: Share of the track that was played, in percent; 0 for events other than listens; int32 [n].
        organic: 1 if the user chose the item, 0 if it was recommended; int8 [n].
        artist: Artist of each item, 0 if unknown; int32 [items].
        album: Album of each item, 0 if unknown; int32 [items].
        users: Key of each user in the source.
        items: Key of each item in the source.
    """

    user: np.ndarray
    time: np.ndarray
    item: np.ndarray
    kind: np.ndarray
    played: np.ndarray
    organic: np.ndarray
    artist: np.ndarray
    album: np.ndarray
    users: np.ndarray
    items: np.ndarray

    def __len__(self) -> int:
        return len(self.user)


def read_events(source: Path, size: str) -> Events:
    """Read all events and the artists and albums of their items.

    An item with several artists or albums has the last of them.

    Raises:
        DataError: The folder does not have Yambda's layout, or a file cannot be read, lacks a column or contains an
            unknown type of event.
    """
    folder = next((path for name in ("flat", "sequential") if (path := source / name / size).is_dir()), None)
    mapping = {name: source / f"{name}_item_mapping.parquet" for name in ("artist", "album")}
    paths = [folder / "multi_event.parquet"] if folder else []
    if folder and not paths[0].exists():
        paths = [path for kind in TYPES if (path := folder / f"{kind}s.parquet").exists()]
    if not paths or not all(path.exists() for path in mapping.values()):
        raise DataError(
            "the source does not have Yambda's layout",
            where=str(source),
            expected=f"flat/{size}/ or sequential/{size}/, with multi_event.parquet or files such as listens.parquet; "
            "and next to flat/ or sequential/, " + " and ".join(path.name for path in mapping.values()),
            do="set --source to the folder with the downloaded files of yandex/yambda, and --size to their size",
        )
    table = pa.concat_tables([_read(path) for path in paths])
    if len(paths) > 1:
        table = table.sort_by([("uid", "ascending"), ("timestamp", "ascending")])
    columns = {name: table[name].to_numpy() for name in table.column_names}
    users, user = np.unique(columns["uid"], return_inverse=True)
    items, item = np.unique(columns["item_id"], return_inverse=True)
    kinds = {"kind": np.int8, "organic": np.int8}
    values = {"user": user, "item": item, "organic": columns["is_organic"], "time": columns["timestamp"]}
    values |= {"kind": columns["kind"], "played": columns["played"]}
    values |= {name: _read_mapping(path, name, items) for name, path in mapping.items()}
    typed = {name: value.astype(kinds.get(name, np.int32)) for name, value in values.items()}
    return Events(users=users, items=items, **typed)


def _read_table(path: Path) -> pa.Table:
    try:
        return pq.ParquetFile(path).read()
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"cannot read the file: {error}", where=str(path), do="download it again") from None


def _check_columns(table: pa.Table, columns: tuple[str, ...], path: Path) -> None:
    if missing := [name for name in columns if name not in table.column_names]:
        raise DataError(f"column {missing[0]} is missing", where=str(path), expected=", ".join(columns))


def _read(path: Path) -> pa.Table:
    """Return the events of a file with the columns COLUMNS, kind and played.

    Raises:
        DataError: The file cannot be read, lacks a column, or contains an unknown type of event.
    """
    table = _read_table(path)
    table = table.rename_columns([RENAMED.get(name, name) for name in table.column_names])
    _check_columns(table, COLUMNS, path)
    lists = [name for name in table.column_names if pa.types.is_list(table[name].type)]
    if lists:
        users = table["uid"].combine_chunks().take(pc.list_parent_indices(table[lists[0]].combine_chunks()))
        table = pa.table({"uid": users} | {name: pc.list_flatten(table[name]) for name in lists})
        _check_columns(table, COLUMNS, path)  # columns without lists were dropped
    if "event_type" in table.column_names:
        kind = pc.index_in(table["event_type"].cast(pa.string()), pa.array(TYPES))
        if kind.null_count:
            place = pc.index(kind.is_null(), True).as_py()
            raise DataError(
                f"event_type contains {table['event_type'][place].as_py()!r}",
                where=f"{path}, event {place:,}",
                expected=", ".join(TYPES),
            )
    else:
        kind = pa.array(np.full(len(table), TYPES.index(path.stem.removesuffix("s")), np.int32))
    zero = pa.array(np.zeros(len(table), np.uint16))
    played = table["played_ratio_pct"].fill_null(0) if "played_ratio_pct" in table.column_names else zero
    columns = {name: table[name] for name in COLUMNS}
    return pa.table(columns | {"kind": kind, "played": pc.cast(played, pa.int32())})


def _read_mapping(path: Path, name: str, items: np.ndarray) -> np.ndarray:
    """Return the consecutive number of each item's artist or album, from 1; 0 if unknown.

    Raises:
        DataError: The file cannot be read or lacks a column.
    """
    table = _read_table(path)
    columns = ("item_id", f"{name}_id")
    _check_columns(table, columns, path)
    keys, values = (table[column].to_numpy() for column in columns)
    at = np.minimum(np.searchsorted(items, keys), len(items) - 1)
    known = items[at] == keys
    result = np.zeros(len(items), np.int32)
    result[at[known]] = np.unique(values[known], return_inverse=True)[1] + 1
    return result
