"""The clock for charges. A run is charged for the time that passed, even if the system clock is set.

An open charge moves with the system clock, so its age stays the time since the job was first seen. The
clock that stamps job events may have moved too, or not. So there are two possible run times. When the
placer receives the end of the job, it charges the run time that is closer to the age.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace

from fleetcast.fleet.clock import Clock, ClockWatch
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.queues.charges import Charge
from fleetcast.service.answers.jobs import EndedJobRow

logger = logging.getLogger(__name__)

STEP_MS = 5000  # smaller steps of the clock are added up until they are as large as this
MARK = "charges_moved"  # in the ledger: charge → by how many ms its times are later than its events state


class ChargedClock:
    """The clock for charges. It moves open charges and queue credits when the system clock is set."""

    def __init__(self, ledger: Ledger, clock: Clock, tick_ms: int) -> None:
        self._ledger = ledger
        self._clock = clock
        self._watch = ClockWatch(clock, STEP_MS)
        self._tick_ms = tick_ms
        self._due_ms = 0  # by how much the clock was set, and nothing has moved yet
        self._ahead_ms = self._least_ms = 0  # of the clock, since the start of this process
        self._since_board_ms = 0  # by how much it was set ahead since the last board
        self._board_ms: int | None = None  # the time of the last board that was followed
        self._queued_ms: dict[str, int] = {}  # request that waits → by how much the clock was set meanwhile

    def apply_clock_step(self) -> None:
        """Move open charges and credits if the system clock was set. The change is on disk when this returns."""
        self._due_ms += self._watch.pop_clock_step_ms()
        if not self._due_ms:
            return
        with self._ledger.transaction():
            self._ledger.restore_after_rollback(self)
            by_ms, self._due_ms = self._due_ms, 0
            self._move_times(by_ms)

    def _move_times(self, by_ms: int) -> None:
        """Move all times by a step of the clock. The caller holds the ledger's transaction."""
        self._ahead_ms += by_ms
        self._least_ms = min(self._least_ms, self._ahead_ms)
        self._since_board_ms += max(0, by_ms)
        self._board_ms = None if self._board_ms is None else self._board_ms + by_ms
        waiting = {entry.request.request_id for entry in self._ledger.list_queue_entries()}
        self._queued_ms = {name: self._queued_ms.get(name, 0) + by_ms for name in waiting}
        totals = self._ledger.charges
        charges, banks = list(totals.list_open_charges().values()), dict(totals.get_banks())
        logger.warning("the clock was set by %+.0f s: %d open charges keep their ages", by_ms / 1000, len(charges))
        totals.write_banks((name, replace(bank, as_of_ms=bank.as_of_ms + by_ms)) for name, bank in banks.items())
        for charge in charges:
            totals.replace_charge(_shift_charge(charge, by_ms))
        moved = self._read_shifts()
        self._save_shifts({row.charge_id: moved.get(str(row.charge_id), 0) + by_ms for row in charges})

    @property
    def ahead_ms(self) -> int:
        """By how many ms the clock was set since the start of this process."""
        return self._ahead_ms

    @property
    def queue_steps_ms(self) -> Mapping[str, int]:
        """Request that waits → by how many ms the clock was set meanwhile. Requests without a step are left out."""
        return self._queued_ms

    def adjust_queued_ms(self, request_id: str, queued_ms: int) -> int:
        """Return when a request began to wait, in Unix ms of the present clock.

        queued_ms: when it began to wait, by the clock at its arrival.
        """
        return queued_ms + self._queued_ms.get(request_id, 0)

    def adjust_start_ms(self, charge: Charge, started_ms: int, now_ms: int) -> int:
        """Return when a job started, in Unix ms of our clock.

        The result is the time in the start event, plus the time by which our clock may be ahead of the event's
        clock. Without this sum, the start could be too early in two cases: if our clock was set within the last
        tick, or if the event's clock was not set.
        """
        ahead_ms = self._ahead_ms - self._least_ms
        found_ms = started_ms if not ahead_ms else min(started_ms + ahead_ms, max(started_ms, now_ms))
        found_ms = min(found_ms, now_ms)
        return max(found_ms, charge.held_ms) if charge.request_id else found_ms

    def record_start(self, charge: Charge, stated_ms: int) -> None:
        """Record by how much a charge begins later than the start in the job's event."""
        by_ms = (charge.started_ms or stated_ms) - stated_ms
        if by_ms != self._read_shifts().get(
            str(charge.charge_id), 0
        ):  # a promise moved with the clock before its start
            self._save_shifts({**self._list_open_shifts(), charge.charge_id: by_ms})

    def adjust_end_ms(self, charge: Charge, ended_ms: int, now_ms: int) -> int:
        """Return when a run ended, in Unix ms of our clock. ended_ms: the time in the end event."""
        since_ms = charge.started_ms if charge.started_ms is not None else charge.held_ms
        passed_ms = max(0, now_ms - since_ms)
        moved_ms = self._read_shifts().get(str(charge.charge_id), 0)
        runs_ms = (ended_ms - since_ms, ended_ms - since_ms + moved_ms)  # by a clock that moved with ours, or stayed
        run_ms = min(runs_ms, key=lambda run_ms: (abs(passed_ms - run_ms), -run_ms))
        return max(since_ms + min(max(0, run_ms), passed_ms + self._tick_ms), charge.held_ms)

    def compute_unseen_end_ms(self, row: EndedJobRow) -> int:
        """Return the end of a run that began and ended after the last board, in Unix ms.

        If the clock was set ahead since that board, the step is subtracted. Otherwise it would lengthen the run.
        """
        return max(row.started_ms or 0, row.ended_ms - self._since_board_ms)

    def compute_stated_start_ms(self, charge: Charge) -> int:
        """Return when a charge began, in Unix ms of the clock that stamps the job's events."""
        started_ms, moved = charge.started_ms or charge.held_ms, self._read_shifts()
        return started_ms - moved.get(str(charge.charge_id), 0) if moved else started_ms  # asked for each job and board

    def record_board(self, now_ms: int) -> None:
        """Record that a board was applied. The jobs that run on it are charged at least until now."""
        self._board_ms, self._since_board_ms = now_ms, 0

    def get_last_board_ms(self, now_ms: int) -> int:
        """Return when the previous board was applied in Unix ms, or `now_ms` if there was none."""
        return now_ms if self._board_ms is None else min(self._board_ms, now_ms)

    def _read_shifts(self) -> Mapping[str, int]:
        found: Mapping[str, int] | None = self._ledger.find_mark(MARK)
        return found or {}

    def _list_open_shifts(self) -> dict[int, int]:
        """Return the id of each open charge → the ms by which it was moved."""
        is_open = {str(row.charge_id) for row in self._ledger.charges.list_open_charges().values()}
        return {int(name): by_ms for name, by_ms in self._read_shifts().items() if name in is_open}

    def _save_shifts(self, moved: Mapping[int, int]) -> None:
        self._ledger.record_marks(**{MARK: {str(number): by_ms for number, by_ms in moved.items() if by_ms}})


def _shift_charge(charge: Charge, by_ms: int) -> Charge:
    return replace(
        charge,
        queued_ms=None if charge.queued_ms is None else charge.queued_ms + by_ms,
        held_ms=charge.held_ms + by_ms,
        started_ms=None if charge.started_ms is None else charge.started_ms + by_ms,
    )
