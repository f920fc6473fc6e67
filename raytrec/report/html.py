"""Self-contained pages of HTML from templates.

What comes from runs is data: escaped, and without the secrets of addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from raytrec.common.errors import RunError
from raytrec.common.processes import owner, remove_leftovers
from raytrec.common.redaction import hide


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Gives errors of the file system, while the block writes a page or its pictures, their place.

    Raises:
        RunError: instead of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write the page: {error.strerror}",
            where=str(error.filename or path),
            do="choose another place with --out",
        ) from None


def write_page(path: Path, template: str, **values: Any) -> Path:
    """Renders a template of templates/ into a file, which is written whole or not at all.

    Args:
        values: what the template shows. Texts are escaped, unless they are Markup of our own making.
    """
    pages = Environment(
        loader=PackageLoader("raytrec.report"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = pages.get_template(template).render(**values)
    partial = path.with_name(f"{path.name}.{owner()}.partial")
    remove_leftovers(path.parent, f"{path.name}.{{owner}}.partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8", errors="replace")
        partial.replace(path)
    return path


def _shown(value: Any) -> Any:
    return hide(value) if isinstance(value, str) and not isinstance(value, Markup) else value
