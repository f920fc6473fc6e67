"""Test `raytrec doctor` on several hosts: a blocked port, a Docker bridge, storage that is not shared."""

import json

import pytest
from heads import RAYTREC
from hosts import NETWORK_PREFIX, HostCluster, why_hosts_unavailable


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A head and two more hosts."""
    folder = tmp_path_factory.mktemp("hosts")
    if why := why_hosts_unavailable(folder):
        pytest.skip(why)
    with HostCluster(folder, 2) as cluster:
        yield cluster


def doctor(hosts, *arguments):
    """Run `raytrec doctor` on the head; return (exit code, rows)."""
    command = [RAYTREC, "doctor", "--address", hosts.address, "--json", *arguments]
    with hosts.all[0].start(*command, env=hosts.env, stdout=-1, text=True) as process:
        out, _ = process.communicate(timeout=400)
    assert out, hosts.all[0].log.read_text()[-3000:]
    return process.returncode, json.loads(out)["checks"]


def failures(rows):
    return {(row["check"], *row["hosts"]): row for row in rows if row["result"] == "failure"}


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_doctor_passes_on_healthy_hosts(hosts):
    code, rows = doctor(hosts, "--storage", str(hosts.root))
    assert code == 0, rows
    found = {row["check"]: row["finding"] for row in rows}
    assert found["interfaces"].startswith("gloo and NCCL use eth0")
    assert found["ports"] == "3 nodes reach each other at free ports"
    assert found["all-reduce"].startswith("over all 3 nodes: ") and "gloo over TCP (eth0)" in found["all-reduce"]
    assert found["clocks"] == "3 clocks are within 1 s of this host's"
    assert not [*hosts.root.glob("raytrec-doctor-*")]


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_doctor_reports_faults_of_hosts_and_links(hosts):
    _, second, third = hosts.all
    # Packets from the second host to the third vanish: no error, no answer.
    second.net("ip", "neigh", "replace", third.address, "lladdr", "02:00:00:00:00:99", "dev", "eth0")
    third.run("mount", "-t", "tmpfs", "tmpfs", str(hosts.root))
    third.net("ip", "link", "set", "eth0", "name", "docker0")
    try:
        code, rows = doctor(hosts, "--storage", str(hosts.root))
    finally:
        second.net("ip", "neigh", "del", third.address, "dev", "eth0")
        third.net("ip", "link", "set", "docker0", "name", "eth0")
        third.run("umount", str(hosts.root))
    found = failures(rows)
    assert code == 1 and ("interfaces", f"host3 ({NETWORK_PREFIX}3)") in found, rows
    name = f"host3 ({NETWORK_PREFIX}3)"
    assert "docker0 (10.77.0.3), a bridge inside this host" in found["interfaces", name]["finding"]
    assert "--node-ip-address" in found["interfaces", name]["do"]
    ports = [row["finding"] for row in rows if row["check"] == "ports"]
    assert any(f"host2 ({NETWORK_PREFIX}2) cannot reach {name} at port" in text for text in ports), ports
    assert all("no response within 5 s" in text or "nodes" in text for text in ports)
    assert "mount the same storage at" in found["storage", name]["do"]
