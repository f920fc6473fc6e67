"""Write Yambda's events as requests, in a folder per day.

train/day=NNN/ has the rows of a day, user after user, and in chronological order for each user. test/ has the last
day, and with --valid, valid/ has the day before the last. If --candidates is more than 1, the columns marked with *
are lists with a value for each candidate of a request.

    listen_plus*       1 if at least half of the track was played
    liked*             1 if the user's next event with the item is a like within LIKE_S seconds after the listen
    uid                user
    item_id*, artist_id*, album_id*
    user_x_artist*, …  hashed crosses of ids, the hour of the day and is_organic (CROSSES)
    history            items of earlier events of the user, the most recent last: of each kind (finished, liked and
                       skipped), the last --history ÷ 3 among the user's last SCAN_EVENTS events
    history_artist, history_album
    history_action     kind of each event: 1 finished, 2 liked, 4 skipped
    history_time       seconds since the start of the log
    time               time of the request

users/ and items/ map ids to the keys of the source.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from raytrec_datasets.interactions.rows import slices
from raytrec_datasets.writing import Output, SplitWriter, progress, write_table
from raytrec_datasets.yambda.events import FINISHED_PERCENT, LIKE, LISTEN, Events, read_events
from raytrec_datasets.yambda.synthetic import DAY_S, write_source

from raytrec.common.errors import ConfigError
from raytrec.common.storage import make_relative
from raytrec.config.overrides import to_override_texts
from raytrec.config.schema import Schema

FINISHED, LIKED, SKIPPED = 1, 2, 4  # values of history_action
SCAN_EVENTS = 20_000
SESSION_S, LIKE_S = 1800, 1800
CHUNK_IDS = 4_000_000  # maximum number of ids of histories in memory at a time, and in a row group
# Name → (parts, number of rows of the table for the million users of Yambda 5b, as in DLRMv4).
CROSSES = {
    "user_x_artist": (("uid", "artist_id"), 100_000_000),
    "user_x_album": (("uid", "album_id"), 40_000_000),
    "user_x_hour": (("uid", "hour"), 24_000_000),
    "item_x_hour": (("item_id", "hour"), 40_000_000),
    "artist_x_hour": (("artist_id", "hour"), 32_000_000),
    "user_x_is_organic": (("uid", "is_organic"), 2_000_000),
    "user_x_artist_x_hour": (("uid", "artist_id", "hour"), 40_000_000),
}
LABELS, IDS = ["listen_plus", "liked"], ["item_id", "artist_id", "album_id"]
OF_REQUEST = ("uid", "user_x_hour")
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 ÷ golden ratio (Knuth's multiplicative hash)


def write(
    out: Path,
    source: Path | None,
    size: str,
    synthetic: int,
    days: int,
    history: int,
    min_history: int,
    candidates: int,
    first_day: int,
    valid: bool,
    seed: int,
    dim: int,
    force: bool,
) -> None:
    """Write the dataset; the arguments are those of `raytrec prepare yambda`.

    Raises:
        ConfigError: Not exactly one of `source` and `synthetic` is given, a split has no rows, or the output folder
            cannot be replaced (`Output.is_ready`).
        DataError: The source is invalid (`read_events`).
    """
    options = {name: value for name, value in locals().items() if name not in ("out", "force")}
    if (source is None) != bool(synthetic):
        raise ConfigError(
            "exactly one of --source and --synthetic is required",
            where="raytrec prepare yambda",
            do="pass --source DIR for Yambda's files, or --synthetic USERS to generate some",
        )
    source = source and source.expanduser().absolute()
    output = Output(out, "yambda", options | {"source": source and str(source)}, force)
    if not output.is_ready():
        with output:
            folder, facts = source, {}
            if folder is None:
                folder = output.partial / "source"
                facts = {"best_auc": write_source(folder, size, synthetic, days, seed)}
            events = read_events(folder, size)
            rows = Requests(events, history, min_history, candidates)
            counts = _write_days(output.partial, rows, first_day, valid)
            for name, keys in (("user", events.users), ("item", events.items)):
                ids = np.arange(len(keys), dtype=np.int32)
                write_table(output.partial / f"{name}s", pa.table({name: ids, f"{name}_key": keys}))
            schema = make_schema(rows.table_rows, candidates, dim)
            output.finish(schema, counts, days=rows.days, events=len(events), **facts)
    best = output.facts().get("best_auc")
    lines = [] if best is None else [f"AUC of the planted preferences on test, listen_plus: {best:.4f}"]
    settings = [f"data.schema={make_relative(output.folder)}/schema.yaml"]
    if valid:  # the job's schedule evaluates on the next day instead
        settings.append("train.eval_every_steps=auto")
    if candidates > 1:
        settings += to_override_texts({"model.candidate": [name for name in CROSSES if name not in OF_REQUEST]})
    output.summary("dlrm_v4", settings, lines)


def _write_days(folder: Path, rows: Requests, first_day: int, valid: bool) -> dict[str, int]:
    """Write the rows of each day, and return the number of rows in each split.

    Raises:
        ConfigError: A split has no rows.
    """
    named = {rows.days - 1: "test"} | ({rows.days - 2: "valid"} if valid else {})
    counts = dict.fromkeys(["train", *named.values()], 0)
    with progress("days", rows.days) as advance:
        for day in range(first_day, rows.days):
            split = named.get(day, "train")
            place, writer = folder / split / (f"day={day:03d}" if split == "train" else ""), None
            for table in rows.of_day(day):
                group_rows = max(64, min(16_384, CHUNK_IDS // rows.history))
                writer = writer or SplitWriter(place, table.schema, group_rows)
                writer.write(table)
            if writer:
                writer.close()
                counts[split] += writer.rows
            advance(1)
    if not all(counts.values()):
        raise ConfigError(
            f"these splits have no rows: {', '.join(split for split, count in counts.items() if not count)}",
            where="raytrec prepare yambda",
            expected="listens in each split",
            do="lower --first-day or --min-history, or increase --days with --synthetic",
        )
    return counts


def make_schema(table_rows: dict[str, int], candidates: int, dim: int) -> Schema:
    """Return the schema of the dataset; sequences share the tables of items, artists and albums.

    Args:
        table_rows: Table → number of its rows (Requests.table_rows).
        candidates: Maximum number of candidates of a request; above 1, some columns are lists.
        dim: Dim of all tables.
    """
    sparse: dict[str, dict] = {name: {"table": name} for name in table_rows}
    sides = {"side_features": ["history_action", "history_time"]}
    for name, table in zip(("history", "history_artist", "history_album"), IDS, strict=True):
        sparse[name] = {"table": table, "pooling": "sequence"} | (sides if name == "history" else {})
    lists = [*LABELS, *(name for name in table_rows if name not in OF_REQUEST)] if candidates > 1 else []
    tables = {name: {"rows": rows, "dim": dim} for name, rows in table_rows.items()}
    values = {"labels": LABELS, "dense": ["time"], "sparse": sparse, "tables": tables, "candidates": lists}
    return Schema.parse(values, "schema.yaml")


class Requests:
    """Rows of the dataset, which are made from the events of all users.

    Args:
        events: Events of a source.
        history: Maximum number of ids in a history.
        min_history: Minimum number of earlier events of a user.
        candidates: Maximum number of candidates of a request.

    Attributes:
        days: Number of days in the log.
        table_rows: Number of rows of each table, by name.
    """

    def __init__(self, events: Events, history: int, min_history: int, candidates: int):
        self.events, self.history, self._candidates = events, history, candidates
        self.days = int(events.time.max()) // DAY_S + 1
        listens, finished = events.kind == LISTEN, events.played >= FINISHED_PERCENT
        self._action = np.select(
            [listens & finished, events.kind == LIKE, listens], [FINISHED, LIKED, SKIPPED], 0
        ).astype(np.int8)
        self._kinds = [np.flatnonzero(self._action == kind) for kind in (FINISHED, LIKED, SKIPPED)]
        self._start = np.searchsorted(events.user, np.arange(len(events.users)))  # first event of each user
        place = np.arange(len(events)) - self._start[events.user]
        targets = np.flatnonzero(listens & (place >= min_history))
        self._targets = targets[np.argsort(events.time[targets] // DAY_S, kind="stable")]
        self._day_ends = np.searchsorted(events.time[self._targets] // DAY_S, np.arange(self.days), side="right")
        self._liked = _find_liked(events)
        users = len(events.users)
        sizes = users, len(events.items), int(events.artist.max()) + 1, int(events.album.max()) + 1
        crosses = {name: max(1, rows * users // 1_000_000) for name, (_, rows) in CROSSES.items()}
        self.table_rows = dict(zip(("uid", *IDS), sizes, strict=True)) | crosses

    def of_day(self, day: int) -> Iterator[pa.Table]:
        """Yield the rows of a day, from 0, in tables with limited numbers of ids."""
        targets = self._targets[self._day_ends[day - 1] if day else 0 : self._day_ends[day]]
        firsts = self._cut_requests(targets)
        step = max(1, CHUNK_IDS // self.history)
        for start in range(0, len(firsts), step):
            part = firsts[start : start + step + 1]
            stop = part[step] if len(part) > step else len(targets)
            yield self._table(targets[part[0] : stop], part[:step] - part[0])

    def _cut_requests(self, targets: np.ndarray) -> np.ndarray:
        """Return the index of the first target of each request."""
        user, time = self.events.user[targets], self.events.time[targets]
        is_first = np.ones(len(targets), bool)
        is_first[1:] = (user[1:] != user[:-1]) | (np.diff(time) > SESSION_S)
        sessions = np.flatnonzero(is_first)
        place = np.arange(len(targets)) - np.repeat(sessions, np.diff(sessions, append=len(targets)))
        return np.flatnonzero(place % self._candidates == 0)

    def _table(self, targets: np.ndarray, firsts: np.ndarray) -> pa.Table:
        """Return the rows of requests; `firsts` are the indexes of their first targets."""
        events, lengths = self.events, np.diff(firsts, append=len(targets))
        item = events.item[targets]
        ids = {"uid": events.user[targets], "item_id": item}
        ids |= {"artist_id": events.artist[item], "album_id": events.album[item]}
        time = events.time[targets]
        keys = ids | {"hour": time // 3600 % 24, "is_organic": events.organic[targets]}
        keys["hour"] = np.repeat(keys["hour"][firsts], lengths)
        labels = {"listen_plus": (self._action[targets] == FINISHED).astype(np.int8), "liked": self._liked[targets]}
        crosses = {
            name: _hash([keys[part] for part in parts], self.table_rows[name]) for name, (parts, _) in CROSSES.items()
        }
        columns: dict[str, pa.Array] = {}
        for name, values in (labels | ids | crosses).items():
            if self._candidates == 1 or name in OF_REQUEST:
                columns[name] = pa.array(values[firsts])
            else:
                columns[name] = slices(values, firsts, lengths)
        past, offsets = self._find_history(targets[firsts])
        item = events.item[past]
        read = {"history": item, "history_artist": events.artist[item], "history_album": events.album[item]}
        read |= {"history_action": self._action[past], "history_time": events.time[past]}
        columns |= {name: pa.ListArray.from_arrays(offsets, pa.array(values)) for name, values in read.items()}
        return pa.table(columns | {"time": time[firsts]})

    def _find_history(self, targets: np.ndarray) -> tuple[np.ndarray, pa.Array]:
        """Return the events of each target's history, target after target, and the offsets of the targets."""
        low = np.maximum(self._start[self.events.user[targets]], targets - SCAN_EVENTS)
        keys, total = [], np.zeros(len(targets), np.int64)
        for places in self._kinds:
            stop = np.searchsorted(places, targets)
            start = np.maximum(np.searchsorted(places, low), stop - self.history // 3)
            lengths = stop - start
            rows = np.repeat(np.arange(len(targets)), lengths)
            index = np.arange(lengths.sum()) + np.repeat(start - np.cumsum(lengths) + lengths, lengths)
            keys.append(rows * len(self.events) + places[index])
            total += lengths
        offsets = np.concatenate([[0], np.cumsum(total)]).astype(np.int32)
        return np.sort(np.concatenate(keys)) % len(self.events), pa.array(offsets)


def _find_liked(events: Events) -> np.ndarray:
    """Return 1 for each listen whose next event of the same user and item is a like within LIKE_S seconds, int8 [n]."""
    order = np.lexsort((np.arange(len(events)), events.item, events.user))
    user, item, time, kind = (values[order] for values in (events.user, events.item, events.time, events.kind))
    liked = np.zeros(len(events), np.int8)
    is_next = (user[1:] == user[:-1]) & (item[1:] == item[:-1]) & (time[1:] - time[:-1] <= LIKE_S)
    liked[order[:-1]] = is_next & (kind[:-1] == LISTEN) & (kind[1:] == LIKE)
    return liked


def _hash(parts: list[np.ndarray], rows: int) -> np.ndarray:
    """Return the table row of each combination of ids, int64 [n] in [0, rows)."""
    mixed = np.zeros(len(parts[0]), np.uint64)
    with np.errstate(over="ignore"):
        for part in parts:
            mixed = (mixed ^ part.astype(np.uint64)) * MIX
            mixed ^= mixed >> np.uint64(29)
    return (mixed * MIX >> np.uint64(32)).astype(np.int64) % rows
