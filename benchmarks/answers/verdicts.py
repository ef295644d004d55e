"""The time of a pass until its verdict on one request, in scenes of KAI's benchmarks and scale tests.

Each scene is a fleet, its running jobs and a request whose queue is owed GPUs. `elastic victim`: one gang holds all
nodes, and may shrink to half of them. `five queues`: one of five equal queues holds all GPUs with jobs of all sizes.
`shared GPUs`: two jobs share each of 35 % of the GPUs, and other jobs hold one GPU. `all jobs protected`: as before,
but all owners forbid stops. `one GPU each`: the fleet is empty, and as many requests wait as it has GPUs.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.victim_scenes import EACH, fill_with_pieces, make_view
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import (
    NO_RUNNING_JOBS,
    NOT_SAID,
    PROTECTED,
    RunningJobs,
    make_running_jobs,
)
from fleetcast.placement.machines.slots import WHOLE, HeldParts
from fleetcast.placement.machines.view import ClusterView, ViewMemo
from fleetcast.placement.plan.queue import Plan, WaitingEntry, plan
from fleetcast.placement.plan.reclaiming import ReclaimInput
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import ReclaimPolicy

SIZES = (500, 1_000)  # nodes
RACK = 50
SHARED = 0.35  # of the GPUs
NOW_MS = 1_800_000_000_000
DAY_S = 86_400.0
REPEATS = 7
LENDING, OWED = "queue0", "queue1"


@dataclass(frozen=True)
class VerdictScene:
    """A fleet, and the requests that wait in it.

    amounts: (j,) GPUs that each job holds. queues: how many queues share the fleet equally. The first one holds it.
    """

    view: ClusterView
    jobs: RunningJobs
    amounts: Sequence[float]
    requests: Sequence[PlacementRequest]
    queues: int = 5

    def run_pass(self) -> Plan:
        """Run one pass, with nothing remembered from passes before."""
        view, run_times = replace(self.view, memo=ViewMemo()), RunTimeQuantiles({})
        share = len(view) * EACH / self.queues
        tree = read_queues(
            "".join(f"[queue.queue{number}]\nguaranteed = {{gpu = {share:g}}}\n" for number in range(self.queues))
        )
        holds = {
            name: QueueHold(LENDING, {"gpu": gpus}) for name, gpus in zip(self.jobs.names, self.amounts, strict=True)
        }
        use = {LENDING: LeafUse({"gpu": float(sum(self.amounts))}, 0.0)}
        turns = TreeTurns(tree, use, view, run_times, NOW_MS, jobs=holds)
        waiting = [WaitingEntry(request, NOW_MS - round(1000 * DAY_S)) for request in self.requests]
        facts = ReclaimInput(ReclaimPolicy("advise"), tree, self.jobs)
        return plan(waiting, view, self.jobs, run_times, Options(now_ms=NOW_MS), turns, reclaim=facts)


def make_elastic_victim(nodes: int) -> VerdictScene:
    view = make_view(np.zeros((nodes, EACH), np.int64), RACK)
    jobs = _make_jobs(view, least=nodes // 2)
    return replace(_make_scene(view, jobs, nodes // 2), queues=2)


def make_five_queues(nodes: int) -> VerdictScene:
    view = make_view(fill_with_pieces(nodes, np.random.default_rng(3)), RACK)
    return _make_scene(view, _make_jobs(view), nodes // 8)


def make_shared_gpus(nodes: int, preemptible: int = NOT_SAID) -> VerdictScene:
    shared = np.flatnonzero(np.random.default_rng(4).random(nodes * EACH) < SHARED)
    holders = np.arange(nodes * EACH)
    further = nodes * EACH + np.arange(len(shared))  # the second job of each shared GPU
    view = make_view(holders.reshape(nodes, EACH), RACK)
    view = replace(
        view,
        jobs=(*view.jobs, *(f"half{number:05d}" for number in range(len(shared)))),
        parts=HeldParts(np.append(shared, further), np.tile(shared, 2), np.full(2 * len(shared), WHOLE // 2)),
    )
    amounts = np.ones(len(view.jobs))
    amounts[view.parts.job] = 0.5
    return _make_scene(view, _make_jobs(view, preemptible), nodes // 8, amounts.tolist())


def make_empty(nodes: int) -> VerdictScene:
    view = make_view(np.full((nodes, EACH), -1), RACK)
    requests = [PlacementRequest(request_id=f"one{number}", queue=OWED) for number in range(nodes * EACH)]
    return VerdictScene(view, NO_RUNNING_JOBS, (), requests)


def _make_jobs(view: ClusterView, preemptible: int = NOT_SAID, least: int = 0) -> RunningJobs:
    """Return the jobs of a view, which began within two days. Most of them write checkpoints.

    least: members to which they may shrink, 0 if they may not.
    """
    rng, j = np.random.default_rng(5), len(view.jobs)
    gpus = np.maximum(np.bincount(view.holders[view.holders >= 0], minlength=j), 1)
    members = np.maximum(gpus // EACH, 1)
    age_s = DAY_S * (0.1 + 1.9 * rng.random(j))
    saved_ms = NOW_MS - (1000 * age_s * rng.random(j)).astype(np.int64)
    return make_running_jobs(
        view.jobs,
        leaf=(LENDING,) * j,
        preemptible=[preemptible] * j,
        gpus=gpus,
        members=members,
        gpus_per_member=np.minimum(gpus, EACH),
        started_ms=NOW_MS - (1000 * age_s).astype(np.int64),
        checkpoint_ms=np.where(rng.random(j) < 0.2, -1, saved_ms),
        gang_min=[least] * j,
        gang_desired=members if least else [0] * j,
        gang_step=[int(least > 0)] * j,
    )


def _make_scene(
    view: ClusterView, jobs: RunningJobs, members: int, amounts: Sequence[float] | None = None
) -> VerdictScene:
    """Return the scene in which a gang of whole nodes waits."""
    request = PlacementRequest(request_id="payer", queue=OWED, gang=members, gpus_per_node=EACH)
    return VerdictScene(view, jobs, jobs.gpus.tolist() if amounts is None else amounts, [request])


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield the record of each scene for each number of nodes."""
    scenes: Sequence[tuple[str, Callable[[int], VerdictScene]]] = (
        ("elastic victim", make_elastic_victim),
        ("five queues", make_five_queues),
        ("shared GPUs", make_shared_gpus),
        ("all jobs protected", lambda nodes: make_shared_gpus(nodes, PROTECTED)),
        ("one GPU each", make_empty),
    )
    for nodes in sizes:
        for name, make in scenes:
            yield _measure(name, make(nodes))


def _measure(name: str, scene: VerdictScene) -> dict[str, Any]:
    """Return the record of the CPU time of a pass in ms."""
    values, verdict = [], ""
    for _ in range(REPEATS):
        began_s = time.process_time()
        found = scene.run_pass()
        values.append(1000 * (time.process_time() - began_s))
        verdict = describe_verdict(found)
    size = {"nodes": len(scene.view), "jobs": len(scene.jobs), "waiting": len(scene.requests)}
    return make_record("verdicts", f"{name}: {verdict}", size, values, "ms", cpu_s=min(values) / 1000)


def describe_verdict(found: Plan) -> str:
    """Return what a pass decided, such as "1 gang shrinks to 250 members"."""
    proposal = found.proposal
    if proposal is None:
        return f"{len(found.placed):,} placed"
    if proposal.shrinks:
        return ", ".join(f"{row.job} shrinks to {row.size}" for row in proposal.shrinks)
    return f"{len(proposal.victims.chosen.jobs):,} jobs stop" if proposal.victims is not None else proposal.sentence
