"""The placer's answers about queues, and the replacement of the queue file over HTTP."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from msgspec import structs

from fleetcast.fleet.errors import RequestError, StaleError
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ahead.start_time import Blocker
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.charges import Charge
from fleetcast.placement.queues.queues_file import count_installed_gpus
from fleetcast.placement.queues.showback import By, ChargeSum, sum_charges
from fleetcast.placement.queues.tree import Prices
from fleetcast.service.answers.queues import Charges, QueueChange, QueuesAnswer, WhyWaiting
from fleetcast.service.placer.queue_answers import compare_queue_trees, make_charges_answer, make_queues_answer
from fleetcast.service.placer.queue_file import ServedText, compute_file_digest
from fleetcast.service.placer.queue_week import DAY_MS, RETENTION_MS, WEEK_MS, QueueWeek, summarise_queue_week
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.why_waiting import explain_wait

READ_S = 30.0  # wall; reading the largest file takes about a second of CPU


class QueueAdmin:
    """The part of the placer that answers requests about queues and replaces the queue file."""

    def __init__(self, service: PlacementService) -> None:
        self._service = service
        self._week: tuple[int, QueueWeek] | None = None  # as of ms
        self._putting = asyncio.Lock()
        self._day: tuple[int, dict[str, ChargeSum]] | None = None

    def answer_queues(self, below: Sequence[str] = ()) -> QueuesAnswer:
        """Return the present state of the queues.

        below: return only these queues and those below them. If empty, return all queues. Raises StaleError
        without a board.
        """
        service = self._service
        observed, now_ms, file = service.view.observe_fleet(), service.clock.now_ms(), service.queues.file
        turns = service.queues.make_turns(observed)
        if file.tree is None or not isinstance(turns, TreeTurns):
            return QueuesAnswer(now_ms, "", (), notes=["no file of queues is configured: all wait in one line"])
        waiting = service.backlog.list_waiting_jobs()
        opened, banked = service.ledger.charges.list_open_charges().values(), service.queues.read_banked_gpu_s(now_ms)
        week = self._read_week(now_ms)
        refused = "" if below else file.refused
        found = make_queues_answer(
            file.tree, turns, waiting, opened, week, banked, now_ms, file.generation, refused, below
        )
        more = [] if below else file.list_faults(count_installed_gpus(observed.view.topology.nodes))
        return structs.replace(found, notes=[*found.notes, *more])

    def _read_week(self, now_ms: int) -> QueueWeek:
        """Return the shares and waits of the last seven days. They are computed at most once a minute.

        They change slowly, and reading the charges takes long.
        """
        if self._week is None or not 0 <= now_ms - self._week[0] < RETENTION_MS:
            charges = self._service.ledger.charges.read_charges_between(now_ms - WEEK_MS, now_ms + 1)
            self._week = now_ms, summarise_queue_week(charges, now_ms)
        return self._week[1]

    def read_day(self) -> dict[str, ChargeSum]:
        """Return queue → the sum of its charges in the last day. The sums are computed at most once a minute."""
        service, now_ms = self._service, self._service.clock.now_ms()
        if self._day is None or not 0 <= now_ms - self._day[0] < RETENTION_MS:
            charging, tree = service.queues.charging, service.queues.tree
            charges = service.ledger.charges.read_charges_between(now_ms - DAY_MS, now_ms)
            charged = [charging.update_charge_use(row, now_ms) for row in charges]
            self._day = (
                now_ms,
                sum_charges(charged, "queue", now_ms - DAY_MS, now_ms, tree.prices if tree else Prices()),
            )
        return self._day[1]

    async def put_file(self, text: str, generation: str, caller: str, dry_run: bool) -> QueueChange:
        """Replace the queue file, and return what changes. With `dry_run`, only return what would change.

        A thread checks one file at a time. Raises RequestError for a bad file, and ConflictError if the
        generation does not match.
        """
        async with self._putting:
            return await self._check_and_serve(text, generation, caller, dry_run)

    async def _check_and_serve(self, text: str, generation: str, caller: str, dry_run: bool) -> QueueChange:
        service, file = self._service, self._service.queues.file
        capacity: dict[str, float] = {}
        with suppress(StaleError):
            capacity = count_installed_gpus(service.view.observe_fleet().view.topology.nodes)
        if not dry_run:
            service.view.watch.raise_if_in_doubt()
        waiting = [entry.request for entry in service.ledger.list_queue_entries()]
        try:
            found, change = await self._check_in_thread(text, generation, capacity, waiting)
        except RequestError as error:
            if not dry_run:
                file.audit_refusal(service.clock.now_ms(), caller, compute_file_digest(text), str(error))
            raise
        if dry_run:
            return change
        service.view.watch.raise_if_in_doubt()
        service.queues.update_banks()
        file.write_and_serve(found, generation, service.clock.now_ms(), caller)
        service.queues.update_banks()
        return structs.replace(change, applied=True)

    async def _check_in_thread(
        self, text: str, generation: str, capacity: dict[str, float], waiting: Sequence[PlacementRequest]
    ) -> tuple[ServedText, QueueChange]:
        """Check the text of a queue file in a thread. Returns the text with its tree, and what it changes.

        Raises StaleError if the check takes longer than READ_S.
        """
        file = self._service.queues.file
        before = file.tree

        def check_text() -> tuple[ServedText, QueueChange]:
            found = file.check_text(text, generation, capacity)
            return found, compare_queue_trees(before, found.tree, waiting, False)

        try:
            return await asyncio.wait_for(asyncio.to_thread(check_text), READ_S)
        except TimeoutError:
            raise StaleError(f"the file was not read within {READ_S:g} s: send it again later") from None

    def answer_why(self, request_id: str, blockers: Callable[[PlacementRequest], Sequence[Blocker]]) -> WhyWaiting:
        """Return the reasons why a request waits. Raises UnknownEntity if the request does not wait.

        blockers: returns the jobs that a request waits for.
        """
        service, now_ms = self._service, self._service.clock.now_ms()
        order = service.backlog.sort_by_turn(service.ledger.list_queue_entries())
        try:
            turns = service.queues.make_turns(service.view.observe_fleet())
        except StaleError:
            turns = service.backlog.turns
        wait, start_ms = service.backlog.waits.get(request_id), service.backlog.find_start_ms(request_id, now_ms)
        waits = order, service.backlog.turns, wait, turns, start_ms, blockers
        backlog = service.backlog
        state = backlog.stalled, now_ms, backlog.start_notes, service.advisor.describe_proposal(request_id)
        return explain_wait(request_id, *waits, *state)

    def answer_charges(
        self, by: By, from_ms: int | None, to_ms: int | None, own: Callable[[Iterable[Charge]], list[Charge]] = list
    ) -> Charges:
        """Return the sums of charges between two times. By default, these are the last seven days.

        own: removes charges that the caller may not see. Raises RequestError if `from_ms` is not before
        `to_ms`.
        """
        service, now_ms = self._service, self._service.clock.now_ms()
        with suppress(StaleError):
            service.view.observe_fleet()
        to_ms = now_ms if to_ms is None else to_ms
        from_ms = max(0, to_ms - WEEK_MS) if from_ms is None else from_ms
        if from_ms >= to_ms:
            raise RequestError(f"from is {from_ms}, not before to, {to_ms}", "from")
        tree = service.queues.tree
        until_ms = min(to_ms, now_ms)
        charges = own(service.ledger.charges.read_charges_between(from_ms, to_ms))
        found = [service.queues.charging.update_charge_use(row, until_ms) for row in charges]
        return make_charges_answer(found, by, from_ms, to_ms, tree.prices if tree else Prices(), now_ms)
