"""Test jobs/: configurations load, build their models and can be planned for clusters; scripts run."""

import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
import yaml
from dry import PlannedMemory
from raytrec_datasets.criteo.recipe import schema_of

from raytrec import cli
from raytrec.config.run_config import load_config
from raytrec.config.schema import Schema
from raytrec.driver.nodes import build_worker_bundle
from raytrec.driver.preflight import plan
from raytrec.models import build_model
from raytrec.planning.plan_report import print_plans

JOBS = Path(__file__).parents[2] / "jobs"
NAMES = sorted(path.stem for path in JOBS.glob("*.yaml"))
# Number of ids of the 26 features in MLPerf Training's DLRM-DCNv2, at most 40 million each.
MLPERF_ROWS = [
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10),
    *(2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36),
]
MOVIELENS = ["user_id", "item_id", "age", "gender", "occupation", "zip_prefix", "release_year", "genres"]


def criteo(sizes=(100,) * 26, dim=128):
    return schema_of(list(sizes), dim)


def make_schema(sparse):
    tables = {spec["table"]: {"rows": 99, "dim": 16} for spec in sparse.values()}
    return Schema.parse({"labels": ["label"], "sparse": sparse, "tables": tables}, "features")


def movielens():
    """Return the schema that `raytrec prepare movielens` writes for MovieLens-100K."""
    sparse = {name: {"table": name.removesuffix("_id")} for name in [*MOVIELENS, "hour", "weekday"]}
    sparse["genres"]["pooling"] = "mean"
    sparse["history"] = {"table": "item", "pooling": "sequence"}
    return make_schema(sparse)


def pairs():
    """Return the schema for pairs of users and items with given candidates."""
    return make_schema({"user_id": {"table": "user"}, "item_id": {"table": "item"}})


def schema_for(name):
    if name == "ml1m":
        return pairs()
    if (own := JOBS / "schemas" / f"{name}.yaml").exists():
        return Schema.load(own)
    return criteo() if name.startswith(("criteo", "synthetic")) else movielens()


@pytest.mark.parametrize("name", NAMES)
def test_job_configs_load_and_build_their_models(name):
    path = JOBS / f"{name}.yaml"
    text = path.read_text()
    assert text.startswith("#"), "a comment must state the purpose"
    config = load_config(path, [] if "train:" in str(yaml.safe_load(text)["data"]) else ["data.train=d/train"])
    assert load_config(yaml.safe_load(config.to_yaml())) == config
    assert sum(p.numel() for p in build_model(schema_for(name), config.model).parameters()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name,hosts", [("criteo_1tb_8xa100", 1), ("criteo_1tb_8xh100", 1), ("criteo_1tb_2x8xh100", 2)])
@pytest.mark.parametrize("sizes", [MLPERF_ROWS, [10_000_000] * 26], ids=["MLPerf", "hashed"])
def test_criteo_configs_fit_the_gpus_of_their_clusters(name, hosts, sizes):
    config = load_config(JOBS / f"{name}.yaml")
    world = hosts * 8
    assert config.scaling.num_workers == world and config.scaling.device == "cuda"
    schema = criteo(sizes)
    found = PlannedMemory(config, schema, hosts=hosts)
    assert list(found.plan) == sorted(schema.tables)
    held = found.ranks["device"]
    assert max(held) < 80 * 0.85, "room for activations"
    weights = sum(sizes) * 128 * 4 / 2**30
    assert sum(held) == pytest.approx(2 * weights, rel=1e-3), "weights, and as much of Adagrad's state"
    for entry in found.plan.values():
        assert entry.compute_kernel == "fused" and set(entry.ranks) <= set(range(world))
        if entry.sharding_type == "table_row_wise":
            assert len({rank // 8 for rank in entry.ranks}) == 1, "within a machine"


def test_workers_and_readers_of_criteo_jobs_fit_hosts_with_32_cpus():
    for path in JOBS.glob("criteo_1tb_*.yaml"):
        assert 8 * build_worker_bundle(load_config(path), "cuda")["CPU"] <= 32, path.name


@pytest.mark.survive
def test_plan_reports_device_and_host_memory(tmp_path, capsys):
    schema = tmp_path / "schema.yaml"
    schema.write_text(yaml.safe_dump(criteo([10_000_000] * 26).model_dump(exclude_none=True)))
    pins = "plan.tables={C1: {compute_kernel: fused_uvm}, C2: {compute_kernel: fused_uvm_caching, ranks: [9]}}"
    given = JOBS / "criteo_1tb_2x8xh100.yaml", [f"data.schema={schema}", pins]
    plans = plan(*given, "2x8x80gib:2048gib")
    (found,) = plans.metrics()["clusters"]
    memory, size = found["memory"], 10_000_000 * 128 * 8 / 2**30
    in_host_memory = np.add(memory["host"]["weights"], memory["host"]["optimizer state"])
    assert in_host_memory.sum() == pytest.approx(2 * size)
    assert in_host_memory[8:].sum() >= size, "C2 is on the second host"
    cache = 10_000_000 * (4 + 0.2 * (16 + 128 * 4)) / 2**30
    assert sum(memory["device"]["weights"]) == pytest.approx(24 * size / 2)
    assert sum(memory["device"]["cache"]) == pytest.approx(cache)
    print_plans(plans)
    shown = capsys.readouterr().out
    assert "GPU: cache" in shown and "host: optimizer state" in shown and found["fits"]
    (refused,) = plan(*given, "2x8x80gib:128gib").on
    assert re.search(r"table C2: .* of host memory", str(refused.refusal))


def test_dry_run_respects_pins_and_environment(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    pins = ["plan.tables.C1.sharding_type=row_wise", "plan.tables.C2.sharding_type=data_parallel"]
    half = ["plan.tables.C3.dtype=fp16", "plan.tables.C3.ranks=[5]"]
    config = load_config(JOBS / "criteo_1tb_8xa100.yaml", [*pins, *half])
    found = PlannedMemory(config, criteo((800,) * 26), hosts=2, gpus=4)
    plan, gib = found.plan, {name: tiers["device"] for name, tiers in found.of.items()}
    assert plan["C1"].sharding_type == "row_wise" and plan["C1"].ranks == list(range(8))
    assert gib["C1"] == pytest.approx([100 * 128 * 8 / 2**30] * 8)
    assert plan["C2"].compute_kernel == "dense"
    assert gib["C2"] == pytest.approx([800 * 128 * 8 / 2**30] * 8)
    assert plan["C3"].ranks == [5] and gib["C3"] == pytest.approx([800 * 128 * 6 / 2**30])
    assert os.environ["LOCAL_WORLD_SIZE"] == "3"


def test_each_job_script_runs_its_command(monkeypatch):
    """jobs/NAME.py passes its arguments to `raytrec NAME`; docs/jobs.md lists all scripts."""
    scripts = sorted(JOBS.glob("*.py"))
    page = (JOBS.parent / "docs/jobs.md").read_text()
    section = page.partition("## Use Ray's own command line")[2].partition("\n## ")[0]
    assert {f"{name}.py" for name in re.findall(r"`(?:jobs/)?(\w+)\.py`", section)} == {path.name for path in scripts}
    given = []
    monkeypatch.setattr(cli, "main", given.append)
    for path in scripts:
        monkeypatch.setattr(sys, "argv", [str(path), "a.yaml", "x=1"])
        runpy.run_path(str(path), run_name="__main__")
    assert [(words[0], words[-2:]) for words in given] == [(p.stem, ["a.yaml", "x=1"]) for p in scripts]
    assert {path.stem for path in scripts} <= set(typer.main.get_command(cli.app).list_commands(None))
