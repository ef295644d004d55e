"""Routes for actions on running jobs. They forward requests and answers unchanged to and from the placer."""

from typing import Any

from fleetcast.service.answers.actions import ActionDetails, ActionList, ActionReply, ActionSwitches
from fleetcast.service.answers.plan import CurrentPlan
from fleetcast.service.api.routes.placements import forward_to_placer
from fleetcast.service.http.access import Scope
from fleetcast.service.http.table import Row

ACTION: dict[str, Any] = {
    "action_id": "5b1d0c7e9a3f4e2b8c6d7f01-1",
    "kind": "preempt",
    "state": "accepted",
    "since_ms": 1760000003000,
    "job": "train-7",
    "attempt": 1,
    "queue": "research/nlp",
    "gpus": 16.0,
    "ranks": [
        {"rank": 0, "node": "n014", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]},
        {"rank": 1, "node": "n015", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]},
    ],
    "places": [],
    "payer": "train-43-1",
    "executor": "agents",
    "by_ms": 1760000300000,
    "grace_s": 120.0,
    "cost_gpu_s": 7200.0,
    "sentence": "stops attempt 1 of train-7 (16 GPUs) for request train-43-1: a queue gets back what it is guaranteed "
    "(GPU-hours: any set at least 2.00, this set 2.00)",
    "why": "",
    "changed": 1042,
}
DETAILS = {
    **ACTION,
    "cost": {
        "lost": 2400.0,
        "restart": 4800.0,
        "wait": 0.0,
        "risk": 0.0,
        "slow": 0.0,
        "fragments": 0.0,
        "gain": 0.0,
    },
    "reason": "guarantee",
    "numbers": {"set_gpu_s": 7200.0, "bound_gpu_s": 7200.0},
    "rejected": [{"jobs": ["train-9"], "gpus": 16.0, "cost_gpu_s": 91000.0, "code": "dearer"}],
    "life": [
        {"state": "proposed", "time_ms": 1760000000000},
        {"state": "sent", "time_ms": 1760000000400},
        {"state": "accepted", "time_ms": 1760000003000},
    ],
    "after": [],
}
SWITCHES = {"mode": "act", "act_in": ["research"], "paused_ms": None, "paused_by": "", "opened_ms": None, "why": ""}
STARTED = {
    "request_id": "train-42-1",
    "job": "train-42",
    "queue": "train",
    "ranks": [{"rank": 0, "node": "n041", "gpus": [0, 1, 2, 3, 4, 5, 6, 7]}],
}
NEXT = {
    "request_id": "train-44-1",
    "job": "train-44",
    "queue": "research/nlp",
    "start_ms": 1760003600000,
    "waits_for": "train-40",
    "sentence": "stops no job yet: it has waited 30 of 300 s",
    "ranks": [],
}
PROMISED = {**STARTED, "request_id": "train-43-1", "job": "train-43", "until_ms": 1760000720000}
PLAN = {
    "as_of_ms": 1760000005000,
    "pass_ms": 1760000000000,
    "stalled": "",
    "actions": [{**ACTION, "cost": DETAILS["cost"]}],
    "has_more": False,
    "starts": [{**STARTED, "until_ms": 1760000300000}],
    "next": NEXT,
    "promised": [{**PROMISED, "actions": [ACTION["action_id"]], "number": 1}],
    "switches": SWITCHES,
}
FORESEEN = {
    "horizon_s": 3600,
    "matured": 12,
    "faults": 5,
    "mean_p": 0.45,
    "observed": 0.416667,
    "brier_skill": 0.11,
    "bins": [{"low": 0.2, "high": 0.5, "n": 12, "p": 0.45, "observed": 0.416667}],
    "since_ms": 1759000000000,
}
REPLY = {"job": "train-7", "attempt": 1}


def _make_row(method: str, path: str, summary: str, problems: tuple[int, ...], **more: Any) -> Row:
    return Row(method, path, forward_to_placer, summary, "placement", params=None, problems=problems, **more)


def _make_reply_row(verb: str, summary: str, example: dict[str, Any]) -> Row:
    return _make_row(
        "POST",
        f"/v1/actions/{{action_id}}/{verb}",
        summary,
        (400, 403, 404, 409, 413, 422, 503),
        scope=Scope.EVENTS,
        body=(ActionReply,),
        body_example=example,
        answer=ActionDetails,
        example=DETAILS,
    )


def _make_switch_row(verb: str, summary: str, example: dict[str, Any]) -> Row:
    return _make_row(
        "POST", f"/v1/actions/{verb}", summary, (503,), scope=Scope.ADMIN, answer=ActionSwitches, example=example
    )


ROWS = (
    _make_row(
        "GET",
        "/v1/actions",
        "Actions on running jobs, in the order of their changes (state, queue, job, order, after, limit)",
        (422, 503),
        by_queue=True,
        answer=ActionList,
        example={
            "as_of_ms": 1760000005000,
            "rows": [ACTION],
            "cursor": 1042,
            "switches": SWITCHES,
            "foreseen": FORESEEN,
        },
    ),
    _make_switch_row("pause", "Send no further action", {**SWITCHES, "paused_ms": 1760000005000, "paused_by": "ada"}),
    _make_switch_row("resume", "Send actions again", SWITCHES),
    _make_switch_row("reset", "Close the circuit breaker of actions", SWITCHES),
    _make_row(
        "GET",
        "/v1/actions/{action_id}",
        "An action: its cost by term, the sets that were dearer, its life",
        (404, 422, 503),
        by_queue=True,
        answer=ActionDetails,
        example=DETAILS,
    ),
    _make_row(
        "GET",
        "/v1/plan",
        "The plan of the last pass: open actions with their costs, what starts, what is promised, what is next (limit)",
        (422, 503),
        by_queue=True,
        answer=CurrentPlan,
        example=PLAN,
    ),
    _make_reply_row("accept", "Reply that the job carries an action out", REPLY),
    _make_reply_row("refuse", "Reply that the job does not carry an action out", {**REPLY, "why": "no checkpoint"}),
)
