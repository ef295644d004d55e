"""The answers of `/v1/jobs/{id}/fingerprint` and `/v1/utilisation` from one job's window: pure, so a thread makes them.

A job that tells its steps and phases is believed; its telemetry speaks where it does not.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.fingerprint import class_of, shape_of
from features.job_window import GPU_METRICS, JobWindow
from features.period import Period, find_period
from fleet.events import Checkpoint, Phase
from fleet.jobs import JobAttempt
from models.phases import PHASES, Levels, PhaseRule
from models.renewal import LEVELS, Next, next_of
from models.utilisation import FLOPS_LABEL, GIB, mfu_of, use_of

Array = NDArray[np.float64]

STEPS = 64
AHEAD_S = (300, 900)
RECENT_S = 600.0
EXPECTED = ("power_w", "nvlink_tx_bytes_per_s", "ib_tx_bytes_per_s")
NOTHING = Period(None, "none of its GPUs was heard of here")


@dataclass(frozen=True, slots=True)
class Seen:
    """One job as it was copied for the thread. evaluations: when those that were seen began, Unix ms."""

    attempt: JobAttempt
    window: JobWindow | None
    evaluations: tuple[int, ...]
    gpu_model: str
    now_ms: int


def fingerprint_of(seen: Seen) -> dict[str, Any]:
    """The body of the answer."""
    attempt, window, now_ms = seen.attempt, seen.window, seen.now_ms
    channels = _channels(window) if window else None
    found = find_period(channels, window.interval_s) if window and channels is not None else NOTHING
    odds = _odds(window, found) if window else None
    likely = max(odds, key=lambda name: odds[name]) if odds else None
    period_s, basis = _step_period(attempt), "steps"
    if period_s is None:
        period_s, basis = found.period_s, "telemetry"
    checkpoints, lasts = episodes(attempt.checkpoints)
    upcoming = next_of(np.array(checkpoints, np.int64), now_ms)
    evaluation = next_of(np.array(seen.evaluations, np.int64), now_ms)
    phase, since_ms = _phase(attempt, window)
    return {
        "job": attempt.job,
        "attempt": attempt.attempt,
        "as_of_ms": now_ms,
        "class": likely or attempt.class_,
        "class_p": round(odds[likely], 3) if odds and likely else None,
        "class_told": attempt.class_,
        "period_s": None if period_s is None else round(period_s, 4),
        "period_basis": None if period_s is None else basis,
        "period_reason": "" if period_s is not None else found.reason,
        "phase": phase,
        "phase_since_ms": since_ms,
        "phase_ends_ms": _phase_ends(phase, since_ms, lasts, upcoming, evaluation, now_ms),
        "next_checkpoint_ms": _quantiles(upcoming),
        "checkpoint_every_s": float(np.median(np.diff(checkpoints)) / 1000) if len(checkpoints) > 1 else None,
        **_checkpoint_cost(attempt, lasts),
        "next_evaluation_ms": _quantiles(evaluation),
        "expected": _expected(window) if window else [],
    }


def utilisation_of(seen: Seen) -> dict[str, Any]:
    """One row of the answer."""
    attempt, window = seen.attempt, seen.window
    gpu = np.full((len(GPU_METRICS), 1, 1), np.nan) if window is None else window.gpu.astype(np.float64)
    of = {name: gpu[row] for row, name in enumerate(GPU_METRICS)}
    steps = list(attempt.steps)[-STEPS:]
    label = attempt.submission.labels.get(FLOPS_LABEL, "") if attempt.submission else ""
    mfu = mfu_of(steps, _number(label), attempt.gpus, seen.gpu_model)
    interval_s = window.interval_s if window else 1.0
    use = use_of(
        interval_s, of["sm_active"], of["tensor_active"], of["gpu_util"], of["fb_used_bytes"], steps, mfu
    )  # fmt: skip
    rounded = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(use).items()
    }  # fmt: skip
    about = {"job": attempt.job, "class": attempt.class_, "gpus": attempt.gpus, "looked_ms": seen.now_ms}
    user = attempt.submission.user if attempt.submission else ""
    return {**about, "user": user, **rounded}


def _checkpoint_cost(attempt: JobAttempt, lasts: list[float]) -> dict[str, Any]:
    """The median of what its checkpoints took, else what it was submitted with."""
    told = attempt.submission.checkpoint_cost_s if attempt.submission else None
    if lasts:
        return {"checkpoint_cost_s": float(np.median(lasts)), "checkpoint_cost_basis": "measured"}
    return {"checkpoint_cost_s": told, "checkpoint_cost_basis": None if told is None else "told"}


def episodes(edges: list[Checkpoint]) -> tuple[list[int], list[float]]:
    """When checkpoints began (Unix ms) and how long whole ones took (s); begins of further ranks are the same one."""
    begins: list[int] = []
    lasts: list[float] = []
    is_open = False
    for edge in sorted(edges, key=lambda row: row.time_ms):
        if edge.edge == "begin" and not is_open:
            begins.append(edge.time_ms)
            is_open = True
        elif edge.edge == "end" and is_open:
            lasts.append((edge.time_ms - begins[-1]) / 1000)
            is_open = False
    return begins, lasts


def evaluations_in(attempt: JobAttempt) -> set[int]:
    """When evaluations began that its kept events tell of."""
    told = {row.time_ms for row in attempt.events if isinstance(row, Phase) and row.name == "evaluation"}
    if attempt.phase == "evaluation" and attempt.phase_since_ms is not None:
        told.add(attempt.phase_since_ms)
    return told


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _step_period(attempt: JobAttempt) -> float | None:
    """The median of its latest whole steps."""
    steps = attempt.steps[-STEPS:]
    return float(np.median([step.duration_s for step in steps])) if steps else None


def _channels(window: JobWindow) -> Array:
    """(channel, slot) what a period may show in."""
    names = ("sm_active", "tensor_active", "power_w", "nvlink_tx_bytes_per_s", "pcie_tx_bytes_per_s")
    channels = np.stack([*(window.mean(name) for name in names), window.sent.astype(np.float64)])
    heard = np.flatnonzero(np.isfinite(channels).any(axis=0))
    return channels[:, heard[0] :] if len(heard) else channels


def _exchange(window: JobWindow) -> Array:
    """(slot,) bytes/s a GPU sends to others, over NVLink and over its share of the node's ports."""
    nvlink, ports = window.mean("nvlink_tx_bytes_per_s"), window.sent / max(window.gpus, 1)
    known = np.isfinite(nvlink) | np.isfinite(ports)
    return np.where(known, np.nan_to_num(nvlink) + np.nan_to_num(ports), np.nan)


def _host(window: JobWindow) -> Array:
    return window.mean("pcie_tx_bytes_per_s") + window.mean("pcie_rx_bytes_per_s")


def _odds(window: JobWindow, period: Period) -> dict[str, float] | None:
    activity = window.mean("sm_active")
    if not np.isfinite(activity).any():
        return None
    return class_of(shape_of(activity, window.mean("tensor_active"), _exchange(window), _host(window), period))


def _phase(attempt: JobAttempt, window: JobWindow | None) -> tuple[str | None, int | None]:
    """The phase that it tells, or the one that its levels show; since when, where that is known."""
    if attempt.phase:
        return attempt.phase, attempt.phase_since_ms
    if window is None or not np.isfinite(window.mean("sm_active")).any():
        return None, None
    age_s = (window.first_ms - (attempt.started_ms or window.first_ms)) / 1000
    memory = window.mean("fb_used_bytes") / GIB
    levels = Levels(window.interval_s, window.mean("sm_active"), memory, _exchange(window), _host(window), age_s)
    codes = PhaseRule().phases(levels)
    other = np.flatnonzero(codes != codes[-1])
    first = int(other[-1]) + 1 if len(other) else 0
    return PHASES[codes[-1]], window.first_ms + round(first * window.interval_s * 1000) if len(other) else None


def _phase_ends(
    phase: str | None, since_ms: int | None, lasts: list[float], checkpoint: Next | None, evaluation: Next | None,
    now_ms: int,
) -> dict[str, int] | None:  # fmt: skip
    """Of a checkpoint: by how long earlier ones took; of steady work: the next pause; else nobody knows."""
    if phase == "checkpoint" and since_ms is not None and lasts:
        ends = since_ms + np.quantile(lasts, LEVELS) * 1000
        low, middle, high = np.maximum(ends, now_ms).round().astype(int).tolist()
        return {"p10": low, "p50": middle, "p90": high}
    if phase == "steady":
        pauses = [row for row in (checkpoint, evaluation) if row is not None]
        return _quantiles(min(pauses, key=lambda row: row.p50_ms)) if pauses else None
    return None


def _quantiles(told: Next | None) -> dict[str, int] | None:
    return None if told is None else {"p10": told.p10_ms, "p50": told.p50_ms, "p90": told.p90_ms}


def _expected(window: JobWindow) -> list[dict[str, Any]]:
    """Of the whole job: its level of the last ten minutes goes on; a reading has to be expected above p90 now and then.

    p50 and p90 are of readings at that time, not of the highest one up to it.
    """
    lately = max(1, round(RECENT_S / window.interval_s))
    many = window.gpus
    series = {
        "power_w": window.mean("power_w") * many,
        "nvlink_tx_bytes_per_s": window.mean("nvlink_tx_bytes_per_s") * many,
        "ib_tx_bytes_per_s": window.sent.astype(np.float64),
    }
    rows = []
    for metric in EXPECTED:
        values = series[metric][-lately:]
        values = values[np.isfinite(values)]
        if len(values):
            p50, p90 = np.quantile(values, (0.5, 0.9)).round(1).tolist()
            rows += [{"metric": metric, "horizon_s": ahead_s, "p50": p50, "p90": p90} for ahead_s in AHEAD_S]
    return rows
