"""The first 50 losses of every example configuration equal the recorded losses in this folder, bit for bit.

A failure means that a change is not a pure refactoring: `rows` shows whether other rows were read, and
`losses` shows the first step that differs. losses.py explains when and how to record again.
"""

import json
from itertools import count

import pytest
from golden.losses import EXAMPLES, HERE, ROOT, WORKERS, describe_environment, record
from ranks import run_on_ranks  # noqa: F401 (these tests start processes)

# `make golden` compares all; `make test` runs each once, on 1 or 2 workers, without the largest models.
LARGE_EXAMPLES = ("criteo_1tb_8xa100", "criteo_1tb_2x8xh100")
COMPARED_STEPS, SAME = 10, 1e-4  # for other processors and libraries


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("golden")


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        pytest.param(
            name, workers, marks=[] if workers == 1 + number % 2 and name not in LARGE_EXAMPLES else pytest.mark.parity
        )
        for number, name in enumerate(EXAMPLES)
        for workers in WORKERS
    ],
)
def test_example_losses_equal_the_recorded_losses(name, workers, data):
    kept = json.loads((HERE / f"{name}.json").read_text())
    expected, found = kept["workers"][str(workers)], record(name, workers, data)
    if found != expected and describe_environment() != kept["environment"]:
        there = pytest.approx(expected["losses"][:COMPARED_STEPS], rel=SAME)
        assert found["losses"][:COMPARED_STEPS] == there, f"recorded with {kept['environment']}"
        pytest.skip(f"equal to {SAME:g}; bit for bit only with {kept['environment']}")
    assert found["rows"] == expected["rows"], "rows, row order or ids differ"
    pairs = zip(count(1), found["losses"], expected["losses"], strict=False)
    parted = [f"step {step}: {ours!r}, not {theirs!r}" for step, ours, theirs in pairs if ours != theirs]
    assert not parted, f"{len(parted)} losses differ, first at {parted[0]}"


def test_every_example_has_recorded_losses():
    # tests/driver/test_next_folder.py compares dlrm_v4, which has requests in the order of time. criteo_1tb_8xh100
    # differs from criteo_1tb_8xa100 only in batch size and learning rate, and its rate is too high for 32 rows.
    assert {path.stem for path in (ROOT / "jobs").glob("*.yaml")} == {*EXAMPLES, "dlrm_v4", "criteo_1tb_8xh100"}
    assert {path.stem for path in HERE.glob("*.json")} == set(EXAMPLES)
    for name in EXAMPLES:
        kept = json.loads((HERE / f"{name}.json").read_text())["workers"]
        assert [len(kept[str(workers)]["losses"]) for workers in WORKERS] == [50, 50]
