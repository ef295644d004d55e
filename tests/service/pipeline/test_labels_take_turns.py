"""A shared GPU whose pod label changes from page to page: all its jobs hold it, none ends, and nothing is learnt."""

from pathlib import Path

import pytest

from tests.field.scraped_world import ScrapedWorld

FIELD = Path(__file__).parents[2] / "field"
TURNS = [(FIELD / f"04-time-slicing-flip-{letter}.prom").read_bytes() for letter in "abc"]
JOBS = ["serving/embedder", "serving/llama-chat", "serving/reranker"]
URL = "http://10.0.0.4:9400/metrics"


def running(world: ScrapedWorld) -> list[str]:
    return sorted(attempt.job for attempt in world.pipeline.state.jobs.list_running())


def ended(world: ScrapedWorld) -> list[str]:
    return [key[0] for key, row in world.pipeline.state.jobs.attempts.items() if row.over_ms is not None]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScrapedWorld:
    return ScrapedWorld(tmp_path, [URL], monkeypatch)


@pytest.mark.parametrize("turns", [TURNS, TURNS[:2], [TURNS[0], TURNS[0], TURNS[1]]])
def test_jobs_whose_labels_take_turns_hold_the_gpu_together(world: ScrapedWorld, turns: list[bytes]) -> None:
    for number in range(32):
        world.run(15, {URL: turns[number % len(turns)]})
    assert running(world) == [
        job for job, page in zip(JOBS, (TURNS[1], TURNS[0], TURNS[2]), strict=True) if page in turns
    ]
    assert ended(world) == []
    assert world.pipeline.state.labelled.count_gpus()["shared"] == 1
    assert {attempt.attempt for attempt in world.pipeline.state.jobs.list_running()} == {1}
    assert world.decide(gang=1, gpus_per_node=1).outcome == "refused"


def test_a_restart_keeps_who_shares(world: ScrapedWorld) -> None:
    for number in range(8):
        world.run(15, {URL: TURNS[number % 3]})
    world.save()
    world.restart()
    for number in range(8):
        world.run(15, {URL: TURNS[number % 3]})
    assert (running(world), ended(world)) == (JOBS, [])


def test_one_that_stops_taking_turns_ends(world: ScrapedWorld) -> None:
    for number in range(8):
        world.run(15, {URL: TURNS[number % 3]})
    for number in range(60):
        world.run(15, {URL: TURNS[number % 2]})
    assert running(world) == JOBS[:2]
    assert ended(world) == JOBS[2:]


def test_a_job_that_follows_another_begins_when_it_was_first_seen(world: ScrapedWorld) -> None:
    world.run(120, {URL: TURNS[0]})
    last_ms = world.clock.now_ms()
    world.run(120, {URL: TURNS[1]})
    assert (running(world), ended(world)) == (JOBS[:1], JOBS[1:2])
    (follower,) = world.pipeline.state.jobs.list_running()
    assert follower.started_ms == last_ms + 15_000
    first = world.pipeline.state.jobs.get(JOBS[1])
    assert first is not None
    assert first.over_ms == last_ms
    assert world.pipeline.state.labelled.count_gpus()["shared"] == 0
