"""Host rates of GPUs, compared with the recorded benchmark of the host (benchmarks/results/host.json)."""

from functools import cache

import gpu
import harness
import host
import pytest

from raytrec.config.run_config import RunConfig, load_config
from raytrec.planning.dense_work import count_dense_layers
from raytrec.planning.dry_run import ClusterEstimator
from raytrec.planning.machines import parse_cluster
from raytrec.planning.rates import Rates
from raytrec.planning.step_cost import ASSEMBLY_LOCK_SHARE, COMPILED_LAUNCHES_RATIOS
from raytrec.worker.build import build_unsharded

RECORDED, RATES = harness.load("host"), Rates.for_gpu("H100")
CUDA_LAUNCH_MS = 2.7e-3  # assumed: launching a kernel, less computing the operator for one row on a CPU


def count_launches(figures):
    """Return the launches of a whole step."""
    return sum(figures["launches"].values())


@cache
def count_dense_launches(name, precision="fp32"):
    """Return the launches of the dense layers of a model, as the planner counts them."""
    sections = {"data": {"train": "unused/train", "global_batch_size": 64}, "train": {"matmul": precision}}
    config = RunConfig.model_validate(sections | {"model": host.CASES[name]})
    return count_dense_layers(build_unsharded, config, gpu.schema_of(host.ROWS, host.WIDTH), 64).launches


def test_time_per_launch_matches_the_difference_of_two_models():
    dcn, dlrm = RECORDED["dcn"], RECORDED["dlrm"]
    python_ms = (dcn["ms"] - dlrm["ms"]) / (count_launches(dcn) - count_launches(dlrm))
    assert 1e3 * RATES.launch_s == pytest.approx(python_ms + CUDA_LAUNCH_MS, rel=0.05)


@pytest.mark.parametrize("name", host.CASES)
def test_time_of_a_single_rank_matches_the_benchmark(name):
    expected_ms = RECORDED[name]["ms"] + count_launches(RECORDED[name]) * CUDA_LAUNCH_MS
    assert 1e3 * (count_dense_launches(name) * RATES.launch_s + RATES.step_s) == pytest.approx(expected_ms, rel=0.05)


@pytest.mark.parametrize("name", host.CASES)
@pytest.mark.parametrize("types", [1, 2])
def test_time_of_a_rank_of_8_matches_the_benchmark(name, types):
    """The ratio to a single rank was measured on a busy machine, and the single rank on an idle machine."""
    figures = RECORDED[name]["rank_of_8"][str(types)]
    expected_ms = RECORDED[name]["ms"] * figures["ratio"] + count_launches(figures) * CUDA_LAUNCH_MS
    predicted_ms = 1e3 * (count_dense_launches(name) * RATES.launch_s + RATES.step_s + types * RATES.group_s)
    assert predicted_ms == pytest.approx(expected_ms, rel=0.08)


@pytest.mark.parametrize("name", host.CASES)
def test_assembly_delays_the_host_as_in_the_benchmark(name):
    columns, ids = 1 + gpu.DENSE + gpu.FEATURES, gpu.FEATURES
    assembly_s = host.BATCH * (columns * RATES.assemble_column_s + ids * RATES.read_id_s)
    delay_ms = RECORDED[name]["while_assembling_ms"] - RECORDED[name]["ms"]
    assert 1e3 * assembly_s * ASSEMBLY_LOCK_SHARE == pytest.approx(delay_ms, rel=0.1)


@pytest.mark.parametrize("name", host.CASES)
def test_compiled_layers_cost_as_much_as_eager_fp32_layers(name):
    assert RECORDED[name]["compiled_ms"] == pytest.approx(RECORDED[name]["ms"], rel=0.1)
    ratio = count_dense_launches(name) / count_dense_launches(name, "bf16")
    assert COMPILED_LAUNCHES_RATIOS["bf16"] == pytest.approx(ratio, rel=0.05)


@pytest.mark.survive
def test_job_on_eight_gpus_is_not_predicted_to_wait_for_the_host():
    config = load_config(str(harness.REPO / "jobs" / "criteo_1tb_8xa100.yaml"))
    estimate = ClusterEstimator(config, gpu.schema_of(10_000_000, 128), build_unsharded)(parse_cluster("8xh100"))
    assert estimate.refusal is None
    assert 3.4e-3 < estimate.time.parts["host launches"] < 4.7e-3
    assert 1.3e6 < estimate.time.rows_per_s / 8 < 1.7e6
