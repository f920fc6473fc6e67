"""Report the preemption of a node to Ray.

Runs then save a checkpoint and leave the node (docs/fault_tolerance.md).

    python -m raytrec.cluster.preemption aws    on a spot machine of AWS, whose notice comes 2 min in advance
    python -m raytrec.cluster.preemption gcp    on a spot machine of GCP, whose notice comes 30 s in advance
    python -m raytrec.cluster.preemption now    before Kubernetes stops a pod: do not wait for a notice

The program ends when no CPUs or GPUs of the node are in use, when the node has left the cluster, or when its time is
over. Ray itself does not watch for notices, so deploy/ and cluster.yaml start this program on every node that can be
preempted.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from raytrec.compat.ray_core import drain, list_free_resources

POLL_INTERVAL_S = 2.0
METADATA_TIMEOUT_S = 2.0  # timeout of the cloud's metadata server
Cloud = Literal["aws", "gcp", "now"]  # cloud whose notice the program waits for; now: do not wait
NOTICE_S = {"aws": 120, "gcp": 30}  # seconds from the notice to the termination


def has_aws_notice(base: str = "http://169.254.169.254") -> bool:
    """Return True if EC2's metadata server at the URL `base` announces the preemption of this spot machine."""
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = _query_metadata(f"{base}/latest/api/token", ttl, method="PUT")
    header = {"X-aws-ec2-metadata-token": token or ""}
    return _query_metadata(f"{base}/latest/meta-data/spot/instance-action", header) is not None


def has_gcp_notice(base: str = "http://metadata.google.internal") -> bool:
    """Return True if GCP's metadata server at the URL `base` announces the preemption of this machine."""
    return _query_metadata(f"{base}/computeMetadata/v1/instance/preempted", {"Metadata-Flavor": "Google"}) == "TRUE"


def _query_metadata(url: str, headers: dict[str, str], method: str = "GET") -> str | None:
    """Return the response of a metadata server, or None if the server is unavailable or responds with an error."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy
    try:
        request = urllib.request.Request(url, headers=headers, method=method)
        return opener.open(request, timeout=METADATA_TIMEOUT_S).read().decode()
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return None


def wait_for(notice: Callable[[], bool]) -> None:
    """Wait until `notice` returns True; call it again POLL_INTERVAL_S after each call that returned False."""
    while not notice():
        time.sleep(POLL_INTERVAL_S)


def announce_preemption(seconds: float, node: str | None = None, address: str = "auto") -> str:
    """Drain a node: Ray places no new work on the node, and runs on the node save a checkpoint and leave.

    This process connects to the cluster, and stays connected.

    Args:
        seconds: Seconds until the machine is terminated.
        node: Ray's id of the node; default: the node of this process.
        address: Address of the cluster, HOST:PORT or auto.

    Returns:
        Ray's id of the node.

    Raises:
        SystemExit: Ray rejected the request; the exception contains Ray's reason.
        ConnectionError: There is no cluster at the address.
    """
    import logging

    import ray

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    context = ray.get_runtime_context()
    node = node or context.get_node_id()
    deadline_ms = int((time.time() + seconds) * 1000)
    accepted, why = drain(context.gcs_address, node, "the machine will be preempted", deadline_ms)
    if not accepted:
        raise SystemExit(f"Ray rejected the drain request of node {node}: {why}")
    return node


def wait_until_empty(node: str, seconds: float) -> None:
    """Wait until no CPUs or GPUs of a node are in use, the node has left the cluster, or `seconds` have passed."""
    import ray

    end = time.monotonic() + seconds
    while time.monotonic() < end:
        total = next((n["Resources"] for n in ray.nodes() if n["NodeID"] == node and n["Alive"]), None)
        if total is None:
            return
        free = list_free_resources().get(node, {})
        if all(free.get(name, 0) >= total.get(name, 0) for name in ("CPU", "GPU")):
            return
        time.sleep(0.5)


def main(
    cloud: Annotated[Cloud, typer.Argument(help="Cloud whose preemption notice the program awaits; now: do not wait.")],
    seconds: Annotated[
        float | None,
        typer.Option(help="Seconds from the notice to the termination; default: 120 (aws), 30 (gcp) or 60 (now)."),
    ] = None,
    node: Annotated[str | None, typer.Option(help="Ray's id of the node; default: this node.")] = None,
    address: Annotated[str, typer.Option(help="Address of the Ray cluster, HOST:PORT or auto.")] = "auto",
) -> None:
    """Wait for a preemption notice, ask Ray to drain the node, and exit when the node is empty or its time is over."""
    seconds = NOTICE_S.get(cloud, 60) if seconds is None else seconds
    if cloud != "now":
        wait_for(has_aws_notice if cloud == "aws" else has_gcp_notice)
    node = announce_preemption(seconds, node, address)
    print(f"node {node} will be terminated within {seconds:.0f} s", flush=True)
    wait_until_empty(node, seconds)


if __name__ == "__main__":
    typer.run(main)
