"""UCI Adult as rows with two labels.

The labels are `income` (above 50K a year) and `never_married`. The MMoE paper (Ma et al. 2018,
doi.org/10.1145/3219819.3220007) learns the same two labels from the larger data set Census-Income (KDD). Inputs are
all other columns except three:

- marital_status is the second label;
- relationship reveals the second label: husbands and wives are married, and 88 % of the people listed as
  Own-child have never married;
- fnlwgt, the survey's estimate of the number of people that a row represents, is not a property of a person.
  The files contain the column, but schema.yaml does not, so that `sample_weight: fnlwgt` can name it.

Dense columns are standardized with their mean and standard deviation in train, capital gains and losses after
log(1 + x). Ids are positions in the sorted values of train, from 1; id 0 stands for "?" (missing) and for
values not in train.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
from raytrec_datasets.writing import Output, write_table

from raytrec.common.errors import DataError
from raytrec.common.formatting import format_count
from raytrec.config.schema import Schema

COLUMNS = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    "income",
]
DENSE = ["age", "education_num", "capital_gain", "capital_loss", "hours_per_week"]
LOGARITHMIC = ("capital_gain", "capital_loss")
SPARSE = ["workclass", "education", "occupation", "race", "sex", "native_country"]
LABELS = ["income", "never_married"]
NUMBERS = {*DENSE, "fnlwgt"}
INCOMES = {"<=50K": 0, ">50K": 1}
MISSING = "?"
VALID_SHARE = 5  # one in this many rows of adult.data is in valid


def write(out: Path, source: Path, seed: int, dim: int, force: bool) -> None:
    """Write the dataset; the arguments are those of `raytrec prepare adult`.

    Raises:
        ConfigError: The output folder cannot be replaced (`Output.is_ready`).
        DataError: A file cannot be read or is invalid.
    """
    source = source.expanduser().absolute()
    output = Output(out, "adult", {"source": str(source), "seed": seed, "dim": dim}, force)
    if not output.is_ready():
        people = Adult(read(source / "adult.data"), read(source / "adult.test"), seed)
        with output:
            rows = {
                name: write_table(output.partial / name, people.table(name), group_rows=4_096) for name in people.splits
            }
            output.finish(people.schema(dim), rows, scales=people.scales)
    output.summary("adult")


def read(path: Path) -> pd.DataFrame:
    """Read adult.data or adult.test: numbers as int64, income as 0 or 1, all other columns as text.

    Raises:
        DataError: The file cannot be read, or contains no rows or an invalid line, which the error names.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"cannot read {path.name}: {error}",
            where=str(path.parent),
            expected="adult.data and adult.test, as text",
            do="pass the folder with UCI's files as --source",
        ) from None
    rows = list(_rows(lines, path))
    if not rows:
        raise DataError("the file has no rows", where=str(path), do="extract it again")
    return pd.DataFrame(rows, columns=COLUMNS)


def _rows(lines: list[str], path: Path) -> Iterator[list]:
    """Yield the fields of each line, except for empty lines and UCI's remark in the first line of adult.test.

    Raises:
        DataError: A line is invalid.
    """
    for number, line in enumerate(lines, 1):
        if not line.strip() or (number == 1 and line.startswith("|")):
            continue
        fields = [field.strip() for field in line.split(",")]
        if problem := _problem(fields):
            raise DataError(
                problem,
                where=f"{path}, line {number}: {line[:60]!r}",
                expected="14 columns and the income (<=50K or >50K), separated by commas",
                do="correct the line, or remove it",
            )
        *person, income = fields
        named = zip(COLUMNS[:-1], person, strict=True)
        yield [int(value) if name in NUMBERS else value for name, value in named] + [_income(income)]


def _problem(fields: list[str]) -> str | None:
    """Return a description of the first problem in a line's fields, or None if the fields are valid."""
    if len(fields) != len(COLUMNS):
        return f"the line has {format_count(len(fields), 'field')}"
    for name, value in zip(COLUMNS, fields, strict=True):
        if name in NUMBERS and not (value.isascii() and value.isdigit() and len(value) < 10):
            return f"{name} is {value!r}, not an integer from 0 to 999,999,999"
        if not value:
            return f"{name} is empty"
    return None if _income(fields[-1]) is not None else f"income is {fields[-1]!r}"


def _income(text: str) -> int | None:
    """Return the label for an income (0 or 1), or None if the text is unknown; in adult.test, it ends with a period."""
    return INCOMES.get(text.removesuffix("."))


class Adult:
    """Rows of people by split, and scales and vocabularies that are computed from train alone.

    Args:
        data: Rows of adult.data, as `read` returns them.
        test: Rows of adult.test.
        seed: Seed of the order in which adult.data is divided.

    Attributes:
        splits: Name of a split → rows. train and valid divide adult.data in seeded random order; test is adult.test.
        scales: Dense column → [mean, standard deviation].
        vocabularies: Sparse column → sorted values, without MISSING.
    """

    def __init__(self, data: pd.DataFrame, test: pd.DataFrame, seed: int):
        order, held_out = np.random.default_rng(seed).permutation(len(data)), len(data) // VALID_SHARE
        train = data.iloc[order[held_out:]]
        self.splits = {"train": train, "valid": data.iloc[order[:held_out]], "test": test}
        self.scales = {name: _scale(_number(train, name)) for name in DENSE}
        self.vocabularies = {name: sorted({*train[name]} - {MISSING}) for name in SPARSE}

    def table(self, split: str) -> pa.Table:
        """Return the rows of a split: labels int8, dense columns float32, ids int64, and fnlwgt."""
        people = self.splits[split]
        columns = {
            "income": people["income"].to_numpy(np.int8),
            "never_married": (people["marital_status"] == "Never-married").to_numpy(np.int8),
        }
        for name, (mean, deviation) in self.scales.items():
            columns[name] = ((_number(people, name) - mean) / deviation).astype(np.float32)
        for name, known in self.vocabularies.items():
            codes = pd.Categorical(people[name], categories=known).codes  # -1: not in the vocabulary
            columns[name] = codes.astype(np.int64) + 1
        return pa.table({**columns, "fnlwgt": people["fnlwgt"].to_numpy()})

    def schema(self, dim: int) -> Schema:
        """Return the schema of the dataset, with a table of width `dim` for each sparse column."""
        return Schema.parse(
            {
                "labels": LABELS,
                "dense": DENSE,
                "sparse": {name: {"table": name} for name in SPARSE},
                "tables": {name: {"rows": len(known) + 1, "dim": dim} for name, known in self.vocabularies.items()},
            },
            "schema.yaml",
        )


def _number(people: pd.DataFrame, name: str) -> np.ndarray:
    """Return a dense column before standardization, float64 [n]."""
    values = people[name].to_numpy(np.float64)
    return np.log1p(values) if name in LOGARITHMIC else values


def _scale(values: np.ndarray) -> list[float]:
    """Return [mean, standard deviation]; the deviation is 1 if all values are equal."""
    return [float(values.mean()), float(values.std()) or 1.0]
