"""The network that NCCL uses between hosts, read from NCCL's log."""

import os
from pathlib import Path

import pytest

from raytrec.worker import rendezvous

# Format of NCCL 2.29.7 (src/init.cc, src/debug.cc).
NCCL_LOG = """h:1:2 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.1<0>
h:1:2 [0] NCCL INFO Assigned NET plugin {0} to comm
h:1:2 [0] NCCL INFO Using network {0}
h:1:2 [0] NCCL INFO ncclCommInitRankConfig comm 0x1 rank 0 nranks 16
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path)})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("network", ["IB", "Socket", "AWS Libfabric"])
def test_nccl_network_is_read_and_log_is_deleted(tmp_path, network):
    rendezvous.enable_network_log()
    assert os.environ["NCCL_DEBUG"] == "INFO"
    (file,) = tmp_path.iterdir()
    Path(os.environ["NCCL_DEBUG_FILE"]).write_text(NCCL_LOG.format(network))
    assert rendezvous.read_chosen_network() == network and not file.exists()
    assert rendezvous.read_chosen_network() == "", "the network is returned only once"


def test_user_nccl_debug_settings_are_kept(tmp_path):
    os.environ |= {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": str(tmp_path / "mine")}
    before = dict(os.environ)
    rendezvous.enable_network_log()
    (tmp_path / "mine").write_text(NCCL_LOG.format("IB"))
    assert os.environ == before and rendezvous.read_chosen_network() == ""
    assert (tmp_path / "mine").exists()


def test_nccl_conf_file_takes_precedence(tmp_path):
    (tmp_path / ".nccl.conf").write_text("NCCL_DEBUG=INFO\n")
    rendezvous.enable_network_log()
    assert "NCCL_DEBUG" not in os.environ
