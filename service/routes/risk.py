"""Risk: the ranking of all nodes, and one node whole. The two hottest routes."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from fleet.errors import UnknownEntity
from models.scores import RISK_HORIZONS_S, RISK_KINDS
from service.board import Board
from service.feed import BoardFeed
from service.problems import warming
from service.routes import shapes
from service.routes.context import Context
from service.routes.table import Param, Query, Row, answer, encode

MAX_ROWS = 100_000

RANKING_PARAMS = (
    Param("horizon_s", int, "how far ahead the probability looks", RISK_HORIZONS_S[0], choices=RISK_HORIZONS_S),
    Param("kind", str, "only this kind; without it the likeliest kind of each node", choices=RISK_KINDS),
    Param("min", float, "only nodes with at least this probability", least=0.0, most=1.0),
    Param("rack", str, "only nodes of this rack"),
    Param("limit", int, "at most this many rows", MAX_ROWS, least=1, most=MAX_ROWS),
)


async def node(request: Request, context: Context, query: Query) -> Response:
    """The prebuilt answer of one node."""
    board = context.feed.board()
    answers = context.feed.node_answers(board)
    name = request.path_params["node"]
    body = answers.body(name.encode())
    if body is None:
        raise UnknownEntity(f"no node {name[:200]!r}; {len(answers.rows)} known")
    if not body:
        raise warming(f"node {name} is new and has no scores yet")
    return answer(context, board, answers.as_of_ms, body)


async def ranking(request: Request, context: Context, query: Query) -> Response:
    """Nodes, riskiest first."""
    feed, board = context.feed, context.feed.board()
    as_of_ms = feed.as_of_ms(board, "doc.risk")
    key = ("ranking", *(query[param.name] for param in RANKING_PARAMS))
    body = feed.kept(board, key, lambda: encode(_ranking(feed, board, as_of_ms, query)))
    return answer(context, board, as_of_ms, body)


def _ranking(feed: BoardFeed, board: Board, as_of_ms: int, query: Query) -> dict[str, Any]:
    horizon = RISK_HORIZONS_S.index(query["horizon_s"])
    kinds = (query["kind"],) if query["kind"] else RISK_KINDS
    rows = feed.document(board, "doc.risk")
    if query["rack"] is not None:
        racks = sorted({row["rack"] for row in rows if row["rack"]})
        if query["rack"] not in racks:
            shown = ", ".join(racks[:20]) or "none"
            raise UnknownEntity(f"no rack {query['rack'][:200]!r}; racks are {shown}")
        rows = [row for row in rows if row["rack"] == query["rack"]]
    worst = [_worst(row, kinds, horizon) for row in rows]
    order = sorted(range(len(rows)), key=lambda at: -worst[at][0])  # unknown (-1) comes last
    least = -1.0 if query["min"] is None else query["min"]
    chosen = [at for at in order if worst[at][0] >= least][: query["limit"]]
    model = str(board.meta("doc.risk").get("model", ""))
    return {
        "as_of_ms": as_of_ms,
        "model": model,
        "rows": [_row(rows[at], *worst[at], query["horizon_s"]) for at in chosen],
    }


def _worst(row: dict[str, Any], kinds: tuple[str, ...], horizon: int) -> tuple[float, str | None]:
    """The highest known probability and its kind; (-1, None) when nothing is known."""
    best: tuple[float, str | None] = (-1.0, None)
    for kind in kinds:
        p = row["p"][kind][horizon]
        if p is not None and p > best[0]:
            best = (p, kind)
    return best


def _row(row: dict[str, Any], p: float, kind: str | None, horizon_s: int) -> dict[str, Any]:
    return {
        "node": row["node"],
        "rack": row["rack"],
        "p": p if kind else None,
        "kind": kind,
        "horizon_s": horizon_s,
        "state": row["state"],
        "placed": row["placed"],
        "reason": row["reason"],
        "action": row["action"],
    }


SLOW_CLOCK = "SM clock 990 MHz, usual 1,980 (thermal slowdown since 14:02)"
DRAIN = {"code": "drain", "sentence": "Drain after the running job and inspect its cooling."}

ROWS = (
    Row(
        "GET",
        "/v1/nodes/{node}",
        node,
        "One node: risk by kind and horizon, reasons, action, jobs and GPUs",
        "risk",
        answer=shapes.NodeAnswer,
        problems=(404, 503),
        example={
            "node": "n042",
            "as_of_ms": 1760000000000,
            "state": "degraded",
            "placed": True,
            "risk": [{"kind": "slow", "horizon_s": 3600, "p": 0.62}, {"kind": "fail", "horizon_s": 3600, "p": 0.04}],
            "reasons": [
                {
                    "feature": "sm_clock_mhz",
                    "entity": "n042/3",
                    "value": 990.0,
                    "usual": 1980.0,
                    "unit": "MHz",
                    "share": 0.7,
                    "since_ms": 1759999880000,
                    "sentence": SLOW_CLOCK,
                }
            ],
            "action": DRAIN,
            "jobs": ["train-42"],
            "gpus": [{"index": 3, "job": "train-42", "power_w": 402.5, "gpu_temp_c": 87, "sm_clock_mhz": 990}],
            "model": "rules",
        },
    ),
    Row(
        "GET",
        "/v1/risk/nodes",
        ranking,
        "All nodes, riskiest first",
        "risk",
        params=RANKING_PARAMS,
        answer=shapes.RiskNodes,
        problems=(404, 422, 503),
        example={
            "as_of_ms": 1760000000000,
            "model": "rules",
            "rows": [
                {
                    "node": "n042",
                    "rack": "r03",
                    "p": 0.62,
                    "kind": "slow",
                    "horizon_s": 3600,
                    "state": "degraded",
                    "placed": True,
                    "reason": SLOW_CLOCK,
                    "action": DRAIN,
                }
            ],
        },
    ),
)
