"""What is in jobs/: configurations load, build their model, have plans for clusters elsewhere; scripts."""

import os
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

from raytrec import cli
from raytrec.common.errors import ConfigError
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema

JOBS = Path(__file__).parents[2] / "jobs"
NAMES = sorted(path.stem for path in JOBS.glob("*.yaml"))
# Of MLPerf Training's DLRM-DCNv2: ids of the 26 features, at most 40 M of each.
MLPERF_ROWS = [
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
]
MOVIELENS = ["user_id", "item_id", "age", "gender", "occupation", "zip_prefix", "release_year", "genres"]


def criteo(sizes=(100,) * 26, dim=128):
    from raytrec_datasets.criteo.recipe import schema_of

    return schema_of(list(sizes), dim)


def of_features(sparse):
    tables = {spec["table"]: {"rows": 99, "dim": 16} for spec in sparse.values()}
    return Schema.parse({"labels": ["label"], "sparse": sparse, "tables": tables}, "features")


def movielens():
    """As `raytrec prepare movielens` writes it for MovieLens-100K."""
    sparse = {name: {"table": name.removesuffix("_id")} for name in [*MOVIELENS, "hour", "weekday"]}
    sparse["genres"]["pooling"] = "mean"
    sparse["history"] = {"table": "item", "pooling": "sequence"}
    return of_features(sparse)


def pairs():
    """As it writes it for pairs of users and items with given candidates."""
    return of_features({"user_id": {"table": "user"}, "item_id": {"table": "item"}})


def schema_for(name):
    if name == "ml1m":
        return pairs()
    return criteo() if name.startswith(("criteo", "synthetic")) else movielens()


@pytest.mark.parametrize("name", NAMES)
def test_loads_and_builds(name):
    from raytrec.models import build_model

    path = JOBS / f"{name}.yaml"
    text = path.read_text()
    assert text.startswith("#"), "names its purpose"
    config = load_config(
        path, [] if "train:" in str(yaml.safe_load(text)["data"]) else ["data.train=d/train"]
    )
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    assert sum(p.numel() for p in build_model(schema_for(name), config.model).parameters()) > 0


@pytest.mark.parametrize("name,hosts", [("criteo_1tb_8xa100", 1), ("criteo_1tb_2x8xh100", 2)])
@pytest.mark.parametrize("sizes", [MLPERF_ROWS, [10_000_000] * 26], ids=["MLPerf", "hashed"])
def test_plans_for_gpus_that_are_not_here(name, hosts, sizes):
    from raytrec.embeddings.planner.dry_run import dry_run, gib_of_ranks

    config = load_config(JOBS / f"{name}.yaml")
    world = hosts * 8
    assert config.scaling.num_workers == world and config.scaling.device == "cuda"
    schema = criteo(sizes)
    plan = dry_run(config, schema, hosts=hosts, gpus=8, memory_gib=80)
    assert [entry.table for entry in plan] == sorted(schema.tables)
    held = gib_of_ranks(plan, world)
    assert max(held) < 80 * 0.85, "room for activations"
    weights = sum(sizes) * 128 * 4 / 2**30
    assert sum(held) == pytest.approx(2 * weights, rel=1e-3), "weights, and as much of Adagrad's state"
    for entry in plan:
        assert entry.compute_kernel == "fused" and set(entry.ranks) <= set(range(world))
        if entry.sharding_type == "table_row_wise":
            assert len({rank // 8 for rank in entry.ranks}) == 1, "within a machine"


def test_each_memory_is_reported_where_it_is(tmp_path, capsys):
    from raytrec.driver.plan import plan, print_plan

    schema = tmp_path / "schema.yaml"
    schema.write_text(yaml.safe_dump(criteo([10_000_000] * 26).model_dump(exclude_none=True)))
    pins = (
        "plan.tables={C1: {compute_kernel: fused_uvm}, C2: {compute_kernel: fused_uvm_caching, ranks: [9]}}"
    )
    given = JOBS / "criteo_1tb_2x8xh100.yaml", [f"data.schema={schema}", pins]
    found = plan(*given, host_memory_gib=2048)
    size = 10_000_000 * 128 * 8 / 2**30
    assert sum(found["host_gib"]) == pytest.approx(2 * size)
    assert found["host_gib"][1] >= size, "C2 is on the second host"
    cache = 10_000_000 * (4 + 0.2 * (16 + 128 * 4)) / 2**30
    assert sum(found["gib"]) == pytest.approx(24 * size + cache)
    print_plan(found)
    *_, gpus, hosts = capsys.readouterr().out.splitlines()
    assert gpus.startswith("2 × 8 GPUs of 80 GiB: tables take")
    assert hosts.startswith("in host memory: ") and f"{2 * size:.1f} in all" in hosts
    with pytest.raises(ConfigError, match=r"table C2: .* of host memory"):
        plan(*given, host_memory_gib=128)
    with pytest.raises(ConfigError, match="the bandwidths of T9 are not known"):
        plan(*given, gpu="T9")


def test_what_does_not_fit_says_so():
    from raytrec.embeddings.planner.dry_run import dry_run

    config = load_config(JOBS / "criteo_1tb_8xa100.yaml")
    with pytest.raises(ConfigError, match=r"no plan for 26 tables \(97\.\d+ GiB of weights\) on 2 workers"):
        dry_run(config, criteo(MLPERF_ROWS), hosts=1, gpus=2, memory_gib=80)
    with pytest.raises(ConfigError, match="table C1: on rank 9"):
        dry_run(load_config(config, ["plan.tables.C1.ranks=[9]"]), criteo(), hosts=1, gpus=8)


def test_a_dry_run_keeps_to_pins_and_leaves_the_environment_alone(monkeypatch):
    from raytrec.embeddings.planner.dry_run import dry_run

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    pins = ["plan.tables.C1.sharding_type=row_wise", "plan.tables.C2.sharding_type=data_parallel"]
    half = ["plan.tables.C3.dtype=fp16", "plan.tables.C3.ranks=[5]"]
    config = load_config(JOBS / "criteo_1tb_8xa100.yaml", [*pins, *half])
    plan = {entry.table: entry for entry in dry_run(config, criteo((800,) * 26), hosts=2, gpus=4)}
    assert plan["C1"].sharding_type == "row_wise" and plan["C1"].ranks == list(range(8))
    assert plan["C1"].gib == pytest.approx([100 * 128 * 8 / 2**30] * 8)
    assert plan["C2"].compute_kernel == "dense"
    assert plan["C2"].gib == pytest.approx([800 * 128 * 8 / 2**30] * 8)
    assert plan["C3"].ranks == [5] and plan["C3"].gib == pytest.approx([800 * 128 * 6 / 2**30])
    assert os.environ["LOCAL_WORLD_SIZE"] == "3"


def test_each_script_is_its_command(monkeypatch):
    """jobs/NAME.py is `raytrec NAME`; docs/jobs.md names those that there are."""
    scripts = sorted(JOBS.glob("*.py"))
    page = (JOBS.parent / "docs/jobs.md").read_text()
    section = page.partition("## With Ray's own command line")[2].partition("\n## ")[0]
    assert {f"{name}.py" for name in re.findall(r"`(?:jobs/)?(\w+)\.py`", section)} == {
        path.name for path in scripts
    }
    given = []
    monkeypatch.setattr(cli, "main", given.append)
    for path in scripts:
        monkeypatch.setattr(sys, "argv", [str(path), "a.yaml", "x=1"])
        runpy.run_path(str(path), run_name="__main__")
    assert [(words[0], words[-2:]) for words in given] == [(p.stem, ["a.yaml", "x=1"]) for p in scripts]
