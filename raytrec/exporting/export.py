"""Implementation of `raytrec export`, which writes a trained model to a folder for scoring without the trainer."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raytrec.checkpoint.restore import read_id_rows
from raytrec.common.errors import ConfigError
from raytrec.common.formatting import format_bytes, format_percent, parse_number
from raytrec.common.output_folder import compute_binding
from raytrec.common.storage import make_absolute, open_filesystem
from raytrec.driver.console import Pairs, Result, RunConsole
from raytrec.driver.datasets import open_inputs, to_example_schema
from raytrec.driver.evaluation import resolve_checkpoint
from raytrec.exporting.compare import check_golden, compare_precisions, score_golden_rows, select_golden_rows
from raytrec.exporting.export_folder import ExportFolder
from raytrec.exporting.mlflow_model import MlflowRun
from raytrec.exporting.programs import ComparedProgram, make_onnx
from raytrec.exporting.trained_model import (
    TrainedModel,
    iterate_file_bytes,
    list_tasks,
    list_towers,
    make_source,
    plan_stacks,
    read_trained,
)
from raytrec.metrics.selection import EVAL_PREFIX
from raytrec.scoring.lookups import IdRows
from raytrec.scoring.manifest import GOLDEN, ONNX_FILE, Manifest, PrecisionName, ProgramEntry

GOLDEN_ROWS = 64  # default number of golden rows


def export(
    run: str | Path,
    out: str,
    *,
    checkpoint: str | int | None = None,
    quantize: PrecisionName | None = None,
    data: str | None = None,
    golden_rows: int = GOLDEN_ROWS,
    onnx: bool = False,
    mlflow: bool = False,
    embed: bool = False,
    allow_code: bool = False,
) -> Result:
    """Export a run's model to a folder for `raytrec.load` and `raytrec serve`.

    Neither workers nor Ray are needed, and only a small part of the tables is in memory at a time. If an export is
    interrupted, calling the function again with the same arguments continues it. If the run has saved another
    checkpoint in the meantime, the export starts over with the newest checkpoint.

    Args:
        run: Run folder or checkpoint folder; nothing is written there.
        out: Output folder; local, s3:// or gs://.
        checkpoint: Step of a checkpoint of the run, or "best" (by checkpoint.best_metric); default: the
            newest.
        quantize: Precision of the tables, int8, int4 or fp16; default: fp32. If set, the run's metrics are
            computed on all rows of the data, with fp32 tables and with quantized tables.
        data: Parquet folder or file from which column types, golden rows and rows for metrics are read; default:
            data.test of the run if set, else data.valid, else data.train.
        golden_rows: Maximum number of rows of the data that are exported with their scores. Whenever the export is
            loaded, the scores of these rows are computed again and compared.
        onnx: True to also write model.onnx, the dense model for onnxruntime.
        mlflow: True to log the export as a model of the run's MLflow run; each call logs a model.
        embed: True to copy the export's files into the MLflow model; default: the model stores the export's
            URI.
        allow_code: True to allow the run's configuration to name code (raytrec/config/trust.py).

    Returns:
        Result with the metrics export.tables, export.rows (of all tables), export.bytes, export.golden_rows,
        precision, version, checkpoint, name and seconds. With quantization, also eval.METRIC for fp32 tables
        and eval.METRIC.PRECISION for quantized tables, such as eval.auc and eval.auc.int8 (None if
        undefined). With MLflow, also mlflow_model, the model's URI.

    Raises:
        RunError: There is no checkpoint, the checkpoint is damaged, exported scores differ from the run's scores, a
            file cannot be written, another process is writing to `out`, or `mlflow` is set and the run is not in MLflow
            or MLflow reports an error.
        ConfigError: `checkpoint` is invalid, `out` contains other files, the model cannot be exported, a package for
            `onnx` is missing, a value is too large for `quantize`, the configuration names code although `allow_code`
            is False, the store of tracked runs cannot be used although `mlflow` is set, or `embed` is set although
            `mlflow` is not set or `out` is not local.
        SchemaError: As for `resolve_checkpoint`.
        DataError: The data is missing, cannot be read or does not match the schema, or `out` is not a valid path.

    Example:
        >>> raytrec.export("runs/films", "films-export").metrics["export.golden_rows"]
        64
    """
    began, out = perf_counter(), make_absolute(str(out))
    saved = resolve_checkpoint(run, checkpoint, [], allow_code)
    config = saved.config
    places = make_absolute(str(data)) if data else config.data.test or config.data.valid or config.data.train
    precision: PrecisionName = quantize or "fp32"
    options = precision, golden_rows, onnx, places if data else None
    request = compute_binding(make_absolute(str(run)), checkpoint, *options)
    binding = compute_binding(saved.index["sha256"], *options)
    target = ExportFolder(out, "raytrec export", binding, request)
    if embed and not (mlflow and target.folder.is_local):
        raise ConfigError(
            f"an export can be embedded only {'from a local folder' if mlflow else 'in an MLflow model'}",
            where="--embed",
            expected="a local folder as --out" if mlflow else "--mlflow and --embed together",
        )
    tracked = MlflowRun.from_run_folder(run, allow_code) if mlflow else None
    with RunConsole(config.run.name) as console, target.folder.hold():
        if (manifest := target.complete()) is None:
            saved = replace(saved, schema=to_example_schema(config, saved.schema, places))
            console.phase("exporting the dense model")
            trained = read_trained(saved)
            manifest = _write_export(target, trained, places, precision, golden_rows, onnx, console)
        logged = {}
        if tracked:
            console.phase("logging the model to MLflow")
            logged = {"mlflow_model": tracked.log(out, manifest, embed)}
    compared = {
        f"{EVAL_PREFIX}{key}" + (f".{each}" if each == precision else ""): value
        for key, values in manifest.metrics.items()
        for each, value in values.items()
    }
    metrics = {
        "export.tables": len(manifest.data_schema.tables),
        "export.rows": sum(table.rows for table in manifest.data_schema.tables.values()),
        "export.bytes": sum(entry.bytes for entry in manifest.files.values()),
        "export.golden_rows": manifest.golden_rows,
        "precision": precision,
        "version": manifest.version,
        "checkpoint": saved.folder,
        "name": config.run.name,
        **compared,
        **logged,
        "seconds": round(perf_counter() - began, 3),
    }
    next_steps = [f"export       {out}", f"score with   raytrec.load({out!r}).predict(rows)"]
    next_steps += [f"MLflow       {uri}" for uri in logged.values()]
    return Result(metrics, out, next_steps, _to_pairs(metrics, manifest))


def _to_pairs(metrics: dict[str, Any], manifest: Manifest) -> Pairs:
    precision, compared = metrics["precision"], []
    for key, values in manifest.metrics.items():
        fp32, quantized = (parse_number(values.get(each)) for each in ("fp32", precision))
        text = f"{fp32:.5f} fp32, {quantized:.5f} {precision}, {quantized - fp32:+.1e}"
        compared.append((EVAL_PREFIX + key, text))
    return [
        ("version", metrics["version"]),
        ("tables", f"{metrics['export.tables']:,} ({precision})"),
        ("table rows", f"{metrics['export.rows']:,}"),
        ("size", format_bytes(metrics["export.bytes"])),
        ("golden rows", f"{metrics['export.golden_rows']:,}"),
        *compared,
        ("seconds", f"{metrics['seconds']:,.1f}"),
    ]


def _write_export(
    target: ExportFolder,
    trained: TrainedModel,
    places: str | list[str],
    precision: PrecisionName,
    golden_rows: int,
    onnx: bool,
    console: RunConsole,
) -> Manifest:
    """Write all files of an export (the manifest last), and return the manifest."""
    schema = trained.schema
    dataset = open_inputs(trained.saved.config, schema, places, trained=trained.saved.text_ids)
    golden, parts = select_golden_rows(dataset, golden_rows)
    for name, values in score_golden_rows(trained, dataset, parts, precision).items():
        golden = golden.append_column(name, values)
    transforms, tasks = list(dataset.form.plan.transforms), list_tasks(trained)
    manifest = Manifest.model_construct(
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        source=make_source(trained),
        data_schema=schema,
        sequences=dict(trained.features.sequences),
        lists=sorted(dataset.form.lists),
        transforms=transforms,
        tasks=tasks,
        towers=list_towers(trained),
        programs={
            name: ProgramEntry(file=f"{name}.pt2", inputs=list(program.inputs))
            for name, program in trained.programs.items()
        },
        stacks=plan_stacks(schema, precision),
        ids={name: f"ids/{place}.parquet" for place, name in enumerate(schema.managed)},
        golden_rows=golden_rows and len(golden),
        files={},
        binding=target.claim.binding,
    )
    model = make_onnx(trained.programs["predict"], [task.column for task in tasks]) if onnx else None
    checked = ComparedProgram(trained.programs["predict"], model) if model else None
    check_golden(trained, manifest, golden, precision, checked)
    for name, program in trained.programs.items():
        target.write(f"{name}.pt2", [program.to_pt2_bytes()])
    if model:
        target.write(ONNX_FILE, [model])
    manifest.transforms = _copy_vocabularies(target, transforms)
    for name, file in manifest.ids.items():
        id_rows = read_id_rows(trained.saved.folder, trained.saved.index, name, schema.tables[name])
        target.write(file, [encode_ids(id_rows)])
    _write_tables(target, trained, manifest, console)
    target.write(GOLDEN, [encode_arrow(golden)])
    if precision != "fp32":
        manifest.metrics = compare_precisions(trained, places, precision, console)
    target.commit(manifest)
    return manifest


def encode_ids(id_rows: IdRows) -> bytes:
    """Return the content of a Parquet file with the columns id and row, the managed ids of a table and their rows."""
    sink, (ids, rows) = io.BytesIO(), id_rows.ids
    pq.write_table(pa.table({"id": ids.numpy(), "row": rows.numpy()}), sink, compression="zstd")
    return sink.getvalue()


def _copy_vocabularies(target: ExportFolder, transforms: Sequence[Any]) -> list[Any]:
    """Copy the transforms' vocabularies into the export, and return transforms that refer to the copies."""
    copied = []
    for place, transform in enumerate(transforms):
        if uri := getattr(transform, "vocabulary", None):
            filesystem, path = open_filesystem(uri)
            name = f"vocabularies/{place}-{path.rpartition('/')[2]}"
            with filesystem.open_input_stream(path) as stream:
                target.write(name, [stream.read()])
            transform = transform.model_copy(update={"vocabulary": name})
        copied.append(transform)
    return copied


def _write_tables(target: ExportFolder, trained: TrainedModel, manifest: Manifest, console: RunConsole) -> None:
    total = sum(table.rows for table in trained.schema.tables.values())
    rows_before = 0
    for stack in manifest.stacks:
        for number, file in enumerate(stack.files):
            first = rows_before + number * stack.block_rows
            console.phase(f"tables: {format_percent(first / total)} of all rows written", always=False)
            target.write(file, iterate_file_bytes(trained, stack, number))
        rows_before += manifest.count_rows(stack)


def encode_arrow(table: pa.Table) -> bytes:
    """Return the content of an Arrow IPC file with a table."""
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()
