"""A job whose events name no GPUs: its size does not follow what its GPUs do from one tick to the next."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetcast.features.demand_series import Target
from fleetcast.fleet.events import Finished, Started, Submitted
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.jobs.fingerprints import Fingerprints
from fleetcast.service.pipeline.unknown_use import UnknownUse
from tests.service.bare_world import BUSY, GPUS, IDLE, BareWorld, page
from tests.service.pipeline.test_jobs_of_steps import FIRST, step, take

PAUSED = {**IDLE, "DCGM_FI_DEV_FB_USED": 0}


def demand(world: BareWorld, target: Target) -> float:
    state = world.pipeline.state
    world.pipeline.capabilities[DemandForecasts].record_ticks(state)
    return float(state.demand.read_series("all", target, world.clock.now_ms(), 60, 1)[-1])


def alternate(world: BareWorld, ticks: int, **busy: bytes) -> tuple[set[int], set[int], set[float]]:
    """Let all GPUs work and pause in turn; return the GPUs of the job's row, of the map, and in demand."""
    idle = {name: page(name, [(PAUSED, {})] * GPUS) for name in busy}
    rows, held, wanted = set(), set(), set()
    for number in range(ticks):
        board = world.run(15, **(busy if number % 2 == 0 else idle))
        rows.add(board.json("doc.jobs")[0]["gpus"])
        held.add(int((board.array("gpu.job") >= 0).sum()))
        wanted.add(demand(world, "running"))
    return rows, held, wanted


def test_a_training_loop_that_pauses_at_every_other_scrape_keeps_its_gpus(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    busy = page("n1", [(BUSY, {})] * GPUS)
    world.run(30, n1=busy)
    take(world, step(world, 1, node="n1"))
    assert alternate(world, 12, n1=busy) == ({8}, {8}, {8.0})


def test_the_use_of_gpus_counts_those_that_the_map_shows(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    busy = page("n1", [(BUSY, {})] * GPUS)
    world.run(30, n1=busy)
    take(world, step(world, 1, node="n1"))
    world.run(60, n1=busy)
    asyncio.run(world.pipeline.capabilities[Fingerprints].run_pass(world.pipeline.state))
    board = world.run(15, n1=busy)
    assert [row["gpus"] for row in board.json("doc.utilisation")] == [8]


def test_it_gives_gpus_up_that_are_idle_for_a_minute_of_readings(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    world.run(30, n1=page("n1", [(BUSY, {})] * GPUS))
    take(world, step(world, 1, node="n1"))
    half = page("n1", [(BUSY, {})] * 4 + [(PAUSED, {})] * 4)
    assert world.run(60, n1=half).json("doc.jobs")[0]["gpus"] == 8, "45 s of readings prove nothing yet"
    assert world.run(15, n1=half).json("doc.jobs")[0]["gpus"] == 4


def test_it_keeps_them_while_its_exporter_is_silent(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    world.run(30, n1=page("n1", [(BUSY, {})] * GPUS))
    take(world, step(world, 1, node="n1"))
    assert world.run(600).json("doc.jobs")[0]["gpus"] == 8


@pytest.mark.parametrize("starts_by_steps", [False, True])
def test_a_stated_size_counts_from_the_start_whatever_its_gpus_do(tmp_path: Path, starts_by_steps: bool) -> None:
    """A submission states 2 nodes with 4 GPUs each. No event names the GPUs."""
    world = BareWorld(tmp_path)
    busy = {name: page(name, [(IDLE, {})] * 4 + [(BUSY, {})] * 4) for name in ("n1", "n2")}
    world.run(30, **busy)
    now_ms = world.clock.now_ms()
    take(world, Submitted(job="train-42", sequence=1, time_ms=now_ms, gang=2, gpus_per_node=4))
    if starts_by_steps:
        second = msgspec.structs.replace(step(world, 1, node="n2"), sequence=FIRST << 1, rank=1)
        take(world, step(world, 1, node="n1"), second)
    else:
        take(world, Started(job="train-42", sequence=2, time_ms=now_ms, nodes=("n1", "n2")))
    assert alternate(world, 8, **busy) == ({8}, {8}, {8.0})


def test_a_snapshot_of_an_earlier_version_says_nothing_of_lately() -> None:
    use = UnknownUse()
    use.load({"n1": [0, 1]}, {})
    assert use.dump()[0] == {"n1": [0, 1]}


def test_a_restart_in_a_pause_changes_no_size(tmp_path: Path) -> None:
    world = BareWorld(tmp_path / "a")
    world.run(30, n1=page("n1", [(BUSY, {})] * GPUS))
    take(world, step(world, 1, node="n1"))
    world.run(15, n1=page("n1", [(BUSY, {})] * GPUS))
    about, arrays = world.pipeline.saved.parts[UnknownUse].dump()
    after = BareWorld(tmp_path / "b")
    after.pipeline.saved.parts[UnknownUse].load(about, arrays)
    take(after, step(after, 1, node="n1"))
    assert after.run(15, n1=page("n1", [(PAUSED, {})] * GPUS)).json("doc.jobs")[0]["gpus"] == 8


def test_a_job_that_begins_where_another_ended_holds_the_gpus_at_work(tmp_path: Path) -> None:
    world = BareWorld(tmp_path)
    halves = {name: [(BUSY, {}) if (at < 4) == (name == "a") else (PAUSED, {}) for at in range(GPUS)] for name in "ab"}
    for number, name in enumerate("ab"):
        now_ms = world.clock.now_ms()
        if number:
            take(world, Finished(job="a", sequence=9, time_ms=now_ms))
        take(world, Submitted(job=name, sequence=1, time_ms=now_ms, gpus_per_node=4))
        take(world, Started(job=name, sequence=2, time_ms=now_ms, nodes=("n1",)))
        world.run(30, n1=page("n1", halves[name]))
    board = world.run(15, n1=page("n1", halves["b"]))
    assert np.flatnonzero(board.array("gpu.job")[0] >= 0).tolist() == [4, 5, 6, 7]
