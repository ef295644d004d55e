"""The route for estimates of a job's needs and start time.

The needs come from the tables of job kinds, and the start time from the placer.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.requests import PlacementRequest, check_avoided_nodes, check_request
from fleetcast.service.answers.estimates import Estimate
from fleetcast.service.api.estimates import NO_START, PlacerEstimate, StartAnswer, make_estimate
from fleetcast.service.api.placer_link import ForwardedAnswer
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.placements import REQUEST
from fleetcast.service.http.access import Scope
from fleetcast.service.http.placement_body import decode_placement_body
from fleetcast.service.http.request_body import read_body
from fleetcast.service.http.table import Query, Row, encode

TIMEOUT_S = 2.0  # wall: a start that takes longer to find is not waited for
REFUSED = (400, 413, 422)

decode_answer = msgspec.json.Decoder(StartAnswer).decode


async def answer_estimate(request: Request, context: Context, query: Query) -> Response:
    """Answer with the run time and needs from the board, and the start time from the placer.

    If the placer does not answer, the start time is null and a reason says so.
    """
    body = await read_body(request, context.config.api.max_body_bytes)
    wanted = _decode_request(body)
    board = context.cache.get_board()
    reply = await request_start_estimate(request, context, body)
    if isinstance(reply, ForwardedAnswer) and (reply.status in REFUSED or (context.mirror and reply.status == 200)):
        return Response(reply.body, reply.status, {"cache-control": "no-store", **reply.headers})
    return make_aged_answer(
        context,
        board,
        board.as_of_ms,
        encode(make_estimate(board, wanted, parse_start_estimate(reply), board.as_of_ms)),
    )


async def request_start_estimate(request: Request, context: Context, body: bytes) -> ForwardedAnswer | SourceError:
    """Request a job's estimated start from the placer. If the placer does not answer, return the SourceError.

    A replica requests the whole estimate from the api that has a placer.
    """
    headers = context.access.make_caller_headers(request) | {
        "content-type": "application/json",
        "accept": "application/json",
    }
    path = "/jobs/estimate" if context.mirror else "/estimate"
    try:
        return await context.placer.forward_request("POST", path, body, headers, TIMEOUT_S)
    except SourceError as error:
        return error


def _decode_request(body: bytes) -> PlacementRequest:
    """Decode the placement request.

    Raises a problem if it is invalid, or if it needs something that is not supported yet.
    """
    wanted = decode_placement_body(body)
    check_request(wanted)
    check_avoided_nodes(wanted)
    return wanted


def parse_start_estimate(reply: ForwardedAnswer | SourceError) -> PlacerEstimate:
    """Return the start that the placer estimates, or the reason why there is none."""
    if isinstance(reply, SourceError):
        return PlacerEstimate(None, str(reply))
    try:
        body = decode_answer(reply.body)
    except msgspec.MsgspecError:
        body = NO_START
    return PlacerEstimate(body) if reply.status == 200 else PlacerEstimate(None, body.detail)


ROWS = (
    Row(
        "POST",
        "/v1/jobs/estimate",
        answer_estimate,
        "Run time, needs and start of a request, without placing it",
        "jobs",
        params=(),
        body=(PlacementRequest,),
        body_example=REQUEST | {"topology": {"required": "node"}, "gang": 1},
        answer=Estimate,
        problems=(400, 413, 415, 422, 503),
        scope=Scope.READ,
        example={
            "as_of_ms": 1760000000000,
            "request_id": "train-42-1",
            "run_s": {"p50": 5400.0, "p90": 31000.0, "p99": 52000.0},
            "peak_gpu_memory_gib": 71.3,
            "power_w": 4710.0,
            "start_ms": {"p10": 1760001200000, "p50": 1760002400000, "p90": 1760003900000},
            "blocked_by": [
                {
                    "job": "4711",
                    "node": "n041",
                    "ends_ms": {"p10": 1760001200000, "p50": 1760002400000, "p90": 1760003900000},
                }
            ],
            "constraint": "topology",
            "sentence": "needs 8 GPUs of model H100 with fast intra-node links in pool train; the earliest such block "
            "is in 40 min (p90 65 min), when job 4711 ends. It should run 1 h 30 min (p90 8 h 37 min).",
            "model": "duration-0003",
            "similar": {"run_s": "user and name", "needs": "user and name", "runs_seen": 12},
            "reasons": {},
            "ignored": ["tenant"],
            "start_as_of_ms": 1759999970000,
            "by": "runs",
        },
    ),
)
