"""What a group says, read on the driver's side while Ray Train runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from threading import Event, Thread
from time import time
from typing import Any

EVENTS = "events.jsonl"


class Watch:
    """Reads what rank 0 says, while Ray Train runs, and passes it to the terminal and to MLflow."""

    def __init__(self, console: Any, tracker: Any | None, folder: Path | None):
        self.console, self.result, self.stopped_at = console, None, None
        self._tracker, self._folder = tracker, folder

    def reading(self, hub: Any) -> _Reading:
        """A block in which a thread reads the hub's messages; at its end nothing is left there."""
        return _Reading(hub, self._receive)

    def _receive(self, kind: str, **message: Any) -> None:
        if kind == "result":
            # JSON has no NaN: a figure that is not defined (NE and AUC of labels that are all equal) is null.
            undefined = {k for k, v in message["figures"].items() if isinstance(v, float) and not isfinite(v)}
            self.result = {k: None if k in undefined else v for k, v in message["figures"].items()}
            return
        if kind == "stopped":
            self.stopped_at = message["step"]
        if kind in ("event", "saved", "start", "stopped") and self._folder:
            self._note(kind, message)
        getattr(self.console, kind)(**message)
        if self._tracker is None:
            return
        if kind == "start":
            write_json(self._folder / "plan.json", message["plan"])
            self._tracker.file(self._folder / "plan.json")
        elif kind in ("train", "eval"):
            step = message.pop("step")
            self._tracker.metrics({f"{kind}.{name}": value for name, value in message.items()}, step)

    def _note(self, kind: str, message: dict[str, Any]) -> None:
        """Keeps what happened to the run, a line each, in events.jsonl."""
        entry = {"event": kind, "unix_s": time(), **message}
        entry.pop("plan", None)
        with open(self._folder / EVENTS, "a") as file:
            file.write(json.dumps(entry) + "\n")


class _Reading:
    def __init__(self, hub: Any, receive: Callable):
        self._hub, self._receive, self._over = hub, receive, Event()
        self._thread = Thread(target=self._read, name="hub", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        import ray

        ray.kill(self._hub)

    def _read(self) -> None:
        import ray

        while True:
            last = self._over.is_set()
            for message in ray.get(self._hub.get.remote(0 if last else 0.5)):
                self._receive(**message)
            if last:
                return


def write_json(path: Path, values: Any) -> None:
    """Written whole or not at all."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Written whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)
