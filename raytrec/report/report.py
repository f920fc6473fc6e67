"""`raytrec report RUN`: everything that a run folder records on one page, and its pictures as files."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple

from raytrec.common.redaction import hide_yaml
from raytrec.metrics.results import format_result
from raytrec.report import parts
from raytrec.report.findings import findings
from raytrec.report.history import History, when
from raytrec.report.versions import versions

REPORT, PICTURES = "report.html", "pictures"


class Drawn(NamedTuple):
    """A picture of the gallery, and the <svg> element that it became; None where there is no data."""

    picture: Any
    svg: str | None


def build(folder: str | Path) -> Path:
    """Writes report.html into a run folder: self-contained, for file://, light and dark, wide and narrow.

    A section without data says why it is empty.

    Args:
        folder: of a run, finished or not.

    Returns:
        Path: of the page.
    """
    history = History.read(folder)
    return _write(history, draw(history), history.folder)


def pictures(folder: str | Path) -> list[Path]:
    """Writes the pictures that there is data for as PNG into FOLDER/pictures/; their paths."""
    from raytrec.report.figures.gallery import PICTURES as GALLERY
    from raytrec.report.figures.style import save_png

    history, target = History.read(folder), Path(folder) / PICTURES
    target.mkdir(exist_ok=True)
    found = {target / f"{picture.name}.png": picture.draw(history) for picture in GALLERY}
    made = {path: figure for path, figure in found.items() if figure}
    for path, figure in made.items():
        save_png(figure, path)
    return list(made)


def build_with_pictures(folder: str | Path, out: str | Path | None = None) -> tuple[Path, list[Path]]:
    """`build`, and its pictures as SVG in pictures/; each is drawn once.

    Args:
        folder: of the run.
        out: where to write them; default: there.
    """
    history = History.read(folder)
    return write_report(history, draw(history), Path(out or folder))


def draw(history: History) -> list[Drawn]:
    """The whole gallery."""
    from raytrec.report.figures.gallery import PICTURES as GALLERY
    from raytrec.report.figures.style import to_svg

    figures = ((picture, picture.draw(history)) for picture in GALLERY)
    return [Drawn(picture, to_svg(figure, picture.label) if figure else None) for picture, figure in figures]


def write_report(history: History, drawn: list[Drawn], target: Path) -> tuple[Path, list[Path]]:
    """Writes report.html and pictures/ into a folder, which is made if need be."""
    from raytrec.report.html import writing

    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        return _write(history, drawn, target), _save(drawn, target)


def _save(drawn: list[Drawn], folder: Path) -> list[Path]:
    from raytrec.report.figures.style import alone

    target = folder / PICTURES
    target.mkdir(exist_ok=True)
    made = {target / f"{picture.name}.svg": svg for picture, svg in drawn if svg}
    for path, svg in made.items():
        path.write_text(alone(svg), encoding="utf-8", errors="replace")
    return list(made)


def _write(history: History, drawn: list[Drawn], folder: Path) -> Path:
    from raytrec.report.html import write_page

    return write_page(
        folder / REPORT,
        "report.html.j2",
        name=history.name,
        folder=str(history.folder.absolute()),
        when=_began(history),
        result=[(row.title, row.text) for row in format_result(history.result).values()],
        findings=findings(history),
        pictures=_sections(drawn),
        bound=parts.bound_sentence(history),
        bounds=parts.bounds(history),
        slices=parts.slices(history),
        ranks=parts.ranks(history),
        tables=parts.tables(history),
        checks=parts.checks(history),
        failures=[f"{c.get('check')} at step {c['step']:,}: {c.get('text')}" for c in history.failures[:50]],
        events=parts.events(history),
        saves=parts.saves(history),
        config=hide_yaml(history.config_text),
        versions=versions(history.folder),
    )


def _sections(drawn: list[Drawn]) -> dict[str, list[dict[str, Any]]]:
    """Section → its pictures, drawn or, where there is no data, with the reason."""
    from markupsafe import Markup

    sections: dict[str, list[dict[str, Any]]] = {}
    for picture, svg in drawn:
        # matplotlib has escaped what was written into it.
        shown = Markup(svg) if svg else None
        entry = {"name": picture.name, "label": picture.label, "svg": shown, "missing": picture.missing}
        sections.setdefault(picture.section, []).append(entry)
    return sections


def _began(history: History) -> str:
    """When the run began, in UTC; empty where nothing says it."""
    times = [when(event) for event in history.events if not isnan(when(event))]
    return f"{datetime.fromtimestamp(min(times), UTC):%Y-%m-%d %H:%M} UTC" if times else ""
