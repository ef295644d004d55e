"""The Source base class: where batches come from, and how to resume after a restart (rules: `ingest/README.md`)."""

import asyncio
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import msgspec

from fleet.decode_faults import explain
from fleet.errors import ConfigError, RecordError
from fleet.events import JobEvent, NodeEvent
from fleet.samples import SampleBatch
from fleet.topology import NodeSpec
from ingest.gpu_labels import LabelSight
from ingest.tally import RecordTally

Options = TypeVar("Options", bound=msgspec.Struct)


def read_options(name: str, given: Mapping[str, Any], kind: type[Options]) -> Options:
    """Read a source's options as its struct (with `forbid_unknown_fields`). Raises ConfigError that names the key."""
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        fault = explain(error, kind, given, toml=True)
        raise ConfigError(f"pipeline.sources {name}: options.{fault.sentence}") from None


@dataclass(frozen=True, slots=True)
class Batch:
    """Good records of a source. `bad` records are counted by reason and skipped.

    labels: who holds which GPUs. tally: what became of each record that was read. None where each is a good or a bad
    record of this batch.

    is_acknowledged: the api has accepted the events within its limits. No other bound drops them, so that what was
    acknowledged is folded, however often it is read again.
    """

    samples: tuple[SampleBatch, ...] = ()
    events: tuple[JobEvent, ...] = ()
    node_events: tuple[NodeEvent, ...] = ()
    bad: tuple[RecordError, ...] = ()
    labels: tuple[LabelSight, ...] = ()
    tally: RecordTally | None = None
    is_acknowledged: bool = False

    def __len__(self) -> int:
        """Good records in the batch."""
        return sum(len(batch) for batch in self.samples) + len(self.events) + len(self.node_events)

    def counted(self) -> RecordTally:
        """Return the tally of the batch."""
        return RecordTally(len(self), len(self.bad)) if self.tally is None else self.tally

    @classmethod
    def merge(cls, batches: Iterable["Batch"]) -> "Batch":
        """One batch of several, in order: at most one SampleBatch a kind."""
        parts = list(batches)
        if len(parts) == 1:
            return parts[0]
        return cls(
            samples=tuple(SampleBatch.by_kind(batch for part in parts for batch in part.samples)),
            events=tuple(event for part in parts for event in part.events),
            node_events=tuple(event for part in parts for event in part.node_events),
            bad=tuple(error for part in parts for error in part.bad),
            labels=tuple(sight for part in parts for sight in part.labels),
            tally=RecordTally.sum(part.counted() for part in parts),
        )


class Source(ABC):
    """The base class of every source of batches. `ingest/README.md` has the rules.

    One task calls `next`. `position` is read between two calls of it.
    """

    name: str = ""
    misses = False  # True: what nobody reads in time is gone, as from an exporter that is scraped
    reports_jobs = False  # True: starts of jobs may come by it; the placer waits for it before a promise expires
    pending = RecordTally()  # of records that were read since the last batch, and gave none
    divides = False  # True: every pipeline runs it on a share, by the options `instance` and `instances`

    @abstractmethod
    async def next(self) -> Batch:
        """Wait until there is something. Raises SourceError while the source is away, StopAsyncIteration at its end."""

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """JSON-able: covers every batch that `next` has returned; kept in the snapshot."""

    @abstractmethod
    def seek(self, position: dict[str, Any]) -> None:
        """Go on after `position` (as returned by `position`); `{}` is the beginning."""

    @abstractmethod
    async def close(self) -> None:
        """Give back sockets, files and tasks. May be called twice."""

    def health(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Its row (or rows) of the ingestion document."""
        return []

    def models(self) -> dict[str, str]:
        """Node → GPU model, of the nodes it has read about."""
        return {}

    def nodes(self) -> Mapping[str, NodeSpec]:
        """Node → what a scheduler says of it: GPUs, model, domains. Nodes that left the cluster are left out."""
        return {}

    def bound(self) -> Mapping[str, Mapping[str, int]]:
        """Job → node → GPUs that its parts hold there, of jobs that have not started as a whole.

        Scheduled parts hold GPUs while their images are pulled, while they crash in a loop, and while others of their
        gang are missing.
        """
        return {}

    def backlog_bytes(self) -> int:
        """Bytes on disk that it has not read yet."""
        return 0

    def begins(self) -> bool:
        """Whether it still holds its very first record."""
        return True

    def prune(self, position: dict[str, Any]) -> object:
        """Delete what lies before `position`, which two snapshots hold. The return value is ignored."""
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
    """Check `kind`, of the setting `where`. Raises ConfigError for no source, one not whole, or a misspelt option.

    A class with the methods that does not derive from `Source` gets the defaults.
    """
    if not isinstance(kind, type):
        raise ConfigError(f"{where}: expected a class derived from ingest.source.Source, or a function that makes one")
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
