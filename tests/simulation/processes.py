"""The three processes as the state machines that they are: real classes on a simulated disk, clock and loop.

No HTTP, no signals, no forecasts: what is left is what takes something in, keeps it, folds it, publishes it, decides
upon it and writes that down.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.archive.archive import BYTES_AN_EVENT
from fleetcast.ingest.inbox.event_body import decode_body
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.service.api.routes.events import accept_records
from fleetcast.service.api.wiring import make_api_context, record_recent_events
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import ApiConfig, ArchiveConfig, Config, LimitsConfig, PipelineConfig, PlacerConfig
from fleetcast.service.http.access import load_access
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.placer.role import QueueWorker, open_service
from tests.simulation.disk import Killed, Mount
from tests.simulation.loop import SimLoop
from tests.simulation.oracle import EventKey

if TYPE_CHECKING:
    from tests.simulation.world import World

SEGMENT_BYTES = 600  # small: they are rolled and pruned all the time
ARCHIVE_BYTES = 24 * BYTES_AN_EVENT  # six wait: they are written before the next snapshot; 24: sources wait
POLL_S = 1.0
EXPIRES_S, PAUSE_S = 30.0, 120.0
FEW = LimitsConfig(live_jobs=3, names_per_minute=1, names_at_once=5)  # soon used up by jobs that never end
HERE = "127.0.0.1"
REQUEST = Request({"type": "http", "method": "POST", "path": "/v1/events", "headers": [], "client": (HERE, 1)})
NODES, GPUS = 4, 2
TOPOLOGY = Topology.build([NodeSpec(f"n{row}", GPUS, domains={Level.RACK: f"r{row // 2}"}) for row in range(NODES)])
logger = logging.getLogger(__name__)


class SimClock:
    """Fleet time is the world's; it may be set, and then the steady one goes on."""

    def __init__(self, world: "World") -> None:
        self._world = world

    def now_ms(self) -> int:
        return self._world.now_ms

    def steady_ms(self) -> int:
        return self._world.steady_ms

    def convert_to_wall_s(self, fleet_s: float) -> float:
        return fleet_s

    async def sleep(self, fleet_s: float) -> None:
        await asyncio.sleep(fleet_s)


def config_on(mount: Mount, clock: SimClock, limits: LimitsConfig) -> Config:
    """A configuration whose folder lies on a disk in memory, and whose clock is the world's."""
    state = mount.path("/state")
    here = {
        "folder": property(lambda _: state),
        "archive_url": property(lambda _: state / "archive"),
        "make_clock": lambda _: clock,
    }
    return type("SimConfig", (Config,), here, frozen=True)(
        state="/state",
        pipeline=PipelineConfig(tick_s=10.0, snapshot_s=30.0),
        archive=ArchiveConfig(buffer_bytes=ARCHIVE_BYTES),
        api=ApiConfig(),
        placer=PlacerConfig(intent_expires_s=EXPIRES_S, outage_pause_s=PAUSE_S, queue_period_s=5.0),
        limits=limits,
    )


class Process:
    """One life of a process. `fuse`: how many failpoints it still passes before it is killed, None: all."""

    role = ""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.alive = True
        self.started = False
        self.paused_until = 0
        self.fuse: int | None = None
        self.acknowledged: list[EventKey] = []  # before its start
        self.mount = world.disk.mount(self)
        self.loop = SimLoop(lambda: world.steady_ms / 1000, self._failed)
        self.config = config_on(self.mount, world.clock, FEW if world.has_limits else LimitsConfig())

    def start(self) -> None:
        """A failpoint may end it before it has."""
        raise NotImplementedError

    def do(self, call: Callable[[], Any]) -> Any:
        """Run something in this process; None when it ended in it."""
        try:
            return self.loop.run(call)
        except Killed:
            return None

    def spawn(self, work: Any, then: Callable[[Any], None] | None = None) -> None:
        """Start a task. `then` gets its result, or the error of ours that it ended with."""
        task = self.loop.create_task(work)

        def done(task: "asyncio.Task[Any]") -> None:
            error = None if task.cancelled() else task.exception()
            if not self.alive or isinstance(error, Killed):
                return
            if then is not None and (error is None or isinstance(error, self.world.expected)):
                then(task.result() if error is None else error)
            elif error is not None:
                self._failed(error)

        task.add_done_callback(done)

    def _failed(self, error: BaseException) -> None:
        if self.alive and not isinstance(error, Killed):
            self.world.crashed(self, error)

    def end(self) -> None:
        """It was killed: what it holds is free, what it was about to do never happens."""
        self.alive = False
        self.loop.drop()


class Api(Process):
    role = "api"

    def start(self) -> None:
        self.context = make_api_context(self.config, self.world.clock, load_access(HERE))
        self.reader = BoardReader(self.config.board)
        self.spawn(self._open())

    async def _open(self) -> None:
        await asyncio.to_thread(record_recent_events, self.context)
        self.context.inbox = InboxWriter(self.config.inbox, "api", segment_bytes=SEGMENT_BYTES)
        self.spawn(self.context.listening.run_statement_loop())

    async def events(self, body: bytes) -> dict[str, Any]:
        """What POST /v1/events does once it has the body."""
        now_ms = self.world.clock.now_ms()
        answer = await accept_records(REQUEST, self.context, decode_body(body, now_ms), now_ms)
        return {"status": answer.status_code, **msgspec.json.decode(answer.body)}


class Placer(Process):
    role = "placer"
    version = -1  # of the ledger, as the laws were looked at last

    def start(self) -> None:
        self.service = open_service(self.config)
        self.reader = self.service.view.reader
        self.worker = QueueWorker(self.service)
        self.working = False

    def work(self) -> None:
        """A pass over the queue, if there is none under way."""
        if not self.working:
            self.working = True
            self.spawn(self.worker.run_due_pass(), self._worked)

    def _worked(self, result: object) -> None:
        self.working = False
        if isinstance(result, BaseException):
            self._failed(result)
        elif error := self.service.failures.last:
            self._failed(error)


class PipelineProcess(Process):
    role = "pipeline"
    ticks = 0

    def start(self) -> None:
        self.pipeline = Pipeline(
            self.config,
            self.world.clock,
            TOPOLOGY,
            lambda _: [InboxSource(self.config.inbox, poll_s=POLL_S)],
        )
        pipeline = self.pipeline
        assert pipeline.archive_writer.archive is not None
        self.archive = pipeline.archive_writer.archive
        self.spawn(pipeline._fold_source_batches(pipeline.sources[0]))
        self.spawn(pipeline._tick_forever())
        self.spawn(pipeline.time.check_standstill_forever())
        self.spawn(pipeline._snapshot_forever())
        self.spawn(pipeline.archive_writer.flush_forever())
        self.spawn(pipeline.archive_writer.compact_archive_forever())


ROLES: tuple[type[Process], ...] = (Api, Placer, PipelineProcess)
