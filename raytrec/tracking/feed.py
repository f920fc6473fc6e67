"""Read the lines of a run folder that have not been delivered to MLflow, by byte offset.

The offsets are stored in mlflow.json in the run folder. The file is replaced after every write to the store.
If a driver dies between the two writes, the next driver sends the same records again. This is harmless: the time of a
metric is the time of its line, and a store keeps one metric per name, step, time and value.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pydantic import NonNegativeInt

from raytrec.common.documents import find_document, to_json_document
from raytrec.common.messages import CHECKS, METRICS, RANKS, RankLine
from raytrec.tracking.history import StepBuffer
from raytrec.tracking.journal import write_atomically
from raytrec.tracking.mlflow_records import Record, make_record, to_rank_metrics, to_record
from raytrec.tracking.run_folder import Line, decode, read_lines
from raytrec.tracking.store import MAX_METRICS_PER_CALL

DELIVERY_STATE_FILE = "mlflow.json"
FILES = (METRICS, CHECKS, RANKS)


@dataclass
class DeliveryState:
    """State of a delivery: the part of a run folder that has been written to the store.

    Attributes:
        key: Key of the MLflow run, by which the run is found if the store created it without responding.
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
        """Read the state from a run folder; if it is missing or unreadable, everything is delivered again."""
        return find_document(str(folder / DELIVERY_STATE_FILE), cls) or cls()

    def write(self, folder: Path) -> None:
        """Replace the stored state; write errors are ignored, because the next write contains the full state."""
        with suppress(OSError):
            write_atomically(folder / DELIVERY_STATE_FILE, to_json_document(self))


class Batch(NamedTuple):
    """Records for one call to the store, and for each file the byte offset up to which they cover its lines."""

    records: list[Record]
    offsets: dict[str, int]


class RecordReader:
    """Reader of a run folder in batches; `next_batch` returns the same batch until `mark_batch_written` is called.

    Attributes:
        folder: Run folder.
        delivered: State of the delivery.
        dropped: Number of invalid lines.
        why: Reason why the last dropped line was invalid.
    """

    def __init__(self, folder: Path):
        self.folder, self.dropped, self.why = folder, 0, ""
        self.delivered = DeliveryState.read(folder)
        self._batch: Batch | None
        self._rewind()

    def use_run(self, run_id: str) -> None:
        """Deliver to this MLflow run; if it is not the run of the saved delivery state, start from the beginning."""
        if run_id != self.delivered.run_id:
            self.delivered = DeliveryState(self.delivered.key, run_id)
            self._rewind()
        self.delivered.write(self.folder)

    def next_batch(self) -> Batch | None:
        """Return the next batch of about MAX_METRICS_PER_CALL metrics; None if everything has been delivered."""
        self._batch = self._batch or self._read_batch()
        return self._batch

    def mark_batch_written(self) -> None:
        """Record that the batch has been written to the store."""
        self.delivered.offsets |= self._batch.offsets
        self.delivered.write(self.folder)
        self._batch = None

    def mark_params_written(self) -> None:
        """Record that the parameters have been written to the store."""
        self.delivered.params = True
        self.delivered.write(self.folder)

    @property
    def waiting(self) -> int:
        """Return the number of undelivered lines; lines of ranks.jsonl that have been read count as one per step."""
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
        """Return the metrics of a line; None without metrics, or while lines of other ranks of the step are missing."""
        try:
            message = decode(file, line.data)
        except ValueError as error:
            self.dropped += 1
            self.why = f"{file} contains an invalid line: {error}"
            return None
        if not isinstance(message, RankLine):
            return to_record(message)
        lines = self._groups.add(message, line.begin)
        return make_record(to_rank_metrics(lines), message.step, message.unix_s) if lines else None
