"""Which network interface gloo and NCCL use: what their environment must say for it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def socket_interfaces(interface: str) -> dict[str, str]:
    """The environment that keeps gloo, and NCCL unless its own files say something, to one interface.

    To NCCL a name is a prefix (eth1 is eth10, too), unless it begins with "=". NCCL takes from its files what
    the environment does not have (NCCL 2.29.7: src/misc/param.cc), so what is set here would override what an
    administrator has written there.
    """
    gloo = {"GLOO_SOCKET_IFNAME": interface}
    return gloo if _in_nccl_files("NCCL_SOCKET_IFNAME") else gloo | {"NCCL_SOCKET_IFNAME": f"={interface}"}


def _in_nccl_files(name: str) -> bool:
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")  # a user may have no home
    for file in (Path(own), Path("/etc/nccl.conf")):
        with suppress(OSError):
            if any(line.startswith(f"{name}=") for line in file.read_text().splitlines()):
                return True
    return False
