"""Metrics of the fleet for Prometheus, in the board section `metrics.fleet`.

They are in base units and fleet time. Totals are complete. A limited number of entities have their own
series: the flagged and riskiest nodes, the largest queues, and the largest slow jobs.
`fleetcast_metrics_left_out` counts the others.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.held_gpus import count_wanted_milli
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.fleet.topology import Level
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, HardReason
from fleetcast.service.answers.jobs import StragglerCause
from fleetcast.service.board.gpu_use import Occupant
from fleetcast.service.exposition import Page, format_horizon
from fleetcast.service.pipeline import documents
from fleetcast.service.pipeline.gpu_states import compute_gpu_states
from fleetcast.service.pipeline.tick import Tick

NODES_SHOWN = 100
QUEUES_SHOWN = 20
JOBS_SHOWN = 50
OTHER = "other"
WAIT_QUANTILES = (0.5, 0.9, 1.0)
CAUSES: tuple[StragglerCause, ...] = get_args(StragglerCause)
QueueLoad = tuple[int, int]  # jobs, thousandths of GPUs
FLAGS = tuple(code for code in ACTIONS if code not in documents.UNFLAGGED)


def make_fleet_page(tick: Tick) -> bytes:
    """Make the metrics page of nodes, GPUs, jobs and queues at a tick."""
    page = Page()
    gpus = compute_gpu_states(tick)
    _add_fleet_metrics(page, tick, gpus)
    _add_usage_metrics(page, tick, gpus["running"])
    shown = choose_shown_nodes(tick)
    _add_node_metrics(page, tick, shown)
    _add_gpu_metrics(page, tick, shown, gpus)
    left = {"nodes": len(tick.topology) - len(shown)}
    left["queues"] = _add_queues(page, tick)
    left["slow_jobs"] = _add_slow_jobs(page, tick)
    rows = [({"what": what}, count) for what, count in left.items()]
    page.add_gauge("metrics_left_out", "Entities without series of their own, beyond the bound of this page.", rows)
    return page.encode()


def _add_fleet_metrics(page: Page, tick: Tick, gpus: Mapping[str, NDArray[np.bool_]]) -> None:
    page.add_number("board_timestamp_seconds", "Fleet time of the board that these numbers are of.", tick.now_ms / 1000)
    counts = np.bincount(tick.state_codes, minlength=len(documents.STATES)).tolist()
    page.add_gauge(
        "nodes",
        "Nodes by state: degraded ones are flagged, stale ones do not answer scrapes, unknown ones never did.",
        [({"state": state}, count) for state, count in zip(documents.STATES, counts, strict=True)],
    )
    codes = [action.code for action in tick.fleet.risk.actions.values()]
    page.add_gauge(
        "flagged_nodes",
        "Nodes by what to do about them, where that is more than watching.",
        [({"action": code}, codes.count(code)) for code in FLAGS],
    )
    page.add_number(
        "hard_signal_nodes", "Nodes with an XID, a lost GPU or another hard signal.", int(tick.fleet.risk.hard.sum())
    )
    page.add_gauge(
        "gpus",
        "GPUs by state; each is in one. Promised: placed, and not seen running. Unheard: its node has no fresh "
        "telemetry. Unusable: vanished. Window, reservation: maintenance or a reservation keeps its node. "
        "Out of service: its node is drained, lost or withheld.",
        [({"state": state}, int(mask.sum())) for state, mask in gpus.items()],
    )
    page.add_number(
        "gpus_unknown_use",
        "GPUs among the running ones that telemetry shows at work and that no job event names.",
        int((tick.gpu_use == Occupant.UNKNOWN).sum()),
    )
    page.add_gauge(
        "jobs",
        "Jobs that hold GPUs, that are promised some, that wait, and that may not start yet (held, dependent, gated).",
        [
            ({"state": "running"}, len(tick.events.running)),
            ({"state": "promised"}, len(tick.open.promised)),
            ({"state": "queued"}, sum(attempt.tasks for attempt in tick.open.waiting)),
            ({"state": "blocked"}, sum(attempt.tasks for attempt in tick.blocked)),
        ],
    )
    page.add_number(
        "queued_gpus",
        "GPUs that waiting jobs ask for, in job queues and in our own, each job once.",
        tick.queued_gpus,
    )
    page.add_gauge("model_info", "The model that serves.", [({"part": "risk", "model": tick.fleet.risk.model}, 1)])


def _add_usage_metrics(page: Page, tick: Tick, running: NDArray[np.bool_]) -> None:
    """Add the power and the utilisation of the GPUs with fresh readings."""
    busy = tick.read_gpu_feature("gpu_util")
    page.add_number("power_watts", "Power of all GPUs.", _sum_known(tick.read_gpu_feature("power_w")))
    page.add_gauge(
        "gpu_utilization_ratio",
        "Mean utilization of GPUs in use, by a job or by unknown work, and of the others.",
        [({"state": "running"}, _average_known(busy[running])), ({"state": "idle"}, _average_known(busy[~running]))],
    )


def choose_shown_nodes(tick: Tick) -> NDArray[np.intp]:
    """Return the rows of nodes with their own series, flagged ones first, then the riskiest: (k,)."""
    worst = np.nan_to_num(tick.fleet.risk.values[:, 0, :], nan=-1.0).max(axis=0)
    return np.lexsort((-worst, ~tick.flagged))[:NODES_SHOWN]


def _add_node_metrics(page: Page, tick: Tick, shown: NDArray[np.intp]) -> None:
    names = {row: tick.topology.nodes[row].name for row in shown.tolist()}
    shown_names = frozenset(names.values())
    holders_on = tick.memory.get_or_make(
        "holders on", (tick.held_by_node,), lambda: _group_holders_by_node(tick.held_by_node)
    )
    holders = sorted({number for name in shown_names for number in holders_on.get(name, ())})
    racks = documents.list_node_domains(tick.topology, Level.RACK)
    horizons = [format_horizon(horizon_s) for horizon_s in RISK_HORIZONS_S]
    risk = np.moveaxis(tick.fleet.risk.values[:, :, shown], 2, 0).tolist()
    page.add_gauge(
        "node_risk_probability",
        "Probability that a node fails, is drained or slows a job within the horizon.",
        [
            ({"node": name, "kind": kind, "horizon": horizon}, p)
            for name, of_node in zip(names.values(), risk, strict=True)
            for kind, of_kind in zip(RISK_KINDS, of_node, strict=True)
            for horizon, p in zip(horizons, of_kind, strict=True)
        ],
    )
    page.add_gauge(
        "node_flagged",
        "1 for a node about which more is to be done than watching, with the action and what speaks first.",
        [(_make_flag_labels(tick, row, name), 1) for row, name in names.items() if tick.flagged[row]],
    )
    page.add_gauge(
        "node_info",
        "1 for every node with series of its own: where it is and what it is.",
        [
            ({"node": name, "rack": racks[row] or "", "gpu_model": tick.topology.nodes[row].gpu_model}, 1)
            for row, name in names.items()
        ],
    )
    page.add_gauge(
        "node_job_gpus",
        "GPUs that a job holds on a node; a part of a GPU counts as a part.",
        [
            ({"node": node, "job_id": tick.events.running[number].job}, milli / WHOLE_GPU)
            for number in holders
            for node, milli in tick.held_by_node[number].items()
            if milli and node in shown_names
        ],
    )


def _group_holders_by_node(held_by_node: Sequence[Mapping[str, int]]) -> dict[str, list[int]]:
    """Return node → indices of the running attempts that hold GPUs on it."""
    found: dict[str, list[int]] = defaultdict(list)
    for number, held in enumerate(held_by_node):
        for node in held:
            found[node].append(number)
    return dict(found)


def _make_flag_labels(tick: Tick, row: int, name: str) -> dict[str, str]:
    """Return the labels of a flagged node.

    They name the oldest hard reason of the node, because a change of labels would start a second alert.
    """
    reasons = tick.fleet.risk.reasons.get(row, ())
    hard = [reason for reason in reasons if isinstance(reason, HardReason)]
    first = min(hard, key=lambda reason: reason.since_ms or tick.now_ms, default=reasons[0] if reasons else None)
    return {
        "node": name,
        "action": tick.fleet.risk.actions[row].code,
        "feature": first.feature if first else "",
        "entity": first.entity if first else "",
    }


def _add_gpu_metrics(page: Page, tick: Tick, shown: NDArray[np.intp], gpus: Mapping[str, NDArray[np.bool_]]) -> None:
    names = [tick.topology.nodes[row].name for row in shown.tolist()]
    page.add_gauge(
        "node_gpus",
        "GPUs of a node by state.",
        [
            ({"node": name, "state": state}, count)
            for state, mask in gpus.items()
            for name, count in zip(names, mask[shown].sum(axis=1).tolist(), strict=True)
        ],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a node without any reading is NaN, and left out
        for name, text, feature, over, scale in (
            ("node_power_watts", "Power of a node's GPUs.", "power_w", np.nansum, 1.0),
            ("node_gpu_temperature_celsius", "Its hottest GPU.", "gpu_temp_c", np.nanmax, 1.0),
            ("node_sm_clock_hertz", "Its slowest SM clock.", "sm_clock_mhz", np.nanmin, 1e6),
            ("node_gpu_utilization_ratio", "Mean utilization of its GPUs.", "gpu_util", np.nanmean, 1.0),
        ):
            values = (over(tick.read_gpu_feature(feature, shown), axis=1) * scale).tolist()
            page.add_gauge(name, text, [({"node": node}, value) for node, value in zip(names, values, strict=True)])


def _add_queues(page: Page, tick: Tick) -> int:
    """Add the metrics of queues. Returns how many queues are summed as "other"."""
    loads = {"running": _compute_running_loads(tick)}
    for state, attempts in (("promised", tick.open.promised), ("queued", tick.open.waiting)):
        loads[state] = _sum_queue_loads(attempts, [count_wanted_milli(row, tick.node_gpus) for row in attempts])
    sizes = Counter[str]()
    for of_queue in loads.values():
        for name, (_, milli) in of_queue.items():
            sizes[name] += milli
    shown = set(sorted(sizes, key=lambda name: (-sizes[name], name))[:QUEUES_SHOWN])
    by_queue: dict[str, dict[str, QueueLoad]] = {}
    for name in sorted(sizes, key=shown.__contains__, reverse=True):
        states = by_queue.setdefault(name if name in shown else OTHER, dict.fromkeys(loads, (0, 0)))
        for state, of_queue in loads.items():
            jobs, milli = of_queue.get(name, (0, 0))
            states[state] = states[state][0] + jobs, states[state][1] + milli
    rows = [
        ({"queue": name, "state": state}, load) for name, states in by_queue.items() for state, load in states.items()
    ]
    page.add_gauge(
        "queue_jobs",
        "Jobs of a queue. One that waits in several queues counts in each.",
        [(labels, jobs) for labels, (jobs, _) in rows],
    )
    page.add_gauge(
        "queue_gpus",
        "GPUs that jobs of a queue hold, are promised or wait for. A job that waits in several queues counts in each.",
        [(labels, milli / WHOLE_GPU) for labels, (_, milli) in rows],
    )
    waits: dict[str, list[float]] = {name: [] for name in by_queue}
    for row in tick.open.waiting:
        for name in row.queues:
            waits[name if name in shown else OTHER].append(_compute_waited_s(row, tick.now_ms))
    page.add_family(
        "summary",
        "queue_wait_seconds",
        "How long the jobs that wait now have waited (quantile 1: the longest).",
        [row for name, values in waits.items() for row in _make_quantile_rows({"queue": name}, values)],
    )
    page.add_family(
        "summary",
        "started_wait_seconds",
        "How long the jobs that started within the last hour had waited.",
        _make_quantile_rows({}, np.concatenate([np.zeros(0), *tick.recent_waits_s.values()])),
    )
    return max(0, len(sizes) - QUEUES_SHOWN)


def _compute_running_loads(tick: Tick) -> dict[str, QueueLoad]:
    of = tick.events.placements, tick.held_by_node, tick.node_gpus

    def compute_loads() -> dict[str, QueueLoad]:
        held = zip(tick.events.running, of[1], strict=True)
        return _sum_queue_loads(
            tick.events.running, [sum(own.values()) if own else count_wanted_milli(row, of[2]) for row, own in held]
        )

    return tick.memory.get_or_make("running by queue", of, compute_loads)


def _sum_queue_loads(attempts: Sequence[JobAttempt], milli: Sequence[int]) -> dict[str, QueueLoad]:
    """Return queue → its number of jobs and its GPUs. milli: (attempt,) thousandths of GPUs."""
    found: dict[str, QueueLoad] = {}
    for attempt, own in zip(attempts, milli, strict=True):
        for queue in attempt.queues:
            jobs, total = found.get(queue, (0, 0))
            found[queue] = jobs + attempt.tasks, total + own
    return found


def _compute_waited_s(attempt: JobAttempt, until_ms: int) -> float:
    return max(0.0, (until_ms - (attempt.eligible_ms or until_ms)) / 1000)


def _make_quantile_rows(
    labels: Mapping[str, str], values: Sequence[float] | NDArray[np.float64]
) -> list[tuple[dict[str, str], float]]:
    if not len(values):
        return []
    found = np.quantile(values, WAIT_QUANTILES).tolist()
    return [({**labels, "quantile": f"{q:g}"}, value) for q, value in zip(WAIT_QUANTILES, found, strict=True)]


def _add_slow_jobs(page: Page, tick: Tick) -> int:
    """Add the metrics of slow jobs. Returns how many slow jobs have no series of their own."""
    slow_jobs = {job: body for job, body in tick.fleet.stragglers.items() if body.get("slow")}
    running = [row for row in tick.events.running if row.job in slow_jobs]
    gpus = {row.job: tick.sizes.get((row.job, row.attempt), row.gpus) for row in running}
    slow = {job: body for job, body in slow_jobs.items() if job in gpus}
    causes = [body["cause"] if body["cause"] in CAUSES else "unknown" for body in slow.values()]
    shown = sorted(slow, key=lambda job: (-gpus[job], job))[:JOBS_SHOWN]
    page.add_gauge(
        "slow_jobs",
        "Running jobs that are slower than they should be, by cause.",
        [({"cause": cause}, causes.count(cause)) for cause in CAUSES],
    )
    page.add_gauge(
        "slow_job_gpus",
        "GPUs of a slow job, with who holds it back.",
        [({"job_id": job, "cause": slow[job]["cause"], **_make_culprit_labels(slow[job])}, gpus[job]) for job in shown],
    )
    page.add_gauge(
        "slow_job_step_ratio",
        "Observed step time of a slow job over the expected one.",
        [({"job_id": job}, slow[job].get("ratio")) for job in shown],
    )
    return len(slow) - len(shown)


def _make_culprit_labels(body: Mapping[str, Any]) -> dict[str, str]:
    culprit = body["culprit"]
    return {"kind": culprit["kind"], "culprit": culprit["name"] or "nobody"}


def _sum_known(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.sum()) if len(known) else None


def _average_known(values: NDArray[np.float64]) -> float | None:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else None
