"""Ray's node providers for AWS and GCP, which are in private packages (2.60.0)."""

from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.gcp.node_provider import GCPNodeProvider

__all__ = ["AWSNodeProvider", "GCPNodeProvider"]
