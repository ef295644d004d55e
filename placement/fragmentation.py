"""Fragmentation by pool: free GPUs that the present demand cannot use, and the largest gang that fits."""

from collections.abc import Iterator

import msgspec
import numpy as np

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.domains import sum_room_by_domain
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.potential import count_fragmented_milli, count_stranded_milli
from fleetcast.placement.machines.scorers import LEVELS
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.view import ClusterView

ANYWHERE = "anywhere"


class PoolFragments(msgspec.Struct, frozen=True):
    """The fragmentation of a pool. A value is null while too few requests are known.

    free_gpus: free GPUs in service that no window or reservation keeps, parts included. lost_gpus: those that
    a random request of the demand cannot use. stranded_gpus: those whose node has too few free CPUs.
    largest_gang: level → GPUs of the largest gang that fits now.
    """

    pool: str
    free_gpus: float
    lost_gpus: float | None
    stranded_gpus: float | None
    largest_gang: dict[str, int]


def measure_fragmentation(view: ClusterView, options: Options) -> list[PoolFragments]:
    """Return the fragmentation of each pool, in order of the pools' names."""
    return list(_yield_pool_fragments(view, options))


def _yield_pool_fragments(view: ClusterView, options: Options) -> Iterator[PoolFragments]:
    for code, pool in sorted(enumerate(view.inventory.pools), key=lambda item: item[1]):
        rows = np.flatnonzero((view.inventory.pool == code) & view.is_open)
        milli, lost, idle = view.milli[rows], None, None
        if options.demand is not None:
            cpus, model = view.free_cpus[rows], view.inventory.gpu_model[rows].astype(np.int64)
            lost = round(float(count_fragmented_milli(options.demand, milli, cpus, model).sum()) / WHOLE, 3)
            idle = round(float(count_stranded_milli(options.demand, milli, cpus).sum()) / WHOLE, 3)
        free = int(milli.sum(dtype=np.int64)) / WHOLE
        yield PoolFragments(pool, free, lost, idle, _find_largest_gangs(pool, view, options))


def _find_largest_gangs(pool: str, view: ClusterView, options: Options) -> dict[str, int]:
    """Return level → GPUs of the largest gang that fits into one of its domains now."""
    screened = screen(PlacementRequest(request_id="largest", pool=pool), view, options)
    rows = np.flatnonzero(screened.passes & view.is_open)
    found = {
        level or ANYWHERE: sum_room_by_domain(level, view.topology, rows, screened.room[rows]).most_members
        for level in LEVELS
    }
    return {str(level): gpus for level, gpus in found.items()}
