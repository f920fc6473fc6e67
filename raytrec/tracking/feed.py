"""What MLflow has yet to get: the lines of a run folder behind the byte up to which the store has them.

That byte is kept in the run folder, in mlflow.json, which is replaced after every write to the store. Where a
driver dies between the two, the next one writes the same again. That does no harm: the time of a metric is
its line's, and a store has one metric of a name, step, time and value only once.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from raytrec.common.messages import CHECKS, METRICS, RANKS
from raytrec.common.reading import NotReadable, json_values, read_bytes, read_text
from raytrec.tracking.journal import write_whole
from raytrec.tracking.store import MOST_METRICS
from raytrec.tracking.translate import Record, Translator

NOTE, FORMER_NOTE = "mlflow.json", "mlflow_run_id"  # the latter has the id alone
FILES = (METRICS, CHECKS, RANKS)
MOST_DIRECT = 1000  # lines that wait while the run folder takes none and the store does not answer


@dataclass
class Delivered:
    """What the store has of a run folder.

    Attributes:
        key: of the MLflow run, by which it is found where the answer that had its id got lost.
        run_id: None until the store has a run.
        params: whether it has the parameters.
        offsets: file → byte up to which it has the lines.
    """

    key: str = field(default_factory=lambda: uuid4().hex)
    run_id: str | None = None
    params: bool = False
    offsets: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Delivered:
        """Of a note that cannot be read, nothing is known; what the store has is then written once more."""
        try:
            values = json_values(read_bytes(folder / NOTE))
            return cls(
                str(values["key"]), values["run_id"], bool(values["params"]), _offsets(values["offsets"])
            )
        except (OSError, NotReadable, KeyError, TypeError, ValueError):
            pass
        if not (folder / FORMER_NOTE).is_file():
            return cls()
        sizes = {name: (folder / name).stat().st_size for name in FILES if (folder / name).is_file()}
        return cls(run_id=read_text(folder / FORMER_NOTE).strip()[:64], params=True, offsets=sizes)

    def write(self, folder: Path) -> None:
        """Replaces the note; where there is no room, the next one will have it all."""
        with suppress(OSError):
            write_whole(folder / NOTE, json.dumps(asdict(self)).encode() + b"\n")


@dataclass(frozen=True)
class Batch:
    """Records for one call, and the bytes up to which the store has the lines of each file after it."""

    records: list[Record]
    offsets: dict[str, int]


class Feed:
    """Reads the lines of a run folder as batches; each is given again until it is `written` or `refused`.

    Args:
        max_series: tracking.max_rank_table_series.

    Attributes:
        delivered: what the store has.
        dropped: lines that it will never have.
        why: the last of them that is no line of its file.
    """

    def __init__(self, folder: Path, max_series: int):
        self.folder, self._max_series, self.dropped, self.why = folder, max_series, 0, ""
        self.delivered = Delivered.read(folder)
        self._direct: deque[tuple[str, dict[str, Any]]] = deque(maxlen=MOST_DIRECT)
        self._start()

    def use_run(self, run_id: str) -> None:
        """The store has this run; if it is not the one of before, it has nothing of the folder yet."""
        if run_id != self.delivered.run_id:
            self.delivered = Delivered(self.delivered.key, run_id)
            self._start()
        self.delivered.write(self.folder)

    def add(self, file: str, line: dict[str, Any]) -> None:
        """A line that the run folder does not take. When it does, it is read there again."""
        self._direct.append((file, line))

    def next_batch(self) -> Batch | None:
        """What comes next; None where the store has everything."""
        if not self._batches and (batch := self._read_batch()):
            self._batches.append(batch)
        return self._batches[0] if self._batches else None

    def written(self) -> None:
        """The store has the batch."""
        self.delivered.offsets |= self._batches.popleft().offsets
        self.delivered.write(self.folder)

    def refused(self) -> None:
        """The store will never take the batch: a single record is dropped, of several each is tried alone."""
        batch = self._batches[0]
        if len(batch.records) == 1:
            self.dropped += 1
            return self.written()
        self._batches.popleft()
        alone = [Batch([record], {}) for record in batch.records]
        alone[-1] = Batch(alone[-1].records, batch.offsets)
        self._batches.extendleft(reversed(alone))

    def params_written(self) -> None:
        """The store has the parameters."""
        self.delivered.params = True
        self.delivered.write(self.folder)

    @property
    def waiting(self) -> int:
        """Lines that the store does not have; of ranks, lines that have been read count together."""
        unread = sum(1 for file in FILES for _ in self._lines(file))
        return unread + len(self._direct) + sum(len(batch.records) for batch in self._batches)

    def _start(self) -> None:
        self._read_to = dict.fromkeys(FILES, 0) | self.delivered.offsets
        self._batches: deque[Batch] = deque()
        self._translator = Translator(self._max_series)

    def _read_batch(self) -> Batch | None:
        """The next lines, up to MOST_METRICS metrics; None where there are none."""
        records: list[Record] = []
        metrics, before = 0, dict(self._read_to)
        while self._direct and metrics < MOST_METRICS:
            file, line = self._direct.popleft()
            metrics += self._take(records, file, line)
        for file in FILES:
            for data, start, end in self._lines(file):
                if metrics >= MOST_METRICS:
                    break
                self._read_to[file] = end
                with suppress(NotReadable):  # a line that a driver left in part
                    metrics += self._take(records, file, json_values(data), start)
        if not records and self._read_to == before:
            return None
        offsets = dict(self._read_to)
        if (start := self._translator.begin_of_waiting()) is not None:
            offsets[RANKS] = min(start, offsets[RANKS])
        return Batch(records, offsets)

    def _take(self, records: list[Record], file: str, line: Any, start: int | None = None) -> int:
        """Adds what a line says to the records; the number of metrics."""
        try:
            record = self._translator.record(file, line, start)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self.dropped += 1
            self.why = f"{file} has a line that is none of a run's: {type(error).__name__} {error}"
            return 0
        if record is None or not record.figures:
            return 0
        records.append(record)
        return len(record.figures)

    def _lines(self, file: str) -> Iterator[tuple[bytes, int, int]]:
        """Whole lines behind what has been read, with their first byte and the one after the last."""
        try:
            stream = open(self.folder / file, "rb")  # noqa: SIM115 (closed below)
        except OSError:
            return
        with stream:
            start = stream.seek(min(self._read_to[file], stream.seek(0, 2)))
            for data in stream:
                if not data.endswith(b"\n"):
                    return
                yield data, start, start + len(data)
                start += len(data)


def _offsets(values: dict[str, Any]) -> dict[str, int]:
    return {file: max(0, int(values[file])) for file in FILES if file in values}
