"""What a pipeline makes of what the one before left: snapshots lost, events lost, generations, a clock that was set."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Finished, Started
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config, ScrapeConfig
from fleetcast.service.pipeline.occupancy import UNKNOWN
from fleetcast.service.pipeline.pipeline import Pipeline

NOW_MS = 1_789_000_000_000
MINUTE, HOUR = 60_000, 3_600_000
GPU = EntityKind.GPU
POWER, XID = find_metric_row(GPU, "power_w"), find_metric_row(GPU, "xid")
UP = find_metric_row(EntityKind.NODE, "scrape_up")
NODES = ("n1", "n2", "n3")


class Scraped(MemorySource):
    """A source whose past is gone."""

    misses = True


def topology() -> Topology:
    return Topology.build([NodeSpec(name, 8) for name in NODES])


def pipeline(folder: Path, clock: ManualClock, *, inbox: bool = False) -> Pipeline:
    config = Config(state=str(folder))
    sources = [InboxSource(config.inbox) if inbox else Scraped()]
    return Pipeline(config, clock, topology(), lambda _: sources)


def scrape(work: Pipeline, *, silent: tuple[str, ...] = (), gpus: int = 8) -> None:
    """Power and XID of every GPU of the nodes that answer, now."""
    rows, nodes = [], []
    now_ms = work.clock.now_ms()
    for name in NODES:
        for index in range(0 if name in silent else gpus):
            row = work.state.entities.add_to_node(GPU, name, index)
            rows += [(POWER, row, now_ms, 400.0 + (now_ms // 15_000 + index) % 7), (XID, row, now_ms, 0.0)]
        nodes.append((UP, work.state.entities.find_or_add_node(name), now_ms, float(name not in silent)))
    work.apply_batch(Batch(samples=(SampleBatch.from_rows(GPU, rows), SampleBatch.from_rows(EntityKind.NODE, nodes))))


def live(work: Pipeline, seconds: float, *, silent: tuple[str, ...] = ()) -> None:
    """Scrape every 15 s, tick every 30 s."""
    clock = work.clock
    assert isinstance(clock, ManualClock)
    for number in range(round(seconds / 15)):
        clock.advance(15)
        scrape(work, silent=silent)
        if number % 2:
            asyncio.run(work.tick())


def board(work: Pipeline) -> Board:
    latest = BoardReader(work.config.board).latest()
    assert latest is not None
    return latest


def flagged(work: Pipeline) -> list[str]:
    return [row["node"] for row in board(work).json("doc.fleet")["nodes"] if row["flagged"]]


def ages(work: Pipeline) -> list[float]:
    answers, offsets = board(work).raw("answers.node"), board(work).array("answers.node.offsets")
    first = msgspec.json.decode(answers[: offsets[1]])
    return [gpu["age_s"] for gpu in first["gpus"]]


# -- lost snapshots -------------------------------------------------------------------------------------------------


def started(job: str, gpus: tuple[int, ...], node: str = "n1") -> dict[str, Any]:
    rank = {"rank": 0, "node": node, "gpus": gpus}
    return {"job": job, "attempt": 1, "sequence": 1, "time_ms": NOW_MS, "type": "started", "ranks": [rank]}


async def tell(config: Config, *events: dict[str, Any]) -> None:
    """Each call is a writer of its own, so a segment of its own."""
    writer = InboxWriter(config.inbox, "api")
    await writer.append([msgspec.json.encode(event) for event in events], NOW_MS)
    await writer.close()


async def drained(work: Pipeline) -> Pipeline:
    (source,) = work.sources
    assert source.name == InboxSource.name
    while source.backlog_bytes():
        work.apply_batch(await source.next())
    return work


async def site_with_history(folder: Path) -> Config:
    """Jobs a, b and c run; the segments that told of a and b are pruned, and c's is the newest."""
    config = Config(state=str(folder))
    for number, job in enumerate("abc"):
        await tell(config, started(job, (number,)))
        work = await drained(pipeline(folder, ManualClock(NOW_MS), inbox=True))
        await work.tick()
        await work.save()
    await work.save()
    assert [path.name for path in sorted(config.inbox.glob("*.seg"))] == ["api-000000000003.seg"]
    return config


def running(work: Pipeline) -> list[str]:
    return sorted(row.job for row in work.state.jobs.list_running())


def test_a_fleet_whose_snapshots_are_lost_is_taken_from_the_last_board(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        config = await site_with_history(tmp_path)
        shutil.rmtree(tmp_path / "snapshot")
        await tell(config, {"job": "b", "attempt": 1, "sequence": 9, "time_ms": NOW_MS, "type": "finished"})
        work = await drained(pipeline(tmp_path, ManualClock(NOW_MS), inbox=True))
        await work.tick()
        assert running(work) == ["a", "c"]
        assert board(work).json("meta")["occupancy_known"] is True
        holders = board(work).array("gpu.job")[0].tolist()
        assert [board(work).names("names.job")[at] if at >= 0 else None for at in holders[:3]] == ["a", None, "c"]

    asyncio.run(scenario())
    assert "the last board lists what runs: 3 attempts" in caplog.text


def test_without_snapshot_board_and_beginning_nobody_knows_what_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        await site_with_history(tmp_path)
        for name in ("snapshot", "board"):
            shutil.rmtree(tmp_path / name)
        work = await drained(pipeline(tmp_path, ManualClock(NOW_MS), inbox=True))
        await work.tick()
        meta = board(work).json("meta")
        assert (meta["occupancy_known"], meta["occupancy_unknown"]) == (False, UNKNOWN)
        await work.save()
        again = pipeline(tmp_path, ManualClock(NOW_MS), inbox=True)
        await again.tick()
        assert board(again).json("meta")["occupancy_known"] is False  # a restart makes nobody wiser

    asyncio.run(scenario())


def test_a_new_site_and_one_that_holds_all_its_events_know_what_runs(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = Config(state=str(tmp_path))
        await tell(config, started("a", (0,)))
        work = await drained(pipeline(tmp_path, ManualClock(NOW_MS), inbox=True))
        await work.save()
        shutil.rmtree(tmp_path / "snapshot")
        again = await drained(pipeline(tmp_path, ManualClock(NOW_MS), inbox=True))
        await again.tick()
        assert running(again) == ["a"]
        assert board(again).json("meta")["occupancy_known"] is True

    asyncio.run(scenario())


@pytest.mark.parametrize("name", ["state.arrays", "store/state.arrays", "jobs/000001.jobs"])
def test_a_broken_snapshot_costs_nothing(tmp_path: Path, name: str) -> None:
    async def scenario() -> None:
        config = await site_with_history(tmp_path)
        await tell(config, started("d", (5,)))
        newest = max(int(path.name) for path in (tmp_path / "snapshot").iterdir())
        path = tmp_path / "snapshot" / str(newest) / name
        path.unlink()
        work = await drained(pipeline(tmp_path, ManualClock(NOW_MS), inbox=True))
        assert running(work) == ["a", "b", "c", "d"]

    asyncio.run(scenario())


def test_another_interval_costs_the_samples_and_not_the_jobs(tmp_path: Path) -> None:
    async def scenario() -> None:
        config = await site_with_history(tmp_path)
        other = msgspec.structs.replace(config, scrape=ScrapeConfig(interval_s=30.0))
        work = Pipeline(other, ManualClock(NOW_MS), topology(), lambda _: [InboxSource(config.inbox)])
        await drained(work)
        await work.tick()
        assert running(work) == ["a", "b", "c"]
        assert work.state.store.span.interval_ms == 30_000

    asyncio.run(scenario())


# -- generations ----------------------------------------------------------------------------------------------------


def test_generations_go_on_after_a_restart(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        work = pipeline(tmp_path, ManualClock(NOW_MS))
        for _ in range(2):
            work.state.entities.find_or_add_node(f"new{len(seen)}")
            asyncio.run(work.tick())
            seen.append(board(work).json("meta")["generation"])
    assert seen == sorted(set(seen))


def test_generations_go_on_where_only_the_snapshot_is_left(tmp_path: Path) -> None:
    work = pipeline(tmp_path, ManualClock(NOW_MS))
    for number in range(5):
        work.state.entities.find_or_add_node(f"new{number}")
        asyncio.run(work.tick())
    asyncio.run(work.save())
    last = board(work).json("meta")["generation"]
    shutil.rmtree(tmp_path / "board")
    again = pipeline(tmp_path, ManualClock(NOW_MS))
    asyncio.run(again.tick())
    assert board(again).json("meta")["generation"] > last


# -- the clock ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [-30, -0.01, 0.01, 5])
def test_a_step_of_the_clock_blocks_no_sample_and_accuses_nobody(
    tmp_path: Path, hours: float, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    live(work, 600)
    assert flagged(work) == []
    clock.time_ms += round(hours * HOUR)
    asyncio.run(work.tick())
    assert flagged(work) == []
    assert board(work).array("gpu.usable").all()
    assert board(work).as_of_ms == clock.now_ms()
    assert all(0 <= age <= 60 for age in ages(work))
    taken = work.state.counts.samples
    live(work, 120)
    assert work.state.counts.samples - taken == 8 * 3 * (2 * 8 + 1)
    assert work.state.counts.late == 0
    assert flagged(work) == []
    assert all(0 <= age <= 15 for age in ages(work))
    assert f"the clock was set {'back' if hours < 0 else 'ahead'} by" in caplog.text
    assert board(work).json("meta")["warming"]["have_s"] in range(700, 1000) if hours < 0 else True


@pytest.mark.parametrize("hours", [-5, 5])
def test_who_was_silent_stays_so_over_a_step(tmp_path: Path, hours: float) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    live(work, 600)
    live(work, 300, silent=("n2",))
    assert flagged(work) == ["n2"]
    clock.time_ms += round(hours * HOUR)
    asyncio.run(work.tick())
    assert flagged(work) == ["n2"]
    live(work, 120, silent=("n2",))
    assert flagged(work) == ["n2"]
    live(work, 120)
    assert flagged(work) == []


def test_a_clock_that_was_set_back_while_we_were_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    live(work, 600)
    asyncio.run(work.save())
    clock.time_ms -= 3 * HOUR
    again = pipeline(tmp_path, clock)
    asyncio.run(again.tick())
    assert flagged(again) == []
    live(again, 60)
    assert again.state.counts.late == 0
    assert "the clock was set back by 10800 s" in caplog.text


def test_hours_without_us_make_nobody_silent(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    live(work, 600)
    live(work, 300, silent=("n2",))
    asyncio.run(work.save())
    clock.advance(4 * 3600)
    again = pipeline(tmp_path, clock)
    clock.advance(5)
    asyncio.run(again.tick())
    assert flagged(again) == ["n2"]
    assert board(again).array("gpu.usable").all()
    live(again, 30, silent=("n2", "n3"))  # n3 comes back a little later
    assert flagged(again) == ["n2"]


def test_a_step_back_while_the_rules_are_at_work_moves_what_they_remember(tmp_path: Path) -> None:
    async def scenario() -> None:
        clock = ManualClock(NOW_MS)
        work = pipeline(tmp_path, clock)
        for _ in range(20):
            clock.advance(15)
            scrape(work)
        await work.tick()
        tick = asyncio.create_task(work.tick())
        await asyncio.sleep(0)
        clock.time_ms -= HOUR
        scrape(work)
        await tick
        await work.tick()
        assert max(memory.tick_ms for memory in work.memory.rules.values()) <= clock.now_ms()
        assert max(memory.sample_ms.max(initial=0) for memory in work.memory.rules.values()) <= clock.now_ms()

    asyncio.run(scenario())


def test_a_process_that_stood_still_accuses_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    live(work, 600)
    work.time.record_standstill()
    still = __import__("time").monotonic() + 7200
    monkeypatch.setattr("fleetcast.service.pipeline.pipeline_clock.time.monotonic", lambda: still)
    clock.advance(7200)
    work.time.record_standstill()
    asyncio.run(work.tick())
    assert flagged(work) == []
    assert "this process stood still for 7200 s" in caplog.text


# -- the memory of the rules ----------------------------------------------------------------------------------------


def test_what_the_rules_had_firmly_seen_survives_a_restart(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    live(work, 120)
    row = work.state.entities.add_to_node(GPU, "n3", 4)
    clock.advance(15)
    work.apply_batch(Batch(samples=(SampleBatch.from_rows(GPU, [(XID, row, clock.now_ms(), 79.0)]),)))
    asyncio.run(work.tick())
    assert flagged(work) == ["n3"]
    asyncio.run(work.save())
    again = pipeline(tmp_path, clock)
    asyncio.run(again.tick())
    assert flagged(again) == ["n3"]
    assert again.memory.faults.dump() == work.memory.faults.dump()


def test_jobs_at_rest_wake_for_their_late_events(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    ranks = (RankPlacement(0, "n1", (0, 1)),)
    told = (
        Started(job="j", sequence=1, time_ms=NOW_MS, ranks=ranks),
        Finished(job="j", sequence=2, time_ms=NOW_MS + MINUTE),
    )
    work.apply_batch(Batch(events=told))
    clock.advance(3 * 3600)
    asyncio.run(work.save())
    assert list(work.state.jobs.resting) == ["j"]
    again = pipeline(tmp_path, clock)
    again.apply_batch(Batch(events=told))
    again.apply_batch(Batch(events=(Finished(job="j", sequence=3, time_ms=NOW_MS + 2 * MINUTE),)))
    assert (again.state.counts.events, again.state.counts.duplicates) == (1, 2)
    minutes = again.state.demand.read_series("all", "running", clock.now_ms(), 60, 240)
    assert [value for value in minutes.tolist() if value > 0] == [2.0, 2.0]
