"""The archive beside a pipeline: once whatever is killed, sources wait for the disk, snapshots do, too."""

import asyncio
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import duckdb
import pytest

from fleetcast.fleet import files
from fleetcast.fleet.clock import ManualClock, SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.archive.archive import BYTES_AN_EVENT, ArchiveHealth
from fleetcast.ingest.archive.compact import write_merged_file
from fleetcast.ingest.archive.files import HOUR_MS, format_day
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.service.config import ArchiveConfig, Config, PipelineConfig
from fleetcast.service.pipeline import archive_writer, guarded_source
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.service.archive_kills import BATCHES, METRICS, events_of, samples_of

ROOT = Path(__file__).resolve().parents[3]
NOW_MS = 1_789_000_000_000
POWER = find_metric_row(EntityKind.GPU, "power_w")
KILLS = 10


def count(folder: Path, what: str, dataset: str = "samples") -> Any:
    return duckdb.sql(f"SELECT {what} FROM read_parquet('{folder}/archive/{dataset}/**/*.parquet')").fetchall()[0]


def test_killed_at_any_moment_each_sample_and_event_is_there_once(tmp_path: Path) -> None:
    t0 = time.time_ns() // 1_000_000 // 3_600_000 * 3_600_000 - 5 * 3_600_000
    command = [sys.executable, "-m", "tests.service.archive_kills", str(tmp_path), str(KILLS), "1", str(t0)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    produced = {(metric, gpu, ms) for number in range(BATCHES) for metric, gpu, ms, _ in samples_of(number, t0)}
    assert len(produced) == BATCHES * 4 * len(METRICS) + BATCHES // 5 * len(METRICS)
    told = count(tmp_path, "count(*), count(DISTINCT (kind, metric, entity, time_ms)), count(DISTINCT metric)")
    assert told == (len(produced), len(produced), len(METRICS))
    told = count(tmp_path, "count(*), count(DISTINCT (of, name, attempt, source, sequence))", "events")
    assert told == (BATCHES * len(events_of(0, t0)),) * 2
    assert count(tmp_path, "sum(value)")[0] == sum(
        number * 4.0 * len(METRICS) - (number % 5 == 4) * len(METRICS) for number in range(BATCHES)
    )
    compacted = [path for path in (tmp_path / "archive").rglob("*.parquet") if path.stem.count("-") == 3]
    assert compacted


def pipeline_of(folder: Path, source: MemorySource, **archive: Any) -> Pipeline:
    config = Config(state=str(folder), archive=ArchiveConfig(**archive), pipeline=PipelineConfig(snapshot_s=3600))
    topology = Topology.build([NodeSpec("n1", 8)])
    return Pipeline(config, SystemClock(), topology, lambda _: [source])


def fleet(entities: Entities, size: int) -> list[int]:
    return [entities.add_to_node(EntityKind.GPU, "n1", index) for index in range(size)]


def batches(number: int, size: int) -> list[Batch]:
    """`number` scrapes of `size` GPUs."""
    gpus = fleet(Entities(), size)
    rows = [[(POWER, gpu, NOW_MS + batch, 400.0) for gpu in gpus] for batch in range(number)]
    return [Batch(samples=(SampleBatch.from_rows(EntityKind.GPU, same),)) for same in rows]


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.01)


def test_sources_wait_while_the_disk_takes_nothing_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        source = MemorySource(batches(40, 3000))
        pipeline = pipeline_of(tmp_path, source, buffer_bytes=2**20, keep_days=0)
        fleet(pipeline.state.entities, 3000)
        archive = pipeline.archive_writer.archive
        assert archive is not None
        with monkeypatch.context() as broken:
            broken.setattr(archive.files, "write_file", full)
            broken.setattr("fleetcast.service.pipeline.archive_writer.RETRY_WALL_S", (0.05, 0.05))
            work = asyncio.create_task(pipeline.run())
            await until(lambda: pipeline.archive_writer.is_full and bool(archive.health().failing))
            await asyncio.sleep(0.2)
            held = source.position()["next"]
            assert held <= 17  # 23 bytes a row, 1 MiB
            with pytest.raises(OSError, match="No space left"):
                await pipeline.save()
            assert pipeline.snapshot.list_numbers() == []
        await until(lambda: source.position()["next"] == 40)
        await pipeline.save()
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
        await pipeline.close()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asyncio.run(story())
    assert count(tmp_path, "count(*), count(DISTINCT (entity, time_ms))") == (120_000, 120_000)
    assert "a source is held up" in caplog.text
    assert "cannot write the archive" in caplog.text


def test_the_first_board_waits_for_a_source_that_the_archive_holds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_source, "CATCH_UP_POLL_S", 0)
    looks, held_until = 0, 3 * guarded_source.CATCH_UP_POLLS

    def backlog_bytes() -> int:
        nonlocal looks
        looks += 1
        return 100 if looks <= held_until else 0

    source: Any = SimpleNamespace(backlog_bytes=backlog_bytes)
    asyncio.run(guarded_source.wait_for_backlog([source], lambda: looks <= held_until))
    assert looks == held_until + 1
    torn: Any = SimpleNamespace(backlog_bytes=lambda: 100)
    asyncio.run(guarded_source.wait_for_backlog([torn], lambda: False))


def test_the_writer_sets_no_timer_while_nothing_is_due(tmp_path: Path) -> None:
    async def story() -> None:
        history = pipeline_of(tmp_path, MemorySource(), buffer_bytes=4 * BYTES_AN_EVENT).archive_writer
        archive = history.archive
        assert archive is not None
        work = asyncio.create_task(history.flush_forever())
        archive.add_event(Submitted(job="j", sequence=1, time_ms=NOW_MS))
        await asyncio.sleep(0)
        assert (archive.is_due, asyncio.get_running_loop()._scheduled) == (False, [])  # type: ignore[attr-defined]
        archive.add_event(Submitted(job="j", sequence=2, time_ms=NOW_MS))
        await until(lambda: archive.counts.events == 2)
        work.cancel()

    asyncio.run(story())


def test_rows_of_a_failed_snapshot_are_flushed_without_an_addition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        history = pipeline_of(tmp_path, MemorySource(), buffer_bytes=1).archive_writer
        archive = history.archive
        assert archive is not None
        archive.add_event(Submitted(job="j", sequence=1, time_ms=NOW_MS))
        flush = history.prepare_flush()
        work = asyncio.create_task(history.flush_forever())
        await until(lambda: not history._is_due.is_set())  # it has found nothing to write
        with monkeypatch.context() as broken:
            broken.setattr(archive.files, "write_file", full)
            with pytest.raises(OSError, match="No space left"):
                await history.run_flush(flush)
        await until(lambda: archive.counts.events == 1)
        work.cancel()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    asyncio.run(story())


def test_who_waits_for_room_is_held_up_until_it_goes_on(tmp_path: Path) -> None:
    async def story() -> None:
        history = pipeline_of(tmp_path, MemorySource(), buffer_bytes=1).archive_writer
        assert history.archive is not None
        assert not history.delays_sources
        history.archive.add_event(Submitted(job="j", sequence=1, time_ms=NOW_MS))
        waits = asyncio.create_task(history.wait_for_room())
        await asyncio.sleep(0)
        async with history.still:
            await history.run_flush(
                history.prepare_flush()
            )  # its end wakes the waiting task, which runs after the assertion
        assert (history.is_full, history.delays_sources) == (False, True)
        await waits
        assert not history.delays_sources

    asyncio.run(story())


def test_a_snapshot_holds_no_position_whose_samples_are_in_no_file(tmp_path: Path) -> None:
    async def story() -> None:
        pipeline = pipeline_of(tmp_path, MemorySource(batches(3, 10)), keep_days=0)
        fleet(pipeline.state.entities, 10)
        for _ in range(3):
            pipeline.apply_batch(await pipeline.sources[0].next())
        await pipeline.save()
        again = pipeline_of(tmp_path, MemorySource(batches(3, 10)), keep_days=0)
        assert again.sources[0].position() == {"next": 3}

    asyncio.run(story())
    assert count(tmp_path, "count(*)") == (30,)


def test_rows_are_written_while_a_snapshot_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large fleet fills the buffer in less time than its snapshot takes."""

    async def story() -> None:
        first, later = batches(2, 10)
        pipeline = pipeline_of(tmp_path, MemorySource(), keep_days=0)
        fleet(pipeline.state.entities, 10)
        save, released = pipeline.snapshot.save, asyncio.Event()

        async def slow(*of: Any) -> Any:
            await released.wait()
            return await save(*of)

        monkeypatch.setattr(pipeline.snapshot, "save", slow)
        pipeline.apply_batch(first)
        saving = asyncio.create_task(pipeline.save())
        await until(lambda: written(pipeline) == 10)
        pipeline.apply_batch(later)
        async with asyncio.timeout(20):
            await pipeline.archive_writer.flush()
        assert written(pipeline) == 20
        assert not saving.done()
        released.set()
        await saving
        await pipeline.close()

    asyncio.run(story())
    assert count(tmp_path, "count(*), count(DISTINCT (entity, time_ms))") == (20, 20)


def test_rows_are_written_while_a_snapshot_waits_for_a_demand_forecast(tmp_path: Path) -> None:
    async def story() -> None:
        first, later = batches(2, 10)
        pipeline = pipeline_of(tmp_path, MemorySource(), keep_days=0)
        fleet(pipeline.state.entities, 10)
        pipeline.apply_batch(first)
        async with pipeline.capabilities[DemandForecasts].free:  # as a forecast holds it
            saving = asyncio.create_task(pipeline.save())
            await asyncio.sleep(0.05)
            async with asyncio.timeout(5):
                await pipeline.archive_writer.flush()
            assert written(pipeline) == 10
            pipeline.apply_batch(later)
            assert not saving.done()
        await saving
        assert written(pipeline) == 20  # a snapshot writes what arrived up to its positions
        await pipeline.close()

    asyncio.run(story())
    assert count(tmp_path, "count(*), count(DISTINCT (entity, time_ms))") == (20, 20)


class Compacting:
    """A pipeline with two files of an hour, and a merge of them that waits at a step until it may go on."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pipeline = pipeline_of(folder, MemorySource(), keep_days=0)
        fleet(self.pipeline.state.entities, 10)
        archive = self.pipeline.archive_writer.archive
        assert archive is not None
        self.archive = archive
        self.began, self.released = threading.Event(), threading.Event()
        monkeypatch.setattr(archive_writer, "RECENT_DAYS", 1)
        monkeypatch.setattr(archive_writer, "CLOSED_MS", -10 * HOUR_MS)
        monkeypatch.setattr(archive_writer, "format_day", lambda ms: format_day(NOW_MS))

    def pause(self) -> None:
        """Wait, in the thread of the merge."""
        self.began.set()
        assert self.released.wait(20)

    async def begin(self, *rows: Batch) -> asyncio.Task[None]:
        """Flush each batch into a file of its own, and compact them up to the pause."""
        for batch in rows:
            self.pipeline.apply_batch(batch)
            await self.pipeline.archive_writer.flush()
        tidying = asyncio.create_task(self.pipeline.archive_writer.compact_and_prune(self.archive))
        await until(self.began.is_set)
        return tidying

    async def end(self, tidying: asyncio.Task[None]) -> None:
        assert not tidying.done()
        self.released.set()
        await tidying
        assert len(self.archive.files.list_files("samples")) == 2  # the one that both became, and the later one
        await self.pipeline.close()


def test_rows_are_written_while_an_hour_is_compacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        world = Compacting(tmp_path, monkeypatch)

        def slow(*of: Any) -> Any:
            world.pause()
            return write_merged_file(*of)

        monkeypatch.setattr(archive_writer, "write_merged_file", slow)
        first, second, later = batches(3, 10)
        tidying = await world.begin(first, second)
        world.pipeline.apply_batch(later)
        async with asyncio.timeout(20):
            await world.pipeline.archive_writer.flush()
        assert written(world.pipeline) == 30
        await world.end(tidying)

    asyncio.run(story())
    assert count(tmp_path, "count(*), count(DISTINCT (entity, time_ms))") == (30, 30)


@pytest.mark.parametrize("at", ["half of the file is written", "the file is ready"])
def test_a_flush_after_a_failed_one_leaves_a_running_merge_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, at: str
) -> None:
    async def story() -> None:
        world = Compacting(tmp_path, monkeypatch)
        put, rename = world.archive.files.write_file, files.rename

        def merge_and_wait(*of: Any) -> Any:
            ready = write_merged_file(*of)
            world.pause()
            return ready

        def wait_and_rename(path: Path, to: Path, area: str) -> None:
            if to.name.endswith(".ready"):
                world.pause()
            rename(path, to, area)

        def full(*_: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        if at == "the file is ready":
            monkeypatch.setattr(archive_writer, "write_merged_file", merge_and_wait)
        else:
            monkeypatch.setattr(files, "rename", wait_and_rename)
        first, second, later = batches(3, 10)
        tidying = await world.begin(first, second)
        world.pipeline.apply_batch(later)
        monkeypatch.setattr(world.archive.files, "write_file", full)
        with pytest.raises(OSError, match="No space left"):
            await world.pipeline.archive_writer.flush()
        monkeypatch.setattr(world.archive.files, "write_file", put)
        await world.pipeline.archive_writer.flush()
        assert written(world.pipeline) == 30
        await world.end(tidying)

    asyncio.run(story())
    assert count(tmp_path, "count(*), count(DISTINCT (entity, time_ms))") == (30, 30)
    assert "cannot compact" not in caplog.text


def written(pipeline: Pipeline) -> int:
    health = pipeline.archive_writer.health()
    assert health is not None
    return health.rows


def test_it_can_be_turned_off_and_lie_elsewhere(tmp_path: Path) -> None:
    async def story(**archive: Any) -> ArchiveHealth | None:
        pipeline = pipeline_of(tmp_path / "state", MemorySource(), **archive)
        fleet(pipeline.state.entities, 10)
        pipeline.apply_batch(batches(1, 10)[0])
        await pipeline.save()
        await pipeline.close()
        return pipeline.archive_writer.health()

    assert asyncio.run(story(enabled=False)) is None
    assert not (tmp_path / "state" / "archive").exists()
    health = asyncio.run(story(url=str(tmp_path / "elsewhere"), keep_days=0))
    assert health is not None
    assert list((tmp_path / "elsewhere").rglob("*.parquet"))


def test_a_clock_that_is_set_back_brings_no_row_twice(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    pipeline = Pipeline(Config(state=str(tmp_path)), clock, Topology.build([NodeSpec("n1", 8)]), lambda _: [])
    gpu = pipeline.state.entities.add_to_node(EntityKind.GPU, "n1", 0)

    def scrape() -> None:
        row = (POWER, gpu, clock.now_ms(), 400.0)
        pipeline.apply_batch(Batch(samples=(SampleBatch.from_rows(EntityKind.GPU, [row]),)))

    for _ in range(20):
        clock.advance(15)
        scrape()
    clock.advance(-150)
    for _ in range(12):
        clock.advance(15)
        scrape()
    asyncio.run(pipeline.save())
    assert count(tmp_path, "count(*), count(DISTINCT time_ms)") == (22, 22)


def test_hours_are_compacted_by_who_has_written_under_the_name(tmp_path: Path) -> None:
    async def story() -> list[int]:
        pipeline = pipeline_of(tmp_path, MemorySource(), keep_days=0)
        fleet(pipeline.state.entities, 10)
        for batch in batches(2, 10):
            pipeline.apply_batch(batch)
            await pipeline.save()
        await pipeline.close()
        again = Pipeline(pipeline.config, ManualClock(NOW_MS + 7_200_000), Topology.build([]), lambda _: [])
        archive, numbers = again.archive_writer.archive, []
        assert archive is not None
        for work in (asyncio.sleep(0), again.save()):
            await work
            await again.archive_writer.compact_and_prune(archive)
            numbers.append(len(archive.files.list_files("samples")))
        await again.close()
        return numbers

    assert asyncio.run(story()) == [2, 1]
