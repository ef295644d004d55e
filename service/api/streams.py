"""The event streams of one api process: one broadcaster for unbound callers, and one for each set of queues.

A caller that is bound to queues receives boards and the actions of its queues. Hard signals concern nodes, so it does
not receive them. The set of queues is a part of the configuration, so there are few broadcasters.
"""

from collections.abc import Sequence

from fleetcast.service.api.action_feed import ActionFeed
from fleetcast.service.api.broadcaster import EventBroadcaster
from fleetcast.service.api.placer_link import PlacerLink
from fleetcast.service.board.cache import BoardCache


class EventStreams:
    """The broadcasters of one api process. `close` ends every stream."""

    def __init__(self, cache: BoardCache, placer: PlacerLink) -> None:
        self._cache = cache
        self._placer = placer
        self._broadcasters: dict[frozenset[str], EventBroadcaster] = {}
        self._is_closed = False

    @property
    def clients(self) -> int:
        """The number of open streams."""
        return sum(one.clients for one in self._broadcasters.values())

    def find_broadcaster(self, queues: Sequence[str]) -> EventBroadcaster:
        """Return the broadcaster for callers that are bound to these queues. Without any queue, they are unbound."""
        key = frozenset(queues)
        if key not in self._broadcasters:
            feed = ActionFeed(self._placer)
            self._broadcasters[key] = EventBroadcaster(self._cache, feed, sends_signals=not key)
            self._broadcasters[key].closed = self._is_closed
        return self._broadcasters[key]

    async def close(self) -> None:
        self._is_closed = True
        for one in self._broadcasters.values():
            await one.close()
