"""`fleetcast play`: the serving plan played through a trace, compared with peers and oracles.

All methods play on the same machine.

| method | next job |
|---|---|
| ours | the serving plan with the queue file; without a file all jobs are in one queue, the least area first |
| one_queue | the same plan without the file, which shows the cost of fairness |
| kueue_order | the same plan and file; shares count only GPUs held now, and a queue is first come, first served |
| one_line | the same plan as it serves without a file: priority and arrival |
| others | `fleetcast.training.judges.queue_policies` |
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.play.capacity import Capacity, CountAsk, Planned
from fleetcast.placement.play.node_counts import NodeCounts, split_job_by_node
from fleetcast.placement.play.replay import Floats, PlayedMachine, Refuses, Replay, Trace
from fleetcast.placement.play.served import ServedPlan, make_empty_view
from fleetcast.placement.queues.order import DAY_S
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import DEFAULT_QUEUE, QueueTree
from fleetcast.training.judges.queue import (
    METHODS,
    ON_LIMITS,
    make_peer_scheduler,
    make_trace,
    simulate_conservative_backfill,
)
from fleetcast.training.sets.job_sets import HistoryJobs

SERVED = ("ours", "one_queue", "kueue_order", "one_line")
OF_THE_FILE = frozenset({"one_queue", "kueue_order"})
METHODS_PLAYED = (*SERVED, *(method for method in METHODS if method not in SERVED))
MOST_OF_NODE = 1024  # GPUs that a node may have

Tick = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class PlayScene:
    """The machine, the jobs and the queues that all methods play with.

    nodes, each: the number of nodes, and the GPUs of each. If nodes is 0, the machine is only a count
    of `each` GPUs. tree: None without a file.
    """

    trace: Trace
    nodes: int
    each: int
    tree: QueueTree | None = None
    max_wait_s: float = DAY_S
    refuses: Refuses | None = None

    @property
    def gpus(self) -> int:
        return self.each * max(1, self.nodes)

    @property
    def has_limits(self) -> bool:
        return 2 * sum(limit is not None for limit in self.trace.limit_s) > len(self.trace)

    def list_methods(self) -> list[str]:
        """Return the methods that can be compared in this scene."""
        without = (set() if self.has_limits else ON_LIMITS) | (set() if self.tree is not None else OF_THE_FILE)
        return [method for method in METHODS_PLAYED if method not in without]

    def make_machine(self, planned: Planned, backfills: bool) -> PlayedMachine[CountAsk]:
        """Return a new machine for a method other than the serving plan."""
        if self.nodes:
            return NodeCounts(self.nodes, self.each, planned, backfills)
        return Capacity(self.each, planned, backfills)

    def make_ask(self, job: int) -> CountAsk:
        return CountAsk(int(self.trace.gpus[job]), self.trace.limit_s[job])

    def make_request(self, job: int, queue: str) -> PlacementRequest:
        """Return the placement request of a job in a queue.

        If the machine is only a count of GPUs, the request is a gang of members with one GPU each.
        """
        trace = self.trace
        members, each = split_job_by_node(int(trace.gpus[job]), self.each if self.nodes else 1)
        return PlacementRequest(
            request_id=f"j{job:09}",
            queue=queue,
            user=trace.user[job],
            gang=members,
            gpus_per_node=each,
            limit_s=trace.limit_s[job],
        )

    def find_own_queue(self, job: int) -> str:
        return self.trace.queue[job] or DEFAULT_QUEUE


@dataclass(frozen=True, slots=True)
class PlayResult:
    """The result of one play: when each job started.

    start_s: (job,). seconds: CPU time of the play.
    """

    method: str
    start_s: Floats
    passes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RefusedStarts:
    """A rule that refuses a share of the starts, as a cluster may refuse them.

    The same starts are refused in every run.
    """

    share: float

    def __call__(self, job: int, tried: int) -> bool:
        return crc32(f"{job}.{tried}".encode()) < self.share * 2**32


def make_scene(
    table: HistoryJobs, nodes: int, each: int, tree: QueueTree | None, max_wait_s: float, refused: float = 0.0
) -> tuple[PlayScene, Counter[str]]:
    """Return a scene with the jobs that every method can play, and reason → number of left-out jobs.

    refused: the share of starts that is refused.
    """
    limited = len(table) > 0 and float(np.isfinite(table.limit_s).mean()) > 0.5
    refuses = RefusedStarts(refused) if refused else None
    scene = PlayScene(make_trace(table, limited), nodes, each, tree, max_wait_s, refuses)
    reasons = [_explain_left_out(scene, job) for job in range(len(table))]
    is_played = np.array([not reason for reason in reasons], bool)
    played = scene if is_played.all() else replace(scene, trace=make_trace(table.select_rows(is_played), limited))
    return played, Counter(reason for reason in reasons if reason)


def _explain_left_out(scene: PlayScene, job: int) -> str:
    """Return the reason why a job is left out, "" if it is played."""
    request = scene.make_request(job, scene.find_own_queue(job))
    if request.members.min * request.gpus_per_node > scene.gpus:
        return "larger than the fleet"
    try:
        return QueueStanding(scene.tree, {}, {}).explain_permanent_refusal(request) if scene.tree is not None else ""
    except RequestError as error:
        return str(error)


def play_method(scene: PlayScene, method: str, tick: Tick = lambda now_s: None) -> PlayResult:
    """Play a method to the end, and return its result.

    tick: function that is called with the time of each step.
    """
    begun_s = time.process_time()
    if method == "conservative_limits":
        start_s = simulate_conservative_backfill(scene.trace, scene.gpus)
        return PlayResult(method, start_s, 0, time.process_time() - begun_s)
    if method in SERVED:
        replay = Replay(scene.trace, make_served_plan(scene, method), scene.refuses)
    else:
        replay = Replay(
            scene.trace,
            make_peer_scheduler(scene.trace, method, scene.make_machine, scene.make_ask, scene.max_wait_s),
            scene.refuses,
        )
    for now_s in replay.play_steps():
        tick(now_s)
    return PlayResult(method, replay.start_s, replay.passes, time.process_time() - begun_s)


def make_served_plan(scene: PlayScene, method: str) -> ServedPlan:
    """Return the serving plan on the scene's machine."""
    tree = _make_tree(scene, method)
    own = tree is not None and scene.tree is not None and method != "one_queue"
    return ServedPlan(
        view=make_empty_view(_list_node_sizes(scene)),
        ask=lambda job: scene.make_request(job, scene.find_own_queue(job) if own else DEFAULT_QUEUE),
        tree=tree,
        forgets=method == "kueue_order",
    )


def _make_tree(scene: PlayScene, method: str) -> QueueTree | None:
    if method == "one_line":
        return None
    if scene.tree is None or method == "one_queue":
        return read_queues(f"[policy]\nmax_wait_h = {scene.max_wait_s / 3600!r}\n[queue.{DEFAULT_QUEUE}]")
    if method == "kueue_order":
        return replace(scene.tree, nodes=tuple(replace(node, order="fifo") for node in scene.tree.nodes))
    return scene.tree


def _list_node_sizes(scene: PlayScene) -> list[int]:
    """Return the GPUs of each node. If the machine is only a count of GPUs, it gets as few nodes as possible."""
    if scene.nodes:
        return [scene.each] * scene.nodes
    full, rest = divmod(scene.each, MOST_OF_NODE)
    return [MOST_OF_NODE] * full + ([rest] if rest else [])
