"""NewNodes: the first samples of a node wake the tick, so that a new node has its score within seconds.

A fleet that is heard for the first time gives new nodes for minutes. The tick must not run all that time, so it rests
for a while first: nodes that come meanwhile wait.
"""

import asyncio
from collections.abc import Sequence

import numpy as np

from fleet.entities import Entities
from fleet.samples import EntityKind, SampleBatch


class NewNodes:
    """The nodes without samples so far, since this process began. `wake` makes the pipeline tick at once."""

    def __init__(self, entities: Entities, wake: asyncio.Event) -> None:
        self._entities, self._wake = entities, wake
        self._is_heard = np.zeros(0, np.bool_)  # (node,)
        self._waits = False  # a node had its first samples since the last tick began
        self._may_wake = False

    def record(self, batches: Sequence[SampleBatch]) -> None:
        """Record whose samples these are. Wakes the tick for a new node, unless the tick rests."""
        nodes = len(self._entities[EntityKind.NODE])
        if len(self._is_heard) < nodes:
            self._is_heard = np.concatenate([self._is_heard, np.zeros(nodes - len(self._is_heard), np.bool_)])
        elif self._is_heard.all():
            return
        for samples in batches:
            owner = self._entities[samples.kind].node[samples.entity]
            owner = owner[owner >= 0]
            if not self._is_heard[owner].all():
                self._is_heard[owner] = True
                self._waits = True
        if self._waits and self._may_wake:
            self._wake.set()

    def hold(self) -> None:
        """Let new nodes wait from now on: a tick begins, which covers those that came before."""
        self._waits = self._may_wake = False

    def release(self) -> None:
        """Let new nodes wake the tick from now on, those that wait already too."""
        self._may_wake = True
        if self._waits:
            self._wake.set()
