"""What the placer answers about queues."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from msgspec import structs

from fleet.errors import RequestError, StaleError
from fleet.requests import PlacementRequest
from placement.charges import Charge
from placement.queue import Waiting
from placement.queues_file import installed_gpus
from placement.showback import By, ChargeSum, sums
from placement.start_time import Blocker
from placement.tree import Prices
from placement.turns import TreeTurns
from service.answers.queues import Charges, QueueChange, QueuesAnswer, WhyWaiting
from service.placer.queue_answers import change_of, charges_answer, queues_answer
from service.placer.queue_week import DAY_MS, KEPT_MS, WEEK_MS, QueueWeek, week_of
from service.placer.service import PlacementService
from service.placer.why_waiting import why_waiting


class QueueDesk:
    """Answers from what the service knows."""

    def __init__(self, service: PlacementService) -> None:
        self._service = service
        self._week: tuple[int, QueueWeek] | None = None  # as of ms
        self._day: tuple[int, dict[str, ChargeSum]] | None = None

    def queues(self, below: Sequence[str] = ()) -> QueuesAnswer:
        """How the queues stand now; of `below` alone, where it names any. StaleError without a board."""
        service = self._service
        observed, now_ms, file = service.observed(), service.clock.now_ms(), service.queues.file
        turns = service.queues.turns(observed)
        if file.tree is None or not isinstance(turns, TreeTurns):
            return QueuesAnswer(now_ms, "", (), notes=["no file of queues is configured: all wait in one line"])
        waiting = [Waiting(entry.request, entry.queued_ms) for entry in service.ledger.queued()]
        opened, banked = service.ledger.charges.opened().values(), service.queues.banked(now_ms)
        week = self._seven_days(now_ms)
        refused = "" if below else file.refused
        found = queues_answer(file.tree, turns, waiting, opened, week, banked, now_ms, file.generation, refused, below)
        more = [] if below else file.notes(installed_gpus(observed.view.topology.nodes))
        return structs.replace(found, notes=[*found.notes, *more])

    def _seven_days(self, now_ms: int) -> QueueWeek:
        """What changes slowly, and takes long to read, is read once a minute."""
        if self._week is None or not 0 <= now_ms - self._week[0] < KEPT_MS:
            charges = self._service.ledger.charges.between(now_ms - WEEK_MS, now_ms + 1)
            self._week = now_ms, week_of(charges, now_ms)
        return self._week[1]

    def day(self) -> dict[str, ChargeSum]:
        """queue → what the last day's charges add up to, read once a minute."""
        service, now_ms = self._service, self._service.clock.now_ms()
        if self._day is None or not 0 <= now_ms - self._day[0] < KEPT_MS:
            charging, tree = service.queues.charging, service.queues.tree
            charges = service.ledger.charges.between(now_ms - DAY_MS, now_ms)
            told = [charging.told(row, now_ms) for row in charges]
            self._day = now_ms, sums(told, "queue", now_ms - DAY_MS, now_ms, tree.prices if tree else Prices())
        return self._day[1]

    def put(self, text: str, generation: str, caller: str, dry_run: bool) -> QueueChange:
        """Serve another file, or say what it would change. RequestError; ConflictError for another generation."""
        service, file = self._service, self._service.queues.file
        before, capacity = file.tree, {}
        with suppress(StaleError):
            capacity = installed_gpus(service.observed().view.topology.nodes)
        if dry_run:
            return change_of(before, file.check(text, generation, capacity), False)
        service.watch.refuse()
        service.queues.settle_banks()
        tree = file.put(text, generation, service.clock.now_ms(), caller, capacity)
        service.queues.settle_banks()
        return change_of(before, tree, True)

    def why(self, request_id: str, blockers: Callable[[PlacementRequest], Sequence[Blocker]]) -> WhyWaiting:
        """The ladder of a request that waits. UnknownEntity for one that does not."""
        service, now_ms = self._service, self._service.clock.now_ms()
        order = service.in_order(service.ledger.queued())
        try:
            turns = service.queues.turns(service.observed())
        except StaleError:
            turns = service.turns
        wait, start_ms = service.waits.get(request_id), service.start_ms(request_id, now_ms)
        return why_waiting(request_id, order, wait, turns, start_ms, blockers, service.stalled, now_ms)

    def charges(
        self, by: By, from_ms: int | None, to_ms: int | None, own: Callable[[Iterable[Charge]], list[Charge]] = list
    ) -> Charges:
        """Charges of a time, the last week where none is given. own: drops those that the caller may not see."""
        service, now_ms = self._service, self._service.clock.now_ms()
        with suppress(StaleError):
            service.observed()
        to_ms = now_ms if to_ms is None else to_ms
        from_ms = max(0, to_ms - WEEK_MS) if from_ms is None else from_ms
        if from_ms >= to_ms:
            raise RequestError(f"from is {from_ms}, not before to, {to_ms}", "from")
        tree = service.queues.tree
        until_ms = min(to_ms, now_ms)
        charges = own(service.ledger.charges.between(from_ms, to_ms))
        found = [service.queues.charging.told(row, until_ms) for row in charges]
        return charges_answer(found, by, from_ms, to_ms, tree.prices if tree else Prices(), now_ms)
