"""Node providers for `ray up` that launch spot machines first and fall back to on-demand machines.

Ray 2.60 has no such fallback. Its autoscaler (v2) prefers node types by `priority`. It lowers the priority of a type
only if machines of this type start, but Ray does not start on them (`CloudResourceMonitor`, ALLOCATION_TIMEOUT). If
the cloud refuses a launch (ALLOCATION_FAILED), the autoscaler requests the same type forever. Therefore, these
providers make a second request within the refused launch, and the autoscaler sees a single node type.

cluster.yaml names AwsSpotFirst and GcpSpotFirst as `provider: {type: external, module: …}`. The machine that runs
`ray up` and the autoscaler on the head node import this module, and need requirements/cloud.txt.
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
    """Base class of the providers for AWS and GCP, whose `create_node` makes up to two requests to the cloud.

    `create_node` of Ray's providers raises an error if no machine was launched, and may launch fewer machines than
    requested.
    """

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launch spot machines, and on-demand machines in place of those that the cloud does not provide.

        Args:
            node_config: Configuration of the machines, as in cluster.yaml.
            tags: Ray's tags of the machines.
            count: Number of machines.

        Returns:
            Machine id → description of each launched machine, as returned by Ray's provider.

        Raises:
            Exception: The cloud refused the last request. Machines launched by the first request keep running.
        """
        on_demand = self.on_demand(node_config)
        if on_demand is None:
            return super().create_node(node_config, tags, count) or {}
        created = {}
        try:
            created = super().create_node(node_config, tags, count) or {}
        except Exception as refused:
            # The error may have any cause. If the request itself is wrong, the second request raises the error again.
            logger.warning("the launch of spot machines failed: %s", refused)
        missing = count - len(created)
        if missing > 0:
            logger.warning("launching %d of %d machines on demand", missing, count)
            created |= super().create_node(on_demand, tags, missing) or {}
        return created

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration of an equal on-demand machine; None if `node_config` is not for a spot machine."""
        raise NotImplementedError


class AwsSpotFirst(SpotFirst, AwsProvider):
    """Spot-first provider for AWS; each of the two requests tries all allowed subnets, and thus all their zones."""

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration without its market options; None if it does not request a spot machine."""
        if "InstanceMarketOptions" not in node_config:
            return None
        return {key: value for key, value in node_config.items() if key != "InstanceMarketOptions"}


class GcpSpotFirst(SpotFirst, GcpProvider):
    """Spot-first provider for GCP, which requests machines one by one."""

    def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> dict[str, Any]:
        """Launch machines one by one, because Ray's provider loses launched machines if one of several fails.

        Arguments, result and errors are those of `SpotFirst.create_node`. An error ends the launches.
        """
        created = {}
        for _ in range(count):
            created |= super().create_node(node_config, tags, 1)
        return created

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        """Return the configuration with on-demand scheduling; None if it does not request a spot machine."""
        if node_config.get("scheduling", {}).get("provisioningModel") != "SPOT":
            return None
        return node_config | {"scheduling": GCP_ON_DEMAND}
