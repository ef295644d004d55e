"""The API's FastAPI application. It serves the board, the inbox and the placer.

`fleetcast.service.api.routes.all` lists its routes.
"""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.errors import FleetcastError
from fleetcast.service.api.openapi import make_openapi_document
from fleetcast.service.api.routes import console, placements
from fleetcast.service.api.routes.all import ROWS
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.wiring import make_api_access, make_api_context, open_context
from fleetcast.service.config import Config
from fleetcast.service.http.access import Access, Scope, choose_default_scope
from fleetcast.service.http.problems import answer_starlette_error, convert_to_problem
from fleetcast.service.http.table import Row, encode, make_routes


def create_app(config: Config, clock: Clock, *, writer: str = "api", access: Access | None = None) -> FastAPI:
    """Make the application. Raises ConfigError if `api.host` needs tokens and there are none.

    writer: the name in the inbox segments that the application writes. access: if None, it is loaded from
    the configuration and the environment.
    """
    context = make_api_context(config, clock, make_api_access(config) if access is None else access)

    @contextlib.asynccontextmanager
    async def manage_lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with open_context(context, writer):
            yield

    rows = (
        *(_make_replica_row(row) if context.mirror else row for row in ROWS),
        Row("GET", "/openapi.json", _answer_openapi, "This document", "docs", answer=dict),
        Row(
            "GET",
            "/docs",
            console.make_docs_handler(ROWS),
            "The routes as a page",
            "docs",
            answer=str,
            media_type="text/html",
        ),
        *console.ROWS,
    )

    async def admit_caller(request: Request) -> None:
        """Admit the caller of a route that was added with a FastAPI decorator.

        Routes of the route table check their callers themselves.
        """
        await context.access.admit_caller(request, choose_default_scope(request.method))

    app = FastAPI(
        title="Fleetcast",
        version=metadata.version("fleetcast"),
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},
        lifespan=manage_lifespan,
        routes=list(make_routes(rows, context)),
        dependencies=[Depends(admit_caller)],
        exception_handlers={HTTPException: answer_starlette_error, FleetcastError: _answer_fleetcast_error},
    )
    app.state.context = context

    def build_document() -> dict[str, Any]:
        if app.openapi_schema is None:
            own = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = make_openapi_document(rows, app.version, own, needs_token=not context.access.is_open)
        return app.openapi_schema

    app.openapi = build_document  # type: ignore[method-assign]
    return app


def _make_replica_row(row: Row) -> Row:
    """Return the row that a replica serves for a route.

    A replica forwards events to the api that has the pipeline.
    """
    return dataclasses.replace(row, handler=placements.forward_to_placer) if row.required_scope is Scope.EVENTS else row


async def _answer_openapi(request: Request, context: Context, query: Any) -> Response:
    return Response(encode(request.app.openapi()), media_type="application/json")


async def _answer_fleetcast_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FleetcastError)
    return convert_to_problem(error).make_response(request.scope["path"])
