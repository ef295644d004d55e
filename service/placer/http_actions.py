"""The placer's HTTP routes about actions: list and show them, reply to one, and stop all of them."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.actions.words import describe_action
from fleetcast.placement.ledger.actions import OPEN_ONES
from fleetcast.service.answers.actions import ActionDetails, ActionList, ActionReply, ActionRow, ActionSwitches
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import decode_json_body, read_raw_body
from fleetcast.service.http.table import JSON, Param, Query, encode
from fleetcast.service.placer.actions import ActionControl, ForeignAction, SwitchState
from fleetcast.service.placer.context import PlacerContext, identify_caller
from fleetcast.service.placer.own_queues import OwnQueues

NOW = {"age": "0"}
MAX_REPLY_BYTES = 65_536
MOST_WHY = 1000  # characters
STATE = Param("state", str, "only actions in this state", choices=(*map(str, ActionState), OPEN_ONES))
QUEUE = Param("queue", str, "only actions on jobs of this queue or of queues below it")
JOB = Param("job", str, "only actions on this job")
ORDER = Param("order", str, "which rows a page has", "oldest", choices=("oldest", "newest"))
FILTERS = (STATE, QUEUE, JOB, ORDER)
_decoder = msgspec.json.Decoder(ActionReply)


async def list_actions(request: Request, context: PlacerContext, query: Query) -> Response:
    control, own = context.service.actions, OwnQueues(request, context.service)
    chosen = (query["state"], query["queue"], query["job"], query["order"] == "newest")
    if query["job"] is not None and not chosen[-1] and own.caller.has_scope(Scope.EVENTS):
        context.service.executors.record_agent(query["job"], context.service.clock.now_ms())
    rows, cursor = await own.read_actions_after(query["after"], query["limit"], *chosen)
    body = ActionList(
        context.service.clock.now_ms(),
        [make_action_row(control, record) for record in rows],
        cursor,
        make_switches(control.switches, own.is_bound),
        None if own.is_bound else control.make_foreseen_calibration(),
    )
    return Response(encode(body), 200, NOW, media_type=JSON)


async def answer_action(request: Request, context: PlacerContext, query: Query) -> Response:
    control, own, action_id = context.service.actions, OwnQueues(request, context.service), _get_id(request)
    record = control.get_action(action_id)
    if not own.caller.may_read_queue(record.action.queue):
        raise UnknownEntity(f"no action {action_id!r}")
    (record,) = await own.redact_actions([record])
    return Response(encode(make_action_details(control, record)), 200, NOW, media_type=JSON)


async def accept_action(request: Request, context: PlacerContext, query: Query) -> Response:
    reply, control, now_ms = await _read_reply(request), context.service.actions, context.service.clock.now_ms()
    caller = identify_caller(request)
    return _answer_reply(control, lambda: control.accept(_get_id(request), reply.job, reply.attempt, now_ms, caller))


async def refuse_action(request: Request, context: PlacerContext, query: Query) -> Response:
    reply, control, now_ms = await _read_reply(request), context.service.actions, context.service.clock.now_ms()
    caller = identify_caller(request)
    return _answer_reply(
        control, lambda: control.refuse(_get_id(request), reply.job, reply.attempt, reply.why, now_ms, caller)
    )


async def pause_actions(request: Request, context: PlacerContext, query: Query) -> Response:
    service = context.service
    return _answer_switches(service.actions.pause(service.clock.now_ms(), identify_caller(request)))


async def resume_actions(request: Request, context: PlacerContext, query: Query) -> Response:
    service = context.service
    return _answer_switches(service.actions.resume(service.clock.now_ms(), identify_caller(request)))


async def reset_breaker(request: Request, context: PlacerContext, query: Query) -> Response:
    service = context.service
    return _answer_switches(service.actions.reset_breaker(service.clock.now_ms(), identify_caller(request)))


def make_switches(switches: SwitchState, is_bound: bool) -> ActionSwitches:
    """Return the switches for an answer. is_bound: leave out what names other queues and callers."""
    return ActionSwitches(
        paused_ms=switches.paused_ms,
        paused_by="" if is_bound else switches.paused_by,
        opened_ms=switches.breaker.opened_ms,
        why="" if is_bound else switches.breaker.why,
    )


def _answer_switches(switches: SwitchState) -> Response:
    return Response(encode(make_switches(switches, False)), 200, media_type=JSON)


def _answer_reply(control: ActionControl, reply: Callable[[], ActionRecord]) -> Response:
    try:
        record = reply()
    except ForeignAction as error:
        raise Problem(403, "forbidden", str(error)) from None
    return Response(encode(make_action_details(control, record)), 200, media_type=JSON)


async def _read_reply(request: Request) -> ActionReply:
    reply = decode_json_body(await read_raw_body(request, MAX_REPLY_BYTES), _decoder)
    if len(reply.why) > MOST_WHY:
        raise RequestError(f"why has {len(reply.why):,} characters: at most {MOST_WHY:,}", "why")
    return reply


def _get_id(request: Request) -> str:
    action_id: str = request.path_params["action_id"]
    return action_id


def make_action_row(control: ActionControl, record: ActionRecord) -> ActionRow:
    action = record.action
    return ActionRow(
        action_id=record.action_id,
        kind=action.kind,
        state=record.state,
        since_ms=record.life[-1].time_ms,
        job=action.job,
        attempt=action.attempt,
        queue=action.queue,
        gpus=action.gpus,
        ranks=action.ranks,
        places=action.places,
        payer=action.payer,
        executor=action.executor,
        by_ms=control.compute_by_ms(record),
        grace_s=action.grace_s,
        cost_gpu_s=action.cost.total,
        sentence=describe_action(action),
        why=record.why,
        changed=record.changed,
    )


def make_action_details(control: ActionControl, record: ActionRecord) -> ActionDetails:
    action = record.action
    return ActionDetails(
        **msgspec.structs.asdict(make_action_row(control, record)),
        cost=action.cost,
        reason=action.reason.code,
        numbers=action.reason.numbers,
        rejected=action.rejected,
        life=record.life,
    )
