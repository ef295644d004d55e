"""A source that replays a folder of recorded exporter pages.

    pages/1775333003000/n001.dcgm.prom      folder: when scraped, Unix ms; file: node[.anything].prom[.gz]

Pages with one scrape time make one Batch. `speed` is recorded seconds per second of the clock, and None is
unlimited. Sample times are shifted so that the first scrape falls on `start_ms`.
"""

import asyncio
import gzip
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch, Source

MAX_PAGE_BYTES = 64 * 2**20
CHUNK_BYTES = 2**18


@dataclass(frozen=True, slots=True)
class ReplaySpeed:
    """The start and speed of a replay.

    `start_ms`: fleet time of the first scrape, or None for the recorded time. `speed`: recorded seconds per
    second of the clock, or None for as fast as possible.
    """

    start_ms: int | None = None
    speed: float | None = 1.0


class PageReplay(Source):
    """A source of recorded pages in order of time. Its position is the time of the last delivered pages."""

    def __init__(self, entities: Entities, folder: Path, clock: Clock, pace: ReplaySpeed | None = None) -> None:
        self.name = f"replay:{folder.name}"
        self.noted: Counter[str] = Counter()
        self.resolver = ExporterResolver(entities)
        self._clock = clock
        self._pace = pace or ReplaySpeed()
        self._moments = _list_moments(folder)
        self._next = 0
        self._decoders: dict[str, PageDecoder] = {}
        first_ms = self._moments[0][0]
        self._shift_ms = 0 if self._pace.start_ms is None else self._pace.start_ms - first_ms
        self._began_ms: int | None = None  # fleet time at which this run began, and at which recorded moment
        self._from_ms = first_ms

    async def next(self) -> Batch:
        """Return the next pages once they are due. Raises StopAsyncIteration after the last."""
        if self._next >= len(self._moments):
            raise StopAsyncIteration
        recorded_ms, folder = self._moments[self._next]
        await self._wait_until_due(recorded_ms)
        pages = await asyncio.to_thread(_read_pages, folder)
        self._next += 1
        return Batch.merge([self._decode_page(name, page, recorded_ms + self._shift_ms) for name, page in pages])

    async def _wait_until_due(self, recorded_ms: int) -> None:
        if self._pace.speed is None:
            return
        if self._began_ms is None:
            self._began_ms, self._from_ms = self._clock.now_ms(), recorded_ms
        due_ms = self._began_ms + (recorded_ms - self._from_ms) / self._pace.speed
        await self._clock.sleep(max(0.0, due_ms - self._clock.now_ms()) / 1000)

    def _decode_page(self, name: str, page: bytes | RecordError, now_ms: int) -> Batch:
        if isinstance(page, RecordError):
            return Batch(bad=(page,))
        decoder = self._decoders.get(name)
        if decoder is None:
            node = name.split(".", 1)[0]
            decoder = self._decoders[name] = PageDecoder(
                self.resolver,
                Target(node),
                noted=self.noted,
                machines=self.resolver.inventory.machines,
            )
        return decoder.decode(page, now_ms)

    def position(self) -> dict[str, Any]:
        return {"after_ms": self._moments[self._next - 1][0]} if self._next else {}

    def seek(self, position: dict[str, Any]) -> None:
        after_ms = position.get("after_ms")
        self._next = 0 if after_ms is None else sum(moment <= after_ms for moment, _ in self._moments)
        self._began_ms = None

    async def close(self) -> None:
        """Do nothing: the source holds nothing open."""

    def models(self) -> dict[str, str]:
        return self.resolver.inventory.get_gpu_models()

    def health(self) -> dict[str, Any]:
        moments = len(self._moments)
        return {"name": self.name, "kind": "replay", "moments": moments, "delivered": self._next, "up": 1, "down": 0}


def _list_moments(folder: Path) -> list[tuple[int, Path]]:
    """Return (scrape time in Unix ms, folder), oldest first. Raises ConfigError if there is none."""
    moments = sorted((int(path.name), path) for path in folder.glob("*/") if path.name.isdecimal())
    if not moments:
        raise ConfigError(f"{folder} holds no recorded pages: expected folders named by Unix milliseconds")
    return moments


def _read_pages(folder: Path) -> list[tuple[str, bytes | RecordError]]:
    files = sorted((*folder.glob("*.prom"), *folder.glob("*.prom.gz")))
    return [(path.name.removesuffix(".gz").removesuffix(".prom"), _read_page(path)) for path in files]


def _read_page(path: Path) -> bytes | RecordError:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            page = _read_bounded_file(file)
    except (OSError, EOFError, zlib.error) as error:
        return RecordError("bad_file", f"{path}: {error}")
    if len(page) > MAX_PAGE_BYTES:
        return RecordError("too_large", f"{path}: more than {MAX_PAGE_BYTES} bytes")
    return page


def _read_bounded_file(file: gzip.GzipFile | BinaryIO) -> bytes:
    """Read a file up to a little over MAX_PAGE_BYTES.

    Reads it in parts, because one large read would allocate the whole limit.
    """
    parts, size = [], 0
    while size <= MAX_PAGE_BYTES and (part := file.read(CHUNK_BYTES)):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
