"""Start times beside the placer: what they are made of, and when they are made anew."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.features.past_runs import make_request_shape
from fleetcast.features.similarity import make_kind_keys
from fleetcast.fleet.errors import StaleError
from fleetcast.fleet.events import Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.models.demand.rows import DemandRow
from fleetcast.placement.machines.running_jobs import RUN_LEVELS
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.service.board.board import BoardReader, BoardWriter, Section
from fleetcast.service.board.kind_tables import LEVELS, RUN
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from fleetcast.service.pipeline.publish import make_queued_job
from fleetcast.service.placer.arrivals import forecast_arrivals
from fleetcast.service.placer.start_times import REFRESH_S
from fleetcast.service.placer.view import read_waiting_jobs
from tests.service.placer_world import NOW_MS, HandBoard, World

NODE = PlacementRequest(request_id="x", gpus_per_node=8, user="ada")
NODES = 16
HOUR_MS = 3_600_000


def job(name: str) -> PlacementRequest:
    return PlacementRequest(request_id=name, gpus_per_node=8, user="ada")


@dataclass
class ToldBoard(HandBoard):
    """With a model's word: every running job has an hour to go, and a job like NODE runs for two.

    waits: jobs that wait by their events, in order; each asks for what NODE asks for, and for what stands beside it.
    """

    waits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def sections(self) -> dict[str, Any]:
        other = PlacementRequest(request_id="q1", gpus_per_node=8, user="ada")
        key = next(
            key
            for key in make_kind_keys(make_request_shape(NODE)).values()
            if key in make_kind_keys(make_request_shape(other)).values()
        )
        return {
            **super().sections(),
            "jobs.running.left_s": np.full((len(self.jobs), len(LEVELS)), 3600, np.float32),
            RUN[0]: np.array([key], np.uint64),
            RUN[1]: np.full((1, len(LEVELS)), 7200, np.float32),
            "jobs.queued": msgspec.json.encode(
                [
                    {
                        "submitted_ms": NOW_MS - HOUR_MS + number,
                        "request": {"request_id": job, "gpus_per_node": 8, "user": "ada"} | asked,
                    }
                    for number, (job, asked) in enumerate(self.waits.items())
                ]
            ),
        }


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Sixteen nodes, all held."""
    world = World(tmp_path)
    world.board.jobs = {"a": range(8), "b": range(8, 16)}
    world.board.publish()
    yield world
    world.close()


def told(world: World, waits: dict[str, dict[str, Any]] | None = None) -> None:
    ToldBoard(world.config.board, world.board.jobs, waits=waits or {}).publish()


def for_each_node(nodes: int = NODES, **asked: Any) -> dict[str, dict[str, Any]]:
    """Jobs of one node, j0 first."""
    return {f"j{number}": asked for number in range(nodes)}


def hours(world: World, request: PlacementRequest = NODE) -> list[float]:
    start_ms = asyncio.run(world.starts.estimate(request)).start_ms
    assert start_ms is not None
    return [round((start - NOW_MS) / HOUR_MS, 2) for start in start_ms.values()]


def test_levels_of_the_board_are_those_of_the_paths() -> None:
    assert LEVELS == RUN_LEVELS


def test_what_a_model_told_of_running_jobs_decides(world: World) -> None:
    told(world)
    assert hours(world) == [1, 1, 1]


def test_what_a_model_told_of_waiting_jobs_decides(world: World) -> None:
    world.board.jobs = {"a": range(16)}
    told(world)
    for number in range(16):
        request = PlacementRequest(request_id=f"q{number}", gpus_per_node=8, user="ada")
        world.service.enqueue(request, "me")
    assert hours(world) == [3, 3, 3]  # all nodes are free in one hour, and taken for two


def test_jobs_that_wait_by_their_events_stand_in_the_same_queue(world: World) -> None:
    """All nodes are free in one hour, and whoever gets one keeps it for two."""
    world.board.jobs = {"a": range(NODES)}
    told(world, for_each_node(NODES + 1))
    assert hours(world, job("j0")) == hours(world, job("j15")) == [1, 1, 1]
    assert hours(world, job("j16")) == hours(world) == [3, 3, 3]
    first, last = (asyncio.run(world.starts.estimate(job(name))) for name in ("j0", "j16"))
    assert [row.job for row in first.blocked_by] == ["a"]
    assert {row.job for row in last.blocked_by} <= for_each_node().keys()


def test_jobs_that_wait_elsewhere_stand_by_their_priority(world: World) -> None:
    world.board.jobs = {"a": range(NODES)}
    told(world, for_each_node(priority=-1))
    assert hours(world) == [1, 1, 1]


def test_a_job_that_waits_here_and_elsewhere_counts_once(world: World) -> None:
    world.board.jobs = {"a": range(NODES)}
    told(world, for_each_node(NODES - 1))
    world.service.enqueue(PlacementRequest(request_id="x", job="j3", gpus_per_node=8, user="ada"), "me")
    assert hours(world, job("new")) == [1, 1, 1]
    assert hours(world, job("j3")) == [1, 1, 1]


def test_a_job_that_was_promised_its_gpus_waits_for_none(world: World) -> None:
    world.board.jobs = {"a": range(NODES - 1)}
    told(world, for_each_node(NODES))
    world.service.place(PlacementRequest(request_id="x", job="j3", gpus_per_node=8, user="ada"), "me")
    assert asyncio.run(world.starts.refresh()).starts_s.keys() == {f"\nj{at}" for at in range(NODES) if at != 3}


def test_what_no_request_may_ask_for_is_left_out(world: World) -> None:
    told(world, {"cpus only": {"gpus_per_node": 0}, "odd": {"class": "?"}, "fine": {}})
    assert list(asyncio.run(world.starts.refresh()).waits) == ["fine"]


def test_the_board_tells_of_a_job_as_it_was_submitted(tmp_path: Path) -> None:
    attempt = JobAttempt("slurm-7", 2)
    asks = {"gang": Gang(2, 4), "gpus_per_node": 4, "gpu_model": "H100", "cpus": 8, "limit_s": 60.0, "priority": 3}
    names = {"job": "slurm-7", "attempt": 2, "queue": "train", "user": "ada", "class_": "batch"}
    attempt.fold(Submitted(sequence=1, time_ms=NOW_MS, **names, **asks))
    BoardWriter(tmp_path).publish(
        [Section("jobs.queued", msgspec.json.encode([make_queued_job(attempt)]), NOW_MS)], NOW_MS
    )
    (entry,) = read_waiting_jobs(BoardReader(tmp_path).latest() or pytest.fail("no board"), ())
    assert entry.queued_ms == NOW_MS
    assert {name: getattr(entry.request, name) for name in (names | asks)} == names | asks


def test_of_two_attempts_that_wait_the_later_one_counts(world: World) -> None:
    """Both are told under one name."""
    again = {"request_id": "same", "attempt": 2}
    told(world, {"same": {}, "again": again})
    (entry,) = read_waiting_jobs(world.service.view.reader.latest() or pytest.fail("no board"), ())
    assert (entry.request.job, entry.request.attempt) == ("same", 2)


def test_who_waits_for_paths_takes_those_that_another_had_sampled(world: World) -> None:
    sampled = []

    async def work() -> None:
        sample = world.starts._sample_paths
        world.starts._sample_paths = lambda: sampled.append(1) or sample()  # type: ignore[method-assign,func-returns-value]
        await asyncio.gather(*(world.starts.estimate(job(f"x{number}")) for number in range(5)))

    asyncio.run(work())
    assert sampled == [1]


def test_what_was_sampled_a_while_ago_lies_ahead(world: World) -> None:
    told(world)
    world.service.enqueue(job("x"), "me")
    asyncio.run(world.starts.refresh())
    world.clock.advance(2 * 3600)
    page = world.ask("GET", "/queue").json()
    (row,) = page["rows"]
    times = [*row["start_ms"].values(), *(ms for release in page["releases"] for ms in release["ends_ms"].values())]
    assert set(times) == {page["as_of_ms"]}


def test_without_a_models_word_finished_jobs_serve(world: World) -> None:
    low, _, high = hours(world)
    assert 0 < low < high


def is_due(world: World) -> bool:
    world.starts._at_s -= 60  # it may not sample all the time
    return world.starts._is_due()


def test_paths_are_sampled_anew_when_something_happens_and_as_time_passes_in_the_fleet(world: World) -> None:
    def sampled() -> None:
        asyncio.run(world.starts.refresh())

    sampled()
    assert not is_due(world)
    world.service.enqueue(NODE, "me")
    assert is_due(world)
    sampled()
    assert not is_due(world)
    world.board.jobs = {"a": range(8)}  # b has ended
    world.board.publish()
    world.service.view.refresh()
    assert is_due(world)
    sampled()
    told(world, for_each_node(1))
    world.service.view.refresh()
    assert is_due(world)
    sampled()
    assert not is_due(world)
    world.clock.advance(REFRESH_S)
    assert is_due(world)


def test_sampling_takes_a_part_of_the_time_only(world: World) -> None:
    asyncio.run(world.starts.refresh())
    world.service.enqueue(NODE, "me")
    world.starts._took_s = 1000.0
    assert not world.starts._is_due()
    world.starts._took_s = 0.0
    assert world.starts._is_due()


def arriving(*gpus: float) -> list[Section]:
    """A forecast of arrivals, the same at each quantile, and jobs of one node that finished."""
    row = DemandRow(
        pool="all",
        class_="all",
        group="all",
        target="arriving",
        now=0.0,
        model="m",
        issued_ms=NOW_MS,
        horizons_s=[600 * (at + 1) for at in range(len(gpus))],
        quantiles=[0.05, 0.5, 0.95],
        values=[list(gpus)] * 3,
        record=None,
    )
    return make_demand_sections([row], {}, [], NOW_MS)


def test_the_served_forecast_of_arrivals_is_read_from_the_board(tmp_path: Path) -> None:
    seen = RunTimeQuantiles({8: (60.0, 120.0)}, {}, {8: 3, 1: 1})
    BoardWriter(tmp_path).publish(arriving(80.0, 40.0), NOW_MS)
    board = BoardReader(tmp_path).latest() or pytest.fail("no board")
    found = forecast_arrivals(board, seen)
    assert found is not None
    assert (found.horizon_s.tolist(), found.gpus[0].tolist()) == ([600, 1200], [80, 40])
    assert dict(zip(found.sizes.tolist(), found.weights.tolist(), strict=True)) == {8: 3, 1: 1}
    assert forecast_arrivals(board, RunTimeQuantiles({})) is None
    BoardWriter(tmp_path / "bare").publish([Section("meta", b"{}", NOW_MS)], NOW_MS)
    assert forecast_arrivals(BoardReader(tmp_path / "bare").latest() or pytest.fail("no board"), seen) is None


def test_a_stale_board_gives_no_estimate(world: World) -> None:
    world.clock.advance(3600)
    with pytest.raises(StaleError):
        asyncio.run(world.starts.estimate(NODE))


def test_the_desk_stops(world: World) -> None:
    async def work() -> None:
        running = asyncio.ensure_future(world.starts.run())
        while world.starts.paths is None:
            await asyncio.sleep(0.01)
        world.starts.stop()
        await asyncio.wait_for(running, 60)
        assert running.done()

    asyncio.run(work())


def test_the_queue_tells_how_often_start_times_held_also_after_a_restart(world: World) -> None:
    world.service.enqueue(job("x"), "me")
    world.service.enqueue(job("gone"), "me")
    asyncio.run(world.starts.refresh())
    assert world.ask("GET", "/queue").json()["record"] == {
        **{"n": 0, "by_p10": None, "by_p50": None, "by_p90": None, "since_ms": None, "by_age": []},
        **{"n_p50": 0, "n_p90": 0},
        "first": {"n": 0, "by_p10": None, "by_p50": None, "by_p90": None, "unanswered": 0, "n_p50": 0, "n_p90": 0},
    }
    world.ask("DELETE", "/queue/gone")
    world.clock.advance(60)
    world.board.jobs = {"b": range(8)}
    world.board.as_of_ms += 60_000
    world.board.publish()
    world.step()
    world.starts.record_outcomes()
    assert world.ask("GET", "/queue").json()["record"]["n"] == 0  # it started, and no issued time has passed yet
    world.clock.advance(2 * 86_400)
    world.board.as_of_ms += 2 * 86_400_000
    world.board.publish()
    world.starts.record_outcomes()
    record = world.ask("GET", "/queue").json()["record"]
    assert (record["n"], record["n_p90"], record["by_p90"], record["since_ms"]) == (1, 1, 1.0, NOW_MS)
    first = record["first"]
    assert (first["n"], first["n_p50"], first["n_p90"], first["by_p90"], first["unanswered"]) == (1, 1, 1, 1.0, 0)
    assert [(row["age_s"], row["n"]) for row in record["by_age"]] == [(0, 1)]
    asyncio.run(world.starts.refresh())
    page = world.ask("GET", "/metrics").text
    assert 'fleetcast_start_coverage_ratio{quantile="0.9"} 1.0' in page
    assert 'fleetcast_start_age_coverage_ratio{age_s="0",quantile="0.9"} 1.0' in page
    assert 'fleetcast_start_age_scored_requests{age_s="0",quantile="0.9"} 1.0' in page
    assert 'fleetcast_start_age_scored_requests{age_s="60",quantile="0.9"} 0.0' in page
    world.restart()
    assert world.ask("GET", "/queue").json()["record"] == record


def test_a_record_that_cannot_be_read_begins_anew(world: World) -> None:
    world.service.ledger.record_marks(start_times={"offset": "odd"})
    world.restart()
    assert world.ask("GET", "/queue").json()["record"]["n"] == 0


def test_room_opens_no_sooner_than_who_waits_starts(world: World) -> None:
    told(world)
    for name in ("x", "y"):
        world.service.enqueue(PlacementRequest(request_id=name, gang=8, gpus_per_node=8, user="ada"), "me")
    world.service.backlog.run_pass()
    asyncio.run(world.starts.refresh())
    page = world.ask("GET", "/queue").json()
    assert (page["room"]["free_gpus"], page["room"]["waiting_gpus"]) == (0, 128)
    for level, opens_ms in page["room"]["opens_ms"].items():
        assert all(row["start_ms"][level] <= opens_ms for row in page["rows"])
    assert page["room"]["sentence"].endswith("once the 2 requests that wait have started")
    assert "starts in 60 min" in page["rows"][0]["why"]


def test_with_free_gpus_and_nobody_waiting_there_is_room_now(world: World) -> None:
    world.board.jobs = {"a": range(8)}
    told(world)
    asyncio.run(world.starts.refresh())
    room = world.ask("GET", "/queue").json()["room"]
    assert set(room["opens_ms"].values()) == {NOW_MS}
    assert room["sentence"] == "room now: 64 GPUs are free"


def test_a_claim_that_futures_doubt_keeps_nothing_in_the_next_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(world)
    assert world.ask("POST", "/queue", {"request_id": "head", "gang": 9, "gpus_per_node": 8}).status_code == 202
    world.service.backlog.run_pass()
    monkeypatch.setattr("fleetcast.service.placer.start_times.compute_hold_probability", lambda claim, paths: 0.1)
    asyncio.run(world.starts.refresh())
    dropped = [
        begun.dropped for begun in (world.service.backlog.begin_pass(), world.service.backlog.begin_pass()) if begun
    ]
    assert dropped == [{"head"}, set()]
