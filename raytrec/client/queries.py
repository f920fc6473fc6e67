"""Functions that Ray clients call on a cluster: queries about runs, and the driver of a run.

A run is given by the name of its folder in RAYTREC_ROOT/runs, or by the path of its folder. Clients can only read
files that a run writes, and only in a folder with the config.yaml of a run. This module does not import torch.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

from raytrec.checkpoint.files import find
from raytrec.checkpoint.rows import StoredTable, list_table_names
from raytrec.cluster.session import pin_to_node, ray_session
from raytrec.common.documents import find_document
from raytrec.common.errors import RaytrecError, RunError, convert_os_errors, format_suggestion, get_root_cause
from raytrec.common.messages import EVENTS, METRICS
from raytrec.common.reading import MAX_YAML_BYTES, UnreadableError, open_regular, parse_yaml, read_bytes
from raytrec.common.storage import make_absolute
from raytrec.config.run_config import RunConfig
from raytrec.driver.driver_state import LOG_FILE, STOP_EXCEPTIONS, ask_to_stop, is_alive, read_driver_record
from raytrec.tracking.run_folder import CONFIG, RESULT

RUNS_FOLDER = "runs"
GROWING_FILES = (METRICS, EVENTS, LOG_FILE)
FILES = (CONFIG, "schema.yaml", "plan.json", RESULT, "report.html", "error.txt", "skipped.jsonl")
PICTURES = "pictures"
MAX_ANSWER_BYTES = 16 << 20  # maximum bytes read from each file per call
STATES = {"FINISHED": "finished", "STOPPED": "stopped", "FAILED": "failed"}


def runs() -> list[dict[str, Any]]:
    """Return {name, folder, state, unix_s} of each run in RAYTREC_ROOT/runs, the last started first.

    unix_s is the start of the run's last driver in Unix time, or the modification time of config.yaml if unknown.
    """
    entries = [
        {
            "name": folder.name,
            "folder": str(folder),
            "state": _state(folder),
            "unix_s": read_driver_record(folder).get("unix_s") or (folder / CONFIG).stat().st_mtime,
        }
        for folder in Path(make_absolute(RUNS_FOLDER)).glob("*")
        if _is_run(folder)
    ]
    return sorted(entries, key=lambda run: run["unix_s"], reverse=True)


def news(run: str, since: dict[str, int]) -> dict[str, Any]:
    """Return the data that a run has written since an earlier call.

    Args:
        run: Name or folder of the run.
        since: File name (one of GROWING_FILES) → number of bytes already read; default for a file: 0.

    Returns:
        Mapping with "lines": file → its new complete lines, up to MAX_ANSWER_BYTES; "since": argument of the next
            call; "folder": run folder; "state": running, finished, stopped, failed or interrupted; "error": parts of
            the error of a failed run, else None; "result": content of result.json, or {} if there is none.

    Raises:
        RunError: There is no such run, or a file cannot be read.
    """
    folder = run_folder(run)
    # The state is read first, so that the last lines of an ended run are read.
    state, note = _state(folder), read_driver_record(folder)
    lines = {name: _new_lines(folder / name, since.get(name, 0)) for name in GROWING_FILES}
    return {
        "lines": {name: data.decode(errors="replace") for name, data in lines.items()},
        "since": {name: since.get(name, 0) + len(data) for name, data in lines.items()},
        "folder": str(folder),
        "state": state,
        "error": note.get("error"),
        "result": find_document(str(folder / RESULT), dict[str, Any], MAX_ANSWER_BYTES) or {},
    }


def file(run: str, name: str) -> bytes:
    """Return the content of a file in a run folder, given the file's name (one of FILES).

    Raises:
        RunError: There is no such run, the name is not one of FILES, or the file is missing, a link, unreadable or
            too large.
    """
    if name not in FILES:
        raise RunError(f"'{name}' is not a readable file of a run", expected=f"one of {', '.join(FILES)}")
    return _read_run_file(run_folder(run) / name)


def pictures(run: str) -> dict[str, bytes]:
    """Return name → PNG bytes of each picture of a run's report; {} without a report.

    If there is a report without PNG files, they are first drawn into the run folder.

    Raises:
        RunError: There is no such run, or one of its files or pictures cannot be read.
        OSError: A picture cannot be written.
    """
    folder = run_folder(run)
    if not any((folder / PICTURES).glob("*.png")) and (folder / "report.html").is_file():
        from raytrec.report.report import pictures as draw

        draw(folder)
    return {path.stem: _read_run_file(path) for path in sorted((folder / PICTURES).glob("*.png"))}


def stop(run: str) -> None:
    """Ask a run to save a checkpoint and end, without waiting for its end.

    Raises:
        RunError: There is no such run, or it is not running.
    """
    folder = run_folder(run)
    note = read_driver_record(folder)
    if _state(folder) != "running":
        raise RunError(f"the run is not running: its state is {_state(folder)}", where=str(folder))
    if is_alive(note):
        return ask_to_stop(note)
    import ray

    with ray_session():
        ray.get(ray.remote(ask_to_stop).options(**pin_to_node(_hosts()[note["host"]])).remote(note), timeout=60)


def tables(run: str) -> dict[str, list[int]]:
    """Return the shapes of the embedding tables in the newest checkpoint: name → [rows, dim].

    Raises:
        RunError: There is no such run or no checkpoint.
    """
    _, index = find(run_folder(run))
    return {name: index["tensors"][f"tables/{name}/weight"]["shape"] for name in list_table_names(index)}


def rows(run: str, table: str, numbers: list[int]) -> np.ndarray:
    """Return rows of a table in the newest checkpoint: float32 [len(numbers), dim].

    Raises:
        RunError: There is no such run, checkpoint, table or row.
        CheckpointError: The table is damaged or cannot be read.
    """
    folder, index = find(run_folder(run))
    with StoredTable(folder, index, table) as stored:
        return stored.take(numbers)


def run_folder(run: str) -> Path:
    """Return the folder of a run, given its name or path.

    Raises:
        RunError: There is no such run.
    """
    folder = Path(make_absolute(run if "/" in run else f"{RUNS_FOLDER}/{run}"))
    if run in ("", ".", "..") or not _is_run(folder):
        names = [each["name"] for each in runs()]
        raise RunError(
            f"there is no run '{run}'{format_suggestion(run, names)}",
            where=str(folder) if "/" in run else make_absolute(RUNS_FOLDER),
            expected=f"a run, such as {', '.join(names[:10])}" if names else "the name of a run; no runs exist yet",
        )
    return folder


def _is_run(folder: Path) -> bool:
    """Return True if the folder contains the config.yaml of a run."""
    try:
        values = parse_yaml(read_bytes(folder / CONFIG, MAX_YAML_BYTES))
        return Path(values["run"]["name"]).name == values["run"]["name"] and "train" in values["data"]
    except (OSError, UnreadableError, ValueError, TypeError, KeyError):
        return False


def _state(folder: Path) -> str:
    """Return the state of a run: running, finished, stopped, failed, or interrupted (the driver was killed)."""
    note = read_driver_record(folder)
    if note.get("status") == "RUNNING":
        alive = is_alive(note)
        if alive or (alive is None and note.get("host") in _hosts()):
            return "running"
    if (folder / RESULT).is_file():
        return "finished"
    return STATES.get(note.get("status"), "interrupted")


def _hosts() -> dict[str, str]:
    """Return host name → node id of all alive nodes; {this host: ""} if this process is not connected to Ray."""
    import sys

    if (ray := sys.modules.get("ray")) is None or not ray.is_initialized():
        return {socket.gethostname(): ""}
    return {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}


def _new_lines(path: Path, since: int) -> bytes:
    """Return the complete lines of a file from byte offset `since` on, up to MAX_ANSWER_BYTES; b"" if it is missing."""
    missing = suppress(FileNotFoundError, NotADirectoryError)
    with convert_os_errors(f"cannot read {path.name}", where=str(path.parent)), missing, open_regular(path) as file:
        file.seek(since)
        data = file.read(MAX_ANSWER_BYTES)
        return data[: data.rfind(b"\n") + 1]
    return b""


def _read_run_file(path: Path) -> bytes:
    if path.is_symlink():
        raise RunError(f"{path.name} is a symbolic link, which is not followed", where=str(path))
    with convert_os_errors(f"cannot read {path.name}", where=str(path)):
        try:
            return read_bytes(path, MAX_ANSWER_BYTES)
        except FileNotFoundError:
            raise RunError(f"the run has not written {path.name}", where=str(path.parent)) from None


class Driver:
    """Actor that drives a run on the cluster for a Ray client.

    Its methods run in its main thread, where signal handlers can be installed. They return plain values and raise
    RaytrecErrors, because a client may have neither torch nor torchrec.
    """

    def begin(self, name: str, text: str) -> str:
        """Find an interrupted run to resume, or prepare a new run, and return the run folder.

        Args:
            name: Name of the config file, from which a new run gets its name.
            text: Content of the config file in YAML, which is written to a new temporary folder.
        """
        from raytrec.driver.prepare import resolve_config

        path = Path(mkdtemp(prefix="raytrec-")) / name
        path.write_text(text, encoding="utf-8")
        self._config: RunConfig = _call_raising_raytrec_errors(resolve_config, path, [], resume_latest=True)[0]
        return self._config.run.dir

    def train(self) -> dict[str, Any] | None:
        """Train the run that `begin` has prepared, and return its metrics; None if a signal stopped the run."""
        import raytrec

        try:
            return _call_raising_raytrec_errors(raytrec.train, self._config, resume_latest=True).metrics
        except STOP_EXCEPTIONS:  # Ray would treat the exception as a canceled call
            return None

    def command(self, name: str, run: str, places: dict[str, str], options: dict[str, Any]) -> dict[str, Any]:
        """Call raytrec.evaluate, raytrec.predict or raytrec.index with a run, and return the metrics.

        Args:
            name: evaluate, predict or index.
            run: Name or folder of the run.
            places: Arguments that are paths, by name.
            options: Other arguments by name.
        """
        import raytrec

        call = {"evaluate": raytrec.evaluate, "predict": raytrec.predict, "index": raytrec.index}[name]
        return _call_raising_raytrec_errors(call, run_folder(run), **places, **options).metrics


def _call_raising_raytrec_errors(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function, and return its result; convert errors to RaytrecErrors, which every client can unpickle."""
    try:
        return call(*arguments, **options)
    except Exception as error:
        cause = get_root_cause(error)
        if isinstance(cause, RaytrecError):
            raise cause from None
        raise RunError(f"{type(cause).__name__}: {cause}") from None
