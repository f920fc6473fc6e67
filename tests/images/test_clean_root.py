"""Test images built from a bare Debian by the Dockerfile's steps, and the unchanged compose file."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import INSTALL_COMMAND, MISSING_PROGRAMS, REPOSITORY, PodmanEngine
from heads import RAYTREC, plain_environment
from waiting import wait_for

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(2700),
    pytest.mark.skipif(
        bool(MISSING_PROGRAMS) or os.getuid() != 0,
        reason=f"needs root and `{INSTALL_COMMAND}`; missing: {MISSING_PROGRAMS or 'root'}",
    ),
]
URL = "http://127.0.0.1:8265"
ROWS = 40_000
# Podman creates one volume for all containers of a service; Docker creates one per container.
SECOND_WORKER = "services: {worker2: {extends: {file: compose.yaml, service: worker}}}"


@pytest.fixture(scope="module")
def engine() -> Iterator[PodmanEngine]:
    """An engine that has built the images."""
    folder = Path(tempfile.mkdtemp(prefix="raytrec-images-", dir="/var/tmp"))
    try:
        with PodmanEngine(folder) as engine:
            engine.base()
            engine.build("cpu")
            engine.build("notebook")
            yield engine
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def cluster(engine: PodmanEngine) -> PodmanEngine:
    """Running services of the compose file: head, two workers, MLflow and notebook, all healthy."""
    deploy = engine.folder / "deploy"
    shutil.copytree(REPOSITORY / "deploy", deploy, ignore=shutil.ignore_patterns("secrets", ".env"))
    subprocess.run(["sh", deploy / "init.sh"], check=True)
    (deploy / "second.yaml").write_text(SECOND_WORKER)
    for services in (["head"], ["worker", "worker2", "mlflow", "notebook"]):
        up(engine, *services)
    prepared = engine.podman(
        *("exec", "raytrec_head_1", "raytrec", "prepare", "synthetic"),
        *("--out", "/data/data/synthetic", "--rows", str(ROWS)),
    )
    assert prepared.returncode == 0, prepared.stderr
    return engine


def test_images_contain_only_runtime_packages(engine: PodmanEngine):
    image = engine.image("raytrec:cpu")
    assert image["Config"]["User"] == "1000"
    assert not [e for e in image["Config"]["Env"] if "TOKEN=" in e]
    packages = "import torch, torchrec, fbgemm_gpu, ray, mlflow, raytrec"
    assert run_in_image(engine, "cpu", "python", "-c", packages) == 0
    for absent in ("pip", "pytest", "jupyterlab"):
        assert run_in_image(engine, "cpu", "python", "-c", f"import {absent}") == 1
    assert run_in_image(engine, "notebook", "python", "-c", "import jupyterlab, ray, raytrec") == 0
    assert run_in_image(engine, "notebook", "python", "-c", "import torch") == 1
    for program in ("gcc", "git", "curl", "sudo"):
        assert run_in_image(engine, "cpu", "sh", "-c", f"command -v {program}") != 0


def test_raytrec_is_a_small_image_layer(engine: PodmanEngine):
    shown = engine.podman("history", "--format", "json", "raytrec:cpu")
    sizes = [layer["size"] for layer in json.loads(shown.stdout)]
    print("layers, MB:", [round(size / 1e6, 1) for size in sizes])
    assert sizes[0] < 8e6  # the last one: raytrec itself
    assert sum(sizes) < 3e9


def test_health_checks_reflect_the_servers(cluster: PodmanEngine):
    for name in ("head", "worker", "worker2", "mlflow", "notebook"):
        assert is_healthy(cluster, name), name
    sick = "echo worker >/tmp/role; exec python3.11 -S /usr/local/bin/health.py"
    assert run_in_image(cluster, "cpu", "sh", "-c", sick) == 1  # no raylet there


def test_containers_have_minimal_privileges(cluster: PodmanEngine):
    state = execute(cluster, "worker", "cat", "/proc/self/status")
    lines = dict(line.split(":\t") for line in state.splitlines() if ":\t" in line)
    assert lines["Uid"].split() == ["1000"] * 4
    assert int(lines["CapEff"], 16) == int(lines["CapBnd"], 16) == 0
    assert lines["NoNewPrivs"] == "1"
    for place in ("/opt/raytrec", "/opt/venv", "/usr/local/bin"):
        assert "no" in execute(cluster, "worker", "sh", "-c", f"test -w {place} && echo yes || echo no")
    route = execute(cluster, "worker", "cat", "/proc/net/route")
    assert not [line for line in route.splitlines()[1:] if line.split()[1] == "00000000"]  # no default route


def test_containers_listen_only_on_loopback(cluster: PodmanEngine):
    sockets = cluster.inside("ss", "--listening", "--tcp", "--numeric", "--no-header").stdout
    places = {line.split()[3] for line in sockets.splitlines()}
    names = {place for place in places if place.endswith(":53")}  # podman's name server, on its bridges
    assert {place.rpartition(":")[2] for place in places - names} == {"8265", "10001", "5000", "8888"}
    assert all(place.startswith("127.0.0.1:") for place in places - names)


def test_tokens_appear_in_no_command_line_or_log(cluster: PodmanEngine):
    seen = cluster.podman("ps", "--all", "--quiet").stdout.split()
    text = cluster.podman("inspect", *seen).stdout + cluster.inside("ps", "-eo", "args").stdout
    for name in ("head", "worker", "notebook", "mlflow"):
        text += cluster.podman("logs", f"raytrec_{name}_1").stdout
    assert "raytrec_head_1" in text
    for file in (cluster.folder / "deploy/secrets").iterdir():
        assert file.read_text() not in text


@pytest.mark.parametrize("token", [None, "wrong" * 10])
def test_job_api_rejects_missing_or_wrong_token(cluster: PodmanEngine, token: str | None, tmp_path: Path):
    header = ["--header", f"Authorization: Bearer {token}"] if token else []
    assert curl(cluster, f"{URL}/api/jobs/", *header) == ("403" if token else "401")
    (tmp_path / "token").write_text(token or "another token of 32 or more characters")
    refused = submit(cluster, "scaling.num_workers=2", token=tmp_path / "token")
    assert refused.returncode == 1
    assert "refuses the token" in refused.stderr


def test_submitted_run_is_recorded_in_mlflow(cluster: PodmanEngine):
    done = submit(cluster, "scaling.num_workers=2")  # the head's environment contains the address of MLflow
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = execute(cluster, "head", "sh", "-c", "ls -d /data/runs/synthetic-*").split()[-1]
    result = json.loads(execute(cluster, "head", "cat", f"{folder}/result.json"))
    assert result["train.rows"] == ROWS
    ask = json.dumps({"experiment_ids": ["1"]})
    found = cluster.inside(
        *("curl", "--silent", "--header", "content-type: application/json", "--data", ask),
        "http://127.0.0.1:5000/api/2.0/mlflow/runs/search",
    )
    runs = json.loads(found.stdout)["runs"]
    assert [run["info"]["status"] for run in runs] == ["FINISHED"]


def test_stopped_worker_container_lets_the_run_save(cluster: PodmanEngine):
    command = make_submit_command("train.epochs=400", "scaling.num_workers={min: 1, max: 2}", "tracking.enabled=false")
    job = cluster.start("timeout", "--signal=INT", "400", *command, env=environment(cluster))
    try:
        lines = iter(job.stdout.readline, "")
        seen = read_until(lines, "step ")
        stopped = cluster.podman("stop", "--time", "90", "raytrec_worker2_1", timeout=150)
        assert "SIGKILL" not in stopped.stderr
        seen += read_until(lines, "resuming at step")
    finally:
        job.send_signal(signal.SIGINT)  # stop following the job
        job.wait(60)
    print("".join(seen))
    assert any("nodes will be preempted: saving" in line for line in seen)
    assert "with 1 worker" in seen[-1]


def test_jupyter_requires_its_token(cluster: PodmanEngine):
    token = (cluster.folder / "deploy/secrets/jupyter_token").read_text()
    address = "http://127.0.0.1:8888/api/contents"
    assert curl(cluster, address) == "403"
    assert curl(cluster, address, "--header", "Authorization: token wrong") == "403"
    assert curl(cluster, address, "--header", f"Authorization: token {token}") == "200"
    notebooks = execute(cluster, "notebook", "ls", "/home/raytrec/notebooks").split()
    assert "quickstart.ipynb" in notebooks


def test_notebook_image_rejects_arguments(engine: PodmanEngine):
    done = engine.podman(
        *("run", "--rm", "--network", "none", "raytrec:notebook"), *("notebook", "--IdentityProvider.token=")
    )
    assert done.returncode == 1
    assert "takes no arguments" in done.stderr


def test_the_notebook_reaches_the_cluster(cluster: PodmanEngine):
    code = "from raytrec import Cluster; import os; print(Cluster(os.environ['RAYTREC_ADDRESS']).runs())"
    assert "synthetic-" in execute(cluster, "notebook", "python", "-c", code)


def up(engine: PodmanEngine, *services: str) -> None:
    """Start services and wait until they are healthy, like `docker compose up --wait`."""
    started = compose(engine, "up", "--detach", "--no-build", "--no-deps", *services)
    assert started.returncode == 0, started.stdout + started.stderr
    for name in services:
        wait_for(lambda name=name: is_healthy(engine, name), f"health of {name}", 180)


def compose(engine: PodmanEngine, *arguments: str) -> subprocess.CompletedProcess:
    deploy = engine.folder / "deploy"
    files = [str(deploy / name) for name in ("compose.yaml", "second.yaml")]
    return engine.compose(files, *arguments)


def is_healthy(engine: PodmanEngine, name: str) -> bool:
    return engine.podman("healthcheck", "run", f"raytrec_{name}_1").returncode == 0


def execute(engine: PodmanEngine, name: str, *command: str) -> str:
    """Run a command in a running container and return its output."""
    done = engine.podman("exec", f"raytrec_{name}_1", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_in_image(engine: PodmanEngine, target: str, *command: str) -> int:
    """Run a command in a new container and return its exit code."""
    return engine.podman("run", "--rm", "--network", "none", f"raytrec:{target}", *command).returncode


def curl(engine: PodmanEngine, url: str, *options: str) -> str:
    """Request a URL and return the HTTP status."""
    asked = ("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}")
    return engine.inside(*asked, *options, url).stdout


def make_submit_command(*overrides: str) -> list[str]:
    return [RAYTREC, "submit", str(REPOSITORY / "jobs/synthetic.yaml"), *overrides, "--address", URL]


def environment(engine: PodmanEngine, token: Path | None = None) -> dict[str, str]:
    """Return the environment of a user on the host of the containers."""
    token = token or engine.folder / "deploy/secrets/ray_token"
    return plain_environment() | {"RAY_AUTH_TOKEN_PATH": str(token)}


def submit(engine: PodmanEngine, *overrides: str, token: Path | None = None) -> subprocess.CompletedProcess:
    return engine.inside(*make_submit_command(*overrides), env=environment(engine, token), timeout=400)


def read_until(lines: Iterator[str], word: str) -> list[str]:
    """Return the lines up to the first one that contains the word."""
    seen = []
    for line in lines:
        seen.append(line)
        if word in line:
            return seen
    raise AssertionError(f"no '{word}' in:\n{''.join(seen)}")
