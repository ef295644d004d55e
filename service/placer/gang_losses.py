"""The times since which running gangs lack nodes, and the replacement for which each gang last borrowed nodes.

The ledger stores them as a mark, so that they survive a restart and every change of the advice.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.nodes import NodeState
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.service.placer.view import ObservedFleet

GANG_LOSSES = "gang_losses"  # the ledger's mark
Attempt = tuple[str, int]


class GangLoss(msgspec.Struct, frozen=True):
    """The lost nodes of a running attempt.

    lost_ms: node → when it was lost. borrowing: the id of the attempt's last replacement by nodes of other jobs, or "".
    """

    job: str
    attempt: int
    lost_ms: dict[str, int] = {}
    borrowing: str = ""


class GangLosses:
    """The lost nodes of the gangs of one ledger. A job that lost all its nodes is left out."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._stored: Any = None
        self._losses: dict[Attempt, GangLoss] = {}
        self._ahead_ms = 0  # by how much the clock was set since this process began, at the last update

    def read(self) -> Mapping[Attempt, GangLoss]:
        """Return (job, attempt) → its lost nodes."""
        stored = self._ledger.find_mark(GANG_LOSSES)
        if stored is not self._stored:
            rows = msgspec.convert(stored or [], list[GangLoss])
            self._stored, self._losses = stored, {(row.job, row.attempt): row for row in rows}
        return self._losses

    def update(self, observed: ObservedFleet, now_ms: int, ahead_ms: int) -> None:
        """Record which gangs have lost nodes now. The caller holds the ledger's transaction.

        ahead_ms: by how much the clock was set since this process began. Earlier losses move with the clock. None is in
        the future, so that no patience becomes longer than usual.
        """
        self._ledger.restore_after_rollback(self)
        step_ms, self._ahead_ms = ahead_ms - self._ahead_ms, ahead_ms
        before, after = self.read(), dict[Attempt, GangLoss]()
        for attempt, nodes in _list_lost_nodes(observed).items():
            known = before.get(attempt, GangLoss(*attempt))
            lost_ms = {node: min(now_ms, known.lost_ms.get(node, now_ms - step_ms) + step_ms) for node in nodes}
            after[attempt] = msgspec.structs.replace(known, lost_ms=lost_ms)
        for attempt, known in before.items():
            if known.borrowing and attempt in observed.seen and attempt not in after:
                after[attempt] = msgspec.structs.replace(known, lost_ms={})
        self._store(after)

    def record_borrowing(self, job: str, attempt: int, action_id: str) -> None:
        """Record the replacement for which a gang borrows nodes. The caller holds the ledger's transaction."""
        known = self.read().get((job, attempt), GangLoss(job, attempt))
        self._store({**self.read(), (job, attempt): msgspec.structs.replace(known, borrowing=action_id)})

    def find_loss_ms(self, attempt: Attempt, nodes: Collection[str]) -> int | None:
        """Return when an attempt lost the first of these nodes, or None if it has all of them."""
        known = self.read().get(attempt)
        return None if known is None else min((ms for node, ms in known.lost_ms.items() if node in nodes), default=None)

    def find_borrowing(self, attempt: Attempt) -> str:
        """Return the id of an attempt's last replacement by nodes of other jobs, or ""."""
        known = self.read().get(attempt)
        return "" if known is None else known.borrowing

    def _store(self, losses: Mapping[Attempt, GangLoss]) -> None:
        if losses != self.read():
            self._ledger.record_marks(**{GANG_LOSSES: msgspec.to_builtins(list(losses.values()))})


def _list_lost_nodes(observed: ObservedFleet) -> dict[Attempt, list[str]]:
    """Return the lost nodes of each running attempt that still has GPUs on other nodes."""
    view, jobs = observed.view, observed.jobs
    found: dict[int, tuple[list[str], int]] = {}
    for at in np.flatnonzero(view.state == NodeState.LOST).tolist():
        rows, gpus = np.unique(view.holders[at], return_counts=True)
        for row, number in zip(rows.tolist(), gpus.tolist(), strict=True):
            if 0 <= row < len(jobs):
                nodes, lost = found.get(row, ([], 0))
                found[row] = [*nodes, view.topology.names[at]], lost + number
    return {
        (jobs.names[row], int(jobs.attempt[row])): nodes
        for row, (nodes, lost) in found.items()
        if lost < int(jobs.gpus[row])
    }
