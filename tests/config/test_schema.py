import pytest
import yaml

from raytrec.common.errors import SchemaError
from raytrec.config.schema import Schema

VALUES = {
    "labels": ["y"],
    "dense": ["a", "yes"],
    "sparse": {
        "user": {"table": "user"},
        "tags": {"table": "tag", "pooling": "mean", "weights": "tag_weights", "column": "tag_ids"},
        "seen": {"table": "tag", "pooling": "sequence"},
    },
    "tables": {"user": {"rows": 10, "dim": 8}, "tag": {"rows": 5, "dim": 8, "out_of_range": "hash"}},
}
USER_IDS = ("tables", "user", "ids")


def make_changed_values(path, value):
    values = yaml.safe_load(yaml.safe_dump(VALUES))
    *parents, last = path
    inner = values
    for key in parents:
        inner = inner[key]
    inner[last] = value
    return values


def test_schema_lists_its_columns():
    schema = Schema.parse(VALUES, "test")
    assert schema.columns == ["y", "a", "yes", "user", "tag_ids", "tag_weights", "seen"]
    assert schema.has_weights


@pytest.mark.parametrize(
    "path,value,message",
    [
        (("sparse", "user", "table"), "usr", "did you mean 'user'"),
        (("sparse", "user", "poling"), "sum", "did you mean 'pooling'"),
        (("tables", "user", "row"), 3, "did you mean 'rows'"),
        (("tables", "user", "dim"), 6, "tables.user.dim"),
        (("tables", "user", "rows"), 0, "tables.user.rows"),
        (("sparse", "user", "pooling"), "max", "sparse.user.pooling"),
        (("tables", "other"), {"rows": 3, "dim": 4}, "no sparse feature looks up other"),
        (("labels",), ["a"], "'a' is listed twice"),
        (("labels",), ["user"], "'user' is a label and also an input"),
        (("labels",), [], "labels"),
        (("tables", "a.b"), {"rows": 3, "dim": 4}, "tables.a.b: the name contains a dot; use 'a_b'"),
        (("tables", "items"), {"rows": 3, "dim": 4}, "use 'items_table'"),
        (USER_IDS, "manged", "tables.user.ids: expected static, managed, or a mapping of admit_after"),
        (USER_IDS, 5, "tables.user.ids: expected static, managed, or a mapping of admit_after"),
        (USER_IDS, {"admit_afte": 2}, "did you mean 'admit_after'"),
        (USER_IDS, {"fallback_rows": 10}, "rows: expected more than ids.fallback_rows=10"),
        (USER_IDS, {"eviction": "fifo"}, "'lru', 'lfu' or 'none'"),
        (("tables", "tag", "ids"), "managed", "out_of_range is set, but managed ids are never out of range"),
    ],
)
def test_schema_error_names_key_and_file(path, value, message):
    with pytest.raises(SchemaError) as error:
        Schema.parse(make_changed_values(path, value), "my.yaml")
    assert message in str(error.value) and "my.yaml" in str(error.value)


@pytest.mark.parametrize(
    "ids,text",
    [("managed", "ids: managed"), ({"admit_after": 3, "ttl_steps": 5}, "ids: {admit_after: 3, ttl_steps: 5}")],
)
def test_managed_ids_round_trip_through_yaml(tmp_path, ids, text):
    schema = Schema.parse(make_changed_values(USER_IDS, ids), "test")
    assert f"user: {{rows: 10, dim: 8, {text}}}" in schema.to_yaml()
    (tmp_path / "schema.yaml").write_text(schema.to_yaml())
    assert Schema.load(tmp_path / "schema.yaml") == schema == Schema.parse(schema.model_dump(), "test")
    assert schema.managed == ["user"] and schema.tables["user"].own_rows == 9
    assert Schema.parse(make_changed_values(USER_IDS, "static"), "test") == Schema.parse(VALUES, "test")


def test_reserved_table_names_are_module_dict_attributes():
    from torch import nn

    from raytrec.config.schema_parts import RESERVED_TABLE_NAMES

    assert {name for name in dir(nn.ModuleDict()) if not name.startswith("_")} == RESERVED_TABLE_NAMES
