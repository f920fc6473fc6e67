"""The lines of a run folder that MLflow lacks. They are those behind the byte up to which it has them.

That byte is kept in the run folder, in mlflow.json, which is replaced after every write to the store. Where a
driver dies between the two, the next one writes the same again. That does no harm: the time of a metric is
its line's, and a store has one metric of a name, step, time and value only once.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from pydantic import NonNegativeInt

from raytrec.common.documents import document, find_document
from raytrec.common.messages import CHECKS, METRICS, RANKS
from raytrec.tracking.journal import write_whole
from raytrec.tracking.run_folder import Line, decode, read_lines
from raytrec.tracking.store import MOST_METRICS
from raytrec.tracking.translate import Record, Translator

NOTE = "mlflow.json"
FILES = (METRICS, CHECKS, RANKS)


@dataclass
class Delivered:
    """The part of a run folder that the store has.

    Attributes:
        key: of the MLflow run, by which it is found where the answer that had its id got lost.
        run_id: None until the store has a run.
        params: whether it has the parameters.
        offsets: file → byte up to which it has the lines.
    """

    key: str = field(default_factory=lambda: uuid4().hex)
    run_id: str | None = None
    params: bool = False
    offsets: dict[str, NonNegativeInt] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Delivered:
        """The note of a folder; if it cannot be read, the store gets everything once more."""
        return find_document(str(folder / NOTE), cls) or cls()

    def write(self, folder: Path) -> None:
        """Replaces the note; where there is no room, the next one will have it all."""
        with suppress(OSError):
            write_whole(folder / NOTE, document(self))


class Batch(NamedTuple):
    """Records for one call, and the bytes up to which the store has the lines of each file after it."""

    records: list[Record]
    offsets: dict[str, int]


class Feed:
    """Reads the lines of a run folder as batches; each is given again until it is `written`.

    Attributes:
        delivered: what the store has.
        dropped: lines that are not messages.
        why: what is wrong with the last of them.
    """

    def __init__(self, folder: Path):
        self.folder, self.dropped, self.why = folder, 0, ""
        self.delivered = Delivered.read(folder)
        self._batch: Batch | None = None
        self._start()

    def use_run(self, run_id: str) -> None:
        """The store has this run; if it is not the one of before, it has nothing of the folder yet."""
        if run_id != self.delivered.run_id:
            self.delivered = Delivered(self.delivered.key, run_id)
            self._start()
        self.delivered.write(self.folder)

    def next_batch(self) -> Batch | None:
        """The next records, about MOST_METRICS metrics; None where the store has everything."""
        self._batch = self._batch or self._read_batch()
        return self._batch

    def written(self) -> None:
        """The store has the batch."""
        self.delivered.offsets |= self._batch.offsets
        self.delivered.write(self.folder)
        self._batch = None

    def params_written(self) -> None:
        """The store has the parameters."""
        self.delivered.params = True
        self.delivered.write(self.folder)

    @property
    def waiting(self) -> int:
        """Lines that the store does not have; of ranks, lines that have been read count together."""
        unread = sum(1 for file in FILES for _ in read_lines(self.folder / file, self._read_to[file]))
        return unread + (len(self._batch.records) if self._batch else 0)

    def _start(self) -> None:
        self._read_to = dict.fromkeys(FILES, 0) | self.delivered.offsets
        self._batch = None
        self._translator = Translator()

    def _read_batch(self) -> Batch | None:
        records: list[Record] = []
        metrics, before = 0, dict(self._read_to)
        for file in FILES:
            for line in read_lines(self.folder / file, self._read_to[file]):
                if metrics >= MOST_METRICS:
                    break
                self._read_to[file] = line.end
                if (record := self._record(file, line)) and record.figures:
                    records.append(record)
                    metrics += len(record.figures)
        if self._read_to == before:
            return None
        offsets = dict(self._read_to)
        if (begin := self._translator.begin_of_waiting()) is not None:
            offsets[RANKS] = min(begin, offsets[RANKS])
        return Batch(records, offsets)

    def _record(self, file: str, line: Line) -> Record | None:
        try:
            message = decode(file, line.data)
        except ValueError as error:
            self.dropped += 1
            self.why = f"{file} has a line that is not a message: {error}"
            return None
        return self._translator.record(message, line.begin) if message else None
