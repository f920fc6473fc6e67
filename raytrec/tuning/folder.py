"""Write and reopen search folders.

FOLDER/search.json       settings of the search
FOLDER/trials.json       values and state of each trial
FOLDER/base/config.yaml  configuration of the search
FOLDER/space.yaml        search space
FOLDER/trial-001/ …      run folder of each trial
FOLDER/best.yaml         configuration of the best trial, written at the end
FOLDER/outcome.json      results, written after all trials have ended or failed
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from raytrec.common.documents import read_document
from raytrec.common.errors import ConfigError, RaytrecError, RunError, convert_os_errors
from raytrec.common.formatting import format_count
from raytrec.common.reading import read_text
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.trust import SEARCH
from raytrec.driver.console import RunConsole
from raytrec.driver.driver_state import hold_run_lock
from raytrec.driver.prepare import make_run_folder, write_config, write_marked_file
from raytrec.driver.recorder import write_json
from raytrec.driver.resume import list_earlier_folders
from raytrec.tracking.run_folder import RESULT
from raytrec.tuning.search import Search, Settings, State, prepare_search
from raytrec.tuning.space import Space

SEARCH_CONFIG, TRIALS = "base/config.yaml", "trials.json"
SPACE, OUTCOME = "space.yaml", "outcome.json"


class TrialRecord(TypedDict):
    """Keys of a trial's entry in trials.json (Trial.record) that are read when a search is reopened.

    Attributes:
        values: Configuration key → drawn value.
        state: State of the trial.
        error: Reason for a failure; None if the trial has not failed.
    """

    values: dict[str, Any]
    state: State
    error: str | None


Records = Annotated[list[TrialRecord], Field(min_length=1)]


def write_search(search: Search) -> None:
    """Create or update the search folder, and create the missing run folders of its trials.

    Raises:
        RunError: A folder cannot be written, or a trial's folder contains other files.
    """
    folder = search.folder
    with convert_os_errors("cannot write the search folder", where=str(folder)):
        (folder / SEARCH_CONFIG).parent.mkdir(parents=True, exist_ok=True)
        write_config((folder / SEARCH_CONFIG).parent, search.config)
        write_marked_file(folder / SPACE, search.space.text)
        write_json(folder / SEARCH, asdict(search.settings))
        write_trials(search)
    for trial in search.trials:
        if not (trial.folder / "config.yaml").exists():
            make_run_folder(trial.folder, trial.config, search.schema)


def write_trials(search: Search) -> None:
    """Write the values and state of all trials to trials.json; raise OSError if the file cannot be written."""
    write_json(search.folder / TRIALS, [trial.record() for trial in search.trials])


def is_search(folder: Path) -> bool:
    """Return True if a folder contains a search (search.json)."""
    return (folder / SEARCH).is_file()


def read_settings(folder: Path) -> Settings:
    """Read the settings from search.json.

    Raises:
        RunError: There is no search, or the file is damaged or cannot be read.
        ConfigError: A number is out of range.
    """
    try:
        return read_document(str(folder), SEARCH, Settings, "search", "raytrec tune")
    except ConfigError as error:
        raise ConfigError(f"the setting {error.what}", where=str(folder / SEARCH), expected=error.expected) from None


def reopen_search(folder: Path, trials: int | None, allow_code: bool, patience_s: float = 0) -> Search:
    """Load an interrupted search from its folder.

    Finished and stopped trials are not run again; all other trials remain to be run.

    Args:
        folder: Search folder.
        trials: New number of trials, at least the old number; None: unchanged.
        allow_code: True to allow code that another user's search names (config/trust.py).
        patience_s: Seconds to wait for a process that is still running the search.

    Raises:
        RunError: There is no search, its files cannot be read or contradict each other, or a process is still running
            it.
        ConfigError, SchemaError, DataError: The search names code that is not allowed, `trials` is below the old
            number, or a trial can no longer run (prepare_search).
    """
    read_settings(folder)  # checked first, because taking the lock creates the folder
    with hold_run_lock(folder, patience_s, RunConsole(folder.name).note):
        settings = read_settings(folder)
        records = read_document(str(folder), TRIALS, Records, "search", "raytrec tune")
    if trials is not None and trials < len(records):
        raise ConfigError(
            f"the search has {format_count(len(records), 'trial')}, more than --trials {trials}",
            where=str(folder),
            do="increase --trials, or omit it",
        )
    config = load_config(folder / SEARCH_CONFIG, allow_code=allow_code)
    config.run.dir = str(folder)  # the folder may have been moved
    space = Space.read(str(folder / SPACE))
    search = prepare_search(config, space, replace(settings, trials=trials or settings.trials), allow_code)
    for trial, record in zip(search.trials, records, strict=False):
        if record["values"] != trial.values:
            raise RunError(
                f"the recorded values of trial {trial.number} do not match the search space and seed",
                where=str(folder / TRIALS),
                expected=f"{trial.values}, which {SPACE} yields with the seed in {SEARCH}",
                do="restore the files of the search, or start a new search",
            )
        if (trial.folder / "config.yaml").exists():
            load_config(trial.folder / "config.yaml", allow_code=allow_code)
        trial.read_evaluations(search.figure.key)
        if (trial.folder / RESULT).is_file():  # the search may have been killed before it recorded the trial's end
            trial.state = State.FINISHED
        elif record["state"] in (State.STOPPED, State.FAILED):
            trial.state, trial.error = record["state"], record["error"] or ""
        elif record["state"] != State.WAITING:
            trial.state = State.INTERRUPTED
    return search


def find_matching_search(config: RunConfig, space: Space, settings: Settings, named: bool) -> Path | None:
    """Return the folder of the newest unfinished search started by the same command, or None.

    `config` must be resolved as for a new search. `named` is True if the user set run.dir or run.name; only this folder
    is then considered.
    """
    for folder in list_earlier_folders(config, named):
        with suppress(RaytrecError, OSError):  # the folder is damaged or contains no search
            earlier = load_config(folder / SEARCH_CONFIG, allow_code=True)  # compared, not run
            earlier.run.name, earlier.run.dir = config.run.name, config.run.dir
            same = earlier.to_yaml() == config.to_yaml() and read_settings(folder) == settings
            if same and read_text(folder / SPACE) == space.text and not (folder / OUTCOME).exists():
                return folder
    return None
