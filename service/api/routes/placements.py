"""Routes for placements, the queue and the audit trail.

They forward requests and answers unchanged between the client and the placer.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.service.answers.actions import PlacementAnswer
from fleetcast.service.answers.placements import Audit, Fragmentation, Placements, Queue, Settled
from fleetcast.service.api.placer_link import ForwardedAnswer, PlacerLink
from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import read_body
from fleetcast.service.http.table import Query, Row

FORWARDED_HEADERS = ("content-type", "accept", "if-match", "if-none-match", "user-agent")


async def forward_to_placer(request: Request, context: Context, query: Query) -> Response:
    """Forward the request to the placer, and return its answer unchanged."""
    body = await read_body(request, context.config.api.max_body_bytes) if request.method in ("POST", "PUT") else None
    headers = {name: value for name, value in request.headers.items() if name in FORWARDED_HEADERS or name[:3] == "ce-"}
    headers |= context.access.make_caller_headers(request)
    if request.client is not None:
        headers["x-forwarded-for"] = request.client.host
    answer = await _send_to_placer(context.placer, request, body, headers)
    return Response(answer.body, answer.status, {"cache-control": "no-store", **answer.headers})


async def _send_to_placer(
    placer: PlacerLink, request: Request, body: bytes | None, headers: dict[str, str]
) -> ForwardedAnswer:
    try:
        return await placer.forward_request(request.method, make_placer_path(request), body, headers)
    except SourceError as error:
        retry = {"retry-after": f"{max(1, round(error.retry_after_s))}"}
        raise Problem(503, "placer_away", str(error), headers=retry) from None


def make_placer_path(request: Request) -> str:
    """Return the request's path and query without /v1, still encoded as the client sent them."""
    raw: bytes = request.scope.get("raw_path") or request.scope["path"].encode()
    path = raw.partition(b"?")[0].decode("ascii", "replace").removeprefix("/v1")
    query: bytes = request.scope["query_string"]
    return f"{path}?{query.decode('ascii', 'replace')}" if query else path


REQUEST = {
    "request_id": "train-42-1",
    "job": "train-42",
    "tenant": "research",
    "queue": "train",
    "user": "ada",
    "gang": 8,
    "gpus_per_node": 8,
    "gpu_model": "H100",
    "topology": {"required": "rack"},
    "max_risk": 0.3,
}
DECISION = {
    "request_id": "train-42-1",
    "decision_id": "d-000017",
    "outcome": "placed",
    "sentence": "placed 8 x 8 GPUs in rack r03; avoided n042: SM clock 990 MHz, usual 1,980 (thermal slowdown)",
    "ranks": [{"rank": 0, "node": "n041", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}],
    "score": 0.91,
    "parts": {"risk": 0.4, "locality": 0.51},
    "nodes": 133,
    "candidates": 21,
    "rejected": {"busy": 111, "risk": 1},
    "runners_up": [],
    "topology_level": "rack",
    "generation": 1,
    "board_as_of_ms": 1760000000000,
    "models": {"risk": "rules"},
    "expires_ms": 1760000300000,
    "ignored": ["queue", "tenant"],
}
OUTLOOK: dict[str, Any] = {
    "reservation": {
        "request_id": "train-43-1",
        "shadow_ms": 1760003600000,
        "waits_for": "train-40",
        "gpus": 64,
        "idle_gpus": 16,
        "holds_p": 0.85,
        "by": "runs",
        "basis": "runs",
        "reason": "",
    },
    "backfill": [
        {"gpus": 24, "nodes": 5, "until_ms": None},
        {"gpus": 16, "nodes": 2, "until_ms": 1760003600000},
    ],
    "releases": [
        {
            "job": "train-40",
            "gpus": 48,
            "nodes": 6,
            "ends_ms": {"p10": 1760001000000, "p50": 1760002400000, "p90": 1760003900000},
            "by": "runs",
        }
    ],
    "starts_as_of_ms": 1759999970000,
}
OUTLOOK |= {
    "room": {
        "free_gpus": 40,
        "waiting_gpus": 64,
        "opens_ms": {"p10": 1760000600000, "p50": 1760004200000, "p90": 1760011400000},
        "sentence": "room in 70 min (p90 3 h), once the request that waits has started",
        "as_of_ms": 1759999970000,
        "by": "runs",
    },
    "reservations": [OUTLOOK["reservation"]],
    "record": {
        **{"n": 212, "by_p10": 0.12, "by_p50": 0.51, "by_p90": 0.9, "since_ms": 1759900000000},
        **{"n_p50": 196, "n_p90": 150},
        "first": {"n": 212, "by_p10": 0.1, "by_p50": 0.48, "by_p90": 0.88, "unanswered": 3, "n_p50": 196, "n_p90": 150},
        "by_age": [
            {"age_s": 0, "n": 212, "by_p10": 0.1, "by_p50": 0.48, "by_p90": 0.88, "n_p50": 196, "n_p90": 150},
        ],
    },
}
QUEUED = {
    "request_id": "train-43-1",
    "position": 1,
    "tenant": "research",
    "queue": "train",
    "user": "ada",
    "gang": 8,
    "gpus_per_node": 8,
    "priority": 0,
    "waiting_s": 340.0,
    "why": "waits for 64 GPUs (8 x 8 GPUs); 40 free GPUs fit; train-42 is next; starts in 70 min (p90 3 h)",
    "start_ms": {"p10": 1760000600000, "p50": 1760004200000, "p90": 1760011400000},
    "ignored": ["queue", "tenant"],
    "by": "runs",
}
FRAGMENTS: dict[str, Any] = {
    "pool": "train",
    "free_gpus": 40.5,
    "lost_gpus": 11.25,
    "stranded_gpus": 2.5,
    "largest_gang": {"node": 8, "nvlink_domain": 8, "rack": 24, "rail_group": 40, "block": 40, "cluster": 40}
    | {"anywhere": 40},
}
MOVES: dict[str, Any] = {
    "code": "found",
    "sentence": "1 move would let train-42-1 (64 GPUs) in now, at 0.3 GPU-hours; otherwise it waits for 71.1 GPU-hours",
    "request_id": "train-42-1",
    "job": "train-42",
    "gpus": 64,
    "moves": [
        {
            "kind": "move",
            "job": "eval-9",
            "attempt": 1,
            "queue": "research/nlp",
            "gpus": 4.0,
            "ranks": [{"rank": 0, "node": "n041", "gpus": [0, 1, 2, 3]}],
            "places": [{"rank": 0, "node": "n077", "gpus": [4, 5, 6, 7]}],
            "executor": "advice",
            "cost": {"lost": 40.0, "restart": 1200.0, "wait": 0.0, "risk": 0.0, "slow": 0.0}
            | {"fragments": 0.0, "gain": 0.0},
            "cost_gpu_s": 1240.0,
            "sentence": "moves attempt 1 of eval-9 (4 GPUs) for request train-42-1: a waiting gang fits then",
        }
    ],
    "cost_gpu_s": 1240.0,
    "gain_gpu_s": 256000.0,
    "ranks": DECISION["ranks"],
}
AS_OF = {"as_of_ms": 1760000000000}
AUDIT = {
    "audit_id": 17,
    "time_ms": 1760000000000,
    "caller": "ada",
    "action": "place",
    "request_id": "train-42-1",
    "decision_id": "d-000017",
    "board_as_of_ms": 1760000000000,
    "models": {"risk": "rules"},
    "sentence": DECISION["sentence"],
    "stored": "d7eda95cc1b04ed1e10b6452cb4d3c6bcc1c7a3b3c2a2d8a5a8c1ab9e8e65f04",
    "previous": "9c83febf4d158632bd81ce624da9c7131748572b2a6ce357c9ee766315a33e98",
    "hash": "836060b7cb51dfb1d5a7ae7cd5b36cf0bc2ab5bb0d5d1d8b1eec6f0f4a3d2c19",
}
HEAD = {"audit_id": AUDIT["audit_id"], "hash": AUDIT["hash"]}

PROBLEMS = {"POST": (400, 409, 413, 422, 503), "DELETE": (404, 409, 422, 503)}


def _make_row(method: str, path: str, summary: str, **more: Any) -> Row:
    problems = PROBLEMS[method] if method != "GET" else (404, 422, 503) if "{" in path else (422, 503)
    more.setdefault("scope", Scope.READ if method == "GET" else Scope.PLACE)
    return Row(method, path, forward_to_placer, summary, "placement", params=None, problems=problems, **more)


PLACEMENT: dict[str, object] = {"answer": Decision, "example": DECISION}
SUBMISSION: dict[str, object] = {"body": (PlacementRequest,), "body_example": REQUEST}

ROWS = (
    _make_row(
        "POST",
        "/v1/placements",
        "Decide now: place a gang or say why not. A dry run stores nothing, and says what would be stopped",
        answer=PlacementAnswer,
        example=DECISION,
        **SUBMISSION,
    ),
    _make_row(
        "GET",
        "/v1/placements",
        "Decisions since a cursor (after, limit)",
        by_queue=True,
        answer=Placements,
        example={**AS_OF, "rows": [{**DECISION, "cursor": 17, "job": "train-42", "attempt": 1}], "cursor": 17},
    ),
    _make_row(
        "GET",
        "/v1/placements/{request_id:path}",
        "One decision, the same bytes as at first",
        by_queue=True,
        **PLACEMENT,
    ),
    _make_row(
        "DELETE",
        "/v1/placements/{request_id:path}",
        "Give a placement's GPUs back",
        answer=Settled,
        example={
            "request_id": "train-42-1",
            "state": "cancelled",
            "sentence": "cancelled, its GPUs are free again",
        },
    ),
    _make_row(
        "GET",
        "/v1/queue",
        "Who waits, why, and when each will start",
        by_queue=True,
        answer=Queue,
        example={**AS_OF, "rows": [QUEUED], **OUTLOOK},
    ),
    _make_row(
        "POST",
        "/v1/queue",
        "Wait in the queue of the bundled engine",
        status=202,
        answer=Decision,
        example={**DECISION, "outcome": "queued", "sentence": QUEUED["why"], "ranks": []},
        **SUBMISSION,
    ),
    _make_row(
        "DELETE",
        "/v1/queue/{request_id:path}",
        "Leave the queue",
        answer=Settled,
        example={"request_id": "train-43-1", "state": "withdrawn", "sentence": "withdrawn from the queue"},
    ),
    _make_row(
        "GET",
        "/v1/fragmentation",
        "Free GPUs that the present demand cannot use, the largest gang that fits now, by pool, and moves that help",
        answer=Fragmentation,
        example={**AS_OF, "requests": 2000, "rows": [FRAGMENTS], "moves": MOVES},
    ),
    _make_row(
        "GET",
        "/v1/audit",
        "Who asked for what and what was decided, each line with the hash of the one before",
        scope=Scope.ADMIN,
        by_queue=True,
        answer=Audit,
        example={**AS_OF, "head": HEAD, "rows": [AUDIT]},
    ),
)
