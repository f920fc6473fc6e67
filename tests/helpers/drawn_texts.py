"""Positions of the texts in a figure, to detect overlapping and clipped texts."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from raytrec.report.figures.style import styled

TOLERANCE_PX = 1.0  # pixels


class DrawnText(NamedTuple):
    """Line of text and its bounding box in pixels from the upper left corner."""

    text: str
    left: float
    right: float
    top: float
    bottom: float


@styled
def read_drawn_texts(figure: Figure) -> list[DrawnText]:
    """Return all lines of text of a figure with their positions."""
    found = []
    renderer = FigureCanvasAgg(figure).get_renderer()

    def note(_gc, x, y, text, font, angle, ismath=False, mtext=None):
        width, height, descent = renderer.get_text_width_height_descent(text, font, ismath)
        assert angle in (0, 90)
        box = (x, x + width, y - height + descent, y + descent)
        if angle:
            box = (x - height + descent, x + descent, y - width, y)
        found.append(DrawnText(text, *box))

    renderer.draw_text = note
    figure.draw(renderer)
    return found


def find_text_collisions(figure: Figure) -> list[str]:
    """Return descriptions of overlapping and clipped texts of a figure."""
    width, height = figure.get_size_inches() * figure.dpi
    texts = [each for each in read_drawn_texts(figure) if each.text]
    out = [
        f"{each.text!r} is clipped"
        for each in texts
        if min(each.left, each.top, width - each.right, height - each.bottom) < -TOLERANCE_PX
    ]
    return out + [
        f"{one.text!r} overlaps {two.text!r}"
        for one, two in combinations(texts, 2)
        if min(one.right, two.right) - max(one.left, two.left) > TOLERANCE_PX
        and min(one.bottom, two.bottom) - max(one.top, two.top) > TOLERANCE_PX
    ]
