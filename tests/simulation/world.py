"""One episode: three processes, their clients and a disk, and a seed that says what happens next.

A step is one of: a handle or a thread's work of one process, a message that arrives, something that a client or a
reader does, the clock that moves, or a fault. Which faults there are, and how often, is drawn for each episode.
"""

import contextlib
import hashlib
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from fleetcast.fleet import failpoints
from fleetcast.fleet.errors import FleetcastError, SourceError
from fleetcast.placement.ledger.ledger import Intent, IntentState, LedgerError
from fleetcast.service.board.board import Board, BoardError
from fleetcast.service.http.problems import Problem
from tests.simulation.archive import ArchiveLook
from tests.simulation.clients import Clients, Job
from tests.simulation.disk import Content, Killed, MemoryDisk
from tests.simulation.oracle import Broken, Oracle
from tests.simulation.processes import EXPIRES_S, PAUSE_S, ROLES, Api, PipelineProcess, Placer, Process, SimClock

EPOCH_MS = 1_789_000_000_000
FAULTS = ("kill", "fuse", "power", "full", "read_only", "sync_fails", "clock", "pause", "idle")
CALM_STEPS, SETTLED_MS = 40_000, 45_000
TRACE = 30
IDLE_MS = 1_200_000


@dataclass(slots=True)
class Message:
    """On its way to a process or back. `arrive` is called with what comes of it."""

    arrive: Callable[[], None]
    again: bool  # it may arrive twice


class World:
    """`step` until `steps` says enough, then `calm`. Raises Broken."""

    expected = (FleetcastError,)

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)
        self.steady_ms = 0
        self.ahead_ms = EPOCH_MS + self.rng.randrange(3_600_000)  # of the steady clock: how it was set
        self.clock = SimClock(self)
        self.disk = MemoryDisk(random.Random(f"{seed} disk"), lambda: self.now_ms * 1_000_000)
        self.oracle = Oracle()
        self.archive = ArchiveLook(self.disk)
        self.clients = Clients(self, random.Random(f"{seed} clients"), random.Random(f"{seed} mistakes"))
        self.network: list[Message] = []
        self.processes: dict[str, Process | None] = {kind.role: None for kind in ROLES}
        self.running: Process | None = None
        self.steps = 0
        self.has_limits = random.Random(f"{seed} limits").random() < 0.4
        self._active: set[str] = set()  # requests with a promise, as of the ledger's last change
        self.counts: Counter[str] = Counter()
        self.trace: deque[str] = deque(maxlen=TRACE)
        self.digest = hashlib.blake2b(digest_size=16)
        self.broken: Broken | None = None
        self.faults = True
        self._spell_over, self._idle_left_ms = 0, 3 * IDLE_MS
        some = [fault for fault in FAULTS if self.rng.random() < 0.6] or ["kill"]
        self._faults = [(fault, self.rng.choice((1, 2, 5))) for fault in some]
        self._fault_odds = self.rng.choice((0.0005, 0.002, 0.006))
        self._restart_odds = self.rng.choice((0.02, 0.1, 0.5))
        self.disk.make_state()

    @property
    def now_ms(self) -> int:
        return self.ahead_ms + self.steady_ms

    # -- steps

    def step(self) -> None:
        self.steps += 1
        roll = self.rng.random()
        if roll < self._fault_odds and self.faults:
            self._fault()
        elif roll < self._restart_odds and None in self.processes.values():
            self._restart()
        elif roll < 0.03:
            self._look()
        elif roll < 0.11:
            self._note("client acts")
            self.clients.act()
        elif roll < 0.25 and self.network:
            self._deliver()
        elif roll < 0.27 or not self._run_some():
            self._pass_time()
        if self.disk_is_cursed and self.steps >= self._spell_over:
            self._note("the disk is well again")
            self.disk.heal()
        if self.broken is not None:
            raise self.broken

    @property
    def disk_is_cursed(self) -> bool:
        return self.disk.full or self.disk.read_only or self.disk.sync_fails

    def _note(self, what: str) -> None:
        self.trace.append(f"step {self.steps} at {self.steady_ms / 1000:.3f} s: {what}")
        self.digest.update(f"{self.steps} {self.steady_ms} {what}".encode())

    def _awake(self) -> list[Process]:
        found = []
        for process in self.processes.values():
            if process is not None and process.paused_until <= self.steps:
                process.loop.wake()
                if process.loop.ready or process.loop.works:
                    found.append(process)
        return found

    def _run_some(self) -> bool:
        """One handle, or the work of one thread."""
        awake = self._awake()
        if not awake:
            return False
        process = awake[self.rng.randrange(len(awake))] if len(awake) > 1 else awake[0]
        loop = process.loop
        threads = len(loop.works)
        if threads and (not loop.ready or self.rng.random() < 0.5):
            self._note(f"{process.role}: a thread works")
            at = self.rng.randrange(threads)
            self.within(process, lambda: loop.run_work(at))
        else:
            self._note(f"{process.role}: a handle runs")
            self.within(process, loop.run_handle)
        return True

    def within(self, process: Process, call: Callable[[], Any]) -> Any:
        """Run something as `process`; it may be killed in it."""
        before, self.running = self.running, process
        try:
            return process.do(call)
        finally:
            self.running = before
            if not process.alive:
                self._bury(process)
            elif process.started:
                self._after(process)
            self._look_at_archive()

    def _look_at_archive(self) -> None:
        keys = self.archive.look()
        if keys is not None:
            self.counts["archives"] += 1
            self.counts["compacted"] += any(name.is_compacted for name in self.archive.names)
            self.oracle.archived(keys)

    def _after(self, process: Process) -> None:
        """The laws that what this process did may have broken."""
        if isinstance(process, Placer) and process.service.ledger.version != process.version:
            process.version = process.service.ledger.version
            self._look_at_expired(process)
            self.oracle.promised(process.service.ledger.list_active_intents(), self.now_ms, self.steady_ms)
        elif isinstance(process, PipelineProcess) and process.ticks != process.pipeline.metrics.ticks:
            process.ticks = process.pipeline.metrics.ticks
            self.counts["ticks"] += 1
            jobs = process.pipeline.state.jobs
            if process.ticks == 1:
                self.oracle.found(jobs, process.acknowledged, "at the first board after a start")
            self.oracle.counted(jobs)

    def _look_at_expired(self, placer: Placer) -> None:
        ledger = placer.service.ledger
        active = {intent.request_id for intent in ledger.list_active_intents()}
        for request_id in self._active - active:
            if ledger.read_intent_state(request_id) is IntentState.EXPIRED:
                self.counts["expired"] += 1
                times = self.now_ms, self.steady_ms, round(EXPIRES_S * 1000), round(PAUSE_S * 1000)
                self.oracle.expired(request_id, *times)
        self._active = active

    def _pass_time(self) -> None:
        """To the next timer, or a part of the way; at most a second."""
        timers = [process.loop.next_timer_s() for process in self.processes.values() if process is not None]
        due_ms = [max(1, int(timer * 1000 + 0.999) - self.steady_ms) for timer in timers if timer is not None]
        most = min([1000, *due_ms])
        self.steady_ms += most if self.rng.random() < 0.8 else self.rng.randint(1, most)
        self._note("time passes")

    def sleep(self, wall_s: float) -> None:
        """Who waits without giving others a turn."""
        self.steady_ms += round(wall_s * 1000)

    # -- processes

    def _restart(self) -> None:
        """Start what is not there, as a supervisor does."""
        down = [kind for kind in ROLES if self.processes[kind.role] is None]
        if not down:
            return
        kind = self.rng.choice(down)
        self._note(f"{kind.role} starts")
        self.counts["starts"] += 1
        process = kind(self)
        process.acknowledged = list(self.oracle.acknowledged)
        self.processes[kind.role] = process
        if self.faults and self.rng.random() < 0.05:
            process.fuse = self.rng.randrange(20)
        try:
            self.within(process, process.start)
            process.started = True
        except (OSError, LedgerError):
            if not self.disk_is_cursed:
                raise
            self.kill(process)
            self._bury(process)

    def kill(self, process: Process) -> None:
        process.alive = False
        self.counts["kills"] += 1

    def _bury(self, process: Process) -> None:
        self._note(f"{process.role} is dead")
        process.end()
        self.disk.end_process(process)
        self.processes[process.role] = None

    def crashed(self, process: Process, error: BaseException) -> None:
        if self.broken is None and isinstance(error, Broken):  # a law, checked as an answer arrived
            self.broken = error
        elif self.broken is None:
            self.broken = Broken("no end", f"the {process.role} ended of {type(error).__name__}: {error}")
            self.broken.__cause__ = error

    def reach(self, point: str) -> float:
        """A failpoint, in whatever process runs."""
        process = self.running
        if process is None or not process.alive:
            raise Killed
        self.counts["points"] += 1
        if process.fuse is None or process.fuse > 0:
            process.fuse = None if process.fuse is None else process.fuse - 1
            return failpoints.KEEP_ALL
        self._note(f"{process.role} dies at {point}")
        if point.endswith(".before_write") and self.rng.random() < 0.8:
            self.counts["tears"] += 1
            return self.rng.random() * 0.999
        self.kill(process)
        raise Killed

    def end_running(self) -> None:
        assert self.running is not None
        self.kill(self.running)
        raise Killed

    # -- faults

    def _fault(self) -> None:
        names, weights = zip(*self._faults, strict=True)
        fault = self.rng.choices(names, weights)[0]
        self._note(f"fault: {fault}")
        self.counts[f"fault {fault}"] += 1
        getattr(self, f"_fault_{fault}")()

    def _alive(self) -> list[Process]:
        return [process for process in self.processes.values() if process is not None]

    def _fault_kill(self) -> None:
        for process in self.rng.sample(self._alive(), k=min(1, len(self._alive()))):
            self.kill(process)
            self._bury(process)

    def _fault_fuse(self) -> None:
        """One dies at one of its next failpoints."""
        for process in self.rng.sample(self._alive(), k=min(1, len(self._alive()))):
            process.fuse = self.rng.randrange(25)

    def _fault_power(self) -> None:
        for process in self._alive():
            self.kill(process)
            self._bury(process)
        self.disk.power_loss()
        self._look_at_archive()
        board = self.disk.find(("state", "board", "board"))
        if isinstance(board, Content) and board.data:
            with contextlib.suppress(BoardError):
                self.oracle.power_lost_at = Board(bytes(board.data)).sequence

    def _fault_full(self) -> None:
        self.disk.full, self._spell_over = True, self.steps + self.rng.randrange(10, 600)

    def _fault_read_only(self) -> None:
        self.disk.read_only, self._spell_over = True, self.steps + self.rng.randrange(10, 400)

    def _fault_sync_fails(self) -> None:
        self.disk.sync_fails, self._spell_over = True, self.steps + self.rng.randrange(5, 200)

    def _fault_clock(self) -> None:
        self.ahead_ms += self.rng.choice((-1, 1)) * self.rng.choice((300, 7000, 40_000, 600_000))

    def _fault_idle(self) -> None:
        """The host sleeps, so that an hour closes and the archive is compacted; no job is forgotten."""
        if self._idle_left_ms:
            self._idle_left_ms -= IDLE_MS
            self.steady_ms += IDLE_MS

    def _fault_pause(self) -> None:
        for process in self.rng.sample(self._alive(), k=min(1, len(self._alive()))):
            process.paused_until = self.steps + self.rng.randrange(20, 1500)

    # -- readers and the network

    def _look(self) -> None:
        """The placer works its queue, or a reader looks at the board."""
        process = self.processes["placer" if self.rng.random() < 0.7 else "api"]
        if process is None or process.paused_until > self.steps:
            return
        self._note(f"the {process.role} looks")
        if isinstance(process, Placer):
            self.within(process, process.work)
        board = self.within(process, process.reader.latest) if process.alive else None
        if board is not None:
            self.oracle.looked(process, board)

    def _deliver(self) -> None:
        at = self.rng.randrange(len(self.network))
        message = self.network[at]
        if not (message.again and self.rng.random() < 0.04):
            self.network[at] = self.network[-1]
            self.network.pop()
        if self.faults and self.rng.random() < 0.03:
            self._note("a message is lost")
        else:
            self._note("a message arrives")
            message.arrive()

    def send_events(self, job: Job, body: bytes, answered: Callable[[Any], None]) -> None:
        self.network.append(Message(lambda: self._take_events(job, body, answered), again=True))

    def _take_events(self, job: Job, body: bytes, answered: Callable[[Any], None]) -> None:
        api = self.processes["api"]
        is_start = msgspec.json.decode(body.partition(b"\n")[0])["type"] == "started"
        request_id, times = job.request.request_id, (self.now_ms, self.steady_ms)
        if not isinstance(api, Api) or api.paused_until > self.steps:
            if api is None and is_start:
                self.counts["turned away"] += 1
                self.oracle.turned_away(request_id, *times)
            self._answer(answered, None)
            return

        def done(result: Any) -> None:
            if isinstance(result, dict):
                self._acknowledged(job, body, result)
            elif isinstance(result, Problem):
                self.counts["limited"] += 1
            if is_start and isinstance(result, Problem):
                self.oracle.refused(request_id, str(result), *times)
            elif is_start and isinstance(result, SourceError):
                self.oracle.turned_away(request_id, *times)
            elif is_start and isinstance(result, dict) and any(row["index"] == 0 for row in result["rejected"]):
                self.counts["refused starts"] += 1
                self.oracle.refused(request_id, "", *times)
            self._answer(answered, result)

        self.within(api, lambda: api.spawn(api.events(body), done))

    def _acknowledged(self, job: Job, body: bytes, result: dict[str, Any]) -> None:
        rejected = {row["index"] for row in result["rejected"]}
        for index, line in enumerate(body.split(b"\n")):
            if index not in rejected:
                event = msgspec.json.decode(line)
                self.counts["acknowledged"] += 1
                if event["type"] == "started":
                    self.oracle.started(job.request.request_id, self.now_ms, self.steady_ms)
                self.oracle.acknowledged[event["job"], event["attempt"], event["sequence"]] = None

    def send_placer(self, job: Job, call: str, what: Any, answered: Callable[[Any], None]) -> None:
        again = call in ("place", "enqueue")
        self.network.append(Message(lambda: self._take_request(call, what, answered), again))

    def _take_request(self, call: str, what: Any, answered: Callable[[Any], None]) -> None:
        placer = self.processes["placer"]
        if not isinstance(placer, Placer) or placer.paused_until > self.steps:
            return

        def ask() -> Any:
            try:
                return getattr(placer.service, call)(what, "client")
            except FleetcastError as error:
                return error

        reply = self.within(placer, ask)
        if placer.alive:
            self.counts[call] += 1
            if isinstance(reply, bytes):
                self.oracle.replied(what.request_id, reply)
            self._answer(answered, reply)

    def _answer(self, answered: Callable[[Any], None], reply: Any) -> None:
        self.network.append(Message(lambda: answered(reply), again=False))

    # -- the end

    def close(self) -> None:
        self.counts["checks"] += self.oracle.checks
        self.counts["lost names"] += self.disk.lost_names
        for process in self._alive():
            self.kill(process)
            self._bury(process)
        self.disk.close()

    def calm(self) -> None:
        """No more faults and no new jobs: everything comes to its end, and nothing is missing."""
        self.faults = False
        self.clients.quiet = True
        self.disk.heal()
        for process in self._alive():
            process.paused_until, process.fuse = 0, None
        last, settled_ms = self.steps + CALM_STEPS, 0
        while self.steady_ms < settled_ms or self._is_busy():
            if self._is_busy():
                settled_ms = self.steady_ms + SETTLED_MS
            if self.steps >= last:
                raise Broken("progress", f"{len(self.clients.jobs)} clients wait for ever: {self._waiting()}")
            self.step()
        while promises := self._overdue():
            if self.steps >= last:
                raise Broken("progress", f"promises last for ever: {promises}")
            self.step()
        self._check_end()

    def _is_busy(self) -> bool:
        pipeline = self.processes["pipeline"]
        waits = isinstance(pipeline, PipelineProcess) and pipeline.archive.nbytes > 0
        return bool(self.clients.jobs or self.network or waits or None in self.processes.values())

    def _waiting(self) -> str:
        return ", ".join(f"{job.name}/{job.attempt} wants to {job.wants}" for job in self.clients.jobs[:5])

    def _check_end(self) -> None:
        pipeline = self.processes["pipeline"]
        assert isinstance(pipeline, PipelineProcess)
        jobs = pipeline.pipeline.state.jobs
        self.oracle.found(jobs, list(self.oracle.acknowledged), "at the end")
        self.oracle.all_archived()
        runs = [row.job for row in jobs.list_running() if (row.job, row.attempt) not in self.clients.given_up]
        if runs:
            raise Broken("progress", f"all jobs have ended, {runs} still run on the board")

    def _overdue(self) -> list[Intent]:
        """Promises whose time is long over, as the placer knows it: it postpones them when it sees the clock set."""
        placer = self.processes["placer"]
        if not isinstance(placer, Placer):
            return []
        with contextlib.suppress(FleetcastError):  # the board may be late
            self.within(placer, placer.service.view.observe_fleet)
        promises = self.within(placer, placer.service.view.list_promises) or []
        return [row for row in promises if row.expires_ms <= self.now_ms - SETTLED_MS // 2]
