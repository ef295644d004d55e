"""Scores made into the JSON that the API serves. Pure: state in, JSON-able rows out.

Rounding is to what is known: probabilities to three digits, watts to one, temperatures to one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.frame import FeatureFrame
from fleet.jobs import JobAttempt
from fleet.topology import Level, Topology
from models.scores import RISK_HORIZONS_S, RISK_KINDS, Action, RiskScores

NO_ACTION = Action("none", "Nothing to do.")
UNFLAGGED = frozenset({"none", "watch"})
GPU_FIELDS = (
    ("power_w", 0),
    ("gpu_temp_c", 0),
    ("sm_clock_mhz", 0),
    ("gpu_util", 2),
    ("sm_active", 2),
    ("tensor_active", 2),
    ("xid", 0),
)


def number(value: float, digits: int = 3) -> float | None:
    """A float for JSON: rounded, null when unknown."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


def probability(value: float) -> float | None:
    """Three significant digits: a base rate of 0.0002 must not round to zero."""
    return None if not math.isfinite(value) else float(f"{value:.3g}")


def flagged(risk: RiskScores, n: int) -> NDArray[np.bool_]:
    """(n,) nodes whose action asks for more than watching."""
    mask = np.zeros(n, bool)
    rows = [row for row, action in risk.actions.items() if action.code not in UNFLAGGED]
    mask[rows] = True
    return mask


def node_states(in_service: NDArray[np.int8], flags: NDArray[np.bool_], node: FeatureFrame | None, n: int) -> list[str]:
    """ok | degraded | drained | lost | stale (its exporters stopped answering) | unknown (never heard)."""
    up = np.full(n, np.nan)
    if node is not None and len(node.values):
        up[: len(node.values)] = node.column("scrape_up")[:n]
    states = []
    for state, flag, scraped in zip(in_service.tolist(), flags.tolist(), up.tolist(), strict=True):
        if state:
            states.append("drained" if state == 1 else "lost")
        elif flag:
            states.append("degraded")
        elif math.isnan(scraped):
            states.append("unknown")
        else:
            states.append("ok" if scraped > 0 else "stale")
    return states


def risk_rows(risk: RiskScores, row: int) -> list[dict[str, Any]]:
    return [
        {"kind": kind, "horizon_s": horizon_s, "p": probability(risk.values[k, h, row])}
        for k, kind in enumerate(RISK_KINDS)
        for h, horizon_s in enumerate(RISK_HORIZONS_S)
    ]


def gpu_rows(
    gpu: FeatureFrame | None, rows: Sequence[int], holders: Sequence[int], jobs: Sequence[str], count: int
) -> list[dict[str, Any]]:
    """What a node's GPUs do now: index, job, whether they answer, and their last values."""
    answer = []
    for index in range(count):
        row = rows[index] if index < len(rows) else -1
        holder = holders[index] if index < len(holders) else -1
        entry: dict[str, Any] = {"index": index, "job": jobs[holder] if holder >= 0 else None}
        if gpu is not None and 0 <= row < len(gpu.values):
            entry["age_s"] = number(float(gpu.column("age_s")[row]), 0)
            entry |= {name: number(float(gpu.column(name)[row]), digits) for name, digits in GPU_FIELDS}
        answer.append(entry)
    return answer


def ranking(risk: RiskScores, topology: Topology, states: Sequence[str]) -> list[dict[str, Any]]:
    """All nodes, riskiest first within an hour, with every kind and horizon: what `/v1/risk/nodes` selects from."""
    worst = np.nan_to_num(risk.values[:, 0, :], nan=-1.0).max(axis=0)
    racks = domain_of(topology, Level.RACK)
    rows = []
    for row in np.argsort(-worst, kind="stable").tolist():
        reasons = risk.reasons.get(row, ())
        rows.append(
            {
                "node": topology.nodes[row].name,
                "rack": racks[row],
                "state": states[row],
                "placed": bool(topology.placed[row]),
                "reason": reasons[0].sentence if reasons else None,
                "action": risk.actions.get(row, NO_ACTION),
                "p": {
                    kind: [probability(value) for value in risk.values[k, :, row].tolist()]
                    for k, kind in enumerate(RISK_KINDS)
                },
            }
        )
    return rows


def domain_of(topology: Topology, level: Level) -> list[str | None]:
    """Domain name of each node at a level, None where no source placed it."""
    names = topology.domain_names[level]
    return [names[index] if index >= 0 else None for index in topology.domain[level].tolist()]


def job_row(attempt: JobAttempt, now_ms: int, durations: Mapping[str, Any], slow: bool) -> dict[str, Any]:
    """One row of `/v1/jobs`. Remaining time is what finished jobs of the same size say, given the time it has run."""
    submission = attempt.submission
    return {
        "job": attempt.job,
        "attempt": attempt.attempt,
        "state": attempt.state,
        "class": attempt.class_,
        "user": submission.user if submission else "",
        "queue": attempt.queue,
        "gpus": attempt.gpus,
        "nodes": list(attempt.hosts),
        "submitted_ms": attempt.submitted_ms,
        "started_ms": attempt.started_ms,
        "ended_ms": attempt.ended_ms,
        "remaining_s": remaining_s(attempt, now_ms, durations) if attempt.state == "running" else None,
        "slow": slow,
    }


def remaining_s(attempt: JobAttempt, now_ms: int, durations: Mapping[str, Any]) -> dict[str, float] | None:
    """p50 and p90 of finished jobs of this size less the time run; an overrun gets as long again as it has had."""
    known = durations.get("by_gpus", {}).get(str(attempt.gpus)) or durations.get("all")
    if not known or attempt.started_ms is None or not known.get("n"):
        return None
    elapsed_s = max(0.0, (now_ms - attempt.started_ms) / 1000)
    return {
        name: round(known[name] - elapsed_s if known[name] > elapsed_s else elapsed_s, 0) for name in ("p50", "p90")
    }
