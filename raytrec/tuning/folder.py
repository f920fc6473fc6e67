"""The folder of a search: what it takes to resume it.

FOLDER/search.json      its settings; trials.json: the state of each trial
FOLDER/base/config.yaml the configuration; FOLDER/space.yaml: the space
FOLDER/trial-001/ …     the run folder of each trial
FOLDER/best.yaml, outcome.json, tune.html          at the end
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from raytrec.common.errors import ConfigError, RaytrecError, RunError
from raytrec.common.reading import NotReadable, json_values, read_bytes, read_text
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.trust import code_in, is_ours, mark, not_ours, origin, refuse_code
from raytrec.driver.prepare import make_folder, write_config
from raytrec.driver.recorder import RESULT, write_json, write_text
from raytrec.tuning.search import Search, Settings, prepare
from raytrec.tuning.space import Space
from raytrec.tuning.trials import (
    FAILED,
    FINISHED,
    INTERRUPTED,
    STOPPED,
    WAITING,
    Evaluations,
    Trial,
    plain_values,
    with_values,
)

# Of a trial in trials.json, what resuming needs.
KINDS: dict[str, Any] = {"state": str, "values": dict, "error": (str, type(None))}
SEARCH, TRIALS, SPACE, BASE, OUTCOME = "search.json", "trials.json", "space.yaml", "base", "outcome.json"


def write_search(search: Search, fingerprint: str) -> None:
    """Makes the folder of a search, and those of its trials, as far as they are not there.

    Raises:
        RunError: it cannot be written, or something else is there.
    """
    folder = search.folder
    try:
        (folder / BASE).mkdir(parents=True, exist_ok=True)
        write_config(folder / BASE, search.config)
        write_text(folder / SPACE, search.space.text)
        mark(folder / SPACE)
        note = {"fingerprint": fingerprint, "space": search.space.place, "settings": asdict(search.settings)}
        write_json(folder / SEARCH, note)
        keep(search)
    except OSError as error:
        raise RunError(f"cannot write the search's folder: {error.strerror}", where=str(folder)) from None
    for trial, config in zip(search.trials, search.configs, strict=True):
        if not (trial.folder / "config.yaml").exists():
            make_folder(trial.folder, config, search.schema)


def keep(search: Search) -> None:
    """Writes down the state of all trials."""
    write_json(search.folder / TRIALS, [trial.record() for trial in search.trials])


def is_search(folder: Path) -> bool:
    """Whether a folder is that of a search."""
    return (folder / SEARCH).is_file()


def read_note(folder: Path) -> dict[str, Any]:
    """What search.json says.

    Raises:
        RunError: there is no search, or the file is damaged.
    """
    try:
        note = json_values(read_bytes(folder / SEARCH))
        return {"fingerprint": note["fingerprint"], "settings": Settings(**note["settings"])}
    except FileNotFoundError:
        raise RunError(
            "there is no search here",
            where=str(folder),
            expected="the folder that `raytrec tune` printed",
        ) from None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(f"{SEARCH} of the search cannot be read: {error}", where=str(folder)) from None


def reopen(folder: Path, trials: int | None, allow_code: bool) -> tuple[Search, str]:
    """A search that was interrupted, and its fingerprint: what has ended stays, the rest is to be done.

    Args:
        trials: more than there were; None: as many.

    Raises:
        RunError: there is none, or it cannot be read. ConfigError: it names code that is not allowed.
    """
    note = read_note(folder)
    settings: Settings = note["settings"]
    before = _records(folder)
    if trials is not None and trials < len(before):
        raise ConfigError(
            f"--trials {trials}, but the search has {len(before)} already",
            where=str(folder),
            do="leave it out",
        )
    settings = Settings(**{**asdict(settings), "trials": trials or settings.trials})
    config = _trusted(folder / BASE, allow_code)
    config.run.dir = str(folder)  # it may have been moved
    space = Space.read(str(folder / SPACE))
    if not allow_code:
        refuse_drawn_code(config, space, before)
    search = prepare(config, space, settings, before)
    for trial, record in zip(search.trials, before, strict=False):
        if (trial.folder / "config.yaml").exists():
            _trusted(trial.folder, allow_code)
        _take_up(trial, record, search.figure.key)
    return search, note["fingerprint"]


def _trusted(folder: Path, allow_code: bool) -> RunConfig:
    """The configuration in a folder.

    Raises:
        ConfigError: it names code, this user has not written it, and that is not allowed.
    """
    file = folder / "config.yaml"
    elsewhere = None if is_ours(file) else not_ours(file)
    return load_config(file, elsewhere=elsewhere, allow_code=allow_code, stored=True)


def refuse_drawn_code(config: RunConfig, space: Space, before: list[dict] | tuple = ()) -> None:
    """Looks whether a search draws code, or has drawn it, that neither its configuration nor its space names.

    Args:
        before: records of trials that have been drawn before.

    Raises:
        ConfigError: it does; what a space from elsewhere draws counts as what has been drawn before.
    """
    elsewhere, base = origin(space.place), plain_values(config)
    if not (elsewhere or before):
        return
    known = set(code_in(base).items())
    for draw, value in space.extremes():
        drawn = with_values(base, {draw.key: value})
        if elsewhere:
            refuse_code(dict(code_in(drawn).items() - known), drawn, elsewhere)
        known.update(code_in(drawn).items())
    for record in before:
        drawn = with_values(base, record["values"])
        refuse_code(dict(code_in(drawn).items() - known), drawn, TRIALS)


def _records(folder: Path) -> list[dict[str, Any]]:
    """What trials.json has of each trial.

    Raises:
        RunError: it cannot be read, or a trial lacks something.
    """
    try:
        records = json_values(read_bytes(folder / TRIALS))
    except (OSError, NotReadable) as error:
        raise RunError(f"{TRIALS} of the search cannot be read: {error}", where=str(folder)) from None
    for number, record in enumerate(records if isinstance(records, list) else [None], 1):
        found = record if isinstance(record, dict) else {}
        if lacks := [name for name, kind in KINDS.items() if not isinstance(found.get(name, 0), kind)]:
            raise RunError(
                f"trial {number} of the search lacks {', '.join(lacks)}",
                where=str(folder / TRIALS),
                expected=f"{', '.join(KINDS)} of each trial",
                do="restore the file, or begin a new search",
            )
    return records


def _take_up(trial: Trial, record: dict[str, Any], key: str) -> None:
    """Notes how far a trial got, by its own run folder: the search may have been killed before it knew."""
    evaluations = Evaluations(trial.folder, key)
    evaluations.look()
    trial.points, trial.step = evaluations.points, evaluations.step
    if (trial.folder / RESULT).is_file():
        trial.state = FINISHED
    elif record["state"] in (STOPPED, FAILED):
        trial.state, trial.error = record["state"], record["error"] or ""
    else:
        trial.state = INTERRUPTED if record["state"] != WAITING else WAITING


def newest_like(config: RunConfig, named: bool, note: dict[str, Any]) -> Path | None:
    """The newest search that was begun by the same command, and has not ended.

    Args:
        config: resolved, as of a new search.
        named: whether the user has chosen its folder or name.
        note: fingerprint and settings of the command.
    """
    folder = Path(config.run.dir)
    stem = config.run.name.rsplit("-", 2)[0]  # NAME-tune-date-time
    candidates = [folder] if named else sorted(folder.parent.glob(f"{stem}-*"), reverse=True)
    return next((each for each in candidates if _is_like(each, note)), None)


def _is_like(folder: Path, note: dict[str, Any]) -> bool:
    if not is_search(folder) or (folder / OUTCOME).exists():
        return False
    try:
        found = read_note(folder)
        return (
            all(found[key] == note[key] for key in ("fingerprint", "settings"))
            and read_text(folder / SPACE) == note["text"]
        )
    except (RaytrecError, OSError):  # damaged: not this one
        return False
