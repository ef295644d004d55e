"""The base class of all sources, which deliver batches and resume after a restart.

The rules are in `ingest/README.md`.
"""

import asyncio
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import msgspec

from fleetcast.fleet.decode_faults import find_first_fault
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.samples import SampleBatch
from fleetcast.fleet.topology import NodeSpec
from fleetcast.ingest.gpu_labels import ObservedJobLabels
from fleetcast.ingest.tally import RecordTally

Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(name: str, given: Mapping[str, Any], kind: type[Options]) -> Options:
    """Convert a source's options to its struct. Raises ConfigError that names the key.

    The struct must have `forbid_unknown_fields`.
    """
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        fault = find_first_fault(error, kind, given, toml=True)
        raise ConfigError(f"pipeline.sources {name}: options.{fault.sentence}") from None


@dataclass(frozen=True, slots=True)
class Batch:
    """The good records that a source delivers at once. `bad` records are counted by reason and skipped.

    labels: job labels of GPUs. tally: what happened to each record that was read. None means that each is a good
    or a bad record of this batch.

    is_acknowledged: the api has accepted the events within its limits. No other limit drops them, so every
    acknowledged event is applied, however often it is read again.
    """

    samples: tuple[SampleBatch, ...] = ()
    events: tuple[JobEvent, ...] = ()
    node_events: tuple[NodeEvent, ...] = ()
    bad: tuple[RecordError, ...] = ()
    labels: tuple[ObservedJobLabels, ...] = ()
    tally: RecordTally | None = None
    is_acknowledged: bool = False

    def __len__(self) -> int:
        """Return the number of good records in the batch."""
        return sum(len(batch) for batch in self.samples) + len(self.events) + len(self.node_events)

    def get_tally(self) -> RecordTally:
        """Return the tally of the batch, made from its records if `tally` is None."""
        return RecordTally(len(self), len(self.bad)) if self.tally is None else self.tally

    @classmethod
    def merge(cls, batches: Iterable["Batch"]) -> "Batch":
        """Merge several batches in order. The result has at most one SampleBatch of each kind."""
        parts = list(batches)
        if len(parts) == 1:
            return parts[0]
        return cls(
            samples=tuple(SampleBatch.merge_by_kind(batch for part in parts for batch in part.samples)),
            events=tuple(event for part in parts for event in part.events),
            node_events=tuple(event for part in parts for event in part.node_events),
            bad=tuple(error for part in parts for error in part.bad),
            labels=tuple(sight for part in parts for sight in part.labels),
            tally=RecordTally.sum(part.get_tally() for part in parts),
        )


class Source(ABC):
    """The base class of every source of batches. `ingest/README.md` has the rules.

    Only one task calls `next`. The pipeline calls `position` between two calls of `next`.
    """

    name: str = ""
    misses = False  # True: what nobody reads in time is gone, as from an exporter that is scraped
    reports_jobs = False  # True: starts of jobs may come by it; the placer waits for it before a promise expires
    pending = RecordTally()  # of records that were read since the last batch, and gave none
    divides = False  # True: every pipeline runs it on a share, by the options `instance` and `instances`

    @abstractmethod
    async def next(self) -> Batch:
        """Wait for new records and return them.

        Raises SourceError while the source cannot be reached, and StopAsyncIteration at its end.
        """

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Return the position after every batch that `next` has returned, as JSON types.

        The snapshot stores it.
        """

    @abstractmethod
    def seek(self, position: dict[str, Any]) -> None:
        """Continue after `position`, which `position()` returned earlier. `{}` is the beginning."""

    @abstractmethod
    async def close(self) -> None:
        """Close sockets and files, and end tasks. May be called twice."""

    def health(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the source's row (or rows) of the ingestion document."""
        return []

    def models(self) -> dict[str, str]:
        """Return node → GPU model, for the nodes in the records read so far."""
        return {}

    def nodes(self) -> Mapping[str, NodeSpec]:
        """Return node → the facts that a scheduler reports: GPUs, model, domains.

        Nodes that left the cluster are omitted.
        """
        return {}

    def bound(self) -> Mapping[str, Mapping[str, int]]:
        """Return job → node → number of GPUs held there, for jobs that have not started as a whole.

        The scheduled parts of such a job hold GPUs while they pull images, crash in a loop, or wait for other parts.
        """
        return {}

    def backlog_bytes(self) -> int:
        """Return the number of bytes on disk that the source has not read yet."""
        return 0

    def begins(self) -> bool:
        """Return whether the source still holds its very first record."""
        return True

    def prune(self, position: dict[str, Any]) -> object:
        """Delete the records before `position`, which two snapshots contain. The return value is ignored."""
        return None


OPTIONAL = (
    "misses",
    "pending",
    "divides",
    "reports_jobs",
    "health",
    "models",
    "nodes",
    "bound",
    "backlog_bytes",
    "begins",
    "prune",
)
ALIKE = 0.7  # of difflib: `prun`, `health_row`, `backlog`


def check_source_class(kind: object, where: str) -> type[Source]:
    """Return `kind` as a source class. Raises ConfigError if it is not a complete source.

    A misspelt optional method is an error as well. where: the setting that names the class. If a class has the
    methods but does not derive from `Source`, it gets the defaults of `Source`.
    """
    if not isinstance(kind, type):
        raise ConfigError(
            f"{where}: expected a class derived from fleetcast.ingest.source.Source, or a function that makes one"
        )
    if not issubclass(kind, Source):
        kind = cast("type[Source]", ABCMeta(kind.__name__, (kind, Source), {}))
    if lacks := ", ".join(sorted(kind.__abstractmethods__)):
        raise ConfigError(f"{where}: lacks {lacks}")
    for name in dir(kind):
        alike = () if name in dir(Source) or name.startswith("_") else get_close_matches(name, OPTIONAL, 1, ALIKE)
        for meant in alike:
            raise ConfigError(f"{where}: {name} is no method of a source, did you mean {meant}?")
    return kind


class MemorySource(Source):
    """A source of batches in memory, for tests and examples. After the last batch it waits, unless `ends`."""

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
