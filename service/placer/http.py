"""The placer's HTTP API. Its paths are the public ones without `/v1`.

The api process forwards bodies and problems unchanged.
"""

import asyncio
import contextlib
from collections.abc import Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import StaleError, UnknownEntity
from fleetcast.placement.fragmentation import measure_fragmentation
from fleetcast.placement.ledger.ledger import CommittedDecision
from fleetcast.service.answers.placements import Fragmentation, PlacerHealth
from fleetcast.service.http.access import Access, Scope
from fleetcast.service.http.body_budget import BodyBudget
from fleetcast.service.http.placement_body import decode_placement_body
from fleetcast.service.http.problems import Problem, answer_starlette_error
from fleetcast.service.http.request_body import read_raw_body
from fleetcast.service.http.table import JSON, Handler, Param, Query, Row, encode, make_routes
from fleetcast.service.placer.context import PlacerContext, identify_caller
from fleetcast.service.placer.http_actions import (
    FILTERS,
    accept_action,
    answer_action,
    list_actions,
    pause_actions,
    refuse_action,
    reset_breaker,
    resume_actions,
)
from fleetcast.service.placer.http_plan import answer_plan
from fleetcast.service.placer.http_queues import (
    CHARGE_PARAMS,
    DRY_RUN,
    answer_charges,
    answer_queues,
    answer_why,
    put_queues,
)
from fleetcast.service.placer.own_queues import OwnQueues
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.placer.start_times import StartTimeSampler

MAX_BODY_BYTES = 4_194_304
NOW = {"age": "0"}  # what the placer tells of itself is as of now
LIMIT = Param("limit", int, "at most this many rows", 100, least=1, most=1000)
LAST_CURSOR = 10**15 - 1
BY_QUEUE = {
    ("GET", path)
    for path in (
        *("/placements", "/placements/{request_id:path}", "/queues", "/queue/{request_id:path}/why", "/charges"),
        *("/queue", "/audit", "/actions", "/actions/{action_id}", "/plan"),
    )
}
"""Routes that answer a caller of some queues with what is theirs."""


async def place(request: Request, context: PlacerContext, query: Query) -> Response:
    wanted = decode_placement_body(await read_raw_body(request, MAX_BODY_BYTES))
    reply = context.service.place(wanted, identify_caller(request, wanted))
    return make_response(await context.dry_runs.add_preview(wanted, reply) if wanted.dry_run else reply)


async def enqueue(request: Request, context: PlacerContext, query: Query) -> Response:
    wanted = decode_placement_body(await read_raw_body(request, MAX_BODY_BYTES))
    if why_full := context.service.queues.explain_full_queue(wanted):
        raise Problem(429, "queue_full", why_full, headers={"retry-after": "60"})
    reply = context.service.enqueue(wanted, identify_caller(request, wanted))
    context.queue_changed()
    return make_response(reply, 202)


async def list_placements(request: Request, context: PlacerContext, query: Query) -> Response:
    rows, cursor = await OwnQueues(request, context.service).read_decisions_after(query["after"], query["limit"])
    return make_response(make_placements_page(context.service.clock.now_ms(), rows, cursor), headers=NOW)


async def answer_placement(request: Request, context: PlacerContext, query: Query) -> Response:
    request_id = request.path_params["request_id"]
    own = OwnQueues(request, context.service)
    own.check_readable(request_id)
    reply = context.service.ledger.find_reply(request_id)
    if reply is None:
        raise UnknownEntity(f"no request {request_id!r}")
    return make_response(own.redact_reply(reply))


async def cancel(request: Request, context: PlacerContext, query: Query) -> Response:
    return make_response(encode(context.service.cancel(request.path_params["request_id"], identify_caller(request))))


async def answer_queue(request: Request, context: PlacerContext, query: Query) -> Response:
    body = context.starts.make_queue_answer(await context.service.backlog.list_queue_rows())
    body = OwnQueues(request, context.service).redact_queue(body)
    return make_response(await asyncio.to_thread(encode, body), headers=NOW)


async def answer_fragments(request: Request, context: PlacerContext, query: Query) -> Response:
    view, options = context.service.view.observe_fleet().view, context.service.make_options()
    rows, moves = measure_fragmentation(view, options), await context.moves.find_advice()
    body = Fragmentation(view.as_of_ms, len(context.service.demand), rows, msgspec.UNSET if moves is None else moves)
    return make_response(encode(body), headers=NOW)


async def estimate(request: Request, context: PlacerContext, query: Query) -> Response:
    wanted = decode_placement_body(await read_raw_body(request, MAX_BODY_BYTES))
    return make_response(encode(await context.starts.estimate(wanted)), headers=NOW)


async def withdraw(request: Request, context: PlacerContext, query: Query) -> Response:
    reply = context.service.withdraw(request.path_params["request_id"], identify_caller(request))
    context.queue_changed()
    return make_response(encode(reply))


async def answer_audit(request: Request, context: PlacerContext, query: Query) -> Response:
    own = OwnQueues(request, context.service)
    head, rows = await own.read_audit(query["limit"], query["after"], query["request_id"])
    body = {"as_of_ms": context.service.clock.now_ms(), "head": head, "rows": rows}
    return make_response(encode(body), headers=NOW)


async def answer_health(request: Request, context: PlacerContext, query: Query) -> Response:
    service = context.service
    service.view.refresh()
    waiting = len(service.ledger.list_queue_entries())
    as_of_ms = service.view.board.as_of_ms if service.view.board else None
    return make_response(encode(PlacerHealth(True, as_of_ms is None, as_of_ms, waiting, service.view.watch.doubts)))


async def answer_metrics(request: Request, context: PlacerContext, query: Query) -> Response:
    context.metrics.intents.set(len(context.service.ledger.list_active_intents()))
    context.service.actions.update_metrics(context.service.clock.now_ms())
    with contextlib.suppress(StaleError):
        view, shown = context.service.view.observe_fleet().view, context.metrics.queues
        shown.set_fragments(measure_fragmentation(view, context.service.make_options()))
        shown.set_queues(context.admin.answer_queues().rows)
        shown.set_charges(context.admin.read_day())
    return Response(generate_latest(context.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _make_row(method: str, path: str, handler: Handler, scope: Scope, params: tuple[Param, ...] | None = None) -> Row:
    return Row(method, path, handler, "", "placer", params=params, scope=scope, by_queue=(method, path) in BY_QUEUE)


def _make_cursor_param(default: int | None) -> Param:
    return Param("after", int, "rows behind this cursor", default, least=0, most=LAST_CURSOR)


ROWS = (
    _make_row("POST", "/placements", place, Scope.PLACE),
    _make_row("GET", "/placements", list_placements, Scope.READ, (_make_cursor_param(0), LIMIT)),
    _make_row("GET", "/placements/{request_id:path}", answer_placement, Scope.READ),
    _make_row("DELETE", "/placements/{request_id:path}", cancel, Scope.PLACE),
    _make_row("GET", "/queues", answer_queues, Scope.READ),
    _make_row("PUT", "/queues", put_queues, Scope.ADMIN, (DRY_RUN,)),
    _make_row("GET", "/queue/{request_id:path}/why", answer_why, Scope.READ),
    _make_row("GET", "/charges", answer_charges, Scope.READ, CHARGE_PARAMS),
    _make_row("POST", "/queue", enqueue, Scope.PLACE),
    _make_row("GET", "/queue", answer_queue, Scope.READ),
    _make_row("DELETE", "/queue/{request_id:path}", withdraw, Scope.PLACE),
    _make_row("GET", "/actions", list_actions, Scope.READ, (_make_cursor_param(0), LIMIT, *FILTERS)),
    _make_row("POST", "/actions/pause", pause_actions, Scope.ADMIN, ()),
    _make_row("POST", "/actions/resume", resume_actions, Scope.ADMIN, ()),
    _make_row("POST", "/actions/reset", reset_breaker, Scope.ADMIN, ()),
    _make_row("GET", "/actions/{action_id}", answer_action, Scope.READ),
    _make_row("POST", "/actions/{action_id}/accept", accept_action, Scope.EVENTS),
    _make_row("POST", "/actions/{action_id}/refuse", refuse_action, Scope.EVENTS),
    _make_row("GET", "/plan", answer_plan, Scope.READ, (LIMIT,)),
    _make_row("GET", "/fragmentation", answer_fragments, Scope.READ),
    _make_row("POST", "/estimate", estimate, Scope.READ),
    _make_row(
        "GET",
        "/audit",
        answer_audit,
        Scope.ADMIN,
        (_make_cursor_param(None), LIMIT, Param("request_id", str, "rows of this request")),
    ),
    _make_row("GET", "/metrics", answer_metrics, Scope.READ),
    Row("GET", "/healthz", answer_health, "", "placer", params=None, is_open=True),
)


def make_app(
    service: PlacementService,
    queue_changed: Callable[[], None] = lambda: None,
    access: Access | None = None,
    starts: StartTimeSampler | None = None,
) -> Starlette:
    """Make the placer's web application. It calls `queue_changed` when the queue has changed.

    Without `access`, any caller may use it.
    """
    bodies = BodyBudget(service.config.api.body_budget_bytes)
    context = PlacerContext(
        service, starts or StartTimeSampler(service), access or Access(), bodies, service.metrics, queue_changed
    )
    app = Starlette(routes=make_routes(ROWS, context), exception_handlers={HTTPException: answer_starlette_error})
    app.router.redirect_slashes = False  # a redirect would name the address that the api asked for us
    return app


def make_placements_page(as_of_ms: int, rows: list[CommittedDecision], cursor: int) -> bytes:
    """Return a JSON page of stored replies, each with the ledger's facts about it appended.

    The stored replies are not decoded.
    """
    parts = [
        row.reply[:-1]
        + b","
        + encode({"cursor": row.cursor, "time_ms": row.time_ms, "job": row.job, "attempt": row.attempt})[1:]
        for row in rows
    ]
    return b'{"as_of_ms":%d,"rows":[%b],"cursor":%d}' % (as_of_ms, b",".join(parts), cursor)


def make_response(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type=JSON)
