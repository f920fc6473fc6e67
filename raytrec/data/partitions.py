"""Folders named key=value (Hive's layout): their order, and a range of them."""

from __future__ import annotations

import re

from raytrec.common.errors import DataError

Between = tuple[str | None, str | None]  # first and last partition, both included; None: no bound
ALL: Between = (None, None)


def in_order(path: str) -> list[tuple]:
    """Sorts paths as text, and the values of key=value folders that are whole numbers as numbers."""
    return [_rank(part) for part in path.split("/")]


def _rank(part: str) -> tuple:
    key, equals, value = part.partition("=")
    return (key, 0, int(value), "") if equals and value.isdigit() else (key, 1, 0, value if equals else "")


def within(paths: list[str], root: str, between: Between, uri: str) -> list[str]:
    """The paths whose partition is in a range.

    A bound names the first partition keys, or all: `date=2026-11-07` as the last takes in its every hour.

    Args:
        paths: of files below `root`.
        uri: the folder's name in messages.

    Raises:
        DataError: a bound that does not name the folders' keys, or nothing between the bounds.
    """
    first, last = (in_order(_checked(bound)) if bound else [] for bound in between)
    chosen = []
    for path in paths:
        partition = "/".join(part for part in path.removeprefix(root).split("/") if "=" in part)
        ranks = in_order(partition)
        for rank, bound in ((first, between[0]), (last, between[1])):
            if [key for key, *_ in rank] != [key for key, *_ in ranks[: len(rank)]]:
                raise DataError(
                    f"a file's partition is {partition or 'none'}; data.partitions says {bound}",
                    where=path,
                    expected="folders key=value with data.partitions's keys, from the outermost on",
                    do="correct data.partitions, or remove files that are not in such folders",
                )
        if first <= ranks[: len(first)] and ranks[: len(last)] <= last:
            chosen.append(path)
    if not chosen:
        raise DataError(
            f"no partition between {between[0] or 'the first'} and {between[1] or 'the last'}",
            where=f"data.partitions, {uri}",
            expected=f"some of the {len(paths)} files there, such as {paths[0].removeprefix(root)}",
        )
    return chosen


def _checked(bound: str) -> str:
    parts = bound.strip("/").split("/")
    if not all(re.fullmatch(r"[^=/]+=[^=/]+", part) for part in parts):
        raise DataError(
            f"'{bound}' is not a partition",
            where="data.partitions",
            expected="key=value, or several with / between them: date=2026-11-07/hour=11",
        )
    return "/".join(parts)
