"""Which features look up one table."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from raytrec.config.schema import table_name
from raytrec.inspection.column_roles import SPARSE_FILL, Finding, is_ordinal, words
from raytrec.inspection.column_stats import SMALLEST, ColumnStats, count_distinct, share_of
from raytrec.inspection.hot_ids import HotIds
from raytrec.inspection.table_size import table_size

# Words for how ids are used, not for what they are.
HISTORY = frozenset(
    """history histories hist seq sequence sequences recent last past previous prev clicked viewed watched
    bought purchased played liked visited read seen session sessions behavior behaviors""".split()  # noqa: SIM905
)
USE = HISTORY | frozenset(
    "id ids list target candidate next first positive negative pos neg".split()  # noqa: SIM905
)


@dataclass
class SharedTable:
    """A table and the features that look it up, the first of which named it.

    Attributes:
        reasons: feature → why it shares the table; a feature with its own has none.
        comment: What to know about the number of rows (`choose_size`).
    """

    name: str
    members: list[Finding]
    reasons: dict[str, str] = field(default_factory=dict)
    comment: str = ""

    def choose_size(self, sampled: bool) -> dict:
        """Return `rows` and `out_of_range` for the ids of all features in all parts of the data.

        Args:
            sampled: True if not all rows were read.
        """
        parts, hot = [part for f in self.members for part in f.stats.parts], HotIds()
        for part in parts:
            hot.add(*part.hot.counts())
        distinct = count_distinct(np.unique(np.concatenate([part.hashes for part in parts]))[:SMALLEST])
        low, high = min(p.low for p in parts), max(p.high for p in parts)
        kind = "ordinal" if all(is_ordinal(f.stats) for f in self.members) else "id"
        kind = "text" if any(f.stats.base == "text" for f in self.members) else kind
        rows, out_of_range, self.comment = table_size(low, high, distinct, hot, kind, sampled)
        return {"rows": rows, "out_of_range": out_of_range}


def is_sequence(f: Finding) -> bool:
    """Whether a list is called like what happened, in order."""
    return f.stats.is_list and not HISTORY.isdisjoint(words(f.stats.name))


def find_tables(findings: list[Finding]) -> list[SharedTable]:
    """The tables of sparse features, one feature an id before lists."""
    tables: list[SharedTable] = []
    for f in sorted((f for f in findings if f.kind == "sparse"), key=lambda f: f.stats.is_list):
        telling = _is_telling(f.stats)
        found = [
            (why, share, t)
            for t in tables
            if (why := _why_shared(f, t.members[0], telling))
            for share in [share_of(t.members[0].stats, f.stats)]
        ]
        if found:
            why, _, table = max(found, key=lambda entry: entry[1])
            table.members.append(f)
            table.reasons[f.stats.name] = why
        else:
            tables.append(SharedTable(free_name(f.stats.name, {t.name for t in tables}), [f]))
    return tables


def _why_shared(f: Finding, owner: Finding, telling: bool) -> str | None:
    """Why a feature looks up another one's table, if it should."""
    mine, theirs = f.stats, owner.stats
    nouns = _nouns(mine.name)
    if nouns and nouns == _nouns(theirs.name):
        least = 0.2
    elif telling and len(theirs.hashes) >= 10:
        least = 0.8
    elif not nouns and mine.is_list:  # such as `history`
        least = 0.9
    else:
        return None
    if (mine.base == "text") != (theirs.base == "text") or (share := share_of(mine, theirs)) < least:
        return None
    return f"{100 * share:.0f} % of its values are in {theirs.name}, too"


def _is_telling(s: ColumnStats) -> bool:
    """Whether columns that share such values do so by more than chance: text, and integers with gaps."""
    fills = s.lowest >= 0 and s.highest < SPARSE_FILL * s.distinct
    return (s.base == "text" or not fills) and s.distinct >= 10


@cache
def _nouns(name: str) -> frozenset[str]:
    return frozenset(re.sub(r"(?<=\w\w\w)s$", "", word) for word in words(name) if word not in USE)


def free_name(column: str, taken: set[str]) -> str:
    """Return a name for a table: the column's, without characters that tables or figures cannot have."""
    name = re.sub(r"[^\w\-]+", "_", re.sub(r"(?<=.)([_.][iI][dD]s?|(?<=[a-z])I[dD]s?)$", "", column)).strip(
        "_"
    )
    name = table_name(name or "ids")
    number = 2
    while name in taken:
        name, number = f"{name.removesuffix(f'_{number - 1}')}_{number}", number + 1
    return name
