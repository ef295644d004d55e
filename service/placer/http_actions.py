"""The placer's HTTP routes about actions: list and show them, reply to one, and stop all of them."""

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.actions.words import describe_action
from fleetcast.placement.ledger.actions import OPEN_ONES
from fleetcast.placement.queues.tree import ReclaimMode, ReclaimPolicy
from fleetcast.service.answers.actions import ActionDetails, ActionList, ActionReply, ActionRow, ActionSwitches
from fleetcast.service.http.access import Caller, Scope, get_admitted_caller
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import decode_json_body, read_raw_body
from fleetcast.service.http.table import JSON, Param, Query, encode
from fleetcast.service.placer.actions import ActionControl, ForeignAction
from fleetcast.service.placer.context import PlacerContext, identify_caller
from fleetcast.service.placer.own_queues import OwnQueues
from fleetcast.service.placer.service import PlacementService

NOW = {"age": "0"}
MAX_REPLY_BYTES = 65_536
MOST_WHY = 1000  # characters
STATE = Param("state", str, "only actions in this state", choices=(*map(str, ActionState), OPEN_ONES))
QUEUE = Param("queue", str, "only actions on jobs of this queue or of queues below it")
JOB = Param("job", str, "only actions on this job; with state=sent, and the scope events, the caller is its agent")
ORDER = Param("order", str, "which rows a page has", "oldest", choices=("oldest", "newest"))
FILTERS = (STATE, QUEUE, JOB, ORDER)
_decoder = msgspec.json.Decoder(ActionReply)


async def list_actions(request: Request, context: PlacerContext, query: Query) -> Response:
    control, own = context.service.actions, OwnQueues(request, context.service)
    chosen = (query["state"], query["queue"], query["job"], query["order"] == "newest")
    if query["job"] is not None and query["state"] == ActionState.SENT and own.caller.has_scope(Scope.EVENTS):
        context.service.executors.record_agent(query["job"], context.service.clock.now_ms())
    rows, cursor = await own.read_actions_after(query["after"], query["limit"], *chosen)
    body = ActionList(
        context.service.clock.now_ms(),
        [make_action_row(control, record) for record in rows],
        cursor,
        make_switches(context.service, own.caller),
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
    context.service.actions.pause(context.service.clock.now_ms(), identify_caller(request))
    return _answer_switches(request, context)


async def resume_actions(request: Request, context: PlacerContext, query: Query) -> Response:
    context.service.actions.resume(context.service.clock.now_ms(), identify_caller(request))
    return _answer_switches(request, context)


async def reset_breaker(request: Request, context: PlacerContext, query: Query) -> Response:
    context.service.actions.reset_breaker(context.service.clock.now_ms(), identify_caller(request))
    return _answer_switches(request, context)


def make_switches(service: PlacementService, caller: Caller) -> ActionSwitches:
    """Return the switches as a caller may see them: without the names of others' queues and of other callers."""
    switches, tree, is_bound = service.actions.switches, service.queues.tree, bool(caller.queues)
    policy = ReclaimPolicy() if tree is None else tree.policy.reclaim
    mode, act_in = limit_policy(policy, caller) if is_bound else (policy.mode, policy.act_in)
    return ActionSwitches(
        mode=mode,
        act_in=act_in,
        paused_ms=switches.paused_ms,
        paused_by="" if is_bound else switches.paused_by,
        opened_ms=switches.breaker.opened_ms,
        why="" if is_bound else switches.breaker.why,
    )


def limit_policy(policy: ReclaimPolicy, caller: Caller) -> tuple[ReclaimMode, tuple[str, ...]]:
    """Return the mode and `act_in` for the queues of a caller. If none of them acts, the mode is "advise"."""
    if policy.mode != "act" or not policy.act_in:
        return policy.mode, ()
    own = {queue for queue in policy.act_in if caller.may_read_queue(queue)}
    own.update(queue for queue in caller.queues if policy.may_act_in(queue))
    return ("act", tuple(sorted(own))) if own else ("advise", ())


def _answer_switches(request: Request, context: PlacerContext) -> Response:
    body = make_switches(context.service, get_admitted_caller(request))
    return Response(encode(body), 200, media_type=JSON)


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
        after=action.after,
    )
