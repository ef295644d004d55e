"""OpenDemand: attempts whose demand follows the placer's ledger until job events arrive.

    requested   it waits in our own queue, and no event reports that: its request counts as queued demand
    promised    its GPUs are promised, and no event reports its start: it counts as running since the promise

Once an event reports the same, the event counts instead, so that each attempt counts once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from fleetcast.features.contribution import Contribution, Key
from fleetcast.fleet.stateful import Dump, Stateful

FOLLOWED = ("milli", "weights", "allowed", "names_quota")  # as the request says, while it waits or is promised
RETENTION_MS = 86_400_000  # an attempt that left the queue, in case that events tell of it after all


class OpenDemand(Stateful):
    """The attempts that only the ledger reports so far.

    promised: attempt → when its GPUs were promised, Unix ms.
    """

    def __init__(self) -> None:
        self._requested: set[Key] = set()
        self._left: dict[Key, int] = {}  # requested before → when it left the queue without a start
        self.promised: dict[Key, int] = {}

    def apply_promise(self, key: Key, change: Contribution | None) -> Contribution | None:
        """Return an attempt's contribution with its promise applied. change: the contribution by its events.

        If no event reports the attempt's start, it counts as running since its GPUs were promised.
        """
        self._requested.discard(key)
        self._left.pop(key, None)
        if change is None or change.started_ms is not None or change.ended_ms is not None:
            self.promised.pop(key, None)
            return change
        return _start_at_promise(change, self.promised.get(key))

    def apply_requests(
        self,
        known: Mapping[Key, Contribution],
        requests: Mapping[Key, Contribution],
        promised: Mapping[Key, int],
        now_ms: int,
    ) -> Iterator[tuple[Key, Contribution]]:
        """Apply the open requests, and yield the new contribution of each attempt that they change.

        known: contributions of all attempts. requests: contributions of the attempts that wait in our own queue,
        or whose GPUs are promised. promised: attempt → when its GPUs were promised, Unix ms.
        """
        for key in self._requested - requests.keys():
            before = known.get(key)
            if before is not None:
                yield key, replace(_start_at_promise(before, self.promised.get(key)), ended_ms=now_ms)
            self._requested.discard(key)
            self._left[key] = now_ms
            self.promised.pop(key, None)
        for key in self.promised.keys() - promised.keys():
            self.promised.pop(key)
            if (before := known.get(key)) is not None and before.ended_ms is None:
                yield key, replace(before, started_ms=None)
        for key in self.promised.keys() & promised.keys() - requests.keys():
            if (before := known.get(key)) is not None and before.milli:
                yield key, replace(before, milli=0)  # other jobs started on all GPUs that were promised
        for key, change in requests.items():
            before = known.get(key)
            if before is None or (before.ended_ms is not None and key not in self._requested):
                self._requested.add(key)
                self._left.pop(key, None)
                before = change
                if key not in promised:
                    yield key, change
            elif before.ended_ms is None and (before.started_ms is None or key in self.promised):
                after = replace(before, **{name: getattr(change, name) for name in FOLLOWED})
                if after != before and (key not in promised or before.started_ms is not None):
                    yield key, after
                before = after
            if key in promised and before.started_ms is None:
                self.promised[key] = promised[key]
                yield key, replace(_start_at_promise(before, promised[key]), weights=change.weights)

    def pop_departed(self, now_ms: int) -> list[Key]:
        """Return the attempts whose requests left the queue more than RETENTION_MS ago. Each is returned once."""
        old = [key for key, left_ms in self._left.items() if left_ms < now_ms - RETENTION_MS]
        for key in old:
            del self._left[key]
        return old

    def dump(self) -> Dump:
        timed = {"promised": self.promised, "left": self._left}
        about = {name: [[*key, time_ms] for key, time_ms in rows.items()] for name, rows in timed.items()}
        return {"requested": [*map(list, self._requested)], **about}, {}

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._requested = {(job, attempt) for job, attempt in about["requested"]}
        self.promised = {(job, attempt): since_ms for job, attempt, since_ms in about["promised"]}
        self._left = {(job, attempt): left_ms for job, attempt, left_ms in about["left"]}


def _start_at_promise(change: Contribution, promised_ms: int | None) -> Contribution:
    return change if promised_ms is None else replace(change, started_ms=promised_ms)
