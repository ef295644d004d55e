"""The answers of `/v1/jobs/{id}/fingerprint` and `/v1/utilisation`. All functions are pure.

Facts that a job reports itself override facts from its telemetry.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.episodes import TOGETHER_MS, find_episodes
from fleetcast.features.fingerprint import compute_shape, estimate_class_odds
from fleetcast.features.job_past import JobPast, compute_watts
from fleetcast.features.job_window import GPU_METRICS, JobWindow
from fleetcast.features.period import LEAST_KNOWN, SAMPLES_A_PERIOD, Period, bridge_gaps, find_period
from fleetcast.features.pulses import find_rhythm
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.jobs.phases import PHASES, JobLevels, PhaseRule
from fleetcast.models.jobs.renewal import LEVELS, NextBeginning, predict_next_beginning
from fleetcast.models.jobs.utilisation import FLOPS_LABEL, GIB, Mfu, compute_mfu, measure_use
from fleetcast.service.answers.fingerprints import Fingerprint, TimeQuantiles, UseRow
from fleetcast.service.pipeline.jobs.loads import forecast_readings

Array = NDArray[np.float64]

STEPS = 64
LONGEST_CHECKPOINT = 0.2  # of the time between two: a job that pauses for longer does something else
UNHEARD = "none of its GPUs reports here"
TIMELESS = "its steps are reported to take 0 s; in telemetry: "
NO_LABEL = f"the job has no label {FLOPS_LABEL}"


@dataclass(frozen=True, slots=True)
class IdleSpan:
    """A period in which a job did nothing, in Unix ms.

    `until_ms`: the end of the job's last readings.
    """

    since_ms: int
    until_ms: int


@dataclass(frozen=True, slots=True)
class JobCopy:
    """A copy of one job's data for the thread that makes fingerprints.

    trouble: why the job's readings could not be copied. idle, past: results of the previous evaluation.
    """

    attempt: JobAttempt
    window: JobWindow | None
    gpu_model: str
    now_ms: int
    trouble: str = ""
    idle: IdleSpan | None = None
    past: JobPast | None = None

    @property
    def whole_window(self) -> JobWindow | None:
        """The window if it covers the whole job, or else None."""
        return self.window if self.window is not None and self.window.is_representative else None

    @property
    def idle_before_s(self) -> float:
        """The seconds for which the job was idle before the window, or 0 if part of this time is unknown."""
        window, idle = self.whole_window, self.idle
        if window is None or idle is None or idle.until_ms < window.first_ms:
            return 0.0
        return max(0, window.first_ms - idle.since_ms) / 1000

    @property
    def coverage_gap(self) -> str:
        """The reason why telemetry does not cover the whole job, or "" if it does."""
        if self.trouble:
            return self.trouble
        if self.window is None or not self.window.reporting_gpus:
            return UNHEARD
        many = f"{self.window.reporting_gpus} of its {self.window.gpus} GPUs"
        return "" if self.window.is_representative else f"only {many} report here: that is not the whole job"


@dataclass(frozen=True, slots=True)
class Pauses:
    """The past checkpoints of a job, and when its next checkpoint and evaluation are due."""

    begins: list[int]  # Unix ms
    lasts: list[float]  # seconds, of whole checkpoints
    last_ms: int | None  # when the last whole one began: work since then would be done twice
    checkpoint: NextBeginning | None
    evaluation: NextBeginning | None

    @property
    def every_s(self) -> float | None:
        return float(np.median(np.diff(self.begins)) / 1000) if len(self.begins) > 1 else None


def find_reported_pauses(attempt: JobAttempt, now_ms: int, seen_ms: Sequence[int] = ()) -> Pauses:
    """Return the job's past checkpoints and its next pauses, as the job reported them.

    seen_ms: the pauses that telemetry shows. They count if the job reports none.
    """
    reported = find_episodes(attempt.checkpoints)
    begins = [one.begin_ms for one in reported] or list(seen_ms)
    evaluations = sorted(row.time_ms for row in attempt.evaluations)
    pairs = zip([0, *evaluations], evaluations, strict=False)
    apart = [time_ms for before, time_ms in pairs if time_ms - before > TOGETHER_MS]
    lasts = [one.duration_s for one in reported if one.duration_s is not None]
    last_ms = max((one.begin_ms for one in reported if one.end_ms is not None), default=None)
    upcoming = predict_next_beginning(np.array(begins, np.int64), now_ms)
    return Pauses(begins, lasts, last_ms, upcoming, predict_next_beginning(np.array(apart, np.int64), now_ms))


@dataclass(frozen=True, slots=True)
class SeenPauses:
    """The regular pauses of a job that telemetry shows.

    every_s: seconds between pauses, or None without a rhythm. If None, `reason` says why. begins_ms: when
    each pause began. Empty if the pauses are too long to be checkpoints.
    """

    every_s: float | None
    begins_ms: tuple[int, ...] = ()
    reason: str = ""


def find_pause_rhythm(past: JobPast | None, interval_s: float) -> SeenPauses:
    """Find the rhythm of a job's pauses in its own past readings. interval_s: seconds between readings."""
    if past is None:
        return SeenPauses(None, reason=UNHEARD)
    known = np.isfinite(past.values).mean(axis=1) >= LEAST_KNOWN
    if not known.any():
        return SeenPauses(None, reason="too few of its readings arrived")
    rhythm = find_rhythm(bridge_gaps(past.values[known].astype(np.float64)), past.averaged[known], interval_s)
    if rhythm.period is None or not rhythm.pauses:
        return SeenPauses(None, reason=rhythm.reason or "its telemetry shows no pauses")
    if rhythm.longest > LONGEST_CHECKPOINT * rhythm.period:
        return SeenPauses(rhythm.period * interval_s)
    begins = tuple(past.first_ms + round(at * interval_s * 1000) for at in rhythm.centers)
    return SeenPauses(rhythm.period * interval_s, begins)


def make_fingerprint(seen: JobCopy) -> Fingerprint:
    """Make the fingerprint of one job, which is the body of `/v1/jobs/{id}/fingerprint`."""
    attempt, window, now_ms = seen.attempt, seen.whole_window, seen.now_ms
    found = _find_period(window, seen.past) if window else Period(None, seen.coverage_gap)
    rhythm = find_pause_rhythm(seen.past, window.interval_s) if window else SeenPauses(None, reason=seen.coverage_gap)
    odds = _compute_class_odds(window, found) if window else None
    likely = max(odds, key=lambda name: odds[name]) if odds else None
    basis: Literal["steps", "telemetry"] = "steps"
    period_s = _compute_step_period(attempt)
    if period_s is None:
        period_s, basis = found.period_s, "telemetry"
    pauses = find_reported_pauses(attempt, now_ms, () if likely == "inference" else rhythm.begins_ms)
    phase, since_ms = _find_phase(attempt, window)
    cost_s, cost_basis = _find_checkpoint_cost(attempt, pauses.lasts)
    return Fingerprint(
        job=attempt.job,
        attempt=attempt.attempt,
        as_of_ms=now_ms,
        looked_ms=now_ms,
        class_=likely,
        class_p=round(odds[likely], 3) if odds and likely else None,
        class_told=attempt.class_,
        gpus_heard=seen.window.reporting_gpus if seen.window else 0,
        unheard_reason=seen.coverage_gap,
        period_s=None if period_s is None else round(period_s, 4),
        period_basis=None if period_s is None else basis,
        period_reason="" if period_s is not None else f"{TIMELESS if attempt.steps else ''}{found.reason}",
        phase=phase,
        phase_since_ms=since_ms,
        phase_ends_ms=_predict_phase_end(phase, since_ms, pauses, now_ms),
        next_checkpoint_ms=_make_time_quantiles(pauses.checkpoint),
        last_checkpoint_ms=pauses.last_ms,
        checkpoint_every_s=pauses.every_s,
        checkpoint_every_basis=None if pauses.every_s is None else "told" if attempt.checkpoints else "telemetry",
        pause_every_s=None if rhythm.every_s is None else round(rhythm.every_s, 1),
        pause_reason=rhythm.reason,
        checkpoint_cost_s=cost_s,
        checkpoint_cost_basis=cost_basis,
        next_evaluation_ms=_make_time_quantiles(pauses.evaluation),
        expected=forecast_readings(window, _choose_period_s(window, found, pauses)) if window else [],
    )


def _choose_period_s(window: JobWindow, found: Period, pauses: Pauses) -> float | None:
    """Return the period of the job's readings in seconds, or None if it is unknown.

    It is the period that the readings show. If they show none, it is the interval of the checkpoints, but
    only if this interval is long enough to show in the readings.
    """
    if found.period_s is not None:
        return found.period_s
    every_s = pauses.every_s
    is_seen = every_s is not None and pauses.checkpoint is not None and every_s >= SAMPLES_A_PERIOD * window.interval_s
    return every_s if is_seen else None


def make_use_row(seen: JobCopy) -> UseRow:
    """Make the row of `/v1/utilisation` for one job."""
    attempt, window = seen.attempt, seen.whole_window
    gpu = np.full((len(GPU_METRICS), 1, 1), np.nan) if window is None else window.gpu.astype(np.float64)
    of = {name: gpu[row] for row, name in enumerate(GPU_METRICS)}
    steps = list(attempt.steps)[-STEPS:]
    label = attempt.submission.labels.get(FLOPS_LABEL, "") if attempt.submission else ""
    mfu = compute_mfu(steps, _parse_number(label), attempt.gpus, seen.gpu_model) if label else Mfu(None, NO_LABEL)
    interval_s = window.interval_s if window else 1.0
    use = measure_use(
        interval_s,
        of["sm_active"],
        of["tensor_active"],
        of["gpu_util"],
        of["fb_used_bytes"],
        steps,
        seen.idle_before_s,
    )
    rounded: dict[str, Any] = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(use).items()
    }
    return UseRow(
        job=attempt.job,
        class_=attempt.class_,
        gpus=attempt.gpus,
        gpus_heard=seen.window.reporting_gpus if seen.window else 0,
        looked_ms=seen.now_ms,
        user=attempt.submission.user if attempt.submission else "",
        **rounded,
        mfu=None if mfu.value is None else round(mfu.value, 4),
        mfu_reason=mfu.reason,
        reason=seen.coverage_gap,
    )


def find_idle_time(seen: JobCopy, idle_s: float | None) -> IdleSpan | None:
    """Return the idle time with which the next evaluation continues, or None if the job is not idle.

    idle_s: the idle seconds that this evaluation found.
    """
    if seen.whole_window is None or not idle_s:
        return None
    return IdleSpan(seen.whole_window.end_ms - round(idle_s * 1000), seen.whole_window.end_ms)


def _find_checkpoint_cost(
    attempt: JobAttempt, lasts: list[float]
) -> tuple[float | None, Literal["measured", "told"] | None]:
    """Return the cost of a checkpoint in seconds, and its source.

    It is the median duration of the job's checkpoints, or else the cost that its submission states. Returns
    (None, None) if neither is known.
    """
    cost_s = attempt.submission.checkpoint_cost_s if attempt.submission else None
    if lasts:
        return float(np.median(lasts)), "measured"
    return cost_s, None if cost_s is None else "told"


def _parse_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _compute_step_period(attempt: JobAttempt) -> float | None:
    """Return the median duration of the latest steps in seconds, or None if it is not positive."""
    steps = attempt.steps[-STEPS:]
    median_s = float(np.median([step.duration_s for step in steps])) if steps else 0.0
    return median_s if median_s > 0 else None


def _find_period(window: JobWindow, past: JobPast | None) -> Period:
    """Find the period of the readings in the last half hour, or else in the job's longer past.

    A long period shows only over hours of readings.
    """
    channels, averaged = _stack_channels(window)
    found = find_period(channels, window.interval_s, averaged)
    if found.period_s is not None or past is None or past.values.shape[1] <= channels.shape[1]:
        return found
    longer = find_period(past.values.astype(np.float64), window.interval_s, past.averaged)
    return longer if longer.period_s is not None or longer.reason else found


def _stack_channels(window: JobWindow) -> tuple[Array, NDArray[np.bool_]]:
    """Return the series in which a period may show: (channel, slot). Also return (channel,) whether each is averaged.

    Each value of an averaged channel is the mean over its slot.
    """
    names = ("sm_active", "tensor_active", "power_w", "nvlink_tx_bytes_per_s", "pcie_tx_bytes_per_s")
    watts, is_mean = compute_watts(window)
    means = [*(window.mean(name) for name in names), window.sent.astype(np.float64)]
    channels = np.stack([*means, watts] if is_mean else means)
    averaged = np.array([False] * len(names) + [True, True][: 1 + is_mean])
    observed = np.flatnonzero(np.isfinite(channels).any(axis=0))
    return (channels[:, observed[0] :] if len(observed) else channels), averaged


def _compute_exchange_rate(window: JobWindow) -> Array:
    """Return the bytes/s that one GPU sends over NVLink and its share of the node's ports: (slot,)."""
    nvlink, ports = window.mean("nvlink_tx_bytes_per_s"), window.sent / max(window.gpus, 1)
    known = np.isfinite(nvlink) | np.isfinite(ports)
    return np.where(known, np.nan_to_num(nvlink) + np.nan_to_num(ports), np.nan)


def _compute_host_traffic(window: JobWindow) -> Array:
    return window.mean("pcie_tx_bytes_per_s") + window.mean("pcie_rx_bytes_per_s")


def _compute_class_odds(window: JobWindow, period: Period) -> dict[str, float] | None:
    activity = window.mean("sm_active")
    if not np.isfinite(activity).any():
        return None
    return estimate_class_odds(
        compute_shape(
            activity,
            window.mean("tensor_active"),
            _compute_exchange_rate(window),
            _compute_host_traffic(window),
            period,
        )
    )


def _find_phase(attempt: JobAttempt, window: JobWindow | None) -> tuple[str | None, int | None]:
    """Return the phase that the job reports, or else the phase that its readings show.

    The second value is when the phase began in Unix ms, or None if unknown.
    """
    if attempt.phase:
        return attempt.phase, attempt.phase_since_ms
    if window is None or not np.isfinite(window.mean("sm_active")).any():
        return None, None
    age_s = (window.first_ms - (attempt.started_ms or window.first_ms)) / 1000
    memory = window.mean("fb_used_bytes") / GIB
    levels = JobLevels(
        window.interval_s,
        window.mean("sm_active"),
        memory,
        _compute_exchange_rate(window),
        _compute_host_traffic(window),
        age_s,
    )
    codes = PhaseRule().classify_phases(levels)
    other = np.flatnonzero(codes != codes[-1])
    first = int(other[-1]) + 1 if len(other) else 0
    return PHASES[codes[-1]], window.first_ms + round(first * window.interval_s * 1000) if len(other) else None


def _predict_phase_end(phase: str | None, since_ms: int | None, pauses: Pauses, now_ms: int) -> TimeQuantiles | None:
    """Predict when the phase ends, as quantiles in Unix ms. Returns None if that is unknown.

    A checkpoint should last as long as earlier ones. Steady work ends at the next pause.
    """
    if phase == "checkpoint" and since_ms is not None and pauses.lasts:
        ends = since_ms + np.quantile(pauses.lasts, LEVELS) * 1000
        low, middle, high = np.maximum(ends, now_ms).round().astype(int).tolist()
        return TimeQuantiles(low, middle, high)
    if phase == "steady":
        due = [row for row in (pauses.checkpoint, pauses.evaluation) if row is not None]
        return _make_time_quantiles(min(due, key=lambda row: row.p50_ms)) if due else None
    return None


def _make_time_quantiles(upcoming: NextBeginning | None) -> TimeQuantiles | None:
    return None if upcoming is None else TimeQuantiles(upcoming.p10_ms, upcoming.p50_ms, upcoming.p90_ms)
