"""The table of running jobs: what events and requests state of each job, in the order of the view's jobs."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fleetcast.fleet.events import Checkpoint, JobEvent, Preempted, Resized, Started, Step, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.requests import Gang, PlacementRequest, RankPlacement
from fleetcast.placement.machines.running_jobs import RunningJobs, make_running_jobs
from fleetcast.placement.plan.reclaiming import compute_job_costs
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.service.pipeline import learnt_times
from fleetcast.service.pipeline.learnt_times import LearntJobTimes
from fleetcast.service.placer.running_jobs import complete_by_requests
from tests.service.placer.test_showback import ToldBoard
from tests.service.placer_world import NOW_MS, World

HOUR_MS = 3_600_000
NODES = ("n01", "n02")
RANKS = tuple(RankPlacement(at, node, tuple(range(8))) for at, node in enumerate(NODES))


class ToldWorld(World):
    """A placer over a board that the pipeline's own rows make from events."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.board = ToldBoard(self.config.board)
        self.board.table = JobTable()
        self.board.learner = LearntJobTimes()

    def tell(self, *events: JobEvent) -> RunningJobs:
        """Publish a board that knows these events as well, and return the placer's table."""
        for event in events:
            self.board.table.apply(event)
        running = [row for row in self.board.table if row.state == "running"]
        self.board.jobs = {row.job: [NODES.index(node) for node in row.hosts] for row in running}
        self.board.publish()
        return self.service.view.observe_fleet().jobs


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ToldWorld]:
    world = ToldWorld(tmp_path)
    yield world
    world.close()


def started(job: str, attempt: int = 1) -> Started:
    return Started(job=job, attempt=attempt, sequence=3, time_ms=NOW_MS - HOUR_MS, ranks=RANKS)


def test_events_state_all_columns(world: ToldWorld) -> None:
    base = {"job": "train", "attempt": 3}
    submitted = Submitted(
        **base,  # type: ignore[arg-type]
        sequence=1,
        time_ms=NOW_MS - 2 * HOUR_MS,
        queue="research",
        user="ada",
        class_="batch",
        priority=5,
        preemptible=False,
        gang=Gang(2, 4, 2),
        gpus_per_node=8,
        cpus=16,
        host_memory_gib=64.0,
        limit_s=7200.0,
        checkpoint_cost_s=99.0,
    )
    edges = [(4, "begin", 60), (5, "end", 50), (6, "begin", 30), (7, "end", 18)]
    jobs = world.tell(
        *(
            event
            for attempt, hours in ((1, 30), (2, 3))
            for event in (
                started("train", attempt),
                Preempted(job="train", attempt=attempt, sequence=9, time_ms=NOW_MS - hours * HOUR_MS),
            )
        ),
        submitted,
        started("train", 3),
        *(
            Checkpoint(**base, sequence=number, time_ms=NOW_MS - 1000 * ago_s, edge=edge)  # type: ignore[arg-type]
            for number, edge, ago_s in edges
        ),
    )
    assert (jobs.names, jobs.leaf, jobs.user, jobs.job_class) == (("train",), ("research",), ("ada",), ("batch",))
    assert (jobs.attempt[0], jobs.priority[0], jobs.preemptible[0]) == (3, 5, 0)
    assert (jobs.gpus[0], jobs.members[0], jobs.gpus_per_member[0]) == (16, 2, 8)
    assert (jobs.gang_min[0], jobs.gang_desired[0], jobs.gang_step[0]) == (2, 4, 2)
    assert (jobs.started_ms[0], jobs.checkpoint_ms[0]) == (NOW_MS - HOUR_MS, NOW_MS - 18_000)
    assert jobs.checkpoint_cost_s[0] == 11.0  # the median of 10 s and 12 s, not what was stated
    assert (jobs.restart_s[0], jobs.limit_s[0], jobs.stops[0]) == (300.0, 7200.0, 1)
    assert (jobs.cpus_per_member[0], jobs.cpus[0]) == (16, 32)
    assert (jobs.host_memory_gib_per_member[0], jobs.host_memory_gib[0]) == (64, 128)
    assert np.isnan(jobs.remaining_s).all()


def test_what_events_leave_out_the_request_states(world: ToldWorld) -> None:
    world.tell()
    asked = {"gang": {"min": 1, "desired": 2, "step": 1}, "gpus_per_node": 8, "cpus": 4, "preemptible": True}
    world.place("mine", queue="research", user="ada", priority=7, checkpoint_cost_s=20.0, **asked)
    jobs = world.tell(started("mine"), started("theirs"))
    mine, theirs = jobs.row["mine"], jobs.row["theirs"]
    assert (jobs.leaf[mine], jobs.user[mine], jobs.priority[mine], jobs.preemptible[mine]) == ("research", "ada", 7, 1)
    assert (jobs.gang_min[mine], jobs.gang_desired[mine], jobs.gang_step[mine]) == (1, 2, 1)
    assert (jobs.members[mine], jobs.cpus[mine], jobs.checkpoint_cost_s[mine]) == (2, 8, 20.0)
    assert np.isnan(jobs.host_memory_gib[mine])
    assert (jobs.leaf[theirs], jobs.priority[theirs], jobs.preemptible[theirs]) == ("default", 0, -1)
    assert (jobs.gang_min[theirs], jobs.gpus_per_member[theirs]) == (0, 0)
    assert np.isnan([jobs.cpus[theirs], jobs.checkpoint_cost_s[theirs]]).all()


def test_the_restart_the_pause_and_the_speed_are_learnt_from_earlier_events(
    world: ToldWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job runs at two sizes; its two earlier attempts worked 90 s and 110 s after their starts."""
    monkeypatch.setattr(learnt_times, "SOON_MS", HOUR_MS)  # the board of this world stays an hour after the starts
    start_ms = NOW_MS - HOUR_MS

    def step(attempt: int, number: int, end_s: float, duration_s: float) -> Step:
        time_ms = start_ms + round(1000 * end_s)
        same = {"job": "train", "attempt": attempt, "sequence": 10 + number, "time_ms": time_ms}
        return Step(**same, step=number, duration_s=duration_s)  # type: ignore[arg-type]

    same = {"job": "train", "gpus_per_node": 8, "gang": Gang(1, 2, 1)}
    for attempt, start_s in ((1, 90), (2, 110)):
        submitted = Submitted(**same, attempt=attempt, sequence=1, time_ms=start_ms)  # type: ignore[arg-type]
        jobs = world.tell(submitted, started("train", attempt), step(attempt, 0, start_s + 1, 1.0))
        assert jobs.restart_s.tolist() == [300.0], "two starts are too few"
    submitted = Submitted(**same, attempt=3, sequence=1, time_ms=start_ms)  # type: ignore[arg-type]
    world.tell(submitted, started("train", 3), *(step(3, number, 201 + number, 1.0) for number in range(20)))
    ranks = {"attempt": 3, "sequence": 5, "ranks": RANKS[:1]}
    resized = Resized(job="train", time_ms=start_ms + 230_000, **ranks)  # type: ignore[arg-type]
    jobs = world.tell(resized, *(step(3, 20 + number, 302 + 2 * number, 2.0) for number in range(20)))
    assert jobs.restart_s.tolist() == [110.0]
    assert np.isnan(jobs.resize_pause_s).all(), "one pause is too few"
    assert jobs.speed_exponent.tolist() == [0.95], "a slope of 1, with the prior of 0.9"
    assert compute_job_costs(jobs, world.service.view.observe_fleet().view, NOW_MS).restart.tolist() == [8 * 110.0]


@pytest.mark.parametrize(
    ("stated", "requested", "expected"),
    [(None, None, -1), (None, False, 0), (True, None, 1), (False, True, 0), (True, False, 0), (None, True, 1)],
)
def test_events_and_request_can_each_forbid_a_stop(
    world: ToldWorld, stated: bool | None, requested: bool | None, expected: int
) -> None:
    world.tell()
    world.place("mine", gang=2, gpus_per_node=8, **({} if requested is None else {"preemptible": requested}))
    said = Submitted(job="mine", sequence=1, time_ms=NOW_MS - HOUR_MS, gang=2, gpus_per_node=8, preemptible=stated)
    assert world.tell(said, started("mine")).preemptible.tolist() == [expected]


def test_leaves_follow_the_tree() -> None:
    tree = read_queues('[policy]\nunknown_queue = "b"\n[queue.a]\nper_user = true\n[queue.b]')
    jobs = make_running_jobs(["x", "y", "z"], leaf=["a", "elsewhere", "b"], user=["ada", "bob", "cy"])
    placed = {2: PlacementRequest(request_id="z", queue="a", user="cy")}
    assert complete_by_requests(jobs, placed, tree).leaf == ("a/ada", "b", "a/cy")
    assert complete_by_requests(jobs, placed, None).leaf == ("a", "elsewhere", "a")


def test_a_board_of_the_version_before_has_unknown_columns(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.board.jobs = {"b": range(8, 16), "a": range(4)}  # its rows lack what this version adds
    world.board.publish()
    observed = world.service.view.observe_fleet()
    assert observed.jobs.names == observed.view.jobs == ("b", "a")
    assert observed.jobs.gpus.tolist() == [64, 32]
    assert observed.jobs.leaf == ("q", "q")
    assert observed.jobs.preemptible.tolist() == [-1, -1]
    assert np.isnan(observed.jobs.cpus).all()
    world.close()
