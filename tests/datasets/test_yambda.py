"""Yambda recipe: layouts of the source, and rows compared with a plain loop over events."""

import json
import shlex
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from raytrec_datasets.yambda.events import TYPES, read_events
from raytrec_datasets.yambda.synthetic import compute_auc, write_source
from recipes import get_recipe_error, run_recipe

from raytrec.common.errors import ConfigError, DataError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema

JOBS = Path(__file__).parents[2] / "jobs"
USERS, DAYS, HISTORY = 12, 4, 12


def run(*arguments):
    result = run_recipe("yambda", "--history", HISTORY, *arguments)
    assert result.exit_code == 0, result.exception
    return shlex.split(result.stderr.splitlines()[-1])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("yambda")
    write_source(folder, "50m", USERS, DAYS, seed=1)
    return folder


@pytest.fixture(scope="module")
def events(source):
    """Events as plain dictionaries, with the source's keys."""
    return pq.read_table(source / "flat/50m/multi_event.parquet").to_pylist()


def test_generated_events_have_the_public_schema(source, events):
    schema = pq.read_schema(source / "flat/50m/multi_event.parquet")
    types = {"uid": pa.uint32(), "timestamp": pa.uint32(), "item_id": pa.uint32(), "is_organic": pa.uint8()}
    types |= {"played_ratio_pct": pa.uint16(), "track_length_seconds": pa.uint32()}
    assert all(schema.field(name).type == kind for name, kind in types.items())
    assert [(e["uid"], e["timestamp"]) for e in events] == sorted((e["uid"], e["timestamp"]) for e in events)
    assert all((e["event_type"] == "listen") == (e["played_ratio_pct"] is not None) for e in events)
    listens = [e for e in events if e["event_type"] == "listen"]
    assert 0.5 < np.mean([e["played_ratio_pct"] >= 50 for e in listens]) < 0.75
    assert 5 < len(listens) / USERS / DAYS < 30


def split_by_type(source, folder, layout):
    """Write the events of multi_event.parquet in a file for each type, or as a row for each user."""
    table = pq.read_table(source / "flat/50m/multi_event.parquet")
    place = folder / layout / "50m"
    place.mkdir(parents=True)
    if layout == "flat":
        kind = table["event_type"].cast(pa.string())
        for name in TYPES:
            part = table.filter(pc.equal(kind, name)).drop_columns(["event_type"])
            if name != "listen":
                part = part.drop_columns(["played_ratio_pct", "track_length_seconds"])
            pq.write_table(part, place / f"{name}s.parquet")
    else:
        table = table.set_column(6, "event_type", table["event_type"].cast(pa.string()))
        columns = [name for name in table.column_names if name != "uid"]
        lists = table.group_by("uid", use_threads=False).aggregate([(name, "list") for name in columns])
        names = {"item_id": "item_ids", "timestamp": "timestamps"}
        lists = lists.rename_columns({f"{name}_list": names.get(name, name) for name in columns})
        pq.write_table(lists, place / "multi_event.parquet")
    for name in ("artist", "album"):
        (folder / f"{name}_item_mapping.parquet").write_bytes((source / f"{name}_item_mapping.parquet").read_bytes())


@pytest.mark.parametrize("layout", ["flat", "sequential"])
def test_all_layouts_have_the_same_events(source, tmp_path, layout):
    split_by_type(source, tmp_path, layout)
    expected, actual = read_events(source, "50m"), read_events(tmp_path, "50m")
    keys = [sorted(zip(e.user, e.time, e.item, e.kind, e.played, e.organic, strict=True)) for e in (expected, actual)]
    assert keys[0] == keys[1]
    places = list(zip(actual.user, actual.time, strict=True))
    assert places == sorted(places)
    for name in ("artist", "album", "users", "items"):
        assert (getattr(expected, name) == getattr(actual, name)).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.drop_columns(["event_type"]).append_column("event_type", pa.array(["skip"] * len(t))), "'skip'"),
        (lambda t: t.drop_columns(["timestamp"]), "column timestamp is missing"),
        (None, "cannot read the file"),
    ],
)
def test_malformed_events_are_reported(source, tmp_path, change, message):
    split_by_type(source, tmp_path, "sequential")
    path = tmp_path / "flat/50m/multi_event.parquet"
    path.parent.mkdir(parents=True)
    if change is None:
        path.write_text("no")
    else:
        pq.write_table(change(pq.read_table(source / "flat/50m/multi_event.parquet")), path)
    with pytest.raises(DataError) as error:
        read_events(tmp_path, "50m")
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize("name", ["is_organic", "timestamps"])
def test_sequential_columns_without_lists_are_reported(source, tmp_path, name):
    split_by_type(source, tmp_path, "sequential")
    path = tmp_path / "sequential/50m/multi_event.parquet"
    table = pq.read_table(path)
    table = table.drop_columns([name]).append_column(name, pa.array([1] * len(table)))
    pq.write_table(table, path)
    with pytest.raises(DataError, match=f"column {name.removesuffix('s')} is missing") as error:
        read_events(tmp_path, "50m")
    assert str(path) in str(error.value)


def test_other_layouts_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not have Yambda's layout"):
        read_events(tmp_path, "50m")
    assert get_recipe_error(ConfigError, "yambda", tmp_path / "out")


def list_expected_rows(source, events, candidates):
    """Return the rows of all requests in the order of users, from a loop over events."""
    maps = {}
    for name in ("artist", "album"):
        pairs = pq.read_table(source / f"{name}_item_mapping.parquet").to_pylist()
        maps[name] = {pair["item_id"]: pair[f"{name}_id"] for pair in pairs}
    rows, past, user = [], [], None
    for number, event in enumerate(events):
        if event["uid"] != user:
            user, past = event["uid"], []
        played, kind = event["played_ratio_pct"] or 0, event["event_type"]
        action = {"listen": 1 if played >= 50 else 4, "like": 2}.get(kind, 0)
        if kind == "listen":
            day, item = event["timestamp"] // 86400, event["item_id"]
            later = [e for e in events[number + 1 :] if (e["uid"], e["item_id"]) == (user, item)][:1]
            likes = [e for e in later if e["event_type"] == "like" and e["timestamp"] - event["timestamp"] <= 1800]
            last = rows[-1] if rows else None
            joins = last and (last["uid"], last["day"]) == (user, day) and event["timestamp"] - last["end"] <= 1800
            if not joins or len(last["item_id"]) == candidates:
                kinds = [[i for i, e in past if e["action"] == a] for a in (1, 2, 4)]
                read = [dict(past)[i] for i in sorted(i for kind in kinds for i in kind[-HISTORY // 3 :])]
                last = {"uid": user, "day": day, "time": event["timestamp"], "listen_plus": [], "liked": []}
                last |= {"item_id": [], "artist_id": [], "history": [(e["item"], e["action"], e["time"]) for e in read]}
                rows.append(last)
            last["end"] = event["timestamp"]
            last["item_id"].append(item)
            last["artist_id"].append(maps["artist"][item])
            last["listen_plus"].append(int(action == 1))
            last["liked"].append(len(likes))
        past.append((number, {"item": event["item_id"], "action": action, "time": event["timestamp"]}))
    return rows


@pytest.mark.parametrize("candidates", [1, 3])
def test_rows_equal_those_of_a_loop_over_events(source, events, tmp_path, candidates):
    out = tmp_path / "out"
    run("--source", source, "--out", out, "--candidates", candidates, "--dim", 8)
    expected = list_expected_rows(source, events, candidates)
    users = pq.read_table(out / "users")["user_key"].to_pylist()
    items = pq.read_table(out / "items")["item_key"].to_pylist()
    got, artists = [], {}
    for day in range(DAYS):
        folder = out / "test" if day == DAYS - 1 else out / f"train/day={day:03d}"
        for row in pq.ParquetFile(next(folder.iterdir())).read().to_pylist():
            names = ("item_id", "artist_id", "listen_plus", "liked")
            row |= {name: [row[name]] for name in names if candidates == 1}
            history = zip(row["history"], row["history_action"], row["history_time"], strict=True)
            got.append(
                {
                    "uid": users[row["uid"]],
                    "day": day,
                    "time": row["time"],
                    "item_id": [items[i] for i in row["item_id"]],
                    "history": [(items[i], action, time) for i, action, time in history],
                    **{name: row[name] for name in ("listen_plus", "liked")},
                }
            )
            artists |= dict(zip(row["item_id"], row["artist_id"], strict=True))
    numbers = {items.index(i): a for row in expected for i, a in zip(row["item_id"], row["artist_id"], strict=True)}
    assert len({*zip(artists.values(), (numbers[i] for i in artists), strict=True)}) == len({*numbers.values()})
    for row in expected:
        del row["end"], row["artist_id"]
    order = sorted(range(len(expected)), key=lambda i: expected[i]["day"])  # days, then users
    assert got == [expected[i] for i in order]
    assert any(sum(row["liked"]) for row in got)
    schema = Schema.load(out / "schema.yaml")
    assert ("user_x_hour" in schema.candidates, "item_x_hour" in schema.candidates) == (False, candidates > 1)
    rows = json.loads((out / "prepared.json").read_text())["rows"]
    assert sum(rows.values()) == len(expected)


def test_short_histories_and_early_days_can_be_left_out(source, tmp_path):
    run("--source", source, "--out", tmp_path / "out", "--min-history", 20, "--first-day", 1)
    assert sorted(path.name for path in (tmp_path / "out/train").iterdir()) == ["day=001", "day=002"]


def test_day_before_the_last_can_be_valid(source, tmp_path):
    for name, options in (("without", ()), ("with", ["--valid"])):
        command = run("--out", tmp_path / name, "--source", source, *options)
        load_config(JOBS / "dlrm_v4.yaml", command[command.index("jobs/dlrm_v4.yaml") + 1 :])
    before, after = (pq.read_table(tmp_path / name / "train") for name in ("without", "with"))
    valid = pq.read_table(tmp_path / "with/valid")
    is_held_out = pc.equal(before["day"].cast(pa.int32()), DAYS - 2)
    assert valid.equals(before.filter(is_held_out).drop_columns(["day"])) and len(valid)
    assert after.drop_columns(["day"]).equals(before.filter(pc.invert(is_held_out)).drop_columns(["day"]))
    assert pq.read_table(tmp_path / "with/test").equals(pq.read_table(tmp_path / "without/test"))


def test_auc_equals_the_share_of_ordered_pairs():
    rng = np.random.default_rng(3)
    scores, labels = rng.random(60), rng.random(60) < 0.4
    pairs = [a > b for a in scores[labels] for b in scores[~labels]]
    assert compute_auc(scores, labels) == pytest.approx(np.mean(pairs))
