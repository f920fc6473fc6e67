"""Compare a service's log with the scores of its export, and the log's distributions with those of training data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, sqrt
from typing import Any

import numpy as np
from rich.table import Table

from raytrec.common.errors import DataError, RunError
from raytrec.common.formatting import format_count, format_percent
from raytrec.common.storage import make_absolute
from raytrec.common.terminal import open_console, to_bold_text, to_plain_text
from raytrec.config.schema import Schema
from raytrec.scoring.load import load
from raytrec.scoring.scorer import TOLERANCE
from raytrec.skew.samples import NO_VERSION, RowSample, group_by_version, read_rows

SAMPLE_ROWS = 50_000  # default number of rows to sample from the log, and from the training data
MODERATE_PSI, LARGE_PSI = 0.1, 0.25  # psi above which a change is moderate or large (source: see `psi`)
DECILES = 10  # bins for comparing numbers, bounded by the deciles of the training data
NUM_TOP_IDS = 20  # the most frequent ids of the training data get separate bins; all other ids share a bin
LENGTH_BOUNDS = np.array([0, 1, 2, 4, 8, 16, 32, 64, 128, 256])  # upper bounds of bins for bag lengths


@dataclass(frozen=True)
class ColumnDifference:
    """Difference between a column in the log and in the training data, according to one measure.

    Attributes:
        column: Name of a dense column, feature or score.
        measure: Name of the measure: values, nulls, scores, ids, unseen ids, ids out of range, ids without a row
            or length.
        psi: Population stability index; see the function `psi`.
        chance: Value that psi exceeds by chance once in a thousand comparisons of equal distributions.
        log: Name → value, for summary statistics of the log, such as mean or share.
        training: The same statistics of the training data.
    """

    column: str
    measure: str
    psi: float
    chance: float
    log: dict[str, float]
    training: dict[str, float]

    @property
    def differs(self) -> bool:
        """Return True if psi exceeds MODERATE_PSI and cannot be explained by chance."""
        return self.psi > max(MODERATE_PSI, self.chance)


@dataclass(frozen=True)
class Skew:
    """Result of `skew`.

    Attributes:
        metrics: name (the version), rows, requests, other_versions (version → rows of the log), rescored (score column
            → max and mean of relative differences, and share above TOLERANCE), data_rows, columns (all measures;
            measures that differ come first, then by descending psi), differs (names of score columns and measures
            that differ), undecided (names of measures for which the samples cannot distinguish even a large change
            from chance), needed (number of requests, and of training rows, that suffices for these measures; 0 if
            there are none).
        measures: Measures in the order of `metrics["columns"]`.
    """

    metrics: dict[str, Any]
    measures: list[ColumnDifference]

    def show(self) -> None:
        """Print the names of the differences, followed by tables, to stdout."""
        metrics, console = self.metrics, open_console()
        console.print(to_plain_text(f"differences  {', '.join(metrics['differs']) or 'none'}"), soft_wrap=True)
        if metrics["undecided"]:
            sizes = f"{format_count(metrics['requests'], 'request')} and {metrics['data_rows']:,} training rows"
            text = f"undecided    {len(metrics['undecided'])} of {format_count(len(self.measures), 'measure')}: {sizes}"
            console.print(f"{text}; a verdict needs at least {metrics['needed']:,} of each", soft_wrap=True)
        rows = f"{format_count(metrics['rows'], 'row')} of {format_count(metrics['requests'], 'request')}"
        console.print(to_bold_text(metrics["name"]), soft_wrap=True)
        for version, count in metrics["other_versions"].items():
            console.print(to_plain_text(f"not compared: {format_count(count, 'row')} of {version}"), soft_wrap=True)
        table = Table("score", "largest", "mean", f"above {TOLERANCE:g}", title_justify="left")
        table.title = to_plain_text(f"{rows}: differences from the scores of the export")
        for name, each in metrics["rescored"].items():
            table.add_row(
                to_plain_text(name), f"{each['max']:.2g}", f"{each['mean']:.2g}", format_percent(each["share"])
            )
        console.print(table)
        if self.measures:
            console.print(self._tabulate_columns(rows))

    def _tabulate_columns(self, rows: str) -> Table:
        """Return a table of all measures that differ, and of the measure with the largest psi of each other column."""
        table = Table("", "column", "measure", "psi", "log", "training", title_justify="left")
        for column in table.columns:  # narrow terminals wrap names and values
            column.no_wrap, column.overflow = column.header in ("", "psi"), "fold"
        table.title = to_plain_text(f"{rows}, compared with {self.metrics['data_rows']:,} training rows")
        listed: set[str] = set()
        for diff in self.measures:
            if diff.differs or diff.column not in listed:
                texts = (to_plain_text(_format_figures(figures)) for figures in (diff.log, diff.training))
                verdict = "differs" if diff.differs else ""
                table.add_row(verdict, to_plain_text(diff.column), diff.measure, f"{diff.psi:.3f}", *texts)
            listed.add(diff.column)
        return table


def skew(log: str, export: str, *, data: str | None = None, rows: int = SAMPLE_ROWS, allow_code: bool = False) -> Skew:
    """Compare a log of `raytrec serve --log-requests` with the export that served it and, optionally, training data.

    The export scores a sample of the log's rows again. A score that differs from the log shows that the service
    deviates from the export. With `data`, the distributions of the log's columns and scores are compared with those
    of a sample of the training data, which the export also reads and scores.

    Args:
        log: Folder of the log; local, s3:// or gs://. Rows of other versions are only counted.
        export: Folder of the export.
        data: Parquet file, or folder of Parquet files, with training data; None: distributions are not compared.
        rows: Maximum number of rows to sample from the log, and from the training data; at least 1.
        allow_code: If True, transforms of the export may execute Python code.

    Raises:
        RunError: The log contains no rows of the export's version, or the export cannot be loaded.
        ConfigError: As for `raytrec.load`.
        DataError: A path or store is invalid or cannot be reached, there are no Parquet files or no training rows, or a
            file or a row is invalid.
    """
    scorer = load(export, allow_code=allow_code)
    version, groups = scorer.manifest.version, group_by_version(make_absolute(log), "LOG")
    others = {name: sum(g.rows for g in parts) for name, parts in groups.items() if name != version}
    if version not in groups:
        has_version = bool(others.keys() - {NO_VERSION})
        raise RunError(
            "the log contains no rows of this export",
            where=log,
            expected=f"rows of {version} (versions in the log: {', '.join(sorted(others)) or 'none'})",
            do=f"pass {'the --export URI of a version in the log, or ' * has_version}the log of this export's service",
        )
    logged, measures, data_rows, scale = read_rows(scorer, groups[version], rows, logged=True), [], 0, 0.0
    if data:
        training = [group for each in group_by_version(make_absolute(data), "--data").values() for group in each]
        if not training:
            raise DataError("the files have no rows", where=f"--data {data}", expected="the rows of the training data")
        trained = read_rows(scorer, training, rows, logged=False)
        compared = _Comparison(logged, trained).measures(scorer.reader.form.schema)
        measures, data_rows = sorted(compared, key=lambda m: (not m.differs, -m.psi)), trained.rows
        # `chance` is proportional to 1/n + 1/m, and equals LARGE_PSI if n = m = chance · scale.
        scale = 2 / LARGE_PSI / (1 / logged.independent_values + 1 / trained.independent_values)
    rescored = {n: _compare_scores(values, logged.rescored[n]) for n, values in logged.scores.items()}
    undecided = [each for each in measures if each.chance > LARGE_PSI and not each.differs]
    differs = [f"{name} (scored again)" for name, each in rescored.items() if each["share"]]
    metrics = {
        "name": version,
        "rows": logged.rows,
        "requests": logged.requests,
        "other_versions": others,
        "rescored": rescored,
        "data_rows": data_rows,
        "columns": [vars(each) | {"differs": each.differs} for each in measures],
        "differs": differs + [f"{each.column} ({each.measure})" for each in measures if each.differs],
        "undecided": [f"{each.column} ({each.measure})" for each in undecided],
        "needed": ceil(scale * max((each.chance for each in undecided), default=0)),
    }
    return Skew(metrics, measures)


def _compare_scores(logged_N: np.ndarray, rescored_N: np.ndarray) -> dict[str, float]:
    differences_N = np.abs(logged_N - rescored_N) / np.maximum(1, np.abs(rescored_N))
    differences_N[np.isnan(logged_N) & np.isnan(rescored_N)] = 0
    differences_N = np.nan_to_num(differences_N, nan=1.0)
    return {
        "max": float(differences_N.max()),
        "mean": float(differences_N.mean()),
        "share": float((differences_N > TOLERANCE).mean()),
    }


class _Comparison:
    """Comparison of the columns and scores in a sample of the log with those in a sample of the training data."""

    def __init__(self, log: RowSample, training: RowSample):
        self._sides = log, training

    def measures(self, schema: Schema) -> Iterator[ColumnDifference]:
        """Yield all measures of the columns in a schema, and of the scores."""
        for place, name in enumerate(schema.dense):
            yield self._measure_numbers(name, "values", [each.dense[:, place] for each in self._sides])
            yield self._measure_nulls(name)
        for name, spec in schema.sparse.items():
            yield from self._measure_ids(name, "without a row" if schema.tables[spec.table].ids else "out of range")
            yield self._measure_nulls(name)
        for name in self._sides[0].scores:
            yield self._measure_numbers(name, "scores", [each.scores[name] for each in self._sides])

    def _measure(self, column: str, measure: str, counts: Any, figures: Any) -> ColumnDifference:
        log_B, expected_B = counts
        is_used_B = log_B + expected_B > 0  # other bins would only add half a count to each sample
        by_chance = estimate_chance_psi(int(is_used_B.sum()), *(each.independent_values for each in self._sides))
        return ColumnDifference(column, measure, psi(log_B[is_used_B], expected_B[is_used_B]), by_chance, *figures)

    def _measure_numbers(self, column: str, measure: str, values: list[np.ndarray]) -> ColumnDifference:
        """Compare the numbers of log and training data in bins bounded by the deciles of the training data."""
        bounds = np.unique(np.quantile(values[1], np.linspace(0, 1, DECILES + 1)))
        return self._measure(
            column, measure, [_count_in_bins(each, bounds) for each in values], map(_describe_values, values)
        )

    def _measure_share(self, column: str, measure: str, shares: list[float]) -> ColumnDifference:
        """Compare a share of the log's rows or lookups with the share in, or predicted from, the training data."""
        counts = [np.array([s, 1 - s]) * each.rows for s, each in zip(shares, self._sides, strict=True)]
        return self._measure(column, measure, counts, [{"share": share} for share in shares])

    def _measure_nulls(self, column: str) -> ColumnDifference:
        return self._measure_share(column, "nulls", [each.nulls[column] / each.rows for each in self._sides])

    def _measure_ids(self, feature: str, odd: str) -> Iterator[ColumnDifference]:
        sides = self._sides
        logged_N, expected_M = ids = [each.ids[feature] for each in sides]
        training_ids, id_counts = np.unique(expected_M, return_counts=True)
        top = training_ids[np.argsort(-id_counts, kind="stable")[:NUM_TOP_IDS]]
        top_counts = [np.array([(each == one).sum() for one in top], np.int64) for each in ids]
        counts = [np.append(of, len(each) - of.sum()) for of, each in zip(top_counts, ids, strict=True)]
        tops = [{f"top {NUM_TOP_IDS}": 1 - each[-1] / max(1, each.sum())} for each in counts]
        yield self._measure(feature, "ids", counts, tops)
        # The share of ids that occur once predicts the share of unseen ids among further lookups (I. J. Good,
        # "The population frequencies of species", 1953).
        once = float((id_counts == 1).sum()) / max(1, len(expected_M))
        unseen = float((~np.isin(logged_N, training_ids)).sum() / max(1, len(logged_N)))
        yield self._measure_share(feature, "unseen ids", [unseen, once])
        shares = [each.odd_lookups[feature] / max(1, len(each.ids[feature])) for each in sides]
        yield self._measure_share(feature, f"ids {odd}", shares)
        lengths = [each.lengths[feature] for each in sides]
        figures = [{"mean": float(n.mean()), "empty": float((n == 0).mean())} for n in lengths]
        yield self._measure(feature, "length", [_count_in_bins(n, LENGTH_BOUNDS) for n in lengths], figures)


def _count_in_bins(values_N: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return the number of values in each bin; the last bin is above all bounds. Upper bounds are inclusive."""
    return np.bincount(np.searchsorted(bounds, values_N), minlength=len(bounds) + 1)


def psi(observed_B: np.ndarray, expected_B: np.ndarray) -> float:
    """Return the population stability index Σ (p − q) ln(p / q) of two samples, counted in the same bins.

    The sum is over the bins; p and q are the shares of a bin in the first and second sample.
    The index is the symmetric divergence of Jeffreys ("An invariant form for the prior probability in
    estimation problems", 1946). Its name and the bounds 0.1 and 0.25 are from N. Siddiqi, "Credit Risk
    Scorecards" (2006). Half a count is added to each bin, so that empty bins do not make the index infinite.

    Args:
        observed_B: Counts of the first sample, [bins].
        expected_B: Counts of the second sample, [bins].
    """
    p_B, q_B = ((each + 0.5) / (each.sum() + 0.5 * len(each)) for each in (observed_B, expected_B))
    return float(((p_B - q_B) * np.log(p_B / q_B)).sum())


def estimate_chance_psi(bins: int, first_count: int, second_count: int) -> float:
    """Return the psi that two samples from one distribution exceed with a probability of 0.001.

    For samples of n and m values, psi ÷ (1/n + 1/m) is approximately χ² with bins − 1 degrees of freedom
    (B. Yurdakul, "Statistical properties of population stability index", 2018). The quantile is approximated as in
    Wilson and Hilferty ("The distribution of chi-square", 1931).

    Args:
        bins: Number of non-empty bins.
        first_count: Number of independent values in the first sample.
        second_count: Number of independent values in the second sample.
    """
    k, z = max(1, bins - 1), 3.09  # degrees of freedom; 0.999 quantile of the standard normal distribution
    quantile = k * (1 - 2 / (9 * k) + z * sqrt(2 / (9 * k))) ** 3
    return quantile * (1 / max(1, first_count) + 1 / max(1, second_count))


def _describe_values(values_N: np.ndarray) -> dict[str, float]:
    low, middle, high = np.quantile(values_N, (0.05, 0.5, 0.95)).tolist()
    return {"mean": float(values_N.mean()), "std": float(values_N.std()), "5%": low, "50%": middle, "95%": high}


def _format_figures(figures: dict[str, float]) -> str:
    if "share" in figures:
        return format_percent(figures["share"])
    shares = {"empty", f"top {NUM_TOP_IDS}"}
    return ", ".join(
        f"{name} {format_percent(value) if name in shares else f'{value:.4g}'}" for name, value in figures.items()
    )
