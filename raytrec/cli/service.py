"""Commands of services and of jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raytrec.cli.options import Address, AllowCode, Job, Json, Overrides, print_json


def serve(
    uri: Annotated[str, typer.Argument(metavar="URI", help="Export: a local folder, s3:// or gs://.")],
    name: Annotated[str | None, typer.Option(help="Of the service; default: the run's.")] = None,
    address: Annotated[
        str | None, typer.Option(help="auto or HOST:PORT of a Ray cluster; default: a new local one.")
    ] = None,
    replicas: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Processes that answer; MIN:MAX by load.")
    ] = "1",
    host: Annotated[str, typer.Option(help="That it listens on; 0.0.0.0: all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="That it listens on.")] = 8000,
    no_token: Annotated[bool, typer.Option("--no-token", help="Answer without a token.")] = False,
    log_requests: Annotated[
        str | None, typer.Option(metavar="URI", help="Folder for a sample of requests and their scores.")
    ] = None,
    log_sample: Annotated[
        float, typer.Option(min=1e-6, max=1, help="Share of requests that is logged.")
    ] = 0.01,
    promote_from: Annotated[str | None, typer.Option(help="Folder of exports; default: URI's.")] = None,
    allow_code: AllowCode = False,
):
    """Serve an export over HTTP, on Ray Serve, until Ctrl-C."""
    options = {**locals()}
    from raytrec.serving.command import serve as run
    from raytrec.serving.options import Served

    of_cluster = {option: options.pop(option) for option in ("address", "replicas")}
    run(Served(**options), **of_cluster)


def promote(
    uri: Annotated[str | None, typer.Argument(metavar="[URI]", help="Export that is to answer.")] = None,
    service: Annotated[str, typer.Option(help="The service's address.")] = "http://127.0.0.1:8000",
    name: Annotated[str | None, typer.Option(help="The service's name, for its token.")] = None,
    rollback: Annotated[bool, typer.Option("--rollback", help="The version before instead.")] = False,
):
    """Have all replicas of a service answer with another export, once all have loaded and checked it."""
    from raytrec.serving.command import promote as run

    print(f"version      {run(uri, service=service, name=name, rollback=rollback)}")
    print("restart      a service that is started again answers with the export that its command names")


def skew(
    log: Annotated[str, typer.Argument(metavar="LOG", help="Folder of `raytrec serve --log-requests`.")],
    export: Annotated[str, typer.Option(metavar="URI", help="Export that answered.")],
    data: Annotated[
        str | None, typer.Option(help="Parquet that it was trained with; default: scores alone are compared.")
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Of the log and the data to look at.")] = 50_000,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Compare what a service has answered with its export, and what it was asked with training data."""
    from raytrec.skew.compare import skew as compare

    found = compare(log, export, data=data, rows=rows, allow_code=allow_code)
    print_json(found.metrics) if json else found.show()


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
    from raytrec.client.job_run import follow
    from raytrec.client.jobs import Jobs
    from raytrec.common.redaction import hide

    jobs = Jobs(address)
    job = jobs.submit(config, overrides, [*(include or [])], root)
    print(f"job          {job}")
    print(f"see it       raytrec follow {job} --address {hide(jobs.address)}")
    print(f"stop it      raytrec stop {job} --address {hide(jobs.address)}", flush=True)
    if not detach:
        raise typer.Exit(follow(jobs, job))


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
    from raytrec.cluster.local_ray import start_head

    start_head(root, port=port, dashboard_port=dashboard_port, client_port=client_port, cpus=cpus)


def follow_job(job: Job = None, address: Address = None):
    """Follow a job's log from its start; exit with the job's code. Ctrl-C detaches."""
    from raytrec.client.job_run import follow
    from raytrec.client.jobs import Jobs

    jobs = Jobs(address)
    raise typer.Exit(follow(jobs, job or jobs.newest()))


def stop_job(job: Job = None, address: Address = None):
    """Ask a job to checkpoint and end, and wait until it has."""
    from raytrec.client.job_run import stop
    from raytrec.client.jobs import Jobs

    jobs = Jobs(address)
    stop(jobs, job or jobs.newest())
