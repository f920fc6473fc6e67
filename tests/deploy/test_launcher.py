"""Test cluster.yaml and its variant for GCP offline with Ray's own code."""

import re
import subprocess

import pytest
import yaml
from launching import AWS_CONFIG, GCP_CONFIG, ROOT, NodePlanner, prepare_launcher_config
from ray.autoscaler._private.util import validate_config
from ray.autoscaler.v2.instance_manager.subscribers.cloud_resource_monitor import CloudResourceMonitor
from ray.core.generated.instance_manager_pb2 import Instance, InstanceUpdateEvent

WORKER = {"CPU": 1, "GPU": 1}  # resources of one worker (driver.nodes.bundle)
READER = {"CPU": 1}
BOTH_CLOUDS = pytest.mark.parametrize("path", [AWS_CONFIG, GCP_CONFIG], ids=["aws", "gcp"])
COMMANDS = ["initialization_commands", "setup_commands", "head_setup_commands", "worker_setup_commands"]
STARTS = ["head_start_ray_commands", "worker_start_ray_commands"]


@pytest.fixture
def config(path):
    return prepare_launcher_config(path)


def list_ray_starts(config):
    """Return (key, command) of each `ray start`."""
    return [(key, command) for key in STARTS for command in config[key] if "ray start" in command]


@BOTH_CLOUDS
def test_ray_rejects_a_misspelt_launcher_key(config):
    with pytest.raises(Exception, match="idle_timeout_minuts"):
        validate_config(config | {"idle_timeout_minuts": 5})


@pytest.mark.slow
@BOTH_CLOUDS
def test_launcher_commands_are_valid_bash_without_secrets(config):
    for command in (command for key in COMMANDS + STARTS for command in config[key]):
        check = subprocess.run(["bash", "-n"], input=command, text=True, capture_output=True, timeout=20)
        assert check.returncode == 0, (command, check.stderr)
        assert not re.search(r"AUTH_TOKEN=|--(redis-)?password|SECRET|ACCESS_KEY", command), command


@BOTH_CLOUDS
def test_every_ray_start_requires_the_token(config):
    assert [key for key, _ in list_ray_starts(config)] == STARTS
    for _, command in list_ray_starts(config):
        exported = re.match(r"export ([^;]*);", command).group(1).split()
        assert "RAY_AUTH_MODE=token" in exported
        assert any(each.startswith("RAYTREC_ROOT=/") for each in exported)
    assert config["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert any("chmod 600 ~/.ray/auth_token" in command for command in config["setup_commands"])


@BOTH_CLOUDS
def test_dashboard_and_mlflow_listen_on_loopback(config):
    (_, head), _ = list_ray_starts(config)
    assert "--dashboard-host=127.0.0.1" in head
    assert "0.0.0.0" not in yaml.safe_dump(config)
    (mlflow,) = [c for c in config["head_start_ray_commands"] if "mlflow server" in c]
    assert "--host 127.0.0.1" in mlflow


@BOTH_CLOUDS
def test_stopping_a_job_leaves_time_for_a_checkpoint(config):
    (_, head), _ = list_ray_starts(config)
    assert int(re.search(r"RAY_JOB_STOP_WAIT_TIME_S=(\d+)", head).group(1)) >= 60
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in head


@BOTH_CLOUDS
def test_autoscaler_starts_with_zero_workers(config):
    types = config["available_node_types"]
    assert set(types) == {"head", "gpu", "cpu"}
    assert all(kind["min_workers"] == 0 for kind in types.values())
    assert types["head"]["max_workers"] == 0 and types["head"]["resources"] == {"CPU": 0}
    assert sum(kind["max_workers"] for kind in types.values()) <= config["max_workers"]
    assert "GPU" not in types["cpu"]["resources"]


@BOTH_CLOUDS
def test_setup_commands_use_mounted_files(config):
    """Files below ~/raytrec that the commands use are in file_mounts and in this repository."""
    mounts = {k: v for k, v in config["file_mounts"].items() if k.startswith("~/raytrec/")}
    for remote, local in mounts.items():
        assert (ROOT / local).exists(), local
        assert remote == f"~/raytrec/{local}"
    named = re.findall(r"~/raytrec/(\S+)", " ".join(config["setup_commands"]))
    assert "requirements/cuda.txt" in named
    for path in named:
        assert (ROOT / path).is_file() and path.split("/")[0] in mounts.values()
    project = (ROOT / "pyproject.toml").read_text()
    for folder in re.findall(r'^(?:raytrec|raytrec_datasets) = "(\w+)"$', project, re.MULTILINE):
        assert folder in mounts.values()
    assert all("pip install" not in c or "uv" in c for c in config["setup_commands"])
    assert all("--no-deps" in c for c in config["setup_commands"] if "uv pip install" in c)


def read_pins(name):
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_cloud_pins_agree_with_raytrec_pins(name):
    cloud, base = read_pins("cloud"), read_pins(name)
    assert {"boto3", "google-api-python-client"} <= set(cloud)
    assert {k: (v, base[k]) for k, v in cloud.items() if base.get(k, v) != v} == {}


@BOTH_CLOUDS
def test_workers_watch_for_preemption_notices(config, path):
    cloud = path.stem.removeprefix("cluster-").replace("cluster", "aws")
    told = [c for c in config["worker_start_ray_commands"] if "raytrec.cluster.preemption" in c]
    assert len(told) == 1 and told[0].endswith(f"-m raytrec.cluster.preemption {cloud}")
    assert "--setenv=RAY_AUTH_MODE=token" in told[0]


@BOTH_CLOUDS
def test_workers_get_gpu_nodes_and_readers_get_cpu_nodes(config):
    planner = NodePlanner(config)
    assert planner.wanted() == {}
    assert planner.wanted(workers=[WORKER] * 4) == {"gpu": 1}
    assert planner.wanted(workers=[WORKER] * 9) == {"gpu": 3}
    assert planner.wanted(tasks=[READER] * 20) == {"cpu": 2}
    one = [planner.node("gpu")]
    assert planner.wanted(workers=[WORKER] * 4, running=one) == {}
    assert planner.wanted(workers=[WORKER] * 4, tasks=[READER] * 60, running=one) == {"cpu": 1}


@BOTH_CLOUDS
def test_idle_nodes_are_removed_unless_requested(config):
    planner, idle = NodePlanner(config), 60 * config["idle_timeout_minutes"]
    nodes = [planner.node("gpu", idle_s=idle + 1), planner.node("cpu", idle_s=idle - 1)]
    assert planner.unwanted(nodes) == {"gpu": 1}
    assert planner.unwanted(nodes, workers=[WORKER]) == {}


def test_plain_ray_ignores_refused_launches():
    """This is why raytrec.cluster.spot exists. If this test fails, two node types and Ray suffice."""
    monitor, kind = CloudResourceMonitor(), "gpu"
    event = {"instance_id": "1", "instance_type": kind}
    monitor.notify([InstanceUpdateEvent(new_instance_status=Instance.ALLOCATION_FAILED, **event)])
    assert monitor.get_recoverable_resource_availabilities() == {}
    monitor.notify([InstanceUpdateEvent(new_instance_status=Instance.ALLOCATION_TIMEOUT, **event)])
    assert monitor.get_recoverable_resource_availabilities() == {kind: 0.0}


@BOTH_CLOUDS
def test_every_placeholder_has_a_fill_in_comment(path):
    lines = path.read_text().splitlines()
    values = [i for i, line in enumerate(lines) if "FILLIN" in line]
    assert values
    for i in values:  # on the line, or in the comment right above its block
        assert any("FILL IN" in line for line in lines[max(0, i - 6) : i + 1]), lines[i]
