"""Scores made into the JSON that the API serves. Pure: state in, JSON-able rows out.

Rounding is to what is known: probabilities to three digits, watts to one, temperatures to one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from features.frame import FeatureFrame
from fleet.jobs import JobAttempt
from fleet.topology import Level, Topology
from models.port_signals import NODE_SILENT_S
from models.scores import RISK_HORIZONS_S, RISK_KINDS, Action, RiskScores
from service.run_book import ToldRun

NO_ACTION = Action("none", "Nothing to do.")
UNFLAGGED = frozenset({"none", "watch"})


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


def answering(
    node: FeatureFrame | None, gpu: FeatureFrame | None, rows: NDArray[np.int32], n: int
) -> NDArray[np.float64]:
    """(n,) 1 where the exporters of a node answer, 0 where they do not, NaN where nothing was ever heard.

    Nobody asks a node that sends by itself: it answers while the samples of its GPUs are recent. rows: (n, g) of `gpu`.
    """
    up = np.full(n, np.nan)
    if node is not None and len(node.values):
        up[: len(node.values)] = node.column("scrape_up")[:n]
    if gpu is None or not len(gpu.values):
        return up
    age_s = np.nan_to_num(gpu.column("age_s"), nan=np.inf)
    known = (rows >= 0) & (rows < len(age_s))
    youngest_s = np.where(known, age_s[np.where(known, rows, 0)], np.inf).min(axis=1, initial=np.inf)[:n]
    sends = np.isnan(up) & np.isfinite(youngest_s)
    return np.where(sends, youngest_s <= NODE_SILENT_S, up)


def node_states(in_service: NDArray[np.int8], flags: NDArray[np.bool_], up: NDArray[np.float64]) -> list[str]:
    """ok | degraded | drained | lost | stale (its exporters stopped answering) | unknown (never heard).

    up: what `answering` says.
    """
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


def risk_rows(values: NDArray[np.float64]) -> list[dict[str, Any]]:
    """values: (kind, horizon) of one node."""
    return [
        {"kind": kind, "horizon_s": horizon_s, "p": probability(values[k, h])}
        for k, kind in enumerate(RISK_KINDS)
        for h, horizon_s in enumerate(RISK_HORIZONS_S)
    ]


def encoded_risk_rows(risk: RiskScores) -> list[msgspec.Raw]:
    """JSON of every node's `risk_rows`. Most nodes have the same ones: each is rendered once."""
    made: dict[bytes, msgspec.Raw] = {}
    answer = []
    for values in np.ascontiguousarray(risk.values.transpose(2, 0, 1)):
        key = values.tobytes()
        if key not in made:
            made[key] = msgspec.Raw(msgspec.json.encode(risk_rows(values)))
        answer.append(made[key])
    return answer


class GpuAnswer(msgspec.Struct, gc=False):
    """What one GPU of a node does now; no readings where none was ever heard. NaN is unknown, and null in JSON."""

    index: int
    job: str | None
    age_s: float | msgspec.UnsetType = msgspec.UNSET
    power_w: float | msgspec.UnsetType = msgspec.UNSET
    gpu_temp_c: float | msgspec.UnsetType = msgspec.UNSET
    sm_clock_mhz: float | msgspec.UnsetType = msgspec.UNSET
    gpu_util: float | msgspec.UnsetType = msgspec.UNSET
    sm_active: float | msgspec.UnsetType = msgspec.UNSET
    tensor_active: float | msgspec.UnsetType = msgspec.UNSET
    xid: float | msgspec.UnsetType = msgspec.UNSET


DIGITS = {"gpu_util": 2, "sm_active": 2, "tensor_active": 2}  # of the readings; the others have none
READINGS = GpuAnswer.__struct_fields__[2:]


def gpu_answers(
    gpu: FeatureFrame | None,
    rows: NDArray[np.int32],
    gpus: NDArray[np.integer],
    holder: NDArray[np.int32],
    jobs: Sequence[str],
) -> list[list[GpuAnswer]]:
    """The GPUs of each node. rows: (n, g) rows of `gpu`, -1 was never heard; gpus: (n,); holder: (n, g) into `jobs`."""
    node, index = np.nonzero(np.arange(rows.shape[1])[None, :] < gpus[:, None])
    entity = rows[node, index]
    heard = (entity >= 0) & (entity < (0 if gpu is None else len(gpu.values)))
    named = [jobs[number] if number >= 0 else None for number in holder[node, index].tolist()]
    answers = list(map(GpuAnswer, index.tolist(), named))
    if gpu is not None and heard.any():
        at, told = np.flatnonzero(heard).tolist(), entity[heard]
        columns = [
            np.round(gpu.column(name)[told].astype(np.float64), DIGITS.get(name, 0)).tolist() for name in READINGS
        ]
        for place, answer in zip(
            at, map(GpuAnswer, index[heard].tolist(), map(named.__getitem__, at), *columns), strict=True
        ):
            answers[place] = answer
    ends = np.cumsum(gpus).tolist()
    return [answers[end - count : end] for end, count in zip(ends, gpus.tolist(), strict=True)]


def ranking_rows(risk: RiskScores, topology: Topology, states: Sequence[str]) -> list[bytes]:
    """What `/v1/risk/nodes` says of each node besides its probabilities, which the API adds as it ranks."""
    racks = domain_of(topology, Level.RACK)
    rows = []
    for row, node in enumerate(topology.nodes):
        reasons = risk.reasons.get(row, ())
        rows.append(
            msgspec.json.encode(
                {
                    "node": node.name,
                    "rack": racks[row],
                    "state": states[row],
                    "placed": bool(topology.placed[row]),
                    "reason": reasons[0].sentence if reasons else None,
                    "action": risk.actions.get(row, NO_ACTION),
                    "parts": risk.parts.get(row, ()),
                }
            )
        )
    return rows


def domain_of(topology: Topology, level: Level) -> list[str | None]:
    """Domain name of each node at a level, None where no source placed it."""
    names = topology.domain_names[level]
    return [names[index] if index >= 0 else None for index in topology.domain[level].tolist()]


def job_row(
    attempt: JobAttempt, now_ms: int, durations: Mapping[str, Any], slow: bool, told: ToldRun | None = None
) -> dict[str, Any]:
    """One row of `/v1/jobs`. Remaining time is what was told of it, or, before that, what jobs of its size say."""
    left = None
    if attempt.state == "running":
        left = (told and told.remaining(now_ms)) or remaining_s(attempt, now_ms, durations)
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
        "remaining_s": left,
        "slow": slow,
    }


def job_detail(attempt: JobAttempt, told: ToldRun | None = None) -> dict[str, Any]:
    """What `/v1/jobs/{id}` adds to the row: placement, phase and the last events."""
    return {
        "placement": attempt.ranks or [{"node": node} for node in attempt.nodes],
        "phase": attempt.phase or None,
        "phase_since_ms": attempt.phase_since_ms,
        "queued_reason": attempt.queued_reason or None,
        "failure": attempt.failure,
        **run_answer(told),
        "events": list(attempt.events)[-10:],
    }


def run_answer(told: ToldRun | None) -> dict[str, Any]:
    """What `/v1/jobs/{id}` says of a run time: as told at its submission, and by which model."""
    return {"run_s": told.said if told else None, "model": told.model if told and told.said else None}


def remaining_s(attempt: JobAttempt, now_ms: int, durations: Mapping[str, Any]) -> dict[str, float] | None:
    """p50 and p90 of finished jobs of this size less the time run; an overrun gets as long again as it has had."""
    known = durations.get("by_gpus", {}).get(str(attempt.gpus)) or durations.get("all")
    if not known or attempt.started_ms is None or not known.get("n"):
        return None
    elapsed_s = max(0.0, (now_ms - attempt.started_ms) / 1000)
    return {
        name: round(known[name] - elapsed_s if known[name] > elapsed_s else elapsed_s, 0) for name in ("p50", "p90")
    }
