"""Saves that are killed, cut short or written at the same time."""

import asyncio
from pathlib import Path

import pytest

from fleet.events import Started
from fleet.topology import NodeSpec, Topology
from ingest.source import Batch
from models.demand import DemandDesk
from service.config import Config
from service.snapshot import Restored, Snapshot

NOW_MS = 1_789_000_000_000
CONFIG = Config()
TOPOLOGY = Topology.build([NodeSpec("n1", 8)])


def restored(folder: Path) -> Restored:
    return Snapshot(folder).restore(CONFIG, TOPOLOGY, NOW_MS)


def with_jobs(folder: Path, *names: str) -> Restored:
    begun = restored(folder)
    events = [Started(job=name, sequence=1, time_ms=NOW_MS, nodes=("n1",)) for name in names]
    begun.state.apply(Batch(events=tuple(events)), NOW_MS)
    return begun


async def save(snapshot: Snapshot, begun: Restored) -> None:
    await snapshot.save(begun.state, DemandDesk(), {}, NOW_MS)


def jobs(folder: Path) -> list[str]:
    return [row.job for row in restored(folder).state.jobs]


def test_a_save_that_was_killed_before_it_became_current_is_in_nobodys_way(tmp_path: Path) -> None:
    asyncio.run(save(Snapshot(tmp_path), with_jobs(tmp_path, "a")))
    (tmp_path / "2" / "store").mkdir(parents=True)
    (tmp_path / "2" / "state.json").write_text("half of")
    assert jobs(tmp_path) == ["a"]
    asyncio.run(save(Snapshot(tmp_path), with_jobs(tmp_path, "b")))
    assert jobs(tmp_path) == ["a", "b"]


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"seven", b"../../etc", "²".encode()])
def test_a_torn_pointer_means_no_snapshot_and_the_next_save_mends_it(tmp_path: Path, text: bytes) -> None:
    asyncio.run(save(Snapshot(tmp_path), with_jobs(tmp_path, "a")))
    (tmp_path / "current").write_bytes(text)
    assert jobs(tmp_path) == []
    asyncio.run(save(Snapshot(tmp_path), with_jobs(tmp_path, "b")))
    assert jobs(tmp_path) == ["b"]


def test_a_last_save_waits_for_the_one_that_was_cancelled(tmp_path: Path) -> None:
    async def stop_in_the_middle() -> None:
        snapshot, begun = Snapshot(tmp_path), with_jobs(tmp_path, "a")
        work = asyncio.create_task(save(snapshot, begun))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        work.cancel()
        await save(snapshot, begun)

    for _ in range(5):
        asyncio.run(stop_in_the_middle())
    assert jobs(tmp_path) == ["a"]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
