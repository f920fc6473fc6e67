"""`raytrec report RUN`: everything that a run folder records on one page, and its pictures as files."""

from __future__ import annotations

from datetime import UTC, datetime
from math import isnan
from pathlib import Path
from typing import Any

from raytrec.common.redaction import hide_yaml
from raytrec.metrics.results import format_result
from raytrec.report import parts
from raytrec.report.findings import findings
from raytrec.report.history import History, when
from raytrec.report.versions import versions

REPORT, PICTURES = "report.html", "pictures"


def build(folder: str | Path) -> Path:
    """Writes report.html into a run folder: self-contained, for file://, light and dark, wide and narrow.

    A section without data says why it is empty.

    Args:
        folder: of a run, finished or not.

    Returns:
        Path: of the page.
    """
    history = History.read(folder)
    return _write(history, _draw(history), history.folder)


def pictures(folder: str | Path) -> list[Path]:
    """Writes the pictures that there is data for as PNG into FOLDER/pictures/; their paths."""
    history = History.read(folder)
    return _save(history, _draw(history), history.folder)


def build_with_pictures(folder: str | Path, out: str | Path | None = None) -> tuple[Path, list[Path]]:
    """`build` and `pictures`, in less time than one after the other.

    Args:
        folder: of the run.
        out: where to write them; default: there.
    """
    from raytrec.report.html import writing

    history, target = History.read(folder), Path(out or folder)
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
        drawn = _draw(history)
        return _write(history, drawn, target), _save(history, drawn, target)


def _draw(history: History) -> list[tuple[Any, Any]]:
    """(Picture, Figure or None) of the whole gallery."""
    from raytrec.report.figures.gallery import PICTURES as GALLERY

    return [(picture, picture.draw(history)) for picture in GALLERY]


def _save(history: History, drawn: list[tuple[Any, Any]], folder: Path) -> list[Path]:
    from raytrec.report.figures.style import save_png

    target = folder / PICTURES
    target.mkdir(exist_ok=True)
    made = {target / f"{picture.name}.png": figure for picture, figure in drawn if figure}
    for path, figure in made.items():
        save_png(figure, path)
    return list(made)


def _write(history: History, drawn: list[tuple[Any, Any]], folder: Path) -> Path:
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
        ranks=parts.ranks(history),
        tables=parts.tables(history),
        checks=parts.checks(history),
        failures=[f"{c.get('check')} at step {c['step']:,}: {c.get('text')}" for c in history.failures[:50]],
        events=parts.events(history),
        saves=parts.saves(history),
        config=hide_yaml(history.config_text),
        versions=versions(history.folder),
    )


def _sections(drawn: list[tuple[Any, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Section → its pictures, drawn or, where there is no data, with the reason."""
    from markupsafe import Markup

    from raytrec.report.figures.style import to_svg

    sections: dict[str, list[dict[str, Any]]] = {}
    for picture, figure in drawn:
        # matplotlib has escaped what was written into it.
        svg = Markup(to_svg(figure, picture.label)) if figure else None
        entry = {"name": picture.name, "label": picture.label, "svg": svg, "missing": picture.missing}
        sections.setdefault(picture.section, []).append(entry)
    return sections


def _began(history: History) -> str:
    """When the run began, in UTC; empty where nothing says it."""
    times = [when(event) for event in history.events if not isnan(when(event))]
    return f"{datetime.fromtimestamp(min(times), UTC):%Y-%m-%d %H:%M} UTC" if times else ""
