"""Ray's node provider for GCP, with spot machines first. Needs requirements/cloud.txt."""

from __future__ import annotations

from typing import Any

from raytrec.cluster.spot import SpotFirst
from raytrec.compat.ray_gcp import GCPNodeProvider

# A machine with GPUs cannot be moved to another host while it runs: GCP wants to hear that it may be stopped.
ON_DEMAND = {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE"}


class GcpSpotFirst(SpotFirst, GCPNodeProvider):
    """Machines are asked for one by one."""

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """As SpotFirst. When one of several is refused, Ray's provider forgets those that it has got."""
        created = {}
        for _ in range(count):
            created |= super().create_node(node_config, tags, 1)
        return created

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        if node_config.get("scheduling", {}).get("provisioningModel") != "SPOT":
            return None
        return node_config | {"scheduling": ON_DEMAND}
