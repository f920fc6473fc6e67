"""Commands for runs, checkpoints and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from raytrec_datasets import SHARED

import raytrec
from raytrec.cli.options import AllowCode, Changes, Checkpoint, Json, Run, RunFolder, Workers, call_and_print


def evaluate(
    run: Run,
    data: str | None = None,
    workers: Workers = None,
    batch_size: int | None = None,
    overrides: Changes = None,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Evaluate a run or checkpoint on any Parquet data, with any number of workers.

    Options:
        data: Parquet folder or file with labels; default: the run's data.test, else its data.valid.
        batch_size: Global batch size; default: as in training.
    """
    call_and_print(raytrec.evaluate, {**locals()})


def predict(
    run: Run,
    data: str,
    out: str,
    columns: list[str] | None = None,
    vectors: Literal["query", "item"] | None = None,
    workers: Workers = None,
    checkpoint: Checkpoint = None,
    overrides: Changes = None,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Score every row of Parquet data with a run or checkpoint. Repeat the command to resume.

    Options:
        data: Parquet folder or file, local, s3:// or gs://; labels are not needed.
        out: Folder to write to, local, s3:// or gs://; each file of the data gets an output file of the same name.
        columns (A,B,...): Columns to copy to the output (repeatable); default: data.reserve_columns; '':
            no columns.
        vectors: Write the vectors of this tower instead of scores; the data needs only the tower's features.
    """
    call_and_print(raytrec.predict, {**locals()})


def index(
    run: Run,
    items: str,
    out: str,
    item: str | None = None,
    columns: list[str] | None = None,
    faiss: str | None = None,
    queries: str | None = None,
    workers: Workers = None,
    checkpoint: Checkpoint = None,
    overrides: Changes = None,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Compute item vectors and an index for searching them. Repeat the command to resume.

    Options:
        items: Parquet folder or file with one row per item: local, s3:// or gs://.
        out: Folder to write the index to: local, s3:// or gs://.
        item: Column with the items' keys; default: eval.retrieval.item of the run, else item.
        columns (A,B,...): Columns of items to keep (repeatable); default: all.
        faiss (SPEC): Also build a faiss index, such as HNSW32 or 'IVF256,Flat'.
        queries: Parquet data on which the recall of faiss is measured; default: the run's data.test, else its
            data.valid.
    """
    call_and_print(raytrec.index, {**locals()})


def export(
    run: Run,
    out: str,
    checkpoint: Checkpoint = None,
    quantize: Literal["int8", "int4", "fp16"] | None = None,
    data: str | None = None,
    golden_rows: Annotated[int, typer.Option(min=0)] = 64,
    onnx: bool = False,
    mlflow: bool = False,
    embed: bool = False,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Export a trained model for scoring and serving without the trainer. Repeat the command to resume.

    Options:
        out: Folder to write to: local, s3:// or gs://.
        quantize: Precision of tables; default: fp32. The metrics before and after quantization are printed.
        data: Parquet data for types, golden rows and metrics; default: the run's data.test, else its
            data.valid, else its data.train.
        golden_rows: Number of rows of the data that are exported with their scores, for verification; 0: none.
        onnx: Also export the dense model as model.onnx.
        mlflow: Log the export as a model of the run's MLflow run.
        embed: Copy the export into the MLflow model; default: the model refers to the export.
    """
    call_and_print(raytrec.export, {**locals()})


def apply_deltas(
    export: Annotated[str, typer.Argument(metavar="EXPORT")],
    deltas: Annotated[str, typer.Argument(metavar="DELTAS")],
    out: str,
    to: Annotated[int | None, typer.Option(min=1)] = None,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Write the export of a later step from an export and a run's deltas. Repeat the command to resume.

    Options:
        export: Export of a checkpoint, such as DELTAS/exports/NUMBER.
        deltas: Folder of deltas (export.deltas.to).
        out: Folder to write to: local, s3:// or gs://.
        to (NUMBER): Last delta to apply; default: the newest one.
    """
    options = {**locals()}
    from raytrec.exporting.apply_deltas import apply_deltas as run_apply

    call_and_print(run_apply, options)


def convert(
    run: Run,
    tables: Annotated[list[str], typer.Option("--table")],
    out: str,
    checkpoint: Checkpoint = None,
    allow_code: AllowCode = False,
):
    """Write a copy of a checkpoint in which some tables have another kind or size, for a warm start.

    For example: --table user=managed

    Options:
        tables (TABLE=KIND): New kind of a table: managed, resize:ROWS or hash (repeatable).
        out: Folder to write the new checkpoint to.
    """
    from raytrec.common.redaction import hide
    from raytrec.common.storage import quote_for_shell
    from raytrec.driver.evaluation import convert as run_convert

    folder, notes = run_convert(run, tables, out, checkpoint=checkpoint, allow_code=allow_code)
    for line in notes:
        print(line)
    print(f"checkpoint   {hide(folder)}")
    print(f"warm start   raytrec train --warm-start {quote_for_shell(hide(folder))} data.train=DIR")


def report(run: RunFolder, out: str | None = None):
    """Rebuild a run's report.html and its plots from the run folder.

    Options:
        out: Folder to write to; default: RUN.
    """
    from raytrec.common.storage import make_relative
    from raytrec.report.report import build
    from raytrec.tracking.run_folder import check_run_folder

    page, pictures = build(check_run_folder(run).absolute(), out and Path(out).absolute())
    print(f"report       {make_relative(page)}")
    if pictures:
        print(f"pictures     {make_relative(pictures[0].parent)}")


def track(run: RunFolder, allow_code: AllowCode = False, follow: bool = False):
    """Send a run's missing records to MLflow, e.g. because its server was unavailable when the run ended.

    Options:
        follow: Continue until standard input ends, while another process executes the run.
    """
    from raytrec.common.redaction import hide
    from raytrec.driver.track import track

    config = track(run, allow_code=allow_code, follow=follow)
    if follow:
        return
    from raytrec.driver.run import shorten_store_uri

    print(f"MLflow       {hide(shorten_store_uri(config.tracking.uri))} contains all records of {config.run.name}")


def compare(runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...")], out: str = "compare.html"):
    """Compare the results, configurations and curves of runs on the terminal and as an HTML page.

    Options:
        runs: Run folders.
        out: HTML page to write.
    """
    from raytrec.report.compare import compare as compare_runs
    from raytrec.report.compare import print_table, write

    comparison = compare_runs(runs)
    print_table(comparison)
    print(f"page         {write(comparison, out)}")


def inspect(
    path: Annotated[str | None, typer.Argument()] = None,
    from_run: str | None = None,
    out: str | None = None,
    force: bool = False,
    label: list[str] | None = None,
    reserve: list[str] | None = None,
    dim: Annotated[int, SHARED["dim"]] = 16,
    rows: int | None = None,
):
    """Inspect Parquet data and print a complete schema.yaml (and a table of the columns on stderr).

    Options:
        path: Parquet folder or file: local, s3:// or gs://.
        from_run (RUN): Print the run's schema instead, with statistics of the ids that the run looked up.
        out: File to write the schema to; default: stdout.
        force: Overwrite the file.
        label: Column to predict (repeatable); default: columns with names that are common for labels.
        reserve: Column that is passed through (data.reserve_columns) and is not a feature (repeatable).
        rows: Approximate number of rows to read from each of training, validation and test data; default: all.
    """
    from raytrec.common.errors import ConfigError
    from raytrec.inspection.propose import inspect as propose
    from raytrec.inspection.result import check_output_path, write_schema

    if (path is None) == (from_run is None):
        raise ConfigError("inspect needs either data or a run", expected="either PARQUET or --from-run RUN")
    if out is not None:
        check_output_path(out, force)
    if from_run:
        from raytrec.driver.evaluation import read_run_schema  # needs packages of an environment for training

        write_schema(read_run_schema(from_run).to_yaml(), out)
        return
    propose(path, dim=dim, labels=label, reserve_columns=reserve, max_rows=rows).show(out, overwrite=force)
