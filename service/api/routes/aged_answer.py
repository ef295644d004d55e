"""JSON answers about the fleet. Their headers state the age of the data."""

from starlette.responses import Response

from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.board import Board
from fleetcast.service.http.table import JSON, NO_STORE


def make_age_headers(context: Context, as_of_ms: int, board: Board | None = None) -> dict[str, str]:
    """Return headers with the age of the data in whole seconds of fleet time, and the board's sequence number."""
    age_s = max(0, (context.clock.now_ms() - as_of_ms) // 1000)
    headers = {"age": str(age_s), "cache-control": NO_STORE}
    if board is not None:
        headers["x-fleetcast-board"] = str(board.sequence)
    return headers


def make_aged_answer(context: Context, board: Board, as_of_ms: int, body: bytes) -> Response:
    """Return a JSON answer about the fleet, with the age of its data."""
    return Response(body, 200, make_age_headers(context, as_of_ms, board), JSON)
