"""Labels, and columns that leak them."""

import numpy as np
import pyarrow as pa
import pytest
import yaml
from any_parquet import read_with_schema_text
from inspected import get_findings, inspect_columns, read_shown_settings

ROWS = 300
LABEL = np.random.default_rng(0).integers(0, 2, ROWS)


def inspect_roles(folder, **columns):
    """Inspect a file with a label, user_id and these columns; return (role, reason) by column."""
    columns = {"label": LABEL, "user_id": np.arange(ROWS) % 9, **columns}
    found = get_findings(inspect_columns(folder, columns, row_group_size=70))
    return {name: (finding.kind, finding.why) for name, finding in found.items()}


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
    assert inspect_roles(tmp_path, **{name: values})[name] == ("skipped", "copies the label label")


def test_near_copy_of_the_label_is_a_feature(tmp_path):
    nearly = LABEL.copy()
    nearly[-1] = 1 - nearly[-1]
    found = inspect_roles(tmp_path, nearly=nearly, three=np.append(LABEL[:-1], 2), tags=[[int(v)] for v in LABEL])
    assert not [name for name, (kind, _) in found.items() if kind == "skipped"]


def test_label_copies_are_detected_given_enough_rows(tmp_path):
    columns = {"click": LABEL, "buy": LABEL[::-1], "copy": LABEL[::-1], "user_id": np.arange(ROWS) % 9}
    found = inspect_columns(tmp_path, columns, ["click", "buy"])
    assert {f.stats.name: f.why for f in found.findings if f.kind == "skipped"} == {"copy": "copies the label buy"}
    fewer = inspect_columns(tmp_path, {name: values[:100] for name, values in columns.items()}, ["click", "buy"])
    assert "skipped" not in [f.kind for f in fewer.findings]


def test_unique_text_is_not_a_feature(tmp_path):
    rows = [f"request {i}" for i in range(ROWS)]
    found = inspect_roles(tmp_path, request_id=rows, query=[*rows[:-1], rows[0]])
    assert found["request_id"] == ("skipped", "a different value in (almost) each row")
    assert found["query"] == ("sparse", "text")


def test_nan_among_ids_counts_as_null(tmp_path):
    found = inspect_columns(tmp_path, {"film_id": np.where(np.arange(ROWS) % 4, np.arange(ROWS) % 7, np.nan)})
    line = next(line for line in found.schema_yaml().splitlines() if "film_id: " in line)
    assert "25 % null" in line


def test_proposed_tasks_skip_null_labels(tmp_path, capsys):
    label = pa.array(LABEL, mask=np.arange(ROWS) == 200)
    found = inspect_columns(tmp_path, {"label": label, "user_id": np.arange(ROWS) % 9}, row_group_size=70)
    read_with_schema_text(found.schema_yaml(), tmp_path)
    assert "#   - {label: label, nulls: skip}\n" in found.schema_yaml()
    settings = read_shown_settings(found, tmp_path / "schema.yaml", capsys)
    assert yaml.safe_load(settings["tasks"]) == [{"label": "label", "nulls": "skip"}]


def test_constant_label_gives_a_warning(tmp_path, capsys):
    found = inspect_columns(tmp_path, {"label": [1] * 90, "user_id": np.arange(90) % 9})
    found.show()
    warning = "constant: the model cannot learn anything from it"
    assert f"warning: the label label is {warning}\n" in capsys.readouterr().err
    assert warning in next(line for line in found.schema_yaml().splitlines() if line.startswith("# label"))
    inspect_columns(tmp_path, {"label": [1, 0] * 45, "user_id": np.arange(90) % 9}).show()
    assert "warning" not in capsys.readouterr().err
