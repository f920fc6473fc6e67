"""Labels, and columns that leak them."""

import shlex

import numpy as np
import pyarrow as pa
import pytest
import yaml
from any_parquet import read_with_schema_text, write

from raytrec.inspection.propose import inspect

ROWS = 300
LABEL = np.random.default_rng(0).integers(0, 2, ROWS)


def inspect_columns(folder, **columns):
    """Inspect a file with a label, user_id and these columns; return (role, reason) by column."""
    write(folder / "a.parquet", {"label": LABEL, "user_id": np.arange(ROWS) % 9, **columns}, row_group_size=70)
    return {f.stats.name: (f.kind, f.why) for f in inspect(str(folder)).findings}


@pytest.mark.parametrize(
    "values",
    [
        LABEL,
        LABEL * 1.0,
        1 - LABEL,
        LABEL > 0,
        LABEL * 2 - 1,
        np.where(LABEL, "bought", "seen"),
        pa.array(LABEL, mask=LABEL == 0),
        np.where(LABEL, 1.0, np.nan),
    ],
    ids=["equal", "float", "inverse", "bool", "signed", "text", "null", "nan"],
)
@pytest.mark.parametrize("name", ["x", "x_id"])
def test_copy_of_the_label_is_not_a_feature(tmp_path, name, values):
    assert inspect_columns(tmp_path, **{name: values})[name] == ("skipped", "copies the label label")


def test_near_copy_of_the_label_is_a_feature(tmp_path):
    nearly = LABEL.copy()
    nearly[-1] = 1 - nearly[-1]
    found = inspect_columns(tmp_path, nearly=nearly, three=np.append(LABEL[:-1], 2), tags=[[int(v)] for v in LABEL])
    assert not [name for name, (kind, _) in found.items() if kind == "skipped"]


def test_label_copies_are_detected_given_enough_rows(tmp_path):
    columns = {"click": LABEL, "buy": LABEL[::-1], "copy": LABEL[::-1], "user_id": np.arange(ROWS) % 9}
    write(tmp_path / "a.parquet", columns)
    found = inspect(str(tmp_path), labels=["click", "buy"])
    assert {f.stats.name: f.why for f in found.findings if f.kind == "skipped"} == {"copy": "copies the label buy"}
    write(tmp_path / "a.parquet", {name: values[:100] for name, values in columns.items()})
    assert "skipped" not in [f.kind for f in inspect(str(tmp_path), labels=["click", "buy"]).findings]


def test_unique_text_is_not_a_feature(tmp_path):
    rows = [f"request {i}" for i in range(ROWS)]
    found = inspect_columns(tmp_path, request_id=rows, query=[*rows[:-1], rows[0]])
    assert found["request_id"] == ("skipped", "a different value in each row")
    assert found["query"] == ("sparse", "text")


def test_nan_among_ids_counts_as_null(tmp_path):
    inspect_columns(tmp_path, film_id=np.where(np.arange(ROWS) % 4, np.arange(ROWS) % 7, np.nan))
    line = next(line for line in inspect(str(tmp_path)).schema_yaml().splitlines() if "film_id: " in line)
    assert "25 % null" in line


def test_proposed_tasks_skip_null_labels(tmp_path, capsys):
    label = pa.array(LABEL, mask=np.arange(ROWS) == 200)
    write(tmp_path / "a.parquet", {"label": label, "user_id": np.arange(ROWS) % 9}, row_group_size=70)
    found = inspect(str(tmp_path))
    read_with_schema_text(found.schema_yaml(), tmp_path)
    assert "#   - {label: label, nulls: skip}\n" in found.schema_yaml()
    found.show(str(tmp_path / "schema.yaml"))
    settings = dict(word.split("=", 1) for word in shlex.split(capsys.readouterr().err.splitlines()[-1])[3:])
    assert yaml.safe_load(settings["tasks"]) == [{"label": "label", "nulls": "skip"}]


def test_constant_label_gives_a_warning(tmp_path, capsys):
    write(tmp_path / "a.parquet", {"label": [1] * 90, "user_id": np.arange(90) % 9})
    found = inspect(str(tmp_path))
    found.show()
    warning = "constant: the model cannot learn anything from it"
    assert f"warning: the label label is {warning}\n" in capsys.readouterr().err
    assert warning in next(line for line in found.schema_yaml().splitlines() if line.startswith("# label"))
    write(tmp_path / "a.parquet", {"label": [1, 0] * 45, "user_id": np.arange(90) % 9})
    inspect(str(tmp_path)).show()
    assert "warning" not in capsys.readouterr().err
