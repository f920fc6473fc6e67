"""Write interactions to train/, valid/, test/, items/ and users/.

Rows of train, valid and test:

    label         1: an interaction of the user and the item; 0: a candidate or a drawn negative
    user, item    ids from 0, in order of appearance in the source
    history       earlier items of the user, the most recent last (rows.py defines in which splits); with
                  --split time and --negatives 0, also earlier items of the row's split, because a service
                  would know them
    history_time  times of the history, if the source has times
    later         number of later interactions of the user in train; 0 in valid and test
    time          time of the row, if the source has times; a candidate has the time of a row of the same user
    item_count    number of occurrences of the item in train, at least 1
    seen          with --negatives 0, in valid and test: all earlier items of the user
    right_items   with --test-rows user, in valid and test: all items of the user in the split; the columns item
                  and time belong to the first of these items, and the history ends before the split
    …             side features of users and items, if any

items/ contains a row for each item: item, item_key (the key in the source), item_count and side features.
users/ contains a row for each user: user, user_key and side features.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from raytrec_datasets.interactions.events import BY_TIME, TEST, VALID, Columns, Interactions, divide, keep_core
from raytrec_datasets.interactions.layouts import read_interactions
from raytrec_datasets.interactions.rows import Rows
from raytrec_datasets.interactions.sides import Sides, read_sides
from raytrec_datasets.writing import Output, progress, write_table

from raytrec.common.errors import ConfigError
from raytrec.common.storage import make_relative
from raytrec.config.overrides import to_override_texts
from raytrec.config.schema import Schema

DRAWN = {("sparse", "negatives"): "drawn by data.transforms, {do: sample, …}, as in jobs/interactions/sasrec.yaml"}
OWN, SASREC, TWO_TOWER = "own", "interactions/sasrec", "interactions/two_tower"
MF = "interactions/mf"
LOSS = {SASREC: {"loss": "from_model"}}
IN_BATCH = {"loss": "in_batch_softmax", "item": "item", "item_frequency": "item_count"}
LENGTH, TOWERS = 50, {"query": ["user", "history"], "item": ["item"]}  # settings in the example jobs


@dataclass(frozen=True)
class Choices:
    """Options of `raytrec prepare interactions` that determine which rows are written (interactions/__init__.py)."""

    split: str | None = None
    negatives: int = 99
    train_negatives: int = 0
    max_length: int = 50
    rows: str = "each"
    min_interactions: int | None = None
    seed: int = 0
    dim: int = 16
    with_valid: bool = False
    test_rows: str = "each"

    def check(self, length: str = "--max-length", negatives: str = "--train-negatives") -> None:
        """Check that the options can be combined.

        Args:
            length: Name of the option max_length in the calling command.
            negatives: Name of the option train_negatives in the calling command.

        Raises:
            ConfigError: Two options exclude each other.
        """
        if self.test_rows == "user" and self.negatives:
            raise ConfigError(
                "rows with all held-out items of a user cannot be ranked against candidates",
                where=f"--test-rows user --negatives {self.negatives}",
                expected="--negatives 0, which ranks them among all items (eval.retrieval)",
                do="add --negatives 0",
            )
        if self.rows == "user" and (not self.max_length or self.train_negatives):
            wrong = f"{negatives} {self.train_negatives}" if self.max_length else f"{length} 0"
            raise ConfigError(
                "--rows user requires histories and excludes negatives, because models learn at every position",
                where=f"--rows user {wrong}",
                expected=f"{length} of 1 or more, and {negatives} 0",
            )


@dataclass(frozen=True)
class Files:
    """Options of `raytrec prepare interactions` that name files; None: there is no such file."""

    source: Path
    candidates: Path | None = None
    user_features: Path | None = None
    item_features: Path | None = None

    def resolved(self) -> Files:
        """Return a copy with absolute paths."""
        return Files(*(path and path.expanduser().absolute() for path in vars(self).values()))


def write(out: Path, files: Files, columns: Columns, chosen: Choices, force: bool) -> None:
    """Write the dataset; the arguments are those of `raytrec prepare interactions`.

    Raises:
        ConfigError: Options contradict each other or the source, or the output folder cannot be replaced
            (`Output.is_ready`).
        DataError: A file is invalid, or there are too few interactions or candidates.
    """
    files = files.resolved()
    chosen.check()
    if files.candidates and not chosen.negatives:
        raise ConfigError(
            "--negatives 0 ranks all items, so the candidates would not be used",
            where=f"--candidates {files.candidates} --negatives 0",
            do="omit --candidates, or set --negatives to the number of candidates in valid",
        )
    named = {name: path and str(path) for name, path in vars(files).items()}
    output = Output(out, "interactions", asdict(columns) | asdict(chosen) | named, force)
    if not output.is_ready():
        data = read_interactions(files.source, columns, files.candidates)
        sides = Sides(
            read_sides(files.user_features, columns.user) if files.user_features else [],
            read_sides(files.item_features, columns.item) if files.item_features else [],
        )
        write_rows(output, data, chosen, sides)
    output.summary(*choose_example_job(output.folder, chosen))


def write_rows(output: Output, data: Interactions, chosen: Choices, sides: Sides) -> None:
    """Divide interactions into splits, and write all files.

    Args:
        output: Folder of the dataset.
        data: All interactions of a source.
        chosen: Options of the command.
        sides: Features of users and items, identified by the keys in `data`.

    Raises:
        ConfigError: The interactions cannot be divided or removed as chosen, or the keys of a feature cannot be
            converted to the type of the keys in `data`.
        DataError: A user has too few interactions, new items or candidates, or no interactions remain.
    """
    data = _core(data, chosen.min_interactions)
    order = data.order()
    split = divide(data, order, chosen.split, chosen.seed, chosen.min_interactions is not None)
    data, split = data.only(order), split[order]
    of_user = {side.name: side.of(data.users) for side in sides.user}
    of_item = {side.name: side.of(data.items) for side in sides.item}
    inputs = {side.name for side in sides.features}
    in_rows = ({name: v for name, v in of.items() if name in inputs} for of in (of_user, of_item))
    ranked = not chosen.negatives
    by_user = chosen.test_rows == "user"
    rolling = ranked and chosen.split == BY_TIME and not by_user
    rows = Rows(data, split, chosen.max_length, chosen.seed, *in_rows, ranked, chosen.with_valid, rolling, by_user)
    with output, progress("interactions", len(data)) as advance:
        each = chosen.rows == "each"
        counts = {"train": rows.write_train(output.partial / "train", each, chosen.train_negatives, advance)}
        for name, held_out in (("valid", VALID), ("test", TEST)):
            counts[name] = rows.write_held_out(output.partial / name, held_out, chosen.negatives, advance)
        frequent = {"item_count": pa.array(np.maximum(rows.counts, 1))}
        _write_keys(output.partial / "items", "item", data.items, frequent | of_item)
        _write_keys(output.partial / "users", "user", data.users, of_user)
        schema = make_schema(len(data.users), len(data.items), chosen, sides)
        sizes = {"users": len(data.users), "items": len(data.items), "interactions": len(data)}
        output.finish(schema, counts, DRAWN, **sizes)


def _core(data: Interactions, least: int | None) -> Interactions:
    if least is None or least < 2:
        return data
    if data.split is not None:
        raise ConfigError(
            "the source is already divided into splits, so no rows can be removed",
            where=f"--min-interactions {least}",
            do="omit --min-interactions",
        )
    return keep_core(data, least)


def _write_keys(folder: Path, name: str, keys: pa.Array, columns: dict[str, pa.Array]) -> None:
    """Write one row for each id, with its key and further columns."""
    ids = pa.array(np.arange(len(keys), dtype=np.int32))
    write_table(folder, pa.table({name: ids, f"{name}_key": keys, **columns}))


def make_schema(users: int, items: int, chosen: Choices, sides: Sides) -> Schema:
    """Return the schema of a dataset with these numbers of users and items; item and history share a table.

    With one row per user (for next-item models), the schema contains only item, history and `negatives`;
    the negatives are drawn when rows are read.
    """
    if chosen.rows == "user":
        sequence = {"table": "item", "pooling": "sequence"}
        values = {
            "labels": ["label"],
            "sparse": {"item": {"table": "item"}, "history": sequence, "negatives": sequence},
            "tables": {"item": {"rows": items, "dim": chosen.dim}},
        }
        return Schema.parse(values, "schema.yaml")
    tables = {"user": {"rows": users, "dim": chosen.dim}, "item": {"rows": items, "dim": chosen.dim}}
    sparse: dict[str, dict] = {"user": {"table": "user"}, "item": {"table": "item"}}
    if chosen.max_length:
        sparse["history"] = {"table": "item", "pooling": "sequence"}
    for side in sides.features:
        if side.rows:
            tables[side.name] = {"rows": side.rows, "dim": chosen.dim}
            sparse[side.name] = {"table": side.name} | ({"pooling": "mean"} if side.is_bag else {})
    dense = [side.name for side in sides.features if not side.rows]
    values = {"labels": ["label"], "dense": dense, "sparse": sparse, "tables": tables}
    return Schema.parse(values, "schema.yaml", "rename side features")


def choose_example_job(folder: Path, chosen: Choices) -> tuple[str, list[str], list[str]]:
    """Return the name of a suitable job in jobs/, its overrides, and notes on other suitable jobs.

    If all labels are 1, the overrides select a loss with in-batch or sampled negatives. Without candidates, they
    rank each row's items among all items.

    Args:
        folder: Folder of the dataset.
        chosen: Options of the command.
    """
    if chosen.train_negatives and chosen.negatives:
        return OWN, [], []
    job = SASREC if chosen.rows == "user" else TWO_TOWER
    settings: dict[str, object] = {}
    if job == SASREC and chosen.max_length != LENGTH:
        settings["model.max_length"] = chosen.max_length
    if job == TWO_TOWER and (towers := _towers(folder)) != TOWERS:
        settings["model.towers"] = towers
    if not chosen.negatives:
        settings["tasks"] = [LOSS.get(job, IN_BATCH) | {"metrics": []}]
        lists = {"right_items": "right_items"} if chosen.test_rows == "user" else {}
        settings["eval.retrieval"] = {"items": f"{make_relative(folder)}/items", "seen": ["seen"]} | lists
    without = ", without model.towers" if "model.towers" in settings else ""
    also = [f"jobs/{MF}.yaml also fits: it reads only user and item{without}"] if job == TWO_TOWER else []
    return job, to_override_texts(settings), also


def _towers(folder: Path) -> dict[str, list[str]]:
    """Return the features of each tower: columns of items/ for the item tower, all others for the query."""
    schema = Schema.load(folder / "schema.yaml")
    of_item = {*pq.ParquetDataset(folder / "items").schema.names}
    names = [*schema.sparse, *schema.dense]
    return {
        "query": [name for name in names if name not in of_item],
        "item": [name for name in names if name in of_item],
    }
