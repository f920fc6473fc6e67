"""Ray's node provider for AWS, which is in a private package (2.60.0)."""

from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

__all__ = ["AWSNodeProvider"]
