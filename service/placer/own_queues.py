"""A caller's own view of the placer's answers: only the rows of the queues that the caller is bound to.

No answer reveals how many rows other tenants have. No number, cursor, position, hash or sum counts the
rows of other tenants.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs
from starlette.requests import Request

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.ledger.actions import ACTION
from fleetcast.placement.ledger.chain import QUEUED, ChainHead, encode
from fleetcast.placement.ledger.ledger import CommittedDecision
from fleetcast.placement.machines.words import format_count
from fleetcast.placement.queues.charges import Charge
from fleetcast.placement.queues.standing import compute_needed_gpus
from fleetcast.placement.queues.tree import ANY
from fleetcast.service.answers.placements import Queue, QueueRow
from fleetcast.service.answers.queues import QueuesAnswer, WhyStep, WhyWaiting
from fleetcast.service.http.access import get_admitted_caller
from fleetcast.service.placer.own_numbers import find_ledger_number, find_own_numbers
from fleetcast.service.placer.running_jobs import find_charged_leaf
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.why_waiting import NAMED

OWN_STEPS = frozenset({"gone", "limit", "stale", "start"})  # their sentences name nobody else
OF_OTHERS = frozenset({"window", "ends"})  # theirs name nothing else
WAITS = "waits for its turn and room"
Audited = tuple[ChainHead, list[dict[str, Any]]]
NO_CHAIN = {"stored": "", "previous": "", "hash": ""}  # they are made of numbers that count all rows
decode = msgspec.json.Decoder(Decision).decode


class OwnQueues:
    """A view of the placer's answers that shows a caller only the rows of its own queues.

    A caller that is not bound to queues sees all rows.
    """

    def __init__(self, request: Request, service: PlacementService) -> None:
        self.caller = get_admitted_caller(request)
        self._service = service

    @property
    def is_bound(self) -> bool:
        return bool(self.caller.queues)

    def may_read(self, request: PlacementRequest | None) -> bool:
        """Return whether the caller may read a request. A bound caller may not read unknown requests."""
        if not self.is_bound:
            return True
        if request is None:
            return False
        leaf = (
            find_charged_leaf(request, self._service.queues.tree) or request.queue
        )  # a queue that the file does not name
        return self.caller.may_read_queue(leaf)

    def may_read_request(self, request_id: str) -> bool:
        """Return whether the caller may see a request, or the action with this id."""
        if not self.is_bound:
            return True
        ledger = self._service.ledger
        request = ledger.find_request_by_id(request_id)
        if request is not None:
            return self.may_read(request)
        record = ledger.actions.find_action(request_id)
        return record is not None and self.caller.may_read_queue(record.action.queue)

    def check_readable(self, request_id: str) -> None:
        """Check that the caller may see a request. Raises UnknownEntity if not.

        The error is the same as for a request that does not exist.
        """
        if not self.may_read_request(request_id):
            raise UnknownEntity(f"no request {request_id!r}")

    def filter_charges(self, rows: Iterable[Charge]) -> list[Charge]:
        return [row for row in rows if self.caller.may_read_queue(row.leaf)]

    async def read_decisions_after(self, count: int, limit: int) -> tuple[list[CommittedDecision], int]:
        """Return the stored decisions after the caller's first `count` ones, and the cursor of the last one.

        The cursors of a bound caller count only the caller's own decisions.
        """
        ledger = self._service.ledger
        if not self.is_bound:
            rows = ledger.read_decisions_after(count, limit)
            return rows, rows[-1].cursor if rows else count
        own = await self._service.own_decisions.find_numbers(self.may_read)
        rows = ledger.read_decisions(own[count : count + limit].tolist())
        numbers = find_own_numbers(own, [row.cursor for row in rows])
        return [
            replace(row, cursor=number, reply=self.redact_reply(row.reply))
            for row, number in zip(rows, numbers, strict=True)
            if self.may_read_request(row.request_id)
        ], (numbers[-1] if numbers else count)

    def redact_reply(self, reply: bytes) -> bytes:
        """Return a stored reply. For a bound caller, remove what its sentence says about other requests."""
        if not self.is_bound:
            return reply
        decision = decode(reply)
        sentence = self._redact_sentence(decision.outcome, decision.sentence)
        return reply if sentence == decision.sentence else encode(structs.replace(decision, sentence=sentence))

    async def read_audit(self, limit: int, count: int | None, request_id: str | None) -> Audited:
        """Return the head and the lines of the audit trail that the caller may see.

        A bound caller's lines are numbered separately. They have no hashes, because the hash chain runs through
        the lines of all callers.
        """
        ledger = self._service.ledger
        if not self.is_bound:
            return ledger.head, ledger.read_audit_trail(limit, count, request_id)
        own = await self._service.own_lines.find_numbers(self.may_read)
        if request_id is not None:
            rows = ledger.read_audit_trail(limit, None if count is None else find_ledger_number(own, count), request_id)
        elif count is not None:
            rows = ledger.read_audit_lines(own[count : count + limit].tolist())
        else:
            rows = ledger.read_audit_lines(own[-limit:].tolist())[::-1]
        rows = [row for row in rows if row["request_id"] and self.may_read_request(row["request_id"])]
        numbers = find_own_numbers(own, [row["audit_id"] for row in rows])
        return ChainHead(len(own)), [
            {**row, **NO_CHAIN, "audit_id": number, **self._redact_line(row)}
            for row, number in zip(rows, numbers, strict=True)
        ]

    async def read_actions_after(
        self, count: int, limit: int, state: str | None, queue: str | None, job: str | None, newest: bool = False
    ) -> tuple[list[ActionRecord], int]:
        """Return actions that changed after the caller's first `count` audit lines, and the cursor of the last one.

        A bound caller's numbers count only its own lines. newest: the last `limit` of them instead of the first.
        """
        table, after, own_queues = self._service.ledger.actions, count, self.caller.queues
        if self.is_bound:
            after = find_ledger_number(await self._service.own_lines.find_numbers(self.may_read), count)
        found = table.read_after(after, limit, state=state, queue=queue, job=job, own=own_queues, newest=newest)
        rows = await self.redact_actions(found)
        return rows, rows[-1].changed if rows else count

    async def redact_actions(self, records: Sequence[ActionRecord]) -> list[ActionRecord]:
        """Return actions without the names and numbers of other tenants, for a bound caller."""
        if not self.is_bound:
            return list(records)
        own = await self._service.own_lines.find_numbers(self.may_read)
        numbers = find_own_numbers(own, [record.changed for record in records])
        return [
            replace(self._redact_record(record), changed=number)
            for record, number in zip(records, numbers, strict=True)
        ]

    def _redact_record(self, record: ActionRecord) -> ActionRecord:
        action = structs.replace(record.action, rejected=())
        if not action.payer or self.may_read_request(action.payer):
            return replace(record, action=action)
        reason = structs.replace(action.reason, numbers={})
        why = "" if record.state is ActionState.WITHDRAWN else record.why
        return replace(record, action=structs.replace(action, payer="", reason=reason), why=why)

    def _redact_line(self, row: dict[str, Any]) -> dict[str, str]:
        """Return the sentence of an audit line, and the decision id of a line about an action.

        That id is a checksum of the row, which contains a number that counts all lines.
        """
        word: str = row["action"]
        if not word.startswith(ACTION):
            return {"sentence": self._redact_sentence(word, row["sentence"])}
        return {"sentence": word.removeprefix(ACTION), "decision_id": ""}

    def _redact_sentence(self, what: str, sentence: str) -> str:
        """Return a sentence of the ledger. If it reveals other tenants' requests or GPUs, return a neutral one.

        what: the outcome or action that the sentence describes.
        """
        if what in (QUEUED, "queued"):
            return "queued"
        head, of, rest = sentence.partition("refused: queue ")
        if of and not head and not self._is_own_limit(f"queue {rest}"):
            return "refused: a queue above its own is at its limit"
        return sentence

    def redact_queue(self, answer: Queue) -> Queue:
        """Return the queue with only the caller's rows.

        Positions count only these rows. Sums over all requests are left out.
        """
        if not self.is_bound:
            return answer
        requests = {entry.request.request_id: entry.request for entry in self._service.ledger.list_queue_entries()}
        rows = [row for row in answer.rows if self.may_read(requests.get(row.request_id))]
        return Queue(answer.as_of_ms, [_redact_row(row, place) for place, row in enumerate(rows, 1)])

    def redact_why(self, answer: WhyWaiting) -> WhyWaiting:
        """Return the steps that explain a wait, without names, numbers and actions of other tenants."""
        if not self.is_bound:
            return answer
        service, request = self._service, self._service.ledger.find_request_by_id(answer.request_id)
        order = [entry.request for entry in service.backlog.sort_by_turn(service.ledger.list_queue_entries())]
        before = [one for one in order[: answer.position - 1] if self.may_read(one)]
        steps = [
            self._redact_step(step, answer, before, request) for step in answer.ladder if step.code not in OF_OTHERS
        ]
        ladder = list({step.sentence: step for step in steps if step is not None}.values())
        sentence = ladder[-1].sentence if ladder else WAITS
        return structs.replace(answer, ladder=ladder, sentence=sentence, position=len(before) + 1)

    def redact_queues(self, answer: QueuesAnswer) -> QueuesAnswer:
        """Return the state of the queues without shares that would reveal other tenants' use.

        A queue's share of its parent's use reveals how much its siblings held. So it is left out if the caller
        cannot see the parent.
        """
        if not self.is_bound:
            return answer
        names = {row.queue for row in answer.rows}
        rows = [
            row if row.parent in names else structs.replace(row, share_7d=None, share_days=None) for row in answer.rows
        ]
        return structs.replace(answer, rows=rows)

    def _is_own_limit(self, sentence: str) -> bool:
        """Return whether a sentence like `queue 'a' is at its limit: …` names one of the caller's queues."""
        return any(sentence.startswith((f"queue {name!r} ", f"queue '{name}/")) for name in self.caller.queues)

    def _redact_step(
        self, step: WhyStep, answer: WhyWaiting, before: Sequence[PlacementRequest], request: PlacementRequest | None
    ) -> WhyStep | None:
        if step.code == "limit" and not self._is_own_limit(step.sentence):
            return WhyStep(step.code, "a queue above its own is at its limit")
        if step.code in OWN_STEPS:
            return step
        if step.code == "before":
            return self._redact_before_step(step, answer, before)
        return WhyStep(step.code, _describe_wait(request) if request else "waits")

    def _redact_before_step(
        self, step: WhyStep, answer: WhyWaiting, before: Sequence[PlacementRequest]
    ) -> WhyStep | None:
        """Return the step about the requests before this one, or None if none of them is the caller's.

        If these requests are in the same queue, all of them are the caller's. From other queues, only the
        caller's requests count.
        """
        if f"before it in queue {answer.queue!r}" in step.sentence:
            return step
        tree = self._service.queues.tree
        others = [one.request_id for one in before if find_charged_leaf(one, tree) != answer.queue]
        if not others:
            return None
        return WhyStep(
            "before", f"{format_count(len(others), 'request')} of its other queues before it", others[-NAMED:][::-1]
        )


def _redact_row(row: QueueRow, place: int) -> QueueRow:
    return structs.replace(row, why=WAITS, position=place)


def _describe_wait(request: PlacementRequest) -> str:
    return f"waits for {format_count(round(compute_needed_gpus(request, request.members.min)[ANY]), 'GPU')}"
