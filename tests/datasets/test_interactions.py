"""`raytrec prepare interactions` for every layout, compared with plain Python."""

import gzip
import json
import random
from collections import Counter, defaultdict
from operator import itemgetter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from raytrec_datasets.interactions import rows as rows_module
from raytrec_datasets.interactions import tables
from recipes import SPLITS, get_recipe_error, prepare, run_recipe

from raytrec.common.errors import RaytrecError
from raytrec.config.schema import Schema
from raytrec.config.transforms import Sample
from raytrec.data.fragments import scan
from raytrec.data.read_plans import ReadPlan

USERS, ITEMS, LONGEST = 9, 40, 4
LISTS = ("history", "seen", "right_items")


def prepare_splits(source, out, *arguments):
    """Run the recipe and return the rows of each split, with the source's keys in place of ids."""
    rows = prepare("interactions", out, "--source", source, *arguments)
    keys = {name: dict(zip(*pq.read_table(out / f"{name}s").columns[:2], strict=True)) for name in ("user", "item")}
    keys = {name: {k.as_py(): v.as_py() for k, v in known.items()} for name, known in keys.items()}

    def named(row):
        items = {n: [int(keys["item"][i]) for i in row[n]] for n in LISTS if n in row}
        return row | {"user": int(keys["user"][row["user"]]), "item": int(keys["item"][row["item"]])} | items

    schema, drawn = Schema.load(out / "schema.yaml"), Sample(do="sample", column="negatives", count=3)
    for split in SPLITS:
        scan(str(out / split), ReadPlan(schema, transforms=(drawn,) if "negatives" in schema.sparse else ()))
    return {split: [named(row) for row in of_split] for split, of_split in rows.items()}


def get_error(source, out, *arguments):
    return get_recipe_error(RaytrecError, "interactions", out, "--source", source, *arguments)


def make_events(seed=1):
    """Return (user, item, time) sorted by time; times are unique, and items are unique per user."""
    rng = random.Random(seed)
    found = [(u, i) for u in range(3, 3 + USERS) for i in rng.sample(range(ITEMS), rng.randint(3, 12))]
    rng.shuffle(found)
    return [(user, item, 1000 + 7 * n) for n, (user, item) in enumerate(found)]


def group_by_user(found):
    lists = defaultdict(list)
    for user, item, *_ in found:
        lists[user].append(item)
    return lists


def write_parquet(folder, found):
    mixed = random.Random(2).sample(found, len(found))
    columns = dict(zip(("user", "item", "time"), zip(*mixed, strict=True), strict=True))
    pq.write_table(pa.table(columns), folder / "x.parquet", row_group_size=20)
    return folder / "x.parquet", "--time", "time"


def write_lists(folder, found):
    lists = group_by_user(found)
    pq.write_table(pa.table({"user": list(lists), "films": list(lists.values())}), folder / "x.parquet")
    return folder / "x.parquet", "--item", "films"


def write_csv(folder, found):
    lines = ["who,stars,what,when", *(f'"{u}",5,{i},{t}' for u, i, t in random.Random(2).sample(found, len(found)))]
    with gzip.open(folder / "x.csv.gz", "wt") as file:
        file.write("\n".join(lines))
    return folder / "x.csv.gz", "--user", "who", "--item", "what", "--time", "when"


def write_order(folder, found):
    (folder / "x.tsv").write_text("item\tuser\n" + "".join(f"{i}\t{u}\n" for u, i, _ in found))
    return (folder / "x.tsv",)


def write_user_lines(path, found, end=""):
    path.write_text("".join(f"{u} {' '.join(map(str, i))}{end}\n" for u, i in group_by_user(found).items()))


def write_words(folder, found):
    write_user_lines(folder / "x.txt", found)
    return (folder / "x.txt",)


LAYOUTS = [write_parquet, write_lists, write_csv, write_order, write_words]


@pytest.fixture(params=LAYOUTS, ids=lambda layout: layout.__name__.removeprefix("write_"))
def source(request, tmp_path, monkeypatch):
    """Return (events, command arguments) of a layout, by default of every layout; blocks and chunks are small."""
    monkeypatch.setattr(tables, "BLOCK_BYTES", 256)
    monkeypatch.setattr(tables, "BATCH_ROWS", 16)
    monkeypatch.setattr(rows_module, "CHUNK_IDS", 64)
    found = make_events()
    return found, request.param(tmp_path, found)


def test_leave_one_out_split_matches_plain_python(source, tmp_path):
    found, given = source
    rows = prepare_splits(given[0], tmp_path / "out", *given[1:], "--negatives", 5, "--max-length", LONGEST)
    when, lists = {(u, i): t for u, i, t in found}, group_by_user(found)
    counts = Counter(item for items in lists.values() for item in items[:-2])
    expected = [(u, items[:place], items[place]) for u, items in lists.items() for place in range(len(items) - 2)]
    train = [(row["user"], row["history"], row["item"]) for row in rows["train"]]
    assert sorted(train) == sorted((u, before[-LONGEST:], item) for u, before, item in expected)
    assert [user for user, *_ in train] != sorted(user for user, *_ in train), "train is not shuffled"
    for split, place in (("valid", -2), ("test", -1)):
        groups = defaultdict(list)
        for row in rows[split]:
            assert row["history"] == lists[row["user"]][:place][-LONGEST:]
            groups[row["user"]].append((row["item"], row["label"]))
        for user, group in groups.items():
            assert group[0] == (lists[user][place], 1) and [label for _, label in group[1:]] == [0] * 5
            drawn = [item for item, _ in group[1:]]
            assert len(set(drawn)) == 5 and not set(drawn) & set(lists[user])
    for split, place in (("train", None), ("valid", -2), ("test", -1)):
        for row in rows[split]:
            assert row["item_count"] == max(1, counts[row["item"]])
            if "time" in row:
                met = row["item"] if row["label"] else lists[row["user"]][place]
                assert row["time"] == when[row["user"], met]
                assert row["history_time"] == [when[row["user"], item] for item in row["history"]]
    assert ("time" in rows["test"][0]) == ("--time" in given)


@pytest.mark.parametrize("source", [write_csv], indirect=True)
def test_user_rows_cover_each_interaction_once(source, tmp_path):
    """Except the first of a user, each interaction is a target once: as the item or within a history."""
    found, given = source
    lists = group_by_user(found)
    arguments = (*given[1:], "--negatives", 0, "--max-length", LONGEST, "--rows", "user")
    rows = prepare_splits(given[0], tmp_path / "out", *arguments)
    learned = Counter()
    for row in rows["train"]:
        learned.update((row["user"], item) for item in [*row["history"][1:], row["item"]] if row["history"])
        place = lists[row["user"]].index(row["item"])
        assert row["history"] == lists[row["user"]][:place][-LONGEST:]
        assert row["later"] == len(lists[row["user"]]) - 2 - 1 - place
    assert learned == Counter((u, item) for u, items in lists.items() for item in items[1:-2])
    for split, place in (("valid", -2), ("test", -1)):
        got = {row["user"]: (row["item"], row["seen"], row["label"], row["later"]) for row in rows[split]}
        assert got == {user: (items[place], items[:place], 1, 0) for user, items in lists.items()}
        assert len(rows[split]) == USERS


@pytest.mark.parametrize("source", [write_csv], indirect=True)
def test_user_test_rows_list_all_held_out_items(source, tmp_path):
    """One row for each user of a split: the first held-out item as `item`, all of them as `right_items`."""
    given = source[1]
    arguments = (*given[1:], "--negatives", 0, "--max-length", LONGEST, "--split", "random")
    each = prepare_splits(given[0], tmp_path / "each", *arguments)
    rows = prepare_splits(given[0], tmp_path / "user", *arguments, "--test-rows", "user")
    pair = itemgetter("user", "item")
    assert sorted(map(pair, each["train"])) == sorted(map(pair, rows["train"]))
    several = 0
    for split in ("valid", "test"):
        held_out = group_by_user(map(pair, each[split]))
        assert [row["user"] for row in rows[split]] == list(held_out)
        first = {row["user"]: row for row in reversed(each[split])}
        for row in rows[split]:
            right = row.pop("right_items")
            assert right == held_out[row["user"]] and row == first[row["user"]]
            several += len(right) > 1
    assert several > 1


def test_user_test_rows_have_no_rolling_histories(tmp_path):
    given = write_parquet(tmp_path, make_events())
    arguments = (*given[1:], "--split", "time", "--negatives", 0, "--test-rows", "user")
    rows = prepare_splits(given[0], tmp_path / "out", *arguments)
    for row in rows["test"]:
        assert row["history"] == row["seen"] and not {*row["history"]} & {*row["right_items"]}


def test_with_valid_adds_validation_rows_to_train(tmp_path):
    given = write_words(tmp_path, make_events())
    rows = prepare_splits(given[0], tmp_path / "out", "--negatives", 0, "--with-valid", "--train-negatives", 2)
    lists = group_by_user(make_events())
    counts = Counter(item for items in lists.values() for item in items[:-1])
    met = sorted((row["user"], row["item"]) for row in rows["train"] if row["label"])
    assert met == sorted((user, item) for user, items in lists.items() for item in items[:-1])
    for row in rows["train"]:
        assert row["item_count"] == max(1, counts[row["item"]])
        assert row["label"] or row["item"] not in lists[row["user"]][:-1]
    for row in rows["valid"]:
        assert row["history"] == row["seen"] == lists[row["user"]][:-2]


@pytest.mark.parametrize("split", ["time", "random"])
def test_time_and_random_splits_hold_out_tenths(split, tmp_path):
    found = [(user, item, time) for seed in (1, 2) for user, item, time in make_events(seed)]
    found = [(user, item, 1000 + n) for n, (user, item, _) in enumerate(found)]
    given = write_parquet(tmp_path, found)
    arguments = (*given[1:], "--split", split, "--negatives", 2, "--max-length", LONGEST)
    rows = prepare_splits(given[0], tmp_path / "out", *arguments)
    met = {name: [(r["user"], r["item"], r["time"]) for r in rows[name] if r["label"]] for name in SPLITS}
    tenth = len(found) // 10
    assert sorted(event for split in SPLITS for event in met[split]) == sorted(found)
    assert [len(met[name]) for name in SPLITS] == [len(found) - 2 * tenth, tenth, tenth]
    if split == "time":
        assert sorted(met["test"]) == sorted(found[-tenth:])
        assert sorted(met["valid"]) == sorted(found[-2 * tenth : -tenth])
    else:
        assert min(time for *_, time in met["test"]) < max(time for *_, time in met["train"])
    for name, earlier in (("valid", ["train"]), ("test", ["train", "valid"])):
        before = sorted((e for split in earlier for e in met[split]), key=lambda event: event[2])
        for row in rows[name]:
            assert row["history"] == group_by_user(before)[row["user"]][-LONGEST:]
        for user in {user for user, *_ in met[name]}:  # times do not reveal the candidates
            times = [{r["time"] for r in rows[name] if r["user"] == user and r["label"] == n} for n in (0, 1)]
            assert times[0] <= times[1] and len(times[0]) == min(2, len(times[1]))
        drawn = Counter(row["user"] for row in rows[name] if not row["label"])
        assert drawn == dict.fromkeys({user for user, *_ in met[name]}, 2)


def test_time_split_histories_cross_the_split_boundary(tmp_path):
    found = [(user, item, 1000 + n) for n, (user, item, _) in enumerate(make_events())]
    given = write_parquet(tmp_path, found)
    arguments = (*given[1:], "--split", "time", "--negatives", 0, "--max-length", LONGEST)
    rows = prepare_splits(given[0], tmp_path / "out", *arguments)
    tenth = len(found) // 10
    for name, first in (("valid", len(found) - 2 * tenth), ("test", len(found) - tenth)):
        written = {row["time"]: row for row in rows[name]}
        assert len(rows[name]) == len(written) == tenth
        for place in range(first, first + tenth):
            user, item, time = found[place]
            before = group_by_user(found[:place]).get(user, [])
            assert (written[time]["user"], written[time]["item"]) == (user, item)
            assert written[time]["seen"] == before and written[time]["history"] == before[-LONGEST:]
    assert any(len(row["seen"]) > LONGEST for row in rows["test"])


def test_train_negatives_are_unseen_items(tmp_path):
    given = write_words(tmp_path, make_events())
    rows = prepare_splits(given[0], tmp_path / "out", "--train-negatives", 3, "--max-length", 0, "--negatives", 1)
    met = {(row["user"], row["item"]) for row in rows["train"] if row["label"]}
    drawn = [(row["user"], row["item"]) for row in rows["train"] if not row["label"]]
    assert len(drawn) == 3 * len(met) and not set(drawn) & met
    assert "history" not in rows["train"][0] and "history" not in (tmp_path / "out/schema.yaml").read_text()


def test_interactions_are_deterministic_per_seed(tmp_path):
    given = write_words(tmp_path, make_events())
    one, same, other = (
        prepare_splits(given[0], tmp_path / out, "--train-negatives", 1, "--negatives", 3, "--seed", seed)
        for out, seed in (("a", 4), ("b", 4), ("c", 5))
    )
    assert one == same and all(one[split] != other[split] for split in SPLITS)


def test_light_gcn_layout_keeps_its_test_split(tmp_path):
    lists = group_by_user(make_events())
    write_user_lines(tmp_path / "train.txt", [(u, i) for u, items in lists.items() for i in items[:-2]])
    write_user_lines(tmp_path / "test.txt", [(u, i) for u, items in lists.items() for i in items[-2:]], end=" ")
    with (tmp_path / "test.txt").open("a") as file:
        file.write("77\n")
    rows = prepare_splits(tmp_path, tmp_path / "out", "--negatives", 4)
    met = {name: sorted((r["user"], r["item"]) for r in rows[name] if r["label"]) for name in SPLITS}
    assert met["test"] == sorted((u, item) for u, items in lists.items() for item in items[-2:])
    held = [user for user, items in lists.items() if len(items) > 3]
    assert [user for user, _ in met["valid"]] == sorted(held)
    learned = sorted((u, i) for u, items in lists.items() for i in items[:-2])
    assert sorted(met["train"] + met["valid"]) == learned


def write_text_table(path, found, line="user,item,time"):
    between = "," if "," in line else "\t"
    path.write_text("".join(between.join(map(str, row)) + "\n" for row in [line.split(between), *found]))


def write_ratings(path, found):
    path.write_text("".join(f"{user}\t{item}\t5\t{time}\n" for user, item, time in found))


def write_split_parquet(path, found):
    path.parent.mkdir(exist_ok=True, parents=True)
    pq.write_table(pa.table(dict(zip(("user", "item", "time"), zip(*found, strict=True), strict=True))), path)


RECBOLE = "user_id:token\titem_id:token\ttimestamp:float"
SPLIT_LAYOUTS = {
    "{}.txt": (write_user_lines, []),
    "clicks_{}.csv": (write_text_table, ["--time", "time"]),
    "ml.{}.inter": (lambda path, found: write_text_table(path, found, RECBOLE), []),
    "x.{}.rating": (write_ratings, []),
    "{}/part-0.parquet": (write_split_parquet, ["--time", "time"]),
    "{}-00000-of-00001.parquet": (write_split_parquet, ["--time", "time"]),
    "{}.parquet/part-0": (write_split_parquet, ["--time", "time"]),
    "{}/b.PARQUET": (write_split_parquet, ["--time", "time"]),
}


@pytest.mark.parametrize(
    "name,valid", [*((name, "valid") for name in SPLIT_LAYOUTS), *(("{}.txt", each) for each in ("val", "dev", None))]
)
def test_source_with_splits_keeps_them(name, valid, tmp_path):
    write, arguments = SPLIT_LAYOUTS[name]
    lists, when = group_by_user(make_events()), {(u, i): t for u, i, t in make_events()}
    parts = {"train": slice(None, -2), valid: slice(-2, -1), "test": slice(-1, None)}
    of = {
        split: [(u, i, when[u, i]) for u, items in lists.items() for i in items[part]] for split, part in parts.items()
    }
    source = tmp_path / "in"
    source.mkdir()
    for split, rows in of.items():
        if split:
            write(source / name.format(split), rows)
    (source / "README.md").write_text("about")
    rows = prepare_splits(source, tmp_path / "out", *arguments, "--negatives", 2)
    met = {split: {(r["user"], r["item"]) for r in rows[split] if r["label"]} for split in SPLITS}
    assert met["test"] == {pair[:2] for pair in of["test"]}
    if valid:
        assert met["train"] == {pair[:2] for pair in of["train"]}
        assert met["valid"] == {pair[:2] for pair in of[valid]}
        for split, end in (("valid", -2), ("test", -1)):
            for row in rows[split]:
                assert row["history"] == lists[row["user"]][:end]
    else:
        assert met["train"] | met["valid"] == {pair[:2] for pair in of["train"]} and met["valid"]


@pytest.mark.parametrize("split", ["", "train/"])
def test_parquet_files_of_a_source_are_selected_as_in_training(split, tmp_path):
    found, source = make_events(), tmp_path / "in"
    for number, name in enumerate(("a.parquet", "b.PARQUET", "part-0", "c.parq")):
        write_split_parquet(source / split / name, found[number::4])
    for name in ("_temporary/0/a.parquet", ".ipynb_checkpoints/a.parquet"):
        write_split_parquet(source / split / name, [(1000, 1000, 1000)])
    (source / split / "notes.txt").write_text("about")
    if split:
        write_split_parquet(source / "test" / "000000000000", [(user, 0, 9000) for user in group_by_user(found)])
    arguments = ["--source", source, "--out", tmp_path / "out", "--time", "time", "--negatives", 0]
    assert "4 Parquet files; left out: 2 hidden" in run_recipe("interactions", *arguments).stderr
    keys = pq.read_table(tmp_path / "out" / "users")["user_key"].to_pylist()
    assert sorted(keys) == sorted(group_by_user(found))
    sizes = json.loads((tmp_path / "out" / "prepared.json").read_text())
    assert sizes["interactions"] == len(found) + (len(keys) if split else 0)


def test_single_source_can_have_a_hidden_name(tmp_path):
    write_text_table(tmp_path / "_x.csv", make_events())
    assert prepare(
        "interactions", tmp_path / "out", "--source", tmp_path / "_x.csv", "--time", "time", "--negatives", 2
    )


def test_linked_folders_of_a_source_are_read(tmp_path):
    write_split_parquet(tmp_path / "lake" / "a.parquet", make_events())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "part").symlink_to(tmp_path / "lake")
    assert prepare("interactions", tmp_path / "out", "--source", tmp_path / "in", "--time", "time", "--negatives", 0)


@pytest.mark.parametrize("name", ["a.parquet", "train/a.parquet"])
def test_table_formats_are_rejected_as_sources(name, tmp_path):
    write_split_parquet(tmp_path / "in" / name, make_events())
    (tmp_path / "in" / "_delta_log").mkdir()
    (tmp_path / "in" / "_delta_log" / "00000000000000000000.json").write_text("{}")
    for place in ("in", f"in/{name}"):
        assert "Delta Lake table" in get_error(tmp_path / place, tmp_path / "out")


def test_incomplete_or_ambiguous_source_splits_are_rejected(tmp_path):
    write_text_table(tmp_path / "a.train.csv", make_events())
    write_text_table(tmp_path / "a.valid.csv", make_events())
    assert "the test split is missing" in get_error(tmp_path, tmp_path / "out")
    write_text_table(tmp_path / "a.test.csv", make_events())
    write_text_table(tmp_path / "b.train.csv", make_events())
    assert "several data sets" in get_error(tmp_path, tmp_path / "out")
    rows = prepare_splits(tmp_path / "a.train.csv", tmp_path / "out", "--split", "random", "--negatives", 0)
    assert sum(map(len, rows.values())) == len(make_events()), "a single file has no splits"


def write_ncf(folder):
    """Write events and candidates in NCF's layout and return both."""
    found, rng = make_events(), random.Random(8)
    lists, last = group_by_user(found), {user: (item, time) for user, item, time in found}
    wrong = {u: rng.sample([i for i in range(ITEMS + 5) if i not in items], 6) for u, items in lists.items()}
    wrong[4][2] = last[4][0]  # as in ML-1M
    lines = [f"{u}\t{i}\t5\t{t}\n" for u, i, t in rng.sample(found, len(found)) if last[u][0] != i]
    (folder / "x.train.rating").write_text("".join(lines))
    (folder / "x.test.rating").write_text("".join(f"{u}\t{i}\t5\t{t}\n" for u, (i, t) in last.items()))
    lines = [f"({u},{last[u][0]})\t" + "\t".join(map(str, items)) + "\n" for u, items in wrong.items()]
    (folder / "x.test.negative").write_text("".join(lines))
    return found, wrong


@pytest.mark.parametrize("source", ["", "x.train.rating"])
def test_ncf_layout_provides_candidates(source, tmp_path):
    found, wrong = write_ncf(tmp_path)
    rows = prepare_splits(tmp_path / source, tmp_path / "out", "--negatives", 3)
    for user, items in group_by_user(found).items():
        group = [(row["item"], row["label"]) for row in rows["test"] if row["user"] == user]
        others = [(item, 0) for item in wrong[user] if item != items[-1]]
        assert group[0] == (items[-1], 1) and sorted(group[1:]) == sorted(others)
        assert [r["item"] for r in rows["valid"] if r["user"] == user and r["label"]] == [items[-2]]
        assert all(r["history"] == items[:-1] for r in rows["test"] if r["user"] == user)
    assert Counter(row["user"] for row in rows["valid"]) == dict.fromkeys(wrong, 4)


@pytest.mark.parametrize("kind", ["txt", "parquet"])
def test_candidates_file_is_used_for_test_rows(kind, tmp_path):
    found = make_events()
    given, lists, path = write_words(tmp_path, found), group_by_user(found), tmp_path / f"given.{kind}"
    wrong = {user: [900, *[i for i in range(ITEMS) if i not in items][:3]] for user, items in lists.items()}
    wrong[555] = [1, 2]  # a user missing in the source
    if kind == "txt":
        write_user_lines(path, [(u, i) for u, items in wrong.items() for i in items])
    else:
        pq.write_table(pa.table({"user": list(wrong), "item": list(wrong.values())}), path)
    rows = prepare_splits(given[0], tmp_path / "out", "--candidates", path, "--negatives", 7)
    for user in lists:
        ranked = sorted(r["item"] for r in rows["test"] if r["user"] == user and not r["label"])
        assert ranked == sorted(wrong[user])
    assert Counter(row["user"] for row in rows["valid"]) == dict.fromkeys(lists, 8)


def test_zero_negatives_write_no_candidates(tmp_path):
    found, _ = write_ncf(tmp_path)
    rows = prepare_splits(tmp_path, tmp_path / "out", "--negatives", 0)
    assert all(row["label"] for row in rows["test"]) and len(rows["test"]) == len(group_by_user(found))
    (tmp_path / "given.txt").write_text("1 2\n")
    wrong = ("--candidates", tmp_path / "given.txt", "--negatives", 0)
    assert "the candidates would not be used" in get_error(tmp_path, tmp_path / "other", *wrong)


def test_min_interactions_keeps_the_k_core(tmp_path):
    found = [*make_events(), (90, 1, 1), (90, 2, 2), (91, 77, 3), (91, 77, 4), (91, 77, 5)]
    given = write_words(tmp_path, found)
    rows = prepare_splits(given[0], tmp_path / "out", "--negatives", 1, "--min-interactions", 3)
    kept = [(user, item) for user, item, _ in found]
    while True:
        users, items = Counter(u for u, _ in kept), Counter(i for _, i in kept)
        fewer = [(u, i) for u, i in kept if users[u] >= 3 and items[i] >= 3]
        if len(fewer) == len(kept):
            break
        kept = fewer
    met = [(r["user"], r["item"]) for split in SPLITS for r in rows[split] if r["label"]]
    assert sorted(met) == sorted(kept) and len(kept) > 10
    ids = pq.read_table(tmp_path / "out/items")["item"].to_pylist()
    assert ids == list(range(len({item for _, item in kept})))


def test_side_feature_files_are_joined(tmp_path):
    given, folder = write_csv(tmp_path, make_events()), tmp_path
    (folder / "users.csv").write_text("who,sex,age\n" + "".join(f"{u},{'mf'[u % 2]},{u / 2}\n" for u in range(3, 20)))
    (folder / "items.json").write_text(
        str({str(i): [f"g{i % 3}", "all"] for i in range(0, ITEMS, 2)}).replace("'", '"')
    )
    sides = ("--user-features", folder / "users.csv", "--item-features", folder / "items.json")
    rows = prepare_splits(given[0], folder / "out", *given[1:], *sides, "--negatives", 2)
    for row in (row for split in SPLITS for row in rows[split]):
        assert row["sex"] == {"f": 1, "m": 2}["mf"[row["user"] % 2]] and row["age"] == row["user"] / 2
        names = ["all", "g0", "g1", "g2"]
        expected = [names.index(f"g{row['item'] % 3}") + 1, 1] if row["item"] % 2 == 0 else []
        assert row["attributes"] == expected
    schema = Schema.load(folder / "out/schema.yaml")
    assert schema.dense == ["age"] and schema.tables["sex"].rows == 3 and schema.tables["attributes"].rows == 5
    assert schema.sparse["attributes"].pooling == "mean"
    assert pq.read_schema(next((folder / "out/items").glob("*"))).names[2:] == ["item_count", "attributes"]


def test_timestamp_strings_are_parsed_as_times(tmp_path):
    lines = "".join(f"a,{item},2026-11-0{day}T10:00:00\n" for item, day in ((1, 3), (2, 1), (3, 2), (4, 4)))
    (tmp_path / "x.csv").write_text("user,item,time\n" + lines)
    arguments = ("--source", tmp_path / "x.csv", "--time", "time", "--negatives", 0)
    row = prepare("interactions", tmp_path / "out", *arguments)["test"][0]
    days = [str(when)[:10] for when in (*row["history_time"], row["time"])]
    assert days == ["2026-11-01", "2026-11-02", "2026-11-03", "2026-11-04"]


@pytest.mark.parametrize("values", [[{"x": 1}], pa.array([["a"]], pa.large_list(pa.string()))])
def test_side_feature_of_unsupported_type_is_rejected(tmp_path, values):
    given = write_csv(tmp_path, make_events())
    pq.write_table(pa.table({"what": ["1"], "place": values}), tmp_path / "items.parquet")
    message = get_error(given[0], tmp_path / "out", *given[1:], "--item-features", tmp_path / "items.parquet")
    assert "the side feature place has the unsupported type" in message and "items.parquet" in message


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"user": ["1", "2"], "time": [1, 2]}, "types string, int64, number, but int64, int64, number in other files"),
        ({"user": [1, 2], "time": pa.array([1, 2], pa.timestamp("ms"))}, "int64, int64, timestamp[ms], but"),
    ],
)
def test_files_with_different_types_are_rejected(tmp_path, columns, message):
    (tmp_path / "in").mkdir()
    pq.write_table(pa.table({"user": [1, 2], "item": [1, 2], "time": [1, 2]}), tmp_path / "in/train.parquet")
    pq.write_table(pa.table({"item": [1, 2], **columns}), tmp_path / "in/test.parquet")
    error = get_error(tmp_path / "in", tmp_path / "out", "--time", "time", "--negatives", 0)
    assert message in error and "test.parquet" in error


def test_whole_and_fractional_times_can_be_mixed(tmp_path):
    (tmp_path / "in").mkdir()
    for name, times in (("train", [0.5, 1.5]), ("test", [2, 3])):
        pq.write_table(pa.table({"user": [1, 2], "item": [1, 2], "time": times}), tmp_path / "in" / f"{name}.parquet")
    rows = prepare("interactions", tmp_path / "out", "--source", tmp_path / "in", "--time", "time", "--negatives", 0)
    assert sorted(row["time"] for row in rows["train"]) == [0.5, 1.5]


GOOD = "user,item,time\n" + "".join(f"{u},{i},{10 * u + i}\n" for u in range(4) for i in range(5))


@pytest.mark.parametrize(
    ("name", "text", "arguments", "message"),
    [
        ("x.csv", GOOD, ["--user", "usr"], "no column 'usr'; did you mean 'user'?"),
        ("x.csv", GOOD + "7,1\n", [], "x.csv, line 22"),
        ("x.csv", GOOD + "7,1,x\n", ["--time", "time"], "x.csv, line 22"),
        ("x.csv", GOOD + ",1,7\n", [], "x.csv, line 22"),
        ("x.csv", GOOD + "7,1,\n", ["--time", "time"], "time is empty"),
        ("x.csv", GOOD + "7,1,7\n", [], "1 user with fewer than 3 interactions; the first, '7', has 1"),
        ("x.csv", GOOD, ["--min-interactions", 9], "no users and items with at least 9"),
        ("x.csv", GOOD, ["--negatives", 9], "a user has interacted with all but 0 of 5"),
        ("x.csv", GOOD, ["--rows", "user", "--max-length", 0], "--rows user --max-length 0"),
        ("x.csv", GOOD, ["--test-rows", "user"], "--test-rows user --negatives 99"),
        ("x.csv", "user,item\n", [], "the source contains no interactions"),
        ("x.csv", "", [], "cannot parse the file"),
        ("x.txt", "1 2 3 4\n2 3 x 5\n", [], "line 2 contains 'x'"),
        ("x.txt", "1 2 3 4\n\n", [], "line 2 contains ''"),
        ("x.txt", "1 2 3 4\n", ["--split", "time"], "a column of times, which --time names"),
        ("x.pdf", "", [], "unknown layout of interactions"),
        ("x.parquet", "no", [], "cannot read the file"),
        ("train.txt", "1 2 3\n", [], "train.txt exists, but the test split is missing"),
        ("x.train.rating", "1\t2\t3\t4\n1\tx\t3\t4\n", [], "x.train.rating, line 2"),
        ("x.train.rating", "1\t2\t3\t4\n", [], "x.test.rating"),
    ],
)
def test_malformed_interaction_sources_are_reported(name, text, arguments, message, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(text)
    source = tmp_path / "in" if name == "train.txt" else tmp_path / "in" / name
    assert message in get_error(source, tmp_path / "out", *arguments)


def test_empty_item_of_a_list_is_located_by_its_row(tmp_path):
    pq.write_table(pa.table({"user": [1, 2], "item": [[1, 2], [3, None]]}), tmp_path / "x.parquet")
    assert "item is empty\n  where:    " + str(tmp_path / "x.parquet, row 1") in get_error(
        tmp_path / "x.parquet", tmp_path / "out"
    )
