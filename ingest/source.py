"""The Source protocol: where batches come from, and how to go on after a restart.

A source is at-least-once: after `seek(position)` it may repeat what was delivered before that position, never skip.
What it delivers is idempotent downstream (samples by series and time, events by their identity).
"""

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from fleet.errors import ConfigError, RecordError
from fleet.events import JobEvent, NodeEvent
from fleet.samples import SampleBatch

Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(name: str, given: Mapping[str, Any], kind: type[Options]) -> Options:
    """The options of a source as its struct (with `forbid_unknown_fields`). Raises ConfigError that names the key.

    A source is made with (entities, clock, options). Making one checks its options and touches nothing outside the
    process: it connects in `next`.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(kind))
        raise ConfigError(f"pipeline.sources {name}: {error}; it takes {known}") from None


@dataclass(frozen=True, slots=True)
class Batch:
    """What a source yields. `bad` records are counted by reason and skipped; the rest of the batch is good."""

    samples: tuple[SampleBatch, ...] = ()
    events: tuple[JobEvent, ...] = ()
    node_events: tuple[NodeEvent, ...] = ()
    bad: tuple[RecordError, ...] = ()

    def __len__(self) -> int:
        """Good records in the batch."""
        return sum(len(batch) for batch in self.samples) + len(self.events) + len(self.node_events)

    @classmethod
    def merge(cls, batches: Iterable["Batch"]) -> "Batch":
        """One batch of several, in order: at most one SampleBatch a kind, so that the store writes few large ones."""
        parts = list(batches)
        if len(parts) == 1:
            return parts[0]
        by_kind: dict[str, list[SampleBatch]] = {}
        for part in parts:
            for batch in part.samples:
                by_kind.setdefault(batch.kind, []).append(batch)
        return cls(
            samples=tuple(SampleBatch.concat(same) for same in by_kind.values()),
            events=tuple(event for part in parts for event in part.events),
            node_events=tuple(event for part in parts for event in part.node_events),
            bad=tuple(error for part in parts for error in part.bad),
        )


class Source(Protocol):
    """One stream of batches. One task calls `next`; `position` is read between two calls of it.

    Whatever else it raises, in any method, is a bug that costs the other sources nothing: it is counted and told, the
    source is closed, made anew and sought to the last position. So `next` also raises what a task or thread of its own
    ended of.

    A source may also have: `health()`, its row (or rows) of the ingestion document; `models()`, node → GPU model;
    `backlog_bytes()`, what it has not read yet; `prune(position)`, called once two snapshots hold that position;
    `misses`, true where what nobody takes is gone; `begins()`, whether it still holds its very first record.
    """

    name: str

    async def next(self) -> Batch:
        """Wait until there is something. Raises SourceError while the source is away, StopAsyncIteration at its end."""

    def position(self) -> dict[str, Any]:
        """JSON-able: covers every batch that `next` has returned; kept in the snapshot."""

    def seek(self, position: dict[str, Any]) -> None:
        """Go on after `position` (as returned by `position`); `{}` is the beginning."""

    async def close(self) -> None:
        """Give back sockets, files and tasks. May be called twice."""


class MemorySource:
    """Batches from memory, for tests and examples; waits forever after the last unless `ends`."""

    def __init__(self, batches: Iterable[Batch] = (), *, name: str = "memory", ends: bool = False) -> None:
        self.name = name
        self._batches = list(batches)
        self._next = 0
        self._ends = ends
        self._more = asyncio.Event()

    def push(self, batch: Batch) -> None:
        self._batches.append(batch)
        self._more.set()

    async def next(self) -> Batch:
        while self._next >= len(self._batches):
            if self._ends:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        self._next += 1
        return self._batches[self._next - 1]

    def position(self) -> dict[str, Any]:
        return {"next": self._next}

    def seek(self, position: dict[str, Any]) -> None:
        self._next = int(position.get("next", 0))

    async def close(self) -> None:
        self._ends = True
        self._more.set()
