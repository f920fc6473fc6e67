"""Test `raytrec plan`: lacking memory, remedies, and the choice of the smallest and cheapest cluster."""

import json

import pytest
import yaml
from small import make_small_schema

from raytrec import cli
from raytrec.common.errors import ConfigError
from raytrec.driver import preflight
from raytrec.driver.preflight import plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A configuration whose four tables take 19 GiB each with Adagrad's state."""
    folder = tmp_path_factory.mktemp("plan")
    tables = {f"t{i}": {"rows": 40_000_000, "dim": 64} for i in range(4)}
    schema = make_small_schema(sparse={name: {"table": name} for name in tables}, tables=tables)
    (folder / "schema.yaml").write_text(schema.to_yaml())
    config = {
        "data": {"train": str(folder / "train"), "schema": str(folder / "schema.yaml")},
        "scaling": {"num_workers": 8, "device": "cuda"},
        "model": {"bottom_mlp": [64], "top_mlp": [64]},
        "optim": {"embeddings": {"name": "adagrad"}},
        "plan": {"sharding_types": ["table_wise"]},
        "checkpoint": {"async_save": False},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def run(*arguments):
    """Run `raytrec plan` and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *map(str, arguments)])
    return ended.value.code or 0


def test_plan_suggests_settings_that_make_the_run_fit(folder, capsys):
    assert run(folder / "config.yaml", "--on", "1x8xl4,8xh200") == 1
    shown = capsys.readouterr().out
    (line,) = (line for line in shown.splitlines() if "the run would fit with" in line)
    assert "1x8xl4 has no plan: cannot place 4 tables" in shown
    assert "8xh200 has no" not in shown and "8xh200 does not" not in shown
    assert "plan.sharding_types=[table_wise, row_wise]" in line
    assert "optim.embeddings.name=rowwise_adagrad (changes results)" in line
    assert "plan.compute_kernels=[fused, fused_uvm_caching, fused_uvm]" in line
    assert "2x8xl4" not in line, "each table must be on one GPU"


def test_plan_chooses_smallest_and_cheapest_cluster(folder, capsys):
    prices = folder / "prices.yaml"
    prices.write_text("8xl4: 8\n4xl40s: 30\n1xh100-sxm: 6\n8xa100-80: 30\n")
    rows = "plan.sharding_types=[table_wise, row_wise]"
    assert run(folder / "config.yaml", rows, "--prices", prices, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    # The tables need 76 GiB. At 85 % for tables, one H100 is too small; two H100s or four L40S suffice.
    assert found["smallest"] == "2x1xh100-sxm" and found["cheapest"] == "1x8xl4"
    per_hour = {each["name"]: each["price_per_hour"] for each in found["chosen"]}
    assert per_hour == {"2x1xh100-sxm": 12, "1x4xl40s": 30, "1x8xl4": 8, "1x8xa100-80": 30}
    assert all(each["fits"] and each["time"]["rows_per_s"] > 0 for each in found["chosen"])


def test_plan_fails_if_no_known_machine_fits(folder, monkeypatch, capsys):
    machines = {"1xl4": preflight.MACHINES["1xl4"]}
    monkeypatch.setattr(preflight, "MACHINES", machines)
    assert run(folder / "config.yaml", "plan.tables={t0: {ranks: [9999]}}", "--on", "any") == 1
    assert "the run fits on none of the machine types" in capsys.readouterr().out


@pytest.mark.slow
def test_plan_reports_lack_of_gpu_memory_for_a_step(folder):
    made = plan(folder / "config.yaml", ["data.global_batch_size=8388608", "plan.sharding_types=[row_wise]"], "8xl4")
    (found,) = made.on
    (lack,) = found.lacks
    assert lack.tier == "device" and lack.needs > lack.has == 22
    assert found.remedies and not found.fits


@pytest.mark.parametrize(
    "text,message",
    [
        ("[1, 2]", "not a mapping of machines to prices"),
        ("8xh100: cheap", "not a mapping of machines to prices"),
        ("9xh9: 3", "there is no machine '9xh9'"),
    ],
)
def test_plan_rejects_invalid_price_files(folder, text, message):
    (folder / "odd.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        plan(folder / "config.yaml", [], prices=folder / "odd.yaml")


@pytest.mark.slow
def test_plan_draws_shards_as_svg(folder, tmp_path, capsys):
    given = folder / "config.yaml", "--on", "8xh200", "--picture"
    assert run(*given, tmp_path / "shards.svg") == 0
    shown = capsys.readouterr()
    assert "<svg" in (tmp_path / "shards.svg").read_text() and "rows/s" in shown.out
    assert f"picture      {tmp_path / 'shards.svg'}" in shown.err and "assumed" not in shown.err
    assert run(*given, tmp_path / "shards.pdf") == 1
    assert "shards.pdf is not an .svg or .png file" in capsys.readouterr().err
    assert run(*given, tmp_path / "missing/shards.svg") == 1
    assert (
        "cannot write the picture: No such file" in (shown := capsys.readouterr().err)
        and "or change --picture" in shown
    )


def test_plan_names_the_machines_that_it_assumes(folder, capsys):
    run(folder / "config.yaml", "--json")
    shown = capsys.readouterr()
    assert "assumed: --on 1x8x80gib; name other machines with --on" in shown.err
    assert json.loads(shown.out)["clusters"][0]["memory_gib"] == 80


MODEL_SOURCE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, schema, config, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(64, outputs)

    def forward(self, dense, inputs):
        return self.layer(inputs["t0"])
"""


def test_plan_imports_models_from_the_working_directory(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "plan_model.py").write_text(MODEL_SOURCE)
    monkeypatch.chdir(tmp_path)
    settings = ["model={name: 'plan_model:Net'}", "plan.sharding_types=[row_wise]"]
    assert run(folder / "config.yaml", *settings, "--on", "8xh200") == 0
    capsys.readouterr()
    assert run(folder / "config.yaml", "model={name: 'missing_model:Net'}", "--on", "8xh200") == 1
    shown = capsys.readouterr()
    assert "error: cannot import model missing_model:Net" in shown.err and "1x8xh200" not in shown.out
