"""Test device selection and resource requests on a Ray cluster that pretends to have two GPUs."""

import json
import pickle
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import parquet
import pynvml
import pytest
from small import make_small_schema
from waiting import wait_for

from raytrec.common import machine
from raytrec.common.errors import ConfigError, GpuFailedError
from raytrec.common.machine import get_smallest_gpu_memory
from raytrec.compat.ray_core import list_alive_nodes
from raytrec.config.run_config import RunConfig
from raytrec.driver import launch, nodes
from raytrec.driver import run as driver
from raytrec.driver.nodes import GpuNode
from raytrec.embeddings.constraints import resolve_constraints
from raytrec.planning.memory import estimate_copy_bytes
from raytrec.worker.context import WorkerTask

pytestmark = pytest.mark.slow


@pytest.fixture
def cpu_build():
    """Pretend that torch is built for CPUs, whatever build is installed."""
    with patch("raytrec.driver.nodes.get_build_device", lambda: "cpu"):
        yield


@pytest.fixture
def console():
    said = []
    return SimpleNamespace(said=said, note=said.append)


def settings(workers=2, readers=1, **scaling):
    values = parquet.config_values("unused", "unused")
    values["data"]["readers"] = readers
    values["scaling"] = {"num_workers": workers, **scaling}
    return RunConfig.model_validate(values)


def test_auto_chooses_cpu_if_torch_is_built_for_cpus(ray_with_gpus, cpu_build, console):
    assert nodes.choose_device(settings(), nodes.list_gpu_nodes(), console) == "cpu"
    (said,) = console.said
    assert "GPUs are available, but the packages on this machine are for CPUs" in said
    assert "make install DEVICE=cuda" in said


def test_cpu_training_rejects_cuda_graphs(ray_with_gpus, cpu_build, console):
    values = settings()
    values.train.compile = "graphs"
    with pytest.raises(ConfigError, match="CUDA graphs require GPUs, but the packages are for CPUs") as error:
        nodes.choose_device(values, nodes.list_gpu_nodes(), console)
    assert error.value.do == "set train.compile=true"


def test_cuda_device_requires_a_cuda_build_of_torch(ray_with_gpus, cpu_build, tiny_data, tmp_path):
    with pytest.raises(ConfigError, match="the packages on this machine are for CPUs") as error:
        driver.train(parquet.config_values(tiny_data, tmp_path / "run", scaling__device="cuda"))
    assert "make install DEVICE=cuda" in error.value.do and "scaling.device=cpu" in error.value.do
    assert not (tmp_path / "run/events.jsonl").exists(), "no worker has started"


def test_auto_chooses_cuda_if_torch_is_built_for_cuda(ray_with_gpus, console):
    with patch("raytrec.driver.nodes.get_build_device", lambda: "cuda"):
        assert nodes.choose_device(settings(), nodes.list_gpu_nodes(), console) == "cuda"
    assert not console.said


def test_gpu_nodes_answer_while_all_resources_are_in_use(ray_with_gpus):
    """Tasks inspect remote nodes and need no free GPU."""
    import ray

    @ray.remote(num_cpus=6, num_gpus=2)
    class Busy:
        def ready(self):
            return True

    busy = Busy.remote()
    ray.get(busy.ready.remote(), timeout=60)
    with patch("raytrec.driver.nodes.is_local", lambda: False):
        (node,) = nodes.list_gpu_nodes()
    ray.kill(busy)
    assert node == GpuNode("127.0.0.1", 2, **nodes.inspect_this_node())
    assert node.built_for in ("cpu", "cuda") and node.host_memory > 2**30


def test_choose_device_ignores_unresponsive_nodes(ray_with_gpus, console):
    node = GpuNode("10.0.0.9", 2)
    with patch("raytrec.driver.nodes.is_local", lambda: False):
        assert nodes.choose_device(settings(), [node], console) == "cuda"


@pytest.mark.parametrize(
    "device,workers,readers,message",
    [
        ("cuda", 3, 1, "the cluster has 2 GPUs for 3 workers"),
        ("cuda", 2, 3, r"the nodes with GPUs have no room for 2 workers with readers \(6 CPUs in total\)"),
        ("cuda", 2, 2, None),
        ("cpu", 2, 3, r"no room for 2 workers with readers \(6 CPUs in total\)"),
    ],
)
def test_capacity_check_includes_readers(ray_with_gpus, device, workers, readers, message):
    """If all nodes have GPUs, readers use their workers' CPUs; without CPUs, they wait forever."""
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        nodes._check_capacity(settings(workers, readers), device, 2)


def test_worker_bundle_includes_reader_cpus():
    run = settings(2, 3, cpus_per_worker=2)
    assert nodes.build_worker_bundle(run, "cpu") == {"CPU": 5} and nodes.count_local_cpus(run) == 10
    assert nodes.build_worker_bundle(run, "cuda") == {"CPU": 5, "GPU": 1}
    assert nodes.build_worker_bundle(run, "cuda", cpu_nodes_read_rows=True) == {"CPU": 2, "GPU": 1}


def test_run_requests_reader_cpus_from_the_autoscaler(ray_with_gpus):
    """Reading tasks on nodes without GPUs request no CPU, so the run requests the CPUs."""
    import ray.train
    from ray._private.ray_constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL as CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get

    from raytrec.driver.policies import NodeCapacityPolicy

    def asks(readers, workers):
        bundles = json.loads(_internal_kv_get(CHANNEL) or "[]")
        asked = Counter((each.get("CPU", 0), each.get("GPU", 0)) for each in bundles)
        return asked == Counter({(1, 0): readers, (1, 1): workers})

    places = {"CPU": 1, "GPU": 1}
    scaling = ray.train.ScalingConfig(num_workers=2, use_gpu=True, resources_per_worker=places)
    room = NodeCapacityPolicy(scaling, None, 2, 2, reader_cpus=4)
    room.after_controller_start(SimpleNamespace(run_id="a"))
    wait_for(lambda: asks(readers=4, workers=2), "request", 120)
    room.before_controller_abort()
    wait_for(lambda: asks(readers=0, workers=0), "end of the request", 120)


def test_failed_gpu_is_excluded_if_others_remain(ray_with_gpus, monkeypatch):
    """The second of two GPUs fails. Workers report the failure through Ray Train's controller."""
    import ray
    from ray.train.v2.api.exceptions import ControllerError

    from raytrec.driver import policies
    from raytrec.driver.policies import GroupFailurePolicy

    monkeypatch.setattr(policies, "GPU_RELEASE_TIMEOUT_S", 120)  # wait until the actors that reserve GPUs have started
    (node,) = list_alive_nodes()
    error = GpuFailedError("GPU 1 of 127.0.0.1 has failed", do="reset it")
    error.place = node["NodeID"], "1"
    failed = pickle.loads(pickle.dumps(error))
    assert (failed.place, failed.do) == (error.place, "reset it")

    @ray.remote(num_gpus=1, num_cpus=0)
    def given():
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    said = []
    coordinator = SimpleNamespace(failed=SimpleNamespace(remote=lambda *about: said.append(about)))
    for least, decision in ((2, "RAISE"), (1, "RETRY")):
        policy = GroupFailurePolicy(coordinator, 0, least)
        assert policy.make_decision(training_failed_error=ControllerError(failed)).value == decision
    assert [again for *_, again in said] == [False, True] and "the GPU is excluded" in said[1][1]
    assert ray.get([given.remote() for _ in range(3)], timeout=60) == [["0"]] * 3
    (holder,) = policy._reserved
    ray.kill(holder)


class FakeNvml:
    """NVML of a machine with two GPUs, one of them smaller; sizes in bytes."""

    def __init__(self, mig=()):
        self.total, self.reserved, self.mig = [80, 40], [2, 1], mig

    def patches(self):
        def mig_mode(handle):
            return [int(handle in self.mig), 0]

        def memory(handle, version):
            return SimpleNamespace(total=self.total[handle], reserved=self.reserved[handle])

        return patch.multiple(
            pynvml,
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetCount=lambda: 2,
            nvmlDeviceGetHandleByIndex=lambda index: index,
            nvmlDeviceGetMigMode=mig_mode,
            nvmlDeviceGetMemoryInfo=memory,
            nvmlDeviceGetName=["NVIDIA L4", "Tesla T4"].__getitem__,
            nvmlDeviceGetCudaComputeCapability=[(8, 9), (7, 5)].__getitem__,
        )


@pytest.mark.parametrize(
    "visible,mig,memory",
    [(None, (), 39), ("", (), None), ("0", (), 78), ("0,1", (), 39), ("1", (1,), None), ("MIG-1", (), None)],
)
def test_gpu_memory_is_read_without_allocating_a_gpu(monkeypatch, visible, mig, memory):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with FakeNvml(mig).patches():
        assert get_smallest_gpu_memory() == memory


@pytest.mark.parametrize("room,warns", [(2, 0), (1.05, 1)])
def test_low_host_memory_for_checkpoints_causes_a_warning(ray_with_gpus, room, warns):
    """The checkpoint copies fit but leave little memory for processes."""
    tables = {"user": {"rows": 10**7, "dim": 64}, "tag": {"rows": 5, "dim": 8}}
    given, config, said = make_small_schema(tables=tables), settings(2), []
    needed = sum(estimate_copy_bytes(config, given, resolve_constraints(config, given), 2))
    host = [GpuNode("10.0.0.9", 2, host_memory=int(2 * needed * room))]
    with patch("raytrec.driver.nodes.is_local", lambda: False):
        nodes.check_constraints(config, given, "cuda", host, SimpleNamespace(warn=said.append))
    assert len(said) == warns and all("checkpoints copy 1.2 GiB from each GPU" in text for text in said)


@pytest.mark.parametrize("visible,refused", [("1", True), ("0,1", False), ("MIG-1", False)])
def test_driver_rejects_nodes_without_a_supported_gpu(ray_with_gpus, console, monkeypatch, visible, refused):
    """If only some GPUs are unsupported, the workers may still get supported ones."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "get_installed_version", lambda package: "1.8.0")
    with FakeNvml().patches(), patch("raytrec.driver.nodes.get_build_device", lambda: "cuda"):
        found = nodes.list_gpu_nodes()
    with pytest.raises(ConfigError, match="no code for Tesla T4") if refused else nullcontext():
        assert nodes.choose_device(settings(), found, console) == "cuda"
        assert ("bandwidths of Tesla T4 are" in "".join(console.said)) == (visible == "0,1")


@pytest.mark.parametrize("saves,checkpoint,state,copies", [(1, "r", 1, 1), (0, "r/step-8", 0, 0), (0, "", 1, 0)])
def test_evaluation_reserves_no_memory_for_training(monkeypatch, saves, checkpoint, state, copies):
    """The cases are a run, an evaluation of a checkpoint, and `raytrec check`, each on GPUs."""
    seen = []

    def check(config, *_):
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(nodes, "list_gpu_nodes", list)
    monkeypatch.setattr(nodes, "choose_device", lambda *_: "cuda")
    monkeypatch.setattr(nodes, "check_constraints", check)
    with pytest.raises(ConfigError, match="enough"):
        watch = SimpleNamespace(console=None)
        launch.run_group(None, WorkerTask(settings(), None, {}, None, checkpoint), watch, saves=bool(saves))
    assert (seen[0].optim.embeddings.name != "sgd") == state
    assert seen[0].checkpoint.async_save == copies


def test_nccl_timeout_exceeds_the_coordinator_timeout():
    """NCCL ends the waiting process; the coordinator must name the hanging rank first."""
    run = settings(hang_timeout_s=45)
    assert launch.compute_collective_timeout(run, "cpu") == launch.PHASE_TIMEOUT_S
    assert launch.compute_collective_timeout(run, "cuda") > launch.PHASE_TIMEOUT_S + 45
