"""`raytrec track`: MLflow gets what it lacks of a run that has ended, because its server was away."""

from __future__ import annotations

from pathlib import Path

from raytrec.common.errors import ConfigError, RunError
from raytrec.common.redaction import hide
from raytrec.config.run_config import RunConfig, load_config
from raytrec.config.trust import is_ours, not_ours
from raytrec.driver.console import RunConsole
from raytrec.driver.driver_state import hold_run_lock
from raytrec.driver.recorder import RESULT
from raytrec.driver.run import REPORT, open_tracker
from raytrec.report.history import run_folder

FILES = ("config.yaml", "schema.yaml", "plan.json", RESULT, REPORT)
ANSWER_S, PATIENCE_S = 15.0, 60.0  # for a first answer of the server, and for all that is missing


def track(run: str | Path, allow_code: bool = False) -> RunConfig:
    """Writes into a run's MLflow run whatever the store lacks of the run folder; once more, nothing.

    Args:
        run: the run folder.
        allow_code: its configuration, where somebody else has written it, may name a server and code.

    Returns:
        The run's configuration.

    Raises:
        RunError: no run there, one that is being trained, or MLflow does not take all of it.
        ConfigError: tracking.enabled is false; or the store cannot be opened.
    """
    folder = run_folder(run).absolute()
    file = folder / "config.yaml"
    elsewhere = None if is_ours(file) else not_ours(file)
    config = load_config(file, elsewhere=elsewhere, allow_code=allow_code, stored=True)
    config.run.dir = str(folder)  # it may have been moved since
    if not config.tracking.enabled:
        raise ConfigError("this run is not tracked", where=str(folder), expected="tracking.enabled=true")
    with RunConsole(config.run.name) as console, hold_run_lock(folder, 0, console.phase):
        tracker = open_tracker(config, console)
        patience = PATIENCE_S if tracker.ready(ANSWER_S) else 0
        tracker.params(config)
        for path in map(folder.joinpath, FILES):
            if path.is_file():
                tracker.file(path)
        for picture in sorted(folder.glob("pictures/*.svg")):
            tracker.file(picture, "pictures")
        finished = (folder / RESULT).is_file()
        if lost := tracker.close("FINISHED" if finished else "FAILED", patience):
            raise RunError(
                lost,
                where=f"{folder}, tracking.uri={hide(config.tracking.uri)}",
                do="mend that, or start the server; then give the same command again",
            )
    return config
