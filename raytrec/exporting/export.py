"""`raytrec export`: a trained model as a folder that is scored without the trainer."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from raytrec import __version__
from raytrec.checkpoint.managed import ids_of
from raytrec.checkpoint.rows import StoredTable
from raytrec.common.formatting import bytes_text, percent
from raytrec.common.output_folder import OutputFolder
from raytrec.common.redaction import hide
from raytrec.common.storage import absolute, open_filesystem
from raytrec.config.evaluation import TowerName
from raytrec.config.features import Features, resolve_features
from raytrec.config.run_config import RunConfig
from raytrec.config.schema import Schema
from raytrec.data.arrow import select_schema
from raytrec.data.decode import decode
from raytrec.data.fragments import Dataset, read_footer
from raytrec.data.order import Part
from raytrec.driver.console import Pairs, RunConsole, Summary
from raytrec.driver.datasets import open_inputs
from raytrec.driver.evaluation import resolve_checkpoint
from raytrec.driver.one_process import load_model, outputs_of, read_batch
from raytrec.embeddings.hashing import keys_of
from raytrec.exporting.programs import Program, make_program
from raytrec.exporting.tables import CheckpointTable, block_bytes, plan_table, rounding
from raytrec.exporting.target import Target
from raytrec.models.recommender import Recommender
from raytrec.prediction.predict import score_names
from raytrec.scoring.inputs import inputs_of
from raytrec.scoring.load import open_export
from raytrec.scoring.lookups import IdRows, Lookups
from raytrec.scoring.manifest import (
    GOLDEN,
    ExportSource,
    Manifest,
    Precision,
    ProgramEntry,
    ProgramName,
    TaskEntry,
)
from raytrec.scoring.rows import wide
from raytrec.scoring.scorer import Scorer
from raytrec.tasks.objective import Objective

GOLDEN_ROWS = 64


@dataclass(frozen=True)
class Exported(Summary):
    """The figures of `export`.

    Attributes:
        metrics: export.tables, export.rows (of all tables), export.bytes, export.golden_rows; precision,
            version, checkpoint, name, seconds.
        path: the folder.
    """

    metrics: dict[str, Any]
    path: str

    @property
    def next_steps(self) -> list[str]:
        """Lines that name files and commands."""
        return [f"export       {self.path}", f"score with   raytrec.load({self.path!r}).predict(rows)"]

    @property
    def pairs(self) -> Pairs:
        """The rows of the table."""
        metrics = self.metrics
        return [
            ("version", metrics["version"]),
            ("tables", f"{metrics['export.tables']:,} ({metrics['precision']})"),
            ("rows of tables", f"{metrics['export.rows']:,}"),
            ("size", bytes_text(metrics["export.bytes"])),
            ("golden rows", f"{metrics['export.golden_rows']:,}"),
            ("seconds", f"{metrics['seconds']:,.1f}"),
        ]


@dataclass(frozen=True)
class Trained:
    """A checkpoint that is exported.

    Attributes:
        folder, index: of the checkpoint.
        whole_schema: of the run. schema: of the features that the programs read, with their tables.
    """

    config: RunConfig
    folder: str
    index: dict[str, Any]
    whole_schema: Schema
    schema: Schema
    recommender: Recommender
    objective: Objective
    programs: dict[ProgramName, Program]

    @property
    def features(self) -> Features:
        """Of what the programs read."""
        return resolve_features(self.schema, self.config.model)


def export(
    run: str | Path,
    out: str,
    *,
    checkpoint: str | int | None = None,
    quantize: Precision | None = None,
    data: str | None = None,
    golden_rows: int = GOLDEN_ROWS,
    allow_code: bool = False,
) -> Exported:
    """Writes a run's model as a folder for `raytrec.load` and `raytrec serve`. It needs neither workers nor
    Ray, and memory for a small part of the tables. Interrupted, it continues when it is called again.

    Args:
        run: run folder or checkpoint folder. Nothing is written there.
        out: the folder to write to, local or s3:// or gs://.
        checkpoint: of a run, a step, or "best" (by checkpoint.best_metric); default: the newest.
        quantize: int8, int4 or fp16: of tables; default: fp32.
        data: folder or file of Parquet; default: the run's data.test, data.valid or data.train. Columns'
            types are read there, and golden rows.
        golden_rows: how many rows go along with their scores, by which every later loading is checked.
        allow_code: the configuration in there may name code (raytrec/config/trust.py).

    Raises:
        RunError: no checkpoint there, or the exported model has other scores. ConfigError: `out` holds
            something else, or the model cannot be exported. DataError: what is wrong with the data.

    Example:
        >>> raytrec.export("runs/films", "films-export").metrics["export.golden_rows"]
        64
    """
    began, out = perf_counter(), absolute(str(out))
    config, schema, folder, index = resolve_checkpoint(run, checkpoint, [], allow_code)
    places = absolute(str(data)) if data else config.data.test or config.data.valid or config.data.train
    precision: Precision = quantize or "fp32"
    target = Target(OutputFolder(out), _binding([index["sha256"], precision, golden_rows]))
    with RunConsole(config.run.name) as console:
        if (manifest := target.complete()) is None:
            console.phase("exporting the dense model")
            trained = _trained(config, schema, folder, index)
            dataset = open_inputs(config, trained.schema, places)
            manifest = _write(target, trained, dataset, precision, golden_rows, console)
    metrics = {
        "export.tables": len(manifest.tables),
        "export.rows": sum(table.rows for table in manifest.data_schema.tables.values()),
        "export.bytes": sum(entry.bytes for entry in manifest.files.values()),
        "export.golden_rows": manifest.golden_rows,
        "precision": precision,
        "version": manifest.version,
        "checkpoint": folder,
        "name": config.run.name,
        "seconds": round(perf_counter() - began, 3),
    }
    return Exported(metrics, out)


def _binding(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def _trained(config: RunConfig, schema: Schema, folder: str, index: dict[str, Any]) -> Trained:
    """A checkpoint with its programs."""
    objective = Objective.of(config, schema)
    recommender = load_model(config, schema, folder, index, {})
    inputs = inputs_of(resolve_features(schema, config.model))
    programs: dict[ProgramName, Program] = {"predict": make_program(recommender, objective, inputs)}
    if config.model.retrieves:
        for tower in ("query", "item"):
            programs[tower] = make_program(recommender, objective, inputs, tower)
    read = [each for program in programs.values() for each in program.inputs]
    names = {each.feature for each in read if each.feature}
    names |= set(schema.dense) if any(each.kind == "dense" for each in read) else set()
    part = schema.part(names)
    tables = {spec.table for spec in part.sparse.values()}
    part = part.model_copy(update={"tables": {n: t for n, t in schema.tables.items() if n in tables}})
    return Trained(config, folder, index, schema, part, recommender, objective, programs)


def _write(
    target: Target,
    trained: Trained,
    dataset: Dataset,
    precision: Precision,
    golden_rows: int,
    console: RunConsole,
) -> Manifest:
    """Writes all files; the manifest is the last."""
    schema = trained.schema
    golden, parts = _golden(dataset, golden_rows)
    for name, values in _scores(trained, dataset, parts, precision).items():
        golden = golden.append_column(name, values)
    transforms = list(dataset.form.plan.transforms)
    manifest = Manifest.model_construct(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        source=_source(trained),
        data_schema=schema,
        sequences=dict(trained.features.sequences),
        lists=sorted(dataset.form.lists),
        transforms=transforms,
        tasks=_tasks(trained),
        towers=_towers(trained),
        programs={
            name: ProgramEntry(file=f"{name}.pt2", inputs=list(program.inputs))
            for name, program in trained.programs.items()
        },
        tables={
            name: plan_table(f"{place}-{name}", table.rows, table.dim, precision)
            for place, (name, table) in enumerate(schema.tables.items())
        },
        ids={name: f"ids/{place}.parquet" for place, name in enumerate(schema.managed)},
        golden_rows=golden_rows and len(golden),
        files={},
        binding=target.binding,
    )
    _check(trained, manifest, golden, precision)
    for name, program in trained.programs.items():
        target.write(f"{name}.pt2", [program.written()])
    manifest.transforms = _with_vocabularies(target, transforms)
    for name, file in manifest.ids.items():
        target.write(file, [_ids_file(trained, name)])
    _write_tables(target, trained, manifest, console)
    target.write(GOLDEN, [_arrow_file(golden)])
    manifest.files = dict(target.files)
    if target.folder.is_local:
        open_export(Path(target.folder.uri), manifest).check()
    target.commit(manifest)
    return manifest


def _source(trained: Trained) -> ExportSource:
    return ExportSource(
        run=trained.config.run.name,
        step=trained.index["about"]["progress"]["step"],
        checkpoint=hide(trained.folder),
        checkpoint_id=trained.index["sha256"],
        raytrec=__version__,
        torch=torch.__version__,
    )


def _tasks(trained: Trained) -> list[TaskEntry]:
    tasks = trained.objective.tasks
    return [
        TaskEntry(
            name=task.name, label=task.label, column=column, classes=task.outputs, predicts=task.loss.predicts
        )
        for task, column in zip(tasks, score_names(tasks), strict=True)
    ]


def _towers(trained: Trained) -> dict[TowerName, list[str]]:
    model, schema = trained.config.model, trained.whole_schema
    if not model.retrieves:
        return {}
    members = model.tower_members(schema)
    return {"query": sorted(members["query"]), "item": sorted(members["item"])}


def _golden(dataset: Dataset, count: int) -> tuple[pa.Table, list[Part]]:
    """(the dataset's first rows as files have them, where they are): at least their types."""
    columns, parts = dataset.form.columns, []
    for group in dataset.groups:
        rows = min(count - sum(part.rows for part in parts), group.rows)
        if rows > 0:
            parts.append(Part(group.path, group.index, 0, rows))
    tables = [decode(part.path, part.group, part.first, part.rows, columns) for part in parts]
    footers = {group.path: read_footer(group.path) for group in dataset.groups}
    schemas = [select_schema(each.schema.to_arrow_schema(), columns) for each in footers.values()]
    kinds = pa.unify_schemas(
        [pa.schema([(f.name, wide(f.type)) for f in each]) for each in schemas], promote_options="permissive"
    )
    return pa.concat_tables([kinds.empty_table(), *(table.cast(kinds) for table in tables)]), parts


def _scores(
    trained: Trained, dataset: Dataset, parts: list[Part], precision: Precision
) -> dict[str, pa.Array]:
    """The scores of rows by the trainer's model, whose tables have the rows that are written."""
    names = score_names(trained.objective.tasks)
    kinds = [pa.float32() if t.outputs == 1 else pa.list_(pa.float32()) for t in trained.objective.tasks]
    if not parts:
        return {name: pa.array([], kind) for name, kind in zip(names, kinds, strict=True)}
    batch = read_batch(trained.config, trained.whole_schema, dataset, parts)
    logits = outputs_of(
        trained.config,
        trained.whole_schema,
        trained.folder,
        trained.index,
        batch,
        as_stored=rounding(precision),
    )
    found = trained.objective.predictions(logits).values()
    return {
        name: pa.array(list(values.numpy()), kind)
        for name, kind, values in zip(names, kinds, found, strict=True)
    }


def _check(trained: Trained, manifest: Manifest, golden: pa.Table, precision: Precision) -> None:
    """Scores the golden rows by the programs, before anything is written.

    Raises:
        RunError: they differ.
    """
    ids = {name: _id_rows(trained, name) for name in manifest.ids}
    scores = {task.column for task in manifest.tasks}
    columns = pa.schema([field for field in golden.schema if field.name not in scores])
    programs = {name: program.exported.module() for name, program in trained.programs.items()}
    with ExitStack() as files:
        tables = {}
        for name in manifest.tables:
            stored = files.enter_context(StoredTable(trained.folder, trained.index, name))
            tables[name] = CheckpointTable(stored, precision)
        Scorer(manifest, programs, Lookups(manifest.features, tables, ids), columns, golden).check()


def _id_rows(trained: Trained, table: str) -> IdRows:
    found = ids_of(trained.folder, trained.index, table, ("id", "row"))
    return IdRows(trained.schema.tables[table], keys_of(found["id"]), found["row"])


def _ids_file(trained: Trained, table: str) -> bytes:
    """The ids of a table and their rows as Parquet."""
    found = ids_of(trained.folder, trained.index, table, ("id", "row"))
    sink = io.BytesIO()
    pq.write_table(
        pa.table({name: values.numpy() for name, values in found.items()}), sink, compression="zstd"
    )
    return sink.getvalue()


def _with_vocabularies(target: Target, transforms: Sequence[Any]) -> list[Any]:
    """Transforms that name copies of their files."""
    found = []
    for place, transform in enumerate(transforms):
        if uri := getattr(transform, "vocabulary", None):
            name = f"vocabularies/{place}-{uri.rstrip('/').rpartition('/')[2]}"
            filesystem, path = open_filesystem(uri)
            with filesystem.open_input_stream(path) as stream:
                target.write(name, [stream.read()])
            transform = transform.model_copy(update={"vocabulary": name})
        found.append(transform)
    return found


def _write_tables(target: Target, trained: Trained, manifest: Manifest, console: RunConsole) -> None:
    rows = sum(table.rows for table in trained.schema.tables.values())
    before = 0
    for name, entry in manifest.tables.items():
        with StoredTable(trained.folder, trained.index, name) as table:
            for number, file in enumerate(entry.files):
                first = before + number * entry.block_rows
                console.phase(f"table {name}: {percent(first / rows)} of all rows written", always=False)
                target.write(file, block_bytes(table, entry, number))
            before += table.rows


def _arrow_file(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
