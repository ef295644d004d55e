"""The route for the joint risk of a set of nodes, before a gang is placed there."""

from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.models.risk.gang_risk import GangRisk, compute_gang_risk
from fleetcast.models.risk.node_risk import compute_usual_risk
from fleetcast.models.words import format_age
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.board import Board
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import make_unprocessable_problem
from fleetcast.service.http.request_body import decode_json_body, read_body
from fleetcast.service.http.table import Query, Row, encode

MOST_NODES = 20_000
LONGEST_S = 90 * 86_400
DOMAINS = (("rack", "rack"), ("power", "power"), ("rail", "rail_group"))


class GangAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A query for a gang on whole nodes. Each node occurs once.

    The gang runs for a duration in seconds of fleet time.
    """

    nodes: tuple[str, ...]
    duration_s: float


class Weakest(msgspec.Struct):
    """The node that contributes most to the larger of the gang's two risks.

    `p`: the probability that this node interrupts or slows the gang.
    """

    node: str
    p: float
    risk: Literal["interruption", "slowness"]
    sentence: str


class Domain(msgspec.Struct):
    """A domain that at least two of the gang's nodes share. `share`: the domain's part of the interruption risk."""

    level: str
    name: str
    nodes: int
    share: float


class GangAnswer(msgspec.Struct):
    as_of_ms: int
    model: str
    nodes: int
    duration_s: float
    p_interrupted: float
    p_slow: float
    weakest: Weakest
    domains: list[Domain]
    unknown: list[str]
    sentence: str


GANG = msgspec.json.Decoder(GangAsked)


async def answer_gang_risk(request: Request, context: Context, query: Query) -> Response:
    """Answer with the risk of the gang, from the board.

    A node of unknown risk counts as an ordinary node. The answer names these nodes.
    """
    asked = _decode_query(await read_body(request, context.config.api.max_body_bytes))
    board = context.cache.get_board()
    answers = context.cache.get_node_answers(board)
    if len(asked.nodes) > len(answers.rows):
        known = f"at most the {len(answers.rows)} nodes of the fleet"
        raise make_unprocessable_problem("nodes", f"{len(asked.nodes)} names", known)
    missing = [name for name in asked.nodes if name.encode() not in answers.rows]
    if missing:
        some = ", ".join(repr(name[:200]) for name in missing[:20])
        raise UnknownEntity(f"no node {some}; {len(answers.rows)} known")
    rows = np.array([answers.rows[name.encode()] for name in asked.nodes], np.int64)
    risk = board.array("node.risk").astype(np.float64)
    prior = compute_usual_risk(risk)
    heat = board.array("node.gpu_temp_c")[rows] if "node.gpu_temp_c" in board else None
    found = compute_gang_risk(risk[:, :, rows], list_domains_by_level(board, rows), asked.duration_s, prior, heat)
    reasons: dict[str, str] = context.cache.get_document(board, "risk.reason") if "risk.reason" in board else {}
    unknown = [asked.nodes[at] for at in np.flatnonzero(np.isnan(risk[0, 0, rows])).tolist()]
    as_of_ms = context.cache.get_as_of_ms(board, "node.risk")
    model = str(board.meta("node.risk").get("model", ""))
    return make_aged_answer(
        context, board, as_of_ms, encode(_make_gang_answer(asked, found, reasons, unknown, as_of_ms, model))
    )


def _decode_query(body: bytes) -> GangAsked:
    """Decode the query. Raises a problem that names the invalid field."""
    asked = decode_json_body(body, GANG)
    if not asked.nodes or len(asked.nodes) > MOST_NODES:
        raise make_unprocessable_problem("nodes", f"{len(asked.nodes)} names", f"from 1 to {MOST_NODES} names")
    twice = find_repeated_name(asked.nodes)
    if twice is not None:
        raise make_unprocessable_problem("nodes", twice[:200], "each node once")
    if not 0 < asked.duration_s <= LONGEST_S:
        raise make_unprocessable_problem("duration_s", str(asked.duration_s), f"a number above 0, at most {LONGEST_S}")
    return asked


def find_repeated_name(names: Iterable[str]) -> str | None:
    """Return the first name that occurs a second time, or None."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def list_domains_by_level(board: Board, rows: NDArray[np.int64]) -> list[tuple[str, list[str]]]:
    """Return (level, domain name of each node) for each topology level on the board. rows: (n,) node rows.

    The name is "" for a node without a domain on that level.
    """
    found = []
    for level, section in DOMAINS:
        if f"node.domain.{section}" in board:
            names = (*board.names(f"names.{section}"), "")  # the last is of -1
            found.append((level, [names[at] for at in board.array(f"node.domain.{section}")[rows].tolist()]))
    return found


def _make_gang_answer(
    asked: GangAsked, found: GangRisk, reasons: dict[str, str], unknown: list[str], as_of_ms: int, model: str
) -> GangAnswer:
    at, p, risk = _find_weakest_member(found)
    name = asked.nodes[at]
    why = reasons.get(name, "no evidence against it beyond the ordinary")
    domains = [Domain(row.level, row.name, row.nodes, round(row.share, 3)) for row in found.domains]
    return GangAnswer(
        as_of_ms=as_of_ms,
        model=model,
        nodes=len(asked.nodes),
        duration_s=asked.duration_s,
        p_interrupted=float(f"{found.p_interrupted:.3g}"),
        p_slow=float(f"{found.p_slow:.3g}"),
        weakest=Weakest(name, float(f"{p:.3g}"), risk, f"{name}: {why}"),
        domains=domains,
        unknown=unknown,
        sentence=_describe_risk(asked, found, domains, len(unknown)),
    )


def _find_weakest_member(found: GangRisk) -> tuple[int, float, Literal["interruption", "slowness"]]:
    """Return the node that contributes most to the larger risk, its own probability, and which risk that is."""
    if found.p_slow > found.p_interrupted:
        return found.slowest, float(found.slow[found.slowest]), "slowness"
    return found.weakest, float(found.node[found.weakest]), "interruption"


def _describe_risk(asked: GangAsked, found: GangRisk, domains: list[Domain], unknown: int) -> str:
    """Describe the risk in words.

    >>> risk = GangRisk(0.083, 0.08, 0.6, np.array([0.05, 0.03]), np.array([0.0, 0.6]), 0, 1, ())
    >>> print(_describe_risk(GangAsked(("a", "b"), 7200), risk, [], 1))  # doctest: +NORMALIZE_WHITESPACE
    2 nodes get through 2 h without interruption with 92 %, without a slow node with 40 %; the weakest is b (slow with
    60 %). Of 1 nothing is known yet.
    """
    many = len(asked.nodes)
    who = f"{many} nodes get" if many > 1 else "1 node gets"
    at, p, risk = _find_weakest_member(found)
    does = "slow" if risk == "slowness" else "interrupts"
    probability = _format_percent(1 - found.p_interrupted)
    said = f"{who} through {format_age(asked.duration_s)} without interruption with {probability}"
    said += f", without a slow node with {_format_percent(1 - found.p_slow)}"
    said += f"; the weakest is {asked.nodes[at]} ({does} with {_format_percent(p)})."
    if domains:
        worst = domains[0]
        said += f" {worst.nodes} share {worst.level} {worst.name}, {_format_percent(worst.share)} of the risk."
    return said + (f" Of {unknown} nothing is known yet." if unknown else "")


def _format_percent(share: float) -> str:
    return f"{100 * share:.3g} %"


EXAMPLE: dict[str, object] = {
    "as_of_ms": 1760000000000,
    "model": "rules+logistic-1",
    "nodes": 2,
    "duration_s": 86400.0,
    "p_interrupted": 0.0712,
    "p_slow": 0.0204,
    "weakest": {"node": "n042", "p": 0.0601, "risk": "interruption", "sentence": "n042: failed 9 h ago"},
    "domains": [{"level": "rack", "name": "r03", "nodes": 2, "share": 0.081}],
    "unknown": [],
    "sentence": "2 nodes get through 24 h without interruption with 92.9 %, without a slow node with 98 %; "
    "the weakest is n042 (interrupts with 6.01 %). 2 share rack r03, 8.1 % of the risk.",
}

ROWS = (
    Row(
        "POST",
        "/v1/risk/gang",
        answer_gang_risk,
        "Risk of a set of nodes together, for so long",
        "risk",
        params=(),
        body=(GangAsked,),
        body_example={"nodes": ["n041", "n042"], "duration_s": 86400},
        answer=GangAnswer,
        problems=(400, 404, 413, 415, 422, 503),
        scope=Scope.READ,
        example=EXAMPLE,
    ),
)
