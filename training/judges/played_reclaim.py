"""Plays in which running jobs may be stopped for requests that are within the guarantee of their queue.

All methods play the same plan, the same queues and the same checkpoints.

| method | jobs that stop |
|---|---|
| no_preemption | none |
| youngest_first | those of Kueue's order: lowest priority first, then the job that started last |
| by_cost | those whose stop costs least: work since the last checkpoint, and the restart |
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import numpy as np

from fleetcast.placement.play.faults import NodeFault, PlayedFaults
from fleetcast.placement.play.progress import FAULT, JobProgress, draw_checkpoint_intervals
from fleetcast.placement.play.reclaim import PlayedReclaim
from fleetcast.placement.play.replay import Replay
from fleetcast.training.judges.played import PlayScene, Tick, make_served_plan

ReclaimMethod = Literal["no_preemption", "youngest_first", "by_cost"]
AT_ONCE_S = 60.0


@dataclass(frozen=True, slots=True)
class CheckpointDraw:
    """How the checkpoint intervals of jobs are drawn. never: the share of jobs that write no checkpoint."""

    seed: int = 1
    never: float = 0.2


class ReclaimNumbers(msgspec.Struct, frozen=True):
    """The statistics of one play in which jobs may be stopped. Times are in seconds.

    mean_wait_s: from submission to the first start. mean_delay_s: from submission to the end, without the run time.
    entitled: requests that were within the guarantee of their queue when they arrived, with all that waited ahead
    of them there. at_once: the share of these that started within a minute. lost_gpu_h: work that stopped jobs
    did again. restart_gpu_h: time that all restarts took. None: no such job. fault_stops, fault_lost_gpu_h: the
    same for stops by faults of nodes, which are not among the others.
    """

    method: ReclaimMethod
    patience_s: float
    jobs: int
    mean_wait_s: float
    p99_wait_s: float
    mean_delay_s: float
    entitled: int
    entitled_mean_wait_s: float | None
    entitled_p99_wait_s: float | None
    entitled_longest_wait_s: float | None
    at_once: float | None
    stops: int
    stopped_jobs: int
    most_stops: int
    stopped_mean_delay_s: float | None
    lost_gpu_h: float
    restart_gpu_h: float
    fault_stops: int = 0
    fault_lost_gpu_h: float = 0.0


def play_reclaim(
    scene: PlayScene,
    method: ReclaimMethod,
    patience_s: float,
    draw: CheckpointDraw,
    tick: Tick = lambda now_s: None,
    faults: Sequence[NodeFault] = (),
) -> ReclaimNumbers:
    """Play a method to the end, and return its statistics. The scene has a file of queues."""
    replay, reclaim = make_reclaim_replay(scene, method, patience_s, draw, faults)
    for now_s in replay.play_steps():
        tick(now_s)
    return compute_reclaim_numbers(replay, reclaim, method, patience_s)


def make_reclaim_replay(
    scene: PlayScene,
    method: ReclaimMethod,
    patience_s: float,
    draw: CheckpointDraw,
    faults: Sequence[NodeFault] = (),
) -> tuple[Replay, PlayedReclaim]:
    """Return the replay of a method before its first step, and its record of entitled requests and stops."""
    assert scene.tree is not None, "a play with reclaim needs queues"
    interval_s = draw_checkpoint_intervals(len(scene.trace), draw.seed, draw.never)
    progress = JobProgress(scene.trace.run_s, interval_s)
    mode: Literal["off", "advise"] = "off" if method == "no_preemption" else "advise"
    policy = replace(scene.tree.policy.reclaim, mode=mode, patience_s=patience_s)
    reclaim = PlayedReclaim(policy, scene.tree, progress, youngest_first=method == "youngest_first")
    plan = make_served_plan(scene, "ours")
    plan.reclaim, plan.faults = reclaim, PlayedFaults(faults)
    for at_s in {at_s for fault in faults for at_s in (fault.start_s, fault.end_s)}:
        progress.request_pass(at_s)
    return Replay(scene.trace, plan, scene.refuses, progress), reclaim


def compute_reclaim_numbers(
    replay: Replay, reclaim: PlayedReclaim, method: ReclaimMethod, patience_s: float
) -> ReclaimNumbers:
    """Return the statistics of a replay that has ended."""
    trace, all_stops = replay.trace, reclaim.progress.stops
    stops = [stop for stop in all_stops if stop.payer != FAULT]
    by_fault = [stop for stop in all_stops if stop.payer == FAULT]
    submit_s, gpus = np.array(trace.submit_s), np.array(trace.gpus)
    wait_s, delay_s = replay.start_s - submit_s, replay.end_s - submit_s - np.array(trace.run_s)
    entitled_s = wait_s[sorted(reclaim.entitled)]
    by_job = Counter(stop.job for stop in stops)
    has = len(entitled_s) > 0
    return ReclaimNumbers(
        method=method,
        patience_s=patience_s,
        jobs=len(trace),
        mean_wait_s=_round(wait_s.mean()),
        p99_wait_s=_round(np.quantile(wait_s, 0.99)),
        mean_delay_s=_round(delay_s.mean()),
        entitled=len(entitled_s),
        entitled_mean_wait_s=_round(entitled_s.mean()) if has else None,
        entitled_p99_wait_s=_round(np.quantile(entitled_s, 0.99)) if has else None,
        entitled_longest_wait_s=_round(entitled_s.max()) if has else None,
        at_once=round(float((entitled_s <= AT_ONCE_S).mean()), 4) if has else None,
        stops=len(stops),
        stopped_jobs=len(by_job),
        most_stops=max(by_job.values(), default=0),
        stopped_mean_delay_s=_round(delay_s[sorted(by_job)].mean()) if by_job else None,
        lost_gpu_h=_round(sum(stop.lost_s * gpus[stop.job] for stop in stops) / 3600),
        restart_gpu_h=_round(sum(reclaim.progress.restart_s * gpus[stop.job] for stop in all_stops) / 3600),
        fault_stops=len(by_fault),
        fault_lost_gpu_h=_round(sum(stop.lost_s * gpus[stop.job] for stop in by_fault) / 3600),
    )


def _round(value: float) -> float:
    return round(float(value), 1)
