"""The route for a job's checkpoint interval, computed from the risk of its nodes and the checkpoint cost."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.models.jobs.checkpointing import DAY_S, RESTART_S, compute_ettr, make_checkpoint_plan
from fleetcast.models.risk.gang_risk import compute_gang_risk
from fleetcast.models.risk.node_risk import compute_usual_risk
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.api.routes.gang_risk import list_domains_by_level
from fleetcast.service.api.routes.jobs import decode_job_part, require_job_row
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.http.table import Query, Row, encode

NOT_LOOKED_AT = "It was not looked at yet; ask again in some seconds."


class CheckpointFacts(msgspec.Struct, frozen=True):
    """The facts about checkpoints in a job's fingerprint."""

    checkpoint_cost_s: float | None = None
    checkpoint_every_s: float | None = None
    checkpoint_cost_basis: Literal["measured", "told"] | None = None
    last_checkpoint_ms: int | None = None
    next_checkpoint_ms: dict[str, int] | None = None


class CheckpointAnswer(msgspec.Struct):
    """The best checkpoint interval of a job, and the present one (`every_s`), in seconds.

    `interval_s` and `expected_ettr` are null if the cost or the nodes are unknown. `failure_rate_per_day` is
    the rate of the whole gang, including the racks, power domains and rails that it uses. `restart_s` is an
    assumption. ETTR: the share of the time that is useful work.
    """

    as_of_ms: int
    model: str
    interval_s: float | None
    failure_rate_per_day: float | None
    checkpoint_cost_s: float | None
    cost_basis: Literal["measured", "told"] | None
    expected_ettr: float | None
    every_s: float | None
    ettr_now: float | None
    restart_s: float
    sentence: str


async def answer_checkpoint(request: Request, context: Context, query: Query) -> Response:
    """Answer with the best checkpoint interval of one job."""
    cache, board = context.cache, context.cache.get_board()
    name = request.path_params["job"]
    row = require_job_row(cache, board, name)
    facts = decode_job_part(cache, board, "doc.fingerprints", name, CheckpointFacts)
    as_of_ms = cache.get_as_of_ms(board, "node.risk")
    rate, model = _compute_failure_rate(cache, board, row.nodes), board.meta("node.risk")["model"]
    found = _make_advice(as_of_ms, model, facts or CheckpointFacts(), rate, len(row.nodes))
    if facts is None and row.state != "queued":
        over = f"It is {row.state}: there is nothing left to checkpoint."
        found.sentence = NOT_LOOKED_AT if row.state == "running" else over
    return make_aged_answer(context, board, as_of_ms, encode(found))


def _compute_failure_rate(cache: BoardCache, board: Board, nodes: Sequence[str]) -> float | None:
    """Return the gang's failures per day, including faults of its domains, or None if it holds no nodes."""
    if not nodes:
        return None
    cache.get_section(board, "node.risk")
    risk = board.array("node.risk").astype(np.float64)
    rows = cache.get_or_derive(
        board, "rows_of_nodes", lambda: {name: row for row, name in enumerate(board.names("names.node"))}
    )
    known = np.array([row for node in nodes if (row := rows.get(node, risk.shape[2])) < risk.shape[2]], np.int64)
    strange = len(nodes) - len(known)
    own = np.concatenate((risk[:, :, known], np.full((*risk.shape[:2], strange), np.nan)), axis=2)
    domains = [(level, [*names, *[""] * strange]) for level, names in list_domains_by_level(board, known)]
    return compute_gang_risk(own, domains, DAY_S, compute_usual_risk(risk)).hazard


def _make_advice(as_of_ms: int, model: str, facts: CheckpointFacts, rate: float | None, nodes: int) -> CheckpointAnswer:
    cost_s, every_s = facts.checkpoint_cost_s, facts.checkpoint_every_s
    found = CheckpointAnswer(
        as_of_ms,
        model,
        interval_s=None,
        failure_rate_per_day=None if rate is None else round(rate, 6),
        checkpoint_cost_s=cost_s,
        cost_basis=facts.checkpoint_cost_basis,
        expected_ettr=None,
        every_s=every_s,
        ettr_now=None,
        restart_s=RESTART_S,
        sentence="No event reports what a checkpoint of it takes." if rate else "It holds no nodes now.",
    )
    if not cost_s or not rate:
        return found
    plan = make_checkpoint_plan(cost_s, rate)
    now = compute_ettr(every_s, cost_s, rate) if every_s else None
    sentence = f"Checkpoint every {plan.interval_s / 60:.0f} min: {_describe_failure_rate(nodes, rate)}"
    sentence += f" and a checkpoint takes {cost_s:.0f} s, so {100 * plan.expected_ettr:.1f} % of the time is work"
    sentence += f"; now, every {every_s / 60:.0f} min, {100 * now:.1f} %." if every_s and now is not None else "."
    found.interval_s, found.expected_ettr = round(plan.interval_s, 1), round(plan.expected_ettr, 4)
    found.ettr_now, found.sentence = None if now is None else round(now, 4), sentence
    return found


def _describe_failure_rate(nodes: int, rate: float) -> str:
    """Describe how often the nodes fail. rate: failures per day.

    >>> _describe_failure_rate(1, 0.00342), _describe_failure_rate(8, 0.84), _describe_failure_rate(512, 3.328)
    ('1 node fails once in 292 days', '8 nodes fail once in 29 h', '512 nodes fail 3.3 times a day')
    """
    who = "1 node fails" if nodes == 1 else f"{nodes:,} nodes fail"
    if rate >= 1:
        often = f"{rate:.2g}" if rate < 99.5 else f"{rate:,.0f}"
        return f"{who} once a day" if often == "1" else f"{who} {often} times a day"
    days = 1 / rate
    if days < 3:
        return f"{who} once in {24 * days:.0f} h"
    return f"{who} once in {days:,.0f} days" if days < 730 else f"{who} once in {days / 365:,.0f} years"


ROWS = (
    Row(
        "GET",
        "/v1/jobs/{job:path}/checkpoint",
        answer_checkpoint,
        "How often a job should checkpoint, and what of its time is work then",
        "jobs",
        answer=CheckpointAnswer,
        problems=(404, 503),
        example={
            "as_of_ms": 1760000000000,
            "model": "rules+logistic-1",
            "interval_s": 1248.2,
            "failure_rate_per_day": 3.328,
            "checkpoint_cost_s": 30.0,
            "cost_basis": "measured",
            "expected_ettr": 0.941,
            "every_s": 3600.0,
            "ettr_now": 0.912,
            "restart_s": 300.0,
            "sentence": "Checkpoint every 21 min: 512 nodes fail 3.3 times a day and a checkpoint takes 30 s, so "
            "94.1 % of the time is work; now, every 60 min, 91.2 %.",
        },
    ),
)
