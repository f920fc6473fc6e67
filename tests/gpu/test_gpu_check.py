"""Tests of `make gpu-check` on CPU and on the GPU stand-in."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import warm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from check import CANNOT_RUN, FAILED, PASSED, run_block_here, run_blocks  # noqa: E402
from here import BlockContext  # noqa: E402

BLOCK_SOURCES = {
    "crash": "import os\ndef run(here):\n    here.found['so_far'] = 1\n    os.abort()",
    "hang": "import time\ndef run(here):\n    print('about to wait')\n    time.sleep(600)",
    "wrong": "def run(here):\n    here.found['seen'] = 3\n    assert 1 > 2, 'one is less than two'",
    "elsewhere": "import here\ndef run(_):\n    raise here.BlockCannotRun('needs another GPU')",
    "right": "def run(here):\n    here.found['answer'] = 42",
}


@pytest.mark.survive
def test_failed_block_does_not_stop_other_blocks(tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    for name, code in BLOCK_SOURCES.items():
        (tmp_path / "broken" / f"{name}.py").write_text(code + "\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    blocks = {f"broken.{name}": 5 if name == "hang" else 120 for name in BLOCK_SOURCES}
    crash, hang, wrong, elsewhere, right = run_blocks("cpu", tmp_path / "shared", blocks)
    assert crash.result == FAILED and "SIGABRT" in crash.why
    assert hang.result == FAILED and "not done after 5 s" in hang.why
    assert (wrong.result, wrong.found) == (FAILED, {"seen": 3}) and wrong.why.startswith("one is less than two")
    assert (elsewhere.result, elsewhere.why) == (CANNOT_RUN, "needs another GPU")
    assert (right.result, right.found) == (PASSED, {"answer": 42})
    assert right.about["torch"] and max(o.seconds for o in (crash, wrong, right)) < 120


def run_check_command(tmp_path, *arguments):
    """Run tests/gpu/check.py and return (exit status, contents of gpu-check.json, output)."""
    out = tmp_path / "gpu-check.json"
    words = [sys.executable, "-W", "ignore", HERE / "check.py", "--smallest", "--out", out, *arguments]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=900)
    return done.returncode, json.loads(out.read_text()), done.stdout + done.stderr


def results_by_block(values):
    return {block["name"]: block["result"] for block in values["blocks"]}


@pytest.mark.survive
def test_blocks_without_runs_pass_on_cpu(tmp_path):
    names = ["environment", "collectives", "parts", "parity", "adam", "speed"]
    status, values, said = run_check_command(tmp_path, "--device", "cpu", "--only", ",".join(names))
    assert results_by_block(values) == dict.fromkeys(names, PASSED), said
    assert status == 0 and values["about"]["device"] == "cpu"
    assert {block["name"]: block["found"] for block in values["blocks"]}["parity"]["cases"] == 4


RESULT_ON_STAND_IN = {"parts": PASSED, "uvm": CANNOT_RUN}


def run_block_in_child(end, name, folder):
    """Run a block on the stand-in in a forked process."""
    run_block_here(name, BlockContext("cuda", True, Path(folder, name), Path(folder), stand_in=True))
    end.send(None)


@pytest.mark.slow
@pytest.mark.parametrize("name", RESULT_ON_STAND_IN)
def test_block_reports_result_on_stand_in(tmp_path, name):
    """The stand-in covers the CUDA branches of the block."""
    (tmp_path / name).mkdir()
    pid, end = warm.fork(run_block_in_child, name, str(tmp_path))
    try:
        assert end.poll(120), "the block did not end within 120 s"
    finally:
        warm.kill_and_wait([pid])
    outcome = json.loads((tmp_path / name / "outcome.json").read_text())
    assert outcome["result"] == RESULT_ON_STAND_IN[name], outcome
    assert "stand-in" in outcome["about"]["device"]


@pytest.mark.survive
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("device", [["--device", "cpu"], ["--device", "cuda", "--stand-in"]], ids=["cpu", "stand-in"])
def test_blocks_with_training_runs_pass(tmp_path, device):
    names = ["train", "resume", "not_finite", "syncs", "phases", "hang", "uvm", "features", "figures"]
    status, values, said = run_check_command(tmp_path, *device, "--only", ",".join(names))
    expected = dict.fromkeys(names, PASSED) | {"uvm": CANNOT_RUN} | ({"syncs": CANNOT_RUN} if "cpu" in device else {})
    assert results_by_block(values) == expected, said
    assert status == 0 and ("stand-in" in values["about"]["device"]) == ("--stand-in" in device)


@pytest.mark.slow
def test_gpu_check_rejects_unknown_block(tmp_path):
    done = subprocess.run(
        [sys.executable, HERE / "check.py", "--only", "sped"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 2 and "no block sped" in done.stderr


def test_wait_is_attributed_to_innermost_library_caller(tmp_path):
    """The caller is the innermost stack frame outside libraries."""
    import traceback

    import disturbed
    import torchrec

    import raytrec

    torch_file = str(Path(torchrec.__file__).parents[1] / "torch" / "_tensor.py")

    def stack(*files):
        return traceback.StackSummary.from_list([(file, 7, "f", "") for file in files])

    ours, theirs = f"{Path(raytrec.__file__).parent}/worker/step.py", torchrec.__file__
    assert disturbed.find_waiting_caller(stack(ours, torch_file)) == ["raytrec", "raytrec/worker/step.py:7"]
    assert disturbed.find_waiting_caller(stack(ours, theirs, torch_file))[0] == "upstream"
    assert (
        disturbed.find_waiting_caller(stack(theirs, ours, sys.prefix + "/lib/python3.11/contextlib.py"))[0] == "raytrec"
    )


def test_idle_share_merges_overlapping_spans():
    from blocks.speed import idle_share

    assert idle_share([(0, 4), (2, 6), (8, 10)]) == pytest.approx(0.2)
    assert idle_share([(5, 6), (0, 10)]) == 0


def test_roofline_matches_gpu_page():
    """The benchmark computes the figures given in docs/gpu.md."""
    import gpu

    from raytrec.models import build_model

    assert gpu.peaks_of("NVIDIA H100 80GB HBM3").memory == 3350e9
    assert gpu.peaks_of("NVIDIA A100-SXM4-40GB").memory == 1555e9
    assert gpu.peaks_of("NVIDIA L40S").fp32 > 2 * gpu.peaks_of("NVIDIA L4").fp32
    assert gpu.peaks_of("Tesla T4") is None
    model = build_model(gpu.schema_of(1, 128), gpu.config_of(gpu.WHOLE, 8).model)
    assert round(gpu.matmul_flops(model) / 1e6, 1) == 96.2
    assert round(gpu.other_bytes(model, 3456, 3) / 1e6, 2) == 0.82
    least = gpu.dense_least_s(gpu.WHOLE, model, 1, "tf32", gpu.peaks_of("NVIDIA H100 80GB HBM3"))
    least += gpu.lookup_bytes(26, 128) / 3350e9
    assert f"{least * 1e6:.2f}" == "0.47"
