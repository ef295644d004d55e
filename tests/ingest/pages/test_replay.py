import asyncio
import gzip
from pathlib import Path

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.recorded import PageReplay, ReplaySpeed
from fleetcast.ingest.source import Batch
from tests.ingest.exporter_pages import dcgm_page

FAST = ReplaySpeed(speed=None)


def record(folder: Path, moments: int = 3) -> Path:
    for number in range(moments):
        moment = folder / str(1000 + 15_000 * number)
        moment.mkdir()
        (moment / "n001.dcgm.prom").write_bytes(dcgm_page(power_w=400.0 + 100 * number))
        (moment / "n002.dcgm.prom.gz").write_bytes(gzip.compress(dcgm_page(node="n002")))
    return folder


def drain(source: PageReplay) -> list[Batch]:
    async def run() -> list[Batch]:
        batches = []
        while True:
            try:
                batches.append(await source.next())
            except StopAsyncIteration:
                return batches

    return asyncio.run(run())


def test_moments_come_in_order_of_time_at_their_own_times(tmp_path: Path) -> None:
    entities = Entities()
    batches = drain(PageReplay(entities, record(tmp_path, 12), ManualClock(), FAST))
    assert [batch.samples[0].time_ms[0] for batch in batches] == [1000 + 15_000 * number for number in range(12)]
    assert [batch.samples[0].value[0] for batch in batches][:3] == [400.0, 500.0, 600.0]
    assert entities[EntityKind.NODE].names == ["n001", "n002"]
    assert [len(batch) for batch in batches] == [8] * 12


def test_a_replay_can_be_moved_in_time(tmp_path: Path) -> None:
    batches = drain(PageReplay(Entities(), record(tmp_path), ManualClock(), ReplaySpeed(start_ms=500_000, speed=None)))
    assert [batch.samples[0].time_ms[0] for batch in batches] == [500_000, 515_000, 530_000]


@pytest.mark.parametrize(("speed", "took_ms"), [(1.0, 30_000), (2.0, 15_000)])
def test_a_replay_keeps_the_recorded_pace(tmp_path: Path, speed: float, took_ms: int) -> None:
    clock = ManualClock(77)
    drain(PageReplay(Entities(), record(tmp_path), clock, ReplaySpeed(speed=speed)))
    assert clock.now_ms() == 77 + took_ms


def test_a_replay_goes_on_after_its_position(tmp_path: Path) -> None:
    folder = record(tmp_path)
    source = PageReplay(Entities(), folder, ManualClock(), FAST)
    assert source.position() == {}
    asyncio.run(source.next())
    asyncio.run(source.next())
    again = PageReplay(Entities(), folder, ManualClock(), FAST)
    again.seek(source.position())
    (batch,) = drain(again)
    assert batch.samples[0].time_ms[0] == 31_000


def test_a_broken_file_is_counted_and_the_rest_is_read(tmp_path: Path) -> None:
    (record(tmp_path, 1) / "1000" / "n003.prom.gz").write_bytes(b"no gzip")
    (batch,) = drain(PageReplay(Entities(), tmp_path, ManualClock(), FAST))
    assert [error.reason for error in batch.bad] == ["bad_file"]
    assert len(batch) == 8


def test_a_folder_without_pages_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no recorded pages"):
        PageReplay(Entities(), tmp_path, ManualClock(), FAST)
