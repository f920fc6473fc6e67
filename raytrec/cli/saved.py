"""Commands that take a run, a checkpoint or data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from raytrec.cli.options import AllowCode, Changes, Checkpoint, Json, Run, RunFolder, Workers, show


def evaluate(
    run: Run,
    data: Annotated[
        str | None, typer.Option(help="Folder or file of Parquet; default: the run's data.test.")
    ] = None,
    workers: Workers = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Global batch size; default: as in training.")
    ] = None,
    overrides: Changes = None,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Evaluate a run or checkpoint, on any Parquet and with any number of workers."""
    options = {**locals()}
    del options["json"]
    from raytrec.driver.session import begin_early

    begin_early()
    from raytrec.driver.evaluation import evaluate as again

    show(again(options.pop("run"), **options), json)


def predict(
    run: Run,
    data: Annotated[str, typer.Option(help="Folder or file of Parquet; it needs no labels.")],
    out: Annotated[
        str, typer.Option(help="Folder to write to: for each file of the data one of the same name.")
    ],
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B,...",
            help="Columns to carry (repeatable); default: data.reserve_columns; '' for none.",
        ),
    ] = None,
    vectors: Annotated[
        Literal["query", "item"] | None,
        typer.Option(help="This tower's vectors in the place of scores; the data needs its features alone."),
    ] = None,
    workers: Workers = None,
    checkpoint: Checkpoint = None,
    overrides: Changes = None,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Predict every row of a folder of Parquet with a run or checkpoint. Interrupted, give it again."""
    options = {**locals()}
    del options["json"]
    from raytrec.driver.session import begin_early

    begin_early()
    from raytrec.prediction.predict import predict as run_predict

    show(run_predict(options.pop("run"), **options), json)


def index(
    run: Run,
    items: Annotated[str, typer.Option(help="Folder or file of Parquet with one row for each item.")],
    out: Annotated[str, typer.Option(help="Folder to write the index to.")],
    item: Annotated[
        str | None, typer.Option(help="Column that names an item; default: eval.retrieval.item of the run.")
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B,...", help="Columns of items to keep (repeatable); default: all."),
    ] = None,
    faiss: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Also an index of faiss, such as HNSW32 or 'IVF256,Flat'."),
    ] = None,
    queries: Annotated[
        str | None,
        typer.Option(help="Parquet to measure the recall of faiss with; default: the run's data.test."),
    ] = None,
    workers: Workers = None,
    checkpoint: Checkpoint = None,
    overrides: Changes = None,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Compute the vectors of items, and an index to search them by. Interrupted, give it again."""
    options = {**locals()}
    del options["json"]
    from raytrec.driver.session import begin_early

    begin_early()
    from raytrec.retrieval.build import index as build

    show(build(options.pop("run"), **options), json)


def export(
    run: Run,
    out: Annotated[str, typer.Option(help="Folder to write to: local, s3:// or gs://.")],
    checkpoint: Checkpoint = None,
    quantize: Annotated[
        Literal["int8", "int4", "fp16"] | None,
        typer.Option(help="Precision of tables; default: fp32. Prints the metrics before and after."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Parquet for types, golden rows and metrics; default: the run's data.test."),
    ] = None,
    golden_rows: Annotated[
        int, typer.Option(min=0, help="Rows that go along with their scores; 0: no real row does.")
    ] = 64,
    onnx: Annotated[bool, typer.Option("--onnx", help="Also the dense model as model.onnx.")] = False,
    mlflow: Annotated[
        bool, typer.Option("--mlflow", help="Log the export as a model of the run's MLflow run.")
    ] = False,
    embed: Annotated[
        bool, typer.Option("--embed", help="Copy the export into that model; else the model refers to it.")
    ] = False,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Write a trained model as a folder that is scored and served without the trainer. Interrupted, give it
    again."""
    options = {**locals()}
    del options["json"]
    from raytrec.exporting.export import export as run_export

    show(run_export(**options), json)


def convert(
    run: Run,
    tables: Annotated[
        list[str],
        typer.Option(
            "--table",
            metavar="TABLE=KIND",
            help="What becomes of a table: managed, resize:ROWS or hash (repeatable).",
        ),
    ],
    out: Annotated[str, typer.Option(help="Folder to write the new checkpoint to.")],
    checkpoint: Checkpoint = None,
    allow_code: AllowCode = False,
):
    """Change the kind of a trained checkpoint's tables, for a warm start: --table user=managed"""
    from raytrec.common.redaction import hide
    from raytrec.common.storage import in_shell
    from raytrec.driver.convert import convert as run_convert

    converted = run_convert(run, tables, out, checkpoint=checkpoint, allow_code=allow_code)
    for line in converted.lines:
        print(line)
    print(f"checkpoint   {hide(converted.path)}")
    print(f"train on     raytrec train --warm-start {in_shell(hide(converted.path))} data.train=DIR")


def report(
    run: RunFolder, out: Annotated[str | None, typer.Option(help="Folder to write to; default: RUN.")] = None
):
    """Rebuild a run's report.html and its figures from the run folder."""
    from raytrec.common.storage import relative
    from raytrec.report.report import build
    from raytrec.tracking.run_folder import existing_run

    page, pictures = build(existing_run(run).absolute(), out and Path(out).absolute())
    print(f"report       {relative(page)}")
    if pictures:
        print(f"pictures     {relative(pictures[0].parent)}")


def track(
    run: RunFolder,
    allow_code: AllowCode = False,
    follow: Annotated[
        bool, typer.Option("--follow", help="Until standard input ends, while another process trains it.")
    ] = False,
):
    """Write to MLflow what it lacks of a run, because its server was away when the run ended."""
    from raytrec.common.redaction import hide
    from raytrec.driver.track import track

    config = track(run, allow_code=allow_code, follow=follow)
    if follow:
        return
    from raytrec.driver.run import short

    print(f"MLflow       {hide(short(config.tracking.uri))} has all of {config.run.name}")


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Run folders.")],
    out: Annotated[str, typer.Option(help="The HTML page to write.")] = "compare.html",
):
    """Compare runs: results, configurations and overlaid curves, on the terminal and as a page."""
    from raytrec.report.compare import compare as read
    from raytrec.report.compare import print_table, write

    comparison = read(runs)
    print_table(comparison)
    print(f"page         {write(comparison, out)}")


def inspect(
    path: Annotated[
        str | None, typer.Argument(help="Folder or file of Parquet: local, s3:// or gs://.")
    ] = None,
    from_run: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Instead: the run's schema, with statistics of the ids it looked up."
        ),
    ] = None,
    out: Annotated[str | None, typer.Option(help="Write the schema here instead of to stdout.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    label: Annotated[list[str] | None, typer.Option(help="Column to predict (repeatable).")] = None,
    reserve: Annotated[
        list[str] | None,
        typer.Option(help="Column of data.reserve_columns: kept with its rows, not a feature (repeatable)."),
    ] = None,
    dim: Annotated[int, typer.Option(help="Width of the embeddings; a multiple of 4.")] = 16,
    rows: Annotated[int | None, typer.Option(help="Read only about this many rows.")] = None,
):
    """Inspect Parquet and print a ready schema.yaml (and a table of its columns on stderr)."""
    from raytrec.common.errors import ConfigError
    from raytrec.driver.plan import read_run_schema
    from raytrec.inspection.propose import inspect as look
    from raytrec.inspection.result import check_out, write_schema

    if (path is None) == (from_run is None):
        raise ConfigError("give either data or a run", expected="inspect PARQUET, or inspect --from-run RUN")
    if out is not None:
        check_out(out, force)
    if from_run:
        write_schema(read_run_schema(from_run).to_yaml(), out)
        return
    look(path, dim=dim, labels=label, reserve_columns=reserve, max_rows=rows).show(out, overwrite=force)
