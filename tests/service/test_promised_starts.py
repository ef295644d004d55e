"""No limit and no outage takes the GPUs of a job that Fleetcast has placed and that was started in time."""

import asyncio
import errno
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from fleetcast.fleet import files
from fleetcast.fleet.events import Started, Submitted
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.ingest.inbox.job_events import identify_event
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.placement.ledger.ledger import IntentState
from fleetcast.service.config import LimitsConfig
from tests.service.promise_world import EXPIRES_S, NOW_MS, PAUSE_S, PromiseWorld

LIMITS = LimitsConfig(live_jobs=10, names_per_minute=1, names_at_once=12)
Make = Callable[..., PromiseWorld]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made = []

    def of(limits: LimitsConfig = LIMITS, **more: object) -> PromiseWorld:
        made.append(PromiseWorld(tmp_path, limits, **more))  # type: ignore[arg-type]
        return made[-1]

    yield of
    for world in made:
        world.close()


def fill(world: PromiseWorld, jobs: int = 12, caller: str = "bob") -> int:
    """Submit so many jobs; return how many were accepted."""
    accepted = world.send(*(world.event(f"foreign-{n}", "submitted") for n in range(jobs)), caller=caller)
    return int(accepted.json()["accepted"])


def test_a_placed_job_starts_although_all_places_are_used_up(make: Make) -> None:
    world = make()
    with world.serving():
        assert fill(world) == 10
        assert world.place("a") == "placed"
        answers = []
        for _ in range(10):
            answers.append(world.send(world.event("a", "submitted"), world.started("a")).status_code)
            world.pass_time(3)
        assert set(answers) == {202}
        assert world.place("b") == "refused", "the GPUs of a job that announced its start are given again"
        assert world.state("a") is IntentState.SEEN


def test_what_its_caller_may_name_in_a_minute_refuses_no_placed_job(make: Make) -> None:
    world = make(LimitsConfig(names_per_minute=1, names_at_once=5))
    with world.serving():
        assert fill(world, caller="relay") == 5
        assert world.place("a") == "placed"
        assert world.send(world.event("a", "submitted"), world.started("a"), caller="relay").status_code == 202
        assert world.send(world.event("stranger", "submitted"), caller="relay").status_code == 429
        world.pass_time(EXPIRES_S + 10)
        assert world.place("b") == "refused"


def test_placed_jobs_count_nowhere(make: Make) -> None:
    world = make()
    with world.serving():
        for number in range(8):
            assert world.place(f"p{number}", gpus=1) == "placed"
            rank = {"ranks": [{"rank": 0, "node": "n01", "gpus": [number]}]}
            assert world.send(world.event(f"p{number}", "started", **rank)).status_code == 202
        assert world.context.names.count_used_names("live_jobs") == 0
        world.tick()
        assert world.pipeline.state.count_used_limits()["live_jobs"]["used"] == 0
        assert len(world.pipeline.state.jobs.list_running()) == 8
        assert fill(world) == 10, "strangers have the whole limit"


def test_an_attempt_that_was_submitted_before_it_was_placed_gives_its_place_back(make: Make) -> None:
    world = make()
    with world.serving():
        world.send(world.event("a", "submitted"))
        world.tick()
        assert world.pipeline.state.count_used_limits()["live_jobs"]["used"] == 1
        assert world.place("a") == "placed"
        world.send(world.started("a"))
        world.tick()
        assert world.pipeline.state.count_used_limits()["live_jobs"]["used"] == 0


def test_the_fold_lets_a_placed_start_in_again_after_a_restart_from_the_inbox(make: Make) -> None:
    """A start is folded a second time when its promise has long been seen."""
    world = make()
    with world.serving():
        assert fill(world) == 10
        world.tick()
        assert world.place("a") == "placed"
        world.send(world.started("a"))
        world.pass_time(3)
        assert world.state("a") is IntentState.SEEN
        world.pipeline = world.open_pipeline()
        world.tick()
        assert [row.job for row in world.pipeline.state.jobs.list_running()] == ["a"]
        assert world.place("b") == "refused"


def test_it_is_the_attempt_that_is_promised_whatever_its_request_is_called(make: Make) -> None:
    world = make()
    with world.serving():
        assert fill(world) == 10
        world.tick()
        request = {"request_id": "anything", "job": "a", "attempt": 3, "gang": 2, "gpus_per_node": 4}
        msgspec_request = msgspec.convert(request, PlacementRequest)
        world.placer.enqueue(msgspec_request, "test")
        assert world.placer.backlog.run_pass() == 1
        assert world.send(world.started("a", attempt=2)).status_code == 429, "that attempt was placed by nobody"
        assert world.send(world.started("anything")).status_code == 429
        assert world.send(world.started("a", attempt=3)).status_code == 202
        world.pass_time(EXPIRES_S + 10)
        assert world.place("b") == "refused"


def test_a_promise_that_is_over_has_no_privilege(make: Make) -> None:
    world = make()
    with world.serving():
        assert fill(world) == 10
        world.tick()
        assert world.place("a") == "placed"
        world.placer.cancel("r-a", "test")
        assert world.send(world.started("a")).status_code == 429


def test_while_the_api_is_away_no_promise_expires_and_a_returning_client_has_the_whole_time(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
    world.pass_time(45)
    assert world.place("b") == "refused", "the start was sent in time, and nobody could receive it"
    with world.serving():
        world.pass_time(EXPIRES_S - 2)
        assert world.place("c") == "refused"
        assert world.send(world.started("a")).status_code == 202
        world.pass_time(10)
        assert world.state("a") is IntentState.SEEN


def test_a_promise_that_nobody_starts_after_an_outage_expires_once_its_time_is_over(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
    world.pass_time(45)
    with world.serving():
        world.pass_time(EXPIRES_S + 3)
        assert world.state("a") is IntentState.EXPIRED
        assert world.place("b") == "placed"


def test_a_placer_that_was_away_with_the_api_knows_of_the_outage(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
    world.placer.ledger.close()
    world.pass_time(45)
    with world.serving():
        world.placer = world.open_placer()
        world.pass_time(1)
        assert world.place("b") == "refused"
        world.send(world.started("a"))
        world.pass_time(2)
        assert world.state("a") is IntentState.SEEN


def test_an_idle_api_is_no_outage(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        world.pass_time(EXPIRES_S - 1)
        assert world.state("a") is IntentState.ACTIVE
        world.pass_time(2)
        assert world.state("a") is IntentState.EXPIRED


def test_an_outage_is_waited_for_only_so_long(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
    world.pass_time(EXPIRES_S + PAUSE_S - 2)
    assert world.state("a") is IntentState.ACTIVE
    assert paused(world) == {"api": 1.0}
    world.pass_time(3)
    assert world.state("a") is IntentState.EXPIRED
    assert paused(world) == {}


def paused(world: PromiseWorld) -> dict[str, float]:
    """The alert's metric by source, where promises wait. The series of refused starts is always there."""
    (metric,) = world.placer.metrics.paused.collect()
    by_source = {sample.labels["source"]: sample.value for sample in metric.samples}
    assert "refused" in by_source
    return {source: count for source, count in by_source.items() if count}


def test_a_disk_that_refuses_events_is_an_outage(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        world.pass_time(EXPIRES_S - 5)
        with monkeypatch.context() as broken:
            broken.setattr(files.File, "sync", full)
            assert world.send(world.started("a")).status_code == 503
        world.context.listening.write_statement()
        world.pass_time(10)
        assert world.state("a") is IntentState.ACTIVE
        assert world.send(world.started("a")).status_code == 202
        world.pass_time(2)
        assert world.state("a") is IntentState.SEEN


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_bodies_that_leave_no_room_for_others_are_an_outage(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        budget = world.context.bodies
        budget.try_reserve_bytes(int(budget.limit_bytes))
        assert world.send(world.started("a")).status_code == 503
        budget.return_bytes(int(budget.limit_bytes))
        world.context.listening.write_statement()
        world.pass_time(EXPIRES_S + 3)
        assert world.state("a") is IntentState.EXPIRED, "it was in time to be sent again"
        assert world.place("b") == "placed"
        world.pass_time(EXPIRES_S - 3)
        budget.try_reserve_bytes(int(budget.limit_bytes))
        assert world.send(world.started("b")).status_code == 503
        budget.return_bytes(int(budget.limit_bytes))
        world.context.listening.write_statement()
        world.pass_time(6)
        assert world.state("b") is IntentState.ACTIVE


@pytest.mark.parametrize(
    "wrong",
    [
        {"time_ms": NOW_MS + 3_600_000},
        {"ranks": [{"rank": 0, "node": "n01", "gpus": [5000]}]},
        {"ranks": "n01"},
        {"unknown": 1},
        {"sequence": -1},
    ],
)
def test_a_promise_whose_own_start_was_refused_does_not_expire(make: Make, wrong: dict[str, object]) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        answer = world.send({**world.started("a"), **wrong})
        assert (answer.status_code, len(answer.json()["rejected"])) == (422, 1)
        world.pass_time(EXPIRES_S + PAUSE_S + 10)
        assert world.state("a") is IntentState.ACTIVE
        assert paused(world) == {"refused": 1.0}
        assert world.place("b") == "refused"
        assert world.send(world.started("a")).status_code == 202
        world.pass_time(2)
        assert world.state("a") is IntentState.SEEN


def test_a_start_in_the_part_of_a_body_that_is_not_read_counts_as_refused(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        answer = world.send(*[{}] * 10_000, world.started("a"))
        assert answer.json()["accepted"] == 0
        world.pass_time(EXPIRES_S + 10)
        assert world.state("a") is IntentState.ACTIVE


def test_a_job_that_ended_while_no_placer_looked_holds_nothing_although_its_start_was_refused_once(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        world.send({**world.started("a"), "unknown": 1})
        world.send(world.started("a"))
        world.send(world.event("a", "finished", 3))
        world.tick()
        world.clock.advance(7200)  # no board names a job that ended so long ago
        world.tick()
        world.tick()
        assert world.state("a") is IntentState.EXPIRED
        assert not list((world.config.folder / "held_starts").iterdir())


def test_a_placement_with_a_refused_start_can_be_cancelled(make: Make) -> None:
    world = make()
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        world.send({**world.started("a"), "unknown": 1})
        world.pass_time(EXPIRES_S + 5)
        world.placer.cancel("r-a", "test")
        assert world.place("b") == "placed"
        world.pass_time(EXPIRES_S + 5)
        assert world.state("b") is IntentState.EXPIRED, "the mark was of the other request"
        assert not list((world.config.folder / "held_starts").iterdir())


def test_refused_strangers_delay_nobody(make: Make) -> None:
    world = make()
    with world.serving():
        assert fill(world) == 10
        world.tick()
        assert world.place("a") == "placed"
        for _ in range(round(EXPIRES_S) + 2):
            late = {**world.started("stranger"), "time_ms": NOW_MS + 3_600_000}
            bad = {**world.started("a"), "attempt": 7, "unknown": 1}
            assert world.send(world.started("other"), late, bad, {"job": 5}).status_code == 429
            assert world.send(*[world.event("x", "submitted")] * 3, world.event("a", "submitted", -1)).status_code
            world.pass_time(1)
        assert world.state("a") is IntentState.EXPIRED


class AwaySource(MemorySource):
    """A source that reports starts; `row` is its health."""

    reports_jobs = True

    def __init__(self, name: str) -> None:
        super().__init__(name=name)
        self.row: dict[str, object] = {"up": True, "lag_s": 0.0}

    def health(self) -> dict[str, object]:
        return {"name": self.name, **self.row}


def test_a_source_of_starts_that_is_away_holds_promises_and_an_idle_one_does_not(make: Make) -> None:
    kafka = AwaySource("kafka")
    world = make(sources=(kafka,))
    with world.serving():
        world.tick()
        assert world.place("a", gpus=4) == "placed"
        world.pass_time(EXPIRES_S + 2)
        assert world.state("a") is IntentState.EXPIRED
        assert world.place("b") == "placed"
        kafka.row = {"up": False, "lag_s": None}
        world.pass_time(EXPIRES_S + 30)
        assert world.state("b") is IntentState.ACTIVE
        assert paused(world) == {"kafka": 1.0}
        kafka.row = {"up": True, "lag_s": 0.0}
        world.pass_time(EXPIRES_S - 2)
        assert world.state("b") is IntentState.ACTIVE
        kafka.push(Batch(events=(Started(job="b", sequence=1, time_ms=world.clock.now_ms(), nodes=("n01",)),)))
        asyncio.run(take(world, 1))
        world.pass_time(2)
        assert world.state("b") is IntentState.SEEN


async def take(world: PromiseWorld, number: int) -> None:
    world.pipeline.apply_batch(await world.pipeline.sources[number].next())


def test_a_source_that_is_behind_is_waited_for(make: Make) -> None:
    slurm = AwaySource("slurm")
    world = make(sources=(slurm,))
    with world.serving():
        world.tick()
        assert world.place("a") == "placed"
        for second in range(round(EXPIRES_S) + 15):
            slurm.row = {"up": True, "lag_s": float(second)}  # its last poll was before the placement
            world.pass_time(1)
        assert world.state("a") is IntentState.ACTIVE
        slurm.row = {"up": True, "lag_s": 0.0}
        world.pass_time(1)
        assert world.state("a") is IntentState.EXPIRED


def test_a_pipeline_without_room_takes_a_placed_start_from_any_source(make: Make) -> None:
    kafka = AwaySource("kafka")
    world = make(sources=(kafka,))
    with world.serving():
        assert fill(world) == 10
        world.tick()
        assert world.place("a") == "placed"
        rows = [Started(job=job, sequence=1, time_ms=world.clock.now_ms(), nodes=("n01",)) for job in ("x", "a")]
        kafka.push(Batch(events=tuple(rows)))
        asyncio.run(take(world, 1))
        world.pass_time(EXPIRES_S + 5)
        assert world.state("a") is IntentState.SEEN
        assert world.pipeline.state.counts.bad == {"too_many_jobs": 1}


def test_one_caller_fills_a_limit_alone_only_while_it_is_alone(make: Make) -> None:
    world = make(LimitsConfig(live_jobs=40))
    with world.serving():
        assert world.send(world.event("of-bob", "submitted"), caller="bob").status_code == 202
        answer = world.send(*(world.event(f"a{n}", "submitted") for n in range(40)))
        assert answer.json()["accepted"] == 20
        assert "limits.live_jobs = 40, 21 are used, one caller may have 20" in answer.json()["detail"]
        world.tick()
        assert fill(world, 30) == 19, "the other half, less what bob has"
        world.clock.advance(3601)
        world.tick()
        end = [world.event(f"foreign-{n}", "finished", 9) for n in range(19)]
        world.send(*end, caller="bob")
        world.clock.advance(3601)
        world.tick()
        assert world.send(*(world.event(f"c{n}", "submitted") for n in range(40))).json()["accepted"] == 19


def test_of_many_callers_each_may_fill_a_tenth(make: Make, tmp_path: Path) -> None:
    world = make(LimitsConfig(live_jobs=100))
    with world.serving():
        names = world.context.names
        for number in range(30):
            event = Submitted(job=f"of-{number}", sequence=1, time_ms=NOW_MS)
            assert names.make_body_names(f"caller-{number}").is_admitted(event, identify_event(event))
        body = names.make_body_names("caller-0")
        events = [Submitted(job=f"j{number}", sequence=1, time_ms=NOW_MS) for number in range(20)]
        assert sum(body.is_admitted(event, identify_event(event)) for event in events) == 9


def test_an_unreadable_ledger_refuses_no_name(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = make()
    with world.serving():
        assert fill(world) == 10
        world.context.promises.close()
        with monkeypatch.context() as broken:
            broken.setattr(files, "connect_to_read", cannot_open)
            assert world.send(world.started("a")).status_code == 202
        assert "no limit refuses a name" in caplog.text
        assert world.send(world.event("y", "submitted")).status_code == 429


def cannot_open(*_: object) -> None:
    raise sqlite3.OperationalError("unable to open database file")
