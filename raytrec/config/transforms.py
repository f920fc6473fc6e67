"""The entries of data.transforms, which change columns before the schema reads them (data/transform.py).

    transforms:
      - {do: fill_null, columns: [price], value: 0}
      - {do: clip, columns: [price], low: 0, high: 1000}
      - {do: log, columns: [price]}
      - {do: bucketize, columns: [age], boundaries: [18, 30, 50], into: [age_bucket]}
      - {do: hash, columns: [city], rows: 5000}
      - {do: lookup_vocabulary, columns: [film], vocabulary: films.txt, unknown: 0}
      - {do: binarize, columns: [rating], at_least: 4, into: [label]}
      - {do: date_part, columns: [seen_at], part: hour, into: [hour]}
      - {do: age, columns: [joined], until_column: seen_at, unit: days}
      - {do: decay, columns: [age], half_life: 30, floor: 0.1, into: [recency]}
      - {do: cast, columns: [zip], to: int64}
      - {do: drop_null, columns: [tags]}
      - {do: sample, column: negatives, count: 100, exclude: [item, history]}
      - {do: "mine.features:ratio", reads: [clicks, views], writes: [ratio], options: {smooth: 10}}

Read tasks run the transforms in order, on whole Arrow columns. Numbers inside lists are treated like numbers
in plain columns. Columns are named as in a schema: `user.joined` is a field of a struct.
"""

from __future__ import annotations

from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, JsonValue, field_validator, model_validator

from raytrec.common.errors import shorten_repr
from raytrec.common.formatting import format_count
from raytrec.common.storage import split_query
from raytrec.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section, SmallCount, build_section_union

OWN = "module:function"


class OnColumns(Section):
    """A transform that computes each output column from one input column (`age`: and from `until_column`)."""

    columns: list[str] = Field(min_length=1)
    """Columns to read."""
    into: list[str] | None = None
    """Columns to write, one per column read; default: the columns are replaced."""

    @model_validator(mode="after")
    def _check_pairs(self) -> OnColumns:
        if self.into is not None and len(self.into) != len(self.columns):
            raise ValueError(f"into has {format_count(len(self.into), 'name')}, but columns has {len(self.columns)}")
        return self

    @property
    def reads(self) -> list[str]:
        """Return the columns that the transform reads."""
        return self.columns

    @property
    def writes(self) -> list[str]:
        """Return the columns that the transform writes, in the order of `columns`."""
        return self.into or self.columns


class FillNull(OnColumns):
    """Replacement of nulls, and of NaN in floats, by a value. A null list stays null and is an empty bag."""

    do: Literal["fill_null"]
    value: float | int | str
    """Replacement, in the type of the column."""


class Clip(OnColumns):
    """Clipping of numbers to the range from `low` to `high`."""

    do: Literal["clip"]
    low: float | int | None = None
    """Lower bound; default: no bound."""
    high: float | int | None = None
    """Upper bound; default: no bound."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Clip:
        if self.low is None and self.high is None:
            raise ValueError("clip needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"clip: low ({self.low}) exceeds high ({self.high})")
        return self


class Log(OnColumns):
    """Signed logarithm sign(x) · ln(1 + |x|) of a number x, as float32."""

    do: Literal["log"]


class Bucketize(OnColumns):
    """Bucket id of a number: the count of boundaries ≤ the number. Nulls and NaN have no bucket."""

    do: Literal["bucketize"]
    boundaries: list[float] = Field(min_length=1)
    """Increasing boundaries; n boundaries make n + 1 buckets, 0 to n, for a table of n + 1 rows."""

    @field_validator("boundaries")
    @classmethod
    def _check_increasing(cls, value: list[float]) -> list[float]:
        if any(a >= b for a, b in pairwise(value)):
            raise ValueError(f"expected strictly increasing numbers (got {shorten_repr(value)})")
        return value


class Hash(OnColumns):
    """Hashes of all integers or text, in [0, rows). In contrast, out_of_range: hash in the schema keeps valid ids."""

    do: Literal["hash"]
    rows: PositiveInt
    """Number of rows of the table in which the ids are looked up."""


class LookupVocabulary(OnColumns):
    """Position of a value in a vocabulary, counted from 0."""

    do: Literal["lookup_vocabulary"]
    vocabulary: str
    """Text file with one value per line, or Parquet file whose first column contains the values (local, s3:// or
    gs://). Every node must be able to read the file."""
    unknown: int | None = Field(None, ge=0)
    """Id of values that are not in the vocabulary; default: such values have no id."""


class Binarize(OnColumns):
    """Binary values, 1 or 0 as int8, by a threshold or a list of values. Nulls stay null."""

    do: Literal["binarize"]
    at_least: float | int | None = None
    """Numbers ≥ this threshold become 1."""
    positive: list[bool | int | float | str] | None = Field(None, min_length=1)
    """Values that become 1, such as ['yes', 'buy'] (quoted, because YAML reads yes as true)."""

    @model_validator(mode="after")
    def _check_rule(self) -> Binarize:
        if (self.at_least is None) == (self.positive is None):
            raise ValueError("binarize needs either at_least (for numbers) or positive (a list of values)")
        return self


class DatePart(OnColumns):
    """Part of a time, as int64, which can be used as a number or an id."""

    do: Literal["date_part"]
    part: Literal[
        "second", "minute", "hour", "weekday", "day", "day_of_year", "week", "month", "quarter", "year",
        "hour_of_week",
    ]  # fmt: skip
    """hour is 0 to 23, weekday 0 (Monday) to 6, hour_of_week 0 to 167, week the ISO week."""
    timezone: str | None = None
    """Time zone, such as Europe/Zurich; default: the column's time zone, or UTC if the column has none."""
    since_1970: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of numeric times since 1970; not needed for columns of dates, times and ISO text."""


class Age(OnColumns):
    """Duration from a time to another time, as float32; negative if the first time is later."""

    do: Literal["age"]
    until: str | None = None
    """End of the duration: 2026-11-01, or 2026-11-01T12:00 (UTC). Columns of durations need no end."""
    until_column: str | None = None
    """Column that contains the end, instead of `until`."""
    unit: Literal["seconds", "minutes", "hours", "days"] = "days"
    """Unit of the result."""
    since_1970: Literal["s", "ms", "us", "ns"] | None = None
    """Unit of numeric times since 1970; not needed for columns of dates, times and ISO text."""

    @field_validator("until", mode="before")
    @classmethod
    def _to_iso(cls, value: Any) -> Any:
        return value.isoformat() if isinstance(value, date) else value  # YAML reads 2026-11-01 as a date

    @model_validator(mode="after")
    def _check_end(self) -> Age:
        if self.until is not None and self.until_column is not None:
            raise ValueError("age takes until or until_column, not both")
        return self

    @property
    def reads(self) -> list[str]:
        """Return the columns that the transform reads."""
        return list(dict.fromkeys([*self.columns, *([self.until_column] if self.until_column else [])]))


class Decay(OnColumns):
    """Decay floor + (1 - floor) · 2^(-x / half_life) of a number x, as float32; negative x count as 0.

    Applied to an age, the result can be the sample_weight of a task, which reduces the weight of old rows.
    """

    do: Literal["decay"]
    half_life: PositiveFloat
    """Half-life, in the unit of the column, such as days."""
    floor: Annotated[NonNegativeFloat, Field(le=1)] = 0.0
    """Value that the result approaches for large x."""


class Cast(OnColumns):
    """Conversion of values to another type: text to numbers, whole floats and decimals to integers.

    Times and dates become whole seconds since 1970, and durations whole seconds, as for side features.
    NaN becomes null in integer columns. A number with a fraction cannot become an integer.
    """

    do: Literal["cast"]
    to: Literal["int64", "float32", "string"]
    """Target type: int64, float32 or string."""


class DropNull(OnColumns):
    """Removal of nulls from lists. Lists of weights are not shortened to match; for weighted lists, use fill_null."""

    do: Literal["drop_null"]


class Sample(Section):
    """Random ids for each row, drawn uniformly or by frequency, except ids in other columns of the row.

    Each row is drawn independently, with new ids in each epoch; evaluations and predictions always use the same ids.
    With count: all, ids are not drawn. Instead, all ids are distributed over the rows of each global batch in training.
    """

    do: Literal["sample"]
    column: str = Field(min_length=1)
    """Column to write: a list of ids in each row."""
    count: SmallCount | Literal["all"]
    """Number of ids per row; ids may repeat. all: each id once per global batch (model.share_negatives)."""
    rows: PositiveInt | None = None
    """End of the range [0, rows) of ids; default: the number of rows of the table that looks up the ids."""
    vocabulary: str | None = None
    """File of the ids to draw from, as in lookup_vocabulary, for ids that are not row numbers: text, or ids
    of a managed table."""
    frequency: str | None = None
    """Column of the vocabulary's Parquet file: number of occurrences of each id. Ids are drawn in proportion
    to frequency ** power; default: uniformly."""
    power: NonNegativeFloat = 1.0
    """Exponent of the frequency."""
    log_share: str | None = None
    """Column to write, for model.log_share: for each id drawn by frequency, ln(probability of the id ÷
    probability in a uniform draw)."""
    exclude: list[str] = Field(default_factory=list)
    """Columns of ids, or of lists of ids, that are excluded from the draws of the same row."""
    in_evaluations: bool = True
    """Also draw in evaluations and predictions. false: lists are empty there, for models that use the ids
    only in training."""

    @model_validator(mode="after")
    def _check_source(self) -> Sample:
        if self.rows and self.vocabulary:
            raise ValueError("sample takes rows or vocabulary, not both")
        if self.count == "all" and (self.vocabulary or self.exclude):
            key = "vocabulary" if self.vocabulary else "exclude"
            raise ValueError(f"{key} cannot be set with count: all, which uses every id")
        if self.frequency and not split_query(self.vocabulary or "")[0].endswith(".parquet"):
            raise ValueError(
                "frequency requires a Parquet vocabulary: set vocabulary to a .parquet file that contains this column"
            )
        if not self.frequency and (self.power != 1 or self.log_share):
            raise ValueError(f"{'log_share' if self.log_share else 'power'} is set, but frequency is not")
        return self

    @property
    def reads(self) -> list[str]:
        """Return the columns that the transform reads."""
        return list(dict.fromkeys(self.exclude))

    @property
    def writes(self) -> list[str]:
        """Return the columns that the transform writes."""
        return [self.column, self.log_share] if self.log_share else [self.column]


class Python(Section):
    """Transform by a user-defined function `function(table: pyarrow.Table, **options) -> pyarrow.Table`.

    The function receives some consecutive rows of a file, and returns as many rows in the same order. The result for a
    row must depend only on this row, because the rows of a call differ between runs. Before a run starts, the function
    is called with an empty table to determine the types of its columns.
    """

    do: str
    """Path of the function, module:function."""
    reads: list[str] = Field(default_factory=list)
    """Columns that the function reads."""
    writes: list[str] = Field(default_factory=list)
    """Columns that the function adds or replaces."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the function."""


# A new transform needs a class above and a function in data/transform_functions.py.
_SECTIONS: list[type[Section]] = [*OnColumns.__subclasses__(), Sample]
VOCABULARY_TRANSFORMS = (LookupVocabulary, Sample)
BUILT_IN = {get_args(cls.model_fields["do"].annotation)[0]: cls for cls in _SECTIONS}

if TYPE_CHECKING:
    Transform = OnColumns | Sample | Python
else:
    Transform = build_section_union({**BUILT_IN, OWN: Python}, "do", OWN, "transform")
