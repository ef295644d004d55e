"""The placer's HTTP route about the plan of the last pass."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.actions.life import ActionRecord
from fleetcast.placement.ledger.actions import OPEN_ONES
from fleetcast.service.answers.plan import CurrentPlan, NextRequest, PlannedAction, PlannedStart, PromisedPlace
from fleetcast.service.http.table import JSON, Query, encode
from fleetcast.service.placer.context import PlacerContext
from fleetcast.service.placer.http_actions import make_action_row, make_switches
from fleetcast.service.placer.own_queues import OwnQueues
from fleetcast.service.placer.running_jobs import find_charged_leaf
from fleetcast.service.placer.service import PlacementService


async def answer_plan(request: Request, context: PlacerContext, query: Query) -> Response:
    service, own, limit = context.service, OwnQueues(request, context.service), query["limit"]
    backlog, now_ms = service.backlog, service.clock.now_ms()
    records, _ = await own.read_actions_after(0, limit + 1, OPEN_ONES, None, None, newest=True)
    body = CurrentPlan(
        as_of_ms=now_ms,
        pass_ms=backlog.pass_ms,
        stalled=backlog.stalled,
        actions=[_make_action(service, record) for record in records[-limit:]],
        has_more=len(records) > limit,
        starts=_list_starts(service, own),
        next=None if own.is_bound else _find_next(service),
        promised=_list_promised(service, own, now_ms),
        switches=make_switches(service, own.caller),
    )
    return Response(encode(body), 200, {"age": "0"}, media_type=JSON)


def _make_action(service: PlacementService, record: ActionRecord) -> PlannedAction:
    row = make_action_row(service.actions, record)
    return PlannedAction(**msgspec.structs.asdict(row), cost=record.action.cost)


def _find_queue(service: PlacementService, request: PlacementRequest) -> str:
    return find_charged_leaf(request, service.queues.tree) or request.queue


def _list_starts(service: PlacementService, own: OwnQueues) -> list[PlannedStart]:
    """Return what the last pass has placed. A request whose GPUs were lost to another decision still waits."""
    planned = service.backlog.planned
    return [
        PlannedStart(
            request_id=entry.request.request_id,
            job=entry.request.job_name,
            queue=_find_queue(service, entry.request),
            ranks=decision.ranks,
            until_ms=decision.expires_ms,
        )
        for entry, decision in (planned.placed if planned else ())
        if own.may_read(entry.request) and not service.ledger.is_queued(entry.request.request_id)
    ]


def _find_next(service: PlacementService) -> NextRequest | None:
    planned, proposal = service.backlog.planned, service.advisor.proposal
    head = planned.head if planned else None
    if head is None or not service.ledger.is_queued(head.request.request_id):
        return None
    request = head.request
    is_mine = proposal is not None and proposal.request.request_id == request.request_id
    victims = proposal.victims if proposal is not None and is_mine else None
    return NextRequest(
        request_id=request.request_id,
        job=request.job_name,
        queue=_find_queue(service, request),
        start_ms=head.start_ms,
        waits_for=head.blocker,
        sentence=service.advisor.describe_proposal(request.request_id),
        ranks=victims.decision.ranks if victims else (),
    )


def _list_promised(service: PlacementService, own: OwnQueues, now_ms: int) -> list[PromisedPlace]:
    requests = {entry.request.request_id: entry.request for entry in service.ledger.list_queue_entries()}
    return [
        PromisedPlace(
            request_id=found.row.payer,
            job=requests[found.row.payer].job_name,
            queue=_find_queue(service, requests[found.row.payer]),
            ranks=found.row.ranks,
            until_ms=found.row.by_ms,
            actions=[row.action_id for row in found.records if own.caller.may_read_queue(row.action.queue)],
            number=found.row.number,
        )
        for found in service.view.promised_sets.list_followed(now_ms)
        if found.is_live and own.may_read(requests[found.row.payer])
    ]
