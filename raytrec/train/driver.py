"""A run on the driver's side: data looked at, Ray started, workers watched, the result written."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from time import perf_counter
from typing import Any

from raytrec.cluster import ray_session
from raytrec.config import RunConfig, load_config
from raytrec.data.fragments import Dataset, scan
from raytrec.errors import ConfigError, DataError, RaytrecError, RunError, root_cause
from raytrec.schema import Schema
from raytrec.storage import absolute
from raytrec.train.rank import Task

RESULT = "result.json"


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        metrics: the content of result.json: eval.auc, eval.ne, eval.logloss (nats), eval.calibration,
            eval.rows, train.rows, train.steps, train.samples_per_s, world_size, seconds, mlflow_run_id, name.
        path: the run folder (of an evaluation: the checkpoint).
        next_steps: lines that say where to look.
    """

    metrics: dict[str, Any]
    path: Path
    next_steps: list[str] = field(default_factory=list)


def train(source: str | Path | dict | RunConfig, overrides: list[str] | None = None) -> Result:
    """Trains, evaluates and saves a run.

    Args:
        source: a config file, its values, or a RunConfig.
        overrides: `section.key=value` strings.

    Returns:
        Result: figures of the final evaluation (data.test, else data.valid) and of training.

    Raises:
        ConfigError, SchemaError, DataError: what is wrong with the input, before or during training.
        RunError: when a worker failed for another reason; its traceback is in the run folder's error.txt.
    """
    from raytrec.tracking.mlflow import Tracker
    from raytrec.train import checkpoint
    from raytrec.train.console import RunConsole, relative

    began = perf_counter()
    config = _resolve(load_config(source, overrides), source)
    _import_early()
    folder = Path(config.run.dir)
    schema, datasets = _open_data(config)
    _make_folder(folder, config, schema)
    tracker = Tracker(
        config.tracking.uri, config.tracking.experiment, config.run.name, folder.parent / "mlartifacts"
    )
    status = "FAILED"
    with RunConsole(config.run.name) as console:
        try:
            console.phase("starting Ray")
            with ray_session(config.scaling.address, _local_cpus(config)):
                run_id = tracker.ready()
                tracker.params(config)
                tracker.file(folder / "config.yaml")
                tracker.file(folder / "schema.yaml")
                watch = Watch(console, tracker, folder)
                figures = _run_group(
                    "train_worker", config, schema, datasets, folder / checkpoint.FINAL, watch
                )
            checkpoint.describe(folder / checkpoint.FINAL, config, schema)
            metrics = {
                **figures,
                "world_size": config.scaling.workers,
                "seconds": round(perf_counter() - began, 3),
                "mlflow_run_id": run_id,
                "name": config.run.name,
            }
            _write_json(folder / RESULT, metrics)
            tracker.metrics({k: v for k, v in metrics.items() if k != "name"}, step=metrics["train.steps"])
            tracker.file(folder / RESULT)
            status = "FINISHED"
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            if lost := tracker.close(status):
                console.warn(lost)
    return Result(
        metrics,
        folder,
        [
            f"run folder   {relative(folder)}",
            f"look at it   mlflow ui --backend-store-uri {tracker.uri}",
            f"again        raytrec evaluate {relative(folder)} --data PARQUET",
        ],
    )


def evaluate(
    place: str | Path, data: str, *, workers: int | None = None, batch_size: int | None = None
) -> Result:
    """Evaluates a finished run, or a checkpoint, on a folder of Parquet.

    Args:
        place: run folder or checkpoint folder.
        data: folder or file of Parquet, local or s3:// or gs://.
        workers: number of workers; default: as the run was trained.
        batch_size: global batch size; default: as the run was trained.

    Returns:
        Result: eval.* figures, world_size and seconds.

    Raises:
        RunError: no checkpoint there. ConfigError, DataError: as in `train`.
    """
    from raytrec.train import checkpoint
    from raytrec.train.console import RunConsole

    began = perf_counter()
    folder = checkpoint.find(place)
    changes = [f"scaling.workers={workers}"] if workers else []
    changes += [f"data.global_batch_size={batch_size}"] if batch_size else []
    config = load_config(folder / "config.yaml", changes)
    schema = Schema.load(folder / "schema.yaml")
    datasets = {"test": scan(absolute(data), schema, "--data")}
    with RunConsole(config.run.name) as console, ray_session(config.scaling.address, _local_cpus(config)):
        watch = Watch(console, None, None)
        figures = _run_group("evaluate_worker", config, schema, datasets, folder, watch)
    metrics = {
        **figures,
        "world_size": config.scaling.workers,
        "seconds": round(perf_counter() - began, 3),
        "name": f"{config.run.name} on {data}",
    }
    return Result(metrics, folder)


def _import_early() -> None:
    """Imports Ray, and in a thread, while Ray starts, what takes 2 s and is needed only then."""
    import ray  # noqa: F401

    Thread(target=import_module, args=("ray.train.torch",), daemon=True).start()


def _resolve(config: RunConfig, source: object) -> RunConfig:
    """Names, folders and stores filled in; every path absolute, because workers run elsewhere."""
    config = config.model_copy(deep=True)
    run, data, tracking = config.run, config.data, config.tracking
    stem = Path(source).stem if isinstance(source, (str, Path)) else "run"
    run.name = run.name or f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    run.dir = run.dir or f"runs/{run.name}"
    if "://" in run.dir:
        raise ConfigError(
            f"run.dir is {run.dir}",
            where="run.dir",
            expected="a folder on a file system that all nodes share",
            do="use a local or mounted folder; object stores are not supported as run folders",
        )
    run.dir = absolute(run.dir)
    for key in ("train", "valid", "test", "schema_path"):
        if value := getattr(data, key):
            setattr(data, key, absolute(value))
    tracking.uri = tracking.uri or f"sqlite:///{Path(run.dir).parent}/mlflow.db"
    return config


def _open_data(config: RunConfig) -> tuple[Schema, dict[str, Dataset]]:
    schema = Schema.load(config.data.schema_uri)
    datasets = {
        name: scan(uri, schema, f"data.{name}")
        for name in ("train", "valid", "test")
        if (uri := getattr(config.data, name))
    }
    rows = datasets["train"].rows
    if rows < config.data.global_batch_size:
        raise DataError(
            f"data.train has {rows:,} rows, fewer than one global batch",
            where=f"{config.data.train}, data.global_batch_size={config.data.global_batch_size}",
            expected=f"at least {config.data.global_batch_size:,} rows",
            do=f"lower data.global_batch_size to {rows} or less",
        )
    return schema, datasets


def _make_folder(folder: Path, config: RunConfig, schema: Schema) -> None:
    from raytrec.train import checkpoint

    if (folder / RESULT).exists():
        raise RunError(
            "this run folder holds a finished run",
            where=str(folder),
            expected="a new folder",
            do="choose another run.dir or run.name, or remove the folder",
        )
    try:
        checkpoint.describe(folder, config, schema)
    except OSError as error:
        raise RunError(f"cannot write the run folder: {error.strerror}", where=str(folder)) from None


def _local_cpus(config: RunConfig) -> int:
    """Logical CPUs of a local cluster: the workers', and one for each reader, which must not wait."""
    scaling = config.scaling
    return scaling.workers * scaling.cpus_per_worker + scaling.workers * config.data.readers + 1


def _device(config: RunConfig) -> str:
    """cpu or cuda, after a look at what the cluster has.

    Raises:
        ConfigError: fewer GPUs or CPUs than the workers and their readers need; Ray would wait for ever.
    """
    import ray

    have, scaling = ray.cluster_resources(), config.scaling
    gpus, cpus = int(have.get("GPU", 0)), int(have.get("CPU", 0))
    device = scaling.device if scaling.device != "auto" else ("cuda" if gpus else "cpu")
    if device == "cuda" and gpus < scaling.workers:
        raise ConfigError(
            f"the cluster has {gpus} GPUs for {scaling.workers} workers",
            where="scaling.workers, scaling.device",
            expected="one GPU for each worker",
            do="lower scaling.workers, or set scaling.device=cpu",
        )
    needed = scaling.workers * scaling.cpus_per_worker + 1
    if cpus < needed:
        raise ConfigError(
            f"the cluster has {cpus} CPUs for {scaling.workers} workers and their readers",
            where="scaling.workers, scaling.cpus_per_worker",
            expected=f"at least {needed}: {scaling.cpus_per_worker} for each worker, and one to read data",
            do="lower scaling.workers, or join a larger cluster",
        )
    return device


def _run_group(
    worker: str, config: RunConfig, schema: Schema, datasets: dict[str, Dataset], folder: Path, watch: Watch
) -> dict[str, Any]:
    """Runs a function of `train.worker` on a Ray Train worker group; the figures that rank 0 reports."""
    device = _device(config)
    watch.console.phase("starting the workers")
    os.environ.setdefault(
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5"
    )  # how soon the end, or an error, is seen
    import ray.train
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue

    from raytrec.train import worker as workers
    from raytrec.train.loopback import LoopbackTorchConfig

    mailbox = Queue(actor_options={"num_cpus": 0})
    task = Task(config, schema, datasets, mailbox, folder)
    local = all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())
    if local:  # nobody takes this machine away, and the watcher is one more process to start
        os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    trainer = TorchTrainer(
        getattr(workers, worker),
        train_loop_config=task,
        torch_config=(LoopbackTorchConfig if local else TorchConfig)(
            backend="nccl" if device == "cuda" else "gloo", timeout_s=config.scaling.timeout_s
        ),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.scaling.workers,
            use_gpu=device == "cuda",
            resources_per_worker={"CPU": config.scaling.cpus_per_worker}
            | ({"GPU": 1} if device == "cuda" else {}),
        ),
        run_config=ray.train.RunConfig(name="ray", storage_path=config.run.dir),
    )
    with watch.reading(mailbox):
        try:
            trainer.fit()
        except Exception as error:
            raise _explain(error, config) from None
    if watch.result is None:
        raise RunError("the workers ended without a result", where=config.run.dir)
    return watch.result


def _explain(error: Exception, config: RunConfig) -> RaytrecError:
    """The error for people behind what Ray raised; the whole story goes to error.txt in the run folder."""
    cause = root_cause(error)
    story = Path(config.run.dir) / "error.txt"
    story.write_text("".join(traceback.format_exception(error)))
    if isinstance(cause, RaytrecError):
        return cause
    last = [line for line in str(cause).splitlines() if line.strip()]
    return RunError(
        f"training failed: {last[-1] if last else type(cause).__name__}",
        where=f"the traceback is in {story}",
    )


class Watch:
    """Reads what rank 0 says, while Ray Train runs, and passes it to the terminal and to MLflow."""

    def __init__(self, console: Any, tracker: Any | None, folder: Path | None):
        self.console, self.result = console, None
        self._tracker, self._folder = tracker, folder

    def reading(self, mailbox: Any) -> _Reading:
        """A block in which a thread reads the mailbox; at its end nothing is left in it."""
        return _Reading(mailbox, self._receive)

    def _receive(self, kind: str, **message: Any) -> None:
        if kind == "result":
            self.result = message["figures"]
            return
        getattr(self.console, kind)(**message)
        if self._tracker is None:
            return
        if kind == "start":
            _write_json(self._folder / "plan.json", message["plan"])
            self._tracker.file(self._folder / "plan.json")
        elif kind in ("train", "eval"):
            step = message.pop("step")
            self._tracker.metrics({f"{kind}.{name}": value for name, value in message.items()}, step)


class _Reading:
    def __init__(self, mailbox: Any, receive: Callable):
        self._mailbox, self._receive, self._over = mailbox, receive, Event()
        self._thread = Thread(target=self._read, name="mailbox", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._mailbox.shutdown()

    def _read(self) -> None:
        from ray.util.queue import Empty

        while True:
            try:
                self._receive(**self._mailbox.get(timeout=0.5))
            except Empty:
                if self._over.is_set():
                    return


def _write_json(path: Path, values: Any) -> None:
    """Written whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(path)
