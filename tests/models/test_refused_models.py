"""Schemas, keys and tasks that each model rejects."""

import pytest
from made import SPARSE, make, schema

from raytrec.common.errors import ConfigError

ITEMS = schema("user", "item", "history", "negatives", dense=())
NARROW = schema("user", "item", "history", "negatives", dense=(), dims=(4, 8, 8))
USER_SEQUENCE = {"table": "user", "pooling": "sequence"}
TARGETS = schema("user", "history", "item", "tags", dims=(4, 8, 12))
SEQUENCES = schema("user", "item", "tags", "history")
TOWERS = {"query": ["user", "age", "history"], "item": ["item", "tags", "price"]}
DRAWN = {"negatives": "negatives"}
NEXT_ITEM = DRAWN | {"max_length": 5}


def make_towers(query, item=TOWERS["item"]):
    return {"towers": {"query": query, "item": item}}


def make_schema_with_dims(*dims):
    return schema(dims=dims)


@pytest.mark.parametrize(
    "name,of,keys,message",
    [
        ("dlrm", make_schema_with_dims(8, 16, 8), {}, "dims 8, 16"),
        ("dlrm", schema(), {"vectors": True}, r"model\.name=dlrm returns none"),
        ("dcn", schema(dense=()), {"bottom_mlp": [4]}, "no dense columns"),
        ("wide_deep", schema(), {"wide": ["usr"]}, "did you mean 'user'"),
        ("wide_deep", schema(), {"wide": ["user"], "deep": ["item"]}, "nor model.deep contains age"),
        ("wide_deep", make_schema_with_dims(8, 4, 8), {"outputs": 4}, "table item has dim 4.*4 columns"),
        ("deepfm", make_schema_with_dims(8, 4, 8), {}, "dims 4, 8"),
        ("deepfm", schema(), {"outputs": 8}, r"(?s)table user has dim 8.*a dim of 12"),
        ("xdeepfm", make_schema_with_dims(8, 4, 8), {}, "dims 4, 8"),
        ("xdeepfm", make_schema_with_dims(4, 4, 4), {"outputs": 5}, r"(?s)table user has dim 4.*a dim of 8"),
        ("masknet", make_schema_with_dims(8, 4, 8), {}, "dims 4, 8"),
        ("wukong", make_schema_with_dims(8, 4, 8), {}, "dims 4, 8"),
        ("pepnet", schema(), {"personal": ["usr"]}, "did you mean 'user'"),
        ("pepnet", schema(), {"personal": ["user"], "domain": ["tag"]}, r"(?s)did you mean 'tags'.*model\.domain"),
        ("final_mlp", schema(), {"gate1": ["usr"]}, "did you mean 'user'"),
        ("final_mlp", schema(), {"gating": False, "gate2": ["item"]}, "gating is false"),
        (
            "final_mlp",
            schema(),
            {"mlp1": [4], "mlp2": [6], "heads": 4},
            r"(?s)mlp2, 6, is not a multiple of model\.heads=4.*model\.mlp2 to 8",
        ),
        ("two_tower", SEQUENCES, make_towers(["usr"]), "did you mean 'user'"),
        ("two_tower", SEQUENCES, make_towers(["user", "age", "item"]), "both towers contain item"),
        ("two_tower", SEQUENCES, make_towers(["user"]), "neither tower contains age, history"),
        ("two_tower", ITEMS, DRAWN | make_towers(["history"], ["item", "user"]), "only the ids of"),
        ("two_tower", ITEMS, DRAWN | make_towers(["user", "neg*"], ["item"]), "'neg\\*' matches"),
        ("mf", ITEMS, {"user": "usr"}, "did you mean 'user'"),
        ("mf", NARROW, {}, "the same dim"),
        ("mf", ITEMS, {"negatives": "user"}, "pooling: sequence"),
        ("ncf", ITEMS, {"gmf_dim": 12}, "at least 12"),
        ("ncf", ITEMS, {"gmf_dim": 2, "shared": True}, "either model.shared or"),
        ("ncf", NARROW, {"shared": True}, "have dim 4, but vectors of item have dim 8"),
        ("hstu", ITEMS, NEXT_ITEM | {"time": "at"}, "none is configured"),
        ("hstu", ITEMS, NEXT_ITEM | {"width": 6, "heads": 4}, "model.width is 6"),
        ("sequence", schema(), {}, "no sequence"),
        ("sequence", SEQUENCES, {"target": "itm"}, "did you mean 'item'"),
        ("sequence", schema("user", "item", "history", last=SPARSE["item"]), {}, "model.target to one of"),
        ("sequence", TARGETS, {}, "dims 4, 8"),
        ("din", schema(), {}, "no sequence"),
        ("din", TARGETS, {"target": "itm"}, "did you mean 'item'"),
        ("din", TARGETS, {"target": "user"}, "dim 8, but vectors of user have dim 4"),
        ("bst", schema(), {}, "no sequence"),
        ("bst", TARGETS, {"target": "user"}, "dim 8, but vectors of user have dim 4"),
        ("bst", TARGETS, {"heads": 3}, "model.heads=3"),
        ("dien", ITEMS, {"negatives": "negativs"}, "did you mean 'negatives'"),
        ("dien", TARGETS, {"negatives": "tags"}, "has pooling: mean"),
        (
            "dien",
            schema("history", "item", negatives={"table": "tag", "pooling": "sequence"}),
            {"negatives": "negatives"},
            "looks up table tag, but no other sequence does",
        ),
        ("dien", TARGETS, {"negatives": "history"}, "no sequence"),
    ],
)
def test_models_reject_unsuitable_schemas_and_keys(name, of, keys, message):
    keys = {"max_length": 5} | keys if name in ("sequence", "din", "dien", "bst") else keys
    with pytest.raises(ConfigError, match=message):
        make(name, of, **keys)


@pytest.mark.parametrize(
    "of,keys,message",
    [
        (ITEMS, {"history": "histroy"}, "did you mean 'history'"),
        (ITEMS, {"item": "itm"}, "did you mean 'item'"),
        (ITEMS, {"negatives": "negative"}, "did you mean 'negatives'"),
        (ITEMS, {"history": "user"}, "has pooling: sum"),
        (ITEMS, {"item": "user"}, "'history' looks up table item, but 'user' looks up table user"),
        (ITEMS, {"heads": 3}, "the dim of table item is 8"),
        (schema("user", "item", "history", negatives=USER_SEQUENCE), {}, "table user"),
    ],
)
@pytest.mark.parametrize("name", ["sasrec", "hstu"])
def test_next_item_models_reject_unsuitable_schemas_and_keys(name, of, keys, message):
    with pytest.raises(ConfigError, match=message):
        make(name, of, **NEXT_ITEM | keys)


def test_target_key_selects_the_target_feature():
    of = schema("user", "item", "history", last=SPARSE["item"])
    assert make("sequence", of, max_length=5, target="last").attention.target_of == {"history": "last"}


ESMM = {"click": "clicked", "conversion": "bought"}


@pytest.mark.parametrize(
    "name,keys,tasks,message",
    [
        ("esmm", ESMM | {"click": "clik"}, ["clicked", "bought"], "did you mean 'clicked'"),
        ("esmm", ESMM | {"conversion": "clicked"}, ["clicked", "bought"], "are both clicked"),
        ("esmm", ESMM, ["clicked"], r"(?s)'bought'.*model\.conversion"),
        ("esmm", ESMM, ["clicked", "bought", "y"], "not for y"),
        ("esmm", ESMM | {"conversion": "kind"}, ["clicked", "kind"], "kind reads 3 columns"),
        ("dbmtl", {"relations": {"bougt": ["clicked"]}}, ["clicked", "bought"], "did you mean 'bought'"),
        ("dbmtl", {"relations": {"bought": ["clik"]}}, ["clicked", "bought"], r"(?s)'clicked'.*relations\.bought"),
        ("dbmtl", {"relations": {"bought": ["clicked"], "clicked": ["bought"]}}, ["clicked", "bought"], "cycle"),
    ],
)
def test_multi_task_models_reject_unsuitable_tasks(name, keys, tasks, message):
    of_tasks = {task: 3 if task == "kind" else 1 for task in tasks}
    with pytest.raises(ConfigError, match=message):
        make(name, schema(), sum(of_tasks.values()), tasks=of_tasks, **keys)
