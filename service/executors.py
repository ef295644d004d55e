"""The host of executors, which sends the placer's actions to the systems that carry them out.

    sent action → Executor.send → accept or refuse        accepted action → Executor.follow → refuse, if it fails

The placer's ledger is the only memory. A process that was killed between `send` and the reply sends again, and an
executor does nothing twice. Without a fresh board nothing new is sent. Actions that were sent are still followed.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.printable import escape_unprintable
from fleetcast.placement.actions.life import ActionState
from fleetcast.schedulers.executor import ActionOrder, SendOutcome
from fleetcast.service.actions_link import ActionsLink, select_rows
from fleetcast.service.adapter_records import AdapterAuditLine, AdapterRecords, AdapterStatus
from fleetcast.service.answers.actions import ActionRow
from fleetcast.service.config import Config
from fleetcast.service.disk_errors import log_disk_errors
from fleetcast.service.doors import ConfiguredExecutor, open_executors

logger = logging.getLogger(__name__)

PERIOD_S = 0.5  # wall; between two readings of the placer's actions
IDLE_FOLLOW_S = 10.0  # wall; between two calls of `follow` while no action is open
CALL_S = 30.0  # wall; for one call of an executor
LONGEST_PAUSE_S = 60.0
MINUTE_S = 60.0
ONLY_OBSERVES = "the executor only observes"
OBSERVED = "observed"
T = TypeVar("T")


class ExecutorWorker:
    """One executor, which receives its actions step by step. `status`: its state, for lists and metrics."""

    def __init__(
        self, opened: ConfiguredExecutor, per_minute: int, records: AdapterRecords, clock: Clock, link: ActionsLink
    ) -> None:
        self.status = AdapterStatus(name=opened.name, use=opened.row.use, mode=opened.row.mode, kind="executor")
        self.task: asyncio.Task[None] | None = None
        self._executor, self._per_minute = opened.executor, per_minute
        self._records, self._clock, self._link = records, clock, link
        self._sent_s: deque[float] = deque()  # when actions were sent within the last minute
        self._failures, self._until_s, self._follow_s = 0, 0.0, 0.0
        self._unanswered: set[str] = set()  # open actions about which it did not answer
        self._lines = 0

    async def step(self, rows: Sequence[ActionRow], *, may_send: bool) -> None:
        """Send new actions, and follow those that were sent. An executor that does not answer gets a pause.

        The next step then sends the other actions first, because the answer may be missing for one job alone.
        may_send: whether new actions may be sent.
        """
        now_s = asyncio.get_running_loop().time()
        self.status.withdrawn = self._records.is_withdrawn(self.status.name)
        if now_s < self._until_s:
            return
        failure = ""
        self._unanswered.intersection_update(row.action_id for row in rows)
        accepted = [row for row in rows if row.state is ActionState.ACCEPTED]
        self.status.held_back = 0
        for row in sorted(rows, key=lambda row: row.action_id in self._unanswered):
            try:
                if row.state is ActionState.SENT and await self._send(row, may_send):
                    accepted.append(row)
            except SourceError as error:
                failure = str(error)
                self._unanswered.add(row.action_id)
                break
        try:
            if accepted or now_s >= self._follow_s:
                self._follow_s = now_s + IDLE_FOLLOW_S
                await self._follow(accepted)
        except SourceError as error:
            failure = failure or str(error)
        self.status.ours = len(accepted)
        if failure:
            self._record_failure(failure)
        else:
            self._failures, self.status.error = 0, ""

    def _record_failure(self, error: str) -> None:
        if error != self.status.error:
            logger.warning("executor %s: %s; trying again", self.status.name, error)
        self.status.error = error
        self.status.errors += 1
        self._until_s = asyncio.get_running_loop().time() + min(2.0**self._failures, LONGEST_PAUSE_S)
        self._failures += 1

    async def _send(self, row: ActionRow, may_send: bool) -> bool:
        """Send one action, unless it must wait. Returns whether the executor carries it out.

        Raises SourceError if the executor or the placer does not answer.
        """
        why = self._explain_refusal(row)
        if why:
            self.status.wishes += 1
            self._record_line(row, OBSERVED if why == ONLY_OBSERVES else SendOutcome.REFUSED, why)
            await self._link.refuse(row, why)
            return False
        if not may_send or not self._count_sending():
            self.status.held_back += 1
            return False
        self.status.wishes += 1
        reply = await _call(self._executor.send(make_order(row)))
        self.status.seen_ms = self._clock.now_ms()
        self._record_line(row, reply.outcome, reply.why)
        if reply.outcome is SendOutcome.UNREACHABLE:
            raise SourceError(reply.why or "no answer")
        if reply.outcome is SendOutcome.REFUSED:
            self.status.errors += 1
            await self._link.refuse(row, reply.why)
            return False
        self.status.writes += 1
        await self._link.accept(row)
        return True

    def _explain_refusal(self, row: ActionRow) -> str:
        """Return why this executor gets no such action, or "" if it does."""
        if self.status.mode != "write":
            return ONLY_OBSERVES
        if self.status.withdrawn:
            return f"the executor {self.status.name} is withdrawn"
        return self._executor.explain_inability(row.kind, row.job)

    def _count_sending(self) -> bool:
        """Count one more sending, if the limit of this minute allows it. Returns whether it does."""
        now_s = asyncio.get_running_loop().time()
        while self._sent_s and self._sent_s[0] <= now_s - MINUTE_S:
            self._sent_s.popleft()
        if len(self._sent_s) >= self._per_minute:
            return False
        self._sent_s.append(now_s)
        return True

    async def _follow(self, rows: Sequence[ActionRow]) -> None:
        """Let the executor continue its actions. Raises SourceError as `_send` does."""
        replies = await _call(self._executor.follow([make_order(row) for row in rows]))
        self.status.seen_ms = self._clock.now_ms()
        unanswered = ""
        for row, reply in zip(rows, replies, strict=True):
            if reply.outcome is SendOutcome.REFUSED:
                self.status.errors += 1
                self._record_line(row, reply.outcome, reply.why)
                await self._link.refuse(row, reply.why)
            elif reply.outcome is SendOutcome.UNREACHABLE:
                unanswered = reply.why or "no answer"
        if unanswered:
            raise SourceError(unanswered)

    def _record_line(self, row: ActionRow, outcome: str, why: str) -> None:
        """Write one line of the audit. Without a reason, the line has the sentence of the action."""
        now_ms = self._clock.now_ms()
        self._lines += 1
        self.status.last = AdapterAuditLine(
            time_ms=now_ms,
            decision=f"{self.status.name}-{now_ms}-{self._lines}",
            adapter=self.status.name,
            mode=self.status.mode,
            board=None,
            key=row.job,
            field=row.kind,
            seen=None,
            value=row.action_id,
            why=escape_unprintable(why or row.sentence),
            outcome=str(outcome),
        )
        with log_disk_errors("write the audit of an executor", "the next line is tried again"):
            self._records.append_lines([self.status.last])

    async def close(self) -> None:
        await self._executor.close()


class ExecutorHost:
    """All configured executors. Each has its own task, so one that hangs delays no other.

    wake: called in the event loop when a status has changed.
    """

    def __init__(self, config: Config, clock: Clock, records: AdapterRecords, wake: Callable[[], None]) -> None:
        limits = config.adapters
        self._link = ActionsLink(config)
        self._workers = [
            ExecutorWorker(opened, limits.writes_per_minute, records, clock, self._link)
            for opened in open_executors(limits)
        ]
        self._wake = wake
        self._may_send = self._has_change = False
        self._reported = b""
        self._task: asyncio.Task[None] | None = None

    def run(self, *, may_send: bool) -> None:
        """Begin to poll the placer's actions, if any executor is configured. A repeated call sets `may_send`.

        may_send: whether new actions may be sent. It needs a running event loop.
        """
        self._may_send = may_send
        if self._workers and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._poll_actions())

    def list_statuses(self) -> list[AdapterStatus]:
        return [worker.status for worker in self._workers]

    def pop_change(self) -> bool:
        """Return whether a step has ended since the last call. Raises what a step raised: that is a bug."""
        if self._task is not None and self._task.done():
            self._task.result()
        changed, self._has_change = self._has_change, False
        return changed

    async def close(self) -> None:
        """Stop all tasks, and close all connections. A step that is cut off is repeated by the next process."""
        tasks = [task for task in (self._task, *(worker.task for worker in self._workers)) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for worker in self._workers:
            await worker.close()
        await self._link.close()

    async def _poll_actions(self) -> None:
        while True:
            idle = self._list_idle_workers()
            try:
                rows = await self._link.read_sent_actions() if idle else []
            except SourceError as error:
                for worker in idle:
                    worker.status.error = str(error)
            else:
                for worker in idle:
                    own = select_rows(rows, worker.status.name)
                    worker.task = asyncio.ensure_future(worker.step(own, may_send=self._may_send))
            statuses = msgspec.json.encode(self.list_statuses())
            if statuses != self._reported:
                self._reported, self._has_change = statuses, True
                self._wake()
            await asyncio.sleep(PERIOD_S)

    def _list_idle_workers(self) -> list[ExecutorWorker]:
        """Return the executors whose last step has ended. Only actions that are read later are new to them."""
        for worker in self._workers:
            if worker.task is not None and worker.task.done():
                worker.task.result()
                worker.task = None
        return [worker for worker in self._workers if worker.task is None]


async def _call(work: Awaitable[T]) -> T:
    """Await a call of an executor. Raises SourceError after CALL_S."""
    try:
        return await asyncio.wait_for(work, CALL_S)
    except TimeoutError:
        raise SourceError(f"no answer within {CALL_S:g} s") from None


def make_order(row: ActionRow) -> ActionOrder:
    """Return the order for an executor, from an action of the placer."""
    return ActionOrder(
        action_id=row.action_id,
        kind=row.kind.value,
        job=row.job,
        attempt=row.attempt,
        gpus=row.gpus,
        ranks=row.ranks,
        places=row.places,
        payer=row.payer,
        grace_s=row.grace_s,
        by_ms=row.by_ms,
    )
