"""A board made by hand, with the sections that the placer reads, and a placer on it, in process."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.topology import DOMAIN_LEVELS, Level
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.service.board.board import BoardWriter, Section, Standing
from fleetcast.service.config import Config
from fleetcast.service.placer.http import make_app
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.role import QueueWorker
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.start_times import StartTimeSampler

T = TypeVar("T")
NOW_MS = 1_589_310_000_000
NODES, GPUS, RACK = 16, 8, 8  # r01: n01..n08, r02: n09..n16


@dataclass
class HandBoard:
    """`jobs`: name → nodes that it holds whole. Publish again after a change."""

    folder: Path
    jobs: dict[str, Sequence[int]] = field(default_factory=dict)
    ended: list[tuple[str, int, int]] = field(default_factory=list)
    risk: dict[int, tuple[float, str]] = field(default_factory=dict)
    generation: int = 1
    as_of_ms: int = NOW_MS
    inbox: dict[str, int] = field(default_factory=dict)  # what of it is folded
    parts: list[tuple[int, int, int, int]] = field(default_factory=list)  # job, node, GPU, thousandths
    broken: list[tuple[int, int]] = field(default_factory=list)  # node, GPU

    def __post_init__(self) -> None:
        self.writer = BoardWriter(self.folder)

    def publish(self) -> None:
        sections = [Section(name, data, self.as_of_ms) for name, data in self.sections().items()]
        self.writer.publish(sections, self.as_of_ms, Standing(inbox=self.inbox))

    def sections(self) -> dict[str, Any]:
        names = [f"n{index + 1:02d}" for index in range(NODES)]
        holders = np.full((NODES, GPUS), -1, np.int32)
        risk = np.full((3, 4, NODES), 0.001)
        for number, nodes in enumerate(self.jobs.values()):
            holders[list(nodes)] = number
        for number, node, gpu, _ in self.parts:
            holders[node, gpu] = number
        for row, (p, _) in self.risk.items():
            risk[2, :, row] = p
        usable = np.ones((NODES, GPUS), bool)
        for node, gpu in self.broken:
            usable[node, gpu] = False
        sections: dict[str, Any] = {
            "names.node": "\n".join(names).encode(),
            "names.gpu_model": b"H100",
            "names.pool": b"train",
            "names.job": "\n".join(self.jobs).encode(),
            "node.placed": np.ones(NODES, bool),
            "node.gpus": np.full(NODES, GPUS, np.int16),
            "node.gpu_model": np.zeros(NODES, np.int16),
            "node.gpu_memory_gib": np.full(NODES, 80, np.float32),
            "node.cpus": np.full(NODES, 128, np.int32),
            "node.host_memory_gib": np.full(NODES, np.nan, np.float32),
            "node.pool": np.zeros(NODES, np.int16),
            "node.state": np.zeros(NODES, np.int8),
            "node.flagged": np.zeros(NODES, bool),
            "node.risk": risk,
            "risk.reason": _json({names[row]: sentence for row, (_, sentence) in self.risk.items()}),
            "gpu.usable": usable,
            "gpu.job": holders,
            "gpu.parts": np.array(self.parts, np.int32).reshape(-1, 4),
            "node.free_cpus": np.full(NODES, 128, np.float32),
            "node.free_host_memory_gib": np.full(NODES, np.nan, np.float32),
            "occupancy": _json({"position": 1, "running": [(job, 1) for job in self.jobs], "ended": self.ended}),
            "durations": _json({"by_gpus": {}, "all": {"p50": 1800, "p90": 3600, "n": 50}}),
            "jobs.running": _json(
                [
                    {"job": job, "attempt": 1, "gpus": GPUS * len(nodes), "started_ms": NOW_MS, "queue": "q"}
                    for job, nodes in self.jobs.items()
                ]
            ),
            "meta": _json({"generation": self.generation, "models": {"risk": "rules"}}),
        }
        for level in DOMAIN_LEVELS:
            racks = level is Level.RACK
            sections[f"names.{level}"] = b"r01\nr02" if racks else b""
            sections[f"node.domain.{level}"] = (np.arange(NODES) // RACK if racks else np.full(NODES, -1)).astype(
                np.int32
            )
        return sections


_json = msgspec.json.encode


class World:
    """A placer over a state folder; `restart` closes and reopens it, as after a crash."""

    def __init__(self, folder: Path) -> None:
        self.config = Config(state=str(folder))
        self.board = HandBoard(self.config.board)
        self.clock = ManualClock(NOW_MS)
        self.start()

    def start(self) -> None:
        self.service = PlacementService(self.config, self.clock, Ledger(self.config.ledger), PlacerMetrics())
        self.worker = QueueWorker(self.service)
        self.starts = StartTimeSampler(self.service)
        self.app = make_app(self.service, self.worker.wake, starts=self.starts)

    def close(self) -> None:
        self.service.ledger.close()

    def restart(self) -> None:
        self.close()
        self.start()

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        async def main() -> T:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await work(client)

        return asyncio.run(main())

    def step(self) -> None:
        """One step of the queue's worker."""
        asyncio.run(self.worker.run_due_pass())

    def ask(self, method: str, path: str, body: Any = None, **more: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else None if body is None else _json(body)
        return self.run(lambda client: client.request(method, path, content=content, **more))

    def place(self, request_id: str, **fields: Any) -> dict[str, Any]:
        answer: dict[str, Any] = self.ask("POST", "/placements", {"request_id": request_id, **fields}).json()
        return answer


def rack_of_64(request_id: str) -> dict[str, Any]:
    return {"request_id": request_id, "gang": 8, "gpus_per_node": 8, "topology": {"required": "rack"}}
