"""Documented routes whose capability is not built yet: they say so with 501, never with a made-up value."""

from starlette.requests import Request
from starlette.responses import Response

from fleet.errors import NotBuiltError
from service.api.routes.context import Context
from service.api.routes.table import Handler, Query, Row
from service.http.access import Scope


def _not_built(reason: str) -> Handler:
    async def refuse(request: Request, context: Context, query: Query) -> Response:
        raise NotBuiltError(f"not built yet: {reason}")

    return refuse


def _row(method: str, path: str, summary: str, tag: str, reason: str) -> Row:
    scope = Scope.EVENTS if tag == "events" else Scope.READ  # the others ask, though by POST, and change nothing
    return Row(method, path, _not_built(reason), summary, tag, params=None, problems=(501,), scope=scope)


ROWS = (
    _row(
        "POST",
        "/v1/adapters/{name}/{verb}",
        "Calls of outside schedulers",
        "adapters",
        "no scheduler calls this way yet",
    ),
)
