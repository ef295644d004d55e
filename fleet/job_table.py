"""The table of all attempts of all jobs, by job and attempt.

Jobs that ended a while ago are stored as packed bytes until an event concerns them. This saves memory, and
snapshots can skip them. Such jobs are called *resting*.
"""

import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice, takewhile
from operator import itemgetter

import msgspec

from fleetcast.fleet.events import JobEvent
from fleetcast.fleet.jobs import JobAttempt

encode_job = msgspec.msgpack.Encoder().encode  # all attempts of one job
decode_job = msgspec.msgpack.Decoder(list[JobAttempt]).decode


def _unpack_attempts(packed: bytes) -> list[JobAttempt]:
    return decode_job(zlib.decompress(packed))


class JobTable:
    """The table of all attempts by (job, attempt). `position` counts applied events and never decreases."""

    def __init__(self) -> None:
        self.attempts: dict[tuple[str, int], JobAttempt] = {}  # of awake jobs, as is `latest`
        self.latest: dict[str, int] = {}
        self.changed: set[str] = set()  # jobs, since a snapshot cleared it, which then writes these alone
        self.resting: dict[str, bytes] = {}  # job -> its attempts, packed, in order of rest
        self._started: dict[str, list[int]] = {}  # job -> its attempts that started, in order
        self._live: dict[tuple[str, int], JobAttempt] = {}
        self._live_of: Counter[str] = Counter()  # attempts of a job among them
        self._exempt: set[tuple[str, int]] = set()  # live attempts that count for no limit
        self.position = 0

    def __iter__(self) -> Iterator[JobAttempt]:
        """Yield every attempt. The attempts of resting jobs are copies."""
        yield from self.attempts.values()
        for packed in self.resting.values():
            yield from _unpack_attempts(packed)

    @property
    def live(self) -> int:
        """The number of attempts that wait or run, without exempt ones."""
        return len(self._live) - len(self._exempt)

    def exempt_attempt(self, attempt: JobAttempt, most: int) -> None:
        """Exempt an attempt from the limits while it waits or runs. At most `most` are exempt at a time."""
        attempt.is_exempt = len(self._exempt) < most
        self._update_live(attempt)

    def has_room(self, event: JobEvent, most_live: int) -> bool:
        """Return whether the table may fold `event`, if at most `most_live` attempts may wait or run.

        A known job may have one more attempt, because the new attempt replaces the last one.
        """
        if self.live < most_live or (event.job, event.attempt) in self.attempts or event.job in self.resting:
            return True
        return event.job in self.latest and self._live_of[event.job] <= 1

    def apply(self, event: JobEvent) -> JobAttempt | None:
        """Fold one event and return its attempt, or None if it is a duplicate."""
        key = (event.job, event.attempt)
        if event.job in self.resting:
            self.unpack_job(event.job)
        attempt = self.attempts.get(key)
        if attempt is None:
            attempt = self.attempts[key] = JobAttempt(event.job, event.attempt)
            self.latest[event.job] = max(event.attempt, self.latest.get(event.job, event.attempt))
        if not attempt.fold(event):
            return None
        self.position += 1
        self.changed.add(event.job)
        self._track_attempt(attempt)
        return attempt

    def add_attempt(self, attempt: JobAttempt) -> None:
        """Add a whole attempt, for instance from a snapshot."""
        self.attempts[attempt.job, attempt.attempt] = attempt
        self.latest[attempt.job] = max(attempt.attempt, self.latest.get(attempt.job, attempt.attempt))
        self.changed.add(attempt.job)
        self._track_attempt(attempt)

    def pack_old_jobs(self, before_ms: int, most_over: int | None = None) -> list[JobAttempt]:
        """Pack jobs whose attempts were all over before `before_ms`, and return those attempts.

        most_over: how many ended attempts stay unpacked, the latest first.
        """
        over = [(row.over_ms, row.job) for row in self.attempts.values() if row.over_ms is not None]
        if most_over is not None and len(over) > most_over:
            over = sorted(over, key=itemgetter(0))[len(over) - most_over :]
        young = {row.job for row in self._live.values()} | {job for over_ms, job in over if over_ms >= before_ms}
        done: dict[str, list[JobAttempt]] = {}
        for row in self.attempts.values():
            if row.job not in young:
                done.setdefault(row.job, []).append(row)
        for job, rows in done.items():
            self.resting[job] = zlib.compress(encode_job(rows), 1)
            self.changed.add(job)
            del self.latest[job]
            self._started.pop(job, None)
            for row in rows:
                del self.attempts[job, row.attempt]
        return [row for rows in done.values() for row in rows]

    def unpack_job(self, job: str) -> list[JobAttempt]:
        """Unpack a resting job and return its attempts. Returns an empty list for other jobs."""
        packed = self.resting.pop(job, None)
        attempts = [] if packed is None else _unpack_attempts(packed)
        for attempt in attempts:
            self.add_attempt(attempt)
        return attempts

    def _track_attempt(self, attempt: JobAttempt) -> None:
        if attempt.started_ms is not None:
            self._end_earlier_attempts(attempt)
        self._update_live(attempt)

    def _update_live(self, attempt: JobAttempt) -> None:
        key = (attempt.job, attempt.attempt)
        before = len(self._live)
        if attempt.over_ms is None:
            self._live[key] = attempt
        else:
            self._live.pop(key, None)
        if attempt.is_exempt and key in self._live:
            self._exempt.add(key)
        else:
            self._exempt.discard(key)
        self._live_of[attempt.job] += len(self._live) - before
        if not self._live_of[attempt.job]:
            del self._live_of[attempt.job]

    def _end_earlier_attempts(self, attempt: JobAttempt) -> None:
        """End the earlier attempts of a job whose attempt has started, even if no event reported their ends."""
        started = self._started.setdefault(attempt.job, [])
        at = bisect_right(started, attempt.attempt - 1)
        if at == len(started) or started[at] != attempt.attempt:
            started.insert(at, attempt.attempt)
        if at + 1 < len(started):
            attempt.superseded_ms = self.attempts[attempt.job, started[at + 1]].started_ms
        before = self.find_previous_attempt(attempt)
        if before is not None:
            before.superseded_ms = attempt.started_ms
            self._update_live(before)

    def find_previous_attempt(self, attempt: JobAttempt) -> JobAttempt | None:
        """Return the last attempt of the same job that started before this one, or None.

        That attempt ended when this one started.
        """
        started = self._started.get(attempt.job, [])
        at = bisect_right(started, attempt.attempt - 1)
        if attempt.started_ms is None or at == 0:
            return None
        return self.attempts[attempt.job, started[at - 1]]

    def get(self, job: str, attempt: int | None = None) -> JobAttempt | None:
        """Return one attempt of a job, by default the latest, or None if it is unknown."""
        if job in self.resting:
            rows = {row.attempt: row for row in _unpack_attempts(self.resting[job])}
            return rows.get(max(rows) if attempt is None else attempt)
        number = self.latest.get(job) if attempt is None else attempt
        return None if number is None else self.attempts.get((job, number))

    def list_running(self) -> list[JobAttempt]:
        """Return the attempts that hold GPUs now. The cost grows with live attempts, not with past ones."""
        live = self._live.values()
        return [
            row for row in live if row.started_ms is not None and row.ended_ms is None and row.superseded_ms is None
        ]

    def list_queued(self) -> list[JobAttempt]:
        """Return the attempts that wait for resources, in order of arrival of their first event."""
        return self._list_waiting("queued")

    def rename_nodes(self, name_of: Callable[[str], str]) -> list[JobAttempt]:
        """Rename the nodes of live attempts to the machines' current names. Return the changed attempts."""
        changed = []
        for attempt in self._live.values():
            nodes = tuple(map(name_of, attempt.nodes))
            ranks = tuple(msgspec.structs.replace(rank, node=name_of(rank.node)) for rank in attempt.ranks)
            if (nodes, ranks) != (attempt.nodes, attempt.ranks):
                attempt.nodes, attempt.ranks = nodes, ranks
                changed.append(attempt)
        return changed

    def list_blocked(self) -> list[JobAttempt]:
        """Return the attempts that may not start yet, even if GPUs are free.

        They are in order of arrival of their first event.
        """
        return self._list_waiting("blocked")

    def _list_waiting(self, state: str) -> list[JobAttempt]:
        return [
            row
            for row in self._live.values()
            if row.started_ms is None
            and row.submission is not None
            and row.state == state
            and not self._has_later_attempt(row)
        ]

    def _has_later_attempt(self, attempt: JobAttempt) -> bool:
        """Return whether a later attempt of the job has started."""
        started = self._started.get(attempt.job, [attempt.attempt])
        return attempt.attempt < started[-1]

    def drop_ended_before(self, time_ms: int) -> int:
        """Drop attempts that ended before `time_ms`, and return their number."""
        old = [key for key, row in self.attempts.items() if row.over_ms is not None and row.over_ms < time_ms]
        for key in old:
            del self.attempts[key]
        forgotten = {job for job, _ in old}
        for job in forgotten:
            del self.latest[job]
            started = [number for number in self._started.pop(job, ()) if (job, number) in self.attempts]
            if started:
                self._started[job] = started
        for job, attempt in self.attempts if forgotten else ():
            if job in forgotten:
                self.latest[job] = max(attempt, self.latest.get(job, attempt))
        return len(old) + self._drop_resting_jobs(time_ms)

    def drop_oldest_jobs(self, most_resting: int) -> int:
        """Drop the resting jobs beyond `most_resting`, oldest first, and return the number of jobs dropped."""
        old = list(islice(self.resting, max(0, len(self.resting) - most_resting)))
        for job in old:
            del self.resting[job]
        return len(old)

    def _drop_resting_jobs(self, time_ms: int) -> int:
        """Drop resting jobs that ended before `time_ms`, and return the number of their attempts.

        Jobs rest roughly in the order of their ends, so the search ends at the first job that must stay.
        """
        rows = ((job, [row.over_ms or 0 for row in _unpack_attempts(packed)]) for job, packed in self.resting.items())
        old = [job for job, _ in takewhile(lambda row: max(row[1]) < time_ms, rows)]
        return sum(len(_unpack_attempts(self.resting.pop(job))) for job in old)
