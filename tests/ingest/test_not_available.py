"""Numbers by which drivers say "not available" are unknown values: neither shown, nor stored, nor a warning."""

import asyncio
import logging
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.pages.recorded import PageReplay, ReplaySpeed
from fleetcast.ingest.source import Source
from fleetcast.ingest.tally import SkipRule
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.fuzz.bounds import examples
from tests.ingest.amd_pages import amd_labels
from tests.ingest.exporter_pages import Desk, labels, page
from tests.ingest.remote_write.test_write_decoder import World
from tests.ingest.write_requests import T0, gpu

FIELD = Path(__file__).parents[1] / "field" / "39-amd-virtual-functions.prom"
NOW_MS = 1_795_648_400_000
SENTINELS = ["0", "-1", "-2147483648", "4294967295", "2147483632", "9223372036854775807", "18446744073709551615"]


def test_a_virtual_function_has_no_power_and_no_temperature() -> None:
    desk = Desk()
    for _ in range(2):
        batch = desk.decoder.decode(FIELD.read_bytes(), 1000)
        words = desk.words(batch)
        assert {name.partition(" ")[0] for name in words} == {"gpu_util", "fb_used_bytes", "fb_total_bytes"}
        assert batch.bad == ()
        assert batch.get_tally().ignored == {SkipRule.NO_DATA: 4, SkipRule.REPEATED: 2}
    assert desk.entities.devices.find_gpu("109dcea3cb13", "00000000-0000-0000-0000-000000000000") is None


def test_ticks_over_virtual_functions_warn_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for moment in range(4):
        folder = tmp_path / "pages" / str(NOW_MS + 15_000 * moment)
        folder.mkdir(parents=True)
        (folder / "amd-1.prom").write_bytes(FIELD.read_bytes())
    clock = ManualClock(NOW_MS)

    def sources(entities: Entities) -> list[Source]:
        return [PageReplay(entities, tmp_path / "pages", clock, ReplaySpeed(speed=None))]

    async def scenario() -> None:
        pipeline = Pipeline(Config(state=str(tmp_path / "state")), clock, Topology.build([]), sources)
        for _ in range(4):
            pipeline.apply_batch(await pipeline.sources[0].next())
            await pipeline.tick()
        assert not pipeline.state.counts.bad

    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        asyncio.run(scenario())
    assert [record for record in caplog.records if "amd-1" in record.getMessage()] == []


@pytest.mark.parametrize("number", SENTINELS)
@pytest.mark.parametrize(
    "name",
    ["POWER_USAGE", "GPU_TEMP", "MEMORY_TEMP", "SM_CLOCK", "PCIE_LINK_WIDTH", "ENFORCED_POWER_LIMIT", "FB_TOTAL"],
)
def test_dcgm_by_scrape_and_by_remote_write(name: str, number: str) -> None:
    desk = Desk()
    lines = [f"DCGM_FI_DEV_{name}{labels(0)} {number}", f"DCGM_FI_DEV_GPU_UTIL{labels(0)} 97"]
    for _ in range(2):
        assert desk.decode(*lines) == {"gpu_util n001/0": 0.97}
        assert desk.tally.ignored == {SkipRule.NO_DATA: 1}
    world = World()
    batch = world.decode([(gpu(f"DCGM_FI_DEV_{name}", 0), [(T0, float(number))])])
    assert (world.named(batch), batch.bad) == ([], ())
    assert batch.get_tally().ignored[SkipRule.NO_DATA] == 1


@pytest.mark.parametrize("number", [*SENTINELS, "65535"])
@pytest.mark.parametrize("name", ["power_usage", "average_package_power", "junction_temperature", "memory_temperature"])
def test_amd(name: str, number: str) -> None:
    assert Desk().decode(f"gpu_{name}{amd_labels(0)} {number}") == {}


def test_zero_is_a_number_where_a_gpu_may_rest() -> None:
    names = {
        "GPU_UTIL": "gpu_util",
        "FB_USED": "fb_used_bytes",
        "XID_ERRORS": "xid",
        "PCIE_REPLAY_COUNTER": "pcie_replays",
    }
    lines = [f"DCGM_FI_DEV_{name}{labels(0)} 0" for name in names]
    assert Desk().decode(*lines) == {f"{metric} n001/0": 0.0 for metric in names.values()}


def test_a_text_for_not_available_is_a_counted_record_that_costs_the_others_nothing() -> None:
    desk = Desk()
    for text in ("[N/A]", "N/A", "[Not Supported]", "None"):
        assert desk.decode(f"DCGM_FI_DEV_POWER_USAGE{labels(0)} {text}", f"DCGM_FI_DEV_GPU_TEMP{labels(0)} 60") == {
            "gpu_temp_c n001/0": 60.0
        }
        assert (desk.tally.all, desk.tally.read) == (2, 1)


@given(st.lists(st.floats(-1e6, 1e12), min_size=1, max_size=8))
@examples(60)
def test_no_board_is_at_zero_or_below(numbers: list[float]) -> None:
    desk = Desk()
    batch = desk.decoder.decode(
        page(*(f"DCGM_FI_DEV_POWER_USAGE{labels(at)} {value}" for at, value in enumerate(numbers))), 1000
    )
    assert all(value > 0 for value in desk.words(batch).values())
    assert batch.get_tally().all == len(numbers)


@pytest.mark.parametrize(
    "line",
    [
        *(f"{name}{amd_labels(0)} 0" for name in ("gpu_total_vram", "amd_gpu_total_vram", "gpu_energy_consumed")),
        *(f"DCGM_FI_DEV_{name}{labels(0)} 0" for name in ("FB_TOTAL", "TOTAL_ENERGY_CONSUMPTION")),
        "node_memory_MemTotal_bytes 0",
        'node_hwmon_power_average_watt{chip="power_meter_acpi_x",sensor="power1"} 0',
    ],
)
def test_zero_memory_and_zero_energy_are_unknown(line: str) -> None:
    desk = Desk()
    assert desk.decode(line) == {}
    assert desk.tally.ignored == {SkipRule.NO_DATA: 1}
    assert len(desk.decode(f"{line.rpartition(' ')[0]} 7")) == 1
