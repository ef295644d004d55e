"""A pass over the queue with and without reclaim, in a fleet that is nearly full.

10,000 requests wait, and teams are guaranteed GPUs. A queue without a guarantee holds nearly all GPUs.

`8 jobs stop for the head`: the pass searches once, for the head of the queue. `8 requests wait for their jobs`: jobs
already stop for eight requests, so the pass first tries these requests on the GPUs that are promised to them. `8
requests look for other jobs`: those jobs did not stop, so the pass would search eight times for others. While actions
are paused it sends none of them, and searches only for the head. If each set exceeds a bound of the policy, it
searches for all eight and for the head. The peer is the same pass without reclaim. In all but the first case it has no
such requests. Passes of both kinds alternate. The ratio is the median of the pairs, by CPU time.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleetcast.benchmarks.answers.queue import NOW_MS, WAITING, make_queue_tree, make_request
from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.victim_scenes import EACH, fill_with_whole_nodes, make_view
from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.actions.breaker import BreakerCapacity, BreakerLimits
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NOT_SAID, PROTECTED, RunningJobs, make_running_jobs
from fleetcast.placement.machines.view import ClusterView, ViewMemo
from fleetcast.placement.plan.promised import PromisedGpus, Promises, SendingBounds, make_hold_name
from fleetcast.placement.plan.queue import Plan, WaitingEntry, plan
from fleetcast.placement.plan.reclaiming import ReclaimInput
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.tree import QueueTree, ReclaimPolicy

SIZES = (10_000,)  # nodes
RACK = 64
RECLAIMS = 8  # requests for which jobs stop
GANG = 25  # nodes of one rack that each of them needs: at 10,000 nodes, eight jobs stop for the first
JOB_SIZES = (1, 1, 1, 1, 2, 2, 4, 8)  # nodes
FREE, PROTECTED_SHARE, ELASTIC_SHARE = 0.005, 0.15, 0.1
PAIRS = 9
HOUR_S = 3600.0
LENDING = "borrowers"  # the queue that holds the GPUs
ENTITLED = (
    f"[queue.entitled]\nweight = 1000\nguaranteed = {{gpu = {RECLAIMS * GANG * EACH}}}\n"  # its requests come first
)


@dataclass(frozen=True)
class PassScene:
    """A fleet whose jobs borrow, and the requests that wait. The first `RECLAIMS` of them may stop jobs."""

    view: ClusterView
    jobs: RunningJobs
    tree: QueueTree
    waiting: tuple[WaitingEntry, ...]

    def run_pass(self, facts: ReclaimInput | None, promises: Promises, first: int = 0) -> Plan:
        """Run one pass over the requests from number `first` on. Nothing is remembered from the passes before."""
        view, run_times = replace(self.view, memo=ViewMemo()), RunTimeQuantiles({})
        held = zip(self.jobs.names, self.jobs.gpus.tolist(), strict=True)
        holds = {name: QueueHold(LENDING, {"gpu": float(gpus)}) for name, gpus in held}
        use = {LENDING: LeafUse({"gpu": float(self.jobs.gpus.sum())}, 0.0)}
        turns = TreeTurns(self.tree, use, view, run_times, NOW_MS, jobs=holds)
        state = view, self.jobs, run_times, Options(now_ms=NOW_MS)
        return plan(self.waiting[first:], *state, turns, reclaim=facts, promises=promises)

    def make_facts(self, promises: Promises, is_paused: bool = True) -> ReclaimInput:
        """Return the facts by which the pass names the jobs to stop.

        Nothing is sent: actions are paused, or otherwise any lost work exceeds the bound of the policy.
        """
        leaving = {job: 1.0 for promised in promises.values() for job in promised.stopping}
        policy, gpus = ReclaimPolicy("act", gpu_h_per_h=math.inf if is_paused else 0.0), float(self.view.usable.sum())
        stopped = "actions are paused" if is_paused else ""
        bounds = SendingBounds(policy, BreakerCapacity(gpus, {"": gpus}), BreakerLimits(1.0, 1.0), stopped)
        return ReclaimInput(policy, self.tree, self.jobs, leaving=leaving, bounds=bounds)

    def make_promises(self, is_short: bool) -> Promises:
        """Return the promises to the first requests. The jobs of one rack stop for each. is_short: one did not."""
        found = {}
        for number, entry in enumerate(self.waiting[:RECLAIMS]):
            held = np.unique(self.view.holders[number * RACK : number * RACK + GANG // 2])
            stopping = frozenset(self.view.jobs[job] for job in held[held >= 0].tolist())
            holds = frozenset({make_hold_name(entry.request.request_id)})
            found[entry.request.request_id] = PromisedGpus(entry.request, holds, stopping, is_short=is_short)
        return found


def make_pass_scene(nodes: int) -> PassScene:
    """Make a fleet in which jobs of whole nodes hold nearly all GPUs, some protected and some elastic."""
    rng = np.random.default_rng(1)
    holders = fill_with_whole_nodes(nodes, rng, JOB_SIZES)
    holders[rng.random(nodes) < FREE] = -1
    used = np.unique(holders[holders >= 0])
    view = make_view(np.where(holders >= 0, np.searchsorted(used, holders), -1), RACK)
    j = len(view.jobs)
    gpus = np.bincount(view.holders[view.holders >= 0], minlength=j)
    age_s = 2 * HOUR_S + rng.exponential(10 * HOUR_S, j)
    saved_s = np.where(rng.random(j) < 0.2, np.nan, np.minimum(age_s, rng.random(j) * rng.lognormal(8.0, 1.0, j)))
    elastic = (rng.random(j) < ELASTIC_SHARE) & (gpus > EACH)
    jobs = make_running_jobs(
        view.jobs,
        leaf=(LENDING,) * j,
        preemptible=np.where(rng.random(j) < PROTECTED_SHARE, PROTECTED, NOT_SAID),
        gpus=gpus,
        members=gpus // EACH,
        gpus_per_member=EACH,
        gang_min=np.where(elastic, gpus // EACH - 1, 0),
        gang_desired=np.where(elastic, gpus // EACH, 0),
        gang_step=elastic,
        started_ms=NOW_MS - (1000 * age_s).astype(np.int64),
        checkpoint_ms=np.where(np.isnan(saved_s), -1, NOW_MS - 1000 * np.nan_to_num(saved_s)).astype(np.int64),
    )
    requests = (*map(_make_entitled, range(RECLAIMS)), *map(make_request, range(WAITING - RECLAIMS)))
    waiting = tuple(WaitingEntry(request, NOW_MS - 1000 * (WAITING - at)) for at, request in enumerate(requests))
    tree = make_queue_tree(view, f"[queue.{LENDING}]\n{ENTITLED}")
    return PassScene(view, jobs, tree, waiting)


def _make_entitled(number: int) -> PlacementRequest:
    """Return a request for a part of a rack, within the guarantee of its queue and first there."""
    return PlacementRequest(
        request_id=f"entitled{number}",
        gang=GANG,
        gpus_per_node=EACH,
        topology=TopologyConstraint("rack"),
        queue="entitled",
    )


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield four records for each number of nodes."""
    for nodes in sizes:
        scene = make_pass_scene(nodes)
        found = scene.run_pass(scene.make_facts({}), {}).proposal
        assert found is not None
        assert found.victims is not None, found.sentence
        yield _measure_pairs(f"{len(found.victims.chosen.jobs)} jobs stop for the head", scene, {}, first=0)
        yield _measure_pairs(f"{RECLAIMS} requests wait for their jobs", scene, scene.make_promises(False), RECLAIMS)
        short, case = scene.make_promises(True), f"{RECLAIMS} requests look for other jobs"
        yield _measure_pairs(f"{case}, and actions are paused", scene, short, RECLAIMS)
        yield _measure_pairs(f"{case}, and each set exceeds a bound", scene, short, RECLAIMS, is_paused=False)


def _measure_pairs(
    case: str, scene: PassScene, promises: Promises, first: int, is_paused: bool = True
) -> dict[str, Any]:
    """Return the record of passes with reclaim, and without it over the requests from number `first` on."""
    facts = scene.make_facts(promises, is_paused)
    found = scene.run_pass(facts, promises)
    assert found.proposal is not None, f"{case}: the pass searched for nothing"
    pairs = [
        (_measure_ms(lambda: scene.run_pass(facts, promises)), _measure_ms(lambda: scene.run_pass(None, {}, first)))
        for _ in range(PAIRS)
    ]
    with_ms, without_ms = zip(*pairs, strict=True)
    ratio = statistics.median(one / other for one, other in pairs)
    size = {"nodes": len(scene.view), "jobs": len(scene.jobs), "waiting": WAITING}
    peer = ("without", min(without_ms))
    case = f"{case}: {ratio:.2f} times"
    return make_record("reclaim_pass", case, size, with_ms, "ms", cpu_s=min(with_ms) / 1000, peer=peer)


def _measure_ms(run_pass: Callable[[], Plan]) -> float:
    """Return the CPU time of a pass in ms."""
    gc.collect()
    began_s = time.process_time()
    run_pass()
    return 1000 * (time.process_time() - began_s)
