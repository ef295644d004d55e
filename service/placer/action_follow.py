"""The observation of actions that were sent: whether the board shows that they happened.

The scheduler's word is not enough where telemetry is fresh: GPUs of a job that has stopped must also show idle. If
they are busy, the action is contradicted. If telemetry is late, the action waits. The board's verdict on busy GPUs
needs the readings of a minute after the end of a job, and these arrive late. So 90 seconds must pass both in the
time of the boards, which late telemetry delays, and on the steady clock, which nobody sets.

An action that expired is followed for half an hour more: if it happens then, it is late.
"""

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import STOPPING, ActionKind, JobAction
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.machines.view import UNSURE, ClusterView, Hearing
from fleetcast.service.placer.actions import OCCUPANCY, SCHEDULER, TELEMETRY, ActionControl
from fleetcast.service.placer.view import ObservedFleet

LATE_MS = 1_800_000  # how long an action that expired is followed
VERDICT_MS = 90_000  # readings of a minute decide whether GPUs are busy, and the last reading may be 30 s old
BUSY = "the job ended, but telemetry shows its GPUs busy"


class Finding(Enum):
    """The finding of a board about an action."""

    NOT_YET = auto()
    SEEN_IN_TELEMETRY = auto()
    SEEN_BY_SCHEDULER = auto()
    CONTRADICTED = auto()


class ActionFollower:
    """The observer of the actions of one control. It looks at each board once."""

    def __init__(self, control: ActionControl, clock: Clock) -> None:
        self._control = control
        self._clock = clock
        self._board_ms = -1
        self._ended_ms: dict[str, tuple[int, int]] = {}  # action → board and steady ms when it first showed done
        self._expired: dict[str, int] = {}  # action → steady ms at which following ends
        self._read = 0  # the audit line of the last expiry read

    def follow_board(self, observed: ObservedFleet, now_ms: int) -> None:
        """Record what a board shows of the actions that were sent."""
        if observed.view.as_of_ms == self._board_ms:
            return
        self._board_ms = observed.view.as_of_ms
        followed = [record for record in self._control.list_open() if record.was_sent]
        ids = {record.action_id for record in followed}
        expired = self._list_expired(now_ms)
        self._ended_ms = {id_: ms for id_, ms in self._ended_ms.items() if id_ in ids or id_ in expired}
        for record in followed:
            if record.action.kind is ActionKind.GROW:
                self._follow_growth(record, observed, now_ms)
                continue
            finding = self._judge(record, observed)
            if finding is Finding.CONTRADICTED:
                self._control.record_contradiction(record.action_id, BUSY, now_ms)
            elif finding is not Finding.NOT_YET:
                self._record_seen(record, finding, now_ms)
        for record in expired.values():
            finding = self._judge(record, observed)
            if finding in (Finding.SEEN_IN_TELEMETRY, Finding.SEEN_BY_SCHEDULER):
                self._record_seen(record, finding, now_ms)

    def _record_seen(self, record: ActionRecord, finding: Finding, now_ms: int) -> None:
        evidence = TELEMETRY if finding is Finding.SEEN_IN_TELEMETRY else SCHEDULER
        if record.action.kind is ActionKind.GROW:
            evidence = OCCUPANCY
        self._control.record_seen(record.action_id, now_ms, evidence)

    def _judge(self, record: ActionRecord, observed: ObservedFleet) -> Finding:
        """Return what the present board shows of an action."""
        if not has_happened(record.action, observed):
            self._ended_ms.pop(record.action_id, None)
            return Finding.NOT_YET
        now = self._board_ms, self._clock.steady_ms()
        first = self._ended_ms.setdefault(record.action_id, now)
        if now[0] < first[0]:  # the clock was set back
            first = self._ended_ms[record.action_id] = now
        return judge_freed_gpus(record.action.ranks, observed.view, min(now[0] - first[0], now[1] - first[1]))

    def _list_expired(self, now_ms: int) -> dict[str, ActionRecord]:
        """Return the actions that expired lately, after they were sent."""
        steady_ms = self._clock.steady_ms()
        for record in self._control.list_expired_after(self._read):
            self._read = record.changed
            if record.was_sent:
                left_ms = min(LATE_MS, record.life[-1].time_ms + LATE_MS - now_ms)
                self._expired[record.action_id] = steady_ms + left_ms
        recent = [self._control.get_action(id_) for id_, until_ms in self._expired.items() if steady_ms < until_ms]
        found = {record.action_id: record for record in recent if record.state is ActionState.EXPIRED}
        self._expired = {id_: self._expired[id_] for id_ in found}
        return found

    def _follow_growth(self, record: ActionRecord, observed: ObservedFleet, now_ms: int) -> None:
        """Record that a gang holds its new GPUs, or that its attempt has ended. Telemetry cannot contradict either."""
        if has_happened(record.action, observed):
            self._control.record_seen(record.action_id, now_ms, OCCUPANCY)
        elif (record.action.job, record.action.attempt) not in observed.seen:
            self._control.withdraw(record.action_id, "its attempt ended before it grew", now_ms, has_ended=True)


def has_happened(action: JobAction, observed: ObservedFleet) -> bool:
    """Return whether occupancy shows that an action happened.

    A stop happened if the attempt no longer runs. Any other action happened if the job holds the action's places, and
    none of the GPUs that it gives back. A later attempt of a gang that gets other nodes may run elsewhere: its
    scheduler chose.
    """
    if action.kind is ActionKind.PREEMPT:
        return (action.job, action.attempt) not in observed.seen
    view = observed.view
    own = np.isin(view.holders, [at for at, name in enumerate(view.jobs) if name == action.job])  # of any attempt
    frees, places = mask_ranks(view, action.ranks), mask_ranks(view, action.places)
    wanted = len({(rank.node, gpu) for rank in action.places for gpu in rank.gpus})  # the view may lack some of them
    has_places = int((own & places).sum()) == wanted
    if action.kind not in STOPPING:
        return has_places
    is_later = action.kind is ActionKind.REPLACE and own.any() and (action.job, action.attempt) not in observed.seen
    return not (own & frees & ~places).any() and (is_later or has_places)


def judge_freed_gpus(ranks: tuple[RankPlacement, ...], view: ClusterView, since_ms: int) -> Finding:
    """Return what telemetry shows of freed GPUs, `since_ms` after the first board on which no job holds them.

    GPUs of lost nodes count as freed: nobody gets them.
    """
    gpus = mask_ranks(view, ranks)
    gpus[view.state == NodeState.LOST] = False
    if view.unknown_use is not None and (view.unknown_use & gpus).any():
        return Finding.CONTRADICTED
    rows = gpus.any(axis=1)
    hearing = None if view.hearing is None else view.hearing[rows]
    if hearing is None or view.unknown_use is None or (hearing == Hearing.UNCONFIRMED).all():
        return Finding.SEEN_BY_SCHEDULER
    if np.isin(hearing, UNSURE).any() or since_ms < VERDICT_MS:
        return Finding.NOT_YET
    return Finding.SEEN_IN_TELEMETRY


def mask_ranks(view: ClusterView, ranks: Sequence[RankPlacement]) -> NDArray[np.bool_]:
    """Return (n, g) whether a GPU is among those of ranks."""
    found = np.zeros(view.milli.shape, bool)
    for rank in ranks:
        row = view.inventory.row.get(rank.node, -1)
        if row >= 0:
            found[row, [gpu for gpu in rank.gpus if gpu < view.holders.shape[1]]] = True
    return found
