"""`raytrec tune`: trains a configuration with many values of some keys."""

from __future__ import annotations

from pathlib import Path

from raytrec.cluster.session import in_job
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.storage import absolute, relative
from raytrec.config.overrides import Overrides
from raytrec.config.run_config import RunConfig, load_config
from raytrec.driver.driver_state import hold_run_lock, record_driver
from raytrec.driver.launch import Interrupted, resume_command
from raytrec.driver.prepare import resolve
from raytrec.driver.run import PATIENCE_S
from raytrec.tuning.folder import is_search, newest_like, reopen, write_search
from raytrec.tuning.outcome import write_outcome
from raytrec.tuning.runner import Runner, TuneConsole
from raytrec.tuning.search import Search, Settings, prepare_search
from raytrec.tuning.space import Space


def tune(
    source: str | Path | dict | RunConfig | None = None,
    space: str | None = None,
    overrides: Overrides | None = None,
    *,
    trials: int | None = None,
    metric: str | None = None,
    seed: int = 0,
    at_once: int | None = None,
    grace_steps: int | None = None,
    reduction_factor: float = 4.0,
    resume: str | Path | None = None,
    resume_latest: bool = False,
    allow_code: bool = False,
) -> Search:
    """Searches good values for some keys of a configuration.

    Each trial is a run, in a folder inside that of the search (run.dir; default: runs/NAME). Trials whose
    evaluations fall behind save and are stopped early, by successive halving.

    Args:
        source: a config file, its values, or a RunConfig; with train.eval_every_steps.
        space: a file with the keys that are searched, and how their values are drawn (tuning.space).
        overrides: `section.key=value` strings.
        trials: their number; default 10. With `resume`, it may grow.
        metric: key of a metric of evaluations; default: the one that the best checkpoints are kept by.
        seed: the same seed draws the same configurations.
        at_once: trials that run at a time; default: as many as there is room for.
        grace_steps: no trial is stopped before; default: train.eval_every_steps.
        reduction_factor: of the trials of an age, one in this many is trained on.
        resume: the folder of a search that was interrupted.
        resume_latest: resume the newest interrupted search that the same command began, if there is one.
        allow_code: a config from a URI, or a search's folder, may name code (raytrec/config/trust.py).

    Returns:
        Search: its trials and the best one, which `raytrec train FOLDER/best.yaml` trains again.

    Raises:
        ConfigError, SchemaError, DataError: what is wrong with the input, before a trial starts.
        RunError: no trial has a result, or the cluster cannot be reached. Interrupted: Ctrl-C or SIGTERM.

    Example:
        >>> search = raytrec.tune("films.yaml", "space.yaml", ["run.dir=runs/search"], trials=2)
        >>> len(search.trials)
        2
    """
    if at_once is not None and at_once < 1:
        raise ConfigError(f"--at-once must be 1 or more (got {at_once})", where="command line")
    if resume:
        if source or space or overrides:
            raise ConfigError(
                "--resume takes CONFIG and space from the folder of the search",
                where="command line",
                expected="neither CONFIG nor --space",
            )
        return _run(reopen(Path(absolute(str(resume))), trials, allow_code), at_once)
    if source is None or not space:
        raise ConfigError(
            "a search needs a config and a space", expected="raytrec tune CONFIG --space SPACE.yaml"
        )
    settings = Settings(10 if trials is None else trials, metric, seed, grace_steps, reduction_factor)
    config = load_config(source, overrides, allow_code=allow_code)
    named = bool(config.run.name or config.run.dir)
    config = resolve(config, source, "tune")
    drawn = Space.read(str(space))  # a job looks for it, as for CONFIG, in its working directory
    if resume_latest and (earlier := newest_like(config, drawn, settings, named)):
        patience_s = PATIENCE_S + config.scaling.shutdown_grace_s
        return _run(reopen(earlier, None, allow_code, patience_s), at_once)
    if is_search(Path(config.run.dir)):
        raise RunError(
            "there is a search already",
            where=config.run.dir,
            expected="a new folder",
            do=f"raytrec tune --resume {relative(Path(config.run.dir))}; or choose another run.name",
        )
    return _run(prepare_search(config, drawn, settings, allow_code), at_once)


def _run(search: Search, at_once: int | None) -> Search:
    """Runs a search: writes its folder, runs its trials, writes the outcome."""
    folder, again = search.folder, f"resume with: {resume_command(search.config, 'tune')}"
    console = TuneConsole(search.config.run.name)
    with console, hold_run_lock(folder, 0, console.phase):
        write_search(search)
        if search.caution:
            console.warn(search.caution)
        if in_job():
            console.note(f"search folder {folder}")
        with record_driver(folder):
            runner = Runner(search, console)
            try:
                runner.run(at_once)
                console.phase("writing the outcome")
                write_outcome(search, console.warn)
                if runner.signal is not None:
                    raise Interrupted(runner.signal, None)
            except KeyboardInterrupt:
                console.note(again)
                raise
    if search.best is None:
        failed = next((trial.error for trial in search.trials if trial.error), "none has been evaluated")
        raise RunError(f"no trial has a result: {failed}", where=str(folder), do=again)
    return search
