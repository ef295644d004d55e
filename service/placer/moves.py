"""Advice on moves: the running jobs that could move elsewhere so that the largest waiting gang fits. No job moves."""

import asyncio
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from fleetcast.fleet.requests import WHOLE_GPU, PlacementRequest, RankPlacement
from fleetcast.placement.actions.action import ActionKind, ActionReason, JobAction
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.words import format_count
from fleetcast.placement.plan.movable import make_job_shapes, mask_movable
from fleetcast.placement.plan.moves import FoundMoves, NoMoves, find_moves
from fleetcast.placement.plan.reclaiming import compute_job_costs
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.reclaim.cost import StopCosts
from fleetcast.placement.reclaim.room import HostAmounts
from fleetcast.service.answers.placements import MovesAdvice
from fleetcast.service.placer.reclaim import ADVICE, LASTS_MS, make_whole_job_action
from fleetcast.service.placer.reclaim_preview import make_previewed_action
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.view import ObservedFleet

MOST_TRIED = 32  # waiting gangs that are checked for room now, the largest first
NO_MOVES = {
    "no_place": "no moves that were tried have places for all jobs",
    "refused": "the freed GPUs would not have the required shape",
}


@dataclass(frozen=True, slots=True)
class MovesInput:
    """The facts for advice on moves. They never change, so a thread may use them.

    waiting: the requests that wait and may start by their quota, the largest first.
    """

    waiting: list[PlacementRequest]
    observed: ObservedFleet
    turns: TreeTurns
    options: Options
    barred: frozenset[str]
    start_ms: dict[str, int]


class MovesAdvisor:
    """The advice on moves of one placer. One search runs at a time, in a thread."""

    def __init__(self, service: PlacementService) -> None:
        self._service = service
        self._computing = asyncio.Lock()
        self._last: tuple[tuple[object, int], MovesAdvice] | None = None

    async def find_advice(self) -> MovesAdvice | None:
        """Return the present advice, or None if the file of queues asks for none. Raises StaleError without a board."""
        service = self._service
        tree = service.queues.tree
        if tree is None or tree.moves == "off":
            return None
        async with self._computing:
            facts, key = self._make_input(), (service.view.board, service.ledger.version)
            if self._last is None or self._last[0] != key:
                self._last = key, await asyncio.to_thread(advise_moves, facts)
            return self._last[1]

    def _make_input(self) -> MovesInput:
        service = self._service
        observed, now_ms = service.view.observe_fleet(), service.clock.now_ms()
        turns = service.queues.make_turns(observed)
        assert isinstance(turns, TreeTurns), "there is a file of queues"
        entries = service.backlog.sort_by_turn(service.ledger.list_queue_entries())
        promised = service.view.promised_sets.make_promises(now_ms)
        allowed = [
            request
            for entry in entries
            if entry.request.request_id not in promised and _is_whole(entry.request)
            if not isinstance(request := turns.limit_to_quota(entry.request), str)
        ]
        starts = {request.request_id: service.backlog.find_start_ms(request.request_id, now_ms) for request in allowed}
        return MovesInput(
            sorted(allowed, key=lambda request: -_count_gpus(request)),
            observed,
            turns,
            service.make_options(),
            frozenset(record.action.job for record in service.actions.list_open()),
            {request_id: start["p50"] for request_id, start in starts.items() if start},
        )


def _is_whole(request: PlacementRequest) -> bool:
    return request.gpus_per_node > 0 and request.milli == WHOLE_GPU


def _count_gpus(request: PlacementRequest) -> int:
    return request.members.min * request.gpus_per_node


def advise_moves(facts: MovesInput) -> MovesAdvice:
    """Return the cheapest moves for the largest waiting gang that lacks only the right shape."""
    view = facts.observed.view
    free = int(view.free[view.is_open].sum())
    fitting = [request for request in facts.waiting if _count_gpus(request) <= free][:MOST_TRIED]
    request = next((gang for gang in fitting if not fits_now(gang, view, facts.options)), None)
    if request is None:
        sentence = f"no gang waits that needs another shape of the {free:,} free GPUs"
        return MovesAdvice(code="none_waits", sentence=sentence)
    gpus, now_ms = _count_gpus(request), facts.options.now_ms
    start_ms = facts.start_ms.get(request.request_id)
    advice = MovesAdvice(
        code="found",
        sentence="",
        request_id=request.request_id,
        job=request.job_name,
        gpus=gpus,
        gain_gpu_s=None if start_ms is None else gpus * max(0, start_ms - now_ms) / 1000,
    )
    costs = compute_job_costs(facts.observed.jobs, facts.observed.view, now_ms)
    found = _find_moves(request, facts, costs)
    if isinstance(found, NoMoves):
        sentence = f"no moves let {request.request_id} in: {_explain_failure(found)}"
        return structs.replace(advice, code=found.code, sentence=sentence)
    moves = [_make_move(name, places, request, facts, costs) for name, places in sorted(found.places.items())]
    return structs.replace(
        advice,
        sentence=_describe_moves(advice, found),
        moves=[make_previewed_action(move) for move in moves],
        cost_gpu_s=found.cost_gpu_s,
        ranks=found.decision.ranks,
    )


def _find_moves(request: PlacementRequest, facts: MovesInput, costs: StopCosts) -> FoundMoves | NoMoves:
    view, jobs = facts.observed.view, facts.observed.jobs
    may = mask_movable(jobs, facts.turns.tree, facts.options.now_ms, facts.barred)
    rows = np.array([jobs.row.get(name, -1) for name in view.jobs], np.int64)  # -1: GPUs that are only promised
    shapes = {name: facts.turns.exclude_closed_nodes(shape) for name, shape in make_job_shapes(jobs, view).items()}
    host = HostAmounts(*(np.append(held, np.nan)[rows] for held in (jobs.cpus, jobs.host_memory_gib)))
    cost = np.append(np.where(may, costs.total, np.inf), np.inf)[rows]
    return find_moves(request, view, cost, shapes, facts.options, host)


def _make_move(
    name: str, places: tuple[RankPlacement, ...], request: PlacementRequest, facts: MovesInput, costs: StopCosts
) -> JobAction:
    move = make_whole_job_action(
        ActionKind.MOVE,
        name,
        facts.observed,
        costs,
        reason=ActionReason("fragments"),
        payer=request.request_id,
        executor=ADVICE,
        by_ms=facts.options.now_ms + LASTS_MS,
    )
    return structs.replace(move, places=places)


def _explain_failure(found: NoMoves) -> str:
    if found.code == "no_room":
        return f"with all jobs that may move gone, {found.members} of {format_count(found.needed, 'member')} fit"
    return NO_MOVES.get(found.code, found.code)


def _describe_moves(advice: MovesAdvice, found: FoundMoves) -> str:
    head = f"{format_count(len(found.places), 'move')} would let {advice.request_id} ({advice.gpus:,} GPUs) in now"
    cost = f"at {found.cost_gpu_s / 3600:,.1f} GPU-hours"
    if advice.gain_gpu_s is None:
        return f"{head}, {cost}; its start without them is not known"
    return f"{head}, {cost}; waiting would cost {advice.gain_gpu_s / 3600:,.1f} GPU-hours"
