"""Co-runs out of the job table: who shares what, and what a job's steps say of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from fleetcast.features import co_runs, sharing
from fleetcast.features.co_runs import CoRuns
from fleetcast.features.sharing import Neighbours, SharedHardware, Wiring
from fleetcast.fleet.events import Finished, Started, Step, StepParts, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Device, Level, NodeSpec, Topology

NOW_MS = 1_789_000_000_000
NAN = np.full(3, np.nan)


class World:
    """Jobs on GPUs, watched after everything that happens."""

    def __init__(self, divided: Sequence[str] = (), wiring: Wiring | None = None) -> None:
        self.table, self.co_runs, self.now_ms = JobTable(), CoRuns(), NOW_MS
        self.divided, self.wiring = divided, wiring or Wiring()
        self.load = NAN
        self.sequences: dict[str, int] = {}

    def _next(self, job: str) -> int:
        self.sequences[job] = self.sequences.get(job, 0) + 1
        return self.sequences[job]

    def start(self, job: str, *gpus: tuple[str, int]) -> None:
        self.table.apply(Submitted(job=job, sequence=self._next(job), time_ms=self.now_ms, user="ada", name=job))
        ranks = tuple(RankPlacement(rank, node, (gpu,)) for rank, (node, gpu) in enumerate(gpus))
        self.table.apply(Started(job=job, sequence=self._next(job), time_ms=self.now_ms, ranks=ranks))
        self.look()

    def step(self, times: int, parts: StepParts | None = None, **seconds: float) -> None:
        """Steps of each job, side by side, and a look after them."""
        for job, duration_s in seconds.items():
            for number in range(times):
                at_ms = self.now_ms + round((number + 1) * duration_s * 1000)
                sequence = self._next(job)
                self.table.apply(
                    Step(job=job, sequence=sequence, time_ms=at_ms, step=sequence, duration_s=duration_s, parts=parts)
                )
        self.now_ms += round(times * max(seconds.values()) * 1000)
        self.look()

    def end(self, job: str) -> None:
        self.table.apply(Finished(job=job, sequence=self._next(job), time_ms=self.now_ms))
        self.look()

    def look(self) -> None:
        running = self.table.list_running()
        loads = np.tile(self.load, (len(running), 1))
        self.co_runs.observe(running, self.co_runs.keys_of(running), self.divided, loads, self.now_ms, self.wiring)

    def speeds(self) -> list[tuple[str, float]]:
        return sorted((row.share, round(row.speed, 2)) for row in self.co_runs.newest_co_runs.values())


GPU = ("n1", 0)


def test_a_job_that_was_alone_first_is_slower_beside_another() -> None:
    world = World()
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.step(10, a=1.25, b=2.0)
    assert world.speeds() == [("gpu", 0.8)]


def test_who_was_alone_only_afterwards_is_known_then() -> None:
    world = World()
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.step(10, a=1.25, b=2.0)
    world.end("a")
    world.step(12, b=1.0)
    assert world.speeds() == [("gpu", 0.5), ("gpu", 0.8)]


def test_a_few_steps_are_no_co_run() -> None:
    world = World()
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.step(6, a=1.25, b=2.0)
    assert world.speeds() == []


def test_a_clock_that_was_set_back_hides_no_co_run() -> None:
    world = World()
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.now_ms -= 3_600_000
    world.co_runs.shift_times(-3_600_000)
    world.step(10, a=1.25, b=2.0)
    assert world.speeds() == [("gpu", 0.8)]


def test_a_load_is_read_again_though_the_clock_was_set_back() -> None:
    world = World()
    world.start("a", GPU)
    for share, moved_s in ((0.2, 3600), (0.7, -600)):
        world.load = np.array([share, 0.1, 0.1])
        world.now_ms += 1000 * moved_s
        world.look()
    assert {load[0] for load in world.co_runs.loads_alone.values()} == {0.7}


def test_of_three_on_one_gpu_nobody_knows_who_slows_whom() -> None:
    world = World()
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.start("c", GPU)
    world.step(12, a=3.0, b=3.0, c=3.0)
    assert world.speeds() == []
    world.end("c")
    assert world.speeds() == []
    world.step(12, a=1.25, b=1.0)
    assert world.speeds() == [("gpu", 0.8)]


def test_slices_of_a_divided_gpu_are_told_apart_from_a_shared_one() -> None:
    world = World(divided=["n1/0"])
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.step(10, a=1.25, b=2.0)
    assert world.speeds() == [("mig", 0.8)]


def placed(job: str, *gpus: tuple[str, int]) -> JobAttempt:
    ranks = tuple(RankPlacement(rank, node, (gpu,)) for rank, (node, gpu) in enumerate(gpus))
    return JobAttempt(job, 1, started_ms=NOW_MS, ranks=ranks)


def wired(rails: bool = True) -> Wiring:
    """Nodes n1 to n4 of one rail group: of four GPUs two are nearest to each of two adapters, each on its rail."""
    devices = (Device("ib0", (0, 1), 0 if rails else -1), Device("ib1", (2, 3), 1 if rails else -1))
    nodes = [NodeSpec(f"n{row}", 4, domains={Level.RAIL_GROUP: "rg1"}, devices=devices) for row in range(1, 5)]
    return Wiring(Topology.build(nodes))


def met(*running: JobAttempt, wiring: Wiring | None = None, divided: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """job -> what it shares, with whom; "*" are several."""
    found = Neighbours().observe(running, divided, wiring or Wiring())
    return {job: (of.share, of.other[0] if of.other else "*") for (job, _), of in found.items()}


def test_what_two_jobs_share_is_the_tightest_that_both_hold() -> None:
    a, b, local = placed("a", ("n1", 0), ("n2", 0)), placed("b", ("n2", 1), ("n3", 0)), placed("c", ("n2", 2))
    assert met(a, b, local) == {"a": ("nic", "b"), "b": ("nic", "a")}
    assert met(a, placed("d", ("n1", 0), ("n2", 3))) == {"a": ("gpu", "d"), "d": ("gpu", "a")}
    assert met(a, placed("d", ("n1", 0)), divided=["n1/0"]) == {"a": ("mig", "d"), "d": ("mig", "a")}


def test_the_topology_tells_who_shares_a_switch_an_adapter_or_a_rail() -> None:
    one, next_to_it, elsewhere = placed("a", ("n1", 0)), placed("b", ("n1", 1)), placed("c", ("n1", 2))
    assert met(one, next_to_it, elsewhere, wiring=wired()) == {"a": ("pcie", "b"), "b": ("pcie", "a")}
    wide, other_rail = placed("w", ("n1", 0), ("n2", 0)), placed("x", ("n1", 2), ("n2", 2))
    assert met(wide, other_rail, wiring=wired()) == {}
    far = placed("y", ("n3", 1), ("n4", 1))
    assert met(wide, other_rail, far, wiring=wired()) == {"w": ("rail", "y"), "y": ("rail", "w")}
    assert met(wide, far, wiring=wired(rails=False)) == {}
    assert met(wide, placed("z", ("n3", 0), ("n4", 0)), wiring=wired(rails=False))["w"] == ("rail", "z")


def test_neighbours_that_come_and_go_are_as_if_all_were_looked_at_anew() -> None:
    rng, wiring, kept = np.random.default_rng(0), wired(), Neighbours()
    running: list[JobAttempt] = []
    for number in range(150):
        if running and rng.random() < 0.45:
            running.pop(int(rng.integers(len(running))))
        else:
            nodes = rng.choice(["n1", "n2", "n3", "n4"], int(rng.integers(1, 3)), replace=False).tolist()
            running.append(placed(f"j{number}", *((node, int(rng.integers(4))) for node in nodes)))
        assert dict(kept.observe(running, (), wiring)) == dict(Neighbours().observe(running, (), wiring))
    assert SharedHardware("gpu", None) in kept.observe(running, (), wiring).values()


@pytest.mark.parametrize(
    ("share", "first", "second"),
    [
        ("pcie", [("n1", 0)], [("n1", 1)]),
        ("nic", [("n1", 0), ("n2", 0)], [("n2", 1), ("n3", 2)]),
        ("rail", [("n1", 0), ("n2", 0)], [("n3", 0), ("n4", 0)]),
    ],
)
def test_a_co_run_on_each_kind_of_link_is_learnt_from(share: str, first: Any, second: Any) -> None:
    world = World(wiring=None if share == "nic" else wired())
    world.start("a", *first)
    world.step(10, a=1.0)
    world.start("b", *second)
    world.step(10, a=1.25, b=2.0)
    assert world.speeds() == [(share, 0.8)]


def test_who_shares_a_rail_is_alone_on_its_gpu_and_not_on_the_rail() -> None:
    world = World(wiring=wired())
    world.start("a", ("n1", 0), ("n2", 0))
    world.start("b", ("n3", 0), ("n4", 0))
    world.step(12, a=1.25, b=1.5)
    assert world.speeds() == []
    world.start("c", ("n1", 0))
    world.step(12, a=2.5, b=1.5, c=1.0)
    assert world.speeds() == [("gpu", 0.5)]


def test_the_load_of_a_job_is_that_of_a_minute_and_more_alone() -> None:
    world = World()
    world.load = np.array([0.6, 0.3, np.nan])
    world.start("a", GPU)
    assert not world.co_runs.loads_alone
    world.step(70, a=1.0)
    world.load = np.array([0.9, 0.9, 0.9])
    world.start("b", GPU)
    world.step(70, a=1.5, b=1.5)
    key, kind = world.co_runs.keys_of(world.table.list_running())["a", 1]
    assert world.co_runs.loads_alone[key][:2] == world.co_runs.loads_alone[kind][:2] == (0.6, 0.3)
    assert len(world.co_runs.loads_alone) == 2


def test_steps_that_take_no_time_tell_of_no_turns() -> None:
    world, parts = World(), StepParts(compute=0.5, communication=0.5)
    world.start("a", GPU)
    world.start("b", ("n1", 1))
    world.now_ms += 1
    world.step(20, parts, a=0.0, b=0.0)
    world.step(1, parts, a=1.0, b=1.0)
    world.now_ms += 61_000
    world.look()
    assert not world.co_runs.step_times_alone
    world.step(40, parts, b=1.0)
    world.now_ms += 61_000
    world.look()
    assert [turns[0] for turns in world.co_runs.step_times_alone.values()] == [1.0, 1.0]


def test_a_speed_that_cannot_be_is_clipped_and_none_is_told_by_steps_of_no_time() -> None:
    world = World()
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.now_ms += 1
    world.step(10, a=1e-320, b=1e6)
    assert world.speeds() == [("gpu", 1.1)]
    world.end("a")
    world.step(12, b=1.0)
    assert world.speeds() == [("gpu", 0.01), ("gpu", 1.1)]
    kept, _ = world.co_runs.dump()
    kept["found"][0][-1], kept["found"][1][-1] = float("inf"), float("nan")
    other = CoRuns()
    other.load(kept, {})
    assert other.newest_co_runs == {}


def test_what_was_found_waits_for_nothing_and_little_waits() -> None:
    world = World()
    world.start("a", GPU)
    world.step(10, a=1.0)
    world.start("b", GPU)
    world.step(10, a=1.25, b=2.0)
    assert [row[:4] for row in world.co_runs.dump()[0]["together"]] == [["b", 1, "a", 1]]
    world.end("b")
    assert world.co_runs.dump()[0]["together"] == []
    assert world.speeds() == [("gpu", 0.8)]


def test_of_a_job_that_is_never_alone_the_latest_partners_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(co_runs, "MOST_CO_RUNS", 3)
    world = World()
    world.start("a", GPU)
    for partner in "bcde":
        world.start(partner, GPU)
        world.step(10, **{"a": 1.25, partner: 2.0})
        world.end(partner)
    assert [row[:3] for row in world.co_runs.dump()[0]["together"]] == [["a", 1, "d"], ["a", 1, "e"]]


def test_names_that_differ_in_numbers_are_one_job() -> None:
    world = World()
    world.start("train-1", GPU)
    world.start("train-2", ("n1", 1))
    world.start("other", ("n1", 2))
    first, second, other = world.co_runs.keys_of(world.table.list_running()).values()
    assert first == second
    assert first != other


@pytest.mark.parametrize("after", range(1, 4))
def test_a_restart_at_any_moment_ends_in_the_same_co_runs(after: int) -> None:
    world, moment = World(), 0

    def restart() -> None:
        nonlocal moment
        moment += 1
        if moment == after:
            (kept, _), world.co_runs = world.co_runs.dump(), CoRuns()
            world.co_runs.load(kept, {})

    world.start("a", GPU)
    world.step(10, a=1.0)
    restart()
    world.start("b", GPU)
    world.step(10, a=1.25, b=2.0)
    restart()
    world.end("a")
    world.step(12, b=1.0)
    restart()
    assert world.speeds() == [("gpu", 0.5), ("gpu", 0.8)]


def test_neighbours_are_found_after_an_error_though_no_attempt_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    table = JobTable()
    for job in ("a", "b"):
        table.apply(Started(job=job, sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "n1", (0,)),)))
    running, wiring, neighbours = table.list_running(), Wiring(), Neighbours()
    places, places_of, calls = RunningPlaces(running), sharing.list_places, iter((True, False))

    def fail_second(attempt: JobAttempt, wiring: Wiring) -> tuple[sharing.Place, ...]:
        if not next(calls):
            raise ValueError("a bug")
        return places_of(attempt, wiring)

    with monkeypatch.context() as broken:
        broken.setattr(sharing, "list_places", fail_second)
        with pytest.raises(ValueError, match="a bug"):
            neighbours.observe(running, (), wiring, places)
    expected = {("a", 1): SharedHardware("gpu", ("b", 1)), ("b", 1): SharedHardware("gpu", ("a", 1))}
    assert neighbours.observe(running, (), wiring, places) == expected
