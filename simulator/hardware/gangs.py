"""The running jobs of a fleet as columns: one slot for each job, and the slot that holds each GPU.

Slot 0 means no job.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.hardware.workload import JobPhase, WorkloadProfile

NUMBERS = tuple(field.name for field in fields(WorkloadProfile) if field.name != "kind")
_ROW = {name: row for row, name in enumerate(NUMBERS)}


@dataclass(frozen=True, slots=True)
class RunningGang:
    """One running job attempt, and the cells (node row, GPU) that it holds.

    `rank_of`: the rank of each cell.
    """

    job: str
    attempt: int
    ranks: tuple[RankPlacement, ...]
    profile: WorkloadProfile
    started_ms: int
    slot: int
    node: NDArray[np.int32]  # (cells,)
    gpu: NDArray[np.int32]  # (cells,)
    rank_of: NDArray[np.int32]  # (cells,)


class RunningGangs:
    """All running jobs of a fleet of `nodes` nodes with `gpus` GPUs each."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.slot = np.zeros((nodes, gpus), np.int32)
        self.by_job: dict[str, RunningGang] = {}
        self.by_slot: dict[int, RunningGang] = {}
        self.started_ms = np.zeros(64)
        self.size = np.zeros(64, np.int64)
        self.spans_nodes = np.zeros(64, bool)
        self.hung_since_ms = np.full(64, np.nan)
        self._levels = np.zeros((len(NUMBERS), 64))
        self._free = list(range(63, 0, -1))

    def get_levels(self, name: str) -> NDArray[np.float64]:
        """Return (slots,) float64, the field `name` of each job's profile, 0 for empty slots."""
        levels: NDArray[np.float64] = self._levels[_ROW[name]]
        return levels

    def start(
        self, job: str, attempt: int, ranks: Sequence[tuple[RankPlacement, int]], profile: WorkloadProfile, now_ms: int
    ) -> RunningGang:
        """Assign a job its GPUs. A rank without GPU indices gets the whole node.

        `ranks`: each rank with its node row. A running job of this name is stopped first.
        """
        self.stop(job)
        cells = [(row, gpu, rank.rank) for rank, row in ranks for gpu in (rank.gpus or range(self.slot.shape[1]))]
        node, gpu, rank_of = (np.array(column, np.int32) for column in zip(*cells, strict=True))
        slot = self._reserve_slot()
        self.slot[node, gpu] = slot
        self._levels[:, slot] = [getattr(profile, name) for name in NUMBERS]
        self.started_ms[slot] = now_ms
        self.size[slot] = len(cells)
        self.spans_nodes[slot] = len(np.unique(node)) > 1
        self.hung_since_ms[slot] = np.nan
        gang = RunningGang(job, attempt, tuple(rank for rank, _ in ranks), profile, now_ms, slot, node, gpu, rank_of)
        self.by_job[job] = self.by_slot[slot] = gang
        return gang

    def stop(self, job: str) -> RunningGang | None:
        """Free the GPUs of a job and return the job, or None if no such job runs."""
        gang = self.by_job.pop(job, None)
        if gang is None:
            return None
        del self.by_slot[gang.slot]
        self.slot[self.slot == gang.slot] = 0
        self._levels[:, gang.slot] = 0.0
        self.size[gang.slot] = 0
        self.spans_nodes[gang.slot] = False
        self.hung_since_ms[gang.slot] = np.nan
        self._free.append(gang.slot)
        return gang

    def compute_age_s(self, now_ms: int) -> NDArray[np.float64]:
        """Return (slots,) float64, the seconds since each job's start."""
        return (now_ms - self.started_ms) / 1000

    def compute_phases(self, now_ms: int) -> NDArray[np.int64]:
        """Return (slots,) int64, the JobPhase of each job.

        A job loads, warms up, and is then steady, with evaluations and checkpoints in between.
        """
        ready_s = self.compute_age_s(now_ms) - self.get_levels("loading_s")
        steady_s = ready_s - self.get_levels("warmup_s")
        phase = np.where(steady_s >= 0, JobPhase.STEADY, JobPhase.WARMUP)
        phase = np.where(ready_s < 0, JobPhase.LOADING, phase)
        for name, stalled in (("evaluation", JobPhase.EVALUATION), ("checkpoint", JobPhase.CHECKPOINT)):
            every_s, length_s = self.get_levels(f"{name}_every_s"), self.get_levels(f"{name}_s")
            within_s = np.mod(steady_s, np.maximum(every_s, 1.0))
            phase = np.where((steady_s >= 0) & (every_s > 0) & (within_s >= every_s - length_s), stalled, phase)
        phase = np.where(np.isnan(self.hung_since_ms), phase, JobPhase.HUNG)
        return np.where(self.size > 0, phase, JobPhase.EMPTY)

    def _reserve_slot(self) -> int:
        if not self._free:
            old = len(self.size)
            self.started_ms = np.concatenate([self.started_ms, np.zeros(old)])
            self.size = np.concatenate([self.size, np.zeros(old, np.int64)])
            self.spans_nodes = np.concatenate([self.spans_nodes, np.zeros(old, bool)])
            self.hung_since_ms = np.concatenate([self.hung_since_ms, np.full(old, np.nan)])
            self._levels = np.concatenate([self._levels, np.zeros((len(NUMBERS), old))], axis=1)
            self._free = list(range(2 * old - 1, old - 1, -1))
        return self._free.pop()
