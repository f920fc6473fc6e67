"""Ray's node provider for AWS, with spot machines first. Needs requirements/cloud.txt."""

from __future__ import annotations

from typing import Any

from raytrec.cluster.spot import SpotFirst
from raytrec.compat.ray_aws import AWSNodeProvider


class AwsSpotFirst(SpotFirst, AWSNodeProvider):
    """A request goes through all subnets, and so zones, that it may use, before the next one on demand."""

    @staticmethod
    def on_demand(node_config: dict[str, Any]) -> dict[str, Any] | None:
        if "InstanceMarketOptions" not in node_config:
            return None
        return {key: value for key, value in node_config.items() if key != "InstanceMarketOptions"}
