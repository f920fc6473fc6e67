"""data.transforms: what is done to columns before the schema. (data/transform.py does it.)

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

They run one after the other, on whole Arrow columns, in the tasks that read. Numbers inside of lists are
treated like numbers in plain columns. Columns are named as in a schema: `user.joined` is a field of a struct.
"""

from __future__ import annotations

from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import Field, JsonValue, field_validator, model_validator

from raytrec.config.base import Few, NonNegativeFloat, PositiveFloat, PositiveInt, Section, one_of

OWN = "module:function"


class OnColumns(Section):
    """A transform that makes each of its columns from one column."""

    columns: list[str] = Field(min_length=1)
    """Columns to read."""
    into: list[str] | None = None
    """Columns to write, one for each read; default: the same ones."""

    @model_validator(mode="after")
    def _pairs(self) -> OnColumns:
        if self.into is not None and len(self.into) != len(self.columns):
            raise ValueError(f"into has {len(self.into)} names for {len(self.columns)} columns")
        return self

    @property
    def reads(self) -> list[str]:
        """The columns that it needs."""
        return self.columns

    @property
    def writes(self) -> list[str]:
        """The columns that are its own from then on."""
        return self.into or self.columns


class FillNull(OnColumns):
    """Nulls, and NaN among floats, become a value. A list that is null stays so: it is an empty bag."""

    do: Literal["fill_null"]
    value: float | int | str
    """What they become, in the column's own type."""


class Clip(OnColumns):
    """Numbers below `low` become `low`, those above `high` become `high`."""

    do: Literal["clip"]
    low: float | int | None = None
    """The least; default: no bound."""
    high: float | int | None = None
    """The greatest; default: no bound."""

    @model_validator(mode="after")
    def _some_bound(self) -> Clip:
        if self.low is None and self.high is None:
            raise ValueError("clip needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"clip has low {self.low} above high {self.high}")
        return self


class Log(OnColumns):
    """x becomes sign(x) · ln(1 + |x|), as float32."""

    do: Literal["log"]


class Bucketize(OnColumns):
    """A number becomes the id of its bucket: how many boundaries are ≤ it. Nulls and NaN have no bucket."""

    do: Literal["bucketize"]
    boundaries: list[float] = Field(min_length=1)
    """Rising; n of them make n + 1 buckets, 0 to n: a table of n + 1 rows."""

    @field_validator("boundaries")
    @classmethod
    def _rising(cls, value: list[float]) -> list[float]:
        if any(a >= b for a, b in pairwise(value)):
            raise ValueError("boundaries must rise")
        return value


class Hash(OnColumns):
    """Integers or text become ids in [0, rows), all of them (schema: out_of_range: hash keeps valid ids)."""

    do: Literal["hash"]
    rows: PositiveInt
    """Of the table that the ids look up."""


class LookupVocabulary(OnColumns):
    """A value becomes its place in a vocabulary, counted from 0."""

    do: Literal["lookup_vocabulary"]
    vocabulary: str
    """A text file with a value in each line, or Parquet, whose first column it is (local, s3:// or gs://;
    every node must reach it)."""
    unknown: int | None = Field(None, ge=0)
    """The id of all other values; default: no id."""


class Binarize(OnColumns):
    """A value becomes 1 or 0, as int8: 1 where it is large enough, or one of those named. Nulls stay null."""

    do: Literal["binarize"]
    at_least: float | int | None = None
    """Numbers from here on become 1."""
    positive: list[bool | int | float | str] | None = Field(None, min_length=1)
    """Values that become 1, such as ['yes', 'buy'] (quoted: see YAML's yes)."""

    @model_validator(mode="after")
    def _one_rule(self) -> Binarize:
        if (self.at_least is None) == (self.positive is None):
            raise ValueError("binarize needs either at_least (for numbers) or positive (a list of values)")
        return self


class DatePart(OnColumns):
    """A time becomes a part of it, as int64, which is a number and an id."""

    do: Literal["date_part"]
    part: Literal[
        "second", "minute", "hour", "weekday", "day", "day_of_year", "week", "month", "quarter", "year",
        "hour_of_week",
    ]  # fmt: skip
    """hour is 0 to 23, weekday 0 (Monday) to 6, hour_of_week 0 to 167, week the ISO week."""
    timezone: str | None = None
    """Such as Europe/Zurich; default: the column's own, and UTC where it has none."""
    since_1970: Literal["s", "ms", "us", "ns"] | None = None
    """What numbers count; not needed for columns of dates, times and ISO text."""


class Age(OnColumns):
    """A time becomes the time from it until another one, as float32; below 0 where it is later."""

    do: Literal["age"]
    until: str | None = None
    """The time to count to: 2026-11-01, or 2026-11-01T12:00 (UTC). Durations need none."""
    until_column: str | None = None
    """A column with that time, instead."""
    unit: Literal["seconds", "minutes", "hours", "days"] = "days"
    """Of the number."""
    since_1970: Literal["s", "ms", "us", "ns"] | None = None
    """What numbers count; not needed for columns of dates, times and ISO text."""

    @field_validator("until", mode="before")
    @classmethod
    def _iso(cls, value: Any) -> Any:
        return value.isoformat() if isinstance(value, date) else value  # what YAML makes of 2026-11-01

    @model_validator(mode="after")
    def _one_end(self) -> Age:
        if self.until is not None and self.until_column is not None:
            raise ValueError("age takes until or until_column, not both")
        return self

    @property
    def reads(self) -> list[str]:
        """The columns that it needs."""
        return list(dict.fromkeys([*self.columns, *([self.until_column] if self.until_column else [])]))


class Decay(OnColumns):
    """x becomes floor + (1 - floor) · 2^(-x / half_life), as float32: of an age a weight for tasks'
    sample_weight, by which old rows count less. Below 0, x is taken for 0."""

    do: Literal["decay"]
    half_life: PositiveFloat
    """In what the column counts, such as days."""
    floor: Annotated[NonNegativeFloat, Field(le=1)] = 0.0
    """What the oldest still have."""


class Cast(OnColumns):
    """A value in another type: text as the number that it spells, whole floats (and decimals) as integers.
    NaN among them becomes null; a number with a fraction cannot become an integer."""

    do: Literal["cast"]
    to: Literal["int64", "float32", "string"]
    """int64, float32 or string."""


class DropNull(OnColumns):
    """Nulls inside lists are removed; the lists get shorter. (Their weights do not: see fill_null.)"""

    do: Literal["drop_null"]


class Sample(Section):
    """Ids are drawn for each row, without those that its other columns hold: uniformly, or by frequency.

    Each row draws by itself, other ids in each epoch; in evaluations and predictions always the same.
    With count: all nothing is drawn: all ids are shared out among the rows of each global batch that is
    trained.
    """

    do: Literal["sample"]
    column: str = Field(min_length=1)
    """The column to write: a list of ids in each row."""
    count: Few | Literal["all"]
    """How many ids; one may come twice. all: every id, once in a global batch (model.share_negatives)."""
    rows: PositiveInt | None = None
    """Ids are drawn from [0, rows); default: the rows of the table that they look up."""
    vocabulary: str | None = None
    """A file of the ids to draw from, as of lookup_vocabulary, where they are not numbers from 0 on: text, or
    ids of a managed table."""
    frequency: str | None = None
    """A column of the vocabulary's Parquet file: how often each id occurs. Ids are drawn in proportion to
    frequency ** power; default: uniformly."""
    power: NonNegativeFloat = 1.0
    """See frequency."""
    log_share: str | None = None
    """A column to write, for model.log_share: of each id that is drawn by frequency, ln of its chance ÷ that
    of a uniform draw."""
    exclude: list[str] = Field(default_factory=list)
    """Columns of ids, or of lists of them; a row draws none of those that it has there."""
    in_evaluations: bool = True
    """Draw in evaluations and predictions, too; false: lists are empty there, for models that only learn from
    them."""

    @model_validator(mode="after")
    def _one_source(self) -> Sample:
        if self.rows and self.vocabulary:
            raise ValueError("sample takes rows or vocabulary, not both")
        if self.count == "all" and (self.vocabulary or self.exclude):
            raise ValueError("count: all takes neither vocabulary nor exclude: it is all ids of the table")
        if self.frequency and not (self.vocabulary or "").endswith(".parquet"):
            raise ValueError("frequency is a column of a Parquet file of ids: set vocabulary: FILE.parquet")
        if not self.frequency and (self.power != 1 or self.log_share):
            raise ValueError("power and log_share belong to draws by frequency: set frequency too")
        return self

    @property
    def reads(self) -> list[str]:
        """The columns that it needs."""
        return list(dict.fromkeys(self.exclude))

    @property
    def writes(self) -> list[str]:
        """The columns that it makes."""
        return [self.column, self.log_share] if self.log_share else [self.column]


class Python(Section):
    """A function of yours, `function(table: pyarrow.Table, **options) -> pyarrow.Table`, row for row.

    It sees a whole row group at a time, as columns, and returns as many rows in the same order. What a row
    becomes must depend on this row alone: which rows come together differs from run to run. Before anything
    starts, it is called with no rows, to learn its columns' types.
    """

    do: str
    """module:function"""
    reads: list[str] = Field(default_factory=list)
    """Columns that it needs."""
    writes: list[str] = Field(default_factory=list)
    """Columns that it makes or replaces."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments."""


# A new one is a class above, and its function in data/transform.py.
_SECTIONS: list[type[Section]] = [*OnColumns.__subclasses__(), Sample]
WITH_VOCABULARY = (LookupVocabulary, Sample)
BUILT_IN = {get_args(cls.model_fields["do"].annotation)[0]: cls for cls in _SECTIONS}

if TYPE_CHECKING:
    Transform = OnColumns | Sample | Python
else:
    Transform = one_of({**BUILT_IN, OWN: Python}, "do", OWN, "transform")
