"""`raytrec skew`: whether a service scores as its export does, and sees what training saw."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from raytrec.common.errors import RunError
from raytrec.common.formatting import percent
from raytrec.common.storage import absolute
from raytrec.common.terminal import bold, open_console, plain
from raytrec.scoring.load import load
from raytrec.scoring.scorer import TOLERANCE, Scorer
from raytrec.skew.distributions import LENGTHS, MODERATE, TOP, chance, in_bins, of_ids, of_numbers, psi
from raytrec.skew.rows import RowStats, find_groups, read_rows

SAMPLE_ROWS = 50_000  # of the log and of the data that are looked at


@dataclass(frozen=True)
class Measure:
    """One way in which a column of the log may differ from training.

    Attributes:
        psi: see distributions.psi. chance: what it exceeds once in a thousand times without a difference.
        log, training: what it was of: figures by name.
    """

    column: str
    measure: str
    psi: float
    chance: float
    log: dict[str, float]
    training: dict[str, float]

    @property
    def differs(self) -> bool:
        """Whether it is more than chance, and worth a look."""
        return self.psi > max(MODERATE, self.chance)


@dataclass(frozen=True)
class Skew:
    """What `skew` has found.

    Attributes:
        metrics: name (the version), rows, requests, other_versions (version → rows of the log), rescored
            (column → max, mean and share of the differences), data_rows, columns (all measures, those first
            that differ most), differs (what differs, in that order).
        measures: the same as `columns`.
    """

    metrics: dict[str, Any]
    measures: list[Measure]

    def show(self) -> None:
        """Print the verdict, then tables, to stdout."""
        metrics, console = self.metrics, open_console()
        console.print(plain(f"differs      {', '.join(metrics['differs']) or 'nothing'}"), soft_wrap=True)
        rows = f"{metrics['rows']:,} rows of {metrics['requests']:,} requests"
        console.print(bold(metrics["name"]), soft_wrap=True)
        for version, count in metrics["other_versions"].items():
            console.print(plain(f"not compared: {count:,} rows of {version}"), soft_wrap=True)
        again = Table("score", "largest", "mean", f"beyond {TOLERANCE:g}", title_justify="left")
        again.title = plain(f"{rows}, scored again by the export: differences")
        for name, each in metrics["rescored"].items():
            again.add_row(plain(name), f"{each['max']:.2g}", f"{each['mean']:.2g}", percent(each["share"]))
        console.print(again)
        if self.measures:
            console.print(self._of_columns(rows))

    def _of_columns(self, rows: str) -> Table:
        """Return a table of what differs, and of the nearest measure of each other column."""
        table = Table("", "column", "what", "psi", "log", "training", title_justify="left")
        for column in table.columns:  # on narrow terminals, names and figures are wrapped
            column.no_wrap, column.overflow = column.header in ("", "psi"), "fold"
        table.title = plain(f"{rows}, and {self.metrics['data_rows']:,} of training")
        shown: set[str] = set()
        for each in self.measures:
            if each.differs or each.column not in shown:
                texts = (plain(_text(figures)) for figures in (each.log, each.training))
                verdict = "differs" if each.differs else ""
                table.add_row(verdict, plain(each.column), each.measure, f"{each.psi:.3f}", *texts)
            shown.add(each.column)
        return table


def skew(
    log: str, export: str, *, data: str | None = None, rows: int = SAMPLE_ROWS, allow_code: bool = False
) -> Skew:
    """Compares a log of `raytrec serve --log-requests` with the export that answered, and with training data.

    The log's rows are scored again: a difference means that the service has not done what the export does.
    Its columns and scores are compared with those of training data, as the export reads and scores them.

    Args:
        log: its folder; local, s3:// or gs://. Rows of other versions are counted.
        data: folder or file of Parquet that the model was trained with; None: columns are not compared.
        rows: of the log, and of the data, about so many are looked at, from places all over them.
        allow_code: transforms of the export may name code.

    Raises:
        RunError: the log has no rows of the export, or the export cannot be loaded. DataError: what is wrong
            with a file or a row.
    """
    scorer = load(export, allow_code=allow_code)
    version, groups = scorer.manifest.version, find_groups(absolute(log), "LOG")
    others = {name: sum(g.rows for g in found) for name, found in groups.items() if name != version}
    if version not in groups:
        raise RunError(
            "the log has no rows of this export",
            where=log,
            expected=f"rows of {version}; it has {', '.join(sorted(others))}",
            do="--export URI of a version that is in the log",
        )
    served, measures, trained = read_rows(scorer, groups[version], rows, logged=True), [], RowStats()
    if data:
        found = [group for each in find_groups(absolute(data), "--data").values() for group in each]
        trained = read_rows(scorer, found, rows, logged=False)
        measures = sorted(
            _Comparison(served, trained).measures(scorer), key=lambda m: (not m.differs, -m.psi)
        )
    rescored = {name: _differences(np.concatenate(off)) for name, off in served.off.items()}
    differs = [f"{name} (scored again)" for name, each in rescored.items() if each["share"]]
    metrics = {
        "name": version,
        "rows": served.rows,
        "requests": len(served.requests),
        "other_versions": others,
        "rescored": rescored,
        "data_rows": trained.rows,
        "columns": [vars(each) | {"differs": each.differs} for each in measures],
        "differs": differs + [f"{each.column} ({each.measure})" for each in measures if each.differs],
    }
    return Skew(metrics, measures)


def _differences(off_N: np.ndarray) -> dict[str, float]:
    return {
        "max": float(off_N.max()),
        "mean": float(off_N.mean()),
        "share": float((off_N > TOLERANCE).mean()),
    }


class _Comparison:
    """Measures of the log's rows against those of training."""

    def __init__(self, served: RowStats, trained: RowStats):
        self._served, self._trained = served, trained

    def measures(self, scorer: Scorer) -> Iterator[Measure]:
        """All of them."""
        schema, served, trained = scorer.reader.form.schema, self._served, self._trained
        dense = np.concatenate(served.dense), np.concatenate(trained.dense)
        for place, name in enumerate(schema.dense):
            yield self._numbers(name, "values", *(each[:, place] for each in dense))
            yield self._nulls(name)
        for name in schema.sparse:
            yield from self._ids(name, managed=bool(schema.tables[schema.sparse[name].table].ids))
            yield self._nulls(name)
        for name, values in served.scores.items():
            yield self._numbers(name, "scores", np.concatenate(values), np.concatenate(trained.scores[name]))

    def _measure(self, column: str, measure: str, counts: Any, log: Any, training: Any) -> Measure:
        found_B, expected_B = counts
        bins = int(((found_B + expected_B) > 0).sum())
        by_chance = chance(bins, self._served.independent, self._trained.independent)
        return Measure(column, measure, psi(found_B, expected_B), by_chance, log, training)

    def _numbers(self, column: str, measure: str, found_N: np.ndarray, expected_M: np.ndarray) -> Measure:
        counts = of_numbers(found_N, expected_M)
        return self._measure(column, measure, counts, _figures(found_N), _figures(expected_M))

    def _share(self, column: str, measure: str, found: float, expected: float) -> Measure:
        """A share of the log's rows or lookups, and of training's."""
        rows = self._served.rows, self._trained.rows
        counts = (np.array([s, 1 - s]) * n for s, n in zip((found, expected), rows, strict=True))
        return self._measure(column, measure, counts, {"share": found}, {"share": expected})

    def _nulls(self, column: str) -> Measure:
        served, trained = self._served, self._trained
        shares = (each.nulls[column] / each.rows for each in (served, trained))
        return self._share(column, "nulls", *shares)

    def _ids(self, feature: str, managed: bool) -> Iterator[Measure]:
        sides = self._served, self._trained
        found, expected = (each.ids[feature] for each in sides)
        counts = of_ids(found, expected)
        top = ({f"top {TOP}": 1 - c[-1] / max(1, c.sum())} for c in counts)
        yield self._measure(feature, "ids", counts, *top)
        unseen = found.counts[expected.count(found.ids) == 0].sum() / max(1, found.total)
        yield self._share(feature, "unseen ids", float(unseen), expected.unseen())
        odd = (each.odd[feature] / max(1, each.ids[feature].total) for each in sides)
        yield self._share(feature, "ids without a row" if managed else "ids out of range", *odd)
        lengths = [np.concatenate(each.lengths[feature]) for each in sides]
        figures = ({"mean": float(n.mean()), "empty": float((n == 0).mean())} for n in lengths)
        yield self._measure(feature, "length", [in_bins(n, LENGTHS) for n in lengths], *figures)


def _figures(values_N: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(values_N, (0.05, 0.5, 0.95)).tolist()
    return {
        "mean": float(values_N.mean()),
        "std": float(values_N.std()),
        "5%": low,
        "50%": middle,
        "95%": high,
    }


def _text(figures: dict[str, float]) -> str:
    if "share" in figures:
        return percent(figures["share"])
    shares = {"empty", f"top {TOP}"}
    return ", ".join(
        f"{name} {percent(value) if name in shares else f'{value:.4g}'}" for name, value in figures.items()
    )
