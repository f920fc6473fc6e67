"""Ray's node provider for GCP, which is in a private package (2.60.0)."""

from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

__all__ = ["GCPNodeProvider"]
