"""Demand by pool of machines: where jobs run, where they may run, what waits for a quota, and snapshots of before."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.contribution import find_allowed_pools, sum_over_quota
from fleetcast.features.demand_series import TARGETS, DemandScope, DemandSeries
from fleetcast.features.pool_inventory import UNASSIGNED, PoolInventory, divide_by_weights
from fleetcast.fleet.events import Finished, Gang, JobEvent, Queued, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.fleet.wait_reasons import OVER_QUOTA, waits_for_quota
from tests.fuzz.bounds import examples

T0 = 1_700_002_800_000
MINUTE = 60_000
NODES = [
    *(NodeSpec(f"h{n}", gpus=8, gpu_model="H100", pool="h100") for n in range(2)),
    *(NodeSpec(f"a{n}", gpus=8, gpu_model="A100", pool="a100") for n in range(2)),
]
INVENTORY = PoolInventory.from_topology(Topology.build(NODES))


def at(minute: float) -> int:
    return T0 + round(minute * MINUTE)


def ask(job: str, minute: float = 0.0, gpus: int = 8, **about: object) -> Submitted:
    return Submitted(job=job, sequence=1, time_ms=at(minute), gpus_per_node=gpus, **{"queue": "q", **about})


def start(job: str, minute: float, *nodes: str) -> Started:
    return Started(job=job, sequence=3, time_ms=at(minute), nodes=nodes)


def demand_of(*events: JobEvent, inventory: PoolInventory = INVENTORY) -> tuple[DemandSeries, JobTable]:
    jobs, demand = JobTable(), DemandSeries()
    demand.apply_inventory(inventory, ())
    for event in events:
        jobs.apply(event)
        attempt = jobs.get(event.job, event.attempt)
        assert attempt is not None
        demand.update(attempt)
    return demand, jobs


def levels(demand: DemandSeries, target: str = "wanted", minute: float = 30.0) -> dict[str, float]:
    """Return the present value of each pool that has any."""
    found = {pool: demand.read_series("all", target, at(minute), 60, 1, pool=pool)[0] for pool in demand.list_pools()}
    return {pool: value for pool, value in found.items() if value}


def test_a_job_counts_in_the_pools_of_its_nodes_and_before_in_the_one_that_it_asks_for() -> None:
    events = [ask("runs"), start("runs", 5, "h0"), ask("asks", pool="a100"), ask("models", gpu_model="H100")]
    demand, _ = demand_of(*events, ask("anywhere"), ask("strange", pool="lost"))
    assert levels(demand, "running") == {"h100": 8}
    assert levels(demand, "queued") == {"a100": 8, "h100": 8, UNASSIGNED: 16}
    assert demand.list_queues() == ("q", "all")


def test_a_gang_on_two_pools_counts_in_each_what_it_holds_there() -> None:
    gang = ask("gang", gpus=8, gang=Gang(min=3, desired=3, step=1))
    demand, _ = demand_of(gang, start("gang", 5, "h0", "h1", "a0"))
    assert levels(demand) == {"a100": 8, "h100": 16}
    jobs = [demand.read_series("all", "arriving_jobs", at(30), 600, 4, pool=pool) for pool in demand.list_pools()]
    assert np.nansum(jobs) == 1


def test_a_fleet_of_one_pool_has_nothing_that_is_unassigned() -> None:
    one = PoolInventory.from_topology(Topology.build(NODES[:2]))
    demand, _ = demand_of(ask("a"), ask("b"), start("b", 3, "elsewhere"), inventory=one)
    assert levels(demand) == {"h100": 16}


def test_what_waits_for_a_quota_is_demand_of_its_queue_and_of_no_pool_until_it_runs() -> None:
    limit = Queued(job="a", sequence=2, time_ms=at(1), reason="QOSGrpGRES")
    machines = Queued(job="b", sequence=2, time_ms=at(1), reason="Resources")
    events = [ask("a", pool="h100", group="g"), limit, ask("b", pool="h100"), machines]
    demand, jobs = demand_of(*events)
    assert levels(demand, "queued") == {"h100": 8, UNASSIGNED: 8}
    quota = sum_over_quota(demand.list_contributions())
    assert quota[DemandScope("q")] == quota[DemandScope("q", group="g")] == quota[DemandScope(pool=UNASSIGNED)] == 8
    assert demand.read_series("q", "queued", at(30), 60, 1) == [16]
    jobs.apply(start("a", 20, "h1"))
    demand.update(jobs.get("a"))
    assert sum_over_quota(demand.list_contributions()) == {}
    assert levels(demand) == {"h100": 16}


def test_a_queue_may_use_the_pools_that_its_jobs_ask_for() -> None:
    demand, _ = demand_of(ask("a", pool="h100"), ask("b", queue="both", pool="h100"), ask("c", queue="both"))
    assert find_allowed_pools(demand.list_contributions()) == {"q": {"h100"}}


def test_demand_follows_a_node_to_another_pool() -> None:
    demand, jobs = demand_of(ask("a"), start("a", 5, "h0"))
    moved = [NodeSpec("h0", gpus=8, gpu_model="H100", pool="lab"), *NODES[1:]]
    demand.apply_inventory(PoolInventory.from_topology(Topology.build(moved)), jobs)
    assert levels(demand) == {"lab": 8}


def test_unknown_use_counts_in_the_pools_of_its_nodes() -> None:
    demand, _ = demand_of(ask("a"), start("a", 5, "h0"))
    demand.count_unknown_use(at(6), 5, {"h100": 2, "a100": 3})
    assert levels(demand, "running") == {"a100": 3, "h100": 10}
    demand.count_unknown_use(at(7), 1, {"a100": 1})
    assert levels(demand, "running") == {"a100": 1, "h100": 8}


def test_a_snapshot_of_an_older_version_loads_with_its_queues() -> None:
    """It calls a queue `pool`, has rows of three names and attempts without pools."""
    demand, jobs = demand_of(ask("a", pool="h100"), ask("b", class_="batch", group="g"), start("b", 5, "a0"))
    about, arrays = demand.dump()
    about = json.loads(json.dumps(about))
    del about["inventory"]
    about["bins"] = [row for row in about["bins"] if row["pool"] == "all"]
    kept = {number for number, row in enumerate(demand.dump()[0]["bins"]) if row["pool"] == "all"}
    arrays = {f"bins {new}": arrays[f"bins {old}"] for new, old in enumerate(sorted(kept))}
    for row in about["bins"]:
        row["pool"] = row.pop("queue")
    for name in ("attempts", "since", "unknown_use"):
        about[name] = [[*row[:3], row[4]] for row in about[name] if row[3] == "all"]
    about["known"] = [row[:12] for row in about["known"]]
    again = DemandSeries()
    again.load(about, arrays)
    assert again.list_queues() == ("q", "all")
    for target in TARGETS:
        for scope in ({}, {"class_": "batch"}, {"group": "g"}):
            read, was = (one.read_series("q", target, at(30), 60, 40, **scope) for one in (again, demand))
            np.testing.assert_array_equal(read, was)
    again.apply_inventory(INVENTORY, jobs)
    assert levels(again) == levels(demand) == {"a100": 8, "h100": 8}


@st.composite
def scenes(draw: st.DrawFn) -> list[JobEvent]:
    events: list[JobEvent] = []
    for number in range(draw(st.integers(1, 8))):
        asks = draw(st.sampled_from([{}, {"pool": "h100"}, {"pool": "lost"}, {"gpu_model": "A100"}]))
        job, nodes = f"j{number}", draw(st.lists(st.sampled_from(["h0", "h1", "a0", "x"]), unique=True, min_size=1))
        events.append(
            ask(job, draw(st.integers(0, 9)), draw(st.integers(1, 8)), queue=draw(st.sampled_from("qr")), **asks)
        )
        if draw(st.booleans()):
            reason = draw(st.sampled_from(["Resources", "QOSGrpGRES"]))
            events.append(Queued(job=job, sequence=2, time_ms=at(9), reason=reason))
        if draw(st.booleans()):
            events.append(start(job, 10, *nodes))
            if draw(st.booleans()):
                events.append(Finished(job=job, sequence=4, time_ms=at(20)))
    return events


@examples(100)
@given(scenes(), st.randoms(use_true_random=False), st.booleans())
def test_pools_add_up_to_all_in_any_order_and_after_a_snapshot(events, random, is_late: bool) -> None:
    """is_late: the inventory comes after the events."""
    shuffled = [*events, *events]
    random.shuffle(shuffled)
    demand, jobs = demand_of(*shuffled, inventory=PoolInventory() if is_late else INVENTORY)
    demand.apply_inventory(INVENTORY, jobs)
    demand.count_unknown_use(at(12), 5, {"h100": 2, UNASSIGNED: 3})
    about, arrays = demand.dump()
    again = DemandSeries()
    again.load(json.loads(json.dumps(about)), arrays)
    for one in (demand, again):
        for target in TARGETS:
            parts = [one.read_series("all", target, at(30), 60, 60, pool=pool) for pool in one.list_pools()]
            np.testing.assert_array_equal(np.sum(parts, axis=0), one.read_series("all", target, at(30), 60, 60))
    assert sum_over_quota(again.list_contributions()) == sum_over_quota(demand.list_contributions())


@pytest.mark.parametrize(
    ("reason", "is_quota"),
    [
        ("QOSMaxGRESPerUser", True),
        ("AssocGrpCpuLimit", True),
        ("(QOSGrpNodeLimit)", True),
        ("AssociationResourceLimit", True),
        ("waits until Kueue admits it", True),
        ("exceeded quota: gpus, requested: 8", True),
        ("NonPreemptibleOverQuota", True),
        ("Resources", False),
        ("Priority", False),
        ("Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", False),
        ("", False),
    ],
)
def test_the_reason_says_what_a_job_waits_for(reason: str, is_quota: bool) -> None:
    assert waits_for_quota(reason) is is_quota


@examples(100)
@given(st.integers(0, 500), st.dictionaries(st.text(max_size=3), st.integers(1, 50), min_size=1, max_size=6))
def test_a_number_is_divided_wholly(amount: int, weights: dict[str, int]) -> None:
    parts = divide_by_weights(amount, weights)
    assert sum(parts.values()) == amount
    assert all(abs(parts[name] - amount * weight / sum(weights.values())) < 1 for name, weight in weights.items())


def request(reason: str = "", gpus: int = 8, left: int = 0) -> JobAttempt:
    """A request of our own queue. left: GPUs that are left of its promise."""
    submission = Submitted(job="j", sequence=0, time_ms=at(0), queue="q", gpus_per_node=gpus)
    ranks = (RankPlacement(0, "n", tuple(range(left))),) if left else ()
    return JobAttempt("j", 1, submission=submission, queued_reason=reason, ranks=ranks)


def test_a_request_that_comes_to_its_quota_and_leaves_it_is_counted_as_it_is_now() -> None:
    for is_known in (False, True):
        demand = DemandSeries()
        if is_known:
            demand.update(request())
        found = []
        for reason in ("", OVER_QUOTA, ""):
            demand.count_requests([request(reason)], {}, at(1))
            found.append(sum_over_quota(demand.list_contributions()).get(DemandScope("q"), 0.0))
        assert found == [0.0, 8.0, 0.0]


def test_a_request_follows_the_inventory() -> None:
    demand = DemandSeries()
    demand.count_requests([request()], {}, at(1))
    demand.apply_inventory(PoolInventory({"n": "train"}, {"train": ["h100"]}, {"train": 8}), [], at(1))
    demand.count_requests([request()], {}, at(1))
    assert demand.read_series("all", "queued", at(2), 60, 1, pool="train")[-1] == 8


def test_a_promise_of_which_others_hold_all_gpus_counts_as_nothing_until_it_waits_again() -> None:
    demand = DemandSeries()
    demand.update(request())
    promised = {("j", 1): at(1)}
    found = []
    for left in (8, 0, 3):
        row = request(gpus=8 if left else 0, left=left)
        demand.count_requests([row], promised, at(2))
        found.append(demand.read_series("all", "running", at(3), 60, 1)[-1])
    assert found == [8, 0, 3]
    demand.count_requests([request()], {}, at(3))
    assert demand.read_series("all", "queued", at(4), 60, 1)[-1] == 8


def test_nothing_is_known_of_pools_before_the_first_inventory() -> None:
    demand = DemandSeries()
    for number in range(3):
        row = JobAttempt(
            f"j{number}",
            1,
            submission=Submitted(job=f"j{number}", sequence=0, time_ms=at(60 * number), gpus_per_node=8),
            started_ms=at(60 * number),
            ended_ms=at(60 * number + 60),
            outcome="finished",
        )
        demand.update(row)
        demand.drop_attempt(row)
    demand.apply_inventory(PoolInventory({"n": "train"}, {"train": ["h100"]}, {"train": 8}), [], at(180))
    assert demand.read_series("all", "running", at(179), 600, 12).tolist() == [8] * 12
    assert np.isnan(demand.read_series("all", "running", at(179), 600, 12, pool="train")).all()
