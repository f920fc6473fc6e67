"""The doctor on several nodes, simulated by raylets on one machine."""

import os
import re

import pytest
import simulated_packages

from raytrec.doctor.examine import examine
from raytrec.doctor.host_checks import FAILURE, OK

BROKEN = "raise ImportError('libtorch_cpu.so: undefined symbol: _ZN3c10')"
# Works for any path, because Ray passes the driver's path to workers.
NO_RAYTREC = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "raytrec":
            raise ModuleNotFoundError("no raytrec here", name=name)
sys.meta_path.insert(0, Block())
"""


@pytest.fixture
def address(tmp_path, monkeypatch):
    """Start a cluster of four nodes: the second has another torchrec and home, the third a broken torch,
    the fourth no raytrec."""
    import ray
    from ray.cluster_utils import Cluster

    from raytrec.cluster.session import stay_on_loopback
    from raytrec.compat.ray_start import omit_unneeded_processes

    monkeypatch.setenv("RAY_prestart_worker_first_driver", "0")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/data").mkdir(parents=True)
    stay_on_loopback()
    own = os.environ.get("PYTHONPATH", "")
    other = simulated_packages.install_simulated_packages(tmp_path / "other", torchrec="1.7.0")
    broken = {"torch/__init__.py": BROKEN, "torch/version.py": ""}
    broken = simulated_packages.install_simulated_packages(tmp_path / "broken", broken)
    without = simulated_packages.install_simulated_packages(tmp_path / "without", {"sitecustomize.py": NO_RAYTREC})
    node = {"num_cpus": 2, "node_ip_address": "127.0.0.1", "object_store_memory": 100 << 20}
    with omit_unneeded_processes():
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            second = {"PYTHONPATH": os.pathsep.join([other, own]), "HOME": str(tmp_path / "nowhere")}
            cluster.add_node(env_vars=second, **node)
            cluster.add_node(env_vars={"PYTHONPATH": os.pathsep.join([broken, own])}, **node)
            cluster.add_node(env_vars={"PYTHONPATH": os.pathsep.join([without, own])}, **node)
            ray.init(cluster.address, log_to_driver=False)
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.mark.survive
@pytest.mark.timeout(280)
def test_doctor_names_the_node_of_each_difference(address):
    found = examine(address, ["~/data"])
    assert len(found.hosts) == 4
    silent = found.diagnoses.pop(0)
    assert (silent.check, silent.result, silent.hosts) == ("nodes", FAILURE, (found.hosts[3],))
    assert "no raytrec here" in silent.finding and "whether the node has this version of raytrec" in silent.do
    rows = {(v.check, v.result, v.hosts): v for v in found.diagnoses}
    torchrec = rows.pop(("packages", FAILURE, (second := found.hosts[_find_host(found, "1.7.0")],)))
    assert "torchrec 1.7.0" in torchrec.finding and torchrec.do.startswith("pip install")
    same = rows.pop(("same packages", FAILURE, (second,)))
    assert "torchrec 1.7.0 (files " in same.finding and "1.8.0 (files " in same.finding
    storage = rows.pop(("storage", FAILURE, (second,)))
    assert "there is no such folder" in storage.finding
    ((_, _, (third,)),) = [key for key in rows if key[:2] == ("operators", FAILURE)]
    assert third != second
    broken = rows.pop(("operators", FAILURE, (third,)))
    assert "undefined symbol" in broken.finding and "reinstall FBGEMM, whose release does not match torch" in broken.do
    assert not [v for v in rows.values() if v.result != OK]
    (reduced,) = [v for v in rows.values() if v.check == "all-reduce"]
    assert re.fullmatch(r"over all 2 nodes: .* GB/s .*, gloo over TCP \(lo\)", reduced.finding), "torch loads"
    assert [v.finding for v in rows.values() if v.check == "ports"] == ["3 nodes reach each other at free ports"]


def _find_host(found, version):
    (host,) = next(v.hosts for v in found.diagnoses if v.check == "packages" and version in v.finding)
    return found.hosts.index(host)
