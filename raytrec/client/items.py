"""A trained table whose rows are things that people know: films, products."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from raytrec.common.errors import RunError


class Items:
    """A table and the titles of its rows; `Run.items` gives it.

    Args:
        run: a Run.
        table: the table's name.
        titles: row → title.
    """

    def __init__(self, run: Any, table: str, titles: Mapping[int, str]):
        self._run, self._table, self._titles = run, table, {int(row): str(t) for row, t in titles.items()}

    def nearest(self, item: int | str, k: int = 10) -> Any:
        """The nearest items by the cosine of their embeddings, in the run's newest checkpoint.

        Args:
            item: a row, or a title, or a part of one that no other title has.
            k: how many.

        Returns:
            pandas.DataFrame: row, title, cosine; the nearest first.

        Raises:
            RunError: no such item, or several.
        """
        import pandas as pd

        found = self._run.nearest(self._table, self.row(item), k)
        titles = [self._titles.get(row, f"row {row}") for row in found["rows"]]
        return pd.DataFrame({"row": found["rows"], "title": titles, "cosine": found["cosines"]})

    def row(self, item: int | str) -> int:
        """The row of an item, by its title or a part of it."""
        if not isinstance(item, str):
            return int(item)
        if item in self._rows:
            return self._rows[item]
        matches = [title for title in self._rows if item.lower() in title.lower()]
        if len(matches) == 1:
            return self._rows[matches[0]]
        near = matches[:5] or get_close_matches(item, self._rows, n=5, cutoff=0.4)
        what = f"{len(matches)} titles have '{item}' in them" if matches else f"no title has '{item}' in it"
        raise RunError(what, where=self._table, expected=" | ".join(near) or "a title that is there")

    @cached_property
    def _rows(self) -> dict[str, int]:
        return {title: row for row, title in sorted(self._titles.items(), reverse=True)}
