"""Jobs that only their own training loop tells of."""

from pathlib import Path
from typing import Any

from fleetcast.fleet.events import Finished, JobEvent, Phase, Queued, Started, Step
from fleetcast.ingest.source import Batch
from tests.service.bare_world import BUSY, GPUS, IDLE, BareWorld, page

FIRST = 1 << 32


def step(world: BareWorld, number: int, **fields: Any) -> Step:
    at_ms = world.clock.now_ms()
    return Step(job="train-42", sequence=FIRST + number, time_ms=at_ms, step=number, duration_s=1.0, rank=0, **fields)


def take(world: BareWorld, *events: JobEvent) -> None:
    world.pipeline.apply_batch(Batch(events=events))


def test_steps_alone_show_a_job_on_its_host_until_it_says_that_it_is_over(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    busy = page("n1", [(IDLE, {})] * 4 + [(BUSY, {})] * 4)
    world.run(90, n1=busy)
    init = Phase(job="train-42", sequence=FIRST, time_ms=world.clock.now_ms(), name="init", rank=0, node="n1")
    take(world, init, *(step(world, number) for number in range(1, 9)))
    board = world.tick()
    (row,) = board.json("doc.jobs")
    assert (row["job"], row["state"], row["source"], row["nodes"]) == ("train-42", "running", "sdk", ["n1"])
    assert board.array("gpu.job")[0].tolist() == [-1] * 4 + [0] * 4, "those at work are its"
    assert board.json("doc.fleet")["gpus"]["unknown_use"] == 0
    assert board.json("doc.job")["train-42"]["phase"] == "init"
    take(world, Finished(job="train-42", sequence=FIRST + 99, time_ms=world.clock.now_ms()))
    assert world.tick().json("doc.jobs")[0]["state"] == "finished"


def test_gpus_that_a_rank_names_are_its_own(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    world.run(30, n1=page("n1", [(IDLE, {})] * GPUS))
    take(world, step(world, 1, node="n1", gpus=(2, 3)))
    board = world.tick()
    assert board.json("doc.jobs")[0]["gpus"] == 2
    assert board.array("gpu.job")[0].tolist() == [-1, -1, 0, 0, -1, -1, -1, -1]


def test_silence_ends_it_within_bounds_a_step_revives_it_and_a_real_start_takes_over(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    take(world, step(world, 1, node="n1"))
    world.clock.advance(1790)
    assert world.tick().json("doc.jobs")[0]["state"] == "running"
    world.clock.advance(20)
    assert world.tick().json("doc.jobs")[0]["state"] == "failed"
    take(world, step(world, 2))
    assert world.tick().json("doc.jobs")[0]["state"] == "running"
    take(world, Started(job="train-42", sequence=3, time_ms=world.clock.now_ms() - 5000, nodes=("n2",)))
    world.clock.advance(7200)
    (row,) = world.tick().json("doc.jobs")
    assert (row["state"], row["source"], row["nodes"]) == ("running", "board", ["n2"])


def test_events_of_which_nothing_can_be_shown_are_counted(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    take(world, Queued(job="nobody", sequence=2, time_ms=world.clock.now_ms()))
    board = world.tick()
    assert board.json("doc.ingestion")["noted"] == {"unknown_job": 1}
    assert board.json("doc.jobs") == []
