"""Parts of GPUs in the demand series, and dumps of the version that counted whole GPUs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.features.contribution import sum_over_quota
from fleetcast.features.delta_bins import RUNNING, DeltaBins
from fleetcast.features.demand_series import DemandScope, DemandSeries, Target
from fleetcast.features.pool_inventory import PoolInventory
from fleetcast.fleet.events import JobEvent, Queued, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology

T0 = 1_700_002_800_000
OLD = Path(__file__).with_name("demand_of_whole_gpus.json")
NODES = [NodeSpec("h0", gpus=8, gpu_model="H100", pool="h100"), NodeSpec("a0", gpus=8, gpu_model="A100", pool="a100")]
INVENTORY = PoolInventory.from_topology(Topology.build(NODES))
SCOPES: dict[str, tuple[str, dict[str, str]]] = {
    "all": ("all", {}),
    "train": ("train", {}),
    "batch": ("train", {"class_": "batch"}),
    "g": ("train", {"group": "g"}),
    "other": ("train", {"group": "other"}),
    "h100": ("all", {"pool": "h100"}),
    "a100": ("all", {"pool": "a100"}),
    "unassigned": ("all", {"pool": "unassigned"}),
}


def at(minute: float) -> int:
    return T0 + round(minute * 60_000)


def ask(job: str, minute: float, share: int | None = 250, **facts: Any) -> Submitted:
    return Submitted(job=job, sequence=1, time_ms=at(minute), gpus_per_node=1, gpu_share=share, queue="q", **facts)


def start(job: str, minute: float, *ranks: RankPlacement) -> Started:
    return Started(job=job, sequence=2, time_ms=at(minute), ranks=ranks)


def demand_of(*events: JobEvent) -> tuple[DemandSeries, JobTable]:
    jobs, demand = JobTable(), DemandSeries()
    demand.apply_inventory(INVENTORY, [])
    for event in events:
        attempt = jobs.apply(event)
        assert attempt is not None
        demand.update(attempt)
    return demand, jobs


def level(demand: DemandSeries, target: Target, **scope: str) -> float:
    return float(demand.read_series("all", target, at(30), 60, 1, **scope)[0])


def test_four_quarters_that_wait_are_one_gpu() -> None:
    demand, _ = demand_of(*(ask(f"j{at}", at) for at in range(4)))
    assert level(demand, "queued") == level(demand, "wanted") == 1.0
    assert demand.read_series("all", "arriving", at(30), 600, 3).tolist() == [1.0, 0.0, 0.0]
    assert demand.read_series("all", "arriving_jobs", at(30), 600, 3).tolist() == [4.0, 0.0, 0.0]


def test_parts_of_one_gpu_run_as_parts_in_their_pools_and_groups() -> None:
    """One rank states its own share, one job has members in two pools, and one has two GPUs' worth of parts."""
    demand, _ = demand_of(
        ask("a", 1, group="g"),
        start("a", 2, RankPlacement(0, "h0", (0,))),
        ask("b", 1, None),
        start("b", 2, RankPlacement(0, "h0", (0,), 143)),
        ask("c", 1, 300, gang=2),
        start("c", 2, RankPlacement(0, "h0", (1,)), RankPlacement(1, "a0", (1,), 700)),
    )
    assert level(demand, "running") == 1.393
    assert (level(demand, "running", pool="h100"), level(demand, "running", pool="a100")) == (0.693, 0.7)
    assert (level(demand, "running", group="g"), level(demand, "running", group="other")) == (0.25, 1.143)


def test_a_part_counts_as_much_as_the_occupancy_shows() -> None:
    demand, jobs = demand_of(ask("a", 1), start("a", 2, RankPlacement(0, "h0", (0,))))
    demand.set_sizes({("a", 1): 0}, jobs.get)
    assert level(demand, "running") == 0.0
    demand.set_sizes({}, jobs.get)
    assert level(demand, "running") == 0.25


def test_a_request_for_a_part_waits_and_is_promised_as_a_part() -> None:
    demand, _ = demand_of(ask("a", 1, 500))
    waits = JobAttempt("own", 1, submission=ask("own", 2))
    demand.count_requests([waits], {}, at(3))
    assert level(demand, "queued") == 0.75
    promised = JobAttempt("own", 1, submission=ask("own", 2), ranks=(RankPlacement(0, "h0", (0,), 250),))
    demand.count_requests([promised], {("own", 1): at(4)}, at(4))
    assert (level(demand, "queued"), level(demand, "running", pool="h100")) == (0.5, 0.25)


def test_parts_that_wait_for_a_quota_add_up() -> None:
    waits = [Queued(job=job, sequence=2, time_ms=at(2), reason="QOSGrpGRES") for job in "ab"]
    demand, _ = demand_of(ask("a", 1), ask("b", 1, 333), *waits)
    assert sum_over_quota(demand.list_contributions())[DemandScope()] == 0.583


def test_bins_hold_more_gpus_than_four_bytes_do() -> None:
    """Nothing wraps around, and what comes later in the same bin still counts."""
    bins = DeltaBins(60_000, 10)
    bins.advance(5)
    for _ in range(3):
        bins.add(60_000, (0, 0, 2_000_000_000, 0, 1))
        bins.advance(5)
    about, rows = bins.dump()
    again = DeltaBins(60_000, 10)
    again.load(about, rows)
    for one in (bins, again):
        one.advance(5)
        assert one.compute_levels(RUNNING, 5, 1).tolist() == [6_000_000_000.0]


@pytest.fixture
def old() -> tuple[DemandSeries, dict[str, Any]]:
    """Return series loaded from a dump of whole GPUs, and what the version that made it read from them.

    Arrays are lists of (row, column, value). A value of a series has its number of repetitions.
    """
    made = json.loads(OLD.read_text())
    arrays = {}
    for name, array in made["arrays"].items():
        if len(array["shape"]) != 2:
            arrays[name] = np.array(array["cells"], array["dtype"])
            continue
        arrays[name] = np.zeros(array["shape"], array["dtype"])
        for row, column, value in array["cells"]:
            arrays[name][row, column] = value
    demand = DemandSeries()
    demand.load(made["about"], arrays)
    return demand, made["series"]


def test_a_dump_of_whole_gpus_reads_as_before(old: tuple[DemandSeries, dict[str, Any]]) -> None:
    demand, series = old
    assert len(series) == 80
    about, arrays = demand.dump()
    again = DemandSeries()
    again.load(json.loads(json.dumps(about)), arrays)
    for one in (demand, again):
        for name, runs in series.items():
            scope, target, bin_s = name.split()
            queue, rest = SCOPES[scope]
            expected = [np.nan if value is None else value for value, times in runs for _ in range(times)]
            found = one.read_series(queue, target, at(30), int(bin_s), 40, **rest)  # type: ignore[arg-type]
            np.testing.assert_array_equal(found, expected)


def test_the_first_inventory_makes_parts_of_parts_that_a_dump_counts_whole(
    old: tuple[DemandSeries, dict[str, Any]],
) -> None:
    demand, _ = old
    before = level(demand, "queued")
    submission = Submitted(job="part", sequence=1, time_ms=at(11), gpus_per_node=1, gpu_share=250, queue="train")
    demand.apply_inventory(INVENTORY, [JobAttempt("part", 1, submission=submission)])
    assert level(demand, "queued") == before - 0.75


def test_a_promise_counts_as_much_as_is_left_of_it_when_another_job_starts_on_its_gpus() -> None:
    demand, _ = demand_of()
    submission = Submitted(job="own", sequence=1, time_ms=at(2), gpus_per_node=4, queue="q")
    for gpus in ((0, 1, 2, 3), (2, 3)):
        promised = JobAttempt("own", 1, submission=submission, ranks=(RankPlacement(0, "h0", gpus),))
        demand.count_requests([promised], {("own", 1): at(4)}, at(4))
    assert level(demand, "running") == level(demand, "running", pool="h100") == 2.0
