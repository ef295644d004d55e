"""Short plays with reclaim, drawn by seed, and the laws that every stop keeps.

A play has two or three queues, some with a class that preempts, and a handful of jobs on a few nodes. The laws are
checked on what happened: the attempts of jobs and their stops.
"""

import random
from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.placement.play.progress import JobProgress
from fleetcast.placement.play.reclaim import PlayedReclaim
from fleetcast.placement.play.replay import Replay, Trace
from fleetcast.placement.play.served import ServedPlan, make_empty_view
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import ReclaimPolicy

EACH = 4  # GPUs of a node
DAY_S = 86_400.0
SPAN_S = 4000.0  # of arrivals: many jobs compete


@dataclass(frozen=True, slots=True)
class ShortPlay:
    """A play that has ended. requests: by job, as the replay numbers them."""

    requests: list[PlacementRequest]
    replay: Replay
    progress: JobProgress
    policy: ReclaimPolicy
    gpus: int

    def count_gpus(self, job: int) -> int:
        request = self.requests[job]
        return request.members.min * request.gpus_per_node


def play_short(seed: int) -> ShortPlay:
    """Draw a play and play it to its end. The same seed gives the same play."""
    rng = random.Random(seed)
    nodes = rng.randint(1, 4)
    queues = _draw_queues(rng, nodes * EACH)
    tree = read_queues(queues)
    requests = [_draw_request(rng, number, queues, nodes) for number in range(rng.randint(8, 20))]
    submit_s = sorted(float(rng.randint(0, int(SPAN_S))) for _ in requests)
    run_s = [float(rng.choice((900, 4000, 20_000))) for _ in requests]
    trace = Trace([], submit_s, run_s, [one.members.min * one.gpus_per_node for one in requests], [None] * len(run_s))
    interval_s = np.array([rng.choice((200.0, 1000.0, np.inf)) for _ in requests])
    progress = JobProgress(run_s, interval_s, rng.choice((0.0, 300.0)))
    plan = ServedPlan(make_empty_view([EACH] * nodes), requests.__getitem__, tree)
    plan.reclaim = PlayedReclaim(tree.policy.reclaim, tree, progress, youngest_first=rng.random() < 0.2)
    replay = Replay(trace, plan, progress=progress)
    replay.play()
    return ShortPlay(requests, replay, progress, tree.policy.reclaim, nodes * EACH)


def _draw_queues(rng: random.Random, gpus: int) -> str:
    """Draw a file of queues. Their guarantees are no more than the fleet has."""
    lines = [
        '[policy]\nreclaim = "advise"',
        f"claims = {rng.choice((1, 1, 2, 8))}",
        f"preempt_after_s = {rng.choice((0, 300))}",
        f"min_run_s = {rng.choice((0, 600))}",
        f"stops_a_day = {rng.choice((0, 1, 2, 2, 2))}",
        f'order = "{rng.choice(("shortest", "attained", "fifo"))}"',
    ]
    if rng.random() < 0.3:
        lines.append(f"preempt_gpu_h_per_h = {rng.choice((0.5, 2.0))}")
    if rng.random() < 0.3:
        lines.append('[class.urgent]\npriority = 5\npreempts = ["a"]')
        lines.append('[queue.urgent]\nclass = "urgent"')
    left = gpus
    for name in "abc"[: rng.randint(2, 3)]:
        own = rng.choice((0, left // 2, left))
        left -= own
        lines.append(f"[queue.{name}]\nweight = {rng.choice((1, 2, 4))}\nguaranteed = {{gpu = {own}}}")
        lines.append(f'preemptible = "{rng.choice(("borrowed", "borrowed", "borrowed", "all", "none"))}"')
    return "\n".join(lines) + "\n"


def _draw_request(rng: random.Random, number: int, queues: str, nodes: int) -> PlacementRequest:
    names = [line[len("[queue.") : -1] for line in queues.splitlines() if line.startswith("[queue.")]
    members = rng.randint(1, nodes) if rng.random() < 0.4 else 1
    return PlacementRequest(
        request_id=f"j{number:03}",
        queue=rng.choice(names),
        gang=Gang(members, members, 1),
        gpus_per_node=EACH if members > 1 else rng.randint(1, EACH),
        preemptible=rng.choice((None, None, None, None, True, False)),
    )


def find_broken_law(play: ShortPlay) -> str:
    """Return the first law that a play broke, with the jobs that broke it. Returns "" if it kept all of them."""
    if np.isnan(play.replay.end_s).any():
        return f"jobs {np.flatnonzero(np.isnan(play.replay.end_s)).tolist()} never ended"
    return _find_too_many_gpus(play) or _find_broken_bound(play) or _find_wasted_stop(play) or _find_quarrel(play)


def _find_too_many_gpus(play: ShortPlay) -> str:
    """Attempts never hold more GPUs than the fleet has. An end frees GPUs before a start takes them."""
    changes: dict[tuple[float, int], int] = defaultdict(int)
    for attempt in play.progress.attempts:
        gpus = play.count_gpus(attempt.job)
        changes[attempt.end_s, 0] -= gpus
        changes[attempt.start_s, 1] += gpus
    held = np.cumsum([changes[at] for at in sorted(changes)])
    return f"{held.max()} of {play.gpus} GPUs were held" if held.max() > play.gpus else ""


def _find_broken_bound(play: ShortPlay) -> str:
    """The stops of a day, the least run time, the budget of a request, and the owner's will bound every stop."""
    began = {(one.job, one.end_s): one.start_s for one in play.progress.attempts}
    lost_gpu_h: dict[tuple[int, float], float] = defaultdict(float)
    for stop in play.progress.stops:
        of_day = [other for other in play.progress.list_stops(stop.job) if stop.at_s - DAY_S < other.at_s <= stop.at_s]
        if len(of_day) > play.policy.stops_a_day:
            return f"job {stop.job} was stopped {len(of_day)} times within a day"
        if stop.at_s - began[stop.job, stop.at_s] < play.policy.min_run_s:
            return f"job {stop.job} was stopped before it had run {play.policy.min_run_s:g} s"
        if play.requests[stop.job].preemptible is False:
            return f"job {stop.job} was stopped against its owner's will"
        lost_gpu_h[stop.payer, stop.at_s] += stop.lost_s * play.count_gpus(stop.job) / 3600
    most = max(lost_gpu_h.values(), default=0.0)
    return f"a request cost {most:g} GPU-hours" if most > play.policy.gpu_h_per_h else ""


def _find_wasted_stop(play: ShortPlay) -> str:
    """Return why a stop was wasted, or "". Its payer must start at that moment, on the GPUs that the stop freed."""
    starts = {(one.job, one.start_s) for one in play.progress.attempts}
    wasted = [stop for stop in play.progress.stops if (stop.payer, stop.at_s) not in starts]
    return f"job {wasted[0].payer} paid at {wasted[0].at_s:g} s and did not start" if wasted else ""


def _find_quarrel(play: ShortPlay) -> str:
    """No two jobs stop each other in turn."""
    pairs = {(stop.payer, stop.job) for stop in play.progress.stops}
    both = sorted((payer, job) for payer, job in pairs if (job, payer) in pairs and payer < job)
    return f"jobs {both[0]} stopped each other" if both else ""
