"""The truth of a small fleet whose jobs may be stopped, and the board that a pipeline would make of it.

A job that lies has ended on the board, or has left nodes, and its GPUs still work. With telemetry the board shows
their unknown use, once readings of a minute after that say so. The last reading is up to `SCRAPE_MS` old. On a lost
node nothing works.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.nodes import NodeState
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.placement.machines.view import Hearing
from fleetcast.simulator.agents import Manner
from tests.service.placer_world import GPUS, NODES, HandBoard

QUEUES = ("owed", "lender", "batch", "front")
TURN_MS, SCRAPE_MS = 60_000, 15_000
REMEMBERED = 200  # ended attempts on the board
P_FAIL = 0.4  # of a node that is advised to be drained
_encode = msgspec.json.encode


def format_node(node: int) -> str:
    """Return the name of the node in a row of the board."""
    return f"n{node + 1:02d}"


@dataclass(slots=True, eq=False)
class FleetJob:
    """One attempt that holds whole nodes. nodes: rows of the board. request_id: its request, "" without one."""

    name: str
    attempt: int
    queue: str
    nodes: tuple[int, ...]
    started_ms: int
    ends_steady_ms: int
    request_id: str = ""
    manner: Manner = Manner.OBEY
    checkpoint_ms: int | None = None
    preemptible: bool | None = None
    reading_age_ms: int = 0  # how old the last reading is when the verdict on a liar's GPUs is due
    shown_steady_ms: int | None = None  # from when on the board shows a liar's GPUs as busy
    gang: tuple[int, int, int] | None = None  # least and most nodes, and the step, of an elastic gang
    is_in_rack: bool = False  # it requires that all its nodes are in one rack
    placed_ms: int | None = None  # when its size last changed

    @property
    def key(self) -> tuple[str, int]:
        return self.name, self.attempt


def draw_gang(rng: Random, size: int) -> tuple[int, int, int] | None:
    """Draw the least and the most nodes, and the step, of a gang that begins with `size` nodes. None: it is rigid."""
    if rng.random() < 0.4:
        return None
    step = rng.choice((1, 1, 2))
    least = size - step * rng.randrange((size - 1) // step + 1)
    return least, size + step * rng.choice((0, 1, 2, 4)), step


@dataclass(slots=True)
class FleetTruth:
    """The jobs and nodes as they are.

    running: name → attempt, as its owner reports it. ghosts: jobs that ended, or left nodes, by their owner's word
    alone. lost, failing: node → steady ms at which it is healthy again.
    """

    running: dict[str, FleetJob] = field(default_factory=dict)
    ghosts: list[FleetJob] = field(default_factory=list)
    ended: list[tuple[str, int, int]] = field(default_factory=list)
    lost: dict[int, int] = field(default_factory=dict)
    failing: dict[int, int] = field(default_factory=dict)

    def find_users(self, nodes: Iterable[int]) -> list[FleetJob]:
        """Return the jobs that in truth work on any of these nodes."""
        wanted = set(nodes)
        return [job for job in (*self.running.values(), *self.ghosts) if wanted & set(job.nodes)]

    def list_working_ghosts(self) -> list[tuple[str, int]]:
        """Return the attempts that ended by their owner's word alone, and still work: on a node that is not lost."""
        return [ghost.key for ghost in self.ghosts if not self.lost.keys() >= set(ghost.nodes)]

    def repair(self, steady_ms: int) -> None:
        """Return nodes to service whose time has come."""
        self.lost = {node: until_ms for node, until_ms in self.lost.items() if until_ms > steady_ms}
        self.failing = {node: until_ms for node, until_ms in self.failing.items() if until_ms > steady_ms}

    def end(self, job: FleetJob, now_ms: int) -> None:
        del self.running[job.name]
        self.ended = [*self.ended[1 - REMEMBERED :], (job.name, job.attempt, now_ms)]


class ActionBoard(HandBoard):
    """A board of the fleet's truth. has_telemetry: whether exporters show what the GPUs do."""

    truth: FleetTruth
    has_telemetry = True
    is_deaf = False  # telemetry is late
    steady_ms = 0
    position = 0

    def sections(self) -> dict[str, Any]:
        jobs = list(self.truth.running.values())
        self.jobs = {job.name: job.nodes for job in jobs}
        self.ended = self.truth.ended
        found = super().sections()
        self.position += 1
        found["occupancy"] = _encode(
            {"position": self.position, "running": [job.key for job in jobs], "ended": self.truth.ended}
        )
        found["jobs.running"] = _encode([self._make_row(job) for job in jobs])
        found["node.state"][list(self.truth.lost)] = NodeState.LOST
        found["node.action"] = np.zeros(NODES, np.int8)
        found["node.action"][list(self.truth.failing)] = ACTIONS.index("drain_now")
        found["node.risk"][RISK_KINDS.index("fail"), :, list(self.truth.failing)] = P_FAIL
        if self.has_telemetry:
            found["node.hearing"] = np.full(NODES, Hearing.STALE if self.is_deaf else Hearing.FRESH, np.int8)
            found["gpu.unknown_use"] = self._find_ghosts([job.nodes for job in jobs])
        return found

    def _find_ghosts(self, held: Sequence[tuple[int, ...]]) -> Any:
        use = np.zeros((NODES, GPUS), bool)
        for ghost in self.truth.ghosts:
            if ghost.shown_steady_ms is None:
                ghost.shown_steady_ms = self.steady_ms + TURN_MS + ghost.reading_age_ms
            if self.steady_ms >= ghost.shown_steady_ms and not self.is_deaf:
                use[list(ghost.nodes)] = True
        for nodes in held:
            use[list(nodes)] = False
        return use

    def _make_row(self, job: FleetJob) -> dict[str, Any]:
        row: dict[str, Any] = {
            "job": job.name,
            "attempt": job.attempt,
            "gpus": GPUS * len(job.nodes),
            "started_ms": job.started_ms,
            "queue": job.queue,
            "held": {format_node(node): GPUS * 1000 for node in job.nodes},
            "members": len(job.nodes),
            "gpus_per_member": GPUS,
        }
        if job.checkpoint_ms is not None:
            row["checkpoint_ms"] = job.checkpoint_ms
        if job.gang is not None:
            row["gang"] = dict(zip(("min", "desired", "step"), job.gang, strict=True))
        if job.placed_ms is not None:
            row["placed_ms"] = job.placed_ms
        if job.preemptible is not None:
            row["preemptible"] = job.preemptible
        return row
