"""The job, attempt and rank of this process, from the environment of launchers and schedulers."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass

# Sequences of a rank: (rank + 1) << 32, and within that eight a second since then. A process that begins later begins
# above what an earlier one of the same rank has used, as long as that sent less than eight events a second on average.
SINCE_S = 1_700_000_000
A_SECOND = 8
RANK_BITS = 32
MOST_RANKS = 2**20
MOST_GPUS = 1024  # of a host


@dataclass(frozen=True)
class Identity:
    """The job, attempt and rank of this process.

    `first`: the sequence number of this process's first event. `node`: the host of the process. `gpus`: its
    GPUs on this host, as schedulers count them, empty if unknown.
    """

    job: str
    attempt: int
    rank: int
    node: str
    first: int
    gpus: tuple[int, ...] = ()


def identity_of(
    env: Mapping[str, str],
    job: str | None = None,
    attempt: int | None = None,
    rank: int | None = None,
    now_s: float | None = None,
) -> Identity | None:
    """Return the identity from the arguments, or from the environment. Returns None if neither names a job.

    job      FLEETCAST_JOB, SLURM_ARRAY_JOB_ID and SLURM_ARRAY_TASK_ID, SLURM_HET_JOB_ID and SLURM_HET_JOB_OFFSET,
             SLURM_JOB_ID, TORCHELASTIC_RUN_ID
    attempt  FLEETCAST_ATTEMPT, SLURM_RESTART_COUNT + 1, TORCHELASTIC_RESTART_COUNT + 1 where torchelastic names the job
    rank     FLEETCAST_RANK, RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK, PMIX_RANK, else 0
    node     FLEETCAST_NODE, SLURMD_NODENAME, NODE_NAME, else the host's name
    gpus     FLEETCAST_GPUS, or the entry at LOCAL_RANK or SLURM_LOCALID (else all entries) of SLURM_STEP_GPUS,
             SLURM_JOB_GPUS or, outside containers, CUDA_VISIBLE_DEVICES
    """
    name = job or _find_job(env)
    if not name:
        return None
    number = rank if rank is not None else _find_rank(env)
    number = min(max(0, number), MOST_RANKS - 1)
    began = int(((time.time() if now_s is None else now_s) - SINCE_S) * A_SECOND) % 2**RANK_BITS
    first = ((number + 1) << RANK_BITS) + began
    node = env.get("FLEETCAST_NODE") or env.get("SLURMD_NODENAME") or env.get("NODE_NAME") or platform.node()
    return Identity(
        name, attempt if attempt is not None else _find_attempt(env), number, node[:255], first, _find_gpus(env)
    )


def _find_job(env: Mapping[str, str]) -> str:
    slurm = env.get("SLURM_JOB_ID", "")
    array, task = env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_ARRAY_TASK_ID", "")
    het, offset = env.get("SLURM_HET_JOB_ID", ""), env.get("SLURM_HET_JOB_OFFSET", "")
    if array and task:
        slurm = f"{array}_{task}"
    elif het and offset:
        slurm = f"{het}+{offset}"
    run = env.get("TORCHELASTIC_RUN_ID", "")
    return env.get("FLEETCAST_JOB") or slurm or ("" if run.lower() == "none" else run)


def _find_attempt(env: Mapping[str, str]) -> int:
    stated = _parse_number(env.get("FLEETCAST_ATTEMPT"))
    if stated is not None:
        return stated
    if env.get("FLEETCAST_JOB") or env.get("SLURM_JOB_ID"):
        return (_parse_number(env.get("SLURM_RESTART_COUNT")) or 0) + 1
    return (_parse_number(env.get("TORCHELASTIC_RESTART_COUNT")) or 0) + 1


def _find_rank(env: Mapping[str, str]) -> int:
    names = ("FLEETCAST_RANK", "RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    return next((found for name in names if (found := _parse_number(env.get(name))) is not None), 0)


def _find_gpus(env: Mapping[str, str]) -> tuple[int, ...]:
    """Return the indices of this process's GPUs on its host, empty if unknown.

    CUDA_VISIBLE_DEVICES is not used in a container, because a container numbers its GPUs differently.
    """
    if env.get("FLEETCAST_GPUS"):
        return _parse_gpu_indices(env["FLEETCAST_GPUS"])
    contained = "KUBERNETES_SERVICE_HOST" in env or "SLURM_JOB_ID" in env
    names = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", *(() if contained else ("CUDA_VISIBLE_DEVICES",)))
    all_of_job = next((found for name in names if (found := _parse_gpu_indices(env.get(name, "")))), ())
    local = next(
        (at for name in ("LOCAL_RANK", "SLURM_LOCALID") if (at := _parse_number(env.get(name))) is not None), None
    )
    if local is None:
        return all_of_job
    return all_of_job[local : local + 1] if local < len(all_of_job) else ()


def _parse_gpu_indices(text: str) -> tuple[int, ...]:
    """Parse a list of GPU indices. Returns an empty tuple for any other text.

    >>> _parse_gpu_indices("4,5"), _parse_gpu_indices("GPU-8f1e, 2"), _parse_gpu_indices("0,0")
    ((4, 5), (), ())
    """
    found = tuple(number for part in text.split(",") if (number := _parse_number(part.strip())) is not None)
    return found if len(found) == len(text.split(",")) == len(set(found)) and max(found) < MOST_GPUS else ()


def _parse_number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 16 else None
