"""Plays in which a share of the large jobs are elastic gangs, compared with the same gangs of fixed size.

An elastic gang starts with a quarter of its members or more, gives members above this minimum to the next request, and
grows back. The fixed ones have the same members. The same jobs are drawn for every exponent.
"""

from collections.abc import Mapping
from dataclasses import replace

import msgspec
import numpy as np

from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.placement.play.elastic import ElasticProgress
from fleetcast.placement.play.reclaim import PlayedReclaim
from fleetcast.placement.play.replay import Replay
from fleetcast.placement.play.served import ServedPlan
from fleetcast.training.judges.played import PlayScene, Tick, make_served_plan

LARGE_GPUS = 8  # from which a job may be drawn as elastic
PARTS = 4  # an elastic gang runs from a quarter of its size


class ElasticNumbers(msgspec.Struct, frozen=True):
    """The statistics of one play. Times are in seconds.

    share: of large jobs that are elastic. exponent: of the speed of a gang, None if the gangs have a fixed size.
    completion: from submission to the end. least_p99_completion_s: its p99 if no job ever waited or shrank, which no
    schedule can undercut. delay: completion without the run time at full size. work_gpu_h: work at full size done
    until the last submission.
    """

    share: float
    exponent: float | None
    jobs: int
    elastic: int
    mean_wait_s: float
    mean_completion_s: float
    p99_completion_s: float
    least_p99_completion_s: float
    p99_delay_s: float
    work_gpu_h: float
    shrinks: int
    grows: int


def split_elastic_job(gpus: int, each: int) -> tuple[int, int] | None:
    """Return (members, GPUs of each member) of an elastic job, or None if it cannot be cut into quarters.

    >>> split_elastic_job(8, 8), split_elastic_job(64, 8), split_elastic_job(9, 8)
    ((4, 2), (8, 8), None)
    """
    if gpus < LARGE_GPUS or gpus % PARTS:
        return None
    size = gpus // PARTS if gpus // PARTS < each else each
    return (gpus // size, size) if gpus % size == 0 and each % size == 0 else None


def draw_elastic_jobs(scene: PlayScene, share: float, seed: int) -> dict[int, int]:
    """Return elastic job → its members at full size."""
    drawn = np.random.default_rng(seed).random(len(scene.trace)) < share
    each = scene.each if scene.nodes else 1
    found = {job: split_elastic_job(int(scene.trace.gpus[job]), each) for job in np.flatnonzero(drawn).tolist()}
    return {job: parts[0] for job, parts in found.items() if parts is not None}


def play_elastic(
    scene: PlayScene, share: float, exponent: float | None, seed: int, tick: Tick = lambda now_s: None
) -> ElasticNumbers:
    """Play the serving plan with elastic gangs, or with the same gangs at a fixed size. Returns its statistics.

    exponent: None for a fixed size.
    """
    gangs = draw_elastic_jobs(scene, share, seed)
    replay, progress = make_elastic_replay(scene, make_served_plan(scene, "ours"), gangs, exponent)
    for now_s in replay.play_steps():
        tick(now_s)
    submit_s, run_s = np.array(scene.trace.submit_s), np.array(scene.trace.run_s)
    completion_s = replay.end_s - submit_s
    return ElasticNumbers(
        share=share,
        exponent=exponent,
        jobs=len(scene.trace),
        elastic=len(gangs),
        mean_wait_s=round(float((replay.start_s - submit_s).mean()), 1),
        mean_completion_s=round(float(completion_s.mean()), 1),
        p99_completion_s=round(float(np.quantile(completion_s, 0.99)), 1),
        least_p99_completion_s=round(float(np.quantile(run_s, 0.99)), 1),
        p99_delay_s=round(float(np.quantile(completion_s - run_s, 0.99)), 1),
        work_gpu_h=round(progress.sum_work_gpu_s(float(submit_s.max())) / 3600, 1),
        shrinks=progress.shrinks,
        grows=progress.grows,
    )


def make_elastic_replay(
    scene: PlayScene, plan: ServedPlan, gangs: Mapping[int, int], exponent: float | None
) -> tuple[Replay, ElasticProgress]:
    """Return the replay of a plan before its first step, and the sizes of its gangs.

    gangs: job → its members at full size. exponent: None for a fixed size.
    """
    assert plan.tree is not None, "the order of gangs that give members comes from a tree of queues"
    rigid = exponent is None
    ask, trace = plan.ask, scene.trace

    def ask_with_gang(job: int) -> PlacementRequest | None:
        request = ask(job)
        if request is None or job not in gangs:
            return request
        full = gangs[job]
        gang = full if rigid else Gang(-(-full // PARTS), full)
        return msgspec.structs.replace(request, gang=gang, gpus_per_node=int(trace.gpus[job]) // full)

    progress = ElasticProgress(trace.run_s, trace.gpus, {} if rigid else gangs, 1.0 if exponent is None else exponent)
    policy = replace(plan.tree.policy.reclaim, mode="off" if rigid else "advise", patience_s=0.0, stops_a_day=0)
    plan.ask, plan.elastic = ask_with_gang, progress
    plan.reclaim = PlayedReclaim(policy, plan.tree, progress)
    return Replay(trace, plan, scene.refuses, progress), progress
