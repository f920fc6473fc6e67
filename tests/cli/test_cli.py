"""Test the command line: output, exit codes and imports.

Commands run in this process unless a separate process is needed.
"""

import json
import subprocess
import sys
from functools import partial

import pytest
from small import make_small_schema

from raytrec.cli import main

IMPORT_BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Block())
"""
SLOW_MODULES = {"torch", "torchrec", "fbgemm_gpu", "mlflow", "matplotlib", "sqlalchemy"}
WITHOUT_TORCH = IMPORT_BLOCKER % SLOW_MODULES
WITHOUT_EXTRAS = IMPORT_BLOCKER % (SLOW_MODULES | {"ray", "psutil", "safetensors", "jinja2"})  # as `pip install .`
HEAVY_MODULES = {"torch", "ray", "pyarrow", "numpy", "pandas", "rich"}


def run(*arguments, blocker=WITHOUT_TORCH):
    code = blocker + "from raytrec.cli import main; main()"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def run_here(capsys):
    """Function that runs a command in this process."""

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capsys.readouterr())

    return command


@pytest.mark.parametrize("words", ["--help", "train --help", "prepare --help", "prepare criteo --help"])
def test_help_imports_no_heavy_modules(words):
    own = set() if words.split()[:-1] else {"pydantic"}  # typer parses arguments with pydantic
    shown = run(*words.split(), blocker=IMPORT_BLOCKER % (HEAVY_MODULES | own))
    assert shown.returncode == 0 and "Usage:" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_data_commands_work_without_extras(tmp_path):
    run_alone = partial(run, blocker=WITHOUT_EXTRAS)
    assert run_alone("--version").stdout == "0.1.0\n"
    data = tmp_path / "data"
    made = run_alone("prepare", "synthetic", "--out", data, "--rows", 500)
    assert made.returncode == 0, made.stderr
    looked = run_alone("inspect", data / "train")
    assert looked.returncode == 0 and looked.stdout.startswith("# Inferred"), looked.stderr
    schema = run_alone("config", "--schema")
    assert json.loads(schema.stdout)["properties"]["data"]
    (tmp_path / "run.yaml").write_text("data: {train: d/train}")
    resolved = run_alone("config", tmp_path / "run.yaml", "train.epochs=4")
    assert "epochs: 4" in resolved.stdout


@pytest.mark.slow
def test_package_and_worker_loop_import_without_torch():
    code = "import raytrec, raytrec.worker.loop; raytrec.train, raytrec.RunConfig, raytrec.evaluate"
    assert subprocess.run([sys.executable, "-c", WITHOUT_TORCH + code], timeout=60).returncode == 0


UNLOADABLE_FBGEMM = """
import os, torch
torch.ops.load_library(os.path.join(os.path.dirname(__file__), "fbgemm_gpu_py.so"))
"""


def test_unloadable_fbgemm_is_reported_in_one_message(tmp_path, monkeypatch):
    """As on a machine without NVIDIA's driver, on which the library of the CUDA packages cannot be loaded."""
    package = tmp_path / "site/fbgemm_gpu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(UNLOADABLE_FBGEMM)
    (package / "fbgemm_gpu_py.so").write_bytes(b"\x7fELF")
    (tmp_path / "schema.yaml").write_text(make_small_schema().to_yaml())
    config = f"{{data: {{train: {tmp_path}/train, schema: {tmp_path}/schema.yaml}}, scaling: {{device: cuda}}}}"
    (tmp_path / "run.yaml").write_text(config)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/site", prepend=":")
    done = run("plan", tmp_path / "run.yaml", "--on", "8xh100", blocker="")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: FBGEMM cannot be loaded: " in done.stderr and f"where:    {package}/fbgemm_gpu_py.so" in done.stderr


def test_plan_with_prices_requires_a_config(tmp_path):
    (tmp_path / "prices.yaml").write_text("8xh100: 20\n")
    done = run("plan", "--prices", tmp_path / "prices.yaml", blocker="")
    assert done.returncode == 1 and "error: no config was given" in done.stderr


STARTUP_PROGRAM = """
import sys
from raytrec.cluster.session import warm_up_early
early = [name for name in ("ray", "numpy", "pyarrow", "pydantic") if name in sys.modules]
from raytrec import cli
from raytrec.driver import run, launch
before_ray = "ray" in sys.modules
import ray, ray.train
from raytrec.compat.ray_train import ControlledTrainer
from raytrec.driver import coordinator, policies
from raytrec.worker import loop, rendezvous
rendezvous.OwnAddressConfig("gloo", 60).backend_cls()
print(early, before_ray, sorted({name.partition(".")[0] for name in sys.modules} & %r))
"""


def test_driver_startup_imports_no_slow_modules():
    """Before the warm process runs, only the standard library and YAML are imported."""
    command = [sys.executable, "-c", STARTUP_PROGRAM % SLOW_MODULES]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[] False []\n"


def train(here, tiny_data, tmp_path, *overrides):
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{train: {tiny_data}/train, test: {tiny_data}/test, global_batch_size: 128}}")
    return here("train", config, f"run.dir={tmp_path}/run", "scaling.num_workers=2", *overrides)


@pytest.mark.parametrize(
    "overrides,message",
    [
        (["scaling.wokers=2"], "did you mean scaling.num_workers"),
        (["data.train=/nowhere/train"], "the path does not exist"),
        (["data.global_batch_size=5000", "data.drop_last=true"], "set data.drop_last=false"),
        (["data.schema=/nowhere.yaml"], "the schema file does not exist"),
    ],
)
def test_train_reports_wrong_input_in_one_message(run_here, tiny_data, tmp_path, overrides, message):
    result = train(run_here, tiny_data, tmp_path, *overrides)
    assert result.returncode == 1 and result.stdout == ""
    assert message in result.stderr and "error: " in result.stderr and "Traceback" not in result.stderr


@pytest.mark.usefixtures("ray_cluster")
def test_train_reports_a_bad_row_in_one_message(run_here, tiny_data, tmp_path):
    schema = tmp_path / "schema.yaml"
    schema.write_text((tiny_data / "schema.yaml").read_text().replace("tag: {rows: 12", "tag: {rows: 11"))
    result = train(run_here, tiny_data, tmp_path, f"data.schema={schema}")
    assert result.returncode == 1
    assert "id 11 of feature 'tags' is out of range for table 'tag'" in result.stderr
    assert ".parquet, row group" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run/result.json").exists()


@pytest.mark.usefixtures("ray_cluster")
def test_evaluate_reproduces_the_metrics_of_train(run_here, tiny_data, tmp_path):
    result = train(run_here, tiny_data, tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures == json.loads((tmp_path / "run/result.json").read_text())
    assert figures["eval.rows"] == 1003
    again = run_here("evaluate", tmp_path / "run", "--data", tiny_data / "test", "--workers", 3, "--json")
    assert f"{tiny_data / 'test'}: " in again.stderr and "  test: " not in again.stderr
    evaluated = json.loads(again.stdout)
    for name in ("eval.auc", "eval.ne", "eval.logloss", "eval.calibration"):
        assert evaluated[name] == pytest.approx(figures[name], abs=1e-6)
