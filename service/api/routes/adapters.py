"""Routes for outside schedulers, answered at once from the newest board.

Without a fresh board, the answer is neutral. The routes must be fast, because kube-scheduler waits for
the answer before it places a pod.
"""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.schedulers.kube_types import ExtenderArgs, FilterResult, HostPriority, PreemptionArgs, PreemptionResult
from fleetcast.schedulers.trimaran import WatcherMetrics
from fleetcast.schedulers.volcano import EnqueueableAnswer, EnqueueableArgs, PrioritizeArgs, VolcanoScores
from fleetcast.service.api.routes.aged_answer import make_aged_answer
from fleetcast.service.api.routes.context import Context
from fleetcast.service.http.access import Scope
from fleetcast.service.http.problems import Problem
from fleetcast.service.http.request_body import read_body
from fleetcast.service.http.table import JSON, NO_STORE, Handler, Query, Row

DEADLINE_S = 1.0  # wall


def _make_handler(adapter: str, verb: str) -> Handler:
    async def answer_request(request: Request, context: Context, query: Query) -> Response:
        body = await _read_body_in_time(request, context.config.api.max_body_bytes)
        try:
            return _answer_verb(context, adapter, verb, body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Problem(400, "not_json", f"the body is not JSON: {explain_json_error(error)}") from None

    return answer_request


async def _answer_load_watcher(request: Request, context: Context, query: Query) -> Response:
    """Answer Trimaran's request for the load of all nodes on the newest board, even if the board is stale.

    The request of Trimaran names no nodes.
    """
    board = context.cache.latest()
    names = bytes(board.raw("names.node")) if board is not None and "names.node" in board else b""
    return _answer_verb(context, "trimaran", "watcher", names)


def _answer_verb(context: Context, adapter: str, verb: str, body: bytes) -> Response:
    made, board = context.answerers.answer_verb(adapter, verb, body)
    if board is None:
        context.metrics.neutral.inc()
        return Response(made, 200, {"cache-control": NO_STORE}, JSON)
    return make_aged_answer(context, board, board.as_of_ms, made)


async def _read_body_in_time(request: Request, most: int) -> bytes:
    try:
        async with asyncio.timeout(DEADLINE_S):
            return await read_body(request, most)
    except TimeoutError:
        detail = f"the body was not here within {DEADLINE_S:g} s"
        raise Problem(408, "slow_body", detail, headers={"connection": "close"}) from None


POD = {
    "metadata": {"name": "train-42-0", "uid": "6f1c", "annotations": {"fleetcast/limit-s": "86400"}},
    "spec": {"containers": [{"resources": {"requests": {"nvidia.com/gpu": "8"}}}]},
}
ASKED = {"Pod": POD, "Nodes": None, "NodeNames": ["n041", "n042"]}
VICTIMS = {"n041": {"Pods": [{"UID": "0b77"}], "NumPDBViolations": 0}}
DRAINED = {"n042": "fleetcast: drained since 14:02 UTC"}

WATCHED = {
    "timestamp": 1789000000,
    "window": {"duration": "15m", "start": 1788999100, "end": 1789000000},
    "source": "fleetcast",
    "data": {
        "NodeMetricsMap": {
            "n041": {
                "metrics": [
                    {"name": "cpu", "type": "CPU", "operator": "AVG", "value": 93.1, "rollup": "15m"},
                    {"name": "cpu", "type": "CPU", "operator": "STD", "value": 4.2, "rollup": "15m"},
                    {"name": "memory", "type": "Memory", "operator": "AVG", "value": 31.5, "rollup": "15m"},
                    {"name": "memory", "type": "Memory", "operator": "STD", "value": 0.0, "rollup": "15m"},
                ],
                "tags": {},
                "metadata": {"dataCenter": ""},
            }
        }
    },
}


def _make_row(adapter: str, verb: str, summary: str, **more: Any) -> Row:
    path = f"/v1/adapters/{adapter}/{verb}"
    problems = (400, 408, 413, 415, 422)
    return Row(
        "POST", path, _make_handler(adapter, verb), summary, "adapters", scope=Scope.READ, problems=problems, **more
    )


ROWS = (
    _make_row(
        "kube",
        "filter",
        "kube-scheduler's extender: nodes that a pod can use",
        body=(ExtenderArgs,),
        body_example=ASKED,
        answer=FilterResult,
        example={
            "Nodes": None,
            "NodeNames": ["n041"],
            "FailedNodes": {},
            "FailedAndUnresolvableNodes": DRAINED,
            "Error": "",
        },
    ),
    _make_row(
        "kube",
        "prioritize",
        "kube-scheduler's extender: a score from 0 to 10 for each node",
        body=(ExtenderArgs,),
        body_example=ASKED,
        answer=list[HostPriority],
        example=[{"Host": "n041", "Score": 9}, {"Host": "n042", "Score": 0}],
    ),
    _make_row(
        "kube",
        "preempt",
        "kube-scheduler's extender: nodes on which preempting others is of use",
        body=(PreemptionArgs,),
        body_example={"Pod": POD, "NodeNameToMetaVictims": VICTIMS},
        answer=PreemptionResult,
        example={"NodeNameToMetaVictims": VICTIMS},
    ),
    Row(
        "GET",
        "/v1/adapters/trimaran/watcher",
        _answer_load_watcher,
        "Trimaran's load watcher: how busy each node will be",
        "adapters",
        answer=WatcherMetrics,
        example=WATCHED,
    ),
    _make_row(
        "volcano",
        "prioritize",
        "Volcano's extender: a score from 0 to 100 for each node",
        body=(PrioritizeArgs,),
        body_example={"task": {"Name": "train-42-0", "Pod": POD}, "nodes": [{"Name": "n041"}, {"Name": "n042"}]},
        answer=VolcanoScores,
        example={"nodeScore": {"n041": 90.0, "n042": 0.0}, "errorMessage": ""},
    ),
    _make_row(
        "volcano",
        "enqueueable",
        "Volcano's extender: reject a gang that the fleet could never hold",
        body=(EnqueueableArgs,),
        body_example={"job": {"Name": "train-42", "PodGroup": {"Spec": {"MinResources": {"nvidia.com/gpu": "64"}}}}},
        answer=EnqueueableAnswer,
        example={"status": 0},
    ),
)
