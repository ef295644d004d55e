"""A board that a test publishes, the adapters that follow it, and another system in memory."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import SourceError
from fleetcast.schedulers.adapter import Door, Seen, Write, WriteOutcome
from fleetcast.schedulers.band_file import BandFile
from fleetcast.service.adapter_records import AdapterStatus
from fleetcast.service.adapters import AdapterHost
from fleetcast.service.board.board import BoardReader, BoardWriter, Section
from fleetcast.service.config import AdapterConfig, AdaptersConfig, Config

NOW_MS = 1_760_000_000_000
DOORS = __name__  # where a configuration finds them
NODES = tuple(f"n{number}" for number in range(1, 6))


class MemoryPort:
    """Another system in memory. `away`: it does not answer; `other`: what somebody else writes behind our back."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, str]] = {}
        self.batches: list[Sequence[Write]] = []
        self.away = self.hangs = self.is_closed = False
        self.other: dict[str, dict[str, str]] = {}
        self.news = 0
        self._wake: Callable[[], None] = lambda: None

    def follow_news(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def report_news(self) -> None:
        self.news += 1
        self._wake()

    async def read(self) -> Seen:
        if self.away:
            raise SourceError("nobody is there")
        if self.hangs:
            await asyncio.Event().wait()
        return {key: dict(values) for key, values in self.held.items()}

    async def write(self, batch: Sequence[Write]) -> Sequence[WriteOutcome]:
        self.batches.append(batch)
        self.held |= self.other
        return [self._apply(write) for write in batch]

    async def close(self) -> None:
        self.is_closed = True

    def _apply(self, write: Write) -> WriteOutcome:
        held = self.held.setdefault(write.key, {})
        if held.get(write.field) != write.seen:
            return WriteOutcome.CONFLICT
        if write.value is None:
            held.pop(write.field)
        else:
            held[write.field] = write.value
        return WriteOutcome.DONE

    def bands(self) -> dict[str, str]:
        return {key: values["band"] for key, values in sorted(self.held.items()) if values}


PORT = MemoryPort()


def memory_door(options: dict[str, Any]) -> Door:
    return Door(BandFile(), PORT)


def awaited_door(options: dict[str, Any]) -> Door:
    """The same, where others wait for what is written."""
    return Door(BandFile(), PORT, news=lambda: PORT.news)


def following_door(options: dict[str, Any]) -> Door:
    """The same, with a port that reports its news."""
    return Door(BandFile(), PORT, news=lambda: PORT.news, follow_news=PORT.follow_news)


class World:
    """A board that a test publishes, and the adapters that follow it."""

    def __init__(self, folder: Path, *rows: AdapterConfig, **limits: Any) -> None:
        PORT.__init__()  # type: ignore[misc]
        memory = AdapterConfig(f"{DOORS}:memory_door", name="memory", mode="write")
        self.config = Config(state=str(folder), adapters=AdaptersConfig(adapter=rows or (memory,), **limits))
        self.clock = ManualClock(NOW_MS)
        self.board, self.reader = BoardWriter(self.config.board), BoardReader(self.config.board)
        self.host = AdapterHost(self.config, self.clock)
        self.reason = "GPU 3: XID 79"

    def publish(self, *risk: float) -> None:
        n = len(risk)
        parts: dict[str, Any] = {
            "names.node": "\n".join(NODES[:n]).encode(),
            "node.risk": np.tile(np.array(risk), (3, 4, 1)),
            "node.state": np.zeros(n, np.int8),
            "gpu.usable": np.ones((n, 8), bool),
            "gpu.job": np.full((n, 8), -1, np.int32),
            "risk.reason": json.dumps({"n1": self.reason}).encode(),
        }
        now_ms = self.clock.now_ms()
        self.board.publish([Section(name, data, now_ms) for name, data in parts.items()], now_ms)

    async def steps(self) -> None:
        """What is due now, to its end. The last step began long ago: no time passes in a test."""
        for steps in self.host._steps.values():
            steps.began_s = -math.inf
        self.host.begin_due_steps(self.reader.latest())
        for steps in self.host._steps.values():
            if steps.task:
                await asyncio.wait([steps.task])
        _ = self.host.has_ended_step

    def step(self, *risk: float, after_s: float = 10.0) -> AdapterStatus:
        self.clock.advance(after_s)
        if risk:
            self.publish(*risk)
        asyncio.run(self.steps())
        return self.host.writers[0].status
