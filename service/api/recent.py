"""The identities of recent events. With them, the api does not write a repeated delivery to disk.

Their number is bounded. The pipeline drops the repeats that are not recognised here.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Hashable

from fleetcast.fleet.sequences import SeenSequences
from fleetcast.ingest.inbox.job_events import Identity

MAX_STREAMS = 50_000
MAX_RUNS = 256


class RecentIdentities:
    """The sequence numbers received in each stream of events, as runs of consecutive numbers.

    A stream is an attempt, or a node with a source. At the bound, the least recently used stream is dropped.
    """

    def __init__(self, max_streams: int = MAX_STREAMS) -> None:
        self._max_streams = max_streams
        self._streams: OrderedDict[Hashable, SeenSequences] = OrderedDict()

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def streams(self) -> Collection[Hashable]:
        """The streams from which events were received."""
        return self._streams.keys()

    def __contains__(self, identity: Identity) -> bool:
        seen = self._streams.get(identity[:3])
        if seen is None or identity[3] > seen.runs[-1][1]:
            return False
        at = bisect_right(seen.runs, identity[3], key=lambda run: run[0])
        return at > 0 and identity[3] <= seen.runs[at - 1][1]

    def add_identity(self, identity: Identity) -> None:
        stream = identity[:3]
        seen = self._streams.get(stream)
        if seen is None:
            seen = self._streams[stream] = SeenSequences()
            if len(self._streams) > self._max_streams:
                self._streams.popitem(last=False)
        self._streams.move_to_end(stream)
        seen.add(identity[3])
        if len(seen.runs) > MAX_RUNS:
            del seen.runs[0]
