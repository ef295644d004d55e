"""Decisions about placement requests, with their reasons. All functions are pure and deterministic."""

import hashlib
from itertools import chain, cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import (
    Decision,
    PlacementRequest,
    RankPlacement,
    RunnerUp,
    check_request,
    list_ignored_facts,
)
from fleetcast.fleet.topology import DOMAIN_LEVELS, Level
from fleetcast.placement.machines.domains import sum_room_by_domain
from fleetcast.placement.machines.filters import Screen, screen
from fleetcast.placement.machines.fit import (
    Fit,
    compute_largest_size,
    find_best_fits,
    get_widest_level,
)
from fleetcast.placement.machines.growth import GangSize, compute_gang_size
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.scorers import NodeScores
from fleetcast.placement.machines.slots import WHOLE, choose_fullest_slots
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.machines.words import describe_placement, describe_refusal

DEFAULT_OPTIONS = Options()


def decide(request: PlacementRequest, view: ClusterView, options: Options = DEFAULT_OPTIONS) -> Decision:
    """Place the whole gang or refuse it.

    Raises RequestError for a request that cannot be honoured as written.
    """
    check_request(request)
    return decide_screened(request, view, options, screen(request, view, options))


def decide_screened(request: PlacementRequest, view: ClusterView, options: Options, screened: Screen) -> Decision:
    """Decide for a validated request whose filters have run.

    screened: the result of the filters for this view.
    """
    growth, fits = _find_fits(request, view, options, screened)
    if not fits:
        return _make_decision(request, view, options, screened, "refused", describe_refusal(request, view, screened))
    best = fits[0]
    level = find_shared_level(view, best.rows, best.level)
    return _make_decision(
        request,
        view,
        options,
        screened,
        "placed",
        describe_placement(request, view, options, screened, best, level, growth),
        ranks=_assign_ranks(request, view, best),
        score=round(best.score, 4),
        parts=best.points,
        runners_up=tuple(_make_runner_up(view, fit) for fit in fits[1:]),
        topology_level=level or "",
        expires_ms=options.now_ms + round(options.intent_expires_s * 1000),
    )


def _find_fits(
    request: PlacementRequest, view: ClusterView, options: Options, screened: Screen
) -> tuple[GangSize, list[Fit]]:
    """Return the size of the gang, and the best places for a gang of that size."""
    scores = NodeScores(request, view, options, screened)
    growth = compute_gang_size(request, view.topology, scores)
    if growth.keeps is not None and not growth.keeps.all():
        scores = NodeScores(request, view, options, screened.restrict_to_rows(scores.rows[growth.keeps]))
    return growth, find_best_fits(request, view.topology, scores, growth.size)


def find_claimed_gpus(
    request: PlacementRequest, view: ClusterView, options: Options = DEFAULT_OPTIONS
) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Return the GPUs and the nodes that `decide` would choose, without making a decision.

    Returns (n, g) bool, the GPUs that it would use whole or in part, and (n,) int64 members per node.
    Both are all zero if it would refuse the request.
    """
    gpus, members = np.zeros(view.free.shape, bool), np.zeros(len(view), np.int64)
    _, fits = _find_fits(request, view, options, screen(request, view, options))
    for fit in fits[:1]:
        members[fit.rows] = fit.takes
        if request.milli == WHOLE:
            gpus = view.free & (np.cumsum(view.free, axis=1) <= members[:, None] * request.gpus_per_node)
            continue
        for row, size in zip(fit.rows.tolist(), fit.takes.tolist(), strict=True):
            gpus[row, choose_fullest_slots(view.milli[row], request.milli, size)] = True
    return gpus, members


def fits_now(request: PlacementRequest, view: ClusterView, options: Options = DEFAULT_OPTIONS) -> bool:
    """Return whether `decide` would place the request.

    It uses the same filters and room as `decide`, without scores.
    """
    return has_room_for_gang(request, view, screen(request, view, options))


def has_room_for_gang(request: PlacementRequest, view: ClusterView, screened: Screen) -> bool:
    """Return whether a gang fits now, for a request whose filters have already run.

    screened: the result of the filters. The answer is the same as that of `fits_now`.
    """
    rows = np.flatnonzero(screened.passes)
    room = sum_room_by_domain(get_widest_level(request), view.topology, rows, screened.room[rows])
    return compute_largest_size(request.members, room.most_members) > 0


def is_still_valid(
    request: PlacementRequest, decision: Decision, view: ClusterView, options: Options = DEFAULT_OPTIONS
) -> bool:
    """Return whether a placement that was decided on an older view also fits on this view."""
    known = view.inventory.row
    if decision.generation != view.generation or any(rank.node not in known for rank in decision.ranks):
        return False
    rows = [known[rank.node] for rank in decision.ranks]
    if (np.bincount(rows, minlength=len(view)) > screen(request, view, options).room).any():
        return False
    wanted = np.zeros(view.milli.shape, np.int64)
    for row, rank in zip(rows, decision.ranks, strict=True):
        wanted[row, list(rank.gpus)] += rank.milli
    return bool((view.milli[rows] >= wanted[rows]).all())


def find_shared_level(view: ClusterView, rows: NDArray[np.int64], known: Level | None) -> Level | None:
    """Return the tightest level with one domain that holds all of `rows`.

    known: a level with such a domain. Returns None if it is None and no known domain holds them all.
    """
    if len(rows) == 1:
        return Level.NODE
    for level in DOMAIN_LEVELS:
        if level is known:
            return level
        numbers = view.topology.domain[level]
        own = numbers[rows[0]]
        if own >= 0 and own == numbers[rows[-1]] and (numbers.take(rows) == own).all():
            return level
    return None


def _make_decision(
    request: PlacementRequest,
    view: ClusterView,
    options: Options,
    screened: Screen,
    outcome: str,
    sentence: str,
    **more: object,
) -> Decision:
    identity = f"{request.request_id}\n{request.job_name}\n{request.attempt}\n{view.as_of_ms}\n{options.now_ms}"
    return Decision(
        request_id=request.request_id,
        decision_id=f"d-{hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()}",
        outcome=outcome,  # type: ignore[arg-type]
        sentence=sentence,
        nodes=len(view),
        candidates=int(np.count_nonzero(screened.passes)),
        rejected=screened.rejected_counts,
        generation=view.generation,
        board_as_of_ms=view.as_of_ms,
        models=dict(view.models),
        ignored=list_ignored_facts(request),
        **more,  # type: ignore[arg-type]
    )


def _assign_ranks(request: PlacementRequest, view: ClusterView, fit: Fit) -> tuple[RankPlacement, ...]:
    """Assign ranks and GPUs to the members of a gang.

    Neighbouring ranks are near each other in the topology. A member takes the free GPUs with the lowest
    indices on its node. A part of a GPU takes the fullest GPU on which it fits.
    """
    each, milli = request.gpus_per_node, request.milli
    order = view.domains.place.take(fit.rows).argsort()
    rows, takes = fit.rows.take(order), fit.takes.take(order)
    hosts: list[str] = view.domains.names.take(rows.repeat(takes)).tolist()
    if milli < WHOLE:
        slots = [choose_fullest_slots(view.milli[row], milli, size) for row, size in zip(rows, takes, strict=True)]
        parts = zip(hosts, chain.from_iterable(slots), strict=True)
        return tuple([RankPlacement(rank, host, (slot,), milli) for rank, (host, slot) in enumerate(parts)])
    free = view.free.take(rows, 0)
    if _are_rows_equal(free) and _are_rows_equal(takes):  # as for whole nodes: then one node stands for all
        first = free[0].nonzero()[0].tolist()
        gpus = [tuple(first[at * each : (at + 1) * each]) for at in range(takes.item(0))]
    else:
        taken = free & (free.cumsum(axis=1) <= (takes * each)[:, None])
        gpus = list(map(tuple, taken.nonzero()[1].reshape(len(hosts), each).tolist()))
    return tuple(map(RankPlacement, range(len(hosts)), hosts, cycle(gpus)))


def _are_rows_equal(rows: NDArray[Any]) -> bool:
    return rows.tobytes() == rows[:1].tobytes() * len(rows)


def _make_runner_up(view: ClusterView, fit: Fit) -> RunnerUp:
    rows = fit.rows.copy()
    rows.sort()
    nodes = tuple(view.domains.names.take(rows).tolist())
    return RunnerUp(nodes, round(fit.score, 4), fit.points)
