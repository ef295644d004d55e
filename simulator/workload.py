"""What a job does to its GPUs: levels of power and activity, a step, phases. Drawn per job by a seeded generator.

The levels are those measured on eight-GPU H100 hosts (DDP, gradient accumulation, tensor and pipeline parallel
training, fully sharded training, speculative-decoding inference, a context that is held and idle). Activities are
ratios 0..1, traffic is bytes/s per GPU or per node as the name says.
"""

import zlib
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MAX_POWER_W = 700.0
CONTEXT_POWER_W = 118.0
IDLE_POWER_W = 70.5
WARMUP_S = 60.0


class JobPhase(IntEnum):
    """What a job is doing. EMPTY is the phase of a GPU that no job holds, HUNG a collective that never ends."""

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
    """Steady levels of one job; `communication_share` is the part of a step that waits for the network."""

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


def draw_profile(rng: np.random.Generator, gpus: int, job_class: str = "training") -> WorkloadProfile:
    """A job of `gpus` GPUs; `job_class` as in job events (training, fine_tuning, inference, batch, interactive)."""
    if job_class == "inference":
        return _inference(rng, gpus)
    if job_class == "interactive":
        return _interactive(rng)
    drawn = _training(rng, gpus)
    return _with_stalls(_alone(drawn) if gpus == 1 else drawn, rng, gpus)


def profile_of(job: str, gpus: int, job_class: str = "training", *, seed: int = 0) -> WorkloadProfile:
    """The profile of a named job: the same name and seed give the same profile, whatever ran before."""
    return draw_profile(np.random.default_rng([seed, zlib.crc32(job.encode())]), gpus, job_class)


def _training(rng: np.random.Generator, gpus: int) -> WorkloadProfile:
    kinds = (_data_parallel, _accumulation, _tensor_pipeline, _sharded)
    weights = (0.35, 0.25, 0.2, 0.2) if gpus > 8 else (0.5, 0.4, 0.1, 0.0) if gpus >= 4 else (0.6, 0.4, 0.0, 0.0)
    return kinds[rng.choice(4, p=weights)](rng)


def _data_parallel(rng: np.random.Generator) -> WorkloadProfile:
    return WorkloadProfile(
        "data_parallel",
        power_w=rng.uniform(510, 580),
        gpu_util=rng.uniform(0.83, 0.95),
        sm_active=rng.uniform(0.60, 0.68),
        tensor_active=rng.uniform(0.17, 0.22),
        dram_active=rng.uniform(0.29, 0.35),
        nvlink_bytes_per_s=rng.uniform(7e9, 11e9),
        pcie_tx_bytes_per_s=1.3e7,
        pcie_rx_bytes_per_s=7.4e7,
        ib_bytes_per_s=rng.uniform(13e9, 18e9),
        memory_mib=rng.uniform(12_000, 60_000),
        step_s=rng.uniform(0.3, 1.2),
        communication_share=rng.uniform(0.20, 0.32),
        power_noise_w=rng.uniform(12, 20),
    )


def _accumulation(rng: np.random.Generator) -> WorkloadProfile:
    return WorkloadProfile(
        "accumulation",
        power_w=rng.uniform(670, 692),
        gpu_util=rng.uniform(0.98, 1.0),
        sm_active=rng.uniform(0.85, 0.9),
        tensor_active=rng.uniform(0.55, 0.61),
        dram_active=rng.uniform(0.34, 0.40),
        nvlink_bytes_per_s=rng.uniform(1.3e9, 1.7e9),
        ib_bytes_per_s=rng.uniform(10e9, 13e9),
        memory_mib=rng.uniform(55_000, 74_000),
        step_s=rng.uniform(3.0, 6.0),
        communication_share=rng.uniform(0.08, 0.15),
        power_noise_w=rng.uniform(5, 12),
    )


def _tensor_pipeline(rng: np.random.Generator) -> WorkloadProfile:
    few_ports = rng.random() < 0.3
    return WorkloadProfile(
        "tensor_pipeline",
        power_w=rng.uniform(410, 450),
        gpu_util=rng.uniform(0.98, 1.0),
        sm_active=rng.uniform(0.45, 0.52),
        tensor_active=rng.uniform(0.11, 0.16),
        dram_active=rng.uniform(0.28, 0.34),
        nvlink_bytes_per_s=rng.uniform(4.2e10, 5.2e10),
        pcie_tx_bytes_per_s=2.3e8,
        pcie_rx_bytes_per_s=2.26e9,
        ib_bytes_per_s=0.5e9 if few_ports else rng.uniform(11e9, 26e9),
        ib_ports=2 if few_ports else 8,
        memory_mib=rng.uniform(28_000, 66_000),
        step_s=rng.uniform(1.0, 3.0),
        communication_share=rng.uniform(0.28, 0.42),
        power_noise_w=13.0,
    )


def _sharded(rng: np.random.Generator) -> WorkloadProfile:
    return WorkloadProfile(
        "sharded",
        power_w=rng.uniform(590, 640),
        gpu_util=rng.uniform(0.97, 1.0),
        sm_active=rng.uniform(0.70, 0.80),
        tensor_active=rng.uniform(0.36, 0.46),
        dram_active=rng.uniform(0.36, 0.44),
        nvlink_bytes_per_s=rng.uniform(1.5e10, 2.5e10),
        pcie_tx_bytes_per_s=5e7,
        pcie_rx_bytes_per_s=2e8,
        ib_bytes_per_s=rng.uniform(5.2e10, 7.9e10),
        memory_mib=rng.uniform(60_000, 76_000),
        step_s=rng.uniform(2.5, 5.0),
        communication_share=rng.uniform(0.25, 0.38),
        power_noise_w=14.0,
        power_swing_w=rng.uniform(20, 60),
    )


def _inference(rng: np.random.Generator, gpus: int) -> WorkloadProfile:
    return WorkloadProfile(
        "inference",
        power_w=rng.uniform(190, 300),
        gpu_util=rng.uniform(0.55, 0.8),
        sm_active=rng.uniform(0.20, 0.32),
        tensor_active=rng.uniform(0.03, 0.06),
        dram_active=rng.uniform(0.12, 0.25),
        nvlink_bytes_per_s=rng.uniform(2e9, 8e9) if gpus > 1 else 0.0,
        pcie_tx_bytes_per_s=3.1e7,
        pcie_rx_bytes_per_s=2.9e8,
        memory_mib=rng.uniform(18_000, 72_000),
        power_noise_w=10.0,
    )


def _interactive(rng: np.random.Generator) -> WorkloadProfile:
    """A notebook: a context that is held at full clocks and does nothing."""
    return WorkloadProfile(
        "interactive",
        power_w=CONTEXT_POWER_W + rng.uniform(0, 3),
        gpu_util=0.0,
        sm_active=0.0,
        tensor_active=0.0,
        dram_active=0.0,
        pcie_tx_bytes_per_s=7e5,
        pcie_rx_bytes_per_s=6e5,
        memory_mib=rng.uniform(2_000, 17_000),
        power_noise_w=0.15,
        loading_s=5.0,
    )


def _alone(profile: WorkloadProfile) -> WorkloadProfile:
    return replace(profile, nvlink_bytes_per_s=0.0, ib_bytes_per_s=0.0, communication_share=0.0)


def _with_stalls(profile: WorkloadProfile, rng: np.random.Generator, gpus: int) -> WorkloadProfile:
    """Loading time, checkpoints (longer for larger jobs) and, for half of the jobs, evaluations."""
    evaluates = rng.random() < 0.5
    return replace(
        profile,
        loading_s=rng.uniform(5, 50),
        checkpoint_every_s=rng.uniform(900, 2700),
        checkpoint_s=rng.uniform(4, 10) + min(30.0, gpus / 8),
        evaluation_every_s=rng.uniform(1800, 5400) if evaluates else 0.0,
        evaluation_s=rng.uniform(30, 120) if evaluates else 0.0,
    )
