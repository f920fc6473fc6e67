"""Warnings of numbers that were copied with a configuration."""

import pytest

from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.driver.advice import copied_numbers

SCHEMA = Schema.parse(
    {
        "labels": ["label"],
        "sparse": {
            "item": {"table": "item"},
            "negatives": {"table": "item", "pooling": "sequence"},
        },
        "tables": {"item": {"rows": 12_101, "dim": 8}},
    },
    "test",
)


def lines(rows=None, steps=1000, **schedule):
    drawn = {"do": "sample", "column": "negatives", "count": 8, "rows": rows}
    values = {"data": {"train": "d/train", "transforms": [drawn]}, "optim": {"schedule": schedule}}
    return copied_numbers(load_config(values), SCHEMA, steps)


def test_a_table_of_which_not_all_rows_are_drawn_is_a_warning():
    [line] = lines(11_924)
    assert "rows is 11,924, and table item has 12,101 rows" in line and "leave rows out" in line
    assert lines(12_101) == lines() == []


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_a_decay_that_ends_before_the_run_is_a_warning(decay):
    [line] = lines(decay=decay, decay_steps=890, warmup_steps=100)
    assert "0 from step 990 on, and the run has 1,000 steps" in line and "leave decay_steps out" in line
    assert lines(decay=decay, decay_steps=900, warmup_steps=100) == lines(decay=decay, warmup_steps=100) == []
    assert lines(decay=decay, decay_steps=100, floor=0.1) == [], "it goes on at the floor"
