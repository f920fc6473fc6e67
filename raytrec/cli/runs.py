"""Commands that take a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

import raytrec
from raytrec.cli.options import AllowCode, Config, Json, Overrides, RequiredConfig, print_json, print_result


def train(
    config: Config = None,
    overrides: Overrides = None,
    warm_start: str | None = None,
    resume: str | None = None,
    resume_latest: bool = False,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Train, evaluate and save a run.

    For example: raytrec train jobs/synthetic.yaml scaling.num_workers=2

    Options:
        warm_start (RUN): Start from the weights of this run or checkpoint; without CONFIG, also use its config.
        resume (RUN): Resume this run from its newest checkpoint; only keys that do not affect the result may change.
        resume_latest: Resume the newest interrupted run of this CONFIG; start a new run if there is none.
    """
    from raytrec.common.errors import ConfigError
    from raytrec.driver.run import Unfinished

    overrides, earlier = overrides or [], warm_start or resume
    if earlier and config and "=" in config:  # no CONFIG: the first argument is an override
        config, overrides = None, [config, *overrides]
    if warm_start and resume:
        raise ConfigError("--warm-start and --resume are mutually exclusive", expected="at most one of them")
    if resume_latest and earlier:
        raise ConfigError(
            "--resume-latest cannot be combined with --resume or --warm-start", expected="only one of the three options"
        )
    if config is None and earlier is None:
        raise ConfigError(
            "no config was given", expected="raytrec train CONFIG, or raytrec train --warm-start RUN, or --resume RUN"
        )
    try:
        result = raytrec.train(config, overrides, warm_start, resume, resume_latest, allow_code)
    except Unfinished as error:  # the error contains a partial result
        print_result(error.result, json)
        raise
    print_result(result, json)


def tune(
    config: Config = None,
    overrides: Overrides = None,
    space: str | None = None,
    trials: int | None = None,
    metric: str | None = None,
    at_once: int | None = None,
    seed: int | None = None,
    grace_steps: int | None = None,
    reduction_factor: float | None = None,
    resume: str | None = None,
    resume_latest: bool = False,
    allow_code: AllowCode = False,
    json: Json = False,
):
    """Search for good values of config keys.

    For example: raytrec tune CONFIG --space SPACE.yaml --trials 20

    Options:
        space (SPACE.yaml): Keys to search and their distributions.
        trials: Number of trials; default: 10.
        metric: Evaluation metric by which trials are compared; default: as for checkpoint.best_metric.
        at_once: Maximum number of concurrent trials; default: as many as fit on the machine or cluster.
        seed: Seed of the search (default: 0); the same seed always yields the same values.
        grace_steps: Steps before which no trial is stopped; default: train.eval_every_steps.
        reduction_factor: At each comparison, only one in this many trials (default: 4), the best, continues.
        resume (FOLDER): Resume this search; --trials may add trials.
        resume_latest: Resume the newest interrupted search of this command; start a new one if there is none.
    """
    options = {**locals()}
    del options["json"]
    from raytrec.tuning.tune import print_outcome

    search = raytrec.tune(options.pop("config"), **options)
    print_json(search.metrics) if json else print_outcome(search)


def check(config: RequiredConfig, overrides: Overrides = None, json: Json = False):
    """Compare a config's sharded training with plain torch in one process. The exit code is 1 if they differ."""
    from raytrec.driver.check import print_check

    result = raytrec.check(config, overrides or [])
    print_json(result.metrics) if json else print_check(result)
    if not result.passed:
        raise typer.Exit(1)


def doctor(
    config: Config = None,
    overrides: Overrides = None,
    address: str | None = None,
    storage: list[str] | None = None,
    share: bool = False,
    measure: Path | None = None,
    ranks: Annotated[int | None, typer.Option(min=1)] = None,
    json: Json = False,
):
    """Find problems on this machine or on each node of a cluster. The exit code is 1 if a check fails.

    Options:
        config: Config whose cluster, run folder and checkpoints are examined.
        address: auto, HOST:PORT or ray://HOST:PORT of a Ray cluster; default: scaling.address, RAY_ADDRESS, or this
            machine.
        storage (URI): Path that every node must be able to write and read (repeatable).
        share: Print Markdown for an issue, without host names, user names, paths or addresses.
        measure (FILE): Only measure the speed of devices, links and host, and write it as JSON for raytrec plan.
        ranks: Number of ranks in the measurement; default: one per GPU, or 2 on CPU.
    """
    from raytrec.doctor.examine import anonymize_examination, diagnose, print_examination, to_json_values, to_markdown

    if measure:
        from raytrec.doctor.child import write_rates

        return write_rates(measure, ranks)
    if config:
        from raytrec.config.run_config import load_config
        from raytrec.driver.prepare import resolve

    examination = diagnose(resolve(load_config(config, overrides), config) if config else None, address, storage or [])
    examination = anonymize_examination(examination) if share else examination
    if json:
        print_json(to_json_values(examination))
    elif share:
        print(to_markdown(examination))
    else:
        print_examination(examination)
    if examination.count("failure"):
        raise typer.Exit(1)


def plan(
    config: Config = None,
    overrides: Overrides = None,
    on: str | None = None,
    rates: str | None = None,
    prices: str | None = None,
    picture: str | None = None,
    json: Json = False,
):
    """Predict sharding, memory and step time on existing or planned machines; read the schema, but no data.

    The exit code is 1 if the run does not fit on one of the clusters or, with --prices or --on any, on any machine.

    Options:
        on (2x8xh100-sxm,4x48gib): Clusters, separated by commas, as [HOSTSx]MACHINE. MACHINE is a known machine, or
            GPUs (on CPU: workers) per host x memory of each[:memory of the host[:disk of the host]]; any: the
            smallest cluster of each known machine; default without --prices: scaling.num_workers GPUs (on CPU:
            workers) of 80 GiB.
        rates (FILE): Rates measured with raytrec doctor --measure; default: rates from data sheets.
        prices (FILE): Machines and their hourly prices, as YAML or JSON; the smallest and the cheapest cluster of
            these machines are found.
        picture (FILE.svg): File for a drawing of the shards, tables × ranks (.svg or .png).
    """
    from raytrec.common.errors import ConfigError
    from raytrec.driver.preflight import plan as predict
    from raytrec.planning.plan_report import draw, print_plans

    if not config:
        raise ConfigError("no config was given", expected="raytrec plan CONFIG")
    plans = predict(config, overrides or [], on, rates, prices)
    if picture:
        draw(plans, picture)
        typer.echo(f"picture      {picture}", err=True)
    if not (on or prices):
        hosts, gpus, gib, *_ = plans.on[0].cluster
        typer.echo(f"assumed: --on {hosts}x{gpus}x{gib:g}gib; name other machines with --on", err=True)
    print_json(plans.metrics()) if json else print_plans(plans)
    if not all(each.fits for each in plans.on) or ((prices or not plans.on) and not plans.chosen):
        raise typer.Exit(1)


def config(config: Config = None, overrides: Overrides = None, schema: bool = False):
    """Print a config with all defaults filled in, or the JSON Schema of configs.

    Options:
        schema: Print the JSON Schema of configs, with which editors check them.
    """
    from raytrec.common.errors import ConfigError
    from raytrec.common.redaction import hide_yaml
    from raytrec.config.base import build_json_schema
    from raytrec.config.run_config import RunConfig, load_config

    if schema:
        print(json.dumps(build_json_schema(RunConfig), indent=2))
    elif config:
        resolved = load_config(config, overrides or [], allow_code=True)  # the config's code is not run
        print(hide_yaml(resolved.to_yaml()), end="")
    else:
        raise ConfigError("no config was given", expected="raytrec config CONFIG, or raytrec config --schema")
