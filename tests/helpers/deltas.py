"""Checkpoints of consecutive steps, and deltas between them written with plain pyarrow, without raytrec's writer."""

import hashlib
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from checkpoints import progress_values, read_tensors
from exports import batch_to_table
from managed_ids import managed_schema, random_id_batches
from ranks import run_on_ranks
from small import make_small_config

import raytrec
from raytrec.common.documents import to_json_document
from raytrec.deltas.apply import PreparedDeltas, read_delta
from raytrec.deltas.chain import iterate_exports, read_next
from raytrec.deltas.format import (
    STREAM_FILE,
    DeltaManifest,
    DeltaStream,
    DeltaTable,
    format_number,
    get_export_uri,
    get_manifest_uri,
    make_arrow_schema,
)

STREAM, ROWS, CUT_S = "stream-1", 12, 1_700_000_000.0
DENSE = "dense/head.model."


class ManagedCase:
    """Model with managed ids, of tests/helpers/managed_ids.py."""

    batches = staticmethod(random_id_batches)

    def schema(self):
        return managed_schema()

    def config(self):
        return make_small_config(1, {"sharding_type": "table_wise"})


@dataclass
class TrainedSteps:
    """Checkpoints of a run after each step.

    Attributes:
        root: folder of the run and its data.
        folders: checkpoint folder of each step, from step 1.
        table: rows that the run has not been trained on.
    """

    root: Path
    schema: object
    folders: list
    table: pa.Table
    _tensors: dict = field(default_factory=dict)

    def tensors(self, step):
        if step not in self._tensors:
            self._tensors[step] = read_tensors(self.folders[step - 1])
        return self._tensors[step]

    def export(self, step, out, **options):
        return raytrec.export(self.folders[step - 1], str(out), golden_rows=4, **options).path

    def changes(self, step, before=None):
        """Return (rows, ids, dense) that differ between two steps, in the form of `write_delta`."""
        old, new = self.tensors(before or step - 1), self.tensors(step)
        rows, ids = {}, {}
        for name in self.schema.tables:
            weight = f"tables/{name}/weight"
            changed = (old[weight] != new[weight]).any(1).nonzero().squeeze(1)
            rows[name] = changed.numpy(), new[weight][changed].numpy()
        for name in self.schema.managed:
            one, other = (
                dict(zip(t[f"ids/{name}/row"].tolist(), t[f"ids/{name}/id"].tolist(), strict=True)) for t in (old, new)
            )
            ids[name] = {row: other.get(row) for row in one.keys() | other.keys() if one.get(row) != other.get(row)}
        prefix, suffix = DENSE, "/value"
        dense = {
            "model." + name.removeprefix(prefix).removesuffix(suffix): value
            for name, value in new.items()
            if name.startswith(prefix) and name.endswith(suffix)
        }
        return rows, ids, dense


def _train(rank, world, case, root, steps):
    from raytrec.checkpoint.restore import gather_ids
    from raytrec.checkpoint.save import CheckpointWriter
    from raytrec.checkpoint.state import LogicalState
    from raytrec.checks.parity.batches import compute_row_bounds, make_local_batch, make_random_batches
    from raytrec.config.features import resolve_features
    from raytrec.config.run_config import load_config
    from raytrec.tasks.objective import Objective
    from raytrec.worker.build import build_step

    schema, values = case.schema(), case.config().model_dump(by_alias=True, mode="json")
    values["data"] |= {"train": f"{root}/data", "valid": None, "test": None}
    values["run"]["name"], values["checkpoint"]["keep_last"] = "small", steps
    config = load_config(values)
    features, tasks = resolve_features(schema, config.model), Objective.of(config, schema).tasks
    if hasattr(case, "batches"):
        whole = case.batches()[: steps + 1]
    else:
        whole = make_random_batches(schema, ROWS, steps + 1, seed=1, tasks=tasks)
    bounds = compute_row_bounds(ROWS, 1, "equal")
    step, _ = build_step(config, schema, torch.device("cpu"))
    saver, folders = CheckpointWriter(f"{root}/checkpoints", config.checkpoint), []
    for number, batch in enumerate(whole[:steps], 1):
        list(step.train(iter([make_local_batch(batch, schema, bounds, 0, features)]), 1))
        ids, about_ids = gather_ids(step.maps)
        about = {"config": values, "schema": schema.to_yaml(), "data": "", "progress": progress_values(number)}
        saver.save(number, LogicalState(step.model, step.optimizer).tensors(), about | about_ids, ids)
        folders.append(saver.collect_outcome().folder)
    saver.close()
    return whole[-1], folders


def apply_next(folder, model, position):
    """Apply the delta after a position to a loaded model, and return the new position; None if there is no delta."""
    following = read_next(str(folder), position)
    if following:
        delta = read_delta(str(folder), following, model.manifest.data_schema, model.weights)
        prepared = PreparedDeltas(str(folder), model)
        prepared.add(delta)
        prepared.finish()
        prepared.apply()
    return following


def iterate_states(folder):
    """Yield (position, model) for the oldest full export and every delta after it; the model changes in place."""
    *_, (uri, position) = iterate_exports(str(folder))
    model = raytrec.load(uri)
    while position:
        yield position, model
        position = apply_next(folder, model, position)


def train_steps(case, root, steps=3):
    """Train a model and save a checkpoint after each step."""
    ((batch, folders),) = run_on_ranks(1, _train, case, str(root), steps)
    table = batch_to_table(batch, case.schema())
    (root / "data").mkdir()
    pq.write_table(table, root / "data/rows.parquet")
    return TrainedSteps(root, case.schema(), folders, table)


@dataclass
class DeltaFolder:
    """Folder of deltas that a test writes.

    Attributes:
        checksums: SHA-256 of each delta's manifest; 0: the parent of the first one.
    """

    path: Path
    tables: dict
    stream: str = STREAM
    checksums: dict = field(default_factory=lambda: {0: ""})

    def __post_init__(self):
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_stream(self.stream)

    @classmethod
    def of_schema(cls, path, schema):
        return cls(path, {name: DeltaTable(rows=each.rows, dim=each.dim) for name, each in schema.tables.items()})

    def write_stream(self, stream):
        (self.path / STREAM_FILE).write_bytes(to_json_document(DeltaStream(id=stream, run="small")))

    def write(self, number, step, rows=None, ids=None, dense=None, column_parts=1, change=None, **fields):
        """Write a delta.

        Args:
            rows: table → (row numbers, values [n, dim]).
            ids: table → {row: id or None}.
            dense: name → tensor.
            column_parts: number of pieces into which the columns of rows are divided.
            change: function that changes the Arrow tables by operation before they are written.
            fields: fields of the manifest that replace the correct ones.
        """
        tables = {"rows": make_row_table(rows or {}, column_parts), "ids": make_id_table(ids or {})}
        tables["dense"] = make_dense_table(dense or {})
        tables = change(tables) if change else tables
        folder = Path(get_manifest_uri(str(self.path), number)).parent
        files = {}
        for operation, table in tables.items():
            name = f"{format_number(number)}-a/{operation}.arrow"
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            with pa.ipc.new_file(str(folder / name), table.schema) as writer:
                writer.write_table(table)
            content = (folder / name).read_bytes()
            files[operation] = {name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}}
        values = {"stream": self.stream, "number": number, "parent": self.checksums.get(number - 1, "")}
        values |= {"step": step, "cut_unix_s": CUT_S, "tables": self.tables, "files": files}
        content = to_json_document(DeltaManifest(**(values | fields)))
        self.checksums[number] = hashlib.sha256(content).hexdigest()
        path = Path(get_manifest_uri(str(self.path), number))
        path.with_suffix(".tmp").write_bytes(content)
        path.with_suffix(".tmp").rename(path)

    def write_steps(self, steps, first, last, **options):
        """Write the deltas of several steps of a TrainedSteps; the number of a delta is its step."""
        for step in range(first, last + 1):
            self.write(step, step, *steps.changes(step), **options) if step > 1 else self.write(step, step, **options)

    def manifest(self, number):
        return Path(get_manifest_uri(str(self.path), number))

    def file(self, number, operation):
        return self.manifest(number).parent / f"{format_number(number)}-a/{operation}.arrow"

    def add_export(self, number, export):
        """Copy an export to the full export of a delta, and return its path."""
        return shutil.copytree(export, get_export_uri(str(self.path), number))


def _encode_names(names):
    return pa.array(names, pa.string()).dictionary_encode()


def make_row_table(rows, column_parts=1):
    names, numbers, columns, values = [], [], [], []
    for table, (changed, vectors) in rows.items():
        width = vectors.shape[1] // column_parts if len(vectors) else 0
        for part in range(column_parts if len(vectors) else 0):
            names += [table] * len(changed)
            numbers += list(changed)
            columns += [part * width] * len(changed)
            values += list(vectors[:, part * width : (part + 1) * width])
    schema = make_arrow_schema("rows")
    arrays = [_encode_names(names), pa.array(numbers, pa.int64()), pa.array(columns, pa.int32())]
    arrays.append(pa.array([np.asarray(each, np.float32) for each in values], schema.field("values").type))
    return pa.Table.from_arrays(arrays, schema=schema)


def make_id_table(ids):
    entries = [(table, row, each) for table, changed in ids.items() for row, each in changed.items()]
    names, rows, values = zip(*entries, strict=True) if entries else ([], [], [])
    arrays = [_encode_names(list(names)), pa.array(rows, pa.int64()), pa.array(values, pa.int64())]
    return pa.Table.from_arrays(arrays, schema=make_arrow_schema("ids"))


def make_dense_table(dense):
    columns = {
        "name": list(dense),
        "dtype": [str(each.dtype).removeprefix("torch.") for each in dense.values()],
        "shape": [list(each.shape) for each in dense.values()],
        "values": [each.numpy().tobytes() for each in dense.values()],
    }
    return pa.table(columns, schema=make_arrow_schema("dense"))
