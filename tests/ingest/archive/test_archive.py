"""The archive holds what it was given once: replayed, late, killed in between, on a disk that is full."""

import errno
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import Finished, JobEvent, NodeEvent, Queued, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.archive.archive import Archive, ArchiveLimits
from fleetcast.ingest.archive.compact import compact, delete_days, find_compaction_runs, list_old_days
from fleetcast.ingest.archive.files import DAY_MS, HOUR_MS, ArchiveFiles, FileName, drop_superseded_files
from fleetcast.ingest.archive.read import ArchiveSpan, find_newest_ms, read_events, read_samples
from fleetcast.ingest.archive.rows import METRIC_NAMES, NameLookups, make_row_lookup

T0 = 1_795_276_800_000  # an hour begins
POWER = find_metric_row(EntityKind.GPU, "power_w")
TOPOLOGY = Topology.build([NodeSpec("n1", 8, domains={Level.BLOCK: "b1"}), NodeSpec("n2", 8)])

Row = tuple[int, float]  # seconds after T0, value; of n1/0


class World:
    """An archive of a small fleet, and what a reader finds there."""

    def __init__(self, folder: Path, url: str = "", saved_ms: int = 0, **limits: int) -> None:
        self.folder = folder
        self.entities = Entities()
        for node in TOPOLOGY.names:
            self.entities.find_or_add_node(node)
        self.gpus = [self.entities.add_to_node(EntityKind.GPU, node, 0) for node in TOPOLOGY.names]
        self.files = ArchiveFiles(url or str(folder))
        self.archive = Archive(self.files, self.entities, limits=ArchiveLimits(**limits), saved_ms=saved_ms)
        self.now_ms = T0 + HOUR_MS

    def add(self, rows: Iterable[Row], *, sure: bool = True, gpu: int = 0) -> None:
        batch = SampleBatch.from_rows(
            EntityKind.GPU, [(POWER, self.gpus[gpu], T0 + round(second * 1000), value) for second, value in rows]
        )
        self.archive.add(batch, np.full(len(batch), sure))

    def flush(self) -> None:
        self.archive.prepare_flush(TOPOLOGY, self.now_ms)()

    def rows(self) -> list[Row]:
        """What DuckDB sees, by time and value."""
        found = duckdb.sql(
            f"SELECT time_ms, value FROM read_parquet('{self.folder}/samples/**/*.parquet') ORDER BY 1, 2"
        )
        return [((time_ms - T0) / 1000, value) for time_ms, value in found.fetchall()]

    def died(self, saved_ms: int = 0) -> "World":
        """The same folder under the next process, which goes on from a snapshot of that time, or from none."""
        self.archive.close()
        return World(self.folder, saved_ms=saved_ms)

    def tell(self, events: Iterable[JobEvent | NodeEvent]) -> None:
        """What the job table took, and a flush of it."""
        for event in events:
            self.archive.add_event(event)
        self.flush()

    def compact(self) -> None:
        for run in find_compaction_runs(self.files, "0", T0 + DAY_MS, most_rows=10**6):
            compact(self.files, run)

    def events(self) -> list[tuple[str, int]]:
        """Name and sequence of every row that DuckDB sees, in order."""
        found = duckdb.sql(f"SELECT name, sequence FROM read_parquet('{self.folder}/events/**/*.parquet')")
        return sorted(found.fetchall())


def all_names(world: World) -> list[FileName]:
    return [*world.files.list_files("samples"), *world.files.list_files("events")]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_rows_come_back_by_day_and_block_exactly_as_they_were(world: World) -> None:
    values = [0.1, 1 / 3, 412.123456789, -0.0, 5e-324]
    world.add([(0.001, values[0]), (15.25, values[1]), (30, values[2])])
    world.add([(0, values[3]), (DAY_MS / 1000, values[4])], gpu=1)
    world.flush()
    paths = sorted(str(path.parent.relative_to(world.folder)) for path in world.folder.rglob("*.parquet"))
    assert paths == [
        "samples/day=2026-11-21/block=b1",
        "samples/day=2026-11-21/block=unplaced",
        "samples/day=2026-11-22/block=unplaced",
    ]
    assert world.rows() == [(0, -0.0), (0.001, 0.1), (15.25, 1 / 3), (30, 412.123456789), (86400, 5e-324)]
    found = duckdb.sql(
        f"SELECT DISTINCT kind, metric, entity, block FROM read_parquet('{world.folder}/samples/**/*.parquet',"
        " hive_partitioning = true) ORDER BY entity"
    ).fetchall()
    assert found == [("gpu", "power_w", "n1/0", "b1"), ("gpu", "power_w", "n2/0", "unplaced")]


def test_a_repeat_is_dropped_in_one_flush_and_across_flushes(world: World) -> None:
    world.add([(15, 1.0), (30, 2.0), (15, 9.0)])
    world.flush()
    world.add([(15, 8.0), (20, 3.0), (20, 4.0)], sure=False)
    world.add([(45, 5.0)])
    world.flush()
    world.flush()  # of nothing
    assert world.rows() == [(15, 1.0), (20, 3.0), (30, 2.0), (45, 5.0)]
    assert world.archive.counts.repeats == 3
    assert world.archive.counts.rows == 4


def test_what_is_replayed_after_a_crash_is_there_once(world: World) -> None:
    world.add([(15, 1.0), (30, 2.0)])
    world.flush()
    again = world.died()
    again.add([(15, 1.0), (30, 2.0), (45, 3.0)])  # the store of an old snapshot is sure of all of them
    again.flush()
    assert again.rows() == [(15, 1.0), (30, 2.0), (45, 3.0)]


def test_a_full_disk_keeps_the_rows_and_the_next_flush_writes_each_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, puts = world.files.write_file, []

    def full(name: FileName, data: Any) -> None:
        puts.append(name)
        if len(puts) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(name, data)

    world.add([(15, 1.0)])
    world.add([(15, 2.0)], gpu=1)
    world.archive.add_event(Submitted(job="a", sequence=1, time_ms=T0))
    monkeypatch.setattr(world.files, "write_file", full)
    with pytest.raises(OSError, match="No space left"):
        world.flush()
    assert len(puts) == 2
    assert world.archive.nbytes > 0
    assert "No space left" in world.archive.health().failing
    monkeypatch.undo()
    world.add([(30, 3.0)])
    world.flush()
    assert world.rows() == [(15, 1.0), (15, 2.0), (30, 3.0)]
    assert world.archive.nbytes == 0
    assert world.archive.health().failing == ""


def test_a_file_that_breaks_off_is_no_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    world.add([(15, 1.0)])
    monkeypatch.setattr("os.replace", crash)
    with pytest.raises(OSError, match="Input/output"):
        world.flush()
    assert [path for path in world.folder.rglob("*") if path.is_file() and path.suffix != ".lock"] == []


def test_it_says_when_it_should_be_written_and_when_it_is_full(tmp_path: Path) -> None:
    world = World(tmp_path, buffer_bytes=2**20)
    world.add([(second, 1.0) for second in range(12_000)])
    assert (world.archive.is_due, world.archive.is_full) == (True, False)
    world.add([(second, 1.0) for second in range(36_000)])
    assert world.archive.is_full
    world.flush()
    assert (world.archive.is_due, world.archive.is_full, world.archive.nbytes) == (False, False, 0)


def test_events_are_there_once_and_whole(world: World) -> None:
    told = [
        Submitted(job="a", sequence=1, time_ms=T0, queue="train", gang=4),
        NodeEvent(node="n1", source="admin", sequence=7, time_ms=T0 + 5, type="drain", message="räumen"),
        Finished(job="a", attempt=2, sequence=9, time_ms=T0 + HOUR_MS),
    ]
    for event in told:
        world.archive.add_event(event)
    world.flush()
    again = world.died()
    for event in told:
        again.archive.add_event(event)
    again.archive.add_event(Finished(job="b", sequence=9, time_ms=T0 + 7))
    again.flush()
    events, bad = read_events(again.files, ArchiveSpan(T0, T0 + DAY_MS))
    assert (events[0], events[1], events[3], bad) == (*told, [])
    assert len(events) == 4
    found = duckdb.sql(
        f"SELECT of, name, type FROM read_parquet('{world.folder}/events/**/*.parquet') ORDER BY time_ms"
    )
    assert found.fetchall()[:2] == [("job", "a", "submitted"), ("node", "n1", "drain")]


def test_events_of_a_life_without_a_snapshot_are_there_once_whatever_the_lives_after_it_saved(world: World) -> None:
    told = [Finished(job="a", sequence=number, time_ms=T0 + HOUR_MS - 10 + number) for number in range(20)]
    world.tell(told[:2])  # and a snapshot
    second = world.died(saved_ms=T0)
    second.tell(told[2:20])  # and no snapshot
    third = second.died(saved_ms=T0)
    third.tell(told[2:5])  # it was told no more when its snapshot was taken, later than the second's files
    third.compact()
    fourth = third.died(saved_ms=T0 + 2 * HOUR_MS)
    fourth.tell(told[5:12])
    fourth.tell(told[12:])
    assert fourth.events() == [("a", number) for number in range(20)]
    assert fourth.archive.counts.repeats == 15


def test_an_event_that_a_poll_tells_again_under_another_time_is_there_once(world: World) -> None:
    world.tell([Queued(job="old", sequence=2, time_ms=T0 - 5), Queued(job="a", sequence=2, time_ms=T0 + 7)])
    again = world.died(saved_ms=T0)
    again.tell([Queued(job="a", sequence=2, time_ms=T0 + HOUR_MS + 5), Queued(job="b", sequence=2, time_ms=T0 + 8)])
    again.tell([Queued(job="c", sequence=2, time_ms=T0 + HOUR_MS + 6)])
    assert again.events() == [("a", 2), ("b", 2), ("c", 2), ("old", 2)]


def test_an_event_that_the_job_table_has_forgotten_is_there_once(world: World) -> None:
    world.tell([Finished(job="a", sequence=1, time_ms=T0 + 7)])
    world.now_ms += 40 * DAY_MS
    world.tell([Finished(job="a", sequence=1, time_ms=T0 + 7), Finished(job="b", sequence=1, time_ms=world.now_ms)])
    assert world.events() == [("a", 1), ("b", 1)]


def test_a_damaged_newest_file_makes_every_row_of_its_hour_doubtful(world: World) -> None:
    for second in (0, 1):
        world.add([(second, 1.0)])
        world.tell([Finished(job="a", sequence=second, time_ms=T0 + second)])
    world.add([(3600, 1.0)])
    world.tell([Finished(job="a", sequence=2, time_ms=T0 + HOUR_MS)])
    newest = [name for name in all_names(world) if name.first_ms == T0 + HOUR_MS]
    for name in newest:
        (world.folder / name.path).write_bytes(b"")
    again = world.died(saved_ms=T0)
    again.add([(0, 1.0), (1, 1.0)])
    again.tell([Finished(job="a", sequence=second, time_ms=T0 + second) for second in (0, 1)])
    for name in newest:
        world.files.remove(name)
    assert (again.rows(), again.events()) == ([(0, 1.0), (1, 1.0)], [("a", 0), ("a", 1)])


def test_compaction_leaves_an_hour_alone_in_which_a_file_came_to_be_meanwhile(world: World) -> None:
    for number in (1, 3, 5):
        world.add([(number, 1.0)])
        world.flush()
    path = world.folder / world.files.list_files("samples")[1].path
    aside = path.rename(world.folder / "aside")
    (run,) = find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=100)
    aside.rename(path)
    with pytest.raises(ValueError, match="3 files now, not the 2"):
        compact(world.files, run)
    assert world.rows() == [(1, 1.0), (3, 1.0), (5, 1.0)]


def test_compaction_changes_no_row_and_leaves_one_file(world: World) -> None:
    for minute in range(5):
        world.add([(minute * 60 + second, float(minute)) for second in range(0, 60, 15)])
        world.archive.add_event(Finished(job=f"j{minute}", sequence=1, time_ms=T0 + minute))
        world.flush()
    before = world.rows()
    for run in find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=10**6):
        compact(world.files, run)
    assert world.rows() == before
    assert [len(world.files.list_files(dataset)) for dataset in ("samples", "events")] == [1, 1]
    world.add([(61, 7.0), (60, 7.0)], sure=False)  # looked up in the compacted file
    world.flush()
    assert world.rows() == sorted([*before, (61, 7.0)])
    assert (
        find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=10**6, days=["2026-11-21"]) == []
    )  # too little to do it again
    for run in find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=10**6):
        compact(world.files, run)
    assert (len(world.files.list_files("samples")), len(world.rows())) == (1, 21)
    assert len(read_events(world.files, ArchiveSpan(T0, T0 + 5))[0]) == 5


def test_a_large_hour_becomes_several_files_and_an_open_one_stays(world: World) -> None:
    for minute in range(6):
        world.add([(minute, 1.0), (minute + 0.5, 1.0)])
        world.flush()
    assert find_compaction_runs(world.files, "0", T0 + HOUR_MS - 1, most_rows=100) == []
    for run in find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=4):
        compact(world.files, run)
    assert (len(world.files.list_files("samples")), len(world.rows())) == (3, 12)


@pytest.mark.parametrize("moment", ["ready", "one part gone", "no part left", "both"])
def test_a_compaction_that_was_killed_shows_each_row_once_and_is_finished(
    world: World, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for minute in range(3):
        world.add([(minute, 1.0)])
        world.flush()
    (run,) = find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=100)
    if moment == "both":  # an object store copies, then deletes
        monkeypatch.setattr(world.files._fs, "mv", shutil.copyfile)
    else:
        monkeypatch.setattr(world.files, "replace_superseded_files", lambda _: None)
    compact(world.files, run)
    for name in run.names[: {"ready": 0, "one part gone": 1}.get(moment, 3)]:
        world.files.remove(name)
    monkeypatch.undo()
    words = NameLookups(make_row_lookup(Entities()))
    assert len(read_samples(world.files, ArchiveSpan(T0, T0 + DAY_MS), words)) == 3
    again = world.died()
    again.add([(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)])
    again.flush()
    assert again.rows() == [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)]
    assert not [name for name in again.files.list_files("samples") if name.ready]
    assert len(again.files.list_files("samples")) == 2


def test_a_metric_that_the_catalogue_lost_survives_compaction(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add([(0, 1.0)])
    world.flush()
    world.add([(1, 1.0)])
    world.flush()
    monkeypatch.setattr("fleetcast.ingest.archive.rows._METRIC_AT", {})
    monkeypatch.setattr("fleetcast.ingest.archive.compact.METRIC_NAMES", ())
    for run in find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=100):
        compact(world.files, run)
    found = duckdb.sql(f"SELECT DISTINCT metric FROM read_parquet('{world.folder}/samples/**/*.parquet')").fetchall()
    assert found == [("power_w",)]


def test_another_process_may_not_write_under_the_same_name(world: World) -> None:
    world.folder.mkdir(exist_ok=True)
    holds = "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.lockf(f, fcntl.LOCK_EX); print(flush=True); input()"
    command = [sys.executable, "-c", holds, str(world.folder / ".0.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        world.add([(0, 1.0)])
        with pytest.raises(OSError, match="another process writes as '0'"):
            world.flush()
        other.communicate(b"\n")
    world.flush()
    assert world.rows() == [(0, 1.0)]


def test_days_that_are_too_old_go_and_are_not_written(tmp_path: Path) -> None:
    world = World(tmp_path, keep_days=2)
    world.add([(0, 1.0), (86_400, 2.0)])
    world.flush()
    assert list_old_days(world.files, T0 + 2 * DAY_MS, 2) == []
    assert list_old_days(world.files, T0 + 3 * DAY_MS, 2) == ["2026-11-21"]
    delete_days(world.files, list_old_days(world.files, T0 + 3 * DAY_MS, 2))
    assert world.rows() == [(86_400, 2.0)]
    world.now_ms = T0 + 4 * DAY_MS
    world.add([(-90_000, 1.0), (86_400 * 3, 3.0)])
    world.flush()
    assert world.rows() == [(86_400, 2.0), (86_400 * 3, 3.0)]
    assert world.archive.counts.too_old == 1


@pytest.mark.parametrize("damage", [b"", b"PAR1", b"PAR1" + b"x" * 3000 + b"PAR1"])
def test_a_damaged_file_is_said_and_holds_up_nobody(
    world: World, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for second in (0, 1, 2):
        world.add([(second, 1.0)])
        world.archive.add_event(Finished(job="a", sequence=second, time_ms=T0))
        world.flush()
    for dataset in ("samples", "events"):
        _, path, _ = sorted((world.folder / dataset).rglob("*.parquet"))
        path.write_bytes(damage)
    again = world.died()
    again.add([(0, 1.0), (2, 1.0), (3, 1.0)])
    again.flush()
    assert [run.names for run in find_compaction_runs(again.files, "0", T0 + HOUR_MS, most_rows=100)]
    words = NameLookups(make_row_lookup(Entities()))
    rows = read_samples(again.files, ArchiveSpan(T0, T0 + DAY_MS), words)
    assert sorted(rows.time_ms - T0) == [0, 2000, 3000]
    assert len(read_events(again.files, ArchiveSpan(T0, T0 + DAY_MS))[0]) == 2
    assert "is damaged" in caplog.text


def test_any_filesystem_will_do(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}"
    world = World(tmp_path, url)
    for second in (0, 15):
        world.add([(second, 1.0)])
        world.flush()
    for run in find_compaction_runs(world.files, "0", T0 + HOUR_MS, most_rows=100):
        compact(world.files, run)
    again = World(tmp_path, url)
    again.add([(0, 1.0), (15, 1.0), (30, 1.0)])
    again.flush()
    rows = read_samples(again.files, ArchiveSpan(T0, T0 + DAY_MS), NameLookups(make_row_lookup(Entities())))
    assert sorted(rows.time_ms.tolist()) == [T0, T0 + 15_000, T0 + 30_000]
    assert find_newest_ms(again.files) == T0 + 30_000
    with pytest.raises(ConfigError, match=r"archive\.url"):
        ArchiveFiles("nowhere://bucket")


def test_an_object_store_that_is_away_is_a_disk_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: object) -> None:
        raise RuntimeError("EndpointConnectionError")

    world = World(tmp_path, f"memory://{tmp_path.name}")
    world.add([(0, 1.0)])
    with monkeypatch.context() as broken:
        broken.setattr(world.files._fs, "pipe_file", away)
        with pytest.raises(OSError, match="EndpointConnectionError"):
            world.flush()
    world.flush()
    assert world.archive.counts.rows == 1


def test_names_say_what_stands_for_what() -> None:
    def name(first: int, last: int, *, ready: bool = False) -> FileName:
        return FileName("samples", "2026-11-21", "a b/c", 13, "0", first, last, ready)

    parts = [name(number, number) for number in (3, 5, 9)]
    for one in (*parts, name(3, 5), name(3, 9, ready=True)):
        assert FileName.parse(f"x/{one.path}") == one
    assert drop_superseded_files([*parts, name(3, 5)]) == [name(3, 5), name(9, 9)]
    assert drop_superseded_files([*parts, name(3, 5), name(3, 9, ready=True)]) == [name(3, 9, ready=True)]
    assert drop_superseded_files([name(3, 9), name(3, 9, ready=True)]) == [name(3, 9)]
    assert FileName.parse("samples/day=2026-11-21/block=b/13-0-5.csv") is None
    assert list(METRIC_NAMES) == sorted(METRIC_NAMES)
