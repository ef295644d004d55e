"""The HTTP API as methods of a client.

The methods return the service's JSON with types. An error's message says what to do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast
from urllib.parse import quote, urlencode

from fleetcast_client.answers import (
    ActionList,
    Charges,
    CurrentPlan,
    Decision,
    Demand,
    DemandModel,
    DemandRecord,
    Estimate,
    FittedModels,
    Job,
    Jobs,
    Node,
    Queue,
    QueuesAnswer,
    Risk,
    Stragglers,
    Taken,
    WhyWaiting,
)
from fleetcast_client.errors import ApiError, Unreachable
from fleetcast_client.transport import check_url, make_opener, send_request

AWAY = frozenset({429, 502, 503, 504})
LONGEST_PAUSE_S = 10.0


class Client:
    """A client of one Fleetcast service.

    url: FLEETCAST_URL by default. token: FLEETCAST_TOKEN by default. ca: a file with the authorities
    for its certificate, FLEETCAST_CA by default, else those of the system. verify=False accepts any
    certificate, for trials only. Raises ValueError for a bad URL or file.

    Every call raises Unreachable or ApiError. While the service does not answer, a call that may safely be repeated
    is tried `tries` times. A placement with the same request_id gets the same decision.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        timeout_s: float = 10.0,
        tries: int = 3,
        ca: str | os.PathLike[str] | None = None,
        verify: bool = True,
    ) -> None:
        self.url = check_url(url or os.environ.get("FLEETCAST_URL", ""))
        self._token = os.environ.get("FLEETCAST_TOKEN", "") if token is None else token
        self._opener = make_opener(ca, verify)
        self.timeout_s = timeout_s
        self.tries = max(1, tries)

    def risk(
        self,
        *,
        horizon_s: int = 3600,
        kind: str | None = None,
        least: float | None = None,
        rack: str | None = None,
        limit: int | None = None,
    ) -> Risk:
        """Return the nodes, ordered by risk. The riskiest node is first.

        horizon_s: 3600, 18000, 86400 or 604800. least: only nodes with at least this probability.
        """
        query = {"horizon_s": horizon_s, "kind": kind, "min": least, "rack": rack, "limit": limit}
        return cast(Risk, self._get("/v1/risk/nodes", query))

    def node(self, name: str) -> Node:
        """Return one node: its risks, their reasons, and the advised action. Raises NotFound."""
        return cast(Node, self._get(f"/v1/nodes/{_quote_path_part(name)}"))

    def fleet(self) -> dict[str, Any]:
        """Return totals of the fleet, and a row for each node."""
        return cast("dict[str, Any]", self._get("/v1/fleet"))

    def demand(
        self,
        *,
        pool: str | None = None,
        job_class: str | None = None,
        group: str | None = None,
        target: str | None = None,
        horizon_s: int | None = None,
        queue: str | None = None,
    ) -> Demand:
        """Return forecasts of GPUs, and of requests/s to served models. Raises NotFound.

        target: arriving, running, queued or wanted GPUs, or request_rate. queue: only the demand of jobs in this
        queue. pool: only the demand on this pool's machines. A series belongs to a queue or to a pool. `all`
        means the whole fleet, every class or every group. group: a user group, or a served model.
        """
        parts = {"class": job_class, "group": group, "target": target, "horizon_s": horizon_s}
        query = {"pool": pool, **parts, "queue": queue}
        return cast(Demand, self._get("/v1/demand", query))

    def demand_record(
        self,
        *,
        pool: str = "all",
        target: str = "running",
        job_class: str = "all",
        queue: str | None = None,
    ) -> DemandRecord:
        """Return past demand, the present forecast, and the forecast issued an hour ago. Raises NotFound."""
        query = {"pool": pool, "target": target, "class": job_class, "queue": queue}
        return cast(DemandRecord, self._get("/v1/demand/record", query))

    def demand_model(
        self, *, pool: str | None = None, job_class: str | None = None, queue: str | None = None
    ) -> DemandModel:
        """Return the parts of demand: floor, bands, bursts, mix, run times, waits, cold starts. Raises NotFound."""
        return cast(DemandModel, self._get("/v1/demand/model", {"pool": pool, "class": job_class, "queue": queue}))

    def models(self) -> FittedModels:
        """Return the fitted models that serve, and the shadows, which are scored and never serve.

        Each has its age and recent accuracy. Models that serve also have the reasons to fit them again.
        """
        return cast(FittedModels, self._get("/v1/models"))

    def jobs(self, *, state: str | None = None, limit: int | None = None) -> Jobs:
        """Return jobs with their remaining time."""
        return cast(Jobs, self._get("/v1/jobs", {"state": state, "limit": limit}))

    def job(self, name: str) -> Job:
        """Return one job with its placement and last events. Raises NotFound."""
        return cast(Job, self._get(f"/v1/jobs/{quote(name, safe='/')}"))

    def stragglers(self, job: str) -> Stragglers:
        """Return whether a job is slow, since when, and which member slows it. Raises NotFound."""
        return cast(Stragglers, self._get(f"/v1/jobs/{quote(job, safe='/')}/stragglers"))

    def estimate(self, request: Mapping[str, Any]) -> Estimate:
        """Return the run time, needs and start of a request in the form of `place`.

        Nothing is placed or queued.
        """
        return cast(Estimate, self._send_with_retries("POST", "/v1/jobs/estimate", dict(request)))

    def queue(self) -> Queue:
        """Return the requests in the placement engine's queue, why they wait, and when each will start."""
        return cast(Queue, self._get("/v1/queue"))

    def queues(self) -> QueuesAnswer:
        """Return the state of each queue: GPUs held, guaranteed, borrowed and lent, shares, waits."""
        return cast(QueuesAnswer, self._get("/v1/queues"))

    def why(self, request_id: str) -> WhyWaiting:
        """Return why a request waits. Raises NotFound."""
        return cast(WhyWaiting, self._get(f"/v1/queue/{_quote_path_part(request_id)}/why"))

    def actions(
        self,
        *,
        state: str | None = None,
        queue: str | None = None,
        job: str | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> ActionList:
        """Return actions on running jobs that changed after a cursor, in the order of their changes.

        state: one state, or "open" for proposed, sent and accepted.
        """
        query = {"state": state, "queue": queue, "job": job, "after": after, "limit": limit}
        return cast(ActionList, self._get("/v1/actions", query))

    def plan(self, *, limit: int | None = None) -> CurrentPlan:
        """Return the plan of the last pass: open actions, what starts, what is promised and what comes next."""
        return cast(CurrentPlan, self._get("/v1/plan", {"limit": limit}))

    def charges(self, *, by: str = "queue", from_ms: int | None = None, to_ms: int | None = None) -> Charges:
        """Return the GPU-seconds granted, used, lost and waited for, by queue, user, class or pool.

        The default span is the last week.
        """
        return cast(Charges, self._get("/v1/charges", {"by": by, "from": from_ms, "to": to_ms}))

    def wait(self, request: Mapping[str, Any]) -> Decision:
        """Add a request, in the form of `place`, to the placement engine's queue."""
        return cast(Decision, self._send_with_retries("POST", "/v1/queue", dict(request)))

    def leave(self, request_id: str) -> Any:
        """Remove a request from the placement engine's queue. Raises NotFound."""
        return self._send_once("DELETE", f"/v1/queue/{_quote_path_part(request_id)}", None)

    def place(self, request: Mapping[str, Any]) -> Decision:
        """Request a placement for a job now.

        `request` needs a request_id, which identifies the decision forever.
        """
        return cast(Decision, self._send_with_retries("POST", "/v1/placements", dict(request)))

    def release(self, request_id: str) -> Any:
        """Release the GPUs that a placement holds. Raises NotFound."""
        return self._send_once("DELETE", f"/v1/placements/{_quote_path_part(request_id)}", None)

    def events(self, events: Iterable[Mapping[str, Any]]) -> Taken:
        """Send events of jobs and nodes. Retries while the service does not answer.

        Repeated events change nothing, so a retry is safe. Raises ApiError with status 422 if every event
        was refused. The error's `rejected` lists the reasons.
        """
        return cast(Taken, self._send_with_retries("POST", "/v1/events", [dict(event) for event in events]))

    def _get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        given = {key: value for key, value in (query or {}).items() if value is not None}
        return self._send_with_retries("GET", f"{path}?{urlencode(given)}" if given else path, None)

    def _send_with_retries(self, method: str, path: str, body: Any) -> Any:
        """Send a request, and retry it while the service does not answer."""
        for turn in range(self.tries - 1):
            pause_s = 0.2 * 2**turn
            try:
                return self._send_once(method, path, body)
            except Unreachable:
                time.sleep(pause_s)
            except ApiError as error:
                if error.status not in AWAY:
                    raise
                time.sleep(min(LONGEST_PAUSE_S, error.retry_after_s or pause_s))
        return self._send_once(method, path, body)

    def _send_once(self, method: str, path: str, body: Any) -> Any:
        data = None if body is None else json.dumps(body).encode()
        return send_request(self._opener, method, self.url + path, data, self._token, self.timeout_s)


def _quote_path_part(name: str) -> str:
    return quote(name, safe="")
