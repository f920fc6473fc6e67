"""Simulated cloud provider: nodes are Ray nodes on this machine; a node ends when its raylet is killed."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class LocalMachineProvider(FakeMultiNodeProvider):
    """Ray's fake node provider, changed to drop nodes whose raylet has died."""

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self.lock:
            for name in [name for name, known in self._nodes.items() if _has_died(known)]:
                self._terminate_node(self._nodes.pop(name))  # its agents and workers
        return super().non_terminated_nodes(tag_filters)


def _has_died(known: dict[str, Any]) -> bool:
    if "node" not in known:
        return False  # the head is not managed by the provider
    return known["node"].all_processes["raylet"][0].process.poll() is not None
