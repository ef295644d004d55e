"""A job is charged for the time that it ran, whatever happens to the clocks.

While the job runs, the charge may differ by one interval between boards, and by two steps of `STEP_MS` that are still
being added up: one when the charge was opened, and one now. The end of a run may double that. An event's clock may
have moved with ours or not, and the run time that is nearer to the charge's age need not be the right one.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.fleet.events import Finished, Started
from fleetcast.fleet.requests import RankPlacement
from fleetcast.service.placer.charged_clock import STEP_MS
from tests.fuzz.bounds import examples
from tests.service.placer.test_charged_shares import SharedWorld, submitted
from tests.service.placer.test_queues import HOUR_MS
from tests.service.placer_world import NOW_MS

TICK_S, GPUS = 30, 8
HUGE_MS = 10_000 * HOUR_MS
WITHIN_S = TICK_S + 2 * STEP_MS / 1000


class FleetTime:
    """The clock of the schedulers that report: it is set with ours (`shared`), or it stays right."""

    def __init__(self, world: SharedWorld, shared: bool) -> None:
        self.world, self.shared, self.set_ms = world, shared, 0

    def set(self, by_ms: int) -> None:
        self.world.clock.time_ms += by_ms
        self.set_ms += by_ms

    def now_ms(self) -> int:
        return self.world.clock.now_ms() - (0 if self.shared else self.set_ms)


def granted(world: SharedWorld) -> float:
    rows = world.ask("GET", f"/charges?from=0&to={NOW_MS + HUGE_MS}")["rows"]
    return float(sum(row["granted_gpu_s"] for row in rows))


def start(world: SharedWorld, time: FleetTime, placed: bool) -> None:
    node = "n01"
    if placed:
        body = {"request_id": "j", "queue": "a", "user": "ada", "gpus_per_node": GPUS}
        answer = world.ask("POST", "/placements", json=body)
        assert answer["outcome"] == "placed", answer
        node = answer["ranks"][0]["node"]
    else:
        world.fold(submitted("j"))
    ranks = (RankPlacement(0, node, tuple(range(GPUS))),)
    world.fold(Started(job="j", sequence=1, time_ms=time.now_ms(), ranks=ranks))


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS])
@pytest.mark.parametrize("shared", [True, False])
def test_a_clock_that_is_set_by_an_hour_charges_nobody_for_it(tmp_path: Path, by_ms: int, shared: bool) -> None:
    world = SharedWorld(tmp_path)
    time = FleetTime(world, shared)
    start(world, time, placed=False)
    for _ in range(4):
        world.beat(1000 * TICK_S)
        granted(world)
    time.set(by_ms)
    world.beat(0)
    assert granted(world) == GPUS * 120
    for _ in range(4):
        world.beat(1000 * TICK_S)
        granted(world)
    world.restart()
    world.fold(Finished(job="j", sequence=2, time_ms=time.now_ms()))
    world.beat(1000)
    assert granted(world) == GPUS * 240
    world.close()


steps = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 4999, -4999, 60_000, -60_000, HOUR_MS, -HOUR_MS, 7 * HOUR_MS])),
    min_size=1,
    max_size=8,
)


@examples(60)
@given(steps, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(1, 3))
@example([(0, HOUR_MS)], True, False, 0, 1)
@example([(1, -HOUR_MS), (1, HOUR_MS)], False, False, 1, 1)
@example([(1, -60_000), (2, HOUR_MS)], False, False, 0, 1)
@example([(2, HOUR_MS), (2, -HOUR_MS), (1, -HOUR_MS)], False, True, 1, 1)
@example([(1, -60_000), (1, -60_000), (2, 7 * HOUR_MS)], False, True, 0, 1)
@example([(0, 0), (0, -60_000), (0, 4999), (0, 4999), (0, -4999)], False, False, 2, 1)
@example([(0, 0), (0, -60_000), (0, 4999), (0, 60_000)], False, False, 2, 1)
def test_after_any_sequence_of_clock_steps_a_job_is_charged_for_the_time_that_it_ran(
    drawn: list[tuple[int, int]], shared: bool, placed: bool, start_at: int, restart_every: int
) -> None:
    with TemporaryDirectory() as folder:
        world = SharedWorld(Path(folder))
        try:
            _play(world, drawn, shared, placed, min(start_at, len(drawn) - 1), restart_every)
        finally:
            world.close()


def _play(
    world: SharedWorld, drawn: list[tuple[int, int]], shared: bool, placed: bool, start_at: int, every: int
) -> None:
    time, began_ms = FleetTime(world, shared), None
    world.beat(1000)
    for number, (ticks, by_ms) in enumerate(drawn):
        if number == start_at:
            start(world, time, placed)
            began_ms = world.clock.steady_ms()
        time.set(by_ms)
        for _ in range(ticks + 1):
            world.beat(1000 * TICK_S)
            granted(world)
        true_s = (world.clock.steady_ms() - began_ms) / 1000 if began_ms is not None else 0.0
        assert abs(granted(world) / GPUS - true_s) <= WITHIN_S, (number, granted(world) / GPUS, true_s)
        if number % every == 0 and abs(time.set_ms) == 0:
            world.restart()
    assert began_ms is not None
    world.fold(Finished(job="j", sequence=3, time_ms=time.now_ms()))
    true_s = (world.clock.steady_ms() - began_ms) / 1000
    world.beat(1000)
    assert abs(granted(world) / GPUS - true_s) <= 2 * WITHIN_S, (granted(world) / GPUS, true_s)
