"""A machine of nodes with counts of free GPUs, on which a job must fit into nodes.

A job of up to a node's GPUs takes them on one node. A larger one takes whole nodes. Backfill is
EASY, as in `fleetcast.placement.play.capacity`. The nodes that should be free first are reserved
for the head.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.machines.gang_room import Fleet, GangAsk, Ints, Slot
from fleetcast.placement.play.capacity import CountAsk
from fleetcast.placement.play.rows import RowEntry


def split_job_by_node(gpus: int, each: int) -> tuple[int, int]:
    """Return (members, GPUs of each member) of a job on nodes of `each` GPUs.

    A job larger than a node takes whole nodes, including all of its last one.

    >>> split_job_by_node(4, 8), split_job_by_node(20, 8)
    ((1, 4), (3, 8))
    """
    return (1, gpus) if gpus <= each else (-(-gpus // each), each)


class NodeCounts:
    """A machine of `nodes` nodes with `each` GPUs each.

    planned, backfills: the same as those of `Capacity`.
    """

    def __init__(
        self, nodes: int, each: int, planned: Callable[[CountAsk, float], float], backfills: bool = True
    ) -> None:
        slots = [Slot(size, np.full(nodes, each // size, np.int64)) for size in range(1, each + 1)]
        self.gpus = nodes * each
        self.started: list[RowEntry] = []  # since `at`
        self._fleet = Fleet(np.full(nodes, each, np.int64), np.zeros(nodes), slots)
        self._each, self._nodes, self._planned, self._backfills = each, nodes, planned, backfills
        self._now_s = 0.0
        self._held: dict[int, tuple[CountAsk, float, float, Ints, Ints]] = {}  # ask, start, planned end, nodes, GPUs
        self._reserved: tuple[NDArray[np.int64], float] | None = None  # the head's nodes, and when it should start

    def _make_gang_ask(self, ask: CountAsk) -> GangAsk:
        members, size = split_job_by_node(ask.gpus, self._each)
        return GangAsk(size - 1, members, 0.0)

    def set_clock(self, now_s: float) -> None:
        self._now_s, self._reserved = now_s, None
        self.started.clear()

    def fits(self, ask: CountAsk) -> bool:
        return self._fleet.fits(self._make_gang_ask(ask))

    def start(self, ask: CountAsk, item: RowEntry) -> bool:
        end_s = self._now_s + self._planned(ask, 0.0)
        nodes = None
        if self._reserved is not None and (end_s > self._reserved[1] or not self._backfills):
            nodes = self._reserved[0]
        place = self._fleet.choose_gang_nodes(self._make_gang_ask(ask), nodes)
        if place is None:
            return False
        self._fleet.change_free_gpus(place[0], -place[1])
        self._held[item.number] = ask, self._now_s, end_s, *place
        self.started.append(item)
        return True

    def claim(self, ask: CountAsk, item: RowEntry) -> bool:
        if self._make_gang_ask(ask).members * split_job_by_node(ask.gpus, self._each)[1] > self.gpus:
            return False
        if not self._backfills:
            self._reserved = np.arange(self._nodes), self._now_s
            return True
        ready_s = np.zeros(self._nodes)
        for held in self._held.values():
            nodes = held[3]
            ready_s[nodes] = np.maximum(ready_s[nodes], self._estimate_end_s(*held[:3]))
        self._fleet.ready_s = ready_s
        self._reserved = self._fleet.find_soonest_nodes(self._make_gang_ask(ask))
        return True

    def _estimate_end_s(self, ask: CountAsk, begun_s: float, end_s: float) -> float:
        """Return when a job should end. A job that should have ended already gets a new estimate."""
        if end_s > self._now_s:
            return end_s
        age_s = self._now_s - begun_s
        return begun_s + max(self._planned(ask, age_s), age_s + 1)

    def end_job(self, number: int) -> None:
        """Release the GPUs of a job."""
        *_, nodes, gpus = self._held.pop(number)
        self._fleet.change_free_gpus(nodes, gpus)
