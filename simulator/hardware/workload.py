"""The load of a job on its GPUs: levels of power and activity, step times and phases.

A seeded generator draws them for each job. The levels were measured on eight-GPU H100 hosts. Activities
are ratios from 0 to 1, traffic is in bytes/s per GPU or node.
"""

import zlib
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_POWER_W = 700.0
CONTEXT_POWER_W = 118.0
POWER_BY_CLOCK = 2.3  # dynamic power falls with the clock to this power, as voltage falls with it
IDLE_POWER_W = 70.5
WARMUP_S = 60.0
PEAK_FLOPS = 989e12  # of one H100, dense BF16
FLOPS_PER_TOKEN_GPU = 3e9  # six a parameter, for half a billion parameters a GPU
USEFUL_SHARE = 0.9  # of the time in which tensor cores are active they do the model's own work


class JobPhase(IntEnum):
    """The phase of a job. EMPTY is the phase of a GPU that no job holds. HUNG: a collective never ends."""

    EMPTY = 0
    LOADING = 1
    WARMUP = 2
    STEADY = 3
    EVALUATION = 4
    CHECKPOINT = 5
    HUNG = 6


# Multipliers of a profile's steady levels: (activity, utilisation, NVLink, InfiniBand, PCIe), a row a phase. While
# a checkpoint is written nobody computes and the PCIe link carries the weights out; a hung rank spins at full
# utilisation and does nothing else.
PHASE_LEVELS: NDArray[np.float64] = np.array(
    [
        (0.00, 0.00, 0.00, 0.00, 0.0),
        (0.00, 0.03, 0.00, 0.00, 8.0),
        (0.85, 0.85, 0.85, 0.85, 1.0),
        (1.00, 1.00, 1.00, 1.00, 1.0),
        (0.75, 0.95, 0.25, 0.10, 1.5),
        (0.03, 0.12, 0.01, 0.01, 6.0),
        (0.00, 9.99, 0.00, 0.00, 0.0),
    ]
)


@dataclass(frozen=True, slots=True)
class WorkloadProfile:
    """The steady load of one job.

    `communication_share`: the share of a step that waits for the network, from 0 to 1.
    """

    kind: str
    power_w: float
    gpu_util: float
    sm_active: float
    tensor_active: float
    dram_active: float
    nvlink_bytes_per_s: float = 0.0  # per GPU
    pcie_tx_bytes_per_s: float = 8e6  # per GPU
    pcie_rx_bytes_per_s: float = 3e7  # per GPU
    ib_bytes_per_s: float = 0.0  # per node of eight GPUs, over `ib_ports` ports
    ib_ports: int = 8
    memory_mib: float = 30_000.0  # per GPU
    step_s: float = 1.0
    communication_share: float = 0.0
    power_noise_w: float = 12.0
    power_swing_w: float = 0.0  # amplitude at the step's period
    loading_s: float = 20.0
    warmup_s: float = WARMUP_S
    checkpoint_every_s: float = 0.0  # 0: never
    checkpoint_s: float = 0.0
    evaluation_every_s: float = 0.0  # 0: never
    evaluation_s: float = 0.0

    @property
    def trains(self) -> bool:
        """Return whether the job trains a model, so that its steps process tokens."""
        return self.kind not in ("inference", "interactive")

    @property
    def tokens_per_step(self) -> int:
        """The number of tokens per step, estimated from the usual step time and the tensor cores' activity."""
        return round(USEFUL_SHARE * self.tensor_active * PEAK_FLOPS * self.step_s / FLOPS_PER_TOKEN_GPU)

    def find_past_checkpoints(self, started_ms: int, now_ms: int, most: int) -> list[tuple[int, int]]:
        """Return (begin, end) in Unix ms of the last checkpoints that an undisturbed job finished by `now_ms`.

        Returns at most `most` checkpoints.
        """
        if not self.checkpoint_every_s:
            return []
        steady_ms = started_ms + (self.loading_s + self.warmup_s) * 1000
        done = int((now_ms - steady_ms) / 1000 // self.checkpoint_every_s)
        ends_ms = [steady_ms + at * self.checkpoint_every_s * 1000 for at in range(max(1, done - most + 1), done + 1)]
        return [(round(end_ms - self.checkpoint_s * 1000), round(end_ms)) for end_ms in ends_ms]


# Steady levels by kind of job: a range that is drawn from, a number, or None for the default of the profile.
# An interactive job is a notebook: a context that is held at full clocks and does nothing.
_KINDS = ("data_parallel", "accumulation", "tensor_pipeline", "sharded", "inference", "interactive")
_LEVELS: dict[str, tuple[tuple[float, float] | float | None, ...]] = {
    "power_w": ((510, 580), (670, 692), (410, 450), (590, 640), (190, 300), (CONTEXT_POWER_W, CONTEXT_POWER_W + 3)),
    "gpu_util": ((0.83, 0.95), (0.98, 1.0), (0.98, 1.0), (0.97, 1.0), (0.55, 0.8), 0.0),
    "sm_active": ((0.60, 0.68), (0.85, 0.9), (0.45, 0.52), (0.70, 0.80), (0.20, 0.32), 0.0),
    "tensor_active": ((0.17, 0.22), (0.55, 0.61), (0.11, 0.16), (0.36, 0.46), (0.03, 0.06), 0.0),
    "dram_active": ((0.29, 0.35), (0.34, 0.40), (0.28, 0.34), (0.36, 0.44), (0.12, 0.25), 0.0),
    "nvlink_bytes_per_s": ((7e9, 11e9), (1.3e9, 1.7e9), (4.2e10, 5.2e10), (1.5e10, 2.5e10), (2e9, 8e9), None),
    "pcie_tx_bytes_per_s": (1.3e7, None, 2.3e8, 5e7, 3.1e7, 7e5),
    "pcie_rx_bytes_per_s": (7.4e7, None, 2.26e9, 2e8, 2.9e8, 6e5),
    "ib_bytes_per_s": ((13e9, 18e9), (10e9, 13e9), (11e9, 26e9), (5.2e10, 7.9e10), None, None),
    "memory_mib": ((12e3, 60e3), (55e3, 74e3), (28e3, 66e3), (60e3, 76e3), (18e3, 72e3), (2e3, 17e3)),
    "step_s": ((0.3, 1.2), (3.0, 6.0), (1.0, 3.0), (2.5, 5.0), None, None),
    "communication_share": ((0.20, 0.32), (0.08, 0.15), (0.28, 0.42), (0.25, 0.38), None, None),
    "power_noise_w": ((12, 20), (5, 12), 13.0, 14.0, 10.0, 0.15),
    "power_swing_w": (None, None, None, (20, 60), None, None),
}


def draw_profile(rng: np.random.Generator, gpus: int, job_class: str = "training") -> WorkloadProfile:
    """Draw the profile of a job with `gpus` GPUs.

    `job_class`: a class of job events (training, fine_tuning, inference, batch, interactive).
    """
    if job_class == "inference":
        return (
            _draw_kind_profile(rng, "inference")
            if gpus > 1
            else _draw_kind_profile(rng, "inference", nvlink_bytes_per_s=0.0)
        )
    if job_class == "interactive":
        return _draw_kind_profile(rng, "interactive", loading_s=5.0)
    drawn = _draw_training_profile(rng, gpus)
    return _add_stalls(_remove_communication(drawn) if gpus == 1 else drawn, rng, gpus)


def draw_job_profile(job: str, gpus: int, job_class: str = "training", *, seed: int = 0) -> WorkloadProfile:
    """Draw the profile of a named job. It depends only on name, seed, GPUs and class."""
    return draw_profile(np.random.default_rng([seed, zlib.crc32(job.encode())]), gpus, job_class)


def _draw_training_profile(rng: np.random.Generator, gpus: int) -> WorkloadProfile:
    weights = (0.35, 0.25, 0.2, 0.2) if gpus > 8 else (0.5, 0.4, 0.1, 0.0) if gpus >= 4 else (0.6, 0.4, 0.0, 0.0)
    kind = _KINDS[rng.choice(4, p=weights)]
    if kind == "tensor_pipeline" and rng.random() < 0.3:
        return _draw_kind_profile(rng, kind, ib_bytes_per_s=0.5e9, ib_ports=2)
    return _draw_kind_profile(rng, kind)


def _draw_kind_profile(rng: np.random.Generator, kind: str, **fixed: float) -> WorkloadProfile:
    """Draw a profile with the levels of a kind, in the order of the table. `fixed` levels are not drawn."""
    levels = {name: values[_KINDS.index(kind)] for name, values in _LEVELS.items()} | fixed
    drawn: dict[str, Any] = {
        name: rng.uniform(*level) if isinstance(level, tuple) else level
        for name, level in levels.items()
        if level is not None
    }
    return WorkloadProfile(kind, **drawn)


def _remove_communication(profile: WorkloadProfile) -> WorkloadProfile:
    return replace(profile, nvlink_bytes_per_s=0.0, ib_bytes_per_s=0.0, communication_share=0.0)


def _add_stalls(profile: WorkloadProfile, rng: np.random.Generator, gpus: int) -> WorkloadProfile:
    """Add loading time, checkpoints (longer for larger jobs) and, for half of the jobs, evaluations."""
    evaluates = rng.random() < 0.5
    return replace(
        profile,
        loading_s=rng.uniform(5, 50),
        checkpoint_every_s=rng.uniform(900, 2700),
        checkpoint_s=rng.uniform(4, 10) + min(30.0, gpus / 8),
        evaluation_every_s=rng.uniform(1800, 5400) if evaluates else 0.0,
        evaluation_s=rng.uniform(30, 120) if evaluates else 0.0,
    )
