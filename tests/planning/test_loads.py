"""raytrec inspect --from-run: schema statistics from the lookups recorded by a run."""

import pytest
from uneven import IDS_PER_ROW, make_rank_lines, plan_uneven_run, uneven_config, uneven_schema, write_uneven_run

from raytrec import cli
from raytrec.common.errors import RunError
from raytrec.config.schema import Schema
from raytrec.driver.evaluation import read_run_schema
from raytrec.planning.loads import compute_recorded_lengths, replace_lengths
from raytrec.tracking.history import select_recorded_ranks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Write a run with both long bags on rank 0, because its schema expects one id per row of each table."""
    return write_uneven_run(tmp_path_factory.mktemp("recorded") / "run")


def run_inspect(capsys, *arguments):
    """Return the exit code, output and errors of raytrec inspect."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["inspect", *map(str, arguments)])
    return (ended.value.code or 0, *capsys.readouterr())


def test_recorded_lookups_balance_the_plan(run, capsys, tmp_path):
    out = tmp_path / "schema.yaml"
    assert run_inspect(capsys, "--from-run", run, "--out", out)[0] == 0
    schema = Schema.load(str(out))
    lengths = {feature: known.mean_length for feature, known in schema.statistics.items()}
    assert lengths == pytest.approx({name.replace("t", "f"): ids for name, ids in IDS_PER_ROW.items()})
    assert schema.statistics["f0"].hottest == [0.1, 0.4]
    before, now = (
        {table.table: table.ranks for table in plan_uneven_run(uneven_config(run), known)}
        for known in (uneven_schema(), schema)
    )
    assert before["t0"] == before["t2"] and now["t0"] != now["t2"], "the long bags are on different ranks"
    assert run_inspect(capsys, "--from-run", run)[1] == out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "inspect needs either data or a run"),
        (["data", "--from-run", "RUN"], "inspect needs either data or a run"),
        (["--from-run", "nowhere"], "the run folder does not exist"),
        (["--from-run", "RUN", "--out", "RUN"], "the output path is a folder"),
    ],
)
def test_inspect_rejects_conflicting_arguments(run, capsys, arguments, message):
    code, _, errors = run_inspect(capsys, *(str(run) if each == "RUN" else each for each in arguments))
    assert code == 1 and message in errors and "Traceback" not in errors


def test_inspect_rejects_runs_without_recorded_lookups(tmp_path):
    run = write_uneven_run(tmp_path / "run", lines=[])
    with pytest.raises(RunError, match="the run has not recorded any lookups") as error:
        read_run_schema(run)
    assert "tracking.every_steps" in error.value.expected
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunError, match="the folder contains no files of a run"):
        read_run_schema(tmp_path / "empty")


@pytest.mark.parametrize(
    ("kind", "hosts", "workers"),
    [
        *[("table_wise", 1, 2), ("row_wise", 1, 3), ("column_wise", 1, 4), ("data_parallel", 1, 2)],
        *[("table_row_wise", 2, 6), ("table_column_wise", 2, 4), ("grid_shard", 2, 4), ("grid_shard", 2, 6)],
    ],
)
def test_lengths_are_computed_for_each_sharding_type(tmp_path, kind, hosts, workers):
    schema = uneven_schema()
    schema.tables["t3"].rows = 5  # one of six ranks has no rows
    config = uneven_config(tmp_path, workers, sharding_types=[kind])
    lines = make_rank_lines(plan_uneven_run(config, schema, hosts), workers)
    assert compute_recorded_lengths(lines, config, schema) == pytest.approx(IDS_PER_ROW)


def test_unrecorded_ranks_get_the_mean_of_recorded_ranks(tmp_path):
    config, schema = uneven_config(tmp_path, 128, sharding_types=["row_wise"]), uneven_schema()
    lines = make_rank_lines(plan_uneven_run(config, schema), 128)
    kept = [line for line in lines if line.rank in select_recorded_ranks(128)]
    assert len(kept) == 3 * 64
    assert compute_recorded_lengths(kept, config, schema) == pytest.approx(IDS_PER_ROW, rel=0.02)


def test_features_share_recorded_lookups_of_their_table(tmp_path):
    schema = uneven_schema(f1={"mean_length": 3, "p99_length": 9, "max_length": 9, "distinct": 9})
    schema.sparse["f0"].table = schema.sparse["f1"].table = schema.sparse["f2"].table = "t0"
    del schema.statistics["f2"]
    known = replace_lengths(uneven_config(tmp_path), schema, {"t0": 10.0}).statistics
    assert [known[name].mean_length for name in ("f0", "f1", "f2")] == [2, 6, 2]
    assert known["f3"] == schema.statistics["f3"] and schema.statistics["f1"].mean_length == 3
