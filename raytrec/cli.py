"""The command line. Commands only parse, call and print."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer
from raytrec_datasets import app as prepare_app

app = typer.Typer(
    name="raytrec",
    help="Trains recommender models whose embedding tables outgrow one GPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(prepare_app, name="prepare")

Overrides = Annotated[list[str] | None, typer.Argument(metavar="[section.key=value]...", help="Overrides.")]
Job = Annotated[
    str | None,
    typer.Argument(metavar="[JOB]", help="Job id, as printed by `raytrec submit`; default: the newest."),
]
Address = Annotated[
    str | None,
    typer.Option(help="http://HOST:PORT of the cluster's dashboard; default: http://127.0.0.1:8265."),
]
AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code", help="Allow code (module:name) named by a config from a URI, run or checkpoint."
    ),
]
Workers = Annotated[int | None, typer.Option(help="Workers; default: as in training.")]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="For example data.on_error=skip or tables.NAME.out_of_range=hash (repeatable).",
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(metavar="STEP|best", help="Which checkpoint of a run; default: the newest."),
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def _version(wanted: bool) -> None:
    if wanted:
        from raytrec import __version__

        print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]")] = None,
    overrides: Overrides = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--warm-start",
            metavar="RUN",
            help="Start from the weights of this run or checkpoint; without CONFIG, also from its config.",
        ),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="RUN",
            help="Resume this run from its newest checkpoint; CONFIG, if given, must be equivalent.",
        ),
    ] = None,
    resume_latest: Annotated[
        bool,
        typer.Option(
            "--resume-latest",
            help="Resume the newest interrupted run of this CONFIG; start a new one if there is none.",
        ),
    ] = False,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Train, evaluate and save a run: raytrec train jobs/synthetic.yaml scaling.num_workers=2"""
    from raytrec.driver.session import begin_early

    begin_early()  # while the rest is imported
    from raytrec.common.errors import ConfigError
    from raytrec.driver.launch import Interrupted
    from raytrec.driver.run import Unfinished
    from raytrec.driver.run import train as run

    overrides, earlier = overrides or [], start_from or resume
    if earlier and config and "=" in config:  # no CONFIG: the first argument is an override
        config, overrides = None, [config, *overrides]
    if start_from and resume:
        raise ConfigError("--warm-start and --resume exclude each other", expected="one of them")
    if resume_latest and earlier:
        raise ConfigError("--resume-latest finds the run itself", expected="CONFIG alone, or --resume RUN")
    if config is None and earlier is None:
        raise ConfigError(
            "no config was given",
            expected="raytrec train CONFIG, or raytrec train --warm-start RUN, or --resume RUN",
        )
    try:
        result = run(config, overrides, start_from, resume, resume_latest, allow_code)
    except Interrupted as interrupt:  # the run has reported it
        raise typer.Exit(128 + interrupt.signal) from None
    except Unfinished as error:  # there is a result to show
        _show(error.result, json)
        raise
    _show(result, json)


@app.command()
def tune(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]")] = None,
    overrides: Overrides = None,
    space: Annotated[
        str | None, typer.Option(metavar="SPACE.yaml", help="The keys to search, and how they are drawn.")
    ] = None,
    trials: Annotated[int | None, typer.Option(help="Number of trials; default: 10.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Metric to compare trials by; default: as for checkpoint.best_metric."),
    ] = None,
    at_once: Annotated[
        int | None, typer.Option(help="Trials that run at a time; default: as many as there is room for.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed draws the same trials.")] = 0,
    grace_steps: Annotated[
        int | None,
        typer.Option(help="Steps before which no trial is stopped; default: train.eval_every_steps."),
    ] = None,
    reduction_factor: Annotated[
        float, typer.Option(help="One in this many trials of an age is trained on.")
    ] = 4.0,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="FOLDER", help="Resume this search; --trials may add some."),
    ] = None,
    resume_latest: Annotated[
        bool,
        typer.Option(
            "--resume-latest",
            help="Resume the newest interrupted search of this command; start a new one if there is none.",
        ),
    ] = False,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Search good values for keys of a config: raytrec tune CONFIG --space SPACE.yaml --trials 20"""
    from raytrec.driver.launch import Interrupted
    from raytrec.tuning.outcome import print_outcome
    from raytrec.tuning.tune import tune as run

    try:
        search = run(
            config,
            space,
            overrides,
            trials=trials,
            metric=metric,
            seed=seed,
            at_once=at_once,
            grace_steps=grace_steps,
            reduction_factor=reduction_factor,
            resume=resume,
            resume_latest=resume_latest,
            allow_code=allow_code,
        )
    except Interrupted as interrupt:  # the search has reported it
        raise typer.Exit(128 + interrupt.signal) from None
    _dump(search.metrics) if json else print_outcome(search)


@app.command()
def submit(
    config: Annotated[str, typer.Argument(metavar="CONFIG")],
    overrides: Overrides = None,
    address: Address = None,
    include: Annotated[
        list[str] | None, typer.Option(help="Another file or folder to upload (repeatable).")
    ] = None,
    root: Annotated[
        str | None,
        typer.Option(help="Folder on the cluster that relative paths start at; default: its RAYTREC_ROOT."),
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return at once instead of following the job.")
    ] = False,
):
    """Train on a cluster: upload code and CONFIG, follow the job. Submit again to resume a stopped run."""
    from raytrec.client.jobs import Jobs, follow
    from raytrec.common.redaction import hide

    jobs = Jobs(address)
    job = jobs.submit(config, overrides, [*(include or [])], root)
    print(f"job          {job}")
    print(f"see it       raytrec follow {job} --address {hide(jobs.address)}")
    print(f"stop it      raytrec stop {job} --address {hide(jobs.address)}", flush=True)
    if not detach:
        raise typer.Exit(follow(jobs, job))


@app.command()
def head(
    root: Annotated[Path, typer.Option(help="RAYTREC_ROOT of jobs: their relative paths start here.")] = Path(
        "."
    ),
    port: Annotated[int, typer.Option(help="Port of the cluster (GCS).")] = 6379,
    dashboard_port: Annotated[int, typer.Option(help="Port of the job API and Ray's dashboard.")] = 8265,
    client_port: Annotated[int, typer.Option(help="Port of Ray client (ray://).")] = 10001,
    cpus: Annotated[int | None, typer.Option(help="Logical CPUs; default: the machine's.")] = None,
):
    """Run a Ray cluster on this machine's loopback, for `raytrec submit` and notebooks, until Ctrl-C."""
    from raytrec.cluster.head import start_head

    start_head(root, port=port, dashboard_port=dashboard_port, client_port=client_port, cpus=cpus)


@app.command("follow")
def follow_job(job: Job = None, address: Address = None):
    """Follow a job's log from its start; exit with the job's code. Ctrl-C detaches."""
    from raytrec.client.jobs import Jobs, follow

    jobs = Jobs(address)
    raise typer.Exit(follow(jobs, job or jobs.newest()))


@app.command("stop")
def stop_job(job: Job = None, address: Address = None):
    """Ask a job to checkpoint and end, and wait until it has."""
    from raytrec.client.jobs import Jobs, stop

    jobs = Jobs(address)
    stop(jobs, job or jobs.newest())


@app.command()
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint folder.")],
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
    from raytrec.driver.session import begin_early

    begin_early()
    from raytrec.driver.evaluation import evaluate as again

    result = again(
        run, data, workers=workers, batch_size=batch_size, overrides=overrides, allow_code=allow_code
    )
    _show(result, json)


@app.command()
def predict(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint folder.")],
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
    from raytrec.driver.session import begin_early

    begin_early()
    from raytrec.prediction.predict import predict as run_predict

    result = run_predict(
        run,
        data,
        out,
        columns=columns,
        vectors=vectors,
        workers=workers,
        checkpoint=checkpoint,
        overrides=overrides,
        allow_code=allow_code,
    )
    _show(result, json)


@app.command()
def index(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint folder.")],
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
    from raytrec.driver.session import begin_early

    begin_early()
    from raytrec.retrieval.build import index as build

    result = build(
        run,
        items,
        out,
        item=item,
        columns=columns,
        faiss=faiss,
        queries=queries,
        workers=workers,
        checkpoint=checkpoint,
        overrides=overrides,
        allow_code=allow_code,
    )
    _show(result, json)


@app.command()
def convert(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or checkpoint folder.")],
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
    from raytrec.driver.convert import convert as run_convert

    converted = run_convert(run, tables, out, checkpoint=checkpoint, allow_code=allow_code)
    for line in converted.lines:
        print(line)
    print(f"checkpoint   {hide(converted.path)}")
    print(f"train on     raytrec train --warm-start {hide(converted.path)} data.train=DIR")


@app.command()
def check(
    config: Annotated[str, typer.Argument(metavar="CONFIG")], overrides: Overrides = None, json: Json = False
):
    """Compare a config, its plan and cluster with one plain torch process; exit code 1 on a difference."""
    from raytrec.driver.session import begin_early

    begin_early()
    from raytrec.driver.check import check as run
    from raytrec.driver.check import print_check

    result = run(config, overrides or [])
    _dump(result.metrics) if json else print_check(result)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG")],
    overrides: Overrides = None,
    hosts: Annotated[
        int | None, typer.Option(help="Number of hosts; default: as many as scaling.num_workers fill.")
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="GPUs, or workers on CPU, per host; default: up to 8.")
    ] = None,
    memory_gib: Annotated[
        float, typer.Option(help="Memory of each GPU, or worker on CPU, unless plan.memory_gib is set.")
    ] = 80,
    host_memory_gib: Annotated[
        float | None, typer.Option(help="Memory of each host; default: twice that of its GPUs.")
    ] = None,
    disk_gib: Annotated[
        float | None, typer.Option(help="Disk of each host for tables in files; default: enough.")
    ] = None,
    json: Json = False,
):
    """Plan the sharding of tables for machines that are not here; needs the schema, no data."""
    from raytrec.driver.plan import plan as make
    from raytrec.driver.plan import print_plan

    found = make(config, overrides or [], hosts, gpus, memory_gib, host_memory_gib, disk_gib)
    _dump(found) if json else print_plan(found)


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
    out: Annotated[str | None, typer.Option(help="Folder to write to; default: RUN.")] = None,
):
    """Rebuild a run's report.html and its figures from the run folder."""
    from raytrec.common.storage import relative
    from raytrec.report.report import build_with_pictures
    from raytrec.tracking.run_folder import existing_run

    page, pictures = build_with_pictures(existing_run(run).absolute(), out and Path(out).absolute())
    print(f"report       {relative(page)}")
    if pictures:
        print(f"pictures     {relative(pictures[0].parent)}")


@app.command()
def track(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder.")],
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


@app.command()
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


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="Folder or file of Parquet: local, s3:// or gs://.")],
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
    from raytrec.inspection.propose import inspect as look
    from raytrec.inspection.result import check_out

    if out is not None:
        check_out(out, force)
    look(path, dim=dim, labels=label, reserve_columns=reserve, max_rows=rows).show(out, overwrite=force)


@app.command()
def config(
    config: Annotated[str | None, typer.Argument(metavar="[CONFIG]")] = None,
    overrides: Overrides = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON Schema of configs.")] = False,
):
    """Print a config resolved, with all defaults, or the JSON Schema for editors."""
    from raytrec.common.errors import ConfigError
    from raytrec.common.redaction import hide_yaml
    from raytrec.config.run_config import json_schema, load_config

    if schema:
        print(json.dumps(json_schema(), indent=2))
    elif config:
        resolved = load_config(config, overrides or [], allow_code=True)  # nothing of it runs
        print(hide_yaml(resolved.to_yaml()), end="")
    else:
        raise ConfigError("no config was given", expected="raytrec config CONFIG, or raytrec config --schema")


def _show(result, as_json: bool) -> None:
    from raytrec.driver.console import print_summary

    if as_json:
        _dump(result.metrics)
    else:
        print_summary(result)


def _dump(metrics: dict) -> None:
    print(json.dumps(metrics))


def main(arguments: list[str] | None = None) -> None:
    """The `raytrec` command. A RaytrecError is one message and exit code 1, without a traceback.

    Args:
        arguments: default: the command line's; then the process ends here.
    """
    from raytrec.common.process_exit import ends_at_once

    with ends_at_once() if arguments is None else nullcontext():
        _run(arguments)


def _run(arguments: list[str] | None) -> None:
    """One command; ends in SystemExit."""
    from raytrec.cluster.session import leave
    from raytrec.common.errors import RaytrecError
    from raytrec.driver.progress_log import ERROR, write_message

    try:
        app(arguments)
    except RaytrecError as error:
        prefix = "\033[1;31merror:\033[0m" if sys.stderr.isatty() else "error:"
        print(f"{prefix} {error}", file=sys.stderr)
        write_message(ERROR, error.parts)
        leave(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
