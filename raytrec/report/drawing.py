"""The pictures of a run that is ending: drawn by a thread, while its workers and Ray are shut down."""

from __future__ import annotations

from pathlib import Path
from threading import Thread

from raytrec.common.messages import CHECKS, EVENTS, METRICS, RANKS
from raytrec.report.history import History
from raytrec.report.report import Drawn, draw, write_report

DRAWN = (METRICS, RANKS, CHECKS, EVENTS)  # what pictures are drawn from


class EarlyDrawing:
    """Draws the pictures of a run folder before its result is there, which no picture shows.

    Attributes:
        folder: of the run.
    """

    def __init__(self, folder: Path):
        self.folder, self._thread = folder, Thread(target=self._draw, name="drawing", daemon=True)
        self._drawn: list[Drawn] | None = None
        self._sizes: list[int] | None = None  # of the files, when that began
        self._confirmed = False

    def begin(self) -> None:
        """Begins, unless it has begun before."""
        if self._thread.ident is None:
            self._sizes = self._look()
            self._thread.start()

    def confirm(self) -> None:
        """Notes whether the files are still those that were drawn; the result's own line comes later."""
        self._confirmed = self._sizes is not None and self._look() == self._sizes

    def write(self) -> tuple[Path, list[Path]]:
        """report.html and pictures, as of `build_with_pictures`; what has changed since is drawn again."""
        if self._thread.ident is not None:
            self._thread.join()
        history, drawn = History.read(self.folder), self._drawn if self._confirmed else None
        return write_report(history, draw(history) if drawn is None else drawn, self.folder)

    def _draw(self) -> None:
        try:
            self._drawn = draw(History.read(self.folder))
        except Exception:  # it is drawn again, and that says why it cannot be
            self._drawn = None

    def _look(self) -> list[int]:
        paths = [self.folder / name for name in DRAWN]
        return [path.stat().st_size if path.is_file() else 0 for path in paths]
