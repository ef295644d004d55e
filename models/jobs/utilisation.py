"""Measures of a job's use of its GPUs: real work, apparent load, and memory that it holds while idle.

"Busy" (GPU utilisation) means that some kernel ran in the interval, even one that only waited. SM
activity is the share of multiprocessors with work. MFU is known only for a job that states its FLOPs per
token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import Step

Array = NDArray[np.float64]

Verdict = Literal[
    "works", "busy_but_little_work", "waits_for_data", "waits_for_communication", "idle", "abandoned", "unknown"
]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
GIB = 2.0**30
LOADED_GIB = 0.5
ACTIVE = 0.02
LATELY_S = 600.0
IDLE_S, ABANDONED_S = 300.0, 1800.0
WAITS_SHARE = 0.3
BUSY, LITTLE = 0.8, 0.2
FLOPS_LABEL = "flops_per_token"
# Dense BF16 (V100: FP16) tensor FLOP/s, data sheets; the first name that the GPU's model holds counts.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "B200": 2250e12, "A100": 312e12, "V100": 125e12}


@dataclass(frozen=True, slots=True)
class JobGpuUse:
    """A job's use of its GPUs over `span_s` seconds, at most ten minutes. Unknown values are None.

    idle_s: for how many seconds all GPUs have been idle, at least.
    """

    span_s: float | None
    loaded_share: float | None
    busy: float | None
    sm_active: float | None
    tensor_active: float | None
    data_share: float | None
    communication_share: float | None
    idle_s: float | None
    held_gpu_memory_gib: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Mfu:
    """The model FLOPs utilisation, 0 to 1. `value` is None if it is unknown, and `reason` says why."""

    value: float | None
    reason: str = ""


def measure_use(
    interval_s: float,
    sm_active: Array,
    tensor_active: Array,
    busy: Array,
    memory_bytes: Array,
    steps: Sequence[Step],
    idle_before_s: float = 0.0,
) -> JobGpuUse:
    """Return how a job uses its GPUs, from readings (slot, GPU), oldest first, NaN if unknown.

    interval_s: seconds of a slot. idle_before_s: how long the GPUs were idle before the first slot, 0 if
    unknown.
    """
    activity = np.where(np.isfinite(sm_active), sm_active, busy)
    idle_s = _compute_idle_s(activity, interval_s, idle_before_s)
    lately = min(len(activity), max(1, round(LATELY_S / interval_s)))
    newest = _find_newest(memory_bytes)
    data, communication = compute_step_shares(steps)
    measured = {
        "sm": _compute_known_mean(sm_active[-lately:]),
        "tensor": _compute_known_mean(tensor_active[-lately:]),
        "busy": _compute_known_mean(busy[-lately:]),
    }
    held = float(np.nansum(newest) / GIB) if np.isfinite(newest).any() else None
    loaded = _compute_known_mean(np.where(np.isfinite(newest), newest > LOADED_GIB * GIB, np.nan))
    verdict = _choose_verdict(idle_s, loaded, measured["busy"], measured["sm"], data, communication)
    return JobGpuUse(
        lately * interval_s if idle_s is not None else None,
        loaded,
        measured["busy"],
        measured["sm"],
        measured["tensor"],
        data,
        communication,
        idle_s,
        held,
        verdict,
    )


def compute_step_shares(steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Return the shares of step time that go to data loading and to communication, 0 to 1.

    Both are None if no step states its parts.
    """
    timed = [(step.duration_s, step.parts) for step in steps if step.parts is not None and step.duration_s > 0]
    total = sum(duration for duration, _ in timed)
    if not total:
        return None, None
    data, communication = (sum(getattr(parts, name) for _, parts in timed) for name in ("data", "communication"))
    return min(data / total, 1.0), min(communication / total, 1.0)


def compute_mfu(steps: Sequence[Step], flops_per_token: float, gpus: int, gpu_model: str) -> Mfu:
    """Return the model FLOPs utilisation: FLOPs per second divided by the peak of all GPUs.

    Only whole steps that state their tokens count.

    >>> step = Step(job="a", sequence=1, time_ms=0, step=1, duration_s=2.0, tokens=1_000_000)
    >>> round(compute_mfu([step], 8 * 989e6, 8, "NVIDIA H100 80GB HBM3").value, 2)
    0.5
    >>> compute_mfu([step], 8 * 989e6, 8, "some GPU").reason
    'the peak FLOP/s of its GPUs are not known (some GPU)'
    """
    if not (np.isfinite(flops_per_token) and flops_per_token > 0) or gpus < 1:
        return Mfu(None, f"its label {FLOPS_LABEL} is no number above 0")
    peak = next((flops for name, flops in PEAK_FLOPS.items() if name in gpu_model), None)
    if peak is None:
        return Mfu(None, f"the peak FLOP/s of its GPUs are not known ({gpu_model or 'no model reported'})")
    whole = [step for step in steps if step.rank is None and step.tokens and step.duration_s > 0]
    if not whole:
        return Mfu(None, "no whole step of it (without rank) reports its tokens")
    rate = sum(step.tokens or 0 for step in whole) / sum(step.duration_s for step in whole)
    share = rate * flops_per_token / (gpus * peak)
    if share > 1:
        return Mfu(None, f"its tokens and its label {FLOPS_LABEL} would be {share:.3g} times what its GPUs can do")
    return Mfu(share)


def _compute_idle_s(activity: Array, interval_s: float, before_s: float) -> float | None:
    """Return the least number of seconds for which the job has been idle, or None if no activity is known.

    activity: (slot, GPU). If no GPU computed in the window, the idle time before the window is added.
    """
    known = np.isfinite(activity).any(axis=1)
    if not known.any():
        return None
    active = np.flatnonzero((np.where(np.isfinite(activity), activity, 0.0) > ACTIVE).any(axis=1))
    if not len(active) and before_s > 0:
        return len(activity) * interval_s + before_s
    last = int(active[-1]) if len(active) else int(np.flatnonzero(known)[0]) - 1
    return (len(activity) - 1 - last) * interval_s


def _find_newest(values: Array) -> Array:
    """Return (GPU,) the newest known value of each GPU, NaN if there is none."""
    known = np.isfinite(values)
    last = values.shape[0] - 1 - np.argmax(known[::-1], axis=0)
    return np.where(known.any(axis=0), values[last, np.arange(values.shape[1])], np.nan)


def _compute_known_mean(values: Array) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else None


def _choose_verdict(
    idle_s: float | None, loaded: float | None, busy: float | None, sm: float | None, data: float | None,
    communication: float | None,
) -> Verdict:  # fmt: skip
    if idle_s is None:
        return "unknown"
    if idle_s >= IDLE_S:
        return "abandoned" if idle_s >= ABANDONED_S and loaded else "idle"
    if data is not None and data >= WAITS_SHARE:
        return "waits_for_data"
    if communication is not None and communication >= WAITS_SHARE:
        return "waits_for_communication"
    if busy is not None and sm is not None and busy >= BUSY and sm < LITTLE:
        return "busy_but_little_work"
    return "works"
