"""The writer that makes one adapter's changes in another system, within limits.

It counts and records each write.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.printable import escape_unprintable
from fleetcast.schedulers.adapter import Port, Seen, Write, WriteOutcome
from fleetcast.schedulers.weather import Weather
from fleetcast.service.adapter_records import AdapterAuditLine, AdapterRecords, AdapterStatus
from fleetcast.service.doors import ConfiguredDoor

logger = logging.getLogger(__name__)

T = TypeVar("T")
PORT_S = 30.0  # wall; for a reading, and for a batch
MINUTE_MS = 60_000


class ObservedPort:
    """A port that reads the other system, but only pretends to write to it.

    `read` returns the system's values, overlaid with the values that `write` received. left: the number of
    keys that still hold an earlier value of ours, from when the adapter was allowed to write.
    """

    def __init__(self, port: Port, fields: frozenset[str]) -> None:
        self._port, self._fields = port, fields
        self._written: dict[tuple[str, str], str | None] = {}
        self.left = 0

    async def read(self) -> Seen:
        seen = {key: dict(values) for key, values in (await self._port.read()).items()}
        self.left = len(_find_held_keys(seen, self._fields))
        for (key, field), value in self._written.items():
            if value is None:
                seen.get(key, {}).pop(field, None)
            else:
                seen.setdefault(key, {})[field] = value
        return seen

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        self._written |= {(write.key, write.field): write.value for write in batch}
        return [WriteOutcome.OBSERVED] * len(batch)

    async def close(self) -> None:
        await self._port.close()


class ChangeLimit:
    """A limit on how many keys an adapter changes in a minute.

    Withdrawals do not count. Writes to keys that hold no value of ours yet do not count either.
    """

    def __init__(self, per_minute: int) -> None:
        self._per_minute = per_minute
        self._spent_ms: deque[int] = deque()
        self._limited: set[str] = set()

    def choose_writes(self, wishes: Iterable[Write], marked: frozenset[str], now_ms: int) -> list[Write]:
        """Choose the writes to make now: withdrawals first, then writes with the highest cost of waiting.

        marked: the keys that hold a value of ours.
        """
        while self._spent_ms and self._spent_ms[0] <= now_ms - MINUTE_MS:
            self._spent_ms.popleft()
        wanted = sorted(wishes, key=lambda one: (one.value is not None, -one.cost, one.key))
        limited = dict.fromkeys(write.key for write in wanted if write.value is not None and write.key in marked)
        granted = [*limited][: self._per_minute - len(self._spent_ms)]
        self._limited = {*granted}
        waits = limited.keys() - granted
        return [write for write in wanted if write.value is None or write.key not in waits]

    def count_limited_writes(self, batch: Iterable[Write], now_ms: int) -> None:
        """Count the keys of a batch against the limit, at the time `now_ms`.

        Only keys that were limited in the last choice of writes count.
        """
        keys = {write.key for write in batch} & self._limited
        self._limited -= keys
        self._spent_ms.extend([now_ms] * len(keys))


class AdapterWriter:
    """A writer that changes another system step by step until it has the values that the adapter wants."""

    def __init__(self, opened: ConfiguredDoor, per_minute: int, records: AdapterRecords, clock: Clock) -> None:
        self.status = AdapterStatus(name=opened.name, use=opened.row.use, mode=opened.row.mode)
        self._adapter, self._port = opened.door.adapter, opened.door.port
        self._observed, self._batch = ObservedPort(self._port, self._adapter.fields), opened.door.batch
        self.news = opened.door.news
        self._limit = ChangeLimit(per_minute)
        self._records, self._clock = records, clock
        self._ours: set[str] = set()  # keys that hold something of ours
        self._number = 0

    async def step(self, weather: Weather | None, is_over: Callable[[bool], bool] = lambda begun: False) -> bool:
        """Write what this weather requires. Returns whether nothing is left to do.

        Without weather, withdraw everything that was written, in every mode. is_over: called before each batch,
        with True if a batch has been written already. If it returns True, the step ends.
        """
        is_observed = weather is not None and self.status.mode != "write"
        port, takes_back = self._observed if is_observed else self._port, _is_withdrawal(weather)
        try:
            seen = await _run_with_timeout(port.read())
            self.status.seen_ms = self._clock.now_ms()
            due = self._find_due_writes(weather, seen)
            is_done = not self.status.held_back
            for start in range(0, len(due), self._batch):
                if is_over(start > 0):
                    return False
                batch = due[start : start + self._batch]
                self._limit.count_limited_writes(batch, self._clock.now_ms())
                is_done &= self._record_outcomes(weather, batch, await _run_with_timeout(port.write(batch)))
        except (SourceError, OSError, TimeoutError) as error:
            self.status.errors += 1
            self._report_error(str(error) or f"no answer within {PORT_S:g} s", "trying again")
            return False
        if is_done:
            self._report_leftover_keys(self._observed.left if is_observed else 0)
        self.status.board = weather.sequence if weather else None
        self.status.withdrawn = is_done and takes_back and not is_observed
        return is_done

    async def close(self) -> None:
        await self._port.close()

    def _find_due_writes(self, weather: Weather | None, seen: Seen) -> list[Write]:
        fields = self._adapter.fields
        self._ours = _find_held_keys(seen, fields)
        wishes = [one._replace(why=escape_unprintable(one.why)) for one in self._adapter.wishes(weather, seen)]
        if (
            _is_withdrawal(weather) or self.news is not None
        ):  # what restricts goes at once, and so does what is waited for
            due = sorted(wishes, key=lambda one: (-one.cost, one.value is not None, one.key))
        else:
            due = self._limit.choose_writes(wishes, frozenset(self._ours), self._clock.now_ms())
        self.status.ours, self.status.held_back = len(self._ours), len(wishes) - len(due)
        return due

    def _record_outcomes(
        self, weather: Weather | None, batch: Sequence[Write], outcomes: Sequence[WriteOutcome]
    ) -> bool:
        """Count and log the outcomes of a batch of writes. Returns True if no write must be tried again.

        After a conflict, a write is tried again only while the adapter withdraws everything.
        """
        status = self.status
        status.wishes += len(batch)
        status.writes += outcomes.count(WriteOutcome.DONE)
        status.conflicts += outcomes.count(WriteOutcome.CONFLICT)
        bad = [outcome for outcome in outcomes if outcome in (WriteOutcome.REFUSED, WriteOutcome.UNREACHABLE)]
        status.errors += len(bad)
        if bad:
            self._report_error(f"{len(bad)} of {len(batch)} writes: {bad[0].value}", "trying again")
        lines = [self._make_audit_line(weather, *pair) for pair in zip(batch, outcomes, strict=True)]
        self._records.append_lines(lines)
        status.last = lines[-1]
        good = (WriteOutcome.DONE, WriteOutcome.OBSERVED)
        done = [write for write, outcome in zip(batch, outcomes, strict=True) if outcome in good]
        for write in done:
            (self._ours.discard if write.value is None else self._ours.add)(write.key)
        status.ours = len(self._ours)
        if done:
            did = "would write" if WriteOutcome.OBSERVED in outcomes else "wrote"
            logger.info("adapter %s %s %d of %d changes", status.name, did, len(done), len(batch))
        return not bad and (not _is_withdrawal(weather) or len(done) == len(batch))

    def _make_audit_line(self, weather: Weather | None, write: Write, outcome: WriteOutcome) -> AdapterAuditLine:
        self._number += 1
        now_ms = self._clock.now_ms()
        return AdapterAuditLine(
            time_ms=now_ms,
            decision=f"{self.status.name}-{now_ms}-{self._number}",
            adapter=self.status.name,
            mode=self.status.mode,
            board=weather.sequence if weather else None,
            key=write.key,
            field=write.field,
            seen=write.seen,
            value=write.value,
            why=write.why,
            outcome=outcome.value,
        )

    def _report_error(self, error: str, then: str) -> None:
        if error and error != self.status.error:
            logger.warning("adapter %s: %s; %s", self.status.name, error, then)
        self.status.error = error

    def _report_leftover_keys(self, left: int) -> None:
        """Report how many keys still hold an earlier value of ours while the adapter only observes."""
        error = f"{left} still hold what it wrote before it observed" if left else ""
        self._report_error(error, f"`fleetcast adapters withdraw {self.status.name}` takes it back")


def _is_withdrawal(weather: Weather | None) -> bool:
    return weather is None or weather.nodes is None


def _find_held_keys(seen: Seen, fields: frozenset[str]) -> set[str]:
    return {key for key, values in seen.items() if fields & values.keys()}


async def _run_with_timeout(work: Awaitable[T]) -> T:
    async with asyncio.timeout(PORT_S):
        return await work
