"""One episode of actions: a placer on a board of a small fleet, its clients, and agents that may not obey.

The placer is the real one, with its HTTP routes and its ledger on disk. A step is one of: a board and a pass, a
client's or an agent's next act, a message that arrives, time that passes, or a fault. At each fault the placer may be
killed between any two transactions. The ledger may begin as a file of an earlier version.
"""

import asyncio
import contextlib
import hashlib
import random
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from fleetcast.fleet import failpoints
from fleetcast.fleet.errors import FleetcastError
from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.actions.action import ActionKind
from fleetcast.placement.actions.breaker import BreakerLimits
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.ahead.queue_trial import try_tree
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.placement.reclaim import victims
from fleetcast.service.config import PlacerConfig
from fleetcast.service.placer import queue_file
from fleetcast.simulator.agents import UNRULY, Manner
from tests.service.placer.test_queues import QueueWorld
from tests.service.placer_world import GPUS, NODES, RACK, World
from tests.simulation.actions.asgi import call_application
from tests.simulation.actions.fleet import QUEUES, SCRAPE_MS, ActionBoard, FleetJob, FleetTruth, draw_gang, format_node
from tests.simulation.actions.laws import GUARANTEED, ActionLaws
from tests.simulation.actions.recovery_laws import check_size
from tests.simulation.disk import Killed
from tests.simulation.oracle import Broken

FAST = "/dev/shm" if Path("/dev/shm").is_dir() else None
DATA = Path(__file__).parents[2] / "data"
VERSIONS = {version: DATA / f"ledger-v{version}.sqlite" for version in (1, 2, 3)}
FAULTS = ("kill", "fuse", "clock", "pause", "idle", "replies", "deaf")
MOST_WAITING = 4
EXPIRES_S = 60.0
CALM_STEPS = 4000
TRACE = 40
GANG_SCENES = 0.4  # episodes that begin with a gang bound to its rack, among jobs that its class may stop
BOUND_NODES = 4
POLLED = 4  # agents in one step
ROWS = 100_000
EXCHANGES = 4  # no law is about the cost of victims: the search for cheaper sets would be an eighth of all work
TRIED_TREES = set[str]()  # digests
FILE = """
[policy]
reclaim = "act"
preempt_after_s = {patience}
grace_s = 60
min_run_s = 60
stops_a_day = 50
[class.urgent]
preempts = ["batch"]
[class.batch]
[queue.owed]
guaranteed = {{gpu = {guaranteed}}}
[queue.lender]
guaranteed = {{gpu = {guaranteed}}}
[queue.batch]
class = "batch"
[queue.front]
class = "urgent"
"""


class ActionPlacer(QueueWorld):
    """A placer that can be killed and started again on its ledger."""

    def __init__(self, folder: Path, patience_s: float, share: float) -> None:
        self.share = share
        super().__init__(folder, FILE.format(patience=patience_s, guaranteed=GUARANTEED["owed"]))
        self.board = ActionBoard(self.config.board)

    def start(self) -> None:
        placer = PlacerConfig(
            queues=str(self.file),
            intent_expires_s=EXPIRES_S,
            taken_queue_share=1.0,
            taken_fleet_share=self.share,
        )
        self.config = msgspec.structs.replace(self.config, placer=placer)
        with patch.object(queue_file, "try_tree", try_tree_once):
            World.start(self)

    def kill(self) -> None:
        """End as a process does that is killed: an open transaction is rolled back by the next one to open it."""
        self.service.ledger._db.close()


def limit_search() -> Any:
    """Return a context in which the search for cheaper victims makes few tries of each kind."""
    return patch.object(victims, "MOST_EXCHANGES", EXCHANGES)


def try_tree_once(tree: QueueTree) -> None:
    """Try a queue tree as the placer does when it starts. All episodes have a few trees: each is tried once."""
    if tree.digest not in TRIED_TREES:
        try_tree(tree)
        TRIED_TREES.add(tree.digest)


class InlineExecutor(ThreadPoolExecutor):
    """An executor without threads: the caller does the work, so that a seed is the same run every time."""

    def submit(self, work: Any, /, *args: Any, **named: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(work(*args, **named))
        except Exception as error:
            done.set_exception(error)
        return done


@dataclass(slots=True)
class Client:
    """A request and its owner's next act. nodes: where it was placed."""

    request: PlacementRequest
    manner: Manner
    run_s: float
    nodes: tuple[int, ...] = ()
    start_steady_ms: int = 0
    latest_ms: int = 0  # by the clock
    latest_steady_ms: int = 0


@dataclass(slots=True)
class Order:
    """An action that an agent has read and will carry out."""

    job: FleetJob
    action_id: str
    payer: str
    due_steady_ms: int
    kind: str
    leaves: tuple[int, ...]  # nodes
    places: tuple[int, ...]


class ActionWorld:
    """`step` until `steps` says enough, then `calm`. Raises Broken."""

    def __init__(self, seed: str) -> None:
        self.rng = rng = random.Random(seed)
        self.folder = Path(tempfile.mkdtemp(dir=FAST))
        version = rng.choice((0, 0, *VERSIONS))
        share = rng.choice((1.0, 1.0, 0.5))
        self.counts: Counter[str] = Counter({f"ledger v{version or 4}": 1})
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(InlineExecutor())
        if version:
            shutil.copy(VERSIONS[version], self.folder / "ledger.sqlite")
        self.placer = ActionPlacer(self.folder, rng.choice((0, 0, 120)), share)
        self.clock = self.placer.clock
        self.truth = self.placer.board.truth = FleetTruth()
        self.placer.board.has_telemetry = rng.random() < 0.7
        self.unruly = rng.choice((0.0, 0.3, 0.8))
        self.node_odds = rng.choice((0.0, 0.05, 0.2))
        self.laws = ActionLaws(BreakerLimits(1.0, share), NODES * GPUS)
        self.clients: dict[str, Client] = {}
        self.orders: list[Order] = []
        self.network: list[tuple[int, Callable[[], None]]] = []  # steady: from when on, and what arrives
        self.read: set[str] = set()  # actions that an agent has read
        self.steps = self._numbers = self._cursor = 0
        self.fuse: int | None = None
        self.faults = True
        self._loses_replies = False
        self.fault_odds = rng.choice((0.0, 0.005, 0.02))
        self.loses_gang_nodes = random.Random(f"{seed} scene").random() < GANG_SCENES
        self.trace: deque[str] = deque(maxlen=TRACE)
        self.digest = hashlib.blake2b(digest_size=16)
        self.laws.inherited = frozenset(row.request_id for row in self.placer.service.ledger.list_active_intents())
        if self.loses_gang_nodes:
            self.counts["gang scenes"] += 1
            self._start_bound_gang()
        self._fill()
        self._publish()

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    @property
    def steady_ms(self) -> int:
        return self.clock.steady_ms()

    # -- steps

    def step(self) -> None:
        self.steps += 1
        roll = self.rng.random()
        if self.faults and roll < self.fault_odds:
            self._fault()
        elif roll < 0.25:
            self._pass()
        elif roll < 0.40:
            self._act_as_client()
        elif roll < 0.55:
            self._act_as_agent()
        elif roll < 0.75 and self.network:
            self._deliver()
        else:
            self._pass_time()

    def _note(self, what: str) -> None:
        self.trace.append(f"step {self.steps} at {self.steady_ms / 1000:.3f} s: {what}")
        self.digest.update(f"{self.steps} {self.steady_ms} {what}".encode())

    def _fill(self) -> None:
        """Let jobs of all queues hold the fleet, or most of it."""
        held = {node for job in self.truth.running.values() for node in job.nodes}
        free = [node for node in range(NODES - self.rng.choice((0, 0, 1, 4))) if node not in held]
        queues, sizes = (("batch",), (1, 1, 2)) if self.loses_gang_nodes else (QUEUES[1:], (1, 1, 2, 3, 4))
        while free:
            size = min(len(free), self.rng.choice(sizes))
            nodes, free = tuple(free[:size]), free[size:]
            self._start(self._make_name(), 1, self.rng.choice(queues), nodes, self._draw_manner(), 20_000.0)

    def _start_bound_gang(self) -> None:
        """Let a gang run that must stay in its rack, and whose class may stop others."""
        self._submit(self._make_name(), 1, "front", BOUND_NODES, is_in_rack=True)
        self._publish()
        self.loop.run_until_complete(self.placer.worker.run_due_pass())
        self._read_decisions()
        for client in list(self.clients.values()):
            client.start_steady_ms, client.run_s, client.manner = self.steady_ms, 1e6, Manner.OBEY
            self._start_or_give_up(client)
        for job in self.truth.running.values():
            job.gang = None

    def _make_name(self) -> str:
        self._numbers += 1
        return f"j{self._numbers}"

    def _draw_manner(self) -> Manner:
        if self.rng.random() >= self.unruly:
            return Manner.OBEY
        manner = self.rng.choice(UNRULY)
        return Manner.REFUSE if manner is Manner.LIE and not self.placer.board.has_telemetry else manner

    def _start(
        self,
        name: str,
        attempt: int,
        queue: str,
        nodes: tuple[int, ...],
        manner: Manner,
        run_s: float,
        of: str = "",
        is_in_rack: bool = False,
    ) -> None:
        users = self.truth.find_users(nodes)
        if users:
            raise Broken("given once", f"{name} starts on GPUs of {users[0].name}, attempt {users[0].attempt}")
        ends_ms = self.steady_ms + round(run_s * 1000 * self.rng.uniform(0.2, 1.0))
        job = FleetJob(name, attempt, queue, nodes, self.now_ms, ends_ms, of, manner)
        job.preemptible = self.rng.choice((None, None, None, True, False))
        job.gang, job.is_in_rack = draw_gang(self.rng, len(nodes)), is_in_rack
        self.truth.running[name] = job
        self.counts["starts"] += 1

    # -- the placer

    def within(self, work: Callable[[], Any]) -> Any:
        """Let the placer do something. Returns None if it is killed in it."""
        failpoints.set_hook(self._reach)
        try:
            result = work()
        except Killed:
            self._restart()
            return None
        finally:
            failpoints.set_hook(None)
        self._check()
        return result

    def _reach(self, point: str) -> float:
        self.counts["points"] += 1
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                self.fuse = None
                self._note(f"the placer dies at {point}")
                raise Killed
        return failpoints.KEEP_ALL

    def _restart(self) -> None:
        self.counts["kills"] += 1
        self.placer.kill()
        self.placer.start()
        rows = {row.action_id: row for row in self._read_all()}
        self.laws.check_restart(rows)
        self._check()
        if self.rng.random() < 0.1:
            self._check_chain()

    def _check_chain(self) -> None:
        if not verify_ledger(self.placer.config.ledger).is_intact:
            raise Broken("chain", "the audit trail does not verify")

    def _read_all(self) -> list[ActionRecord]:
        return self.placer.service.ledger.actions.read_after(0, ROWS)

    def _check(self) -> None:
        ledger = self.placer.service.ledger
        rows = ledger.actions.read_after(self._cursor, ROWS)
        self._cursor = max([self._cursor, *(row.changed for row in rows)])
        for row in rows:
            self.counts[f"action {row.state}"] += 1
            if row.action.after:
                self.counts[f"replacement by other jobs' nodes {row.state}"] += 1
        self.laws.held = self._sum_held()
        at_work = (*self.truth.running.values(), *self.truth.ghosts)
        self.laws.working = {*(job.key for job in self.truth.running.values()), *self.truth.list_working_ghosts()}
        self.laws.jobs = self.truth.running
        self.laws.users_of = {job.name: set[str]() for job in at_work}
        for job in at_work:
            self.laws.users_of[job.name] |= {format_node(node) for node in job.nodes if node not in self.truth.lost}
        self.laws.check_actions(rows, self.steady_ms, self.now_ms, self._may_send)
        waiting = {entry.request.request_id for entry in ledger.list_queue_entries()} & self.clients.keys()
        self.laws.check_intents(ledger.list_active_intents(), waiting, self.steady_ms)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any] | None:
        """Send a request to the placer's routes. Returns None if it is killed in it."""

        content = b"" if body is None else msgspec.json.encode(body)
        answer: tuple[int, Any] | None
        answer = self.within(
            lambda: self.loop.run_until_complete(call_application(self.placer.app, method, path, content))
        )
        return answer

    def _publish(self) -> None:
        self.placer.board.as_of_ms, self.placer.board.steady_ms = self.now_ms, self.steady_ms
        self.placer.board.publish()

    def _pass(self) -> None:
        self._note("a board and a pass")
        self._publish()
        self.laws.running = frozenset(job.key for job in self.truth.running.values())
        self.laws.lost = frozenset(format_node(node) for node in self.truth.lost)
        self.laws.growth.jobs = self.laws.recovery.jobs = {row.name: copy(row) for row in self.truth.running.values()}
        self.laws.recovery.lost = frozenset(self.truth.lost)
        is_deaf = self.placer.board.is_deaf and self.placer.board.has_telemetry
        self.laws.growth.closed = frozenset(range(NODES) if is_deaf else {*self.truth.lost, *self.truth.failing})
        kills = self.counts["kills"]
        switches = self.placer.service.actions.switches
        self._may_send = switches.paused_ms is None and switches.breaker.opened_ms is None
        self.within(lambda: self.loop.run_until_complete(self.placer.worker.run_due_pass()))
        if self.placer.service.failures.last:
            raise Broken("no end", self.placer.service.failures.last)
        self._may_send = False
        if self.counts["kills"] == kills:
            self._check_whole_pass()
        self._read_decisions()

    _may_send = False

    def _check_whole_pass(self) -> None:
        """Check what a pass achieves by its end. A pass in which the placer is killed may achieve nothing."""
        if not self.placer.service.backlog.stalled:
            self._check_growth()
        if not self.counts["fault clock"]:
            self.laws.check_ends(self.placer.service.ledger.actions.list_open(), self.steady_ms)

    def _check_growth(self) -> None:
        """Check that no request waits that would fit on the nodes of growth which may still be withdrawn."""
        ledger = self.placer.service.ledger
        waiting = [
            (entry.request.request_id, entry.request.members.min)
            for entry in ledger.list_queue_entries()
            if entry.request.required is None and entry.request.request_id in self.clients
        ]
        self.laws.growth.check_pass(ledger.actions.list_open(), waiting)

    def _sum_held(self) -> Counter[str]:
        """Return queue → the GPUs that its jobs hold, or that were promised: by a placement, a set or growth."""
        held: Counter[str] = Counter()
        for job in self.truth.running.values():
            held[job.queue] += GPUS * len(job.nodes)
        for intent in self.placer.service.ledger.list_active_intents():
            if intent.request_id in self.clients:  # it has not started
                held[self.clients[intent.request_id].request.queue] += GPUS * len(intent.ranks)
        for found in self.placer.service.view.promised_sets.list_followed(self.now_ms):
            if found.is_live and found.row.payer in self.clients:
                held[self.clients[found.row.payer].request.queue] += GPUS * len(found.row.ranks)
        for row in self.placer.service.ledger.actions.list_open():
            if row.action.kind is ActionKind.GROW and row.may_have_begun:
                held[row.action.queue] += round(row.action.gpus)
        return held

    def _read_decisions(self) -> None:
        """Let the owners of requests read where they were placed."""
        for intent in self.placer.service.ledger.list_active_intents():
            client = self.clients.get(intent.request_id)
            if client is not None and not client.nodes:
                client.nodes = tuple(int(rank.node[1:]) - 1 for rank in intent.ranks)
                client.latest_ms = intent.expires_ms - 1000
                client.latest_steady_ms = self.steady_ms + intent.expires_ms - self.now_ms - 1000
                client.start_steady_ms = self.steady_ms + self.rng.choice((0, 0, 10_000, 50_000, 10**9))

    # -- owners of requests

    def _act_as_client(self) -> None:
        if self.faults and len(self.clients) < MOST_WAITING and self.rng.random() < 0.5:
            queues = (*QUEUES, *["batch"] * 6) if self.loses_gang_nodes else QUEUES
            self._submit(self._make_name(), 1, self.rng.choice(queues), self.rng.choice((1, 1, 2, 3, 4, 6)))
        for client in list(self.clients.values()):
            if client.nodes:
                self._start_or_give_up(client)

    def _submit(self, name: str, attempt: int, queue: str, nodes: int, is_in_rack: bool = False) -> None:
        level = "rack" if is_in_rack or (nodes <= RACK // 2 and self.rng.random() < 0.2) else None
        request = PlacementRequest(
            request_id=f"r-{name}-{attempt}",
            job=name,
            attempt=attempt,
            queue=queue,
            gang=nodes,
            gpus_per_node=GPUS,
            topology=msgspec.convert({"required": level}, TopologyConstraint),
        )
        run_s = self.rng.choice((200.0, 2000.0, 20_000.0))
        client = Client(request, self._draw_manner(), 20_000.0 if self.loses_gang_nodes else run_s)
        self._note(f"{request.request_id} of {queue} asks for {nodes} nodes")

        def work() -> None:
            with contextlib.suppress(FleetcastError):
                self.placer.service.enqueue(request, "client")

        for _ in range(2):  # it is repeated after a kill
            self.within(work)
        self.clients[request.request_id] = client
        self.counts["requests"] += 1

    def _start_or_give_up(self, client: Client) -> None:
        request = client.request
        in_time = self.now_ms < client.latest_ms and self.steady_ms < client.latest_steady_ms
        if in_time and self.steady_ms >= client.start_steady_ms:
            self._note(f"{request.request_id} starts")
            of = request.request_id
            owner, manner = (request.job, request.attempt, request.queue), client.manner
            self._start(*owner, client.nodes, manner, client.run_s, of, request.required is not None)
            del self.clients[of]
        elif not in_time:
            del self.clients[request.request_id]

    # -- agents

    def _act_as_agent(self) -> None:
        """Some agents poll their actions and reply."""
        jobs = list(self.truth.running.values())
        for job in self.rng.sample(jobs, k=min(POLLED, len(jobs))):
            self._poll(job)

    def _poll(self, job: FleetJob) -> None:
        found = self.ask("GET", f"/actions?job={job.name}&state=sent")
        for row in found[1]["rows"] if found and found[0] == 200 else ():
            if row["action_id"] not in self.read and row["attempt"] == job.attempt:
                self.read.add(row["action_id"])
                self._receive(job, row)

    def _receive(self, job: FleetJob, row: dict[str, Any]) -> None:
        self._note(f"{job.name}, which will {job.manner}, reads {row['action_id']}")
        self.counts[f"agent {job.manner}"] += 1
        if job.manner is Manner.HANG:
            return
        verb = "refuse" if job.manner is Manner.REFUSE else "accept"
        path = f"/actions/{row['action_id']}/{verb}"
        body = {"job": job.name, "attempt": job.attempt, **({"why": "no"} if verb == "refuse" else {})}
        if self.rng.random() < 0.1:
            self._send(path, {**body, "attempt": job.attempt + 1}, expected=403)
        late_ms = max(0, row["by_ms"] - self.now_ms) + 30_000 if job.manner is Manner.LATE else 0
        for _ in range(1 + (job.manner is Manner.TWICE)):
            self._send(path, body, late_ms)
        if verb == "accept":
            due_ms = self.steady_ms + late_ms + round(1000 * row["grace_s"] * self.rng.random())
            places = tuple(int(place["node"][1:]) - 1 for place in row["places"])
            leaves = tuple(int(rank["node"][1:]) - 1 for rank in row["ranks"])
            self.orders.append(Order(job, row["action_id"], row["payer"], due_ms, row["kind"], leaves, places))

    def _send(self, path: str, body: dict[str, Any], after_ms: int = 0, expected: int | None = None) -> None:
        def arrive() -> None:
            answer = self.ask("POST", path, body)
            if answer is None:
                return
            self.counts[f"reply {answer[0]}"] += 1
            if answer[0] not in ((expected,) if expected else (200, 409)):
                raise Broken("lives", f"a reply to {path} got {answer}")

        self.network.append((self.steady_ms + after_ms, arrive))

    def _deliver(self) -> None:
        at = self.rng.randrange(len(self.network))
        due_ms, arrive = self.network[at]
        if due_ms > self.steady_ms:
            return
        if self.rng.random() > 0.05:  # else it arrives twice
            del self.network[at]
        if self.faults and self._loses_replies and self.rng.random() < 0.3:
            self._note("a message is lost")
            return
        self._note("a message arrives")
        arrive()

    # -- time

    def _pass_time(self) -> None:
        seconds = self.rng.choice((1, 5, 5, 20, 60))
        self.clock.advance(seconds)
        self._note("time passes")
        for order in [row for row in self.orders if row.due_steady_ms <= self.steady_ms]:
            self.orders.remove(order)
            self._carry_out(order)
        for job in list(self.truth.running.values()):
            if job.ends_steady_ms <= self.steady_ms:
                self.truth.end(job, self.now_ms)
            elif self.rng.random() < 0.02:
                job.checkpoint_ms = self.now_ms
        self.truth.ghosts = [ghost for ghost in self.truth.ghosts if ghost.ends_steady_ms > self.steady_ms]
        self.truth.repair(self.steady_ms)
        if self.faults and self.rng.random() < self.node_odds:
            self._hurt_node(self.rng.randrange(NODES))
        if self.faults and self.loses_gang_nodes and self.rng.random() < 0.08:
            self._lose_gang_node()

    def _lose_gang_node(self) -> None:
        """Let a node be lost for long under a gang that is bound to its rack. Other jobs have just saved their work."""
        bound = [node for job in self.truth.running.values() if job.is_in_rack for node in job.nodes]
        if bound and not self.truth.lost.keys() & set(bound):
            node = self.rng.choice(bound)
            self._note(f"node {node} is lost under a gang that is bound to its rack")
            self.truth.lost[node] = self.steady_ms + 1_200_000
            for job in self.truth.running.values():
                job.checkpoint_ms = self.now_ms

    def _hurt_node(self, node: int) -> None:
        """Let a node be lost, or be likely to fail. Some of the jobs on a lost node fail with it."""
        back_ms = self.steady_ms + 1000 * self.rng.choice((30, 300, 1200, 3600))
        if self.rng.random() < 0.3:
            self._note(f"node {node} is likely to fail")
            self.truth.failing[node] = back_ms
            return
        self._note(f"node {node} is lost")
        self.truth.lost[node] = back_ms
        self.counts["lost nodes"] += 1
        for job in self.truth.find_users([node]):
            if job in self.truth.running.values() and self.rng.random() < 0.3:
                self._fail(job)

    def _fail(self, job: FleetJob) -> None:
        """End a job. Its owner submits the next attempt."""
        self._note(f"{job.name} fails")
        self.truth.end(job, self.now_ms)
        if len(self.clients) < 2 * MOST_WAITING:
            self._submit(job.name, job.attempt + 1, job.queue, len(job.nodes))

    def _carry_out(self, order: Order) -> None:
        job = order.job
        if self.truth.running.get(job.name) is not job:
            return
        if order.kind != "preempt":
            self._change_nodes(order)
            return
        self._note(f"{job.name} stops for {order.payer}")
        self.counts["stops"] += 1
        self.truth.end(job, self.now_ms)
        if job.manner is Manner.LIE:
            job.ends_steady_ms, job.reading_age_ms = self.steady_ms + 900_000, self.rng.randrange(SCRAPE_MS)
            self.truth.ghosts.append(job)
        elif self.faults and len(self.clients) < 2 * MOST_WAITING:
            self._submit(job.name, job.attempt + 1, job.queue, len(job.nodes))

    def _change_nodes(self, order: Order) -> None:
        """Continue a job on its new nodes, if the placer still says so just before."""
        job = order.job
        if job.manner is Manner.DIE and self.faults:
            self._fail(job)
            return
        found = self.ask("GET", f"/actions/{order.action_id}")
        if found is None or found[1]["state"] != "accepted":
            return
        if order.kind == "grow" and job.manner is Manner.LIE:
            return  # it accepts, and does not grow
        users = self.truth.find_users(order.places)
        if users:
            raise Broken("given once", f"{job.name} gets nodes of {users[0].name}, attempt {users[0].attempt}")
        self._note(f"{job.name} continues on {order.places} instead of {order.leaves}")
        self.counts[f"done {order.kind}{'' if order.payer or order.kind != 'shrink' else ' of recovery'}"] += 1
        if found[1]["reason"].endswith("_borrow"):
            self.counts["done replace by other jobs' nodes"] += 1
        if job.manner is Manner.LIE:
            left = tuple(node for node in order.leaves if node not in self.truth.lost)
            ghost = FleetJob(job.name, job.attempt, job.queue, left, job.started_ms, self.steady_ms + 900_000)
            ghost.reading_age_ms = self.rng.randrange(SCRAPE_MS)
            self.truth.ghosts.append(ghost)
        job.nodes = (*(node for node in job.nodes if node not in order.leaves), *order.places)
        job.placed_ms = self.now_ms
        if order.kind != "replace":
            check_size(job, len(job.nodes), order.action_id)

    # -- faults

    def _fault(self) -> None:
        fault = self.rng.choice(FAULTS)
        self._note(f"fault: {fault}")
        self.counts[f"fault {fault}"] += 1
        getattr(self, f"_fault_{fault}")()

    def _fault_kill(self) -> None:
        self._restart()

    def _fault_fuse(self) -> None:
        self.fuse = self.rng.randrange(12)

    def _fault_clock(self) -> None:
        self.clock.time_ms += self.rng.choice((-1, 1)) * self.rng.choice((300, 7000, 40_000, 600_000))

    def _fault_idle(self) -> None:
        self.clock.advance(1200)

    def _fault_replies(self) -> None:
        self._loses_replies = not self._loses_replies

    def _fault_deaf(self) -> None:
        self.placer.board.is_deaf = not self.placer.board.is_deaf

    def _fault_pause(self) -> None:
        """A person pauses or resumes actions, or resets the circuit breaker."""
        control = self.placer.service.actions
        call = self.rng.choice((control.pause, control.resume, control.resume, control.reset_breaker))
        self._call_switch(call)

    def _call_switch(self, call: Callable[[int, str], Any]) -> None:
        was_open = self.placer.service.actions.switches.breaker.is_open
        self.within(lambda: call(self.now_ms, "boss"))
        if was_open and not self.placer.service.actions.switches.breaker.is_open:
            self.laws.reset_steady_ms = self.steady_ms

    # -- the end

    def calm(self) -> None:
        """No more faults or new requests: every action ends, and nothing is missing."""
        self.faults, self.fuse = False, None
        self.placer.board.is_deaf = False
        self.truth.lost, self.truth.failing = {}, {}
        for name in ("resume", "reset_breaker"):
            self._call_switch(getattr(self.placer.service.actions, name))
        last = self.steps + CALM_STEPS
        while open_now := [row for row in self.placer.service.ledger.actions.list_open() if row.was_sent]:
            if self.steps >= last:
                raise Broken("progress", f"{open_now[0].action_id} is {open_now[0].state} for ever")
            self.step()
        self._check_chain()
        rows = {row.action_id: row for row in self._read_all()}
        self.laws.check_restart(rows)
        self.counts["seen in the end"] += sum(row.state is ActionState.SEEN for row in rows.values())

    def close(self) -> None:
        failpoints.set_hook(None)
        self.counts["checks"] += self.laws.checks
        self.placer.close()
        self.loop.close()
        shutil.rmtree(self.folder)
