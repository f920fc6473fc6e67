"""The folder of a search, written and reopened.

FOLDER/search.json      its settings; trials.json: the state of each trial
FOLDER/base/config.yaml the configuration; FOLDER/space.yaml: the space
FOLDER/trial-001/ …     the run folder of each trial
FOLDER/best.yaml, outcome.json                     at the end
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from raytrec.common.documents import read_document
from raytrec.common.errors import ConfigError, RaytrecError, RunError, os_errors
from raytrec.common.reading import read_text
from raytrec.config.run_config import RunConfig, load_config
from raytrec.driver.console import RunConsole
from raytrec.driver.driver_state import hold_run_lock
from raytrec.driver.prepare import make_run_folder, write_config, write_marked
from raytrec.driver.recorder import write_json
from raytrec.driver.resume import earlier_folders
from raytrec.tracking.run_folder import RESULT
from raytrec.tuning.search import Search, Settings, State, prepare_search
from raytrec.tuning.space import Space

SEARCH_CONFIG, SEARCH, TRIALS = "base/config.yaml", "search.json", "trials.json"
SPACE, OUTCOME = "space.yaml", "outcome.json"


class TrialRecord(TypedDict):
    """The state of a trial in trials.json."""

    values: dict[str, Any]
    state: State
    error: str | None


def _complete(values: Any) -> Any:
    if isinstance(values, dict) and (missing := asdict(Settings()).keys() - values.keys()):
        raise ValueError(f"{min(missing)} is missing")
    return values


Records = Annotated[list[TrialRecord], Field(min_length=1)]
StoredSettings = Annotated[Settings, BeforeValidator(_complete)]


def write_search(search: Search) -> None:
    """Makes the folder of a search, and those of its trials that do not exist.

    Raises:
        RunError: it cannot be written, or a trial's folder holds something else.
    """
    folder = search.folder
    with os_errors("cannot write the search's folder", where=str(folder)):
        (folder / SEARCH_CONFIG).parent.mkdir(parents=True, exist_ok=True)
        write_config((folder / SEARCH_CONFIG).parent, search.config)
        write_marked(folder / SPACE, search.space.text)
        write_json(folder / SEARCH, asdict(search.settings))
        write_trials(search)
    for trial in search.trials:
        if not (trial.folder / "config.yaml").exists():
            make_run_folder(trial.folder, trial.config, search.schema)


def write_trials(search: Search) -> None:
    """Writes the state of all trials."""
    write_json(search.folder / TRIALS, [trial.record() for trial in search.trials])


def is_search(folder: Path) -> bool:
    """Whether a folder is that of a search."""
    return (folder / SEARCH).is_file()


def read_settings(folder: Path) -> Settings:
    """The settings in search.json.

    Raises:
        RunError: there is no search, or the file is damaged. ConfigError: a number is out of range.
    """
    return read_document(str(folder), SEARCH, StoredSettings, "search", "raytrec tune")


def reopen(folder: Path, trials: int | None, allow_code: bool, patience_s: float = 0) -> Search:
    """A search that was interrupted. Trials that have ended stay as they are; the others are left to run.

    Args:
        trials: their number, if it grows; None: as many as before.
        patience_s: seconds to wait for a process that still runs the search.

    Raises:
        RunError: there is no search, it cannot be read, or a process still runs it. ConfigError: it names
            code that is not allowed.
    """
    read_settings(folder)  # before the lock, which makes a folder
    with hold_run_lock(folder, patience_s, RunConsole(folder.name).note):
        settings = read_settings(folder)
        before = read_document(str(folder), TRIALS, Records, "search", "raytrec tune")
    if trials is not None and trials < len(before):
        raise ConfigError(
            f"--trials {trials}, but the search has {len(before)} already",
            where=str(folder),
            do="leave it out",
        )
    config = load_config(folder / SEARCH_CONFIG, allow_code=allow_code)
    config.run.dir = str(folder)  # it may have been moved
    space = Space.read(str(folder / SPACE))
    search = prepare_search(config, space, replace(settings, trials=trials or settings.trials), allow_code)
    for trial, record in zip(search.trials, before, strict=False):
        if record["values"] != trial.values:
            raise RunError(
                f"trial {trial.number} of the search is not what its space draws",
                where=str(folder / TRIALS),
                expected=f"{trial.values}, which {SPACE} and the seed in {SEARCH} draw",
                do="restore the files of the search, or begin a new one",
            )
        if (trial.folder / "config.yaml").exists():
            load_config(trial.folder / "config.yaml", allow_code=allow_code)
        trial.read_evaluations(search.figure.key)
        if (trial.folder / RESULT).is_file():  # the search may have been killed before it noted this
            trial.state = State.FINISHED
        elif record["state"] in (State.STOPPED, State.FAILED):
            trial.state, trial.error = record["state"], record["error"] or ""
        elif record["state"] != State.WAITING:
            trial.state = State.INTERRUPTED
    return search


def newest_like(config: RunConfig, space: Space, settings: Settings, named: bool) -> Path | None:
    """The newest search that the same command began and that has not ended.

    Args:
        config: resolved, as of a new search.
        named: whether the user has chosen its folder or name.
    """

    for folder in earlier_folders(config, named):
        with suppress(RaytrecError, OSError):  # damaged, or no search
            earlier = load_config(folder / SEARCH_CONFIG, allow_code=True)  # only compared
            earlier.run.name, earlier.run.dir = config.run.name, config.run.dir
            same = earlier.to_yaml() == config.to_yaml() and read_settings(folder) == settings
            if same and read_text(folder / SPACE) == space.text and not (folder / OUTCOME).exists():
                return folder
    return None
