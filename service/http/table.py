"""The route table, with one row for each route.

The Starlette routes, the checks of queries, and OpenAPI are made from this table. A handler is `async
(request, context, query) -> Response`. Its context is the api's `Context` or the `PlacerContext`. The
endpoint counts its answers. It answers our errors with problem details, and bugs with a 500 and an id
that the log also contains.
"""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from fleetcast.fleet.errors import FleetcastError
from fleetcast.service.http.access import Access, Scope, choose_default_scope
from fleetcast.service.http.body_budget import BodyBudget
from fleetcast.service.http.problems import FieldError, Problem, answer_unexpected_error, make_unprocessable_problem
from fleetcast.service.http.request_body import LEASE

Query = Mapping[str, Any]
Handler = Callable[[Request, Any, Query], Awaitable[Response]]
encode = msgspec.json.Encoder().encode
JSON = "application/json"
MOST_NUMBER = 2**53  # of a parameter without a bound of its own: what every JSON reader can hold exactly
NO_STORE = "no-store"
CALLER = "fleetcast.caller"  # in the scope of a request: the name of its token, "" without tokens
ANY_FILE = "/{file:path}"  # of the console: whatever no other route takes


class RequestCounter(Protocol):
    def observe(self, route: str, method: str, status: int, seconds: float) -> None: ...


class Host(Protocol):
    """The parts of a process's context that an `Endpoint` needs.

    `prefix`: added to the paths in problem details.
    """

    prefix: str

    @property
    def access(self) -> Access: ...
    @property
    def bodies(self) -> BodyBudget: ...
    @property
    def metrics(self) -> RequestCounter: ...
    def make_problem(self, error: FleetcastError) -> Problem: ...


@dataclass(frozen=True, slots=True)
class Param:
    """One query parameter: its type, its bounds and its default."""

    name: str
    kind: type[str] | type[int] | type[float]
    text: str
    default: Any = None
    choices: tuple[Any, ...] = ()
    least: float | None = None
    most: float | None = None

    def parse_value(self, text: str) -> Any:
        """Parse a value of the parameter.

        Raises a 422 problem that names the parameter and its allowed values.
        """
        try:
            value = self.kind(text)
        except ValueError:
            raise make_unprocessable_problem(self.name, text, self.describe_allowed_values()) from None
        if self.choices and value not in self.choices:
            raise make_unprocessable_problem(self.name, text, self.describe_allowed_values())
        if isinstance(value, int | float) and not self._is_in_bounds(value):
            raise make_unprocessable_problem(self.name, text, self.describe_allowed_values())
        return value

    def _is_in_bounds(self, value: float) -> bool:
        low = -MOST_NUMBER if self.least is None else self.least
        return low <= value <= (MOST_NUMBER if self.most is None else self.most)

    def describe_allowed_values(self) -> str:
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        word = {str: "text", int: "a whole number", float: "a number"}[self.kind]
        if self.least is not None and self.most is not None:
            return f"{word} from {self.least:g} to {self.most:g}"
        return word if self.least is None else f"{word} of at least {self.least:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One route: its handler, its query and body, its answer, and who may use it."""

    method: str
    path: str
    handler: Handler
    summary: str
    tag: str
    params: tuple[Param, ...] | None = ()  # None: somebody else checks the query, which goes on verbatim
    body: tuple[Any, ...] = ()  # types of the request body; of several, a list is taken, too
    body_example: Any = None
    takes: tuple[str, ...] = (JSON,)  # media types of the body
    answer: Any = None  # its type
    example: Any = None
    status: int = 200
    problems: tuple[int, ...] = ()
    empty: tuple[int, ...] = ()  # statuses whose answers have no body
    media_type: str = JSON
    scope: Scope | None = None  # what a token must allow; None: read for a GET, else admin
    is_open: bool = False  # asks for no token
    by_queue: bool = False  # answers a caller of some queues with what is theirs

    @property
    def required_scope(self) -> Scope:
        """The scope that a caller must have, unless the route is open."""
        return self.scope or choose_default_scope(self.method)


def get_caller_name(request: Request) -> str:
    """Return the name under which a request is counted: the name of its token, or else its address."""
    named: str = request.scope.get(CALLER, "")
    return named or (request.client.host if request.client else "")


def read_query(request: Request, params: Sequence[Param] | None) -> Query:
    """Read the query of a request. Returns parameter → value, with defaults for missing parameters.

    Raises a 422 problem for an unknown key, a repeated key, or a bad value.
    """
    if params is None:
        return {}
    values = {param.name: param.default for param in params}
    if not request.scope["query_string"]:
        return values
    by_name = {param.name: param for param in params}
    given = set()
    for name, text in request.query_params.multi_items():
        if name not in by_name:
            known = ", ".join(by_name) or "no parameters"
            error = FieldError(name, text, f"one of {known}" if by_name else known)
            raise Problem(422, "bad_request", f"unknown parameter {name!r}: expected {known}", errors=[error])
        if name in given:
            raise make_unprocessable_problem(name, text, "each parameter once")
        given.add(name)
        values[name] = by_name[name].parse_value(text)
    return values


class Endpoint:
    """One path of the route table as an ASGI application, with one row for each method."""

    def __init__(self, path: str, rows: Mapping[str, Row], context: Host) -> None:
        self.path = path
        self.rows = dict(rows)
        self.context = context
        self.allow = ", ".join(sorted({*rows, *(["HEAD"] if "GET" in rows else [])}))

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        method = scope["method"]
        request, instance = Request(scope, receive), self.context.prefix + scope["path"]
        scope[LEASE] = lease = self.context.bodies.make_lease()
        try:
            response = await self._answer_request(request, "GET" if method == "HEAD" else method)
        except FleetcastError as error:
            response = self.context.make_problem(error).make_response(instance)
        except ClientDisconnect:
            return
        except HTTPException as error:
            response = Problem(error.status_code, "http", error.detail).make_response(instance)
        except Exception as error:
            response = answer_unexpected_error(error, instance)
        finally:
            lease.release()
        self.context.metrics.observe(self.path, method, response.status_code, time.perf_counter() - began)
        if method == "HEAD":
            response = Response(None, response.status_code, dict(response.headers))
        await response(scope, receive, send)

    async def _answer_request(self, request: Request, method: str) -> Response:
        row, access = self.rows.get(method), self.context.access
        if row is None:
            await access.admit_caller(request, None)
            if self.path == ANY_FILE:
                path = request.scope["path"][:200]
                raise Problem(404, "not_found", f"nothing takes {request.method} at {path!r}; /docs lists the routes")
            detail = f"{request.method} is not allowed here: expected {self.allow}"
            raise Problem(405, "method_not_allowed", detail, headers={"allow": self.allow})
        if row.is_open:
            access.refuse_other_sites(request.method, request.scope["headers"])
        else:
            request.scope[CALLER] = (await access.admit_caller(request, row.required_scope, row.by_queue)).name
        return await row.handler(request, self.context, read_query(request, row.params))


def make_routes(rows: Sequence[Row], context: Host) -> list[Route]:
    """Return Starlette routes in the order of the rows, one for each path."""
    by_path: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_path.setdefault(row.path, {})[row.method] = row
    return [Route(path, Endpoint(path, methods, context), name=path) for path, methods in by_path.items()]
