"""Statistics of Parquet columns for `raytrec inspect`, computed in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, log10

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pandas.util import hash_array

from raytrec.config.base import MAX_AMOUNT
from raytrec.config.schema_parts import Scale, Statistics
from raytrec.data.arrow import is_list, to_plain_array, unnest
from raytrec.data.column_conversion import signed_log
from raytrec.inspection.sketches import MAX_KEPT_HASHES, HotIds, SmallestHashes, count_distinct

MAX_COUNTED_LENGTH = 10_000  # longer bags are counted as bags of this length
MAX_EXACT_VALUES = 64  # maximum number of distinct values that are counted one by one
NUMBERS = frozenset({"integer", "float", "bool", "decimal"})
LOG_SCALE_DEVIATIONS = 10  # distance from the mean, in standard deviations, above which logarithms are used


@dataclass
class ColumnStats:
    """Statistics of a column, or of a field of a struct, in the training data.

    An instance in `stats_by_part` describes the column in validation or test data.

    Attributes:
        name: Name of the column, or of the field as in `user.age`.
        type: Arrow type of the column, as text.
        base: Kind of the values, also inside lists: integer, float, bool, decimal, text, time, null or other.
        is_list: True if the column contains lists.
        is_folder_key: True if the values are in the names of key=value folders.
        types: Arrow type as text → path of the first file with this type.
        mixed: True if values must be cast because files have different types.
        trouble: Reason why the column cannot be used, or None.
        lacking: Reason that names the validation or test files that lack the column, or None.
        rows, values, nulls, nan, infinite: Counts. In a list column, `values`, `nan` and `infinite` count
            elements, and `nulls` counts null lists.
        nulls_inside: Number of nulls inside lists.
        low, high: Lowest and highest finite number; inf and -inf if there are none.
        whole: True if no number has a fraction.
        few: Value → number of occurrences; None if there are more than MAX_EXACT_VALUES distinct values, and in
            `stats_by_part`.
        lengths: Number of lists of each length, int64 [MAX_COUNTED_LENGTH + 1]; empty without lists.
        pairs: Label → value → the label's only value in rows with this value; None instead of the inner mapping
            if the label has several values for one value, or cannot be compared (`pair_with_labels`).
        stats_by_part: Name of validation or test data that has the column → statistics of the column there.
        hot: Counters of the most frequent whole numbers, or of the most frequent SipHash hashes of text.
        moments: float64 [5]: number of numbers x; sum and sum of squares of x − `first`; sum and sum of squares
            of signed_log(x).
        first: First number, which is subtracted for accuracy; None if the column contains no numbers.
        smallest: Smallest hashes of the distinct values.
    """

    name: str
    type: str
    base: str
    is_list: bool
    is_folder_key: bool = False
    types: dict[str, str] = field(default_factory=dict)
    mixed: bool = False
    trouble: str | None = None
    lacking: str | None = None
    rows: int = 0
    values: int = 0
    nulls: int = 0
    nulls_inside: int = 0
    nan: int = 0
    infinite: int = 0
    low: float = np.inf
    high: float = -np.inf
    whole: bool = True
    few: dict | None = field(default_factory=dict)
    lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    pairs: dict[str, dict | None] = field(default_factory=dict)
    stats_by_part: dict[str, ColumnStats] = field(default_factory=dict)
    hot: HotIds = field(init=False, default_factory=HotIds)
    moments: np.ndarray = field(init=False, default_factory=lambda: np.zeros(5))
    first: float | None = field(init=False, default=None)
    smallest: SmallestHashes = field(init=False, default_factory=SmallestHashes)

    @property
    def hashes(self) -> np.ndarray:
        """Return the smallest hashes of the distinct values in training data, uint64, ascending."""
        return self.smallest.values()

    @property
    def parts(self) -> list[ColumnStats]:
        """Return this instance for the training data, then the statistics in validation and test data."""
        return [self, *self.stats_by_part.values()]

    def count(self, what: str) -> int:
        """Return the sum of a count, such as `nulls` or `nan`, over training, validation and test data (`parts`)."""
        return sum(getattr(part, what) for part in self.parts)

    def count_missing(self) -> int:
        """Return the number of nulls and NaN in training, validation and test data."""
        return self.count("nulls") + self.count("nan")

    @property
    def lowest(self) -> float:
        """Return the lowest finite number in training, validation and test data; inf if there is none."""
        return min(part.low for part in self.parts)

    @property
    def highest(self) -> float:
        """Return the highest finite number in training, validation and test data; -inf if there is none."""
        return max(part.high for part in self.parts)

    @property
    def distinct(self) -> int:
        """Return the number of distinct values in training data, exact below 65,536 and otherwise estimated."""
        return count_distinct(self.hashes)

    def statistics(self) -> Statistics:
        """Return the statistics of a sparse feature in training data, from which the planner estimates lookups."""
        rows, lengths = max(1, self.rows), self.lengths
        p99, longest = 1, 1
        if self.is_list:
            p99 = int(np.searchsorted(np.cumsum(lengths), 0.99 * lengths.sum())) if len(lengths) else 0
            longest = int(np.flatnonzero(lengths)[-1]) if len(lengths) else 0
        return Statistics(
            mean_length=float(f"{self.values / rows:.5g}"),
            p99_length=p99,
            max_length=longest,
            distinct=self.distinct,
            hottest=self.hot.shares(),
        )

    @property
    def is_whole(self) -> bool:
        """Return True for integers, and for floats and decimals that are finite and whole; NaN is ignored."""
        if self.base not in ("float", "decimal"):
            return self.base == "integer"
        return all(part.whole for part in self.parts) and not self.count("infinite")

    @property
    def is_probability(self) -> bool:
        """Return True for a column of numbers, not lists, whose finite numbers are all in [0, 1]."""
        return self.base in NUMBERS and not self.is_list and 0 <= self.lowest <= self.highest <= 1

    @property
    def distinct_text(self) -> str:
        """Return the number of distinct values in training data as text, such as 1,200; ~ marks an estimate."""
        return f"{'' if len(self.hashes) < MAX_KEPT_HASHES else '~'}{self.distinct:,}"

    @property
    def is_unique(self) -> bool:
        """Return True if a column without lists has more than 100 values, and (almost) no value occurs twice.

        If the number of distinct values is an estimate, at least 98 % of the values must be distinct.
        """
        least = self.values if len(self.hashes) < MAX_KEPT_HASHES else 0.98 * self.values
        return not self.is_list and self.values > 100 and self.distinct >= least

    @property
    def range_text(self) -> str:
        """Return the range of the numbers in training data as text; "" for times and if there are no numbers."""
        return f"{self.low:.10g} to {self.high:.10g}" if self.low <= self.high and self.base != "time" else ""

    def add(self, column) -> None:
        """Add the values of the column in a row group (pyarrow.ChunkedArray) to the statistics."""
        array = to_plain_array(column)
        self.rows += len(array)
        self.nulls += array.null_count
        if is_list(array.type):
            lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
            counts = np.bincount(np.minimum(lengths, MAX_COUNTED_LENGTH), minlength=MAX_COUNTED_LENGTH + 1)
            self.lengths = self.lengths + counts if len(self.lengths) else counts
            _, array = unnest(array)
            self.nulls_inside += array.null_count
        array = array.drop_null()
        self.values += len(array)
        if len(array):
            self._count(array)

    def _count(self, array) -> None:
        """Add values (pyarrow.Array without nulls) to the range, counts, moments and hashes."""
        array = to_comparable(array, self.base, self.mixed)
        if pa.types.is_floating(array.type):
            finite = pc.is_finite(array)
            nan = pc.sum(pc.is_nan(array)).as_py()
            self.nan += nan
            self.infinite += len(array) - pc.sum(finite).as_py() - nan
            array = array.filter(finite)
        unique, counts = pc.value_counts(array).flatten()
        if self.few is not None and len(unique) <= MAX_EXACT_VALUES:
            for value, count in zip(unique.to_pylist(), counts.to_pylist(), strict=True):
                self.few[value] = self.few.get(value, 0) + count
        if max(len(unique), len(self.few or ())) > MAX_EXACT_VALUES:
            self.few = None
        if len(unique):
            self._count_distinct(unique, counts)

    def _count_distinct(self, unique, counts) -> None:
        values = unique.to_numpy(zero_copy_only=False)
        if self.base == "text":
            values = values.astype(object)
        else:
            self.low = min(self.low, values.min().item())
            self.high = max(self.high, values.max().item())
            self.whole &= values.dtype.kind in "iu" or bool((values == np.floor(values)).all())
            self._add_moments(values.astype(np.float64), counts.to_numpy())
            values = _as_integers(values)
        hashes = hash_array(values)
        if self.whole:
            self.hot.add(hashes if self.base == "text" else values.view(np.uint64), counts.to_numpy())
        self.smallest.add(hashes)

    @np.errstate(over="ignore", invalid="ignore")  # scale() uses logarithms if a moment is infinite
    def _add_moments(self, values: np.ndarray, counts: np.ndarray) -> None:
        self.first = float(values[0]) if self.first is None else self.first
        apart, logs = values - self.first, signed_log(values)
        powers = np.stack([np.ones_like(values), apart, apart**2, logs, logs**2])
        self.moments += powers @ counts

    @np.errstate(over="ignore", invalid="ignore")
    def scale(self) -> Scale:
        """Return the scale that maps the numbers in training data to mean 0 and variance 1.

        A constant is mapped to 0. Without numbers, the scale has mean 0 and std 1. Logarithms are scaled instead if
        a number is more than LOG_SCALE_DEVIATIONS standard deviations from the mean, or if the standard deviation
        exceeds MAX_AMOUNT or overflows. `nulls` is mean if there are nulls or NaN in any data, else error.
        """
        count, apart, squares, logs, log_squares = self.moments
        nulls = "mean" if self.count_missing() else "error"
        if not count:
            return Scale(nulls=nulls)
        mean, std = apart / count, max(squares / count - (apart / count) ** 2, 0.0) ** 0.5  # may be NaN
        ends = np.array([self.low, self.high]) - self.first
        log = bool(not std <= MAX_AMOUNT or (std and np.abs(ends - mean).max() > LOG_SCALE_DEVIATIONS * std))
        if log:
            mean, std = logs / count, max(0.0, log_squares / count - (logs / count) ** 2) ** 0.5
        else:
            mean += self.first
        std = float(f"{std:.6g}") or 1.0
        # The mean is rounded to the same decimal place as the standard deviation, which has six digits.
        return Scale(mean=round(float(mean), 5 - floor(log10(std))), std=std, log=log, nulls=nulls)


def undo_log(values: np.ndarray) -> np.ndarray:
    """Return each x whose logarithm sign(x) · ln(1 + |x|) (`log` of a scale) is in `values`; magnitudes up to e^700."""
    return np.sign(values) * np.expm1(np.abs(values).clip(max=700))


def _as_integers(values: np.ndarray) -> np.ndarray:
    """Return numbers as int64; floats that have a fraction or do not fit are represented by their bits.

    Equal numbers of different types therefore have equal hashes.
    """
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    values = values.astype(np.float64)
    whole = (values == np.floor(values)) & (np.abs(values) < 2**63)
    return np.where(whole, np.where(whole, values, 0).astype(np.int64), values.view(np.int64))


def to_comparable(array, base: str, mixed: bool):
    """Return a column's values in a type common to all files, given ColumnStats.base and ColumnStats.mixed."""
    if base == "time":
        return array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64())
    if base == "decimal" or (mixed and base != "text"):
        return array.cast(pa.float64(), safe=False)
    if base == "bool":
        return array.cast(pa.int8())
    if pa.types.is_fixed_size_binary(array.type):
        return array.cast(pa.binary())
    return array.cast(pa.string()) if mixed else array


def pair_with_labels(column: ColumnStats, data: Mapping[str, pa.ChunkedArray], labels: Sequence[ColumnStats]) -> None:
    """Add the pairs (value, label value) of a row group's rows to the column's `pairs`.

    The entry of a label in `pairs` becomes None if the label has several values for one value of the column, or
    the column cannot be read, or either column contains lists or has more than MAX_EXACT_VALUES distinct values.

    Args:
        column: Statistics of the column whose values are paired; `pairs` is changed.
        data: Column name → values in the row group.
        labels: Statistics of the labels with which the column is paired.
    """
    for label in labels:
        pairs = column.pairs.setdefault(label.name, {})
        if pairs is None or label.name == column.name:
            continue
        both = (column, label)
        if column.trouble or column.is_list or label.is_list or any(s.few is None for s in both):
            column.pairs[label.name] = None
            continue
        (left, left_N), (right, right_N) = (_encode_values(s, data[s.name]) for s in both)
        codes = np.unique(left_N.astype(np.int64) * len(right) + right_N)
        for value, of_label in ((left[code // len(right)], right[code % len(right)]) for code in codes):
            if pairs.setdefault(value, of_label) != of_label:
                column.pairs[label.name] = None
                break


def _encode_values(s: ColumnStats, data: pa.ChunkedArray) -> tuple[list, np.ndarray]:
    """Return the distinct values of a column, with None for null and NaN, and the index of each row's value."""
    coded = to_comparable(to_plain_array(data), s.base, s.mixed).dictionary_encode(null_encoding="encode")
    values = [None if value != value else value for value in coded.dictionary.to_pylist()]
    return values, coded.indices.to_numpy()
