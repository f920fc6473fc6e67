"""Functions that read data files like a run, without Ray."""

import pyarrow as pa
from pydantic import TypeAdapter

from raytrec.config.schema import Schema
from raytrec.config.transforms import Transform
from raytrec.data.batch import Collator
from raytrec.data.fragments import scan
from raytrec.data.item_reader import read_item
from raytrec.data.order import LaneItem, Part
from raytrec.data.row_slices import Rows
from raytrec.data.stream import Stream

parse_transforms = TypeAdapter(tuple[Transform, ...]).validate_python


def read_canonical_rows(place, plan, faults=None, skip=False):
    """Return (all rows of a file or folder in canonical form, the form)."""
    data = scan(str(place), plan, skip=skip)
    parts = [Part(group.path, group.index, 0, group.rows) for group in data.groups]
    tables = [read_item(LaneItem(0, 0, (part,), None), data.form, faults) for part in parts]
    return pa.concat_tables(tables), data.form


def collate_table(table, form, features=None, padding=0):
    """Collate rows in canonical form to one Batch with `padding` additional rows."""
    pieces = [Rows.of(batch) for batch in table.combine_chunks().to_batches()]
    return Collator(form, features)(pieces, table.num_rows + padding, table.num_rows)


def make_schema(features, rows, labels=("y",), dense=(), **table):
    """Return a Schema whose features (names, or name → settings) share one table with these rows and settings."""
    settings = features if isinstance(features, dict) else {name: {} for name in features}
    parts = {
        "labels": list(labels),
        "dense": list(dense),
        "sparse": {name: {"table": "t", **each} for name, each in settings.items()},
        "tables": {"t": {"rows": rows, "dim": 4, **table}},
    }
    return Schema.parse(parts, "test")


class DirectStream(Stream):
    """Stream whose read tasks run in this process."""

    def _tables(self, items):
        return (read_item(item, self.dataset.form, self.faults) for item in items)
