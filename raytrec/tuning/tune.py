"""`raytrec tune`: many runs of one configuration, each with other values for some keys; the best is kept."""

from __future__ import annotations

from pathlib import Path

from raytrec.cluster.lifeline import RayLost
from raytrec.cluster.session import in_job
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.storage import absolute, relative
from raytrec.config.overrides import Overrides, as_texts
from raytrec.config.run_config import RunConfig
from raytrec.driver.driver_state import hold_run_lock, record_driver
from raytrec.driver.launch import Interrupted
from raytrec.driver.run import PATIENCE_S
from raytrec.tuning.console import TuneConsole
from raytrec.tuning.folder import is_search, newest_like, read_note, refuse_drawn_code, reopen, write_search
from raytrec.tuning.outcome import Outcome, outcome_of, write_outcome
from raytrec.tuning.runner import run_trials
from raytrec.tuning.search import Search, Settings, load_base, prepare
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
) -> Outcome:
    """Searches good values for some keys of a configuration.

    Every trial is a run of its own, in a folder below that of the search (run.dir; default: runs/NAME). Those
    whose evaluations fall behind are stopped early, by successive halving; they save first.

    Args:
        source: a config file, its values, or a RunConfig; with train.eval_every_steps.
        space: a file that says which keys are searched and how their values are drawn (tuning.space).
        overrides: `section.key=value` strings.
        trials: how many; default 10. With `resume`, more than there were.
        metric: key of a metric of evaluations; default: by which the best checkpoints would be kept.
        seed: the same seed draws the same configurations.
        at_once: trials that run at a time; default: as many as there is room for.
        grace_steps: before which no trial is stopped; default: train.eval_every_steps.
        reduction_factor: of the trials of an age, one in so many is trained on.
        resume: the folder of a search that was interrupted.
        resume_latest: resume the newest interrupted search that the same command began, if there is one.
        allow_code: a config from a URI, or a search's folder, may name code (raytrec/config/trust.py).

    Returns:
        Outcome: all trials and the best one, which best.yaml in the search's folder trains again.

    Raises:
        ConfigError, SchemaError, DataError: what is wrong with the input, before a trial starts.
        RunError: no trial has come to a figure; or Ray was lost. Interrupted: Ctrl-C or SIGTERM.
    """
    if at_once is not None and at_once < 1:
        raise ConfigError(f"--at-once {at_once} cannot be", where="command line", expected="1 or more")
    if resume:
        folder = Path(absolute(str(resume)))
        if source or space or overrides:
            raise ConfigError("a search that is resumed has its CONFIG and space", expected="--resume alone")
        return _resume(folder, trials, at_once, allow_code)
    if source is None or not space:
        raise ConfigError(
            "a search needs a config and a space", expected="raytrec tune CONFIG --space SPACE.yaml"
        )
    settings = Settings(10 if trials is None else trials, metric, seed, grace_steps, reduction_factor)
    config, fingerprint, named = load_base(source, as_texts(overrides), allow_code)
    read = Space.read(str(space))  # as CONFIG, of a job from what was submitted with it
    if not allow_code:
        refuse_drawn_code(config, read)
    if resume_latest:
        note = {"fingerprint": fingerprint, "settings": settings, "text": read.text}
        if earlier := newest_like(config, named, note):
            patience = PATIENCE_S + config.scaling.shutdown_grace_s
            return _resume(earlier, None, at_once, allow_code, patience)
    if is_search(Path(config.run.dir)):
        raise RunError(
            "there is a search already",
            where=config.run.dir,
            expected="a new folder",
            do=f"raytrec tune --resume {relative(Path(config.run.dir))}; or choose another run.name",
        )
    search = prepare(config, read, settings)
    return _run(search, fingerprint, at_once)


def _resume(
    folder: Path, trials: int | None, at_once: int | None, allow_code: bool, patience_s: float = 0
) -> Outcome:
    """Resumes a search, for which a process that still runs it is waited for."""
    read_note(folder)
    with hold_run_lock(folder, patience_s, TuneConsole(folder.name).note):
        pass
    search, fingerprint = reopen(folder, trials, allow_code)
    return _run(search, fingerprint, at_once)


def _run(search: Search, fingerprint: str, at_once: int | None) -> Outcome:
    """The search itself: its folder, its trials, what they came to."""
    folder = search.folder
    with TuneConsole(search.config.run.name) as console, hold_run_lock(folder, 0, console.phase):
        write_search(search, fingerprint)
        console.follow(search.trials, search.figure)
        if search.caution:
            console.warn(search.caution)
        if in_job():
            console.note(f"search folder {folder}")
        with record_driver(folder):
            try:
                signal = run_trials(search, console, at_once)
            except RayLost as lost:
                raise RayLost(lost.what, where=lost.where, do=_how_to_resume(folder)) from None
            except KeyboardInterrupt:
                console.note(_how_to_resume(folder))
                raise
            console.phase("writing the outcome")
            outcome = outcome_of(search)
            write_outcome(search, outcome, console.warn)
            if signal is not None:
                console.note(_how_to_resume(folder))
                raise Interrupted(signal, None)
    if outcome.best is None:
        failed = next((trial.error for trial in search.trials if trial.error), "none has been evaluated")
        raise RunError(
            f"no trial has come to a figure: {failed}", where=str(folder), do=_how_to_resume(folder)
        )
    return outcome


def _how_to_resume(folder: Path) -> str:
    if in_job():
        return "submit the same again to resume the search"
    return f"resume with: raytrec tune --resume {relative(folder)}"
