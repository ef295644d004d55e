"""What a caller who is bound to queues is shown: what is theirs. Of others there is nothing, not even a name."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs
from starlette.requests import Request

from fleet.errors import UnknownEntity
from fleet.requests import PlacementRequest
from placement.charges import Charge
from placement.ledger import Committed
from placement.standing import amounts_of
from placement.tree import ANY
from placement.words import count_of
from service.answers.placements import Queue, QueueRow
from service.answers.queues import WhyStep, WhyWaiting
from service.http.access import viewer_of
from service.placer.charging import leaf_name
from service.placer.service import PlacementService

OWN_STEPS = frozenset({"gone", "limit", "stale", "start"})  # their sentences name nobody else
OF_OTHERS = frozenset({"window", "ends"})  # theirs name nothing else


class OwnQueues:
    """A caller's view of a placer. It changes nothing for one who is not bound."""

    def __init__(self, request: Request, service: PlacementService) -> None:
        self.caller = viewer_of(request)
        self._service = service

    @property
    def is_bound(self) -> bool:
        return bool(self.caller.queues)

    def has(self, request: PlacementRequest | None) -> bool:
        """Whether a request is his to read; one that nobody knows is not."""
        if not self.is_bound:
            return True
        if request is None:
            return False
        leaf = leaf_name(request, self._service.queues.tree) or request.queue  # a queue that the file does not name
        return self.caller.sees(leaf)

    def has_request(self, request_id: str) -> bool:
        return not self.is_bound or self.has(self._service.ledger.request(request_id))

    def check(self, request_id: str) -> None:
        """UnknownEntity for a request of other queues, as for one that nobody sent."""
        if not self.has_request(request_id):
            raise UnknownEntity(f"no request {request_id!r}")

    def charges(self, rows: Iterable[Charge]) -> list[Charge]:
        return [row for row in rows if self.caller.sees(row.leaf)]

    def decisions(self, rows: Sequence[Committed]) -> list[Committed]:
        return [row for row in rows if self.has_request(row.request_id)]

    def audit(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        return [row for row in rows if not self.is_bound or (row["request_id"] and self.has_request(row["request_id"]))]

    def queue(self, answer: Queue) -> Queue:
        """The rows of his requests, and no word of others."""
        if not self.is_bound:
            return answer
        requests = {entry.request.request_id: entry.request for entry in self._service.ledger.queued()}
        rows = [_own_row(row) for row in answer.rows if self.has(requests.get(row.request_id))]
        return Queue(answer.as_of_ms, rows, room=answer.room, record=answer.record)

    def why(self, answer: WhyWaiting) -> WhyWaiting:
        """The ladder without the names of others and what they do."""
        if not self.is_bound:
            return answer
        request = self._service.ledger.request(answer.request_id)
        ladder = [self._own_step(step, request) for step in answer.ladder if step.code not in OF_OTHERS]
        sentence = ladder[-1].sentence if ladder else answer.sentence
        return structs.replace(answer, ladder=ladder, sentence=sentence)

    def _is_own(self, sentence: str) -> bool:
        """Whether `queue 'a' is at its limit: …` is of a queue of his."""
        return any(sentence.startswith((f"queue {name!r} ", f"queue '{name}/")) for name in self.caller.queues)

    def _own_step(self, step: WhyStep, request: PlacementRequest | None) -> WhyStep:
        if step.code == "limit" and not self._is_own(step.sentence):
            return WhyStep(step.code, "a queue above its own is at its limit")
        if step.code in OWN_STEPS:
            return step
        if step.code == "before":
            own = [name for name in step.requests if self.has_request(name)]
            count = " ".join(step.sentence.split()[:2])  # "12 requests"
            return WhyStep(step.code, f"{count} before it", own)
        return WhyStep(step.code, _waits_for(request) if request else "waits")


def _own_row(row: QueueRow) -> QueueRow:
    return structs.replace(row, why="waits for its turn and room")


def _waits_for(request: PlacementRequest) -> str:
    return f"waits for {count_of(round(amounts_of(request, request.members.min)[ANY]), 'GPU')}"
