"""Read events of Yambda from its public layout of Parquet files, or generate events in this layout.

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

# Proportions of generated events, as in Yambda 50m, where 61 % of the listens are finished.
ITEMS_PER_USER_DAY, LISTENS_PER_DAY, ITEMS_PER_ARTIST, ITEMS_PER_ALBUM = 93 / 300, 15.5, 7, 3
LIKED, OTHER = 0.03, (0.003, 0.006, 0.001)  # likes per finished listen; dislikes, unlikes, undislikes per listen
STYLES, RHO, STRENGTH, BIAS = 4, 0.9, 1.0, 0.6
DAY_S, TRACK_S, STEP_S, UNSET = 86_400, 200, 5, -1


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
        DataError: The folder does not have Yambda's layout.
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


def _read(path: Path) -> pa.Table:
    """Return the events of a file with the columns COLUMNS, kind and played."""
    file = pq.ParquetFile(path)
    table = file.read()
    table = table.rename_columns([RENAMED.get(name, name) for name in table.column_names])
    lists = [name for name in table.column_names if pa.types.is_list(table[name].type)]
    if lists:
        users = table["uid"].combine_chunks().take(pc.list_parent_indices(table[lists[0]].combine_chunks()))
        table = pa.table({"uid": users} | {name: pc.list_flatten(table[name]) for name in lists})
    if missing := [name for name in COLUMNS if name not in table.column_names]:
        raise DataError(f"column {missing[0]} is missing", where=str(path), expected=", ".join(COLUMNS))
    if "event_type" in table.column_names:
        kind = pc.index_in(table["event_type"].cast(pa.string()), pa.array(TYPES))
    else:
        kind = pa.array(np.full(len(table), TYPES.index(path.stem.removesuffix("s")), np.int32))
    zero = pa.array(np.zeros(len(table), np.uint16))
    played = table["played_ratio_pct"].fill_null(0) if "played_ratio_pct" in table.column_names else zero
    columns = {name: table[name] for name in COLUMNS}
    return pa.table(columns | {"kind": kind, "played": pc.cast(played, pa.int32())})


def _read_mapping(path: Path, name: str, items: np.ndarray) -> np.ndarray:
    """Return the consecutive number of each item's artist or album, from 1; 0 if unknown."""
    table = pq.read_table(path)
    keys, values = table["item_id"].to_numpy(), table[f"{name}_id"].to_numpy()
    at = np.minimum(np.searchsorted(items, keys), len(items) - 1)
    known = items[at] == keys
    result = np.zeros(len(items), np.int32)
    result[at[known]] = np.unique(values[known], return_inverse=True)[1] + 1
    return result


def write_source(folder: Path, size: str, users: int, days: int, seed: int) -> float:
    """Generate flat/SIZE/multi_event.parquet and the mappings, with planted preferences that drift by day.

    A user's taste z and an artist's style v are Gaussian vectors. From day to day, z moves by
    z' = RHO · z + sqrt(1 − RHO²) · noise. A listen is finished with probability sigmoid(BIAS + STRENGTH · z·w), where w
    is the item's vector: mostly its artist's. Only recent events of a user therefore predict the next one.

    Returns:
        AUC of the true probabilities for the last day's listens.
    """
    rng = np.random.default_rng(seed)
    items = max(ITEMS_PER_ARTIST, round(ITEMS_PER_USER_DAY * users * days))
    artist, album = (1 + rng.permutation(items) // per for per in (ITEMS_PER_ARTIST, ITEMS_PER_ALBUM))
    style = rng.normal(size=(artist.max() + 1, STYLES))[artist] + 0.5 * rng.normal(size=(items, STYLES))
    style /= np.sqrt(1.25)
    taste, activity = rng.normal(size=(users, STYLES)), rng.gamma(1.0, LISTENS_PER_DAY, users)
    parts = []
    for day in range(days):
        counts = rng.poisson(activity)
        user = np.repeat(np.arange(users), counts)
        item = np.minimum(np.exp(rng.random(len(user)) * np.log(items)).astype(np.int64) - 1, items - 1)
        logit = BIAS + STRENGTH * np.einsum("nd,nd->n", taste[user], style[item])
        p = 1 / (1 + np.exp(-logit))
        finished = rng.random(len(user)) < p
        session = np.sort(rng.integers(8, 23, (users, 3)), axis=1)[user, rng.integers(0, 3, len(user))]
        order = np.lexsort((session, user))
        user, item, p, finished, session = (x[order] for x in (user, item, p, finished, session))
        starts = np.flatnonzero(np.diff(user * 24 + session, prepend=-1))
        place = np.arange(len(user)) - np.repeat(starts, np.diff(starts, append=len(user)))
        time = np.minimum(day * DAY_S + session * 3600 + place * TRACK_S, (day + 1) * DAY_S - 2 * STEP_S)
        played = np.where(finished, rng.integers(50, 101, len(user)), rng.integers(0, 50, len(user)))
        organic = rng.random(len(user)) < 0.5
        listens = np.stack([user, time, item, organic, np.zeros_like(user), played])
        drawn = rng.random(len(user))
        chosen = [finished & (drawn < LIKED)]
        chosen += [(drawn >= low) & (drawn < low + share) for low, share in zip((0.1, 0.2, 0.3), OTHER, strict=True)]
        parts.append(listens)
        for kind, mask in enumerate(chosen, 1):
            others = listens[:, mask]
            parts.append(np.stack([*others[:1], others[1] + STEP_S, *others[2:4], np.full_like(others[0], kind)]))
            parts[-1] = np.vstack([parts[-1], np.full_like(others[:1], UNSET)])
        taste = RHO * taste + np.sqrt(1 - RHO**2) * rng.normal(size=taste.shape)
    events = np.concatenate(parts, axis=1)
    user, time, item, organic, kind, played = events[:, np.lexsort((events[4], events[1], events[0]))]
    is_listen = kind == 0
    (folder / "flat" / size).mkdir(parents=True)
    columns = {
        "uid": user.astype(np.uint32) + 1,
        "timestamp": time.astype(np.uint32),
        "item_id": item.astype(np.uint32) + 1,
        "is_organic": organic.astype(np.uint8),
        "played_ratio_pct": pa.array(np.where(is_listen, played, 0).astype(np.uint16), mask=~is_listen),
        "track_length_seconds": pa.array(np.full(len(kind), TRACK_S, np.uint32), mask=~is_listen),
        "event_type": pa.DictionaryArray.from_arrays(pa.array(kind.astype(np.int8)), pa.array(TYPES)),
    }
    pq.write_table(pa.table(columns), folder / "flat" / size / "multi_event.parquet", compression="zstd")
    keys = np.arange(1, items + 1, dtype=np.uint32)
    for name, values in (("artist", artist), ("album", album)):
        table = pa.table({f"{name}_id": values.astype(np.uint32), "item_id": keys})
        pq.write_table(table, folder / f"{name}_item_mapping.parquet", compression="zstd")
    return compute_auc(p, finished)


def compute_auc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Return the area under the ROC curve of distinct scores."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = int(labels.sum())
    pairs = positive * (len(scores) - positive)
    return float((ranks[labels].sum() - positive * (positive + 1) / 2) / pairs) if pairs else 0.5
