"""Web page of a run for `raytrec report`, and plots of the run as files.

Pages are self-contained HTML rendered from templates. Text from runs is untrusted, so templates escape it and
hide secrets in addresses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from raytrec.checkpoint.files import FOLDER, find_newest_checkpoint
from raytrec.common.errors import convert_os_errors
from raytrec.common.formatting import as_dict
from raytrec.common.processes import get_owner_name, remove_leftovers
from raytrec.common.redaction import hide, hide_yaml
from raytrec.metrics.results import build_slice_tables, format_result
from raytrec.report import sheets
from raytrec.report.findings import findings
from raytrec.tracking.run_folder import GROWING, RunFolder

REPORT, PICTURES = "report.html", "pictures"


class RenderedFigure(NamedTuple):
    """GalleryEntry of a plot, and the plot as an <svg> element; the element is None without data."""

    entry: Any
    svg: str | None


def pictures(folder: str | Path) -> list[Path]:
    """Write the plots of a run that have data to FOLDER/pictures/ as PNG files, and return the files' paths.

    Raises:
        RunError: A file of the run cannot be read.
        OSError: A PNG file cannot be written.
    """
    from raytrec.report.figures import GALLERY
    from raytrec.report.figures.style import save_png

    run, target = read_run(folder), Path(folder) / PICTURES
    target.mkdir(exist_ok=True)
    paths = []
    for entry in GALLERY:
        if figure := entry.draw(run):
            paths.append(target / f"{entry.name}.png")
            save_png(figure, paths[-1])
    return paths


def build(folder: str | Path, out: str | Path | None = None) -> tuple[Path, list[Path]]:
    """Write report.html, and its plots as SVG files in pictures/.

    The page is self-contained and supports file://, light and dark mode, and any width. A section without
    data states the reason.

    Args:
        folder: Folder of a finished or unfinished run.
        out: Output folder, which is created if it does not exist; default: the run folder.

    Returns:
        Path of the page, and paths of the plots that have data.

    Raises:
        RunError: A file of the run cannot be read, or a file cannot be written.
    """
    run = read_run(folder)
    return write_report(run, draw(run), Path(out or folder))


def read_run(folder: str | Path) -> RunFolder:
    """Read a run folder; raise RunError if one of its files cannot be read."""
    with convert_os_errors("a file of the run cannot be read", where=str(folder)):
        run = RunFolder.read(folder)
        _ = run.config, run.schema  # their first access reads the files, and may raise OSError
        return run


def draw(run: RunFolder) -> list[RenderedFigure]:
    """Draw all plots of the gallery as <svg> elements; the element of a plot without data is None."""
    from raytrec.report.figures import GALLERY
    from raytrec.report.figures.style import to_svg

    figures = ((entry, entry.draw(run)) for entry in GALLERY)
    return [RenderedFigure(entry, to_svg(figure, entry.label) if figure else None) for entry, figure in figures]


def write_report(run: RunFolder, drawn: list[RenderedFigure], target: Path) -> tuple[Path, list[Path]]:
    """Write report.html and pictures/ to the folder `target`, which is created if it does not exist; see `build`."""
    from raytrec.report.figures.style import to_standalone_svg

    files = {target / PICTURES / f"{entry.name}.svg": svg for entry, svg in drawn if svg}
    began = min((event.unix_s for event in run.events if event.unix_s), default=None)
    with convert_write_errors(target):
        (target / PICTURES).mkdir(parents=True, exist_ok=True)
        page = write_page(
            target / REPORT,
            "report.html.j2",
            run=run,
            when=f"{datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M} UTC" if began else "",
            result=[(row.title, row.text) for row in format_result(run.result).values()],
            findings=findings(run),
            pictures=drawn,
            bounds=sheets.bounds(run),
            slices=build_slice_tables(run.result),
            ranks=sheets.ranks(run),
            tables=sheets.build_table_sheet(run),
            checks=sheets.checks(run),
            failures=[f"{check.check} at step {check.step:,}: {check.text}" for check in run.failures[:50]],
            events=sheets.events(run),
            saves=sheets.saves(run),
            config=hide_yaml(run.config_text),
            versions=read_package_versions(run.path),
        )
        for path, svg in files.items():
            path.write_text(to_standalone_svg(svg), encoding="utf-8", errors="replace")
    return page, list(files)


class BackgroundRenderer:
    """Renderer of a run's report, whose thread draws the plots while the run's workers and Ray shut down.

    The plots do not depend on result.json, which does not exist yet.

    Attributes:
        folder: Run folder.
    """

    def __init__(self, folder: Path):
        self.folder, self._thread = folder, Thread(target=self._draw, name="drawing", daemon=True)
        self._drawn: list[RenderedFigure] | None = None
        self._sizes: list[int] | None = None  # file sizes at the start of the drawing
        self._confirmed = False

    def begin(self) -> None:
        """Start the thread unless it has already been started."""
        if self._thread.ident is None:
            self._sizes = self._file_sizes()
            self._thread.start()

    def confirm(self) -> None:
        """Record whether the files have kept their sizes since `begin`; to be called before result.json is written."""
        self._confirmed = self._sizes is not None and self._file_sizes() == self._sizes

    def write(self) -> tuple[Path, list[Path]]:
        """Write the report as `build` does; redraw the plots if drawing failed, or unless `confirm` found no change.

        Waits for the thread. Errors are as for `build`.
        """
        if self._thread.ident is not None:
            self._thread.join()
        run, drawn = read_run(self.folder), self._drawn if self._confirmed else None
        return write_report(run, draw(run) if drawn is None else drawn, self.folder)

    def _draw(self) -> None:
        try:
            self._drawn = draw(RunFolder.read(self.folder))
        except Exception:  # `write` redraws and raises the error
            self._drawn = None

    def _file_sizes(self) -> list[int]:
        paths = [self.folder / name for name in GROWING]
        return [path.stat().st_size if path.is_file() else 0 for path in paths]


def read_package_versions(folder: Path) -> dict[str, str]:
    """Return package → version as recorded in the newest checkpoint of the run folder; {} without a checkpoint.

    Checkpoints outside the run folder (checkpoint.dir) are ignored, because a report does not read from object stores.
    """
    if not (folder / FOLDER).is_dir():
        return {}
    _, index = find_newest_checkpoint(str(folder / FOLDER))
    versions = as_dict(as_dict(index.get("about")).get("versions"))
    return {str(key): str(value) for key, value in versions.items()}


def convert_write_errors(path: Path, what: str = "page", option: str = "--out") -> AbstractContextManager[None]:
    """Return a context manager that converts an OSError during the writing of a file to a RunError.

    Args:
        path: File or folder to write.
        what: Noun for the file, such as "page".
        option: Command-line option, of this command or of `raytrec report`, that sets the path.
    """
    return convert_os_errors(f"cannot write the {what}", where=str(path), do=f"fix the cause, or change {option}")


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Render a template from templates/ to a file, which is written completely or not at all, and return the path.

    Args:
        path: File to write.
        template: File name of the template.
        values: Variables of the template. Texts are escaped and their secrets hidden, except in rendered plots.

    Raises:
        RunError: The file cannot be written.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    pages = Environment(
        loader=PackageLoader("raytrec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_sanitize_part,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = pages.get_template(template).render(**values)
    partial = path.with_name(f"{path.name}.{get_owner_name()}.partial")
    remove_leftovers(path.parent, f"{path.name}.{{owner}}.partial")
    with convert_write_errors(path):
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    return path


def _sanitize_part(value: Any) -> Any:
    return hide(value) if isinstance(value, str) and not hasattr(value, "__html__") else value
