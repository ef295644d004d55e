"""Saves that are killed, cut short or written at the same time, and what a start makes of what they left."""

import asyncio
import shutil
from pathlib import Path

import pytest

from fleetcast.features.co_runs import CoRuns
from fleetcast.fleet.events import Finished, NodeEvent, Started
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.service.config import Config
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.snapshot import SNAPSHOT_VERSION, SavedState, Snapshot

NOW_MS = 1_789_000_000_000
HOUR_MS = 3_600_000
CONFIG = Config()
TOPOLOGY = Topology.build([NodeSpec("n1", 8)])
FILES = (
    "state.arrays",
    "demand.arrays",
    "memory.arrays",
    "runs.arrays",
    "peaks.arrays",
    "run_times.arrays",
    "store/state.arrays",
    "store/000001.slots",
    "jobs/000001.jobs",
    "jobs/000002.jobs",
)
DAMAGES = ["missing", "empty", "half", "other byte"]


def restored(folder: Path) -> SavedState:
    return Snapshot(folder).restore(CONFIG, TOPOLOGY, NOW_MS)


def tell(kept: SavedState, *names: str) -> None:
    events = [Started(job=name, sequence=1, time_ms=NOW_MS, nodes=("n1",)) for name in names]
    kept.state.apply(Batch(events=tuple(events)), NOW_MS)


def with_jobs(folder: Path, *names: str) -> SavedState:
    kept = restored(folder)
    tell(kept, *names)
    return kept


def save(snapshot: Snapshot, kept: SavedState) -> None:
    asyncio.run(snapshot.save(kept))


def jobs(folder: Path) -> list[str]:
    return sorted(row.job for row in restored(folder).state.jobs)


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def three_saves(folder: Path) -> None:
    """Snapshot 3 holds the jobs a, b, c; 2 holds a, b; 1 is gone."""
    snapshot = Snapshot(folder)
    kept = snapshot.restore(CONFIG, TOPOLOGY, NOW_MS)
    for name in "abc":
        tell(kept, name)
        kept.positions = {"inbox": {"api-000000000001.seg": ord(name)}}
        save(snapshot, kept)


def test_the_last_two_snapshots_are_kept(tmp_path: Path) -> None:
    three_saves(tmp_path)
    assert folders(tmp_path) == ["2", "3"]
    assert jobs(tmp_path) == ["a", "b", "c"]


def test_only_what_the_older_one_covers_may_be_deleted(tmp_path: Path) -> None:
    snapshot, kept = Snapshot(tmp_path), restored(tmp_path)
    covered = []
    for offset in (10, 20, 30):
        kept.positions = {"inbox": {"api-000000000001.seg": offset}}
        covered.append(asyncio.run(snapshot.save(kept)))
    assert covered == [None, {"inbox": {"api-000000000001.seg": 10}}, {"inbox": {"api-000000000001.seg": 20}}]


def harm(path: Path, damage: str) -> None:
    data = path.read_bytes()
    path.unlink()  # the older one has a link to the same file
    if damage == "other byte":
        path.write_bytes(data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :])
    elif damage != "missing":
        path.write_bytes(data[: len(data) // 2] if damage == "half" else b"")


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_co_runs_begin_anew_and_all_else_stays(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    three_saves(tmp_path)
    harm(tmp_path / "3" / "co_runs.arrays", damage)
    kept = restored(tmp_path)
    assert sorted(row.job for row in kept.state.jobs) == ["a", "b", "c"]
    assert kept.parts[CoRuns].newest_co_runs == {}
    assert "co_runs of snapshot 3 cannot be used" in caplog.text


def test_damaged_timelines_begin_anew_and_all_else_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    three_saves(tmp_path)
    harm(tmp_path / "3" / "pasts.arrays", "half")
    kept = restored(tmp_path)
    assert sorted(row.job for row in kept.state.jobs) == ["a", "b", "c"]
    assert kept.parts[NodePasts].of == {}
    assert "pasts of snapshot 3 cannot be used" in caplog.text


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES)
def test_where_a_file_of_the_newest_is_damaged_the_one_before_it_serves(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    three_saves(tmp_path)
    harm(tmp_path / "3" / name, damage)
    kept = restored(tmp_path)
    names = sorted(row.job for row in kept.state.jobs)
    assert names == ["a", "b"]
    assert kept.positions == {"inbox": {"api-000000000001.seg": ord("b")}}
    assert "snapshot 3 cannot be used" in caplog.text


def test_a_snapshot_of_another_version_is_not_read_and_the_log_says_what_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    three_saves(tmp_path)
    monkeypatch.setattr("fleetcast.service.pipeline.snapshot.SNAPSHOT_VERSION", SNAPSHOT_VERSION + 1)
    kept = restored(tmp_path)
    assert (jobs(tmp_path), kept.positions, kept.number) == ([], {}, 0)
    assert f"it has version {SNAPSHOT_VERSION} and version {SNAPSHOT_VERSION + 1} is read here" in caplog.text
    assert "the inbox is read again" in caplog.text
    snapshot = Snapshot(tmp_path)
    save(snapshot, snapshot.restore(CONFIG, TOPOLOGY, NOW_MS))
    monkeypatch.undo()
    assert folders(tmp_path) == ["4"]
    assert jobs(tmp_path) == []


def test_a_broken_snapshot_is_not_one_of_the_two_that_are_kept(tmp_path: Path) -> None:
    three_saves(tmp_path)
    (tmp_path / "3" / "state.arrays").unlink()
    snapshot = Snapshot(tmp_path)
    save(snapshot, snapshot.restore(CONFIG, TOPOLOGY, NOW_MS))
    assert folders(tmp_path) == ["2", "4"]


def test_a_save_that_was_killed_is_in_nobodys_way(tmp_path: Path) -> None:
    save(Snapshot(tmp_path), with_jobs(tmp_path, "a"))
    (tmp_path / ".2.tmp" / "store").mkdir(parents=True)
    (tmp_path / ".2.tmp" / "state.arrays").write_text("half of")
    assert jobs(tmp_path) == ["a"]
    snapshot = Snapshot(tmp_path)
    kept = snapshot.restore(CONFIG, TOPOLOGY, NOW_MS)
    tell(kept, "b")
    save(snapshot, kept)
    assert folders(tmp_path) == ["1", "2"]
    assert jobs(tmp_path) == ["a", "b"]


def test_a_last_save_waits_for_the_one_that_was_cancelled(tmp_path: Path) -> None:
    async def stop_in_the_middle() -> None:
        snapshot, kept = Snapshot(tmp_path), with_jobs(tmp_path, "a")
        work = asyncio.create_task(snapshot.save(kept))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await snapshot.save(kept)

    for _ in range(5):
        asyncio.run(stop_in_the_middle())
    assert jobs(tmp_path) == ["a"]
    assert [name for name in folders(tmp_path) if name.startswith(".")] == []


def test_what_changes_while_a_save_is_written_is_in_the_next(tmp_path: Path) -> None:
    snapshot, kept = Snapshot(tmp_path), with_jobs(tmp_path, "a")
    writing = snapshot.save(kept)
    tell(kept, "b")
    asyncio.run(writing)
    assert jobs(tmp_path) == ["a"]
    save(snapshot, kept)
    assert jobs(tmp_path) == ["a", "b"]


def test_a_save_holds_the_jobs_of_a_minute_and_links_to_the_others(tmp_path: Path) -> None:
    snapshot = Snapshot(tmp_path)
    kept = snapshot.restore(CONFIG, TOPOLOGY, NOW_MS)
    tell(kept, *(f"job{number}" for number in range(1000)))
    save(snapshot, kept)
    tell(kept, "one more")
    save(snapshot, kept)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "2" / "jobs").iterdir())]
    assert len(sizes) == 2
    assert sizes[1] < sizes[0] / 500
    assert len(jobs(tmp_path)) == 1001


def test_jobs_at_rest_come_back_at_rest(tmp_path: Path) -> None:
    snapshot, kept = Snapshot(tmp_path), with_jobs(tmp_path, "old", "new")
    save(snapshot, kept)
    kept.state.apply(Batch(events=(Finished(job="old", sequence=2, time_ms=NOW_MS + 1),)), NOW_MS)
    kept.state.jobs.pack_old_jobs(NOW_MS + HOUR_MS)
    save(snapshot, kept)
    again = restored(tmp_path).state.jobs
    assert list(again.resting) == ["old"]
    assert [row.job for row in again.list_running()] == ["new"]
    assert again.resting == kept.state.jobs.resting


def test_node_events_that_were_seen_stay_seen(tmp_path: Path) -> None:
    event = NodeEvent(node="n1", source="s", sequence=1, time_ms=NOW_MS, type="drain")
    snapshot, kept = Snapshot(tmp_path), restored(tmp_path)
    kept.state.apply(Batch(node_events=(event,)), NOW_MS)
    save(snapshot, kept)
    again = restored(tmp_path).state
    assert again.nodes.nodes["n1"].drained
    assert again.apply(Batch(node_events=(event,)), NOW_MS) == []


def test_a_folder_that_cannot_be_written_leaves_the_snapshots_from_before(tmp_path: Path) -> None:
    snapshot, kept = Snapshot(tmp_path), with_jobs(tmp_path, "a")
    save(snapshot, kept)
    tell(kept, "b")
    (tmp_path / ".2.tmp").write_text("no folder, and cannot be removed as one")
    with pytest.raises(OSError, match="exists"):
        save(snapshot, kept)
    assert jobs(tmp_path) == ["a"]
    (tmp_path / ".2.tmp").unlink()
    save(snapshot, kept)
    assert jobs(tmp_path) == ["a", "b"]
    shutil.rmtree(tmp_path / "1")
    assert jobs(tmp_path) == ["a", "b"]
