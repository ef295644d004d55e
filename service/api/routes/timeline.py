"""The route for the timeline of one node: its past signals, scores, faults, jobs and actions.

The pipeline records the timeline on the board.
"""

from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.errors import UnknownEntity
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.printable import escape_unprintable
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.board.board import Board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.http.problems import make_warming_problem
from fleetcast.service.http.table import Param, Query, Row, encode
from fleetcast.service.pipeline.node_past import HORIZONS_S, SECTION, PastSpan, PublishedTimeline, Spell, Stay

DAY_MINUTES = 1440
WORDS = {
    "drain": "removed from service",
    "undrain": "put back into service",
    "lost": "reported lost",
    "returned": "back again",
    "withhold": "withheld from other work",
    "release": "released for other work",
}


class ProbabilityStep(msgspec.Struct):
    """A probability that holds from `time_ms` until the next step. `p` is null if it was unknown."""

    time_ms: int
    p: float | None


class Scores(msgspec.Struct):
    """The steps of the highest probability (fail, drain or slow) within one horizon.

    The first step may begin before `from_ms`.
    """

    horizon_s: int
    steps: list[ProbabilityStep]


class Value(msgspec.Struct):
    time_ms: int
    value: float


class SignalSpell(msgspec.Struct):
    """A risk reason, and the time for which it held. `ended_ms` is null while it still holds.

    Each value holds until the next one.
    """

    feature: str
    entity: str
    unit: str
    sentence: str
    usual: float | None
    share: float
    began_ms: int
    ended_ms: int | None
    values: list[Value]


class Happening(msgspec.Struct):
    """A node event on the timeline, or a hard signal from the telemetry of the node (`fault`)."""

    time_ms: int
    type: Literal["drain", "undrain", "lost", "returned", "xid", "health", "withhold", "release", "fault"]
    sentence: str
    source: str
    gpu: int | None
    code: int | str | None


class JobStay(msgspec.Struct):
    """The time of an attempt on this node. `gpus`: the number of GPUs that it held here, null if unknown.

    `outcome` is "" while the attempt runs, or if the outcome is unknown.
    """

    job: str
    attempt: int
    gpus: int | None
    began_ms: int
    ended_ms: int | None
    outcome: str


class ActionSpan(msgspec.Struct):
    """The time for which an action was advised or taken.

    `taken`: the node was removed from service. If false, this was only advised.
    """

    code: str
    sentence: str
    began_ms: int
    ended_ms: int | None
    taken: bool


class StateSpan(msgspec.Struct):
    state: str
    began_ms: int
    ended_ms: int | None


class NodeTimeline(msgspec.Struct):
    """The timeline of one node from `from_ms` to `as_of_ms`.

    The time before `known_since_ms` is unknown. Older scores and values are sparser.
    """

    node: str
    as_of_ms: int
    from_ms: int
    known_since_ms: int
    scores: list[Scores]
    signals: list[SignalSpell]
    events: list[Happening]
    jobs: list[JobStay]
    actions: list[ActionSpan]
    states: list[StateSpan]


async def answer_timeline(request: Request, context: Context, query: Query) -> Response:
    """Answer with the timeline of a node over the last minutes, in order of time."""
    cache, board = context.cache, context.cache.get_board()
    shown = read_node_past(cache, board, request.path_params["node"])
    as_of_ms = cache.get_as_of_ms(board, "answers.node")
    body = _make_timeline(shown, as_of_ms - 60_000 * int(query["minutes"]), as_of_ms)
    return make_aged_answer(context, board, as_of_ms, encode(body))


def read_node_past(cache: BoardCache, board: Board, name: str) -> PublishedTimeline:
    """Return the recorded past of a node.

    Raises UnknownEntity for an unknown node, and a 503 problem if the node is too new to have a past.
    """
    rows = cache.get_node_answers(board).rows
    row = rows.get(name.encode())
    if row is None:
        raise UnknownEntity(f"no node {name[:200]!r}; {len(rows)} known")
    blob, offsets = cache.get_section(board, SECTION), cache.get_section(board, f"{SECTION}.offsets").cast("q")
    if row + 1 >= len(offsets):
        raise make_warming_problem(f"node {name} is new and has no timeline yet")
    return msgspec.json.decode(blob[offsets[row] : offsets[row + 1]], type=PublishedTimeline)


def _make_timeline(past: PublishedTimeline, from_ms: int, now_ms: int) -> NodeTimeline:
    events = [event for event in past.events if from_ms <= event.time_ms <= now_ms]
    times_ms = {event.time_ms for event in past.events}
    faults = [spell for spell in past.signals if spell.fault and spell.began_ms not in times_ms]
    happened = [_make_event_happening(event) for event in events]
    happened += [_make_fault_happening(spell) for spell in faults if spell.began_ms >= from_ms]
    actions = [ActionSpan(row.code, row.sentence, row.began_ms, row.ended_ms, False) for row in past.actions]
    actions += _make_drain_spans(past.events)
    return NodeTimeline(
        node=past.node,
        as_of_ms=now_ms,
        from_ms=from_ms,
        known_since_ms=past.began_ms,
        scores=[_make_scores(past, at, from_ms) for at in range(len(HORIZONS_S))],
        signals=[_make_signal_spell(row) for row in past.signals if _overlaps_span(row, from_ms)],
        events=sorted(happened, key=lambda row: row.time_ms),
        jobs=[_make_job_stay(row) for row in past.stays if _overlaps_span(row, from_ms)],
        actions=sorted((row for row in actions if _overlaps_span(row, from_ms)), key=lambda row: row.began_ms),
        states=[StateSpan(row.code, row.began_ms, row.ended_ms) for row in past.states if _overlaps_span(row, from_ms)],
    )


def _overlaps_span(row: Spell | PastSpan | Stay | ActionSpan, from_ms: int) -> bool:
    return row.ended_ms is None or row.ended_ms >= from_ms


def _make_scores(past: PublishedTimeline, at: int, from_ms: int) -> Scores:
    """Return the steps of one horizon from `from_ms` on, without steps that change nothing.

    The first returned step is the last one before `from_ms`. at: the index of the horizon.
    """
    steps: list[ProbabilityStep] = []
    for time_ms, values in past.steps:
        if steps and steps[-1].p == values[at]:
            continue
        if steps and time_ms <= from_ms:
            steps.clear()
        steps.append(ProbabilityStep(time_ms, values[at]))
    return Scores(HORIZONS_S[at], steps)


def _make_signal_spell(row: Spell) -> SignalSpell:
    values = [Value(time_ms, value) for time_ms, value in row.points]
    said = (row.feature, row.entity, row.unit, row.sentence, row.usual, row.share)
    return SignalSpell(*said, row.began_ms, row.ended_ms, values)


def _make_job_stay(row: Stay) -> JobStay:
    return JobStay(row.job, row.attempt, row.gpus, row.began_ms, row.ended_ms, row.outcome)


def _make_fault_happening(row: Spell) -> Happening:
    last = row.entity.rpartition("/")[2]
    gpu = int(last) if "/" in row.entity and last.isdigit() else None
    code = int(row.points[-1][1]) if row.feature == "xid" else None
    return Happening(row.began_ms, "fault", row.sentence, "telemetry", gpu, code)


def _make_event_happening(event: NodeEvent) -> Happening:
    what = f"XID {event.code}" if event.type == "xid" else WORDS.get(event.type) or event.check or event.type
    if event.type in ("withhold", "release") and event.check:
        what = f"{what} ({event.check.replace('_', ' ')})"
    where = "" if event.gpu is None else f"GPU {event.gpu}: "
    said = f"{where}{what}" + (f": {escape_unprintable(event.message)}" if event.message else "")
    return Happening(event.time_ms, event.type, said, event.source, event.gpu, event.code)


def _make_drain_spans(events: Sequence[NodeEvent]) -> list[ActionSpan]:
    """Return a span from each drain to its undrain, according to events."""
    spans: list[ActionSpan] = []
    for event in sorted(events, key=lambda row: row.time_ms):
        is_open = bool(spans) and spans[-1].ended_ms is None
        if event.type == "undrain" and is_open:
            spans[-1].ended_ms = event.time_ms
        elif event.type == "drain" and not is_open:
            why = f": {escape_unprintable(event.message)}" if event.message else ""
            spans.append(
                ActionSpan("drained", f"Removed from service by {event.source}{why}", event.time_ms, None, True)
            )
    return spans


CLOCK = {
    "feature": "sm_clock_mhz",
    "entity": "n042/3",
    "unit": "MHz",
    "sentence": "GPU 3: SM clock 990 MHz, usual 1,980 (thermal slowdown since 14:02)",
    "usual": 1980.0,
    "share": 0.7,
    "began_ms": 1759999880000,
    "ended_ms": None,
    "values": [{"time_ms": 1759999880000, "value": 1410.0}, {"time_ms": 1759999900000, "value": 990.0}],
}
EXAMPLE: dict[str, object] = {
    "node": "n042",
    "as_of_ms": 1760000000000,
    "from_ms": 1759996400000,
    "known_since_ms": 1759900000000,
    "scores": [
        {"horizon_s": 3600, "steps": [{"time_ms": 1759990000000, "p": 0.002}, {"time_ms": 1759999880000, "p": 0.62}]},
        {"horizon_s": 86400, "steps": [{"time_ms": 1759990000000, "p": 0.01}, {"time_ms": 1759999880000, "p": 0.81}]},
    ],
    "signals": [CLOCK],
    "events": [
        {
            "time_ms": 1759999870000,
            "type": "xid",
            "sentence": "GPU 3: XID 63",
            "source": "kernel-log",
            "gpu": 3,
            "code": 63,
        }
    ],
    "jobs": [
        {
            "job": "train-42",
            "attempt": 1,
            "gpus": 8,
            "began_ms": 1759991000000,
            "ended_ms": None,
            "outcome": "",
        }
    ],
    "actions": [
        {
            "code": "drain_at_job_end",
            "sentence": "Drain after the running job and inspect its cooling.",
            "began_ms": 1759999880000,
            "ended_ms": None,
            "taken": False,
        }
    ],
    "states": [{"state": "degraded", "began_ms": 1759999880000, "ended_ms": None}],
}

ROWS = (
    Row(
        "GET",
        "/v1/nodes/{node}/timeline",
        answer_timeline,
        "One node's past on one time axis: scores, signals, faults and events, jobs, actions; changes only",
        "risk",
        params=(Param("minutes", int, "how far back, in fleet time", 60, least=1, most=7 * DAY_MINUTES),),
        answer=NodeTimeline,
        problems=(404, 422, 503),
        example=EXAMPLE,
    ),
)
