"""What the fleet looks like to Prometheus: exposition text, the board section `metrics.fleet`.

    fleet_page      nodes, GPUs, jobs, queues: made at each tick
    demand_page     forecasts: made where they are, about once a minute

A fleet has tens of thousands of entities, a Prometheus wants few series: numbers of the whole fleet are complete, and
what is told of single entities is bounded. NODES_SHOWN nodes (flagged ones first, then the riskiest), QUEUES_SHOWN
queues (the rest counts as "other"), POOLS_SHOWN pools of the demand forecast and JOBS_SHOWN slow jobs (the largest).
`fleetcast_metrics_left_out` (and `…_demand_pools_left_out`) say how many were not shown; the API has them all.

Values are in base units; what is unknown has no sample, never a zero. Times and ages are in fleet time.
"""

import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet.jobs import JobAttempt
from fleet.topology import Level
from models.rules import ACTIONS
from models.scores import RISK_HORIZONS_S, RISK_KINDS
from service import documents
from service.exposition import Page, span
from service.publish import DRAINED, IN_SERVICE, LOST, Tick, usable_gpus

NODES_SHOWN = 100
QUEUES_SHOWN = 20
POOLS_SHOWN = 20
JOBS_SHOWN = 50
OTHER = "other"
RECENT_MS = 3_600_000
WAIT_QUANTILES = (0.5, 0.9, 1.0)
DEMAND_QUANTILES = (0.1, 0.5, 0.9)
CAUSES = (
    "compute",
    "communication",
    "data",
    "sequence_length",
    "checkpoint",
    "garbage_collection",
    "interference",
    "unknown",
)
FLAGS = tuple(code for code in ACTIONS if code not in documents.UNFLAGGED)


def fleet_page(tick: Tick) -> bytes:
    """Nodes, GPUs, jobs and queues as of a tick."""
    page = Page()
    flags = documents.flagged(tick.risk, len(tick.topology))
    gpus = gpu_states(tick)
    _add_fleet(page, tick, flags, gpus)
    _add_usage(page, tick, gpus["running"])
    shown = nodes_shown(tick, flags)
    _add_nodes(page, tick, shown, flags)
    _add_node_gpus(page, tick, shown, gpus)
    left = {"nodes": len(tick.topology) - len(shown)}
    left["queues"] = _add_queues(page, tick)
    left["slow_jobs"] = _add_slow_jobs(page, tick)
    rows = [({"what": what}, count) for what, count in left.items()]
    page.gauge("metrics_left_out", "Entities without series of their own, beyond the bound of this page.", rows)
    return page.encode()


# The whole fleet


def gpu_states(tick: Tick) -> dict[str, NDArray[np.bool_]]:
    """state -> (n, g) mask; every GPU that exists is in exactly one.

    running: a job holds it; of the others unusable: it vanished; out_of_service: its node is drained or lost; free.
    """
    width = tick.gpu_rows.shape[1]
    exists = np.arange(width)[None, :] < tick.topology.gpus[:, None]
    held = tick.occupancy.holder >= 0
    usable = usable_gpus(tick)
    serving = (tick.node_state == IN_SERVICE)[:, None]
    return {
        "running": held & exists,
        "free": exists & ~held & usable & serving,
        "unusable": exists & ~held & ~usable,
        "out_of_service": exists & ~held & usable & ~serving,
    }


def nodes_by_state(tick: Tick, flags: NDArray[np.bool_]) -> dict[str, int]:
    """state -> nodes; the states of `documents.node_states`, counted."""
    up = documents.answering(tick.node, tick.gpu, tick.gpu_rows, len(tick.topology))
    rest = (tick.node_state == IN_SERVICE) & ~flags
    masks = {
        "ok": rest & (up > 0),
        "degraded": (tick.node_state == IN_SERVICE) & flags,
        "drained": tick.node_state == DRAINED,
        "lost": tick.node_state == LOST,
        "stale": rest & (up <= 0),
        "unknown": rest & np.isnan(up),
    }
    return {state: int(mask.sum()) for state, mask in masks.items()}


def _add_fleet(page: Page, tick: Tick, flags: NDArray[np.bool_], gpus: Mapping[str, NDArray[np.bool_]]) -> None:
    page.number("board_timestamp_seconds", "Fleet time of the board that these numbers are of.", tick.now_ms / 1000)
    page.gauge(
        "nodes",
        "Nodes by state: degraded ones are flagged, stale ones do not answer scrapes, unknown ones never did.",
        [({"state": state}, count) for state, count in nodes_by_state(tick, flags).items()],
    )
    codes = [action.code for action in tick.risk.actions.values()]
    page.gauge(
        "flagged_nodes",
        "Nodes by what to do about them, where that is more than watching.",
        [({"action": code}, codes.count(code)) for code in FLAGS],
    )
    page.number("hard_signal_nodes", "Nodes with an XID, a lost GPU or another hard signal.", int(tick.risk.hard.sum()))
    page.gauge(
        "gpus",
        "GPUs by state; each is in one. Unusable: vanished. Out of service: its node is drained or lost.",
        [({"state": state}, int(mask.sum())) for state, mask in gpus.items()],
    )
    page.gauge(
        "jobs",
        "Jobs that hold GPUs, and jobs that wait.",
        [({"state": "running"}, len(tick.running)), ({"state": "queued"}, len(tick.queued))],
    )
    page.gauge("model_info", "The model that serves.", [({"part": "risk", "model": tick.risk.model}, 1)])


def _add_usage(page: Page, tick: Tick, running: NDArray[np.bool_]) -> None:
    """What GPUs draw and do, of those with fresh readings."""
    busy = _reading(tick, "gpu_util", tick.gpu_rows)
    page.number("power_watts", "Power of all GPUs.", _total(_reading(tick, "power_w", tick.gpu_rows)))
    page.gauge(
        "gpu_utilization_ratio",
        "Mean utilization of GPUs that a job holds, and of the others.",
        [({"state": "running"}, _mean(busy[running])), ({"state": "idle"}, _mean(busy[~running]))],
    )


# Nodes


def nodes_shown(tick: Tick, flags: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Rows of the nodes with series of their own, the most pressing first."""
    worst = np.nan_to_num(tick.risk.values[:, 0, :], nan=-1.0).max(axis=0)
    return np.lexsort((-worst, ~flags))[:NODES_SHOWN]


def _add_nodes(page: Page, tick: Tick, shown: NDArray[np.intp], flags: NDArray[np.bool_]) -> None:
    names = {row: tick.topology.nodes[row].name for row in shown.tolist()}
    racks = documents.domain_of(tick.topology, Level.RACK)
    horizons = [span(horizon_s) for horizon_s in RISK_HORIZONS_S]
    risk = np.moveaxis(tick.risk.values[:, :, shown], 2, 0).tolist()
    page.gauge(
        "node_risk_probability",
        "Probability that a node fails, is drained or slows a job within the horizon.",
        [
            ({"node": name, "kind": kind, "horizon": horizon}, p)
            for name, of_node in zip(names.values(), risk, strict=True)
            for kind, of_kind in zip(RISK_KINDS, of_node, strict=True)
            for horizon, p in zip(horizons, of_kind, strict=True)
        ],
    )
    page.gauge(
        "node_flagged",
        "1 for a node about which more is to be done than watching, with the action and what speaks first.",
        [(_flag(tick, row, name), 1) for row, name in names.items() if flags[row]],
    )
    page.gauge(
        "node_info",
        "1 for every node with series of its own: where it is and what it is.",
        [
            ({"node": name, "rack": racks[row] or "", "gpu_model": tick.topology.nodes[row].gpu_model}, 1)
            for row, name in names.items()
        ],
    )
    page.gauge(
        "node_job_gpus",
        "GPUs that a job holds on a node.",
        [
            ({"node": name, "job_id": tick.occupancy.jobs[job]}, count)
            for row, name in names.items()
            for job, count in Counter(tick.occupancy.holder[row].tolist()).items()
            if job >= 0
        ],
    )


def _flag(tick: Tick, row: int, name: str) -> dict[str, str]:
    reasons = tick.risk.reasons.get(row, ())
    return {
        "node": name,
        "action": tick.risk.actions[row].code,
        "feature": reasons[0].feature if reasons else "",
        "entity": reasons[0].entity if reasons else "",
    }


def _add_node_gpus(page: Page, tick: Tick, shown: NDArray[np.intp], gpus: Mapping[str, NDArray[np.bool_]]) -> None:
    names = [tick.topology.nodes[row].name for row in shown.tolist()]
    page.gauge(
        "node_gpus",
        "GPUs of a node by state.",
        [
            ({"node": name, "state": state}, count)
            for state, mask in gpus.items()
            for name, count in zip(names, mask[shown].sum(axis=1).tolist(), strict=True)
        ],
    )
    rows = tick.gpu_rows[shown]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a node without any reading is NaN, and left out
        readings = {
            "node_power_watts": ("Power of a node's GPUs.", np.nansum(_reading(tick, "power_w", rows), axis=1)),
            "node_gpu_temperature_celsius": ("Its hottest GPU.", np.nanmax(_reading(tick, "gpu_temp_c", rows), axis=1)),
            "node_sm_clock_hertz": (
                "Its slowest SM clock.",
                np.nanmin(_reading(tick, "sm_clock_mhz", rows), axis=1) * 1e6,
            ),
            "node_gpu_utilization_ratio": (
                "Mean utilization of its GPUs.",
                np.nanmean(_reading(tick, "gpu_util", rows), axis=1),
            ),
        }
    for name, (text, values) in readings.items():
        page.gauge(name, text, [({"node": node}, value) for node, value in zip(names, values.tolist(), strict=True)])


def _reading(tick: Tick, feature: str, rows: NDArray[np.int32]) -> NDArray[np.float64]:
    """The last fresh value of each GPU, NaN unknown; shaped as `rows` (rows of the GPU frame, -1 never heard)."""
    if tick.gpu is None or not len(tick.gpu.values):
        return np.full(rows.shape, np.nan)
    known = (rows >= 0) & (rows < len(tick.gpu.values))
    values = tick.gpu.column(feature).astype(np.float64)
    return np.where(known, values[np.where(known, rows, 0)], np.nan)


# Jobs and queues


def _add_queues(page: Page, tick: Tick) -> int:
    """Returns how many queues are folded into "other"."""
    by_queue: dict[str, dict[str, list[JobAttempt]]] = defaultdict(lambda: {"running": [], "queued": []})
    for state, attempts in (("running", tick.running), ("queued", tick.queued)):
        for attempt in attempts:
            by_queue[attempt.queue][state].append(attempt)
    gpus = {id(attempt): attempt.gpus for attempt in (*tick.running, *tick.queued)}
    size = {name: sum(gpus[id(row)] for rows in states.values() for row in rows) for name, states in by_queue.items()}
    shown = sorted(by_queue, key=lambda name: (-size[name], name))[:QUEUES_SHOWN]
    for name in by_queue.keys() - set(shown):
        for state, attempts in by_queue.pop(name).items():
            by_queue[OTHER][state] += attempts
    rows = [
        ({"queue": name, "state": state}, kept) for name, states in by_queue.items() for state, kept in states.items()
    ]
    page.gauge("queue_jobs", "Jobs of a queue.", [(labels, len(kept)) for labels, kept in rows])
    page.gauge(
        "queue_gpus",
        "GPUs that jobs of a queue hold or wait for.",
        [(labels, sum(gpus[id(attempt)] for attempt in kept)) for labels, kept in rows],
    )
    waits = {name: [_waited_s(row, tick.now_ms) for row in states["queued"]] for name, states in by_queue.items()}
    page.add(
        "summary",
        "queue_wait_seconds",
        "How long the jobs that wait now have waited (quantile 1: the longest).",
        [row for name, values in waits.items() for row in _quantiles({"queue": name}, values)],
    )
    page.add(
        "summary",
        "started_wait_seconds",
        "How long the jobs that started within the last hour had waited.",
        _quantiles({}, _waits_of_started(tick)),
    )
    return max(0, len(size) - QUEUES_SHOWN)


def _waited_s(attempt: JobAttempt, until_ms: int) -> float:
    return max(0.0, (until_ms - (attempt.submitted_ms or until_ms)) / 1000)


def _waits_of_started(tick: Tick) -> list[float]:
    return [
        _waited_s(attempt, attempt.started_ms)
        for attempt in (*tick.running, *tick.ended)
        if attempt.started_ms is not None and attempt.submitted_ms and attempt.started_ms > tick.now_ms - RECENT_MS
    ]


def _quantiles(labels: Mapping[str, str], values: Sequence[float]) -> list[tuple[dict[str, str], float]]:
    if not values:
        return []
    found = np.quantile(values, WAIT_QUANTILES).tolist()
    return [({**labels, "quantile": f"{q:g}"}, value) for q, value in zip(WAIT_QUANTILES, found, strict=True)]


def _add_slow_jobs(page: Page, tick: Tick) -> int:
    """Returns how many slow jobs have no series of their own."""
    told = {job: body for job, body in tick.stragglers.items() if body.get("slow")}
    gpus = {attempt.job: attempt.gpus for attempt in tick.running if attempt.job in told}
    slow = {job: body for job, body in told.items() if job in gpus}
    causes = [body["cause"] if body["cause"] in CAUSES else "unknown" for body in slow.values()]
    shown = sorted(slow, key=lambda job: (-gpus[job], job))[:JOBS_SHOWN]
    page.gauge(
        "slow_jobs",
        "Running jobs that are slower than they should be, by cause.",
        [({"cause": cause}, causes.count(cause)) for cause in CAUSES],
    )
    page.gauge(
        "slow_job_gpus",
        "GPUs of a slow job, with who holds it back.",
        [({"job_id": job, "cause": slow[job]["cause"], **_culprit(slow[job])}, gpus[job]) for job in shown],
    )
    page.gauge(
        "slow_job_step_ratio",
        "Observed step time of a slow job over the expected one.",
        [({"job_id": job}, slow[job].get("ratio")) for job in shown],
    )
    return len(slow) - len(shown)


def _culprit(body: Mapping[str, Any]) -> dict[str, str]:
    culprit = body["culprit"]
    return {"kind": culprit["kind"], "culprit": culprit["name"] or "nobody"}


# Demand


def demand_page(demand: Sequence[Mapping[str, Any]]) -> bytes:
    """The forecasts of whole pools (see also service.demand_metrics). demand: rows of `/v1/demand`."""
    page = Page()
    demand = [row for row in demand if row["class"] == row["group"] == "all"]
    size: dict[str, float] = defaultdict(float)
    for row in demand:
        size[row["pool"]] += math.inf if row["pool"] == "all" else row["now"]
    shown = set(sorted(size, key=lambda pool: (-size[pool], pool))[:POOLS_SHOWN])
    rows = [({"pool": row["pool"], "target": row["target"]}, row) for row in demand if row["pool"] in shown]
    page.gauge(
        "demand_now_gpus",
        "GPUs by pool: running, queued, wanted (both), and arriving within ten minutes.",
        [(labels, row["now"]) for labels, row in rows],
    )
    page.add(
        "summary",
        "demand_forecast_gpus",
        "Forecast of the same, by how far ahead.",
        [
            ({**labels, "horizon": span(horizon_s), "quantile": f"{q:g}"}, row["values"][row["quantiles"].index(q)][h])
            for labels, row in rows
            for q in DEMAND_QUANTILES
            if q in row["quantiles"]
            for h, horizon_s in enumerate(row["horizons_s"])
        ],
    )
    ahead = sorted({horizon_s for _, row in rows for horizon_s in row["horizons_s"]})
    page.gauge(
        "demand_horizon_seconds",
        "How far ahead a horizon is, to sort by.",
        [({"horizon": span(horizon_s)}, horizon_s) for horizon_s in ahead],
    )
    page.gauge(
        "demand_coverage_ratio",
        "Share of outcomes inside the 10 to 90 % band, in the model's own record; 0.8 is right.",
        [(labels, (row["record"] or {}).get("coverage_80")) for labels, row in rows],
    )
    page.gauge(
        "demand_loss_ratio",
        "Weighted quantile loss over that of the best naive forecast, in the model's own record; below 1 is better.",
        [(labels, (row["record"] or {}).get("wql_vs_best_naive")) for labels, row in rows],
    )
    page.gauge(
        "demand_model_info", "Who serves a series.", [({**labels, "model": row["model"]}, 1) for labels, row in rows]
    )
    page.number("demand_pools_left_out", "Pools without series, beyond the bound of this page.", len(size) - len(shown))
    return page.encode()


def _total(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else None


def _mean(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
