"""Tables in documents that are made from results, so that nobody types figures.

The place for one is between `<!-- benchmarks/results/NAME.json -->` and `<!-- end -->`, with a line each.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

REPO = Path(__file__).parents[1]


def _block(name: str) -> re.Pattern:
    return re.compile(rf"(?s)(<!-- benchmarks/results/{name}\.json -->)\n(.*?)\n?(<!-- end -->)")


def fill(page: str, name: str, text: str) -> None:
    """Puts a text where the page has its place for these results."""
    path = REPO / page
    path.write_text(_block(name).sub(lambda found: f"{found[1]}\n{text}\n{found[3]}", path.read_text()))


def keep(results: Path, content: dict) -> None:
    """Writes results as a whole, or not at all."""
    partial = results.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(results)


def filled(page: str, name: str) -> list[str]:
    """What the page has in each of its places for these results."""
    return [text for _, text, _ in _block(name).findall((REPO / page).read_text())]
