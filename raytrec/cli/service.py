"""Commands for services and jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from raytrec.cli.options import Address, AllowCode, Job, Json, Overrides, RequiredConfig, print_json, print_result


def serve(
    uri: Annotated[str, typer.Argument(metavar="URI")],
    name: str | None = None,
    address: str | None = None,
    replicas: str = "1",
    host: str = "127.0.0.1",
    port: int = 8000,
    no_token: bool = False,
    log_requests: str | None = None,
    log_sample: Annotated[float, typer.Option(min=1e-6, max=1)] = 0.01,
    promote_from: str | None = None,
    table_shards: Annotated[int, typer.Option(min=0)] = 0,
    table_cache_mib: Annotated[float, typer.Option(min=0)] = 64,
    table_timeout_ms: Annotated[float, typer.Option(min=1)] = 50,
    on_missing_shard: Literal["fail", "zeros"] = "fail",
    allow_code: AllowCode = False,
    follow: bool = False,
):
    """Serve an export over HTTP with Ray Serve until Ctrl-C.

    Options:
        uri: Export, or folder of deltas with --follow: a local folder, s3:// or gs://.
        name: Name of the service; default: the run's name.
        address: auto or HOST:PORT of a Ray cluster; default: RAY_ADDRESS, or else a new local cluster.
        replicas (N|MIN:MAX): Number of replicas; MIN:MAX: scaled with the load.
        host: Address to listen on; 0.0.0.0: all interfaces.
        port: Port to listen on.
        no_token: Accept requests without a token.
        log_requests (URI): Folder for a sample of requests and their scores.
        log_sample: Share of requests that is logged.
        promote_from: Folder of the exports that can be promoted; default: the parent folder of URI. Not with --follow.
        table_shards (N): Number of actors that hold the tables; 0: each replica maps all tables.
        table_cache_mib: Maximum size of each replica's cache of rows from table shards, in MiB.
        table_timeout_ms: Maximum time of a lookup in table shards, in milliseconds.
        on_missing_shard (fail|zeros): If a shard is unavailable, return status 503, or score with zeros.
        follow: Follow a run; URI is its folder of deltas (export.deltas.to).
    """
    options = {**locals()}
    from raytrec.serving.command import serve as run
    from raytrec.serving.options import ServiceOptions

    cluster_options = {option: options.pop(option) for option in ("address", "replicas")}
    run(ServiceOptions(**options), **cluster_options)


def promote(
    uri: Annotated[str | None, typer.Argument(metavar="[URI]")] = None,
    service: str = "http://127.0.0.1:8000",
    name: str | None = None,
    rollback: bool = False,
    share: Annotated[float | None, typer.Option(min=1e-6, max=1)] = None,
    shadow: bool = False,
):
    """Switch all replicas of a service to another export, after all of them have loaded and checked it.

    With --share or --shadow, the export becomes the challenger of the current export until the next promotion.

    Options:
        uri: Export to which the service switches; omit it with --rollback.
        service: Address of the service.
        name: Name of the service, used to find its token unless RAYTREC_SERVE_TOKEN is set.
        rollback: Remove the challenger, or, without a challenger, switch back to the previous version.
        share: Share of requests that the challenger serves or, with --shadow, scores; default with --shadow: all.
        shadow: Let the challenger score requests only for the log and metrics, not for responses.
    """
    from raytrec.serving.command import promote as run

    run(uri, service=service, name=name, rollback=rollback, share=share, shadow=shadow)
    print("restart      after a restart, the service loads the export that its command or configuration names")


def verify(
    service: Annotated[str, typer.Argument(metavar="SERVICE")],
    run: Annotated[str, typer.Argument(metavar="RUN[/STEP]")],
    name: str | None = None,
    json: Json = False,
):
    """Compare rows, managed ids and dense weights of a service with a checkpoint. The exit code is 0 if all are equal.

    Options:
        service: Address of the service, such as http://127.0.0.1:8000.
        run: Run folder (its newest checkpoint), run folder and step, or checkpoint folder.
        name: Name of the service, used to find its token unless RAYTREC_SERVE_TOKEN is set.
    """
    from raytrec.verification.verify import verify as run_verify

    result = run_verify(service, run, name=name)
    print_result(result, json)
    raise typer.Exit(result.metrics["result"] != "equal")


def skew(
    log: Annotated[str, typer.Argument(metavar="LOG")],
    export: str,
    data: str | None = None,
    rows: Annotated[int, typer.Option(min=1)] = 50_000,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Compare a service's logged responses with its export, and its requests with training data.

    Options:
        log: Folder written by `raytrec serve --log-requests`.
        export (URI): Export that produced the logged responses.
        data: Parquet data on which the model was trained; default: only scores are compared.
        rows: Maximum number of rows to sample from the log, and from the data.
    """
    from raytrec.skew.compare import skew as compare

    comparison = compare(log, export, data=data, rows=rows, allow_code=allow_code)
    print_json(comparison.metrics) if json else comparison.show()


def submit(
    config: RequiredConfig,
    overrides: Overrides = None,
    address: Address = None,
    include: list[str] | None = None,
    root: str | None = None,
    detach: bool = False,
):
    """Train on a cluster: upload code and CONFIG, and follow the job. Submit again to resume a stopped run.

    Options:
        include: Additional file or folder to upload (repeatable).
        root: Folder on the cluster to which paths are relative; default: the cluster's RAYTREC_ROOT.
        detach: Return immediately instead of following the job.
    """
    from raytrec.client.job_run import follow
    from raytrec.client.jobs import Jobs
    from raytrec.common.redaction import hide

    jobs = Jobs(address)
    job = jobs.submit(config, overrides, [*(include or [])], root)
    print(f"job          {job}")
    print(f"follow       raytrec follow {job} --address {hide(jobs.address)}")
    print(f"stop         raytrec stop {job} --address {hide(jobs.address)}", flush=True)
    if not detach:
        raise typer.Exit(follow(jobs, job))


def head(
    root: Path = Path("."),
    port: int = 6379,
    dashboard_port: int = 8265,
    client_port: int = 10001,
    cpus: int | None = None,
):
    """Run a Ray cluster on this machine's loopback, for `raytrec submit` and notebooks, until Ctrl-C.

    Options:
        root: Folder to which the paths of jobs are relative (RAYTREC_ROOT).
        port: Port of the cluster (GCS).
        dashboard_port: Port of the job API and Ray's dashboard.
        client_port: Port of Ray client (ray://).
        cpus: Logical CPUs; default: all CPUs of the machine.
    """
    from raytrec.cluster.local_ray import start_head

    start_head(root, port=port, dashboard_port=dashboard_port, client_port=client_port, cpus=cpus)


def follow_job(job: Job = None, address: Address = None):
    """Print a job's log from its beginning, and exit with the job's exit code. Ctrl-C detaches from the job.

    Without a job id, the newest job is followed.
    """
    from raytrec.client.job_run import follow
    from raytrec.client.jobs import Jobs

    jobs = Jobs(address)
    raise typer.Exit(follow(jobs, job or jobs.newest()))


def stop_job(job: Job = None, address: Address = None):
    """Ask a job to save a checkpoint and end, wait for its end, and print the last lines of its log.

    Without a job id, the only running job is stopped. If several jobs are running, the id is required.
    """
    from raytrec.client.job_run import stop
    from raytrec.client.jobs import Jobs

    jobs = Jobs(address)
    stop(jobs, job or jobs.find_job_to_stop())
