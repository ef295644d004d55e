"""Charges of shared GPUs: thousandths × time, whether events or a placement opened the charge."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import Finished, Resized, Started, Submitted
from fleetcast.fleet.held_gpus import count_held_milli
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.requests import RankPlacement
from tests.fuzz.bounds import examples
from tests.service.placer.test_queues import QueueWorld
from tests.service.placer.test_showback import ToldBoard
from tests.service.placer_world import NOW_MS


class SharedWorld(QueueWorld):
    """A placer whose board shows the jobs of a table of events."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.board = ToldBoard(self.config.board)
        self.table = self.board.table = JobTable()
        self.board.publish()

    def fold(self, *events: Any) -> None:
        for event in events:
            self.table.apply(event)

    def charges(self, by: str = "queue") -> dict[str, dict[str, Any]]:
        rows = self.ask("GET", f"/charges?from={NOW_MS}&by={by}")["rows"]
        return {row["name"]: row for row in rows}


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = SharedWorld(tmp_path)
    yield world
    world.close()


def submitted(job: str, queue: str = "a", **fields: Any) -> Submitted:
    return Submitted(job=job, sequence=0, time_ms=NOW_MS, queue=queue, user="ada", **fields)


def test_a_quarter_of_a_gpu_is_charged_as_a_quarter(world: SharedWorld) -> None:
    """Its share is known from the rank, from the submission, or from a submission of a job without GPU indices."""
    world.fold(
        submitted("by-rank", "a"),
        Started(job="by-rank", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "n01", (0,), 250),)),
        submitted("by-submission", "b", gpu_share=250),
        Started(job="by-submission", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "n01", (0,)),)),
        submitted("by-node", "c/users", gpu_share=250),
        Started(job="by-node", sequence=1, time_ms=NOW_MS, nodes=("n01",)),
    )
    world.beat(112_000)
    for queue in ("a", "b", "c/users/ada"):
        assert world.charges()[queue]["granted_gpu_s"] == 28.0, queue
    assert world.charges("pool")["train"]["granted_gpu_s"] == 84.0


def test_a_share_that_was_resized_or_ended_between_two_boards_is_charged_as_a_share(world: SharedWorld) -> None:
    world.fold(
        submitted("short", "a", gpu_share=250),
        Started(job="short", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "n01", (0,)),)),
        Finished(job="short", sequence=2, time_ms=NOW_MS + 40_000),
        submitted("moved", "b"),
        Started(job="moved", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "n01", (1,), 500),)),
    )
    world.beat(50_000)
    world.charges()
    world.fold(Resized(job="moved", sequence=2, time_ms=NOW_MS + 50_000, ranks=(RankPlacement(0, "n02", (1,), 100),)))
    world.beat(50_000)
    found = world.charges()
    assert (found["a"]["granted_gpu_s"], found["b"]["granted_gpu_s"]) == (10.0, 30.0)
    assert world.charges("pool").keys() == {"train"}


def test_a_placed_share_stays_a_share_when_events_do_not_repeat_it(world: SharedWorld) -> None:
    world.beat()
    answer = world.ask("POST", "/placements", json={"request_id": "p", "queue": "a", "user": "ada", "gpu_share": 250})
    (rank,) = answer["ranks"]
    bare = RankPlacement(0, rank["node"], tuple(rank["gpus"]))
    start_ms = world.clock.now_ms()
    world.fold(Started(job="p", sequence=1, time_ms=start_ms, ranks=(bare,)))
    world.beat(40_000)
    world.charges()
    world.fold(Resized(job="p", sequence=2, time_ms=world.clock.now_ms(), ranks=(RankPlacement(0, "n05", (3,)),)))
    world.beat(40_000)
    assert world.charges()["a"]["granted_gpu_s"] == 20.0


def test_an_attempt_that_the_next_one_ended_is_charged_until_then(world: SharedWorld) -> None:
    ranks = (RankPlacement(0, "n01", (0, 1)),)
    world.fold(submitted("j"), Started(job="j", sequence=1, time_ms=NOW_MS, ranks=ranks))
    world.beat(10_000)
    world.charges()
    world.fold(Started(job="j", attempt=2, sequence=1, time_ms=NOW_MS + 60_000, ranks=ranks))
    world.beat(60_000)
    rows = world.ask("GET", f"/charges?from={NOW_MS}&by=user")["rows"]
    assert sum(row["granted_gpu_s"] for row in rows) == 2 * 70


jobs = st.lists(
    st.fixed_dictionaries(
        {
            "by": st.sampled_from(["rank", "submission", "node", "placement"]),
            "milli": st.sampled_from([1, 100, 250, 333, 999, 1000]),
            "gpus": st.integers(1, 3),
            "begin_s": st.integers(0, 200),
            "run_s": st.integers(1, 200),
        }
    ),
    min_size=1,
    max_size=6,
)


@examples(100)
@given(jobs, st.integers(7, 60))
def test_granted_gpu_seconds_are_thousandths_times_time(drawn: list[dict[str, Any]], tick_s: int) -> None:
    """However a job came to run, with shares or whole GPUs, however often a board is published."""
    with TemporaryDirectory() as folder:
        world = SharedWorld(Path(folder))
        try:
            _play(world, drawn, tick_s)
        finally:
            world.close()


def _play(world: SharedWorld, drawn: list[dict[str, Any]], tick_s: int) -> None:
    expected = 0.0
    for second in range(0, 420, tick_s):
        now_ms = NOW_MS + 1000 * second
        for number, job in enumerate(drawn):
            name = f"j{number}"
            if "since_ms" not in job and job["begin_s"] <= second:
                _begin(world, name, job, now_ms)
            elif "since_ms" in job and "over" not in job and now_ms >= job["since_ms"] + 1000 * job["run_s"]:
                world.fold(Finished(job=name, sequence=2, time_ms=job["since_ms"] + 1000 * job["run_s"]))
                job["over"] = True
        world.beat(1000 * tick_s)
        world.charges()
    for job in drawn:
        if "since_ms" in job:
            run_s = job["run_s"] if "over" in job else (world.clock.now_ms() - job["since_ms"]) / 1000
            expected += job["held"] / 1000 * run_s
    granted = sum(row["granted_gpu_s"] for row in world.charges().values())
    assert math.isclose(granted, expected, abs_tol=0.01), drawn


def _begin(world: SharedWorld, name: str, job: dict[str, Any], now_ms: int) -> None:
    milli = job["milli"]
    gpus = 1 if milli < 1000 else job["gpus"]
    share = {"gpu_share": milli} if milli < 1000 else {}
    slots = tuple(range(gpus))
    if job["by"] == "placement":
        body = {"request_id": name, "queue": "a", "user": "ada", "gpus_per_node": gpus, **share}
        answer = world.ask("POST", "/placements", json=body)
        if answer["outcome"] != "placed":
            return
        ranks = msgspec.convert(answer["ranks"], tuple[RankPlacement, ...])
        world.fold(Started(job=name, sequence=1, time_ms=now_ms, ranks=ranks))
    else:
        stated = share if job["by"] in ("submission", "node") else {}
        world.fold(submitted(name, gpus_per_node=gpus, **stated))
        place = RankPlacement(0, "n16", slots, **(share if job["by"] == "rank" else {}))
        where: dict[str, Any] = {"nodes": ("n15",)} if job["by"] == "node" else {"ranks": (place,)}
        world.fold(Started(job=name, sequence=1, time_ms=now_ms, **where))
    job["since_ms"], job["held"] = now_ms, gpus * milli


def test_no_job_holds_more_of_a_node_than_the_node_has(world: SharedWorld) -> None:
    """GPU indices that the node lacks, and a node that is named for each of many members."""
    world.fold(
        submitted("indices", "a"),
        Started(job="indices", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "n01", tuple(range(1024))),)),
        submitted("members", "b", gpus_per_node=1024),
        Started(job="members", sequence=1, time_ms=NOW_MS, nodes=("n02",) * 5000),
    )
    before = world.ask("GET", "/queues")["capacity"]["gpu"]
    world.beat(10_000)
    for queue in ("a", "b"):
        assert world.charges()[queue]["granted_gpu_s"] == 80.0, queue
    assert world.ask("GET", "/queues")["capacity"]["gpu"] == before


@examples(200)
@given(
    st.lists(
        st.tuples(st.sampled_from("nm"), st.sets(st.integers(0, 1023), min_size=1, max_size=20), st.integers(1, 1000))
    ),
    st.dictionaries(st.sampled_from("nm"), st.integers(0, 8)),
)
def test_what_is_held_of_a_node_is_at_most_the_node(
    places: list[tuple[str, set[int], int]], counts: dict[str, int]
) -> None:
    table = JobTable()
    ranks = tuple(RankPlacement(at, node, tuple(gpus), share) for at, (node, gpus, share) in enumerate(places))
    table.apply(Started(job="a", sequence=1, time_ms=NOW_MS, ranks=ranks))
    held, unbounded = (count_held_milli(table.attempts["a", 1], told) for told in (counts, {}))
    for node, milli in held.items():
        assert milli <= 1000 * counts[node] if counts.get(node) else milli == unbounded[node]


def test_a_job_on_nodes_of_nobody_s_fleet_takes_no_gpu_from_the_queues(world: SharedWorld) -> None:
    """A site's relay also reports jobs of other clusters. On nodes of the fleet, jobs of no queue do take GPUs."""
    before = world.ask("GET", "/queues")["capacity"]["gpu"]
    world.fold(
        submitted("elsewhere", "other"),
        Started(job="elsewhere", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "x01", tuple(range(1000))),)),
        submitted("nowhere", "other", gang=1_000_000, gpus_per_node=1024),
        Started(job="nowhere", sequence=1, time_ms=NOW_MS),
        submitted("here", "other"),
        Started(job="here", sequence=1, time_ms=NOW_MS, ranks=(RankPlacement(0, "n01", tuple(range(8))),)),
    )
    world.board.jobs = {"here": [0]}
    world.beat(10_000)
    assert world.ask("GET", "/queues")["capacity"]["gpu"] == before - 8
