"""Tune the values of configuration keys, for `raytrec tune`."""

from __future__ import annotations

from collections.abc import Callable
from math import isnan
from pathlib import Path
from time import time
from typing import Any

import yaml
from rich.table import Table

from raytrec.cluster.session import is_job_driver
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.formatting import parse_number
from raytrec.common.storage import make_absolute, make_relative, quote_for_shell
from raytrec.common.terminal import open_console, to_bold_text, to_plain_text
from raytrec.config.overrides import Overrides
from raytrec.config.run_config import RunConfig, load_config
from raytrec.doctor.host_checks import call_within
from raytrec.driver.driver_state import hold_run_lock, record_driver
from raytrec.driver.launch import Interrupted, resume_command
from raytrec.driver.prepare import resolve, write_marked_file
from raytrec.driver.recorder import write_json
from raytrec.driver.run import PREVIOUS_DRIVER_TIMEOUT_S
from raytrec.metrics.selection import EVAL_PREFIX
from raytrec.tracking.mlflow_records import INVALID_NAME_CHARACTERS, Record
from raytrec.tracking.store import Store
from raytrec.tuning.folder import OUTCOME, SPACE, find_matching_search, is_search, reopen_search, write_search
from raytrec.tuning.runner import Runner, TuneConsole
from raytrec.tuning.search import BEST_FILE, ENDED_STATES, Search, Settings, Trial, prepare_search
from raytrec.tuning.space import Space


def tune(
    source: str | Path | dict | RunConfig | None = None,
    space: str | None = None,
    overrides: Overrides | None = None,
    *,
    trials: int | None = None,
    metric: str | None = None,
    seed: int | None = None,
    at_once: int | None = None,
    grace_steps: int | None = None,
    reduction_factor: float | None = None,
    resume: str | Path | None = None,
    resume_latest: bool = False,
    allow_code: bool = False,
) -> Search:
    """Search for the best values of some configuration keys.

    Each trial is a run in its own folder inside the search folder (run.dir; default: runs/NAME-tune-TIME). Trials with
    worse metrics than other trials after as many rows save a checkpoint and stop early (successive halving).

    Args:
        source: Path of a configuration file, its values, or a RunConfig; train.eval_every_steps must be set.
        space: Path of a file with the keys to draw and their distributions (tuning.space).
        overrides: Changes to the configuration, as `section.key=value` strings or a mapping.
        trials: Number of trials; default: 10. The number can be increased with `resume`.
        metric: Key of an evaluation metric; default: the metric that selects the best checkpoints.
        seed: Seed of the draws (default: 0); the same seed draws the same configurations.
        at_once: Maximum number of concurrent trials; default: as many as fit on the machine or cluster.
        grace_steps: Number of steps during which no trial is stopped; default: train.eval_every_steps.
        reduction_factor: Of the trials at the same age, the best 1 / reduction_factor (default: 1 / 4) continue.
        resume: Folder of an interrupted search, which contains all settings; only `trials`, `at_once` and `allow_code`
            may be given with it.
        resume_latest: True to resume the newest interrupted search started by the same command; if there is none, a new
            search starts.
        allow_code: True to allow code that a configuration from a URI or another user's folder names
            (raytrec/config/trust.py).

    Returns:
        Search with its trials; `raytrec train FOLDER/best.yaml` trains the best trial again.

    Raises:
        ConfigError, SchemaError, DataError: The input is invalid; raised before any trial starts.
        RunError: The folder already contains a search or run, or cannot be written; the search to resume is damaged or
            still running; no trial has a result; or the cluster cannot be reached.
        Interrupted: Ctrl-C or SIGTERM was received.

    Example:
        >>> search = raytrec.tune("films.yaml", "space.yaml", ["run.dir=runs/search"], trials=2)
        >>> len(search.trials)
        2
    """
    if at_once is not None and at_once < 1:
        raise ConfigError(f"--at-once is {at_once}", where="options of tune", expected="a number of at least 1")
    if resume:
        names = "CONFIG", "overrides", "--space", "--metric", "--seed", "--grace-steps", "--reduction-factor"
        others = source, overrides or None, space, metric, seed, grace_steps, reduction_factor
        if given := [name for name, value in zip(names, others, strict=True) if value is not None]:
            raise ConfigError(
                f"--resume cannot be combined with {', '.join(given)}, because the search folder contains all settings",
                where="options of tune",
                expected="--resume FOLDER, with at most --trials, --at-once and --allow-code",
            )
        return _run(reopen_search(Path(make_absolute(str(resume))), trials, allow_code), at_once)
    if source is None or not space:
        raise ConfigError("a search requires a config and a space", expected="CONFIG --space SPACE, or --resume FOLDER")
    factor = 4.0 if reduction_factor is None else reduction_factor
    settings = Settings(10 if trials is None else trials, metric, seed or 0, grace_steps, factor)
    config = load_config(source, overrides, allow_code=allow_code)
    named = bool(config.run.name or config.run.dir)
    config = resolve(config, source, "tune")
    search_space = Space.read(str(space))  # relative to the working directory of a job, like CONFIG
    if resume_latest and (earlier := find_matching_search(config, search_space, settings, named)):
        patience_s = PREVIOUS_DRIVER_TIMEOUT_S + config.scaling.shutdown_grace_s
        return _run(reopen_search(earlier, None, allow_code, patience_s), at_once)
    if is_search(Path(config.run.dir)):
        folder = quote_for_shell(make_relative(Path(config.run.dir)))
        raise RunError(
            "the folder already contains a search",
            where=config.run.dir,
            expected="a new folder",
            do=f"run raytrec tune --resume {folder}, or choose another run.name or run.dir",
        )
    if (Path(config.run.dir) / "config.yaml").exists():
        raise RunError(
            "the folder already contains a run",
            where=config.run.dir,
            expected="a new folder",
            do="choose another run.name or run.dir",
        )
    return _run(prepare_search(config, search_space, settings, allow_code), at_once)


def _run(search: Search, at_once: int | None) -> Search:
    """Write the search folder, run the trials, write the outcome, and return the search."""
    folder, command = search.folder, resume_command(search.config, "tune")
    console = TuneConsole(search.config.run.name)
    with console, hold_run_lock(folder, 0, console.phase):
        write_search(search)
        if search.test_data_warning:
            console.warn(search.test_data_warning)
        if is_job_driver():
            console.note(f"search folder {folder}")
        with record_driver(folder):
            runner = Runner(search, console)
            try:
                runner.run(at_once)
                console.phase("writing the outcome")
                write_outcome(search, console.warn)
                if runner.signal is not None:
                    raise Interrupted(runner.signal)
            except KeyboardInterrupt:
                console.note(f"to resume: {command}")
                raise
    if search.best is None:
        failed = next((trial.error for trial in search.trials if trial.error), "")
        what = f"no trial has a result: {failed or f'no evaluation has a value of {search.figure.key}'}"
        do = f"correct the cause, then resume: {command}" if failed else "start a new search with another --metric"
        raise RunError(what, where=str(folder), do=do)
    return search


MLFLOW_TIMEOUT_S = 60.0  # maximum time to wait for an MLflow server


def write_outcome(search: Search, warn: Callable[[str], None]) -> None:
    """Write the outcome of a search to its folder and to MLflow.

    best.yaml is written if a finished or stopped trial has a result, outcome.json if all trials have ended or failed,
    and the MLflow run if tracking is enabled. If MLflow fails or takes longer than MLFLOW_TIMEOUT_S, `warn` is called
    with the reason.

    Raises:
        OSError: A file cannot be written; resuming the search writes the outcome again.
    """
    folder = search.folder
    if search.best:
        write_marked_file(folder / BEST_FILE, format_best_config(search, search.best))
    if _has_ended(search):
        write_json(folder / OUTCOME, search.metrics)
    if search.config.tracking.enabled:
        try:
            call_within(MLFLOW_TIMEOUT_S, lambda: _write_mlflow_run(search))
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            warn(f"MLflow lacks the outcome of the search ({reason}); it is stored in {folder}")


def format_best_config(search: Search, best: Trial) -> str:
    """Return the best trial's configuration as YAML for `raytrec train`, with its metrics in comments."""
    data = "test" if search.test_data_warning else "validation"
    lines = [
        f"# Trial {best.number} of {search.config.run.name}, {best.state} at step {best.step}: "
        f"{search.value_text(best)} on the {data} data.",
        *([f"# Warning: {search.test_data_warning}."] if search.test_data_warning else []),
        *(f"# {key}: {value}" for key, value in best.read_last_figures().items() if not isnan(parse_number(value))),
        *(f"# {key} = {value}" for key, value in best.values.items()),
    ]
    values = search.config.with_overrides(best.values).get_changed_values()
    values["run"] = {key: value for key, value in values["run"].items() if key not in ("name", "dir")}
    values = {section: inner for section, inner in values.items() if inner != {}}
    return "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def print_outcome(search: Search) -> None:
    """Print a table of the trials, best first, and the search folder to stdout."""
    console = open_console()
    console.print(to_bold_text(search.config.run.name), soft_wrap=True)
    table = _build_table(search, list(search.trials[0].values))
    if console.measure(table, options=console.options.update_width(10_000)).maximum > console.width:
        table = _build_table(search, [])
    console.print(table)
    lines = [f"warning: {search.test_data_warning}"] if search.test_data_warning else []
    lines += [f"trial {trial.number} failed: {trial.error}" for trial in search.trials if trial.error]
    lines.append(f"search       {make_relative(search.folder)}")
    if search.best:
        lines.append(f"best         raytrec train {quote_for_shell(make_relative(search.folder / BEST_FILE))}")
    for line in lines:
        console.print(to_plain_text(line), soft_wrap=True)


def _build_table(search: Search, keys: list[str]) -> Table:
    """Return a table of the trials with one column per key; without keys, one column for all values."""
    table, figure = Table(), search.figure
    for column in ("trial", figure.label, "step", *keys, "state"):
        table.add_column(to_plain_text(column), justify="left" if column == "state" else "right", no_wrap=True)
    if not keys:
        table.add_column("values", overflow="fold")
    for trial in search.ranked:
        cells = [trial.number, figure.text(trial.value), f"{trial.step:,}"]
        cells += [trial.values[key] for key in keys]
        table.add_row(*map(to_plain_text, [*cells, trial.state, *([] if keys else [trial.values_text])]))
    return table


def _has_ended(search: Search) -> bool:
    """Return True if each trial has ended or failed; False after an interruption."""
    return all(trial.state in ENDED_STATES or trial.error for trial in search.trials)


def _write_mlflow_run(search: Search) -> None:
    """Write the space, the best trial and best.yaml to the MLflow run that is the parent of the trials."""
    folder, store = search.folder, Store(search.config, search.folder)
    draws = {f"space.{INVALID_NAME_CHARACTERS.sub('_', draw.key)}": draw for draw in search.space.draws}
    tags = {"trials": str(len(search.trials)), "metric": search.figure.key}
    store.open_parent()
    store.write_params({key: f"{draw.kind} {list(draw.values)}" for key, draw in draws.items()})
    if best := search.best:
        tags |= {"best.trial": str(best.number)} | {f"best.{k}": str(v) for k, v in best.values.items()}
        figures: dict[str, Any] = {EVAL_PREFIX + search.figure.key: best.value} | best.read_last_figures()
        figures = {key: value for key, value in figures.items() if not isnan(parse_number(value))}
        store.write_metrics([Record(figures, best.step, round(time() * 1000))])
    store.write_tags(tags)
    for file in (SPACE, BEST_FILE):
        if (folder / file).is_file():
            store.upload(folder / file, "")
    store.end("FINISHED" if _has_ended(search) else "KILLED")
