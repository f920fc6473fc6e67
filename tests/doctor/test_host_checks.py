"""The doctor on one host with broken packages, GPUs or disks."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import parquet
import pytest
import simulated_packages
from disks import fill_disk, small_disk
from heads import find_free_ports, make_short_link

from raytrec.cli import main
from raytrec.cluster import session
from raytrec.common.errors import RunError
from raytrec.doctor import child, examine, host_checks, network, nodes
from raytrec.doctor.examine import anonymize_examination, to_json_values, to_markdown
from raytrec.doctor.host_checks import FAILURE, HOST_CHECKS, OK, WARNING, run_check
from raytrec.doctor.nodes import ThisHost

CPU_BUILD = {"fbgemm_gpu_cpu": "1.8.0"}
CUDA_BUILD = {"torch": "2.13.0", "fbgemm_gpu": "1.8.0"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Return a function that simulates installed packages for this process and its children."""

    def install(modules=None, **versions):
        folder = simulated_packages.install_simulated_packages(tmp_path / "site", modules, **versions)
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", folder)

    return install


def diagnoses(name):
    return run_check(name, *HOST_CHECKS[name])


def get_only_diagnosis(name, result):
    (diagnosis,) = diagnoses(name)
    assert diagnosis.result == result, diagnosis
    assert diagnosis.check == name and (result == OK) == (diagnosis.do == "")
    return diagnosis


def test_mismatched_fbgemm_release_shows_the_repair_command(installed):
    assert "fbgemm-gpu-cpu 1.8.0" in get_only_diagnosis("packages", OK).finding
    installed(fbgemm_gpu_cpu="1.7.0")
    diagnosis = get_only_diagnosis("packages", FAILURE)
    assert "torch 2.13.0+cpu with torchrec 1.8.0 with fbgemm-gpu-cpu 1.7.0" in diagnosis.finding
    assert diagnosis.do.startswith("run pip install --no-deps -r requirements/cpu.txt")


def test_conflicting_fbgemm_wheels_are_reported(installed):
    installed(fbgemm_gpu="1.8.0")
    diagnosis = get_only_diagnosis("packages", FAILURE)
    assert "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0 are both installed" in diagnosis.finding
    assert "pip uninstall --yes fbgemm-gpu fbgemm-gpu-cpu" in diagnosis.do


# Some FBGEMM releases, and TorchRec, hide loader errors this way.
HIDDEN_LOADER_ERROR = """
import torch
from pathlib import Path
try:
    torch.ops.load_library(str(Path(__file__).with_name("fbgemm_gpu_py.so")))
except OSError:
    pass
"""


@pytest.mark.slow
def test_operator_check_shows_the_first_loader_error(installed, tmp_path):
    """A patched FBGEMM library depends on a library that does not exist."""
    installed({"fbgemm_gpu/__init__.py": HIDDEN_LOADER_ERROR})
    library = Path(find_spec("torchrec").origin).parents[1] / "fbgemm_gpu/fbgemm_gpu_tbe_optimizers.so"
    content = library.read_bytes()
    assert b"libtorch_cpu.so\0" in content
    changed = content.replace(b"libtorch_cpu.so\0", b"libcudart.so.99\0")
    (tmp_path / "site/fbgemm_gpu/fbgemm_gpu_py.so").write_bytes(changed)
    diagnosis = get_only_diagnosis("operators", FAILURE)
    assert "cannot load fbgemm_gpu_py.so: libcudart.so.99: cannot open shared object" in diagnosis.finding
    assert "the CUDA libraries of the packages are missing" in diagnosis.do


@pytest.mark.parametrize(
    "error,do",
    [
        ("x.so: undefined symbol: _ZN3c10", "reinstall FBGEMM, whose release does not match torch"),
        ("libcudart.so.12: cannot open shared object file", "make install DEVICE=cpu"),
        ("libm.so.6: version `GLIBC_2.38' not found", "C libraries are too old"),
        ("something else", "pip install --no-deps --force-reinstall -r requirements/cpu.txt"),
    ],
)
def test_loader_errors_have_a_suggested_repair(error, do):
    assert do in child._suggest_repair(error)


NVML = """
class NVMLError(Exception): ...
nvmlInit = nvmlShutdown = lambda: None
nvmlDeviceGetCount = lambda: 2
nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID = int
nvmlDeviceGetName = ["NVIDIA L4", "Tesla T4"].__getitem__
nvmlDeviceGetCudaComputeCapability = [(8, 9), (7, 5)].__getitem__
nvmlSystemGetDriverVersion = lambda: "570.86.15"
nvmlSystemGetCudaDriverVersion_v2 = lambda: 12080
"""


@pytest.fixture
def with_gpus(installed, monkeypatch):
    """Return a function that simulates two GPUs in NVML and installs packages for GPUs."""
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(**versions):
        installed({"pynvml.py": NVML, "torch/version.py": "cuda = '13.0'"}, **versions)

    yield install
    sys.modules.pop("pynvml", None)


@pytest.mark.slow
def test_unsupported_and_failing_gpus_are_reported(with_gpus, monkeypatch):
    with_gpus(**CUDA_BUILD)
    # Hide the CPU build that is installed here.
    names = host_checks.get_build_device.__globals__
    real = names["get_installed_version"]
    monkeypatch.setitem(names, "get_installed_version", lambda name: name != "fbgemm-gpu-cpu" and real(name))
    served, other = diagnoses("gpus")
    assert other.result == FAILURE and "no code for Tesla T4 (compute capability 7.5)" in other.finding
    assert "9.0" in other.finding and "docs/gpu.md" in other.do
    # No operator can run on a GPU, because torch in this environment is built for CPUs.
    assert served.result == FAILURE and "GPU 0, NVIDIA L4 (8.9): torch" in served.finding and served.do
    driver = get_only_diagnosis("driver", FAILURE)
    assert "driver 570.86.15 supports CUDA 12.8, but torch is built for CUDA 13.0" in driver.finding


def test_cpu_wheel_on_a_gpu_host_is_a_warning(with_gpus):
    with_gpus(**CPU_BUILD)
    diagnosis = get_only_diagnosis("builds", WARNING)
    assert "is built for CPUs, so runs cannot use the GPUs" in diagnosis.finding
    assert "make install DEVICE=cuda" in diagnosis.do


def test_full_shared_memory_is_reported(tmp_path, monkeypatch):
    with small_disk(tmp_path / "shm", "1m") as place:
        fill_disk(place)
        monkeypatch.setattr(host_checks, "SHARED_MEMORY_FOLDER", place)
        assert "0.00 GiB free" in get_only_diagnosis("shared memory", WARNING).finding
        (line,) = [line for line in host_checks.check_before_run() if line.startswith("shared memory")]
        assert "--shm-size" in line, "raytrec train also warns"
        monkeypatch.setattr(host_checks, "has_gpus", lambda: True)
        assert "NCCL cannot start" in get_only_diagnosis("shared memory", FAILURE).finding


def test_low_disk_memory_and_limits_are_reported(tmp_path, monkeypatch):
    with small_disk(make_short_link(tmp_path).parent / "disk", "1m") as place:
        monkeypatch.setenv("RAY_TMPDIR", str(place))
        assert "RAY_TMPDIR" in get_only_diagnosis("Ray's folder", FAILURE).do
    for name in ("measure_system_memory", "measure_available_memory"):
        monkeypatch.setattr(host_checks, name, lambda: 1 << 29)
    assert "0.5 GiB available of 0.5" in get_only_diagnosis("memory", WARNING).finding
    monkeypatch.setattr(host_checks, "MIN_OPEN_FILES", 1 << 40)
    monkeypatch.setattr(host_checks, "RECOMMENDED_OPEN_FILES", 1 << 40)
    assert "ulimit -n" in get_only_diagnosis("limits", FAILURE).do


@pytest.mark.slow
def test_virtual_memory_limit_is_reported_before_a_run():
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from raytrec.doctor.host_checks import check_before_run, check_limits
print(*check_before_run(), *(each.result for each in check_limits()), sep="\\n")
"""
    lines = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).splitlines()
    (line,) = [line for line in lines if line.startswith("limits")]
    assert "8,589,934,592 bytes of virtual memory" in line and "ulimit -v unlimited" in line
    assert lines.count(FAILURE) == 1 and OK not in lines, "one diagnosis"


def test_local_run_warns_of_low_memory_before_ray_starts(tiny_data, tmp_path, monkeypatch):
    from raytrec.driver.preflight import check_plan
    from raytrec.driver.prepare import open_run, resolve_config

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(host_checks, "MIN_MEMORY_BYTES", 1 << 60)
    for address, warns in ((None, True), ("auto", False)):
        settings = parquet.config_values(tiny_data, tmp_path / "run", scaling__address=address)
        lines = check_plan(open_run(*resolve_config(settings, [])))
        assert any(line.startswith("memory: ") and "end other processes" in line for line in lines) == warns


def test_checks_before_a_run_are_fast():
    host_checks.check_before_run()  # run the imports first, which every run needs anyway
    began = time.perf_counter()
    host_checks.check_before_run()
    assert time.perf_counter() - began < 0.3


def test_stale_and_second_clusters_are_reported(tmp_path, monkeypatch):
    (note := tmp_path / "ray" / "ray_current_cluster").parent.mkdir()
    note.write_text(f"127.0.0.1:{find_free_ports(1)[0]}\n")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    gcs = tmp_path / "gcs_server"
    gcs.symlink_to(sys.executable)
    wait = "import sys; print(); sys.stdout.flush(); sys.stdin.read()"
    heads = [
        subprocess.Popen([gcs, "-c", wait, f"--gcs_server_port={port}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for port in (7001, 7002)
    ]
    try:
        for head in heads:
            head.stdout.readline()
        ended, second = diagnoses("clusters")
    finally:
        for head in heads:
            head.communicate()
    assert ended.result == WARNING and "but no process listens there" in ended.finding and str(note) in ended.do
    assert second.result == WARNING and "7001, 7002" in second.finding and "ray stop" in second.do


@pytest.fixture
def token(tmp_path, monkeypatch):
    """Path of a missing token file."""
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    return tmp_path / "token"


def test_token_readable_by_others_is_a_failure(token):
    assert "none yet" in get_only_diagnosis("token", OK).finding
    token.write_text("a" * 64)
    token.chmod(0o644)
    assert f"chmod 600 {token}" in get_only_diagnosis("token", FAILURE).do
    token.chmod(0o600)
    get_only_diagnosis("token", OK)


def test_missing_cluster_token_is_a_failure(token, monkeypatch):
    monkeypatch.setattr(examine, "CHECK_ORDER", ())
    first, *_ = examine.examine(f"127.0.0.1:{find_free_ports(1)[0]}").diagnoses
    assert (first.check, first.result) == ("cluster", FAILURE)
    assert "the token of the Ray cluster is missing" in first.finding and "chmod 600" in first.do


@pytest.mark.parametrize(
    "cluster,what",
    [
        ({"python_version": "3.11.99"}, "the cluster runs Python 3.11.99, but this process runs Python"),
        ({"ray_version": "2.59.0"}, "the cluster runs Ray 2.59.0"),
    ],
)
def test_version_mismatch_error_names_both_versions(monkeypatch, cluster, what):
    """Ray's message names the versions only after its first line."""
    import ray
    from ray._private.utils import check_version_info, compute_version_info

    own = dict(zip(("ray_version", "python_version"), compute_version_info(), strict=True))
    monkeypatch.setattr(ray, "init", lambda **_: check_version_info(own | cluster, "node 10.0.0.2"))
    with pytest.raises(RunError) as error:
        session._connect("scaling.address=auto", address="auto")
    assert what in error.value.what and error.value.do


def test_crashed_and_hung_checks_are_failures():
    def fails():
        yield host_checks.Diagnosis(OK, "so far")
        raise KeyError("what")

    def refuses():
        raise RunError("no such place", expected="another", do="take another")
        yield

    (failed,) = run_check("a", fails, 5)
    assert (failed.check, failed.result) == ("a", FAILURE)
    assert "the check itself failed: KeyError: 'what'" in failed.finding
    (refused,) = run_check("b", refuses, 5)
    assert refused.finding == "no such place; expected another" and refused.do == "take another"
    (late,) = run_check("c", lambda: iter([time.sleep(60)]), 0.1)
    assert late.result == FAILURE and late.finding == "no response within 0 s"


def test_check_order_covers_all_checks():
    between = {*examine.CLUSTER_CHECKS, "storage"}
    assert sorted([*HOST_CHECKS, *between]) == sorted(examine.CHECK_ORDER)


class TwoHosts(ThisHost):
    """Two hosts, simulated by two addresses of this machine."""

    def __init__(self):
        super().__init__()
        self.names, self.addresses = ["a (127.0.0.1)", "b (127.0.0.2)"], ["127.0.0.1", "127.0.0.2"]

    def ask(self, call, *arguments, host_arguments=None, limit_s=20):
        if host_arguments is None:
            host_arguments = {0: (), 1: ()}
        one = ThisHost()
        answers = {
            i: one.ask(call, *arguments, host_arguments={0: own}, limit_s=limit_s) for i, own in host_arguments.items()
        }
        return [answers[i][0] if i in answers else None for i in (0, 1)]


def test_blocked_port_error_names_both_nodes(monkeypatch):
    (fine,) = network.check_ports(TwoHosts())
    assert fine.result == OK
    full = socket.socket()
    full.bind(("127.0.0.2", 0))
    full.listen(0)
    clients = [socket.socket() for _ in range(3)]
    for client in clients:  # the queue is full, so the kernel drops new connections, as a firewall does
        client.setblocking(False)
        client.connect_ex(full.getsockname())
    real, port = network.listen, full.getsockname()[1]
    monkeypatch.setattr(network, "listen", lambda address: port if address == "127.0.0.2" else real(address))
    monkeypatch.setattr(network.find_connection_errors, "__defaults__", (0.3,))
    found = [*network.check_ports(hosts := TwoHosts())]
    assert hosts.disconnected_pairs == {frozenset((0, 1))}
    assert "a (127.0.0.1) cannot reach b (127.0.0.2) at port" in found[0].finding
    assert "no response within" in found[0].finding and "security group" in found[0].do
    reduced = [*network.check_all_reduce(hosts)]
    assert [diagnosis.result for diagnosis in reduced] == [WARNING], "the all-reduce is skipped if ports are blocked"
    for each in (full, *clients):
        each.close()


@pytest.mark.parametrize(
    "address,own,chosen,several,result,finding",
    [
        ("172.17.0.1", "docker0", {}, True, FAILURE, "use docker0 (172.17.0.1), a bridge inside this host"),
        ("172.17.0.1", "docker0", {}, False, OK, "docker0"),
        ("10.0.0.1", "eth0", {}, True, OK, "gloo and NCCL use eth0, the interface of its address"),
        ("10.0.0.1", "eth0", {"NCCL_SOCKET_IFNAME": "=docker0"}, True, FAILURE, "NCCL uses docker0"),
        ("10.0.0.1", "eth0", {"NCCL_SOCKET_IFNAME": "ib9"}, True, FAILURE, "there is no such interface"),
        (
            *("10.0.0.1", "eth0", {"NCCL_SOCKET_IFNAME": "eth"}, True, OK),
            "gloo uses eth0, the interface of its address; NCCL uses eth, set by NCCL_SOCKET_IFNAME",
        ),
        ("10.0.0.1", "docker0", {"NCCL_SOCKET_IFNAME": "eth"}, True, FAILURE, "gloo uses docker0"),
        ("10.0.0.9", None, {"GLOO_SOCKET_IFNAME": "eth0"}, True, WARNING, "no interface has the node's address"),
        ("10.0.0.9", None, {}, True, WARNING, "no interface has the node's address 10.0.0.9"),
    ],
)
def test_network_interfaces_are_diagnosed(address, own, chosen, several, result, finding):
    have = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"], "docker0": ["172.17.0.1"]}
    found = {"own": own, "have": have, "chosen": chosen}
    got, what, do = network._diagnose_interfaces(found, address, False, several)
    assert got == result and finding in what and (do == "") == (result == OK)


class SeveralHosts(ThisHost):
    """Hosts without processes; all-reduce over some groups fails.

    Args:
        count: Number of hosts.
        bad: Groups of hosts that cannot reduce together; a single host fails with every other one.
    """

    def __init__(self, monkeypatch, count, *bad):
        super().__init__()
        self.names, self.addresses = [f"n{i}" for i in range(count)], ["127.0.0.1"] * count
        self.tried = []

        def reduce(nodes, group, backend):
            self.tried.append(group)
            if any(len(group) > 1 and set(each) <= set(group) for each in bad):
                return TimeoutError("no response within 90 s")
            return {"seconds": 0.1, "network": f"{backend} over TCP (eth0)"}

        monkeypatch.setattr(network, "_reduce", reduce)

    def ask(self, call, *arguments, host_arguments=None, limit_s=20):
        return [False] * len(self.names)


@pytest.mark.parametrize(
    "count,bad,failures,rest",
    [
        (2, [], [], "all 2"),
        (9, [], [], "all 9"),
        (2, [(0, 1)], ["n0 and n1"], None),
        (8, [(2, 6)], ["n2 and n6"], "the other 7"),
        (8, [(5,)], ["n0 and n5"], "the other 7"),
        (8, [(0,)], ["n0 and n1", "n0 and n7"], "the other 6"),
        (8, [(1, 3), (4, 6)], ["n1 and n3", "n4 and n6"], "the other 6"),
        (5, [(1, 2, 4)], ["n0 and n1 and n2 and n4"], "the other 4"),
    ],
)
def test_all_reduce_check_names_smallest_failing_groups(monkeypatch, count, bad, failures, rest):
    hosts = SeveralHosts(monkeypatch, count, *bad)
    found = [*network.check_all_reduce(hosts)]
    failed = [diagnosis.finding for diagnosis in found if diagnosis.result == FAILURE]
    assert failed == [f"an all-reduce of {names} with gloo failed: no response within 90 s" for names in failures]
    assert all("--node-ip-address" in diagnosis.do for diagnosis in found[: len(failed)])
    speeds = [diagnosis.finding for diagnosis in found[len(failed) :]]
    speed = "0.17 GB/s (100.0 ms for 16 MiB), gloo over TCP (eth0)"
    assert speeds == ([f"over {rest} nodes: {speed}"] if rest else [])
    assert len(hosts.tried) <= network.MAX_ALL_REDUCES and len(hosts.tried) == len({*hosts.tried})
    assert failures or len(hosts.tried) == 1, "without failures, one all-reduce is enough"


def test_number_of_all_reduce_attempts_is_limited(monkeypatch):
    everyone = [(i, j) for i in range(40) for j in range(i)]
    hosts = SeveralHosts(monkeypatch, 40, *everyone)
    found = [*network.check_all_reduce(hosts)]
    assert found and all(diagnosis.result == FAILURE for diagnosis in found)
    assert len(hosts.tried) == network.MAX_ALL_REDUCES


def test_all_reduce_check_skips_unreachable_nodes(monkeypatch):
    hosts = SeveralHosts(monkeypatch, 3)
    hosts.disconnected_pairs = {frozenset((0, 2))}
    (cut,) = network.check_all_reduce(hosts)
    assert (cut.result, cut.finding) == (WARNING, "not timed: some nodes cannot connect") and not hosts.tried
    hosts.hosts_without_torch = {2}
    (fine,) = network.check_all_reduce(hosts)
    assert fine.result == OK and hosts.tried == [(0, 1)]


def test_clock_offsets_are_diagnosed():
    found = [*nodes.diagnose_clocks({"a": (0.2, 0.01), "b": (-7.0, 0.5), "c": (1000.0, 1.0), "d": (5, 6)})]
    assert [(diagnosis.hosts, diagnosis.result) for diagnosis in found] == [(("b",), WARNING), (("c",), FAILURE)]
    assert "7.0 s behind" in found[0].finding and "ahead of" in found[1].finding
    (fine,) = nodes.diagnose_clocks({"a": (0.2, 0.01)})
    assert fine.result == OK


def test_storage_missing_on_one_host_is_a_failure(tmp_path, monkeypatch):
    (place := tmp_path / "shared").mkdir()
    (fine,) = nodes.check_storage(TwoHosts(), str(place))
    assert fine.result == OK and not [*place.iterdir()], "the check left files behind"
    real = nodes.open_filesystem
    asked = []

    def elsewhere(uri):
        """Return the filesystem of another folder for the second host."""
        asked.append(uri)
        return real(uri if len(asked) == 1 else str(other))

    other = tmp_path / "missing"
    monkeypatch.setattr(nodes, "open_filesystem", elsewhere)
    found = [*nodes.check_storage(TwoHosts(), str(place))]
    assert found[0].result == FAILURE and found[0].hosts == ("b (127.0.0.2)",)
    assert "there is no such folder" in found[0].finding and "mounts, credentials" in found[0].do


BLOCKED_IMPORTS = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in %r:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
sys.meta_path.insert(0, Block())
from raytrec.cli import main
main()
"""
BROKEN = "raise ImportError('libcublasLt.so.13: cannot open shared object file: No such file or directory')"


def doctor(*arguments, blocked=(), **environment):
    command = [sys.executable, "-c", BLOCKED_IMPORTS % (blocked,), "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)
    assert "Traceback" not in done.stdout + done.stderr, done.stderr
    return done


@pytest.mark.slow
def test_doctor_runs_without_torch_and_fbgemm(tmp_path):
    """Imports fail in the command and in its children, but the command shows no traceback."""
    modules = {"torch/__init__.py": BROKEN, "torch/version.py": ""}
    site = simulated_packages.install_simulated_packages(tmp_path / "site", modules)
    path = os.pathsep.join([site, os.environ.get("PYTHONPATH", "")])
    done = doctor("--json", blocked=("torch", "torchrec", "fbgemm_gpu", "mlflow"), PYTHONPATH=path)
    found = json.loads(done.stdout)
    assert done.returncode == 1 and found["failures"] == 1, done.stdout
    (row,) = [row for row in found["checks"] if row["result"] == "failure"]
    assert row["check"] == "operators" and "cannot import torch: libcublasLt.so.13" in row["finding"]
    assert "make install DEVICE=cpu" in row["do"]


@pytest.mark.slow
def test_doctor_applies_overrides_to_the_config(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"data: {{train: {tmp_path}}}\n")
    done = doctor(str(config), "scaling.nodes=2")
    assert done.returncode == 1 and "scaling.nodes" in done.stderr and "no such option" not in done.stderr.lower()


@pytest.mark.slow
def test_shared_report_hides_hosts_users_and_paths(tmp_path, monkeypatch, capsys):
    (home := tmp_path / "home/alice").mkdir(parents=True)
    rays = make_short_link(tmp_path)
    (rays / "ray").mkdir()
    (rays / "ray/ray_current_cluster").write_text(f"127.0.0.77:{find_free_ports(1)[0]}\n")
    for name, value in {"HOME": home, "USER": "alice", "LOGNAME": "alice", "RAY_TMPDIR": rays}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    found = examine.examine(storage=[str(home / "secret")])
    whole, text = json.dumps(to_json_values(found)), to_markdown(anonymize_examination(found))
    assert "| failure | storage |" in text and "| warning | clusters |" in text, text
    for hidden in ("alice", "secret", "127.0.0", str(tmp_path), str(rays), sys.prefix):
        assert hidden in whole and hidden not in text
    assert socket.gethostname() in whole and not re.search(rf"\b{socket.gethostname()}\b", text)
    monkeypatch.setattr(examine, "CHECK_ORDER", ("token", "storage"))
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--share", "--storage", str(home)])
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text.startswith("**raytrec doctor**") and "alice" not in text


def test_shared_findings_replace_names():
    names = ["gpu-1.example.com (10.0.0.1)", "gpu-1.example.com (10.0.0.1) #2"]
    diagnosis = host_checks.Diagnosis(
        FAILURE,
        f"{names[0]} cannot reach {names[1]} at port 4711: fe80::1%eth0 gpu-1 gpu-1.example.com:6379 "
        "/data/me/x.so.13 loading fbgemm_gpu_py.so, s3://mine/place torch 2.13.0 fbgemm::cumsum",
        "look at /dev/shm and docs/gpu.md",
        "ports",
        (names[1],),
    )
    found = anonymize_examination(examine.Examination(names, [diagnosis]))
    assert found.hosts == ["node 1", "node 2"]
    (row,) = to_json_values(found)["checks"]
    assert row["hosts"] == ("node 2",) and row["do"] == "look at /dev/shm and docs/gpu.md"
    assert row["finding"] == (
        "node 1 cannot reach node 2 at port 4711: ADDRESS node 1 ADDRESS PATH/x.so.13 loading "
        "fbgemm_gpu_py.so, STORAGE torch 2.13.0 fbgemm::cumsum"
    )
    assert to_markdown(found).count("\n") == 4
