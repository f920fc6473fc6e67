"""What a map of keys was some steps ago.

A pipeline maps the ids of batches that are trained later: when a checkpoint is written, the map is ahead of
the tables. So each change keeps what it replaces for a few steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from raytrec.common.errors import RunError
from raytrec.embeddings.managed.key_map import Entries, KeyMap

KEPT = 4  # steps; TorchRec's pipelines take up to three batches ahead


@dataclass
class Change:
    """What a map had of some keys before they were changed.

    Attributes:
        keys: int64 [n], all that were changed, each once.
        before: those of them that were there, as they were.
    """

    map: KeyMap
    keys: torch.Tensor
    before: Entries


@dataclass
class Step:
    """One step.

    Attributes:
        number: of the run, from 0.
        before: whatever else there was before it.
        changes: of maps, in their order.
    """

    number: int
    before: Any
    changes: list[Change] = field(default_factory=list)


class Journal:
    """The last steps of a map, newest last."""

    def __init__(self):
        self._steps: deque[Step] = deque(maxlen=KEPT)

    def begin(self, step: int, before: Any) -> None:
        """A step, before it changes anything."""
        self._steps.append(Step(step, before))

    def update(self, map: KeyMap, slots: torch.Tensor) -> Entries:
        """What these slots, each given once, have is about to be changed, or removed: what they have."""
        entries = map.at(slots)
        self._steps[-1].changes.append(Change(map, entries.keys, entries))
        return entries

    def insert(self, map: KeyMap, keys: torch.Tensor) -> None:
        """These keys are about to be put in."""
        self._steps[-1].changes.append(Change(map, keys, map.at(keys.new_empty(0))))

    def entries(self, map: KeyMap, steps: int) -> Entries:
        """What a map had after the first `steps` steps of the run.

        Raises:
            RunError: that was too long ago.
        """
        entries = map.entries()
        for change in (c for s in reversed(self._since(steps)) for c in reversed(s.changes) if c.map is map):
            entries = entries[~torch.isin(entries.keys, change.keys)].joined(change.before)
        return entries

    def before(self, steps: int, now: Any) -> Any:
        """What else there was after the first `steps` steps; `now` is what there is now."""
        since = self._since(steps)
        return since[0].before if since else now

    def _since(self, steps: int) -> list[Step]:
        since = [step for step in self._steps if step.number >= steps]
        if since and since[0].number > steps:
            raise RunError(
                f"managed ids as of step {steps} are asked for at step {since[-1].number + 1}",
                expected=f"a step at most {KEPT} steps ago",
            )
        return since
