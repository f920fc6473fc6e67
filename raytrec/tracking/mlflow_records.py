"""Convert undelivered lines of a run folder to MLflow metrics, and collect the MLflow tags of a run.

Byte offsets of delivered lines are stored in mlflow.json in the run folder. The file is replaced after every write to
the store. If a driver dies between the two writes, the next driver sends the same records again. This is harmless: the
time of a metric is the time of its line, and MLflow's databases keep one metric per name, step, time and value.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from pydantic import NonNegativeInt

from raytrec.common.documents import find_document, to_json_document
from raytrec.common.machine import get_installed_versions
from raytrec.common.messages import CHECKS, METRICS, RANKS, Final, Measured, Message, Outcome, RankLine, Result
from raytrec.tracking.aggregate import FIGURES, RANK_SUM_KEYS, combine_shards, sum_table_bytes
from raytrec.tracking.history import StepBuffer
from raytrec.tracking.journal import write_atomically
from raytrec.tracking.run_folder import Line, decode, read_lines

DELIVERY_STATE_FILE, FILES = "mlflow.json", (METRICS, CHECKS, RANKS)
# MLflow 3.17 shows metrics with the prefix system/ on its page "System metrics". Names and units are those of
# MLflow's monitor (mlflow/system_metrics) if it has the metric.
MLFLOW_NAMES = {
    "cpu_percent": ("cpu_utilization_percentage", 1),
    "rss_bytes": ("process_memory_usage_megabytes", 1e-6),
    "host_memory_percent": ("system_memory_usage_percentage", 1),
    "network_sent_bytes_per_s": ("network_transmit_megabytes_per_s", 1e-6),
    "network_received_bytes_per_s": ("network_receive_megabytes_per_s", 1e-6),
    "gpu_percent": ("gpu_utilization_percentage", 1),
    "gpu_memory_bytes": ("gpu_memory_usage_megabytes", 1e-6),
}
SECTIONS = {"train": "train/", "eval": "eval/", "compared": ""}  # kind of message → prefix of metric names
INVALID_NAME_CHARACTERS = re.compile(r"[^\w\-. :/]", re.ASCII)  # characters that MLflow does not allow in names
MAX_NAME_LENGTH = 250
# Limits on the metrics of one step, because a store accepts about 1,000 per call. The run folder contains all metrics.
MAX_TABLES = 200  # maximum number of tables whose metrics are delivered, the largest first
MAX_RANK_TABLES = 64  # maximum of ranks × tables up to which table metrics of each rank are delivered
MAX_METRICS_PER_CALL = 1000  # maximum number of metrics in one call to MLflow
ACCELERATOR_PREFIX = "accelerator_type:"  # prefix of the Ray resource that names a node's GPU type


class Record(NamedTuple):
    """Metrics (MLflow name → finite value) of one step, and their time in milliseconds since 1970."""

    figures: dict[str, float]
    step: int
    unix_ms: int


def _to_record(message: Message | None) -> Record | None:
    """Return the metrics of a message other than a rank line; None for messages without metrics in MLflow."""
    if isinstance(message, Outcome):
        place = f"watch/check/{message.check}"
        named = {place: int(message.passed), f"{place}_figure": message.figure}
    elif not isinstance(message, Measured) or isinstance(message, Final):  # Final is part of the result
        return None
    elif isinstance(message, Result):  # result names begin with their section
        named = {name.replace(".", "/", 1): value for name, value in message.figures.items()}
    else:
        section = SECTIONS[message.KIND]
        named = {section + name: value for name, value in message.figures.items()}
    return _make_record(named, message.step, message.unix_s)


def _make_record(figures: Mapping[str, Any], step: int, unix_s: float) -> Record:
    """Return a record with valid MLflow names.

    Invalid characters become "_", names are cut to MAX_NAME_LENGTH, and values that are not finite numbers are omitted.
    """
    valid = {
        INVALID_NAME_CHARACTERS.sub("_", name)[:MAX_NAME_LENGTH]: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and isfinite(value)
    }
    return Record(valid, step, round(unix_s * 1000))


def to_rank_metrics(lines: list[RankLine]) -> dict[str, float | None]:
    """Return the MLflow metrics, name → value, for the lines of all recorded ranks at one step.

    Returns:
        watch/rank/R/…: RANK_SUM_KEYS, and milliseconds per step in total and for each phase; watch/table/NAME/…:
        statistics of a table over these ranks (aggregate.combine_shards), for the MAX_TABLES largest tables in
        bytes; watch/rank/R/table/NAME/…: statistics of a rank's shards, if ranks × tables is at most
        MAX_RANK_TABLES; system/rank_R/…: see `system_metrics`. Undefined values are None or NaN.
    """
    out: dict[str, float | None] = {}
    table_bytes: dict[str, float] = {}
    for line in lines:
        place, steps = f"watch/rank/{line.rank}", max(1, line.steps)
        out |= {f"{place}/{phase}_ms": 1e3 * seconds / steps for phase, seconds in line.phases_s.items()}
        out |= {f"{place}/step_ms": 1e3 * line.seconds / steps}
        out |= {f"{place}/{key}": line.added(key) for key in RANK_SUM_KEYS}
        out |= system_metrics(line.rank, line.system)
        for name, entry in line.tables.items():
            table_bytes[name] = table_bytes.get(name, 0.0) + sum_table_bytes(entry)
    if len(lines) * len(table_bytes) <= MAX_RANK_TABLES:
        for line in lines:
            for name, figures in line.tables.items():
                place = f"watch/rank/{line.rank}/table/{name}"
                out |= {f"{place}/{key}": figures.get(key) for key in FIGURES}
    for name in sorted(table_bytes, key=lambda name: (-table_bytes[name], name))[:MAX_TABLES]:
        figures = combine_shards(lines, name)
        out |= {f"watch/table/{name}/{key}": figures[key] for key in FIGURES}
    return out


def system_metrics(rank: int, sample: Mapping[str, float | None]) -> dict[str, float]:
    """Convert the MLFLOW_NAMES in a sample of `SystemMonitor` to metrics system/rank_R/NAME; omit None values.

    Example:
        >>> system_metrics(1, {"cpu_percent": 98.0, "gpu_percent": None})
        {'system/rank_1/cpu_utilization_percentage': 98.0}
    """
    return {
        f"system/rank_{rank}/{name}": sample[key] * factor
        for key, (name, factor) in MLFLOW_NAMES.items()
        if sample.get(key) is not None
    }


@dataclass
class DeliveryState:
    """State of a delivery, stored in the run folder: which lines have been written to the MLflow store.

    Attributes:
        key: Value of a tag, by which the MLflow run is found if the store created the run without responding.
        run_id: Id of the MLflow run; None until the run has been created.
        params: True if the parameters have been written.
        offsets: File → byte offset up to which lines have been delivered.
    """

    key: str = field(default_factory=lambda: uuid4().hex)
    run_id: str | None = None
    params: bool = False
    offsets: dict[str, NonNegativeInt] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> DeliveryState:
        """Read the state from a run folder; if it is missing or unreadable, return a new state with a random key."""
        return find_document(str(folder / DELIVERY_STATE_FILE), cls) or cls()

    def write(self, folder: Path) -> None:
        """Replace the state in a run folder; OSErrors are ignored, because the next write contains the full state."""
        with suppress(OSError):
            write_atomically(folder / DELIVERY_STATE_FILE, to_json_document(self))


class Batch(NamedTuple):
    """Records that are delivered together, and file → byte offset up to which its lines are then delivered.

    The list of records is empty if new lines contain no metrics.
    """

    records: list[Record]
    offsets: dict[str, int]


class RecordReader:
    """Reader of a run folder's lines in batches for MLflow.

    `next_batch` and `waiting` raise an OSError if a file is not a regular file, or cannot be read.

    Attributes:
        folder: Run folder.
        delivered: State of the delivery.
        dropped: Number of lines that were dropped because they are JSON but not messages of their file, or have no
            time; lines that are not JSON are skipped without being counted.
        why: Reason why the last dropped line was not valid; "" without dropped lines.
    """

    def __init__(self, folder: Path):
        self.folder, self.dropped, self.why = folder, 0, ""
        self.delivered = DeliveryState.read(folder)
        self._batch: Batch | None
        self._rewind()

    def use_run(self, run_id: str) -> None:
        """Set the MLflow run to which records are delivered, and store its id in the run folder.

        If the stored delivery state belongs to another run, delivery restarts at the first record.
        """
        if run_id != self.delivered.run_id:
            self.delivered = DeliveryState(self.delivered.key, run_id)
            self._rewind()
        self.delivered.write(self.folder)

    def next_batch(self) -> Batch | None:
        """Return a batch of up to about MAX_METRICS_PER_CALL metrics, or None without new lines.

        The same batch is returned until `mark_batch_written` is called.
        """
        self._batch = self._batch or self._read_batch()
        return self._batch

    def mark_batch_written(self) -> None:
        """Record in the run folder that the batch last returned by `next_batch` has been written to the store."""
        self.delivered.offsets |= self._batch.offsets
        self.delivered.write(self.folder)
        self._batch = None

    @property
    def waiting(self) -> int:
        """Return the number of undelivered records: lines that have not been read, and records of the current batch."""
        unread = sum(1 for file in FILES for _ in read_lines(self.folder / file, self._read_to[file]))
        return unread + (len(self._batch.records) if self._batch else 0)

    def _rewind(self) -> None:
        self._read_to = dict.fromkeys(FILES, 0) | self.delivered.offsets
        self._batch, self._groups = None, StepBuffer()

    def _read_batch(self) -> Batch | None:
        records: list[Record] = []
        metrics, start_offsets = 0, dict(self._read_to)
        for file in FILES:
            for line in read_lines(self.folder / file, self._read_to[file]):
                if metrics >= MAX_METRICS_PER_CALL:
                    break
                self._read_to[file] = line.end
                if (record := self._parse_record(file, line)) and record.figures:
                    records.append(record)
                    metrics += len(record.figures)
        if self._read_to == start_offsets:
            return None
        offsets = dict(self._read_to)
        if (begin := self._groups.find_pending_offset()) is not None:
            offsets[RANKS] = min(begin, offsets[RANKS])
        return Batch(records, offsets)

    def _parse_record(self, file: str, line: Line) -> Record | None:
        """Return the metrics of a line; None if it has none, is invalid, or waits for other ranks' lines.

        A line of ranks.jsonl that completes its step returns the metrics of all recorded ranks.
        """
        try:
            message: Any = decode(file, line.data)
            if message is not None and message.unix_s is None:
                raise ValueError("missing key 'unix_s'")
        except ValueError as error:
            self.dropped += 1
            self.why = f"{file} contains an invalid line: {error}"
            return None
        if not isinstance(message, RankLine):
            return _to_record(message)
        lines = self._groups.add(message, line.begin)
        return _make_record(to_rank_metrics(lines), message.step, message.unix_s) if lines else None


def collect_run_tags() -> dict[str, str]:
    """Return the MLflow tags for a run started by this process; unknown values are omitted.

    The tags contain no command arguments, and no environment variables except the name of the user. The function runs
    git, for at most 10 s.

    Returns:
        Text for each tag: version.PACKAGE, version.python; mlflow.source.git.commit and mlflow.source.git.dirty of the
        working directory if it is a git checkout; mlflow.user, mlflow.source.name, mlflow.source.type; if this process
        is connected to Ray: cluster.nodes, cluster.cpus, cluster.gpus, and cluster.gpu_types (such as '8 x H200') if
        there are GPUs.
    """
    versions = {"python": platform.python_version(), **get_installed_versions("mlflow")}
    tags = {f"version.{name}": text for name, text in versions.items()}
    return tags | _collect_git_tags() | _collect_user_tags() | _collect_cluster_tags()


def _collect_git_tags() -> dict[str, str]:
    command = ["git", "--no-optional-locks", "status", "--porcelain=2", "--branch", "--untracked-files=no"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):  # no git, no checkout, or a very slow disk
        return {}
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if heads in ([], ["(initial)"]):
        return {}
    is_dirty = any(not line.startswith("#") for line in lines)
    return {"mlflow.source.git.commit": heads[0], "mlflow.source.git.dirty": str(is_dirty).lower()}


def _collect_user_tags() -> dict[str, str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):  # the user id in a container may have no name
        user = f"uid {os.getuid()}"
    program = Path(sys.argv[0]).name
    if not program or program.startswith("-"):  # python -c
        program = "python"
    return {"mlflow.user": user, "mlflow.source.name": program, "mlflow.source.type": "LOCAL"}


def _collect_cluster_tags() -> dict[str, str]:
    """Return tags that describe the cluster's alive nodes; {} if this process does not use Ray."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpus = Counter()
    for resources in nodes:
        kinds = [name.removeprefix(ACCELERATOR_PREFIX) for name in resources if name.startswith(ACCELERATOR_PREFIX)]
        gpus[kinds[0] if kinds else "GPU"] += int(resources.get("GPU", 0))
    tags = {
        "cluster.nodes": str(len(nodes)),
        "cluster.cpus": f"{sum(resources.get('CPU', 0) for resources in nodes):g}",
        "cluster.gpus": str(gpus.total()),
    }
    if gpus.total():
        tags["cluster.gpu_types"] = ", ".join(f"{n} x {kind}" for kind, n in sorted(gpus.items()) if n)
    return tags
