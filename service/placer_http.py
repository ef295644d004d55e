"""The placer's HTTP: the public paths without `/v1`. The api forwards bodies and problems as they are."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fleet.errors import ConflictError, RequestError, StaleError, UnknownEntity
from fleet.requests import PlacementRequest
from placement.ledger import Committed, LedgerError
from service.access import Access, Scope
from service.body_budget import BodyBudget
from service.placement_body import BODY_ERRORS, body_problem, decode
from service.placer_desk import Desk
from service.problems import Problem, bug
from service.request_body import LEASE, read_raw
from service.start_desk import StartDesk

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 4_194_304
MOST_ROWS = 1000
RETRY_AFTER_S = 2
UNNAMED = "unknown"  # no tokens are set, and the request names no user
NOW = {"age": "0"}  # what the placer tells of itself is as of now

encode = msgspec.json.Encoder().encode
Handler = Callable[[Request], Awaitable[Response]]


class Doors:
    """The handlers, each a few lines around one method of the desk."""

    def __init__(self, desk: Desk, queue_changed: Callable[[], None], access: Access, starts: StartDesk) -> None:
        self.desk = desk
        self.starts = starts
        self.queue_changed = queue_changed
        self.access = access
        self.bodies = BodyBudget(desk.config.api.body_budget_bytes)
        self._damage = ""  # what of the ledger was logged last

    async def place(self, request: Request) -> Response:
        wanted = decode(await read_raw(request, MAX_BODY_BYTES))
        return answer(self.desk.place(wanted, caller_of(request, wanted)))

    async def enqueue(self, request: Request) -> Response:
        wanted = decode(await read_raw(request, MAX_BODY_BYTES))
        reply = self.desk.enqueue(wanted, caller_of(request, wanted))
        self.queue_changed()
        return answer(reply, 202)

    async def placements(self, request: Request) -> Response:
        after, limit = number(request, "after", 0), limit_of(request)
        rows = self.desk.ledger.decisions_after(after, limit)
        return answer(page(self.desk.clock.now_ms(), rows, rows[-1].cursor if rows else after), headers=NOW)

    async def one_placement(self, request: Request) -> Response:
        request_id = request.path_params["request_id"]
        reply = self.desk.ledger.find(request_id)
        if reply is None:
            raise UnknownEntity(f"no request {request_id!r}")
        return answer(reply)

    async def cancel(self, request: Request) -> Response:
        return answer(encode(self.desk.cancel(request.path_params["request_id"], caller_of(request))))

    async def queue(self, request: Request) -> Response:
        rows = await self.desk.queue_rows()
        body = {"as_of_ms": self.desk.clock.now_ms(), "rows": rows, **self.starts.outlook()}
        return answer(await asyncio.to_thread(encode, body), headers=NOW)

    async def estimate(self, request: Request) -> Response:
        wanted = decode(await read_raw(request, MAX_BODY_BYTES))
        return answer(encode(await self.starts.estimate(wanted)), headers=NOW)

    async def withdraw(self, request: Request) -> Response:
        reply = self.desk.withdraw(request.path_params["request_id"], caller_of(request))
        self.queue_changed()
        return answer(encode(reply))

    async def audit(self, request: Request) -> Response:
        after = number(request, "after", None) if "after" in request.query_params else None
        rows = self.desk.ledger.audit(limit_of(request), after, request.query_params.get("request_id"))
        body = {"as_of_ms": self.desk.clock.now_ms(), "head": self.desk.ledger.head, "rows": rows}
        return answer(encode(body), headers=NOW)

    async def health(self, request: Request) -> Response:
        try:
            self.access.check_site(request.method, request.scope["headers"])
        except Problem as problem:
            return problem.response("/v1" + request.url.path)
        try:
            self.desk.refresh()
            waiting = len(self.desk.ledger.queued())
        except LedgerError as error:
            self._log_damage(error)
            return problem_of(error).response(request.url.path)
        as_of_ms = self.desk.board.as_of_ms if self.desk.board else None
        told = {"ok": True, "warming": as_of_ms is None, "board_as_of_ms": as_of_ms, "queued": waiting}
        return answer(encode({**told, "doubts": self.desk.watch.doubts}))

    async def metrics(self, request: Request) -> Response:
        self.desk.metrics.intents.set(len(self.desk.ledger.active_intents()))
        return Response(generate_latest(self.desk.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    def _log_damage(self, error: Exception) -> None:
        """What the ledger raises is the operator's to mend, who sees no answers: each news of it once."""
        if isinstance(error, LedgerError) and str(error) != self._damage:
            self._damage = str(error)
            logger.error("%s", error)

    def guard(self, handler: Handler, scope: Scope) -> Handler:
        """The handler for callers who may; the api asks with the token of its own caller."""

        async def guarded(request: Request) -> Response:
            request.scope[LEASE] = lease = self.bodies.lease()
            try:
                request.state.caller = await self.access.admit(request, scope)
                return await handler(request)
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is there to read it
            except ERRORS as error:
                self._log_damage(error)
                response = problem_of(error).response("/v1" + request.url.path)
                self.desk.metrics.refused_requests.labels(str(response.status_code)).inc()
                return response
            except Exception:
                self.desk.metrics.refused_requests.labels("500").inc()
                return bug("/v1" + request.url.path)
            finally:
                lease.release()

        return guarded


def make_app(
    desk: Desk,
    queue_changed: Callable[[], None] = lambda: None,
    access: Access | None = None,
    starts: StartDesk | None = None,
) -> Starlette:
    """`queue_changed` is called when something new waits; without `access` everybody who reaches us may ask."""
    doors = Doors(desk, queue_changed, access or Access(), starts or StartDesk(desk))

    def route(method: str, path: str, handler: Handler, scope: Scope) -> Route:
        return Route(path, doors.guard(handler, scope), methods=[method])

    app = Starlette(
        routes=[
            route("POST", "/placements", doors.place, Scope.PLACE),
            route("GET", "/placements", doors.placements, Scope.READ),
            route("GET", "/placements/{request_id:path}", doors.one_placement, Scope.READ),
            route("DELETE", "/placements/{request_id:path}", doors.cancel, Scope.PLACE),
            route("POST", "/queue", doors.enqueue, Scope.PLACE),
            route("GET", "/queue", doors.queue, Scope.READ),
            route("DELETE", "/queue/{request_id:path}", doors.withdraw, Scope.PLACE),
            route("POST", "/estimate", doors.estimate, Scope.READ),
            route("GET", "/audit", doors.audit, Scope.ADMIN),
            route("GET", "/metrics", doors.metrics, Scope.READ),
            Route("/healthz", doors.health),
        ],
        exception_handlers={HTTPException: http_problem},
    )
    app.router.redirect_slashes = False  # a redirect would name the address that the api asked for us
    return app


def caller_of(request: Request, wanted: PlacementRequest | None = None) -> str:
    """The name of the caller's token; without tokens, the user that the request names."""
    return request.state.caller.name or (wanted.user if wanted else "") or UNNAMED


def number(request: Request, name: str, default: int | None) -> int:
    text = request.query_params.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d{1,15}", text):
        raise RequestError(f"{name}={text!r} is not a whole number of 0 or more", name)
    return int(text)


def limit_of(request: Request) -> int:
    limit = number(request, "limit", 100)
    if not 1 <= limit <= MOST_ROWS:
        raise RequestError(f"limit is {limit}, it must lie in 1..{MOST_ROWS}", "limit")
    return limit


def page(as_of_ms: int, rows: list[Committed], cursor: int) -> bytes:
    """Stored replies, each with what the ledger knows of it appended; their bytes are not decoded."""
    parts = [
        row.reply[:-1]
        + b","
        + encode({"cursor": row.cursor, "time_ms": row.time_ms, "job": row.job, "attempt": row.attempt})[1:]
        for row in rows
    ]
    return b'{"as_of_ms":%d,"rows":[%b],"cursor":%d}' % (as_of_ms, b",".join(parts), cursor)


def answer(body: bytes, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(body, status, headers, media_type="application/json")


ERRORS = (
    *(RequestError, UnknownEntity, ConflictError, StaleError, LedgerError, Problem),
    *BODY_ERRORS,
)


def problem_of(error: Exception) -> Problem:
    """The problem document of an error that a caller can cause, or wait out."""
    match error:
        case LedgerError():
            return Problem(503, "unavailable", str(error), headers={"retry-after": str(RETRY_AFTER_S)})
        case StaleError():
            return Problem(503, "stale", str(error), headers={"retry-after": str(RETRY_AFTER_S)})
        case _:
            return body_problem(error)


async def http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    detail = f"{request.method} {request.url.path}: {error.detail}"
    return Problem(error.status_code, "http", detail, headers=error.headers).response("/v1" + request.url.path)
