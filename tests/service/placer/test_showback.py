"""Showback: the ledger charges what a replay of the archive of job events gives, to the second; used and idle."""

from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.events import Failed, Finished, JobEvent, Started, Submitted
from fleetcast.fleet.held_gpus import count_held_milli
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.service.answers.jobs import RunningJobRow
from fleetcast.service.pipeline.learnt_times import SECTION as LEARNT_SECTION
from fleetcast.service.pipeline.learnt_times import LearntJobTimes
from fleetcast.service.pipeline.running_rows import make_ended_row, make_running_row
from tests.service.placer.test_queues import QueueWorld
from tests.service.placer_world import NOW_MS, HandBoard

MINUTE_MS = 60_000
QUEUES = ("a", "b", "c/users")


NODE_GPUS = {f"n{number:02}": 8 for number in range(1, 17)}


class ToldBoard(HandBoard):
    """A board whose jobs are those of a table; `seen`: rows of GPU time."""

    table = JobTable()
    seen: tuple[tuple[str, int, float, float], ...] = ()
    displaced: tuple[str, ...] = ()  # jobs of which others hold all GPUs
    learner = LearntJobTimes()

    def _row(self, row: JobAttempt) -> RunningJobRow:
        if row.job in self.displaced:
            return msgspec.structs.replace(make_running_row(row, {"n01": 0}), gpus=0, displaced=True)
        return make_running_row(row, count_held_milli(row, NODE_GPUS))

    def sections(self) -> dict[str, Any]:
        running = [row for row in self.table if row.state == "running"]
        ended = [row for row in self.table if row.started_ms is not None and row.over_ms is not None]
        known = {
            "position": 1,
            "running": [(row.job, row.attempt) for row in running],
            "ended": [(row.job, row.attempt, row.ended_ms) for row in ended],
        }
        gpu_time = [dict(zip(("job", "attempt", "used_gpu_s", "seen_gpu_s"), row, strict=True)) for row in self.seen]
        encode = msgspec.json.encode
        return super().sections() | {
            "jobs.running": encode([self._row(row) for row in running]),
            "jobs.ended": encode([make_ended_row(row, NODE_GPUS) for row in ended]),
            "jobs.gpu_time": encode(gpu_time),
            "occupancy": encode(known),
            LEARNT_SECTION: encode(self.learner.learn([row.copy() for row in running], self.as_of_ms)),
        }


def ranks(gpus: int) -> tuple[RankPlacement, ...]:
    return (RankPlacement(0, "n01", tuple(range(gpus))),)


def archive(seed: int) -> list[JobEvent]:
    """Half a day of jobs that finish, fail and start again, or run on, in the order in which they were told."""
    rng = np.random.default_rng(seed)
    events: list[JobEvent] = []
    for number in range(30):
        job, queue = f"j{number}", str(rng.choice(QUEUES))
        time_ms = NOW_MS + int(rng.integers(0, 400)) * 61_357
        attempts = int(rng.integers(1, 4))
        for attempt in range(1, attempts + 1):
            gpus = int(rng.integers(1, 9))
            about: dict[str, Any] = {"job": job, "attempt": attempt}
            events.append(Submitted(**about, sequence=0, time_ms=time_ms, queue=queue, user="ada", gpus_per_node=gpus))
            time_ms += int(rng.integers(1, 900_000))
            events.append(Started(**about, sequence=1, time_ms=time_ms, ranks=ranks(gpus)))
            time_ms += int(rng.integers(1, 9_000_000))
            if attempt < attempts:
                events.append(Failed(**about, sequence=2, time_ms=time_ms, category="hardware"))
            elif rng.random() < 0.8:
                events.append(Finished(**about, sequence=2, time_ms=time_ms))
            time_ms += 1000
    events = [event for event in events if event.time_ms < NOW_MS + 720 * MINUTE_MS]
    return sorted(events, key=lambda event: event.time_ms)


def replayed(lines: Iterable[bytes], until_ms: int) -> dict[str, float]:
    """queue → GPU-seconds granted, from the lines of the archive alone."""
    begun: dict[tuple[str, int], tuple[int, int]] = {}
    queue_of: dict[str, str] = {}
    spans: dict[tuple[str, int], tuple[int, int, int]] = {}
    for line in lines:
        event = msgspec.json.decode(line, type=JobEvent)
        key = event.job, event.attempt
        if isinstance(event, Submitted):
            queue_of[event.job] = event.queue
        elif isinstance(event, Started):
            begun[key] = event.time_ms, sum(len(rank.gpus) for rank in event.ranks)
        elif key in begun:
            since_ms, gpus = begun.pop(key)
            spans[key] = since_ms, event.time_ms, gpus
    spans |= {key: (since_ms, until_ms, gpus) for key, (since_ms, gpus) in begun.items()}
    granted: dict[str, float] = defaultdict(float)
    for (job, _), (since_ms, end_ms, gpus) in spans.items():
        granted[queue_of[job]] += gpus * (end_ms - since_ms) / 1000
    return granted


def follow(world: QueueWorld, events: list[JobEvent], seed: int) -> None:
    """Tell the events to a table, and publish a board every few of them."""
    rng = np.random.default_rng(seed)
    for event in events:
        world.board.table.apply(event)  # type: ignore[attr-defined]
        if rng.random() < 0.3:
            world.beat(max(1, event.time_ms - world.clock.now_ms()))
            world.ask("GET", "/queues")
    world.beat(NOW_MS + 721 * MINUTE_MS - world.clock.now_ms())


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = QueueWorld(tmp_path)
    world.board = ToldBoard(world.config.board)
    world.board.table = JobTable()
    world.board.publish()
    yield world
    world.close()


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_charges_equal_a_replay_of_the_archive_to_the_second(world: QueueWorld, seed: int) -> None:
    events = archive(seed)
    follow(world, events, seed)
    lines = [msgspec.json.encode(event) for event in events]
    until_ms = NOW_MS + 700 * MINUTE_MS
    expected = replayed(lines, NOW_MS + 721 * MINUTE_MS)
    rows = {row["name"]: row for row in world.ask("GET", f"/charges?from={NOW_MS}")["rows"]}
    told = {name.removesuffix("/ada"): row["granted_gpu_s"] for name, row in rows.items()}
    assert set(told) == set(expected) == set(QUEUES)
    for queue, gpu_s in expected.items():
        assert told[queue] == pytest.approx(gpu_s, abs=1.0)
    halves = [
        world.ask("GET", f"/charges?{when}")["rows"] for when in (f"from={NOW_MS}&to={until_ms}", f"from={until_ms}")
    ]
    for name, row in rows.items():
        parts = [half["granted_gpu_s"] for rows in halves for half in rows if half["name"] == name]
        assert sum(parts) == pytest.approx(row["granted_gpu_s"], abs=0.01)


def test_a_charge_says_what_telemetry_saw_used_and_why_it_saw_nothing(world: QueueWorld) -> None:
    def told(queue: str) -> dict[str, Any]:
        answer = world.ask("GET", f"/charges?from={NOW_MS}")
        return next(row for row in answer["rows"] if row["name"] == queue)

    for job, queue in (("watched", "a"), ("unheard", "b")):
        world.board.table.apply(Submitted(job=job, sequence=0, time_ms=NOW_MS, queue=queue, gpus_per_node=8))  # type: ignore[attr-defined]
        world.board.table.apply(Started(job=job, sequence=1, time_ms=NOW_MS, ranks=ranks(8)))  # type: ignore[attr-defined]
    world.beat(100_000, seen=(("watched", 1, 600.0, 760.0), ("unheard", 1, 300.0, 400.0)))
    assert (told("a")["granted_gpu_s"], told("a")["unseen"]) == (800.0, None)
    assert told("a")["used_gpu_s"] == pytest.approx(800 * 600 / 760, abs=0.01)
    assert told("a")["idle_gpu_s"] == pytest.approx(800 * 160 / 760, abs=0.01)
    assert (told("b")["used_gpu_s"], told("b")["unseen"]) == (None, "telemetry saw none of what was granted")
    world.board.table.apply(Finished(job="watched", sequence=2, time_ms=NOW_MS + 100_000))  # type: ignore[attr-defined]
    world.beat(100_000, seen=(("watched", 1, 600.0, 800.0),))
    assert (told("a")["used_gpu_s"], told("a")["idle_gpu_s"]) == (600.0, 200.0)
    world.restart()
    world.beat(100_000, seen=())
    assert (told("a")["used_gpu_s"], told("a")["idle_gpu_s"]) == (600.0, 200.0)  # as its charge was closed
    half = world.ask("GET", f"/charges?from={NOW_MS}&to={NOW_MS + 50_000}")["rows"][0]
    assert (half["granted_gpu_s"], half["used_gpu_s"]) == (400.0, 300.0)
    csv = world.ask("GET", f"/charges?format=csv&from={NOW_MS}").splitlines()
    assert csv[1].endswith(",600.0,200.0,0.0,0.0,,")


def test_queues_and_their_charges_are_told_to_prometheus(world: QueueWorld) -> None:
    for job, queue in (("one", "a"), ("two", "c/users")):
        told = Submitted(job=job, sequence=0, time_ms=NOW_MS, queue=queue, user="ada", gpus_per_node=8)
        world.board.table.apply(told)  # type: ignore[attr-defined]
        world.board.table.apply(Started(job=job, sequence=1, time_ms=NOW_MS, ranks=ranks(8)))  # type: ignore[attr-defined]
    world.beat(100_000, seen=(("one", 1, 600.0, 800.0),))
    text = world.ask("GET", "/metrics")
    for line in (
        'fleetcast_queue_stand_gpus{kind="held",queue="a"} 8.0',
        'fleetcast_queue_stand_gpus{kind="borrowed",queue="a"} 8.0',
        'fleetcast_queue_stand_gpus{kind="limit",queue="b"} 32.0',
        'fleetcast_queue_stand_gpus{kind="guaranteed",queue="c"} 16.0',
        'fleetcast_queue_share{queue="c"} 0.0',
        'fleetcast_charged_gpu_seconds{kind="granted",queue="a"} 800.0',
        'fleetcast_charged_gpu_seconds{kind="used",queue="a"} 600.0',
        'fleetcast_charged_gpu_seconds{kind="idle",queue="a"} 200.0',
        'fleetcast_charged_gpu_seconds{kind="granted",queue="c/users/ada"} 800.0',
    ):
        assert line in text
    assert 'kind="used",queue="c/users/ada"' not in text  # nobody saw it
    assert "fleetcast_charged_money{" not in text  # no prices


def test_a_failure_that_is_reported_late_is_lost_work_and_no_resize(world: QueueWorld) -> None:
    table, hour_ms = world.board.table, 60 * MINUTE_MS
    table.apply(Submitted(job="A", sequence=0, time_ms=NOW_MS, queue="a", gpus_per_node=8))
    table.apply(Started(job="A", sequence=1, time_ms=NOW_MS, ranks=ranks(8)))
    world.beat(hour_ms)
    world.ask("GET", "/queues")
    table.apply(Submitted(job="B", sequence=0, time_ms=NOW_MS + hour_ms, queue="b", gpus_per_node=8))
    table.apply(Started(job="B", sequence=1, time_ms=NOW_MS + hour_ms + MINUTE_MS, ranks=ranks(8)))
    world.beat(10 * MINUTE_MS, displaced=("A",))
    world.ask("GET", "/queues")
    table.apply(Failed(job="A", sequence=2, time_ms=NOW_MS + hour_ms, category="hardware"))
    world.beat(MINUTE_MS, displaced=())
    world.ask("GET", "/queues")
    (row,) = [row for row in world.ask("GET", f"/charges?from={NOW_MS}")["rows"] if row["name"] == "a"]
    assert (row["jobs"], row["granted_gpu_s"], row["lost_gpu_s"]) == (1, 8 * 3600, 8 * 3600)
