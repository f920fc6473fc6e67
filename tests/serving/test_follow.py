"""Services that follow a run's deltas: answers of one state, refused deltas, catching up and healing."""

import json
import shutil
import threading
import time
from collections import Counter

import numpy as np
import pytest
from delta_faults import FollowingReplica
from deltas import DeltaFolder, iterate_states, train_steps
from described import assert_described
from local_shards import local_shards
from served import assert_predictions_equal
from test_models import ModelCase
from waiting import wait_for

import raytrec
from raytrec.common.errors import ConfigError, RunError
from raytrec.deltas.chain import remove_old_files
from raytrec.serving import command, follow
from raytrec.serving.batching import UnavailableError
from raytrec.serving.options import ServiceOptions
from raytrec.serving.replica_metrics import describe_model, write_metrics
from raytrec.serving.table_shards import loaded_tables, pooling, shard

STEPS = 6


@pytest.fixture(scope="module", autouse=True)
def intervals():
    with pytest.MonkeyPatch.context() as patch:
        for name, seconds in (("LOCAL_INTERVAL_S", 0.02), ("RETRY_INTERVAL_S", 0.05), ("CHECK_INTERVAL_S", 0.1)):
            patch.setattr(follow, name, seconds)
        yield


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    return train_steps(ModelCase("dlrm", (1, 1)), tmp_path_factory.mktemp("follow"), STEPS)


@pytest.fixture(scope="module")
def exports(steps, tmp_path_factory):
    """Return a function that returns the export of a step."""
    made, root = {}, tmp_path_factory.mktemp("exports")

    def export(step):
        if step not in made:
            made[step] = steps.export(step, root / str(step))
        return made[step]

    return export


@pytest.fixture
def folder(steps, exports, tmp_path):
    """Return a folder of deltas with the export of step 1 and the delta of step 2."""
    folder = DeltaFolder.of_schema(tmp_path / "deltas", steps.schema)
    folder.write_steps(steps, 1, 2)
    folder.add_export(1, exports(1))
    return folder


@pytest.fixture
def two_shards(monkeypatch):
    """Yield two table shards that both have rows of small tables."""
    monkeypatch.setattr(pooling, "PAGE_BYTES", 32)
    with local_shards(2) as shards:
        yield shards


@pytest.fixture(params=["mapped", "sharded"])
def shards(request):
    """Return None for mapped tables, or two table shards."""
    return None if request.param == "mapped" else request.getfixturevalue("two_shards")


def start_follower(folder, shards, **options):
    return follow.Follower(str(folder.path), make_maker=shards.make_maker(folder.path, **options))


def score(follower, table):
    return follower.versions.current.scorer.predict(table).to_pydict()


def write_changed_rows(folder, steps, number, change):
    """Write a delta with changed vectors in the first table; return the table and its first row in the delta."""
    rows, ids, dense = steps.changes(number)
    table = next(iter(rows))
    places, vectors = rows[table]
    folder.write(number, number, rows | {table: (places, change(vectors))}, ids, dense)
    return table, places[0]


class FollowingService(FollowingReplica):
    """HTTP service in this process that follows a folder of deltas."""

    def __init__(self, folder, shards=None):
        super().__init__(folder.path, shards)

    def ready(self):
        status, content, _ = self.ask("/ready")
        assert status == 200
        return json.loads(content)

    def wait(self, **expected):
        """Wait until the freshness contains these values."""
        wait_for(lambda: self.ready()["freshness"].items() >= expected.items(), f"{expected}", 60)

    def wait_for_problem(self, text):
        wait_for(lambda: text in (self.ready()["freshness"]["problem"] or ""), text, 60)

    def figures(self):
        scorer = self.service.versions.current.scorer
        return write_metrics({"a": self.service.figures.collect(describe_model(scorer), 0)}).decode()


@pytest.fixture
def service(folder, shards):
    with FollowingService(folder, shards) as service:
        yield service


def score_states(folder, table):
    """Return version → predictions of rows in each state, computed by a scorer that applies the deltas."""
    return {scorer.version: scorer.predict(table).to_pydict() for _, scorer in iterate_states(folder.path)}


@pytest.mark.slow
def test_each_answer_is_of_the_version_that_it_names(steps, folder, exports, tmp_path, shards):
    whole = DeltaFolder.of_schema(tmp_path / "whole", steps.schema)
    whole.write_steps(steps, 1, STEPS)
    whole.add_export(1, exports(1))
    rows = json.loads(json.dumps(steps.table.to_pylist()))
    states, counts, wrong, stop = score_states(whole, steps.table), Counter(), [], threading.Event()
    column = next(iter(next(iter(states.values()))))
    many = rows * 9  # scored in several parts

    def run(body, expected_rows, service):
        while not stop.is_set():
            status, content, headers = service.ask("/predict", body)
            answer = json.loads(content)
            version = answer.get("version")
            counts[version] += 1
            if status != 200 or headers["X-Model-Version"] != version:
                wrong.append((status, content, headers["X-Model-Version"]))
                continue
            expected = [states[version][column][row] for row in expected_rows]
            if not np.allclose(answer["predictions"][column], expected, rtol=1e-6, atol=1e-6):
                wrong.append((version, answer["predictions"][column], expected))

    with FollowingService(folder, shards) as service:
        service.service.batcher._row_s = 1.0  # at most MIN_FULL_BATCH_ROWS rows in a part
        candidate = {name: value for name, value in rows[0].items() if name != "user"}
        user = {"user": {"user": rows[0]["user"]}, "candidates": [candidate] * 3}
        bodies = [({"rows": rows}, range(len(rows))), ({"rows": many}, [*range(len(rows))] * 9), (user, [0] * 3)]
        threads = [threading.Thread(target=run, args=[*each, service]) for each in bodies]
        for thread in threads:
            thread.start()
        for number in range(2, STEPS + 1):
            folder.write_steps(steps, number, number)
            service.wait(delta=number, step=number, problem=None)
            seen = counts.copy()
            wait_for(lambda seen=seen: (counts - seen).total() > 6, "answers", 60)
        stop.set()
        for thread in threads:
            thread.join()
        text = service.figures()
    assert not wrong, wrong[0]
    assert set(counts) >= {f"small-{n}-{folder.checksums[n][:8]}" for n in range(2, STEPS + 1)} and len(states) == STEPS
    assert f'raytrec_serve_step{{replica="a"}} {STEPS}.0' in text
    assert f'raytrec_serve_deltas_applied_total{{replica="a"}} {STEPS - 2}.0' in text
    assert 'raytrec_serve_deltas_refused_total{replica="a"} 0.0' in text
    behind = float(text.split('raytrec_serve_seconds_behind{replica="a"} ')[1].split()[0])
    assert abs(behind - (time.time() - 1.7e9)) < 60
    assert text.count("raytrec_rows_total{") == 1, "each delta adds a series"


@pytest.mark.slow
def test_refused_delta_keeps_the_state_until_it_is_repaired(steps, folder, service, caplog):
    service.wait(delta=2)
    before = service.scores({"rows": steps.table.to_pylist()})
    table, row = write_changed_rows(
        folder, steps, 3, lambda vectors: np.where(vectors == vectors[0, 0], np.nan, vectors)
    )
    service.wait_for_problem(f"delta 3 cannot be applied: row {row} of table {table} contains NaN")
    time.sleep(0.3)
    assert service.scores({"rows": steps.table.to_pylist()}) == before
    assert service.ready()["version"] == f"small-2-{folder.checksums[2][:8]}"
    assert caplog.text.count("this replica serves step 2 until") == 1
    assert 'raytrec_serve_deltas_refused_total{replica="a"} 1.0' in service.figures()
    document = json.loads(service.ask("/openapi.json")[1])
    for path in ("/ready", "/health"):
        assert_described(document, "get", path, *service.ask(path))
    folder.write_steps(steps, 3, 3)
    service.wait(delta=3, step=3, problem=None)
    assert service.scores({"rows": steps.table.to_pylist()}) != before


@pytest.mark.slow
def test_service_heals_from_a_newer_export(steps, folder, exports, service, shards):
    folder.write_steps(steps, 3, 6)
    service.wait(delta=6)
    assert follow.Follower(str(folder.path)).position.number == 6, "a restarted replica has not caught up"
    folder.manifest(4).unlink()
    with FollowingService(folder, shards) as other:
        other.wait_for_problem("delta 4 cannot be applied: it is missing, but delta 5 exists")
        assert other.ready()["freshness"]["delta"] == 3
        folder.add_export(5, exports(5))
        other.wait(delta=6, step=6, problem=None)
        rows = {"rows": steps.table.to_pylist()}
        assert_predictions_equal(other.scores(rows), service.scores(rows))


@pytest.mark.slow
def test_problems_do_not_name_the_location_of_the_folder(folder, service):
    service.wait(delta=2)
    folder.manifest(3).mkdir()
    service.wait_for_problem("delta 3 cannot be applied: the manifest cannot be read")
    problem = service.ready()["freshness"]["problem"]
    assert str(folder.path) not in problem and "…/deltas/000000000003.json" in problem
    folder.manifest(3).rmdir()
    service.wait(delta=2, problem=None)


@pytest.mark.slow
def test_slow_follower_jumps_over_removed_deltas(steps, folder, exports, service):
    service.wait(delta=2)
    for number in (1, 2):
        folder.manifest(number).unlink()
    shutil.rmtree(folder.path / "exports")
    service.wait_for_problem("delta 3 cannot be applied: it is missing, and delta 2 has been removed")
    folder.checksums[4] = ""
    folder.write_steps(steps, 5, 6)
    folder.add_export(5, exports(5))
    service.wait(delta=6, problem=None)


@pytest.mark.slow
def test_new_stream_is_followed_from_its_first_export(steps, folder, exports, service):
    service.wait(delta=2)
    shutil.rmtree(folder.path)
    anew = DeltaFolder(folder.path, folder.tables, "stream-2")
    anew.write(1, 5)
    service.wait_for_problem("the folder contains the deltas of another run: stream stream-2")
    assert service.ready()["freshness"]["step"] == 2
    anew.add_export(1, exports(5))
    service.wait(delta=1, step=5, problem=None)
    anew.write(2, 6, *steps.changes(6), last=True)
    service.wait(delta=2, step=6, ended=True, problem=None)


def test_command_waits_for_the_first_export(folder, exports, monkeypatch, capsys):
    command.wait_for_full_export(str(folder.path))
    shutil.rmtree(folder.path / "exports")
    with pytest.raises(RunError, match="the folder contains no usable full export"):
        follow.Follower(str(folder.path))
    monkeypatch.setattr(command, "EXPORT_TIMEOUT_S", 0.1)
    (folder.path / "exports").touch()
    with pytest.raises(RunError, match="cannot read the folder of deltas"):
        command.wait_for_full_export(str(folder.path), 0.05)
    (folder.path / "exports").unlink()
    with pytest.raises(RunError, match=r"after 0.1 s: run small has not written a full export"):
        command.wait_for_full_export(str(folder.path), 0.05)
    monkeypatch.setattr(command, "EXPORT_TIMEOUT_S", 60)
    timer = threading.Timer(0.2, folder.add_export, [1, exports(1)])
    timer.start()
    command.wait_for_full_export(str(folder.path), 0.05)
    assert f"run small has not written a full export ({folder.path})" in capsys.readouterr().out
    options = ServiceOptions(uri=str(folder.path), follow=True, promote_from=str(folder.path))
    with pytest.raises(ConfigError, match="does not accept promotions"):
        command.serve(options)


@pytest.mark.slow
def test_shards_keep_the_states_of_slow_replicas(steps, folder, exports, two_shards, monkeypatch):
    """Two replicas with different states share the shards; a replica that is too far behind catches up."""
    for module in (loaded_tables, follow):
        monkeypatch.setattr(module, "MAX_STATES", 4)
    slow, quick = (start_follower(folder, two_shards, cache_bytes=0) for _ in range(2))
    first = score(slow, steps.table)
    for number in range(3, STEPS + 1):
        folder.write_steps(steps, number, number)
        assert quick.advance() and quick.position.number == number
        assert_predictions_equal(score(quick, steps.table), raytrec.load(exports(number)).predict(steps.table))
        if number < 6:
            assert score(slow, steps.table) == first
    with pytest.raises(UnavailableError, match="table shards are unavailable or late"):
        score(slow, steps.table)
    advances = sum(1 for _ in iter(slow.advance, False))
    assert slow.position.number == STEPS and advances <= 2, "each delta is awaited in the shards"
    wait_for(lambda: can_score(slow, steps.table), "the shards", 60)
    last = score(quick, steps.table)
    assert score(slow, steps.table) == last
    assert [len(each._tables) for each in two_shards.shards] == [1, 1], "tables were loaded for an early state"
    new = start_follower(folder, two_shards)
    assert new.position.number == STEPS and score(new, steps.table) == last
    folder.write(STEPS + 1, STEPS, *steps.changes(STEPS, STEPS - 1))
    assert quick.advance() and new.advance()
    deltas = [sorted(tables.delta for tables in shard._tables) for shard in two_shards.shards]
    assert deltas == [[1, STEPS + 1]] * 2, "the deltas were applied to the tables of the golden rows"


@pytest.mark.slow
def test_shards_refuse_values_that_exceed_the_precision(steps, folder, two_shards, monkeypatch, tmp_path):
    """The tables are not loaded again for a delta that shards cannot apply."""
    shutil.rmtree(folder.path / "exports")
    folder.add_export(1, steps.export(1, tmp_path / "half", quantize="fp16"))
    loaded = []
    monkeypatch.setattr(shard, "load_tables", lambda *words: loaded.append(words) or loaded_tables.load_tables(*words))
    with FollowingService(folder, two_shards) as service:
        service.wait(delta=2)
        before = service.scores({"rows": steps.table.to_pylist()})
        table, _ = write_changed_rows(folder, steps, 3, lambda vectors: np.full_like(vectors, 1e6))
        service.wait_for_problem(f"delta 3 cannot be applied: table {table} contains NaN or values beyond")
        time.sleep(0.5)
        assert len(loaded) == 2 and service.scores({"rows": steps.table.to_pylist()}) == before
        folder.write_steps(steps, 3, 3)
        service.wait(delta=3, problem=None)


def test_replica_stops_before_a_value_that_shards_cannot_store(steps, folder, two_shards, monkeypatch, tmp_path):
    """A replica that starts answers with the newest usable state, however many usable deltas came before."""
    for module in (loaded_tables, follow):
        monkeypatch.setattr(module, "MAX_STATES", 2)
    shutil.rmtree(folder.path / "exports")
    folder.add_export(1, steps.export(1, tmp_path / "half", quantize="fp16"))
    folder.write_steps(steps, 3, 5)
    table, _ = write_changed_rows(folder, steps, 6, lambda vectors: np.full_like(vectors, 1e6))
    follower = start_follower(folder, two_shards)
    assert follower.position.number == 5 and can_score(follower, steps.table)
    assert not follower.advance() and f"delta 6 cannot be applied: table {table}" in follower.problem


@pytest.mark.slow
def test_shards_tell_exports_of_different_precisions_apart(steps, folder, two_shards, tmp_path):
    """The distribution of rows over shards depends on the precision, so replicas with both need different tables."""
    first = start_follower(folder, two_shards, cache_bytes=0)
    folder.write_steps(steps, 3, 4)
    folder.add_export(4, steps.export(4, tmp_path / "int8", quantize="int8"))
    second = start_follower(folder, two_shards, cache_bytes=0)
    folder.write_steps(steps, 5, STEPS)
    assert second.position.number == 4 and second.advance() and first.advance()
    for follower, precision in ((first, None), (second, "int8")):
        assert follower.position.number == STEPS
        expected = raytrec.load(steps.export(STEPS, tmp_path / f"last-{precision}", quantize=precision))
        assert_predictions_equal(score(follower, steps.table), expected.predict(steps.table))
    assert [[each.precisions for each in shard._tables] for shard in two_shards.shards] == [["fp32", "int8"]] * 2


def test_missing_shard_stops_the_others_and_needs_one_thread(steps, folder, two_shards, monkeypatch):
    """Shards that went on would forget the state with which the replicas answer."""
    for module in (loaded_tables, follow):
        monkeypatch.setattr(module, "MAX_STATES", 2)
    follower = start_follower(folder, two_shards, cache_bytes=0, fallback="zeros")
    scorer = follower.versions.current.scorer
    expected, threads = score(follower, steps.table), threading.active_count()
    two_shards.stop(1)
    for number in range(3, STEPS + 1):
        folder.write_steps(steps, number, number)
        assert not follower.advance() and "shard" in follower.problem and str(folder.path) not in follower.problem
        scorer.predict(steps.table)
        assert scorer.lookups.take_missing_shards() == {1}
    assert threading.active_count() <= threads + 3, "each attempt starts a thread"
    two_shards.replace(1)
    wait_for(lambda: score(follower, steps.table) == expected, "the shard", 60)
    while follower.advance():
        assert can_score(follower, steps.table), "shards forget the state of the replica"
    assert follower.position.number == STEPS


def test_starting_replica_does_not_advance_the_tables_of_others(steps, folder, exports, two_shards, monkeypatch):
    """A delta with unusable dense weights stops replicas, but shards read only its rows."""
    monkeypatch.setattr(loaded_tables, "MAX_STATES", 2)
    first = start_follower(folder, two_shards, cache_bytes=0)
    expected = score(first, steps.table)
    rows, ids, dense = steps.changes(3)
    folder.write(3, 3, rows, ids, {name: value * np.nan for name, value in dense.items()})
    folder.write_steps(steps, 4, STEPS)
    folder.add_export(STEPS, exports(STEPS))
    second = start_follower(folder, two_shards, cache_bytes=0)
    assert second.position.number == STEPS and can_score(second, steps.table)
    assert score(first, steps.table) == expected


@pytest.mark.slow
def test_replica_loads_an_export_of_another_precision_if_shards_need_it(
    steps, folder, two_shards, monkeypatch, tmp_path
):
    """Old exports are removed, so a shard that restarts cannot load the state of a replica with their precision."""
    monkeypatch.setattr("raytrec.serving.table_shards.connection.REFUSAL_INTERVAL_S", 0.05)
    follower = start_follower(folder, two_shards, cache_bytes=0)
    folder.write_steps(steps, 3, STEPS)
    folder.add_export(4, steps.export(4, tmp_path / "int8", quantize="int8"))
    while follower.advance():
        pass
    remove_old_files(str(folder.path), keep=1)
    two_shards.replace(1)
    wait_for(lambda: follower.advance() or can_score(follower, steps.table), "the other precision", 60)
    scorer = follower.versions.current.scorer
    assert follower.position.number == STEPS and {*scorer.manifest.precisions.values()} == {"int8"}


def can_score(follower, table):
    try:
        return follower.versions.current.scorer.predict(table)
    except UnavailableError:
        return None
