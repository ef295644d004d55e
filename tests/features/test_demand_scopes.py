"""Series of classes and user groups: they add up to their pool, room is bounded, snapshots hold them."""

import json

import numpy as np
import pytest

from fleetcast.features import demand_series
from fleetcast.features.contribution import OTHER
from fleetcast.features.demand_series import TARGETS, DemandSeries
from fleetcast.fleet.events import Finished, JobEvent, Started, Submitted
from fleetcast.fleet.job_table import JobTable

T0 = 1_700_002_800_000
MINUTE = 60_000
NOW = T0 + 65 * MINUTE


def at(minute: float) -> int:
    return T0 + round(minute * MINUTE)


def submitted(job: str, minute: float, gpus: int = 8, **about: str) -> Submitted:
    class_ = about.pop("class_", "training")
    return Submitted(
        job=job, sequence=1, time_ms=at(minute), gpus_per_node=gpus, class_=class_, **{"queue": "a", **about}
    )


def tell(demand: DemandSeries, *events: JobEvent, jobs: JobTable | None = None) -> DemandSeries:
    table = jobs or JobTable()
    for event in events:
        attempt = table.apply(event)
        if attempt is not None:
            demand.update(attempt)
    return demand


def crowd() -> list[JobEvent]:
    events: list[JobEvent] = []
    for n in range(24):
        about = {"queue": "ab"[n % 2], "group": f"g{n % 3}", "class_": "inference" if n % 4 else "batch"}
        events.append(submitted(f"j{n}", n, 1 + n % 5, **about))
        events.append(Started(job=f"j{n}", sequence=2, time_ms=at(n + 5), nodes=("n1",)))
        if n % 2:
            events.append(Finished(job=f"j{n}", sequence=3, time_ms=at(n + 30)))
    return events


def read(demand: DemandSeries, pool: str, target: str, **scope: str) -> np.ndarray:
    return demand.read_series(pool, target, NOW, 600, 6, **scope)


def test_classes_and_groups_add_up_to_their_pool() -> None:
    demand = tell(DemandSeries(), *crowd())
    for pool in ("a", "b", "all"):
        classes = [scope.class_ for scope in demand.list_scopes("class") if scope.queue == pool]
        groups = [scope.group for scope in demand.list_scopes("group") if scope.queue == pool]
        assert groups == ["g0", "g1", "g2"]
        for target in TARGETS:
            total = read(demand, pool, target)
            assert np.nansum(total) > 0 or target == "queued"
            np.testing.assert_array_equal(sum(read(demand, pool, target, class_=name) for name in classes), total)
            np.testing.assert_array_equal(sum(read(demand, pool, target, group=name) for name in groups), total)
            assert not np.nansum(read(demand, pool, target, group=OTHER))


def test_the_same_events_twice_are_the_same_events() -> None:
    once, twice, jobs = tell(DemandSeries(), *crowd()), DemandSeries(), JobTable()
    tell(twice, *crowd(), *crowd(), jobs=jobs)
    assert once.list_scopes("group") == twice.list_scopes("group")
    for scope in [*once.list_scopes("class"), *once.list_scopes("group")]:
        of = {"class_": scope.class_, "group": scope.group}
        np.testing.assert_array_equal(read(once, scope.queue, "wanted", **of), read(twice, scope.queue, "wanted", **of))
    assert once.records.list_records() == twice.records.list_records()


def test_a_job_without_a_group_counts_for_its_user_and_one_with_neither_as_other() -> None:
    demand = tell(
        DemandSeries(), submitted("j1", 1, user="ada"), submitted("j2", 2, 2), submitted("j3", 3, group="all")
    )
    assert [scope.group for scope in demand.list_scopes("group") if scope.queue == "a"] == ["ada"]
    assert read(demand, "a", "queued", group=OTHER)[-1] == 10
    assert read(demand, "a", "queued")[-1] == 18


def test_beyond_the_bound_groups_are_other_until_they_are_clearly_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demand_series.MOST, "group", 4)
    demand, jobs = DemandSeries(), JobTable()
    for n, gpus in enumerate((8, 1, 4, 64)):
        tell(demand, submitted(f"j{n}", n, gpus, group=f"g{n}"), jobs=jobs)
    assert [scope.group for scope in demand.list_scopes("group") if scope.queue == "a"] == ["g0", "g1"]
    assert read(demand, "a", "queued", group=OTHER)[-1] == 68
    demand.replace_small_groups(NOW)
    assert [scope.group for scope in demand.list_scopes("group") if scope.queue == "a"] == ["g0", "g3"]
    assert read(demand, "a", "queued", group="g3")[-1] == 64
    assert np.isnan(read(demand, "a", "queued", group="g3")[:-1]).all()  # what it wanted before is in "other"
    assert read(demand, "a", "queued", group=OTHER)[-1] == 5
    again = DemandSeries()
    again.load(*demand.dump())
    np.testing.assert_array_equal(read(again, "a", "queued", group="g3"), read(demand, "a", "queued", group="g3"))
    demand.replace_small_groups(NOW)
    assert [scope.group for scope in demand.list_scopes("group") if scope.queue == "a"] == ["g0", "g3"]


@pytest.mark.parametrize("is_restored", [False, True])
def test_what_a_scope_had_no_room_for_is_not_taken_off_it(monkeypatch: pytest.MonkeyPatch, is_restored: bool) -> None:
    monkeypatch.setitem(demand_series.MOST, "group", 2)
    demand, jobs = DemandSeries(), JobTable()
    tell(demand, submitted("j0", 1, group="g0"), submitted("j1", 2, group="g1"), jobs=jobs)
    monkeypatch.setitem(demand_series.MOST, "group", 4)
    tell(demand, submitted("j2", 3, 1, group="g1"), jobs=jobs)
    if is_restored:
        about, arrays = demand.dump()
        demand = DemandSeries()
        demand.load(json.loads(json.dumps(about)), arrays)
    assert read(demand, "a", "queued", group="g1")[-1] == 1
    tell(demand, Started(job="j1", sequence=2, time_ms=at(12), nodes=("n1",)), jobs=jobs)
    assert read(demand, "a", "queued", group="g1")[-1] == 1
    assert read(demand, "a", "running", group="g1")[-1] == 8  # what changes is counted as a whole
    assert min(np.nanmin(read(demand, "a", "queued", group=group)) for group in ("g0", "g1")) >= 0


def test_a_group_that_lost_its_place_and_gets_it_again_counts_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demand_series.MOST, "group", 2)
    demand, jobs = DemandSeries(), JobTable()
    tell(demand, submitted("j0", 1, 2, group="g0"), submitted("j1", 2, 8, group="g1"), jobs=jobs)
    demand.replace_small_groups(NOW)
    assert {scope.group for scope in demand.list_scopes("group")} == {"g1"}
    tell(demand, submitted("j2", 3, 64, group="g0"), jobs=jobs)
    demand.replace_small_groups(NOW)
    assert {scope.group for scope in demand.list_scopes("group")} == {"g0"}
    tell(
        demand,
        Finished(job="j0", sequence=3, time_ms=at(30)),
        Finished(job="j1", sequence=3, time_ms=at(31)),
        jobs=jobs,
    )
    assert read(demand, "a", "queued", group="g0")[-1] == 64


def test_a_few_groups_a_call_change_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demand_series, "MOST_SWAPS", 2)
    monkeypatch.setitem(demand_series.MOST, "group", 6)
    small = [submitted(f"s{n}", n, 1, group=f"s{n}") for n in range(3)]
    demand = tell(DemandSeries(), *small, *(submitted(f"l{n}", n, 9 - n, group=f"l{n}") for n in range(3)))
    listed = []
    for _ in range(3):
        demand.replace_small_groups(NOW)
        listed.append(
            {scope.group for scope in demand.list_scopes("group") if scope.queue == "all"} & {"l0", "l1", "l2"}
        )
    assert listed == [{"l0"}, {"l0", "l1"}, {"l0", "l1", "l2"}]


def test_a_snapshot_keeps_every_scope() -> None:
    jobs, demand = JobTable(), DemandSeries()
    tell(demand, *crowd()[:40], jobs=jobs)
    about, arrays = demand.dump()
    restored = DemandSeries()
    restored.load(json.loads(json.dumps(about)), arrays)
    tell(restored, *crowd()[40:], jobs=jobs)
    straight = tell(DemandSeries(), *crowd())
    assert restored.list_scopes("group") == straight.list_scopes("group")
    for scope in straight.list_scopes("group"):
        np.testing.assert_array_equal(
            read(restored, scope.queue, "running", group=scope.group),
            read(straight, scope.queue, "running", group=scope.group),
        )
    assert sorted(restored.records.list_records()) == sorted(straight.records.list_records())
