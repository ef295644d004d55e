"""Small fleets that are full of jobs, for the search for victims."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.slots import HeldParts, convert_to_milli, subtract_held_parts
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.reclaim.room import HostAmounts
from tests.placement.conftest import build

G = 8
OPTIONS = Options()


def make_view(holders: NDArray[Any], rack: int = 2, parts: HeldParts | None = None, **changed: Any) -> ClusterView:
    """Nodes of 8 GPUs in racks of `rack`. holders: (n, 8) the job of each GPU, -1 for none."""
    n, j = len(holders), int(holders.max(initial=-1)) + 1
    racks = {f"r{at}": [8] * min(rack, n - at) for at in range(0, n, rack)}
    milli = convert_to_milli(holders < 0)
    if parts is not None:
        milli = subtract_held_parts(milli, np.ones(holders.shape, bool), parts)
        changed["parts"] = parts
    names = tuple(f"j{at}" for at in range(j))
    return build(racks, milli=milli, holders=holders.astype(np.int32), jobs=names, **changed)


@dataclass(frozen=True)
class Scene:
    """A request, a fleet, and the cost of stopping each of its jobs."""

    request: PlacementRequest
    view: ClusterView
    cost: NDArray[np.float64]
    host: HostAmounts | None

    def vacate(self, jobs: frozenset[str]) -> ClusterView:
        """Return the view without these jobs, made the slow way."""
        left = remove_jobs(self.view, jobs)
        if self.host is None:
            return left
        cpus, memory = left.free_cpus.copy(), left.free_host_memory_gib.copy()
        for at, name in enumerate(self.view.jobs):
            if name in jobs:
                held = (self.view.holders == at).sum(axis=1)
                for free, amounts in ((cpus, self.host.cpus), (memory, self.host.memory_gib)):
                    if not np.isnan(amounts[at]):
                        free += amounts[at] * held / held.sum()
        return replace(left, free_cpus=cpus.round(6), free_host_memory_gib=memory.round(6))

    def fits_without(self, jobs: frozenset[str]) -> bool:
        return fits_now(self.request, self.vacate(jobs), OPTIONS)

    def find_optimum(self) -> float:
        """The least cost of all sets that let the request in, inf if there is none."""
        may = [at for at, cost in enumerate(self.cost) if np.isfinite(cost)]
        sets = (chosen for size in range(len(may) + 1) for chosen in combinations(may, size))
        priced = sorted((float(self.cost[list(chosen)].sum()), chosen) for chosen in sets)
        for cost, chosen in priced:
            if self.fits_without(frozenset(self.view.jobs[at] for at in chosen)):
                return cost
        return float("inf")


def draw_holders(rng: np.random.Generator, n: int, most_jobs: int) -> NDArray[np.int64]:
    """Draw (n, 8) holders: jobs of 1 to 3 members of 1, 2, 4 or 8 GPUs each, and some free GPUs."""
    holders = np.full((n, G), -1)
    for job in range(int(rng.integers(1, most_jobs + 1))):
        each = int(rng.choice([1, 2, 4, 8]))
        fits = np.flatnonzero((holders < 0).sum(axis=1) >= each)
        for row in rng.permutation(fits)[: rng.integers(1, 4)]:
            holders[row, np.flatnonzero(holders[row] < 0)[:each]] = job
    used = np.unique(holders[holders >= 0])
    return np.where(holders >= 0, np.searchsorted(used, holders), -1)


def share_gpus(rng: np.random.Generator, holders: NDArray[np.int64]) -> HeldParts | None:
    """Let jobs hold parts of some free GPUs. The first of those that share a GPU becomes its holder."""
    free, j = np.flatnonzero(holders.ravel() < 0), int(holders.max()) + 1
    rows = []
    for gpu in rng.permutation(free)[:3].tolist():
        for job in rng.permutation(j)[: rng.integers(1, 3)].tolist():
            rows.append((job, gpu, int(rng.choice([250, 500]))))
            holders.ravel()[gpu] = rows[-1][0] if holders.ravel()[gpu] < 0 else holders.ravel()[gpu]
    return HeldParts(*np.array(rows, np.int64).T) if rows else None


@st.composite
def scenes(draw: st.DrawFn, most_jobs: int = 12) -> Scene:
    """Draw fleets of one to six nodes, with CPUs or with shared GPUs in some, and a request of any shape."""
    n = draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    holders = draw_holders(rng, n, most_jobs)
    j = int(holders.max()) + 1
    kind = rng.choice(["whole", "shared", "cpus"])
    parts = share_gpus(rng, holders) if kind == "shared" else None
    host, free_cpus = None, np.full(n, 128.0)
    if kind == "cpus":
        each = np.where(rng.random(j) < 0.8, 4.0 * rng.integers(1, 9, j), np.nan)
        host = HostAmounts(each * np.bincount(holders[holders >= 0], minlength=j), np.full(j, np.nan))
        free_cpus = rng.integers(0, 64, n).astype(float)
    share = int(rng.choice([250, 500])) if rng.random() < 0.25 else None
    request = PlacementRequest(
        request_id="payer",
        gang=int(rng.integers(1, 7)),
        gpus_per_node=1 if share else int(rng.choice([1, 2, 4, 8])),
        gpu_share=share,
        cpus=int(rng.choice([8, 16, 40])) if kind == "cpus" else None,
        topology=TopologyConstraint(draw(st.sampled_from([None, None, "rack", "node"]))),
        spread=bool(rng.random() < 0.2),
    )
    cost = np.where(rng.random(j) < 0.2, np.inf, rng.integers(0, 50, j).astype(float))
    return Scene(request, make_view(holders, 2, parts, free_cpus=free_cpus), cost, host)
