"""Driver of a training run, for `raytrec train`."""

from __future__ import annotations

import shlex
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from threading import Thread
from time import perf_counter
from typing import Any

from raytrec.checkpoint.files import find_newest_checkpoint, get_step_folder
from raytrec.cluster.session import describe_connection
from raytrec.common.errors import ConfigError, DataError, RaytrecError, RunError
from raytrec.common.messages import METRICS
from raytrec.common.redaction import hide, hide_all
from raytrec.common.storage import make_relative, quote_for_shell
from raytrec.config.overrides import Overrides, to_override_texts
from raytrec.config.run_config import RunConfig
from raytrec.config.trust import find_foreign_code, list_user_code
from raytrec.data.files.file_identity import FileIdentity, fingerprint, identify_datasets
from raytrec.driver.console import Result, RunConsole
from raytrec.driver.datasets import record_skipped_files, show_file_counts
from raytrec.driver.delta_exports import DeltaExports
from raytrec.driver.driver_state import hold_run_lock, record_driver
from raytrec.driver.launch import resume_command, run_group, run_in_session
from raytrec.driver.preflight import check_plan
from raytrec.driver.prepare import RunPlan, make_run_folder, open_run, resolve_config, write_config
from raytrec.driver.recorder import Record, Watch, write_json
from raytrec.driver.resume import check_same_data, check_unfinished, record_data
from raytrec.driver.track import DeliveryProcess
from raytrec.report.findings import find_bound, find_poor_fit
from raytrec.report.report import BackgroundRenderer
from raytrec.tracking.mlflow_records import collect_run_tags
from raytrec.tracking.run_folder import TAGS, RunFolder
from raytrec.worker.context import WorkerTask
from raytrec.worker.loop import count_total_steps, train_worker

PREVIOUS_DRIVER_TIMEOUT_S = 60.0  # wait for the end of an earlier driver, in addition to scaling.shutdown_grace_s


class Unfinished(RunError):
    """Error raised after training if the model or result cannot be written, or the MLflow store cannot be opened.

    In the first case, the run can be resumed. In the second case, the run is complete in its run folder.

    Attributes:
        result: Metrics of the trained run; None until `train` sets the attribute.
    """

    result: Result | None = None


def train(
    source: str | Path | dict | RunConfig | None,
    overrides: Overrides | None = None,
    start_from: str | Path | None = None,
    resume: str | Path | None = None,
    resume_latest: bool = False,
    allow_code: bool = False,
) -> Result:
    """Train, evaluate and save a run.

    Args:
        source: Config file, its values, or a RunConfig; None: the configuration of `start_from` or `resume`.
        overrides: `section.key=value` strings, or a mapping such as {"train.epochs": 3}.
        start_from: Run or checkpoint folder that provides the initial weights (warm_start.from).
        resume: Folder of an interrupted run to resume.
        resume_latest: True to resume the newest interrupted run of the same config and data, if any; needs `source`.
        allow_code: True if a config from a URI, `start_from` or another user's run may name code
            (raytrec/config/trust.py).

    Returns:
        Result: Metrics of the final evaluation (on data.test, else data.valid) and of training.

    Raises:
        ConfigError, SchemaError, DataError: The input is invalid; raised before or during training.
        RunError: The run folder cannot be used, `start_from` contains no checkpoint, the run to resume has finished or
            does not exist, Ray cannot be started or joined, or workers failed more often than scaling.max_failures
            or in a way that would recur (traceback in error.txt).
        CheckpointError: A checkpoint is damaged, or cannot be read or written.
        Interrupted: Ctrl-C or SIGTERM ended the run, which can be resumed.
        Unfinished: The trained model or the result could not be written, or the MLflow store could not be opened.

    Example:
        >>> result = raytrec.train("films.yaml", ["train.epochs=3", "run.dir=runs/films"])
        >>> result.metrics["train.rows"], result.metrics["eval.rows"]
        (1440, 160)
    """
    began = perf_counter()
    texts = to_override_texts(overrides)
    plan = open_run(*resolve_config(source, texts, start_from, resume, resume_latest, allow_code))
    config, schema, datasets = plan.config, plan.schema, plan.datasets
    warnings, folder = check_plan(plan), Path(config.run.dir)
    patience = PREVIOUS_DRIVER_TIMEOUT_S + config.scaling.shutdown_grace_s if resume_latest else 0
    contents = ThreadPoolExecutor(1, "contents").submit(identify_datasets, datasets)
    with RunConsole(config.run.name) as console, hold_run_lock(folder, patience, console.phase):
        if plan.start == "resumed":
            check_unfinished(folder)
            warnings += check_same_data(folder, config.checkpoint_root, schema, datasets, contents.result())
            write_config(folder, config)
        else:
            make_run_folder(folder, config, schema)
        console.folder(str(folder))
        show_file_counts(console, datasets)
        for line in [*warnings, *record_skipped_files(folder, datasets)]:
            console.warn(line)
        with record_driver(folder) as before_s:
            return _drive(plan, contents, console, began - before_s)


def _drive(plan: RunPlan, contents: Future[dict[str, list[FileIdentity]]], console: RunConsole, began: float) -> Result:
    """Start Ray, train a run whose folder exists, write its result, and return it.

    Args:
        plan: Run to train.
        contents: Future of dataset → identities (sizes and hashes) of its files.
        console: Console that shows the run.
        began: Start of the run (perf_counter, in seconds), minus the duration of earlier drivers of the run.
    """
    config, datasets = plan.config, plan.datasets
    folder, status, page = Path(config.run.dir), "FAILED", None
    exports = DeltaExports(config, console.warn)
    follower = DeliveryProcess(config, console.warn)
    record, renderer = Record(folder, console.warn), BackgroundRenderer(folder)
    ended = renderer.begin if config.tracking.report else lambda: None
    watch = Watch(console, record, ended, exports.add)

    def poll() -> None:
        follower.check()
        exports.poll()

    try:
        console.phase(describe_connection(config.scaling.address))
        _preload_imports()

        def work() -> dict[str, Any]:
            write_json(folder / TAGS, hide_all(collect_run_tags() | config.tracking.tags))
            data = contents.result()
            record_data(folder, datasets, data)
            rows = fingerprint(data["train"])
            task = WorkerTask(config, plan.schema, datasets, None, config.checkpoint_root, rows)
            return run_group(train_worker, task, watch, saves=True, on_poll=poll)

        figures = run_in_session(config, watch.failed, work)
        exports.finish(console.phase)
        renderer.confirm()
        store_error = _find_store_error(follower, folder)
        metrics = {
            **figures,
            "skipped_files": sum(len(dataset.left_out) for dataset in datasets.values()),
            "seconds": round(perf_counter() - began, 3),
            "train.checks_passed": record.checks[True],
            "train.checks_failed": record.checks[False],
            "mlflow_run_id": follower.run_id,
            "name": config.run.name,
        }
        metrics |= find_bound(record.times, metrics["seconds"], metrics["train.samples_per_s"])
        for line in find_poor_fit(RunFolder.read(folder)):
            console.warn(line)
        if code := list_user_code(config.model_dump(by_alias=True)):
            metrics["code"] = code
        missing = record.result(metrics, watch.unsaved)
        status = "FAILED" if missing else "FINISHED"
        if problem := missing or store_error:
            error = Unfinished(**problem.parts)
            error.result = Result(metrics, folder, [f"run folder   {make_relative(folder)}"])
            raise error
    except Unfinished:  # the message is complete
        raise
    except RaytrecError as error:
        steps = watch.ended_early_at or count_total_steps(config, datasets["train"].rows)
        raise add_recovery_hint(error, config, steps) from None
    except KeyboardInterrupt:
        status = "KILLED"
        console.note(f"to resume: {resume_command(config)}")
        raise
    finally:
        exports.close()
        if config.tracking.report and status != "KILLED" and (folder / METRICS).exists():
            console.phase("writing the report")
            page = _write_report(renderer, console)
        record.close()
        if lost := follower.close(status):
            console.warn(lost)
    return Result(metrics, folder, _list_next_steps(config, metrics.get("code"), page))


def add_recovery_hint(error: RaytrecError, config: RunConfig, steps: int) -> RaytrecError:
    """Return the error that ended a run, with advice to evaluate or complete the run if all steps are saved.

    Args:
        error: Error that ended the run.
        config: Configuration of the run.
        steps: Number of steps of the whole run.
    """
    try:
        folder, _ = find_newest_checkpoint(config.checkpoint_root)
    except OSError:
        return error
    if not folder or folder != get_step_folder(config.checkpoint_root, steps):
        return error
    run = make_relative(Path(config.run.dir))
    words = ["raytrec", "evaluate", run]
    words += [] if config.data.test or config.data.valid else ["--data", "PARQUET"]
    words += ["--set", "data.on_error=skip"] if isinstance(error, DataError) else []
    words += ["--allow-code"] if find_foreign_code(config.model_dump(by_alias=True)) else []
    advice = f"{error.do}; " if error.do else ""
    advice += f"the trained model is saved in {folder}: evaluate it with `{shlex.join(words)}`; "
    advice += f"or fix the error and complete the run: {resume_command(config)}"
    return type(error)(error.what, where=error.where, expected=error.expected, do=advice)


def _find_store_error(follower: DeliveryProcess, folder: Path) -> RaytrecError | None:
    """Return an error if the MLflow store of a trained run cannot be opened, else None.

    The error is returned instead of raised, so that the result of the run is still written.
    """
    try:
        follower.ready()
    except ConfigError as error:
        run = make_relative(folder)
        advice = error.do or "correct tracking.uri"
        do = f"the run is complete: {advice} (settings: {run}/config.yaml); then raytrec track {quote_for_shell(run)}"
        return RunError(**error.parts | {"do": do})
    return None


def _list_next_steps(config: RunConfig, code: list[str] | None, page: Path | None) -> list[str]:
    """Return lines that name the files of a finished run and the commands that inspect the run."""
    folder = make_relative(Path(config.run.dir))
    lines = [f"run folder   {folder}"]
    if code:
        lines.append(f"your code    {', '.join(code)}")
    if page:
        lines.append(f"pictures     {make_relative(page)}")
    if config.tracking.enabled:
        lines.append(describe_store(config.tracking.uri))
    return [*lines, f"evaluate     raytrec evaluate {quote_for_shell(folder)} --data PARQUET"]


def _write_report(renderer: BackgroundRenderer, console: RunConsole) -> Path | None:
    """Write the report and its pictures into the run folder, and return the path of the report.

    If writing fails, show a warning and return None: a missing report does not fail the run. If the user
    interrupts, show the command that writes the report, and raise the interrupt again.
    """
    try:
        return renderer.write()[0]
    except KeyboardInterrupt:
        console.note(f"the report is incomplete; write it with: raytrec report {quote_for_shell(renderer.folder)}")
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        console.warn(f"cannot write the report: {why}; retry with raytrec report {quote_for_shell(renderer.folder)}")
        return None


def describe_store(uri: str) -> str:
    """Return a line with the address of an MLflow server, or with the command that shows another store."""
    command = "" if uri.startswith("http") else "mlflow ui --backend-store-uri "
    return f"MLflow       {command}{hide(shorten_store_uri(uri))}"


def shorten_store_uri(uri: str) -> str:
    """Return the URI of a SQLite store in the current folder with a relative path; other URIs are unchanged."""
    return uri.replace(f"sqlite:///{Path.cwd()}/", "sqlite:///")


def _preload_imports() -> None:
    """Import Ray, and import raytrec.driver.policies in a thread while Ray starts.

    The import of raytrec.driver.policies takes a second, and the module is needed only after the start.
    """
    import ray  # noqa: F401

    Thread(target=import_module, args=("raytrec.driver.policies",), daemon=True).start()
