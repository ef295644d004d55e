"""Charges made from boards. They open for running jobs, change with them, and close when jobs end.

The times are those of the job events.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.requests import WHOLE_GPU, PlacementRequest
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.charged import sum_held_gpus
from fleetcast.placement.queues.charges import Charge, HeldGpus
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.service.answers.jobs import EndedJobRow, GpuTimeRow, RunningJobRow
from fleetcast.service.board.board import Board
from fleetcast.service.placer.charged_clock import ChargedClock
from fleetcast.service.placer.running_jobs import find_charged_leaf
from fleetcast.service.placer.view import ObservedFleet

UNSEEN = "unseen"  # the outcome of what runs no more though nobody told of its end
_running_rows = msgspec.json.Decoder(list[RunningJobRow]).decode
_ended_rows = msgspec.json.Decoder(list[EndedJobRow]).decode
_gpu_time_rows = msgspec.json.Decoder(list[GpuTimeRow]).decode
SEEN_LEAST = 0.9  # of a run's GPU time that telemetry saw: the rest is taken to be like it


class ChargeWriter:
    """A writer that opens, changes and closes charges according to boards.

    `time`: the clock for charges.
    """

    def __init__(self, ledger: Ledger, clock: ChargedClock) -> None:
        self.ledger = ledger
        self.time = clock
        self._followed: Board | None = None
        self._gpu_time: dict[tuple[str, int], GpuTimeRow] = {}
        self._held_before: dict[tuple[str, int], dict[str, int]] = {}  # by attempt, as of the last board

    def apply_board(self, board: Board, observed: ObservedFleet, tree: QueueTree | None, now_ms: int) -> None:
        """Apply a board to the charges. Applying the same board again changes nothing."""
        self.time.apply_clock_step()
        if board is self._followed:
            return
        totals = self.ledger.charges
        changes: list[tuple[Callable[[Charge], Any], Charge]] = []
        running = _running_rows(board.raw("jobs.running"))
        ended = _ended_rows(board.raw("jobs.ended")) if "jobs.ended" in board else []
        seen = _gpu_time_rows(board.raw("jobs.gpu_time")) if "jobs.gpu_time" in board else []
        self._gpu_time = {(row.job, row.attempt): row for row in seen}
        for row in running:
            known = totals.list_open_charges().get((row.job, row.attempt))
            changes += self._find_run_changes(row, known, observed.view, tree, now_ms)
        for row in ended:
            known = totals.list_open_charges().get((row.job, row.attempt))
            if known is not None and (parts := self._split_charge_at_resize(known, row, observed.view, now_ms)):
                changes += [(totals.replace_charge, parts[0]), (self._make_reopener(row, now_ms), parts[1])]
            elif known is not None:
                changes.append((totals.replace_charge, self._close_at_end(known, row, now_ms)))
            elif row.started_ms is not None and not totals.has_closed_charge(row.job, row.attempt):
                new, ended_ms = (
                    self._make_charge(row, observed.view, tree, row.started_ms),
                    self.time.compute_unseen_end_ms(row),
                )
                row = msgspec.structs.replace(row, ended_ms=ended_ms)
                changes.append((self._make_closed_charge_writer(row, now_ms), new))
        changes += self._close_unlisted_charges(running, ended, observed, now_ms)
        if changes:
            with self.ledger.transaction():
                for write, charge in changes:
                    write(charge)
        self._followed = board
        self._held_before = {(row.job, row.attempt): row.held for row in running}
        self.time.record_board(now_ms)

    def _find_run_changes(
        self, row: RunningJobRow, known: Charge | None, view: ClusterView, tree: QueueTree | None, now_ms: int
    ) -> list[tuple[Callable[[Charge], Any], Charge]]:
        totals = self.ledger.charges
        if known is None:
            started_ms = row.started_ms or now_ms
            return [(self._make_opener(started_ms, now_ms), self._make_charge(row, view, tree, started_ms))]
        if parts := self._split_charge_at_resize(known, row, view, now_ms):
            return [(totals.replace_charge, parts[0]), (self._make_reopener(row, now_ms), parts[1])]
        is_news = row.held != self._held_before.get((row.job, row.attempt))
        if known.started_ms is not None and row.held and is_news and not row.displaced:
            return self._find_occupancy_changes(known, self._find_held_gpus(row, view), now_ms)
        if known.started_ms is None and row.started_ms is not None:
            held = (
                self._find_held_gpus(row, view) if row.held else known.held
            )  # what it was given is not always what it took
            begun = replace(known, started_ms=self.time.adjust_start_ms(known, row.started_ms, now_ms), held=held)
            self.time.record_start(begun, row.started_ms)
            return [(totals.replace_charge, begun)]
        return []

    def _make_opener(self, stated_ms: int, now_ms: int) -> Callable[[Charge], Any]:
        """Return a function that opens a job's charge. stated_ms: the start in the job's events, in Unix ms."""

        def write(charge: Charge) -> None:
            if charge.started_ms is not None:
                started_ms = self.time.adjust_start_ms(replace(charge, request_id=""), charge.started_ms, now_ms)
                charge = replace(charge, started_ms=started_ms, held_ms=started_ms)
            self.time.record_start(self.ledger.charges.open_charge(charge), stated_ms)

        return write

    def _make_reopener(self, row: RunningJobRow, now_ms: int) -> Callable[[Charge], Any]:
        """Return a function that opens a new charge for a resized job. If the job has ended, it also closes it."""

        def write(charge: Charge) -> None:
            opened = self.ledger.charges.open_charge(charge)
            self.time.record_start(opened, row.placed_ms or charge.held_ms)
            if isinstance(row, EndedJobRow):
                self.ledger.charges.replace_charge(self._close_at_end(opened, row, now_ms))

        return write

    def _split_charge_at_resize(
        self, known: Charge, row: RunningJobRow, view: ClusterView, now_ms: int
    ) -> tuple[Charge, Charge] | None:
        """Return two charges: the old one, closed at the job's last resize, and one for the GPUs since then.

        Returns None without a resize.
        """
        if (
            known.started_ms is None
            or row.placed_ms is None
            or row.placed_ms <= self.time.compute_stated_start_ms(known)
        ):
            return None
        since_ms = self.time.adjust_end_ms(known, row.placed_ms, now_ms)
        new = replace(
            known, held=self._find_held_gpus(row, view), held_ms=since_ms, started_ms=since_ms, expected_s=None
        )
        return replace(known, ended_ms=since_ms, outcome="resized"), replace(new, queued_ms=None)

    def _find_occupancy_changes(
        self, known: Charge, held: tuple[HeldGpus, ...], now_ms: int
    ) -> list[tuple[Callable[[Charge], Any], Charge]]:
        """Return the changes to a charge whose job now holds another number of GPUs.

        Returns [] if the number is the same. If a job's events name no GPUs, the number grows when telemetry
        shows more busy GPUs. Displaced jobs are left out: the end of such a job is reported late, and its charge
        then closes at the time of that end.
        """
        gpus = math.fsum(row.gpus for row in held)
        if math.isclose(gpus, known.gpus, abs_tol=1e-6):
            return []
        since_ms = max(now_ms, known.held_ms)
        ahead_ms = (known.started_ms or 0) - self.time.compute_stated_start_ms(known)
        new = replace(known, held=held, held_ms=since_ms, started_ms=since_ms, expected_s=None, queued_ms=None)

        def reopen(charge: Charge) -> None:
            self.time.record_start(self.ledger.charges.open_charge(charge), since_ms - ahead_ms)

        return [
            (self.ledger.charges.replace_charge, replace(known, ended_ms=since_ms, outcome="resized")),
            (reopen, new),
        ]

    def _find_held_gpus(self, row: RunningJobRow, view: ClusterView) -> tuple[HeldGpus, ...]:
        """Return the GPUs that a job holds according to its events.

        If the events state no share of a GPU, the share comes from the request that placed the job.
        """
        request = self.ledger.find_request(row.job, row.attempt)
        return list_job_gpus(row, view, request.milli if request is not None else WHOLE_GPU)

    def _make_charge(self, row: RunningJobRow, view: ClusterView, tree: QueueTree | None, held_ms: int) -> Charge:
        """Make a charge for an attempt that our placer did not place."""
        request = self.ledger.find_request(row.job, row.attempt)
        if request is None:
            request = PlacementRequest(request_id="", queue=row.queue, user=row.user)
        leaf = find_charged_leaf(request, tree)
        return Charge(
            charge_id=0,
            request_id=request.request_id,
            job=row.job,
            attempt=row.attempt,
            leaf=leaf,
            user=request.user or row.user,
            class_=row.class_,
            held=list_job_gpus(row, view, request.milli),
            expected_s=None,
            queued_ms=None,
            held_ms=held_ms,
            started_ms=row.started_ms,
        )

    def _make_closed_charge_writer(self, row: EndedJobRow, now_ms: int) -> Callable[[Charge], Any]:
        def write(charge: Charge) -> None:
            self.ledger.charges.replace_charge(self._close_at_end(self.ledger.charges.open_charge(charge), row, now_ms))

        return write

    def _close_at_end(self, charge: Charge, row: EndedJobRow, now_ms: int) -> Charge:
        if charge.started_ms is None and row.started_ms is not None:
            charge = replace(charge, started_ms=self.time.adjust_start_ms(charge, row.started_ms, now_ms))
            self.time.record_start(charge, row.started_ms)
        closed = _close_charge(charge, row, self.time.adjust_end_ms(charge, row.ended_ms, now_ms))
        return replace(closed, used_gpu_s=self._compute_used_gpu_s(closed, closed.ended_ms or 0))

    def update_charge_use(self, charge: Charge, until_ms: int) -> Charge:
        """Return an open charge with the use that telemetry saw until `until_ms`.

        A closed charge is returned unchanged.
        """
        return (
            charge
            if charge.ended_ms is not None
            else replace(charge, used_gpu_s=self._compute_used_gpu_s(charge, until_ms))
        )

    def _compute_used_gpu_s(self, charge: Charge, until_ms: int) -> float | None:
        """Return the GPU-seconds until `until_ms` in which the charge's GPUs were busy.

        Returns None if telemetry covers too little of that time.
        """
        row = self._gpu_time.get((charge.job, charge.attempt))
        held = charge.compute_granted_gpu_s(0, until_ms)
        if row is None or held <= 0 or row.seen_gpu_s < SEEN_LEAST * held:
            return None
        return held * min(1.0, row.used_gpu_s / row.seen_gpu_s)

    def _close_unlisted_charges(
        self, running: Iterable[RunningJobRow], ended: Iterable[EndedJobRow], observed: ObservedFleet, now_ms: int
    ) -> list[tuple[Callable[[Charge], Any], Charge]]:
        """Return the changes that close charges whose attempts no longer appear in a board or a promise."""
        alive = {(row.job, row.attempt) for row in (*running, *ended)}
        alive |= {(intent.job, intent.attempt) for intent in self.ledger.list_active_intents()}
        totals = self.ledger.charges
        return [
            (
                totals.replace_charge,
                replace(charge, ended_ms=max(self.time.get_last_board_ms(now_ms), charge.held_ms), outcome=UNSEEN),
            )
            for key, charge in totals.list_open_charges().items()
            if key not in alive and key not in observed.seen
        ]


def _close_charge(charge: Charge, row: EndedJobRow, ended_ms: int) -> Charge:
    """Return the closed charge of an ended attempt. ended_ms: when the charge ends, in Unix ms.

    A failed attempt has lost the work since its last checkpoint. Without a checkpoint, it has lost all work.
    """
    lost, started_ms = None, charge.started_ms
    if row.outcome == "failed" and started_ms is not None and row.started_ms is not None:
        at_risk_ms = max(0, row.ended_ms - max(row.started_ms, row.checkpoint_ms or 0))
        lost = charge.gpus * min(at_risk_ms, max(0, ended_ms - started_ms)) / 1000
    return replace(charge, ended_ms=ended_ms, outcome=row.outcome or UNSEEN, lost_gpu_s=lost)


def list_job_gpus(row: RunningJobRow, view: ClusterView, share: int) -> tuple[HeldGpus, ...]:
    """Return the GPUs that a job holds according to its events, summed by pool and model.

    A node that the view lacks has no pool. ``share``: the part of each GPU that the request asked for, in
    thousandths. If the events state no share, each of their GPUs counts as `share`.
    """
    whole = sum(row.held.values()) == WHOLE_GPU * row.gpus
    scale = share / WHOLE_GPU if whole else 1.0
    nodes, known = view.topology.nodes, view.inventory.row
    found = [(nodes[known[node]] if node in known else None, milli) for node, milli in row.held.items()]
    if not row.held:  # a board of an earlier version
        return _count_gpus_by_holder(row, view)
    return sum_held_gpus(
        (node.pool if node else "", node.gpu_model if node else "", scale * milli / WHOLE_GPU) for node, milli in found
    )


def _count_gpus_by_holder(row: RunningJobRow, view: ClusterView) -> tuple[HeldGpus, ...]:
    """Count the GPUs that a job holds, from a board that names only the holder of each GPU.

    A part of a GPU counts as a whole one.
    """
    if row.job in view.jobs:
        counts = np.count_nonzero(view.holders == view.jobs.index(row.job), axis=1)
        nodes = view.topology.nodes
        found = [(nodes[at].pool, nodes[at].gpu_model, float(counts[at])) for at in np.flatnonzero(counts).tolist()]
        if sum(gpus for _, _, gpus in found) == row.gpus:
            return sum_held_gpus(found)
    return sum_held_gpus([("", "", float(row.gpus))])
