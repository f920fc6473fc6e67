"""Which device a run takes, and what it sets aside there, on a Ray that counts two GPUs (there are none)."""

import json
import pickle
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import parquet
import pynvml
import pytest
from small import a_schema
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


@pytest.fixture
def for_cpus():
    """The packages of this environment are those for CPUs, on machines that test others, too."""
    with patch("raytrec.driver.nodes.built_for", lambda: "cpu"):
        yield


@pytest.fixture
def console():
    said = []
    return SimpleNamespace(said=said, note=said.append)


def settings(workers=2, readers=1, **scaling):
    values = parquet.settings("unused", "unused")
    values["data"]["readers"] = readers
    values["scaling"] = {"num_workers": workers, **scaling}
    return RunConfig.model_validate(values)


def test_auto_trains_on_cpus_where_torch_is_built_for_them(ray_with_gpus, for_cpus, console):
    assert nodes.choose_device(settings(), nodes.gpu_nodes(), console) == "cpu"
    (said,) = console.said
    assert "GPUs are available, but torch is built for CPUs on this machine" in said
    assert "make install DEVICE=cuda" in said


def test_cuda_graphs_are_refused_where_training_is_on_cpus(ray_with_gpus, for_cpus, console):
    values = settings()
    values.train.compile = "graphs"
    with pytest.raises(ConfigError, match="training runs on CPUs") as error:
        nodes.choose_device(values, nodes.gpu_nodes(), console)
    assert error.value.do == "set train.compile=true"


def test_cuda_is_refused_where_torch_is_built_for_cpus(ray_with_gpus, for_cpus, tiny_data, tmp_path):
    with pytest.raises(ConfigError, match="torch is built for CPUs on this machine") as error:
        driver.train(parquet.settings(tiny_data, tmp_path / "run", scaling__device="cuda"))
    assert "make install DEVICE=cuda" in error.value.do and "scaling.device=cpu" in error.value.do
    assert not (tmp_path / "run/events.jsonl").exists(), "no worker has started"


def test_auto_takes_gpus_with_the_packages_for_them(ray_with_gpus, console):
    with patch("raytrec.driver.nodes.built_for", lambda: "cuda"):
        assert nodes.choose_device(settings(), nodes.gpu_nodes(), console) == "cuda"
    assert not console.said


def test_nodes_are_asked_while_others_use_all_they_have(ray_with_gpus):
    """Elsewhere than on this machine, by tasks; a GPU need not be free."""
    import ray

    @ray.remote(num_cpus=6, num_gpus=2)
    class Busy:
        def ready(self):
            return True

    busy = Busy.remote()
    ray.get(busy.ready.remote(), timeout=60)
    with patch("raytrec.driver.nodes.is_local", lambda: False):
        (node,) = nodes.gpu_nodes()
    ray.kill(busy)
    assert node == GpuNode("127.0.0.1", 2, **nodes.inspect_this_node())
    assert node.built_for in ("cpu", "cuda") and node.host_memory > 2**30


def test_a_node_that_does_not_answer_is_left_to_the_workers(ray_with_gpus, console):
    node = GpuNode("10.0.0.9", 2)
    with patch("raytrec.driver.nodes.is_local", lambda: False):
        assert nodes.choose_device(settings(), [node], console) == "cuda"


@pytest.mark.parametrize(
    "workers,readers,message",
    [
        (3, 1, "the cluster has 2 GPUs for 3 workers"),
        (2, 3, "the cluster has 6 CPUs on nodes with GPUs for 2 workers and their readers"),
    ],
)
def test_rooms_for_workers_and_their_readers(ray_with_gpus, workers, readers, message):
    """Readers' CPUs are their workers' where all nodes have GPUs: tasks that find none wait for ever."""
    with pytest.raises(ConfigError, match=message):
        nodes._check_capacity(settings(workers, readers), "cuda", 2)
    nodes._check_capacity(settings(2, 2), "cuda", 2)
    with pytest.raises(ConfigError, match="6 CPUs for 2 workers"):
        nodes._check_capacity(settings(2, 3), "cpu", 2)


def test_a_worker_sets_aside_what_its_readers_need():
    run = settings(2, 3, cpus_per_worker=2)
    assert nodes.bundle(run, "cpu") == {"CPU": 5} and nodes.count_local_cpus(run) == 10
    assert nodes.bundle(run, "cuda") == {"CPU": 5, "GPU": 1}
    assert nodes.bundle(run, "cuda", others_read=True) == {"CPU": 2, "GPU": 1}


def test_an_autoscaler_hears_of_the_cpus_that_read(ray_with_gpus):
    """Where nodes without GPUs read, tasks ask for no CPU; the run asks for them."""
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
    room = NodeCapacityPolicy(scaling, None, 2, 2, cpus_beside=4)
    room.after_controller_start(SimpleNamespace(run_id="a"))
    wait_for(lambda: asks(readers=4, workers=2), "request", 120)
    room.before_controller_abort()
    wait_for(lambda: asks(readers=0, workers=0), "end of the request", 120)


def test_a_gpu_that_has_failed_is_left_out_where_there_are_others(ray_with_gpus):
    """The second of two fails; it is reported as workers do, through Ray Train's controller."""
    import ray
    from ray.train.v2.api.exceptions import ControllerError

    from raytrec.driver.policies import FailedGpus, GroupFailurePolicy

    (node,) = list_alive_nodes()
    failed = GpuFailedError("GPU 1 of 127.0.0.1 has failed", do="reset it")
    failed.place = node["NodeID"], "1"
    failed = pickle.loads(pickle.dumps(failed))
    assert failed.place[1] == "1" and failed.do == "reset it"

    @ray.remote(num_gpus=1, num_cpus=0)
    def given():
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]

    said = []
    coordinator = SimpleNamespace(failed=SimpleNamespace(remote=lambda *about: said.append(about)))
    for least, decision in ((2, "RAISE"), (1, "RETRY")):
        gpus = FailedGpus(least)
        policy = GroupFailurePolicy(ray.train.FailureConfig(), coordinator, 0, gpus)
        assert policy.make_decision(training_failed_error=ControllerError(failed)).value == decision
    assert [again for *_, again in said] == [False, True] and "the GPU is left out" in said[1][1]
    assert ray.get([given.remote() for _ in range(3)], timeout=60) == [["0"]] * 3
    (holder,) = gpus._held
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
    [("", (), 39), ("0", (), 78), ("0,1", (), 39), ("1", (1,), None), ("MIG-1", (), None)],
)
def test_gpu_memory_is_known_without_taking_one(monkeypatch, visible, mig, memory):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with FakeNvml(mig).patches():
        assert get_smallest_gpu_memory() == memory


@pytest.mark.parametrize("room,warns", [(2, 0), (1.05, 1)])
def test_host_memory_that_is_short_for_checkpoints_is_pointed_out(ray_with_gpus, room, warns):
    """Copies fit, and leave little for processes."""
    tables = {"user": {"rows": 10**7, "dim": 64}, "tag": {"rows": 5, "dim": 8}}
    given, config, said = a_schema(tables=tables), settings(2), []
    needed = sum(estimate_copy_bytes(config, given, resolve_constraints(config, given), 2))
    host = [GpuNode("10.0.0.9", 2, host_memory=int(2 * needed * room))]
    with patch("raytrec.driver.nodes.is_local", lambda: False):
        nodes.check_constraints(config, given, "cuda", host, SimpleNamespace(warn=said.append))
    assert len(said) == warns and all("checkpoints copy 1.2 GiB of each GPU" in text for text in said)


@pytest.mark.parametrize("visible,refused", [("1", True), ("0,1", False), ("MIG-1", False)])
def test_gpus_of_which_fbgemm_serves_none_are_refused_by_the_driver(
    ray_with_gpus, console, monkeypatch, visible, refused
):
    """Of some that it does not serve, workers may be given none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(machine, "installed", lambda package: "1.8.0")
    with FakeNvml().patches(), patch("raytrec.driver.nodes.built_for", lambda: "cuda"):
        found = nodes.gpu_nodes()
    with pytest.raises(ConfigError, match="no code for Tesla T4") if refused else nullcontext():
        assert nodes.choose_device(settings(), found, console) == "cuda"
        assert ("bandwidths of Tesla T4 are" in "".join(console.said)) == (visible == "0,1")


@pytest.mark.parametrize(
    "saves,checkpoint,state,copies", [(1, "r", 1, 1), (0, "r/step-8", 0, 0), (0, "", 1, 0)]
)
def test_only_who_trains_needs_room_for_training(monkeypatch, saves, checkpoint, state, copies):
    """On GPUs: a run; an evaluation or predictions of a checkpoint; `raytrec check`."""
    seen = []

    def check(config, *_):
        seen.append(config)
        raise ConfigError("enough")

    monkeypatch.setattr(launch, "gpu_nodes", list)
    monkeypatch.setattr(launch, "choose_device", lambda *_: "cuda")
    monkeypatch.setattr(launch, "check_constraints", check)
    with pytest.raises(ConfigError, match="enough"):
        watch = SimpleNamespace(console=None)
        launch.run_group(None, settings(), None, {}, checkpoint, watch, saves=bool(saves))
    assert (seen[0].optim.embeddings.name != "sgd") == state
    assert seen[0].checkpoint.async_save == copies


def test_nccl_is_given_longer_than_the_hub():
    """It ends the process that waits; the coordinator names the rank that is waited for, and comes first."""
    run = settings(hang_timeout_s=45)
    assert launch.compute_collective_timeout(run, "cpu") == launch.PHASE_TIMEOUT_S
    assert launch.compute_collective_timeout(run, "cuda") > launch.PHASE_TIMEOUT_S + 45
