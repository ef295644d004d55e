"""The table of running jobs: from the board, completed by the requests that our placer placed.

Events of a job may lack what its request stated: its queue, its gang, its CPUs. The request counts then. Where
both state a fact, the request counts as well, except that either of them can forbid a stop.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.machines.running_jobs import (
    DEFAULT_RESTART_S,
    NOT_SAID,
    PREEMPTIBLE,
    PROTECTED,
    RUN_LEVELS,
    RunningJobs,
    make_running_jobs,
)
from fleetcast.placement.queues.tree import DEFAULT_QUEUE, QueueTree
from fleetcast.service.answers.jobs import EndedJobRow, LearntTimes, RunningJobRow, SlowVerdict
from fleetcast.service.board.board import Board
from fleetcast.service.pipeline.learnt_times import NOTHING_LEARNT
from fleetcast.service.pipeline.learnt_times import SECTION as LEARNT_SECTION

DAY_MS = 86_400_000
_running_rows = msgspec.json.Decoder(list[RunningJobRow]).decode
_verdicts = msgspec.json.Decoder(dict[str, SlowVerdict]).decode
_learnt_rows = msgspec.json.Decoder(dict[str, LearntTimes]).decode
_ended_rows = msgspec.json.Decoder(list[EndedJobRow]).decode
_PREEMPTIBLE = {None: NOT_SAID, False: PROTECTED, True: PREEMPTIBLE}


def read_running_table(board: Board) -> RunningJobs:
    """Read the table of running jobs from a board, in the order of its section `names.job`.

    A job of that section without a row of its own has unknown values. `leaf` is the queue that the events name.
    """
    rows = _running_rows(board.raw("jobs.running"))
    names = board.names("names.job")
    left_s = _read_remaining_s(board, len(rows))
    if names != tuple(row.job for row in rows):
        index = {row.job: at for at, row in enumerate(rows)}
        order = [index.get(name, -1) for name in names]
        rows = [rows[at] if at >= 0 else RunningJobRow(name, 1, 0, None) for name, at in zip(names, order, strict=True)]
        left_s = np.vstack([left_s, np.full((1, len(RUN_LEVELS)), np.nan)])[order]
    stops = _count_stops(_ended_rows(board.raw("jobs.ended")) if "jobs.ended" in board else (), board.as_of_ms)
    jobs = replace(_make_table(rows, left_s, stops), slow_node=_find_slow_nodes(board, rows))
    return _add_learnt_times(jobs, board)


def read_finished_attempts(board: Board) -> frozenset[tuple[str, int]]:
    """Read the attempts that ended with all work done, as (job, attempt)."""
    rows = _ended_rows(board.raw("jobs.ended")) if "jobs.ended" in board else []
    return frozenset((row.job, row.attempt) for row in rows if row.outcome == "finished")


def _find_slow_nodes(board: Board, rows: Sequence[RunningJobRow]) -> tuple[str, ...]:
    """Return (j,) the node that slows each job and that it can leave without a loss of work, "" if there is none."""
    if "doc.stragglers" not in board:
        return ("",) * len(rows)
    verdicts = _verdicts(board.raw("doc.stragglers"))
    found = [""] * len(rows)
    for at, row in enumerate(rows):
        verdict = verdicts.get(row.job)
        if verdict is None or verdict.since_ms is None or row.checkpoint_ms is None:
            continue
        if verdict.node in row.held and row.checkpoint_ms > verdict.since_ms:
            found[at] = verdict.node
    return tuple(found)


def _add_learnt_times(jobs: RunningJobs, board: Board) -> RunningJobs:
    """Return the table with the times that the pipeline learnt. A board of an earlier version has none."""
    learnt = _learnt_rows(board.raw(LEARNT_SECTION)) if LEARNT_SECTION in board else {}
    if not learnt:
        return jobs
    rows = [learnt.get(name, NOTHING_LEARNT) for name in jobs.names]
    restart_s = _make_column(row.restart_s for row in rows)
    return replace(
        jobs,
        restart_s=np.where(np.isnan(restart_s), DEFAULT_RESTART_S, restart_s),
        resize_pause_s=_make_column(row.resize_pause_s for row in rows),
        speed_exponent=_make_column(row.speed_exponent for row in rows),
    )


def _read_remaining_s(board: Board, j: int) -> NDArray[np.float64]:
    """Read (j, level) remaining seconds from a board, NaN where no forecast is known."""
    found = np.full((j, len(RUN_LEVELS)), np.nan)
    if "jobs.running.left_s" in board and (left_s := board.array("jobs.running.left_s")).shape[1] == len(RUN_LEVELS):
        known = np.flatnonzero(np.isfinite(left_s).all(axis=1) & (left_s[:, -1] > 0))
        known = known[known < j]
        found[known] = left_s[known]
    return found


def _count_stops(ended: Iterable[EndedJobRow], now_ms: int) -> Counter[str]:
    """Count the preemptions of each job in the last 24 hours."""
    return Counter(row.job for row in ended if row.outcome == "preempted" and row.ended_ms > now_ms - DAY_MS)


def _make_table(rows: Sequence[RunningJobRow], left_s: NDArray[np.float64], stops: Mapping[str, int]) -> RunningJobs:
    gangs = [(row.gang.min, row.gang.desired, row.gang.step) if row.gang else (0, 0, 0) for row in rows]
    least, most, step = np.array(gangs, np.int64).reshape(-1, 3).T
    members = np.array([row.members for row in rows], np.float64)
    cpus = _make_column(row.cpus for row in rows)
    memory_gib = _make_column(row.host_memory_gib for row in rows)
    return make_running_jobs(
        (row.job for row in rows),
        leaf=(row.queue for row in rows),
        user=(row.user for row in rows),
        job_class=(row.class_ for row in rows),
        attempt=[row.attempt for row in rows],
        priority=[row.priority for row in rows],
        preemptible=[_PREEMPTIBLE[row.preemptible] for row in rows],
        gpus=[row.gpus for row in rows],
        members=[row.members for row in rows],
        gang_min=least,
        gang_desired=most,
        gang_step=step,
        gpus_per_member=[row.gpus_per_member for row in rows],
        started_ms=[row.started_ms or -1 for row in rows],
        checkpoint_ms=[-1 if row.checkpoint_ms is None else row.checkpoint_ms for row in rows],
        checkpoint_cost_s=_make_column(row.checkpoint_cost_s for row in rows),
        resized_ms=[-1 if (row.placed_ms or 0) <= (row.started_ms or 0) else row.placed_ms or -1 for row in rows],
        stops=[stops.get(row.job, 0) for row in rows],
        cpus_per_member=cpus,
        cpus=_multiply_known(cpus, members),
        host_memory_gib_per_member=memory_gib,
        host_memory_gib=_multiply_known(memory_gib, members),
        limit_s=_make_column(row.limit_s for row in rows),
        remaining_s=left_s,
    )


def _make_column(values: Iterable[float | None]) -> NDArray[np.float64]:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _multiply_known(each: NDArray[np.float64], members: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum over all members, NaN if their number is unknown."""
    return np.where(members > 0, each * members, np.nan)


class PlacedRequests:
    """The requests by which our placer placed the running jobs. Each attempt is looked up in the ledger once."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._known: dict[tuple[str, int], PlacementRequest | None] = {}

    def complete_jobs(self, jobs: RunningJobs, tree: QueueTree | None) -> RunningJobs:
        """Return the table with the facts of these requests, and with leaf queues of the tree."""
        keys = list(zip(jobs.names, jobs.attempt.tolist(), strict=True))
        self._known = {key: self._known[key] if key in self._known else self._ledger.find_request(*key) for key in keys}
        placed = {row: request for row, key in enumerate(keys) if (request := self._known[key]) is not None}
        return complete_by_requests(jobs, placed, tree)


def complete_by_requests(
    jobs: RunningJobs, placed: Mapping[int, PlacementRequest], tree: QueueTree | None
) -> RunningJobs:
    """Return the table with the facts of requests, and with leaf queues of the tree. placed: row → request."""
    leaf, user, job_class = list(jobs.leaf), list(jobs.user), list(jobs.job_class)
    required_level = list(jobs.required_level)
    columns: dict[str, Any] = {
        name: getattr(jobs, name).copy()
        for name in (
            *("priority", "preemptible", "members", "gang_min", "gang_desired", "gang_step", "gpus_per_member"),
            *("checkpoint_cost_s", "cpus_per_member", "host_memory_gib_per_member"),
        )
    }
    for row, request in placed.items():
        user[row], job_class[row] = request.user or user[row], request.class_
        required_level[row] = request.required or ""
        columns["priority"][row] = request.priority
        if jobs.preemptible[row] != PROTECTED and request.preemptible is not None:
            columns["preemptible"][row] = _PREEMPTIBLE[request.preemptible]
        gang, each = request.members, request.gpus_per_node
        if gang.min < gang.desired:
            columns["gang_min"][row], columns["gang_desired"][row] = gang.min, gang.desired
            columns["gang_step"][row] = gang.step
        columns["gpus_per_member"][row] = each
        if each and jobs.gpus[row] >= each:
            columns["members"][row] = jobs.gpus[row] // each
        for name, value in (
            ("cpus_per_member", request.cpus),
            ("host_memory_gib_per_member", request.host_memory_gib),
        ):
            columns[name][row] = columns[name][row] if value is None else value
        if np.isnan(columns["checkpoint_cost_s"][row]) and request.checkpoint_cost_s is not None:
            columns["checkpoint_cost_s"][row] = request.checkpoint_cost_s
    leaves: dict[tuple[str, str], str] = {}
    for row, (queue, owner) in enumerate(zip(jobs.leaf, user, strict=True)):
        known = placed.get(row)
        if known is not None:
            leaf[row] = find_charged_leaf(known, tree)
        elif (queue, owner) in leaves:
            leaf[row] = leaves[queue, owner]
        else:
            stated = PlacementRequest(request_id="", queue=queue, user=owner)
            leaf[row] = leaves[queue, owner] = find_charged_leaf(stated, tree)
    members = columns["members"]
    return replace(
        jobs,
        leaf=tuple(leaf),
        user=tuple(user),
        job_class=tuple(job_class),
        required_level=tuple(required_level),
        cpus=_multiply_known(columns["cpus_per_member"], members),
        host_memory_gib=_multiply_known(columns["host_memory_gib_per_member"], members),
        **columns,
    )


def find_charged_leaf(request: PlacementRequest, tree: QueueTree | None) -> str:
    """Return the leaf queue that a request is charged to. Without a tree, this is the queue that it names."""
    if tree is not None:
        return tree.find_known_leaf(request)
    return request.queue or DEFAULT_QUEUE
