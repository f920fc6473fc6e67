"""raytrec plan --from-run: the plan of a run next to the one that what it has recorded would give."""

import asyncio
import json
from dataclasses import replace

import pytest
from uneven import BATCH, IDS, config_of, lines_of, plan_of, schema_of, write_run

from raytrec import cli
from raytrec.common.errors import ConfigError, RunError
from raytrec.common.messages import Start, recorded_ranks
from raytrec.driver.coordinator import Coordinator
from raytrec.driver.predict import Prediction
from raytrec.driver.replan import Entry, Replan, balance_of, replan
from raytrec.embeddings.planner.machines import MACHINES, Cluster
from raytrec.embeddings.planner.rates import Rates
from raytrec.embeddings.planner.recorded import Recorded, with_recorded

ROW_BYTES = BATCH * 64 * 4  # of an id of each row


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with both long bags on rank 0, because its schema expects an id a row of every table."""
    return write_run(tmp_path_factory.mktemp("replan") / "run")


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    """Rates of ranks on CPU whose lookups are slow."""
    file = tmp_path_factory.mktemp("rates") / "rates.json"
    known = replace(Rates.of_machine(MACHINES["1xl4"]), device="cpu", cores=2)
    slow = {way: its._replace(byte_s=1e-9) for way, its in known.lookup.items()}
    file.write_text(replace(known, lookup=slow).to_json())
    return file


def command(capsys, *arguments):
    """(exit code, output, errors) of raytrec plan."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *map(str, arguments)])
    return (ended.value.code or 0, *capsys.readouterr())


def test_recorded_lookups_give_a_better_plan(run, rates):
    found = replan(run, [], rates=rates)
    assert found.expected == dict.fromkeys(IDS, 1) and found.recorded == pytest.approx(IDS)
    # The run's: t0, t2, t4 on rank 0; now the two long ones are apart
    assert found.rank_bytes == pytest.approx({0: 41 * ROW_BYTES, 1: 3 * ROW_BYTES})
    assert found.bytes_of(found.on[0]) == pytest.approx(found.rank_bytes)
    assert found.bytes_of(found.on[1]) == pytest.approx({0: 22 * ROW_BYTES, 1: 22 * ROW_BYTES})
    assert balance_of(found.rank_bytes.values()) == pytest.approx(22 / 41)
    assert found.gain > 0.3 and found.on[1].time.step < found.on[0].time.step
    assert found.step_s == pytest.approx(0.05), "the slowest rank's"
    statistics = with_recorded(found.config, schema_of(), found.recorded).statistics["f0"]
    assert statistics.mean_length == pytest.approx(20) and statistics.hottest == [0.1, 0.4]


def test_it_is_printed_side_by_side(run, rates, capsys):
    code, shown, _ = command(capsys, "--from-run", run, "--rates", rates)
    assert code == 0
    assert "the run's plan" in shown and "planned now" in shown and "rows/s" in shown
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines() if "│" in line]
    of_name = {name: cells for _, name, *cells, _ in rows}
    assert of_name["t2"][:2] == ["1.00", "20.00"] and of_name["balance"] == ["54%", "54%", "100%"]
    assert of_name["rank 0"] == ["85.98", "85.98", "46.14"]
    assert "a step took 50.00 ms (median), " in shown and "planned now: +" in shown
    code, shown, _ = command(capsys, "--from-run", run)
    assert code == 0 and "rows/s" not in shown
    assert "planned now: -46.3% bytes on the busiest rank (times need --rates)" in shown
    found = json.loads(command(capsys, "--from-run", run, "--json", "--rates", rates)[1])
    assert found["gain"] > 0.3 and found["ids_of_a_row"]["recorded"] == pytest.approx(IDS)
    assert [*found["run"]["rank_bytes"].values()] == pytest.approx([41 * ROW_BYTES, 3 * ROW_BYTES])


def test_a_change_of_the_plan_is_tried(run):
    found = replan(run, ["plan.sharding_types=[row_wise]"])
    assert {table.sharding_type for table in found.on[1].tables} == {"row_wise"}
    assert {table.sharding_type for table in found.on[0].tables} == {"table_wise"}
    assert replan(run, [f"data.global_batch_size={BATCH // 2}"]).recorded == pytest.approx(IDS)


@pytest.mark.parametrize(
    "arguments,message",
    [
        ([], "no config was given"),
        (["config.yaml", "--from-run", "RUN"], "CONFIG and --prices exclude --from-run"),
        (["--from-run", "RUN", "--prices", "p.yaml"], "CONFIG and --prices exclude --from-run"),
        (["--from-run", "nowhere"], "there is no such run folder"),
        (["--from-run", "RUN", "--on", "8xh200"], "1x8xh200 has 8 GPUs, the run 2 workers"),
        (["--from-run", "RUN", "plan.shardings=1"], "plan.shardings"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(run, capsys, arguments, message):
    code, _, errors = command(capsys, *(str(run) if each == "RUN" else each for each in arguments))
    assert code == 1 and message in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    "table,changes,message",
    [
        ("t3", {"table": "other"}, "tables of only one of plan and schema: other, t3"),
        ("t3", {"ranks": [2]}, "on ranks [2] of 2"),
        ("t3", {"ranks": []}, "ranks"),
        ("t3", {"sharding_type": "diagonal"}, "sharding_type"),
        ("t3", {"sharding_type": "column_wise", "ranks": [0, 1, 0]}, "5000 × 64 column_wise"),
    ],
)
def test_a_plan_that_does_not_fit_the_run_is_refused(tmp_path, table, changes, message):
    run = write_run(tmp_path / "run")
    entries = json.loads((run / "plan.json").read_text())
    entries = [entry | (changes if entry["table"] == table else {}) for entry in entries]
    (run / "plan.json").write_text(json.dumps(entries))
    with pytest.raises(RunError, match="the plan does not fit the run") as error:
        replan(run, [])
    assert message in str(error.value) and "plan.json" in error.value.where and error.value.do


def test_a_run_without_records_is_refused(tmp_path):
    run = write_run(tmp_path / "run", lines=[])
    with pytest.raises(RunError, match="the run has recorded no lookups") as error:
        replan(run, [])
    assert "tracking.every_steps" in error.value.expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="nothing of a run is in this folder"):
        replan(tmp_path / "empty", [])


@pytest.mark.parametrize(
    "kind,hosts,workers",
    [
        *[("table_wise", 1, 2), ("row_wise", 1, 3), ("column_wise", 1, 4), ("data_parallel", 1, 2)],
        *[("table_row_wise", 2, 6), ("table_column_wise", 2, 4), ("grid_shard", 2, 4), ("grid_shard", 2, 6)],
    ],
)
def test_shards_are_known_from_plan_json_and_lengths_from_shards(tmp_path, kind, hosts, workers):
    schema = schema_of()
    schema.tables["t3"].rows = 5  # of six ranks one has none
    config = config_of(tmp_path, workers, sharding_types=[kind])
    tables = plan_of(config, schema, hosts)
    cluster = Cluster(hosts, workers // hosts, 80, 640, 1e6)
    for table in tables:
        entry = Entry(
            table=table.table, sharding_type=kind, compute_kernel=table.compute_kernel, ranks=table.ranks
        )
        assert entry.shards(table.rows, table.dim, cluster) == [tuple(each) for each in table.shards]
    lines = lines_of(tables, workers)
    assert Recorded(lines).lengths(config, schema) == pytest.approx(IDS)
    found = Prediction(cluster, tables)
    figures = {"expected": IDS, "recorded": IDS, "rank_bytes": {}, "step_s": 1.0}
    made = Replan(config=config, schema=schema, on=[found, found], **figures)
    rank_bytes = made.bytes_of(found)
    assert rank_bytes == pytest.approx({line.rank: line.added("lookup_bytes") / 10 for line in lines})


def test_ranks_that_are_not_recorded_count_as_the_others(tmp_path):
    config, schema = config_of(tmp_path, 128, sharding_types=["row_wise"]), schema_of()
    kept = [line for line in lines_of(plan_of(config, schema), 128) if line.rank in recorded_ranks(128)]
    assert len(kept) == 3 * 64
    assert Recorded(kept).lengths(config, schema) == pytest.approx(IDS, rel=0.02)


def test_features_of_one_table_share_what_was_recorded(tmp_path):
    schema = schema_of(f1={"mean_length": 3, "p99_length": 9, "max_length": 9, "distinct": 9})
    schema.sparse["f0"].table = schema.sparse["f1"].table = schema.sparse["f2"].table = "t0"
    del schema.statistics["f2"]
    known = with_recorded(config_of(tmp_path), schema, {"t0": 10.0}).statistics
    assert [known[name].mean_length for name in ("f0", "f1", "f2")] == [2, 6, 2]
    assert known["f3"] == schema.statistics["f3"] and schema.statistics["f1"].mean_length == 3


def test_the_coordinator_adds_what_ranks_report(tmp_path):
    config, schema = config_of(tmp_path), schema_of()
    lines = lines_of(plan_of(config, schema), 2)

    async def report(recorded):
        coordinator = Coordinator(5, 60, recorded=recorded)
        for message in (Start(total=9, step=0, workers=2), *lines[2:]):
            coordinator.put(message.to_json())
        return await coordinator.recorded()

    found = asyncio.run(report(Recorded([Start(total=9, step=0, workers=3), *lines[:2]])))
    assert found.workers == {2, 3} and found.lengths(config, schema) == pytest.approx(IDS)
    assert asyncio.run(report(None)) is None


def test_on_resize_is_a_key_with_two_values(tmp_path):
    assert config_of(tmp_path).plan.replan == "never"
    with pytest.raises(ConfigError, match="on_resize"):
        config_of(tmp_path, replan="always")
