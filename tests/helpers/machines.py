"""A cloud on this machine: its machines are Ray nodes, and one whose Ray has been killed is gone."""

from __future__ import annotations

from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FakeMultiNodeProvider


class Machines(FakeMultiNodeProvider):
    """Ray's fake provider, which goes on listing a node whatever becomes of its processes."""

    def non_terminated_nodes(self, tag_filters: dict[str, str]) -> list[str]:
        with self.lock:
            for name in [name for name, known in self._count_nodes.items() if _has_died(known)]:
                self._terminate_node(self._count_nodes.pop(name))  # its agents and workers
        return super().non_terminated_nodes(tag_filters)


def _has_died(known: dict[str, Any]) -> bool:
    if "node" not in known:
        return False  # the head, which is not ours
    return known["node"].all_processes["raylet"][0].process.poll() is not None
