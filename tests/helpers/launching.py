"""Cluster launcher configurations read by Ray's own code, and the nodes its autoscaler would start."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.schema import AutoscalerInstance
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import ClusterResourceConstraint, NodeState, NodeStatus
from ray.core.generated.instance_manager_pb2 import Instance, NodeKind

ROOT = Path(__file__).parents[2]
AWS_CONFIG, GCP_CONFIG = ROOT / "cluster.yaml", ROOT / "deploy" / "cluster-gcp.yaml"
Bundle = dict[str, float]


def prepare_launcher_config(path: Path) -> dict[str, Any]:
    """Load a configuration, fill in defaults and validate it like `ray up`."""
    config = prepare_config(yaml.safe_load(path.read_text()))
    validate_config(config)
    return config


class NodePlanner:
    """Ray's node scheduler (autoscaler v2) without a cluster.

    Args:
        config: configuration from `prepare_launcher_config`, or converted from a RayCluster by Ray.
    """

    def __init__(self, config: dict[str, Any]):
        config = copy.deepcopy(config)
        self._config = AutoscalingConfig(config, skip_content_hash=True)
        self._head = config["head_node_type"]

    def wanted(
        self,
        tasks: list[Bundle] = (),
        workers: list[Bundle] = (),
        running: list[AutoscalerInstance] = (),
        availabilities: dict[str, float] | None = None,
    ) -> Counter[str]:
        """Return node type → number of nodes to launch.

        Args:
            tasks: resources of pending tasks.
            workers: resources requested by a run (request_resources).
            running: nodes other than the head.
            availabilities: node type → availability score of Ray's CloudResourceMonitor.
        """
        reply = self._schedule(tasks, workers, running, availabilities or {})
        assert not reply.infeasible_resource_requests
        assert not reply.infeasible_cluster_resource_constraints
        return Counter({launch.instance_type: launch.count for launch in reply.to_launch})

    def unwanted(self, running: list[AutoscalerInstance], workers: list[Bundle] = ()) -> Counter[str]:
        """Return node type → number of nodes to terminate if no task is pending."""
        reply = self._schedule([], workers, running, {})
        return Counter(request.instance_type for request in reply.to_terminate)

    def node(self, kind: str, idle_s: float = 0, number: int = 1) -> AutoscalerInstance:
        """Return a node of a type that has been idle for `idle_s` seconds."""
        name, resources = f"{kind}-{number}", self._config.get_node_type_configs()[kind].resources
        state = NodeState(
            node_id=name.encode(),
            ray_node_type_name=kind,
            total_resources=resources,
            available_resources=resources,
            idle_duration_ms=int(idle_s * 1000),
            status=NodeStatus.IDLE if idle_s else NodeStatus.RUNNING,
        )
        instance = Instance(
            instance_id=name,
            instance_type=kind,
            status=Instance.RAY_RUNNING,
            node_id=name,
            node_kind=NodeKind.HEAD if kind == self._head else NodeKind.WORKER,
        )
        return AutoscalerInstance(cloud_instance_id=name, ray_node=state, im_instance=instance)

    def _schedule(self, tasks, workers, running, availabilities):
        constraint = ClusterResourceConstraint()
        requests = ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(w) for w in workers])
        constraint.resource_requests.extend(requests)
        return ResourceDemandScheduler(None).schedule(
            SchedulingRequest(
                disable_launch_config_check=True,
                node_type_configs=self._config.get_node_type_configs(),
                max_num_nodes=self._config.get_max_num_nodes(),
                idle_timeout_s=self._config.get_idle_timeout_s(),
                resource_requests=ResourceRequestUtil.group_by_count(
                    [ResourceRequestUtil.make(task) for task in tasks]
                ),
                cluster_resource_constraints=[constraint] if workers else [],
                current_instances=[self.node(self._head), *running],
                cloud_resource_availabilities=availabilities,
                recoverable_resource_availabilities=availabilities,
            )
        )
