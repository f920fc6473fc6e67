"""Assign features to tables, and choose table sizes that keep frequent values in separate rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np
import pyarrow as pa

from raytrec.config.schema_parts import Scale, to_table_name
from raytrec.data.ids import hash_integers, hash_text_bits
from raytrec.inspection.column_roles import MAX_ID_RANGE_FACTOR, Finding, is_ordinal, words
from raytrec.inspection.column_stats import MAX_EXACT_VALUES, ColumnStats, undo_log
from raytrec.inspection.sketches import MAX_KEPT_HASHES, HotIds, count_distinct

MAX_COLLISION_FREE_VALUES = 1000  # tables with fewer values grow until no two values share a row
MAX_SMALL_TABLE_ROWS = 65_536  # maximum number of rows of tables with ten rows per value
# Words that describe the use of ids instead of their meaning.
HISTORY = frozenset(
    """history histories hist seq sequence sequences recent last past previous prev clicked viewed watched
    bought purchased played liked visited read seen session sessions behavior behaviors""".split()  # noqa: SIM905
)
USAGE_WORDS = HISTORY | frozenset(
    "id ids list target candidate next first positive negative pos neg".split()  # noqa: SIM905
)


@dataclass
class SharedTable:
    """Embedding table of the proposed schema with the features that look it up.

    Attributes:
        name: Name of the table, derived from the name of the first feature.
        members: Findings of the features that look up the table.
        reasons: Name of a feature → reason for sharing the table; the first feature has no entry.
        comment: Comment on the number of rows (`choose_size`).
    """

    name: str
    members: list[Finding]
    reasons: dict[str, str] = field(default_factory=dict)
    comment: str = ""

    def choose_size(self, sampled: bool) -> dict:
        """Return the table's keys `rows` and `out_of_range` for schema.yaml, and set `comment`.

        They are computed from all features' ids in training, validation and test data.

        Args:
            sampled: True if only some of the rows were read.
        """
        parts, hot = [part for f in self.members for part in f.stats.parts], HotIds()
        for part in parts:
            hot.add(*part.hot.counts())
        distinct = count_distinct(np.unique(np.concatenate([part.hashes for part in parts]))[:MAX_KEPT_HASHES])
        low, high = min(p.low for p in parts), max(p.high for p in parts)
        kind = "ordinal" if all(is_ordinal(f.stats) for f in self.members) else "id"
        kind = "text" if any(f.stats.base == "text" for f in self.members) else kind
        rows, out_of_range, self.comment = table_size(low, high, distinct, hot, kind, sampled)
        if out_of_range == "hash" and kind != "text" and any(f.stats.is_folder_key for f in self.members):
            ids, counts = hot.counts()  # training hashes the folder keys as text (fragments.py)
            hot = HotIds()
            hot.add(hash_text_bits(pa.array(ids.view(np.int64)).cast(pa.string())), counts)
            rows, out_of_range, self.comment = table_size(low, high, distinct, hot, "text", sampled)
        return {"rows": rows, "out_of_range": out_of_range}


def has_history_name(f: Finding) -> bool:
    """Return True for a column of lists whose name contains a word of HISTORY, such as history or clicked."""
    return f.stats.is_list and not HISTORY.isdisjoint(words(f.stats.name))


def find_tables(findings: list[Finding]) -> list[SharedTable]:
    """Return the tables for the sparse findings, which are assigned in order, lists last.

    A finding joins the table of an earlier finding if `_explain_sharing` returns a reason, else gets its own table.
    """
    tables: list[SharedTable] = []
    for f in sorted((f for f in findings if f.kind == "sparse"), key=lambda f: f.stats.is_list):
        is_distinctive = _is_distinctive(f.stats)
        candidates = [(t, why) for t in tables if (why := _explain_sharing(f, t.members[0], is_distinctive))]
        if candidates:
            table, why = max(candidates, key=lambda entry: estimate_containment(entry[0].members[0].stats, f.stats))
            table.members.append(f)
            table.reasons[f.stats.name] = why
        else:
            tables.append(SharedTable(make_table_name(f.stats.name, {t.name for t in tables}), [f]))
    return tables


def _explain_sharing(f: Finding, owner: Finding, is_distinctive: bool) -> str | None:
    """Return the reason why a feature should share another feature's table, or None if it should not."""
    stats, owner_stats = f.stats, owner.stats
    nouns = _subject_words(stats.name)
    if nouns and nouns == _subject_words(owner_stats.name):
        min_share = 0.2
    elif is_distinctive and len(owner_stats.hashes) >= 10:
        min_share = 0.8
    elif not nouns and stats.is_list:  # a name such as `history`
        min_share = 0.9
    else:
        return None
    have_same_kind = _kind_of_ids(stats) == _kind_of_ids(owner_stats)
    share = estimate_containment(stats, owner_stats) if have_same_kind else 0.0
    return f"{100 * share:.0f} % of its values are also in {owner_stats.name}" if share >= min_share else None


def _kind_of_ids(s: ColumnStats) -> str:
    """Return text, number or folder number; the latter are read as text if their table hashes ids (fragments.py)."""
    return "text" if s.base == "text" else "folder number" if s.is_folder_key else "number"


def _is_distinctive(s: ColumnStats) -> bool:
    """Return True if values in common with another column are unlikely to be due to chance.

    The column must have at least ten distinct values. They must be texts, or integers of which some are negative or the
    largest is at least MAX_ID_RANGE_FACTOR times the number of distinct values.
    """
    fills = s.lowest >= 0 and s.highest < MAX_ID_RANGE_FACTOR * s.distinct
    return (s.base == "text" or not fills) and s.distinct >= 10


@cache
def _subject_words(name: str) -> frozenset[str]:
    return frozenset(re.sub(r"(?<=\w\w\w)s$", "", word) for word in words(name) if word not in USAGE_WORDS)


def make_table_name(column: str, taken: set[str]) -> str:
    """Return a valid table name that is derived from a column name and is not in `taken`."""
    name = re.sub(r"[^\w\-]+", "_", re.sub(r"(?<=.)([_.][iI][dD]s?|(?<=[a-z])I[dD]s?)$", "", column)).strip("_")
    name = to_table_name(name or "ids")
    number = 2
    while name in taken:
        name, number = f"{name.removesuffix(f'_{number - 1}')}_{number}", number + 1
    return name


def estimate_containment(inner: ColumnStats, outer: ColumnStats) -> float:
    """Return the share of the distinct values of `inner` that `outer` contains, estimated from hashes."""
    bounds = [s.hashes[-1] for s in (inner, outer) if len(s.hashes) >= MAX_KEPT_HASHES]
    inside, outside = (s.hashes[s.hashes <= min(bounds)] if bounds else s.hashes for s in (inner, outer))
    first = inside[:MAX_EXACT_VALUES]  # a few values are enough to reject most pairs of columns
    if (
        len(inside) > MAX_EXACT_VALUES
        and len(outside)
        and not (outside[np.searchsorted(outside, first).clip(max=len(outside) - 1)] == first).any()
    ):
        return 0.0
    return len(np.intersect1d(inside, outside, assume_unique=True)) / max(len(inside), 1)


def table_size(low: float, high: float, distinct: int, hot: HotIds, kind: str, sampled: bool) -> tuple[int, str, str]:
    """Return (rows, out_of_range, comment) for an embedding table, where `comment` explains the choice.

    Args:
        low: Lowest integer id; ignored for text.
        high: Highest integer id; ignored for text.
        distinct: Number of distinct values.
        hot: Counters of the most frequent values.
        kind: Kind of the values: text, id or ordinal (column_roles.is_ordinal).
        sampled: True if only some of the rows were read.
    """
    if kind == "text" or low < 0 or high >= max(MAX_ID_RANGE_FACTOR * distinct, 100_000):
        rows, shared = _size_hashed_table(distinct, hot, kind == "text")
        others = f"{100 * shared:.2g} % of the lookups share a row with a more frequent value"
        return rows, "hash", others if shared else "frequent values do not share a row"
    rows = int(high) + 1
    if sampled:
        return rows + max(1, rows // 10), "hash", "larger ids share rows with other ids"
    if kind == "ordinal":
        return rows, "clamp", f"larger values are clamped to {rows - 1}"
    return rows + 1, "clamp", "larger ids use the last row, which is not trained"


def _size_hashed_table(distinct: int, hot: HotIds, is_text: bool) -> tuple[int, float]:
    """Return the number of rows of a table with out_of_range: hash, and the share of lookups that collide.

    A lookup collides if its value shares a row with a more frequent value.
    """
    ids, counts = hot.counts()
    order = np.argsort(-counts, kind="stable")
    ids, counts, few = ids[order], counts[order], distinct < MAX_COLLISION_FREE_VALUES
    rows = least = max(min(10 * distinct, MAX_SMALL_TABLE_ROWS), 2 * distinct, 100)
    best = 1.0, rows
    while best[0] and rows <= (MAX_SMALL_TABLE_ROWS if few else 1.1 * least):
        places = ids % np.uint64(rows) if is_text else np.where(ids < rows, ids, hash_integers(ids, rows))
        most_frequent = np.unique(places, return_index=True)[1]
        best = min(best, (1 - float(counts[most_frequent].sum() / counts.sum()), rows))
        rows += rows // 100 if few else least // 1000
    return best[1], best[0]


def bucket_boundaries(scale: Scale) -> list[float]:
    """Return the ascending boundaries of ten buckets of about equal counts; equal boundaries are merged.

    The column's numbers, after scaling with `scale`, are assumed to be normally distributed.
    """
    deciles = scale.mean + scale.std * np.array([NormalDist().inv_cdf(k / 10) for k in range(1, 10)])
    numbers = undo_log(deciles) if scale.log else deciles
    return sorted({float(f"{number:.12g}") for number in numbers})
