"""Commands for clusters: submit, head, follow, stop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from raytrec.cli.options import Address, Job, Overrides


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
    from raytrec.cluster.head import start_head

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
