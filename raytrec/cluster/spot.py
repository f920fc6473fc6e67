"""Node providers for `ray up` that launch spot machines first and fall back to on-demand machines.

Ray 2.60 has no such fallback. Its autoscaler (v2) prefers node types by `priority`. The priority of a type is
lowered only if its machines came up without running Ray (`CloudResourceMonitor`, ALLOCATION_TIMEOUT). If the
cloud refuses a launch (ALLOCATION_FAILED), the autoscaler requests the same type forever. Therefore the
second request is made here, within the refused launch, and the autoscaler sees a single node type.

cluster.yaml names AwsSpotFirst and GcpSpotFirst as `provider: {type: external, module: …}`. Both are imported
where `ray up` runs and by the autoscaler on the head node, and need requirements/cloud.txt.
"""

from __future__ import annotations

import logging
from typing import Any

from ray.autoscaler.node_provider import NodeProvider

from raytrec.compat.ray_core import load_node_providers

AwsProvider: Any
GcpProvider: Any
AwsProvider, GcpProvider = load_node_providers()
logger = logging.getLogger(__name__)
# GCP cannot migrate running machines with GPUs, so it requires permission to stop them.
GCP_ON_DEMAND = {"provisioningModel": "STANDARD", "onHostMaintenance": "TERMINATE"}


class SpotFirst(NodeProvider):
    """Base class of the providers of both clouds; `create_node` makes up to two requests.

    `create_node` of Ray's providers raises if nothing was launched, and may launch fewer machines than
    requested.
    """

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launch spot machines; launch machines that are not available as spot on demand instead.

        Args:
            node_config: Request to the cloud, as in cluster.yaml.
            tags: Ray's tags of the machines.
            count: Number of machines.

        Returns:
            The launched machines by id.

        Raises:
            Exception: The last request was refused by the cloud.
        """
        on_demand = self.on_demand(node_config)
        if on_demand is None:
            return super().create_node(node_config, tags, count) or {}
        created = {}
        try:
            created = super().create_node(node_config, tags, count) or {}
        except Exception as refused:
            # Every kind of error is retried on demand; a mistake in the request fails again and is raised.
            logger.warning("no spot machine is available: %s", refused)
        missing = count - len(created)
        if missing > 0:
            logger.warning("launching %d of %d machines on demand", missing, count)
            created |= super().create_node(on_demand, tags, missing) or {}
        return created

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration of an equal on-demand machine, or None if the given one is not a spot machine."""
        raise NotImplementedError


class AwsSpotFirst(SpotFirst, AwsProvider):
    """Spot-first provider for AWS; each request tries all allowed subnets, and thus zones, before the next request."""

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration without its market options, or None if it is not a spot machine."""
        if "InstanceMarketOptions" not in node_config:
            return None
        return {key: value for key, value in node_config.items() if key != "InstanceMarketOptions"}


class GcpSpotFirst(SpotFirst, GcpProvider):
    """Spot-first provider for GCP; machines are requested one by one."""

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launch machines one by one; Ray's provider loses launched machines if one of several fails."""
        created = {}
        for _ in range(count):
            created |= super().create_node(node_config, tags, 1)
        return created

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration with on-demand scheduling, or None if it is not a spot machine."""
        if node_config.get("scheduling", {}).get("provisioningModel") != "SPOT":
            return None
        return node_config | {"scheduling": GCP_ON_DEMAND}
