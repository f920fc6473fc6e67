"""A Ray Train worker group on the driver's side: what it needs, what it says, how its errors look."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from threading import Event, Thread, current_thread, main_thread
from typing import Any

from raytrec.config import RunConfig
from raytrec.data.fragments import Dataset
from raytrec.embeddings.hosts import GIB, host_memory
from raytrec.embeddings.pins import check_pins
from raytrec.errors import ConfigError, RaytrecError, RunError, root_cause
from raytrec.schema import Schema
from raytrec.train.rank import Task


def local_cpus(config: RunConfig) -> int:
    """Logical CPUs of a local cluster: the workers', and one for each reader, which must not wait."""
    scaling = config.scaling
    return scaling.workers * (scaling.cpus_per_worker + config.data.readers)


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


def _shape(config: RunConfig, device: str, local: bool) -> dict[str, int | None]:
    """What is known of hosts and of memory for tables before workers have their places."""
    import ray

    plan, workers = config.plan, config.scaling.workers
    memory = int(plan.memory_gib * GIB) if plan.memory_gib else None
    if memory is None and device == "cuda" and (plan.together or plan.tables):
        memory = ray.get(ray.remote(num_gpus=1, num_cpus=0)(_gpu_memory).remote(), timeout=60)
    elif memory is None and device == "cpu" and local:
        memory = host_memory() // workers
    hosts = plan.ranks_per_host or (workers if local else None)
    return {"world": workers, "ranks_per_host": hosts, "memory": memory}


def _gpu_memory() -> int:
    import torch

    return torch.cuda.get_device_properties(0).total_memory


def run_group(
    worker: str, config: RunConfig, schema: Schema, datasets: dict[str, Dataset], folder: Path, watch: Watch
) -> dict[str, Any]:
    """Runs a function of `train.worker` on a Ray Train worker group; the figures that rank 0 reports."""
    import ray

    device = _device(config)
    local = all(node["NodeManagerAddress"] == "127.0.0.1" for node in ray.nodes())
    check_pins(config, schema, device, **_shape(config, device, local))
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
    with watch.reading(mailbox), _interruptible():
        try:
            trainer.fit()
        except Exception as error:
            raise _explain(error, config) from None
    if watch.result is None:
        raise RunError("the workers ended without a result", where=config.run.dir)
    return watch.result


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C is a KeyboardInterrupt again, and the handler of before comes back.

    Ray Train 2.60 installs a handler of its own that ends the workers and then the process, without a word.
    """
    in_main = current_thread() is main_thread()
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)


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
            # JSON has no NaN: a figure that is not defined (NE and AUC of labels that are all equal) is null.
            undefined = {k for k, v in message["figures"].items() if isinstance(v, float) and not isfinite(v)}
            self.result = {k: None if k in undefined else v for k, v in message["figures"].items()}
            return
        getattr(self.console, kind)(**message)
        if self._tracker is None:
            return
        if kind == "start":
            write_json(self._folder / "plan.json", message["plan"])
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


def write_json(path: Path, values: Any) -> None:
    """Written whole or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n")
    partial.replace(path)
