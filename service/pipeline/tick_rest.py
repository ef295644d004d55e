"""The pipeline's rest between ticks, and the events that end it.

A hard signal wakes the tick at once. So do the first samples of a node, so that a new node has its score
within seconds. While a fleet starts to send, new nodes appear for minutes. The tick must not run all that
time. So nodes that appear soon after a tick wait until the tick has rested for a while.
"""

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.event_wait import wait_for_event
from fleetcast.fleet.samples import EntityKind, SampleBatch

SHORTEST_WALL_S = 0.2
NEW_NODES_REST = 4  # times as long as a tick took: so long new nodes do not wake the next one


class TickRest:
    """The rest between two ticks. It ends early when the event `wake` is set."""

    def __init__(self, entities: Entities, wake: asyncio.Event) -> None:
        self._entities, self._wake = entities, wake
        self._has_reported = np.zeros(0, np.bool_)  # (node,)
        self._waits = False  # a node had its first samples since the last tick began
        self._may_wake = False
        self._began = time.monotonic()

    def record_samples(self, batches: Sequence[SampleBatch]) -> None:
        """Record which nodes have sent samples. A new node wakes the tick, unless the rest has just begun."""
        nodes = len(self._entities[EntityKind.NODE])
        if len(self._has_reported) < nodes:
            self._has_reported = np.concatenate(
                [self._has_reported, np.zeros(nodes - len(self._has_reported), np.bool_)]
            )
        elif self._has_reported.all():
            return
        for samples in batches:
            owner = self._entities[samples.kind].node[samples.entity]
            owner = owner[owner >= 0]
            if not self._has_reported[owner].all():
                self._has_reported[owner] = True
                self._waits = True
        if self._waits and self._may_wake:
            self._wake.set()

    def begin_tick(self) -> None:
        """Begin a tick, which covers all nodes so far. Nodes that appear from now on wait for the next tick."""
        self._wake.clear()  # before the tick: what arrives while it scores is for the next one, at once
        self._waits = self._may_wake = False
        self._began = time.monotonic()

    async def rest_until_due(self, tick_s: float) -> None:
        """Rest until `tick_s` wall seconds after the tick began, or until the next tick is woken."""
        took_s = time.monotonic() - self._began
        await asyncio.sleep(SHORTEST_WALL_S)  # a flood of hard signals leaves time for everything else
        await self._wait_for_wake(min(tick_s, (1 + NEW_NODES_REST) * took_s))
        self.enable_new_node_wake()
        await self._wait_for_wake(tick_s)

    def enable_new_node_wake(self) -> None:
        """Let new nodes wake the tick from now on. If a new node waits already, wake it now."""
        self._may_wake = True
        if self._waits:
            self._wake.set()

    async def _wait_for_wake(self, after_s: float) -> None:
        """Wait until the tick is woken, or until `after_s` seconds after the last tick began."""
        rest_s = self._began + after_s - time.monotonic()
        if rest_s > 0:
            await wait_for_event(self._wake, rest_s)
