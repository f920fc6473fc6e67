"""Node providers for `ray up`: spot first, else on demand.

Ray 2.60 has no such fallback. Its autoscaler (v2) prefers node types by `priority`, and lowers that of a type
whose machines came up but never ran Ray (`CloudResourceMonitor`, which hears of ALLOCATION_TIMEOUT alone). A
launch that the cloud refuses (ALLOCATION_FAILED) teaches it nothing: it asks for the same type for ever.
So the second request is made here, within the launch that was refused; the autoscaler sees one node type.

AwsSpotFirst and GcpSpotFirst are named in cluster.yaml as `provider: {type: external, module: …}`, and
imported where `ray up` runs and by the autoscaler on the head node. They need requirements/cloud.txt.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.autoscaler.node_provider import NodeProvider

from raytrec.compat.ray_core import node_providers

AwsProvider: Any
GcpProvider: Any
AwsProvider, GcpProvider = node_providers()
logger = logging.getLogger(__name__)
# A machine with GPUs cannot be moved to another host while it runs: GCP requires that it may be stopped.
GCP_ON_DEMAND = {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE"}


class SpotFirst(NodeProvider):
    """What the providers of both clouds have in common: `create_node` in up to two requests.

    `create_node` of Ray's providers raises when nothing was launched, and may launch fewer than asked for.
    """

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launches machines; those that cannot be had as spot are asked for once more, on demand.

        Args:
            node_config: what the cloud is asked for, as in cluster.yaml.
            tags: Ray's marks on the machines.
            count: machines.

        Returns:
            What was launched, by the machine's id.

        Raises:
            Exception: the cloud's answer to the last request.
        """
        on_demand = self.on_demand(node_config)
        if on_demand is None:
            return super().create_node(node_config, tags, count) or {}
        created = {}
        try:
            created = super().create_node(node_config, tags, count) or {}
        except Exception as refused:
            # Of whatever kind it is: a mistake in the request is one on demand, too, and then raised.
            logger.warning("no spot machine: %s", refused)
        missing = count - len(created)
        if missing > 0:
            logger.warning("%d of %d machines are launched on demand", missing, count)
            created |= super().create_node(on_demand, tags, missing) or {}
        return created

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        """The same machine on demand; None where this is not spot."""
        raise NotImplementedError


class AwsSpotFirst(SpotFirst, AwsProvider):
    """A request goes through all subnets, and so zones, that it may use, before the next one on demand."""

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        if "InstanceMarketOptions" not in node_config:
            return None
        return {key: value for key, value in node_config.items() if key != "InstanceMarketOptions"}


class GcpSpotFirst(SpotFirst, GcpProvider):
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
        return node_config | {"scheduling": GCP_ON_DEMAND}
