"""The command line: what it prints, its exit code, its speed, and what it needs.

Where a separate process would show no more, it is called in this one.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import parquet
import pytest

from raytrec.cli import main

BLOCKER = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "torchrec", "fbgemm_gpu", "mlflow"}:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Block())
"""


def run(*arguments, without_torch=False, cwd=None):
    code = (BLOCKER if without_torch else "") + "from raytrec.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
    )


@pytest.fixture
def here(capsys):
    """Runs a command in this process."""

    def command(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([*map(str, arguments)])
        return subprocess.CompletedProcess(arguments, ended.value.code or 0, *capsys.readouterr())

    return command


def test_help_is_quick():
    def quick(*arguments):
        start = time.perf_counter()
        assert run(*arguments).returncode == 0
        return time.perf_counter() - start < 1.0

    for arguments in (
        ["--help"],
        ["train", "--help"],
        ["prepare", "--help"],
        ["prepare", "criteo", "--help"],
    ):
        assert any(quick(*arguments) for _ in range(6)), arguments  # others may use the processor


def test_driver_side_works_without_torch(tmp_path):
    assert run("--version", without_torch=True).stdout == "0.1.0\n"
    data = tmp_path / "data"
    made = run("prepare", "synthetic", "--out", data, "--rows", 500, without_torch=True)
    assert made.returncode == 0, made.stderr
    looked = run("inspect", data / "train", without_torch=True)
    assert looked.returncode == 0 and looked.stdout.startswith("# Inferred"), looked.stderr
    schema = run("config", "--schema", without_torch=True)
    assert json.loads(schema.stdout)["properties"]["data"]
    (tmp_path / "run.yaml").write_text("data: {train: d/train}")
    resolved = run("config", tmp_path / "run.yaml", "train.epochs=4", without_torch=True)
    assert "epochs: 4" in resolved.stdout


def test_the_driver_needs_no_torch():
    code = BLOCKER + "import raytrec.driver.run, raytrec.worker.loop, raytrec.data.rows, raytrec.data.order"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_import_is_light_and_complete():
    code = BLOCKER + "import raytrec; assert callable(raytrec.train); raytrec.RunConfig, raytrec.evaluate"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return parquet.dataset(tmp_path_factory.mktemp("cli"))


def train(here, data, tmp_path, *overrides):
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{train: {data}/train, test: {data}/test, global_batch_size: 128}}")
    return here("train", config, f"run.dir={tmp_path}/run", "scaling.num_workers=1", *overrides)


@pytest.mark.parametrize(
    "overrides,message",
    [
        (["scaling.wokers=2"], "did you mean scaling.num_workers"),
        (["data.train=/nowhere/train"], "there is no such folder"),
        (["data.global_batch_size=5000", "data.drop_last=true"], "fewer than one global batch"),
        (["data.schema=/nowhere.yaml"], "there is no schema file"),
    ],
)
def test_wrong_input_is_one_message(here, data, tmp_path, overrides, message):
    result = train(here, data, tmp_path, *overrides)
    assert result.returncode == 1
    assert message in result.stderr and "error: " in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.usefixtures("ray_cluster")
def test_bad_row_in_a_worker_is_one_message(here, data, tmp_path):
    schema = tmp_path / "schema.yaml"
    schema.write_text((data / "schema.yaml").read_text().replace("tag: {rows: 12", "tag: {rows: 11"))
    result = train(here, data, tmp_path, f"data.schema={schema}")
    assert result.returncode == 1
    assert "id 11 of feature 'tags' is not in table 'tag'" in result.stderr
    assert ".parquet, row group" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("ray_cluster")
def test_train_json_then_evaluate(here, data, tmp_path):
    result = train(here, data, tmp_path, "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert figures == json.loads((tmp_path / "run/result.json").read_text())
    assert figures["eval.rows"] == 1003
    again = here("evaluate", tmp_path / "run", "--data", data / "test", "--workers", 3, "--json")
    assert json.loads(again.stdout)["eval.auc"] == pytest.approx(figures["eval.auc"], abs=1e-6)


@pytest.mark.survive
def test_ctrl_c_ends_the_run_and_says_so(data, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{train: {data}/train, test: {data}/test, global_batch_size: 128}}")
    code = "from raytrec.cli import main; main()"
    options = [f"run.dir={tmp_path}/run", "scaling.num_workers=1", "train.epochs=100000"]
    process = subprocess.Popen(
        [sys.executable, "-c", code, "train", str(config), *options], stderr=subprocess.PIPE, text=True
    )
    seen = ""
    while "rows/s" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=90)
    assert process.returncode == 130
    assert "resume with: raytrec train --resume" in rest and "Traceback" not in rest
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("raytrec").experiment_id])
    assert run.info.status == "KILLED"


def test_job_script_is_the_same_command(tmp_path):
    script = Path(__file__).parents[1] / "jobs/train.py"
    result = subprocess.run(
        [sys.executable, script, tmp_path / "none.yaml"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1 and "no such config file" in result.stderr
