"""The section `eval`: how evaluations compute their metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from raytrec.config.base import Few, PositiveInt, Section

TowerName = Literal["query", "item"]  # of a model that retrieves
Column = Annotated[str, Field(min_length=1)]


class RetrievalSection(Section):
    """Every evaluated row's item, or items, ranked among all; for models that give vectors of query and
    item."""

    items: str
    """Folder or file of Parquet with one row for each item: its key and the features of the item's tower."""
    item: Column = "item"
    """The column of `items` that is an item's key."""
    right_items: Column | None = None
    """The column of evaluated rows with the key of the right item, or a list of keys: each of these items is
    right, and recall, NDCG, … are of the row's list. null: the column `item`."""
    seen: list[Column] = Field(default_factory=list, max_length=20)
    """List columns of the evaluated rows, such as history: keys of items that a row's ranking leaves out,
    except right items."""
    at: list[Few] = Field([10], min_length=1, max_length=20)
    """Places k that hit rate, recall, NDCG and MAP are of."""

    @property
    def right_column(self) -> str:
        """Column of evaluated rows with the right items."""
        return self.right_items or self.item


class EvalSection(Section):
    slices: list[str] = Field(default_factory=list, max_length=20)
    """Columns of data.reserve_columns with few values, such as country: of the 10 largest and the 10 worst of
    them, rows, AUC and calibration of each task are reported."""
    max_exact_rows: PositiveInt = 2_000_000
    """Rows of an evaluation that a worker keeps in memory for metrics of an order or of groups. Beyond, areas
    under curves come from bins, with a bound on their error, and rows of groups go to temporary files."""
    retrieval: RetrievalSection | None = None
    """Rank every evaluated row's item among all items: items, item, right_items, seen, at; null: no."""
