"""Routes for risk: the ranking of all nodes, and one node in full.

These two routes are the most frequent ones.
"""

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.models.risk.part_risk import list_usual_parts
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.service.answers.risk import NodeAnswer, RiskNodes
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.http.problems import make_warming_problem
from fleetcast.service.http.table import Param, Query, Row, encode
from fleetcast.service.pipeline.documents import round_probability

MAX_ROWS = 100_000
ROWS_AT_A_TIME = 250
USUAL = encode(list_usual_parts())

RANKING_PARAMS = (
    Param("horizon_s", int, "how far ahead the probability looks", RISK_HORIZONS_S[0], choices=RISK_HORIZONS_S),
    Param("kind", str, "only this kind; without it the likeliest kind of each node", choices=RISK_KINDS),
    Param("min", float, "only nodes with at least this probability", least=0.0, most=1.0),
    Param("rack", str, "only nodes of this rack"),
    Param("limit", int, "at most this many rows", MAX_ROWS, least=1, most=MAX_ROWS),
)


async def answer_node(request: Request, context: Context, query: Query) -> Response:
    """Answer with the prebuilt answer of one node."""
    board = context.cache.get_board()
    answers = context.cache.get_node_answers(board)
    name = request.path_params["node"]
    body = answers.get_body(name.encode())
    if body is None:
        raise UnknownEntity(f"no node {name[:200]!r}; {len(answers.rows)} known")
    if not body:
        raise make_warming_problem(f"node {name} is new and has no scores yet")
    return make_aged_answer(context, board, answers.as_of_ms, body)


async def answer_ranking(request: Request, context: Context, query: Query) -> Response:
    """Answer with the ranking of nodes, the riskiest first."""
    cache, board = context.cache, context.cache.get_board()
    as_of_ms = cache.get_as_of_ms(board, "answers.risk")
    of_rack = _make_rack_mask(board, query["rack"])
    key = ("ranking", query["horizon_s"], query["kind"])
    ranked = await asyncio.shield(
        cache.get_or_derive(
            board, key, lambda: asyncio.ensure_future(_rank_nodes(cache, board, query["horizon_s"], query["kind"]))
        )
    )
    chosen = ranked.p >= (-1.0 if query["min"] is None else query["min"])
    if of_rack is not None:
        chosen &= of_rack[ranked.order]
    rows = b",".join([ranked.rows[at] for at in np.flatnonzero(chosen)[: query["limit"]].tolist()])
    model = encode(str(board.meta("answers.risk").get("model", "")))
    body = b'{"as_of_ms":%d,"model":%b,"rows":[%b],"usual":%b,%b}' % (
        as_of_ms,
        model,
        rows,
        USUAL,
        _encode_calibration(cache, board),
    )
    return make_aged_answer(context, board, as_of_ms, body)


def _encode_calibration(cache: BoardCache, board: Board) -> bytes:
    """Encode the accuracy of past probabilities, and the training data of the history hazard, as JSON."""
    known = cache.get_document(board, "doc.risk_calibration")
    return b'"calibration":%b,"history":%b' % (encode(known["rows"]), encode(known["history"]))


@dataclass(frozen=True, slots=True)
class Ranking:
    """All nodes at one horizon, the riskiest first.

    order: (n,) node rows. p: (n,) probabilities in that order, -1 if unknown. rows: the JSON of each
    node.
    """

    order: NDArray[np.int64]
    p: NDArray[np.float64]
    rows: list[bytes]


async def _rank_nodes(cache: BoardCache, board: Board, horizon_s: int, kind: str | None) -> Ranking:
    """Rank the nodes, and encode their rows as JSON in slices. Other requests can run between slices."""
    kinds = RISK_KINDS if kind is None else (kind,)
    risk = board.array("node.risk")[[RISK_KINDS.index(name) for name in kinds], RISK_HORIZONS_S.index(horizon_s)]
    known = np.nan_to_num(risk, nan=-1.0)
    worst, which = known.max(axis=0), known.argmax(axis=0).tolist()
    order = np.argsort(-worst, kind="stable")
    blob = cache.get_section(board, "answers.risk")
    offsets: list[int] = board.array("answers.risk.offsets").tolist()
    tails = [b',"kind":"%b","horizon_s":%d}' % (name.encode(), horizon_s) for name in kinds]
    unknown = b',"kind":null,"horizon_s":%d}' % horizon_s
    rows: list[bytes] = []
    shown: list[float] = []
    for begin in range(0, len(order), ROWS_AT_A_TIME):
        for row in order[begin : begin + ROWS_AT_A_TIME].tolist():
            p = round_probability(worst[row]) if worst[row] >= 0 else None
            tail = unknown if p is None else tails[which[row]]
            head = bytes(blob[offsets[row] : offsets[row + 1] - 1])
            rows.append(b'%b,"p":%b%b' % (head, encode(p), tail))
            shown.append(-1.0 if p is None else p)
        await asyncio.sleep(0)
    return Ranking(order, np.array(shown), rows)


def _make_rack_mask(board: Board, rack: str | None) -> NDArray[np.bool_] | None:
    """Return for each node whether it is in a rack: (n,) bool. Returns None for all racks.

    Raises UnknownEntity for an unknown rack.
    """
    if rack is None:
        return None
    racks = board.names("names.rack")
    if rack not in racks:
        raise UnknownEntity(f"no rack {rack[:200]!r}; racks are {', '.join(sorted(racks)[:20]) or 'none'}")
    mask: NDArray[np.bool_] = board.array("node.domain.rack") == racks.index(rack)
    return mask


SLOW_CLOCK = "SM clock 990 MHz, usual 1,980 (thermal slowdown since 14:02)"
DRAIN = {"code": "drain", "sentence": "Drain after the running job and inspect its cooling."}

ROWS = (
    Row(
        "GET",
        "/v1/nodes/{node}",
        answer_node,
        "One node: risk by kind and horizon, reasons, action, jobs and GPUs",
        "risk",
        answer=NodeAnswer,
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
            "host": {"cpu_idle": 0.61, "cpu_steal": 0.0, "memory_available_bytes": 1.5e12, "net_rx_bytes_per_s": 2.1e8},
            "model": "rules",
        },
    ),
    Row(
        "GET",
        "/v1/risk/nodes",
        answer_ranking,
        "All nodes, riskiest first",
        "risk",
        params=RANKING_PARAMS,
        answer=RiskNodes,
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
                    "parts": [{"entity": "n042/3", "part": "gpu", "p": [0.61, 0.61, 0.62, 0.62]}],
                }
            ],
            "usual": [{"part": "gpu", "p": [0.0000048, 0.0000241, 0.0001155, 0.0008082]}],
            "calibration": [
                {
                    "horizon_s": 86400,
                    "matured": 4000,
                    "faults": 15,
                    "mean_p": 0.0041,
                    "observed": 0.00375,
                    "brier_skill": 0.004,
                    "bins": [{"low": 0.002, "high": 0.005, "n": 3900, "p": 0.0034, "observed": 0.0033}],
                    "since_ms": 1759000000000,
                }
            ],
            "history": {
                "source": "InfiniteHBD, days 14 to 160",
                "faults": 294,
                "nodes": 400,
                "days": 157,
                "times": 1.0,
            },
        },
    ),
)
