"""Functions that run `raytrec prepare` in this process and read the prepared dataset."""

import pyarrow.parquet as pq
from raytrec_datasets import app
from typer.testing import CliRunner

SPLITS = ("train", "valid", "test")


def run_recipe(name, *arguments):
    return CliRunner().invoke(app, [name, *map(str, arguments)])


def read_splits(folder):
    """Return the rows of each split of a prepared dataset."""
    return {split: pq.read_table(folder / split).to_pylist() for split in SPLITS}


def prepare(name, out, *arguments):
    """Run a recipe that must succeed and return the rows of each split."""
    result = run_recipe(name, "--out", out, *arguments)
    assert result.exit_code == 0, result.exception
    return read_splits(out)


def get_recipe_error(kind, name, out, *arguments):
    """Run a recipe that must raise an error of this kind and write nothing; return the error's text."""
    error = run_recipe(name, "--out", out, *arguments).exception
    assert isinstance(error, kind), error
    assert not out.exists()
    return str(error)
