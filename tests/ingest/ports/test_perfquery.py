import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from fleetcast.checks import check_source
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.ports.perfquery import PerfquerySource, parse_counters
from tests.ingest.ports.test_sysfs import words

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
EXTENDED = """# Port extended counters: Lid 134 port 1 (CapMask: 0x5300 CapMask2: 0x0000002)
PortSelect:......................1
CounterSelect:...................0x0000
PortXmitData:....................1000
PortRcvData:.....................4294967295
SymbolErrorCounter:..............65535
LinkDownedCounter:...............1
"""
ERRORS = """Errors for "n001 mlx5_3"
   GUID 0x7cfe900300179b31 port 1: [SymbolErrorCounter == 14] [PortXmitWait == 4294967295]
Errors for 0x2c903006e29b0 "MF0;leaf-04:SX6036/U1"
   GUID 0x2c903006e29b0 port ALL: [LinkDownedCounter == 48]
   GUID 0x2c903006e29b0 port 7: [LinkDownedCounter == 8 (8.000)]
"""
FABRIC = "CA   134  1 0x7cfe9003003b4bde 4x EDR - SW  1719 10 0x7cfe9003009ce5b0 ( 'n002 HCA-1' - 'leaf01' )\n"


def source(**options: Any) -> tuple[PerfquerySource, Entities]:
    entities = Entities()
    return PerfquerySource(entities, ManualClock(4_000_000_000_000), options), entities


def test_an_adapter_that_names_its_host_needs_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text(ERRORS)
    made, entities = source(files=[str(tmp_path / "*")])
    values = words(asyncio.run(made.next()), entities)
    assert values == {"symbol_errors n001/mlx5_3/1": 14.0, "ports_reported n001": 1.0}
    assert made.noted == {"not_of_a_node": 1}, "a switch is no node"
    assert made.health()["saturated"] == 1


def test_a_lid_names_a_port_through_the_fabric(tmp_path: Path) -> None:
    (tmp_path / "x.out").write_text(EXTENDED)
    (tmp_path / "fabric").write_text(FABRIC)
    made, entities = source(files=[str(tmp_path / "*.out")], fabric=str(tmp_path / "fabric"))
    values = words(asyncio.run(made.next()), entities)
    assert values == {"tx_bytes n002/mlx5_0/1": 4000.0, "link_downed n002/mlx5_0/1": 1.0, "ports_reported n002": 1.0}


def test_or_whoever_configured_it_says_whose_port_it_is(tmp_path: Path) -> None:
    (tmp_path / "x.out").write_text(EXTENDED)
    made, entities = source(files=[f"n9/mlx5_2={tmp_path / 'x.out'}"])
    asyncio.run(made.next())
    assert entities[EntityKind.PORT].names == ["n9/mlx5_2/1"]


def test_a_file_is_as_old_as_it_says_and_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "errors"
    path.write_text(ERRORS)
    os.utime(path, (1_700_000_000, 1_700_000_000))

    async def rounds() -> list[int]:
        made, _ = source(files=[str(path)])
        times = [int((await made.next()).samples[0].time_ms[0])]
        waiting = asyncio.create_task(made.next())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        os.utime(path, (1_700_000_060, 1_700_000_060))
        return [*times, int((await asyncio.wait_for(waiting, 60)).samples[0].time_ms[0])]

    assert asyncio.run(rounds()) == [1_700_000_000_000, 1_700_000_060_000]


def test_commands_print_what_files_hold(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text(ERRORS)
    script = f"import pathlib;print(pathlib.Path({str(tmp_path / 'errors')!r}).read_text())"
    made, entities = source(commands=[f'{sys.executable} -c "{script}"'])
    asyncio.run(made.next())
    assert entities[EntityKind.PORT].names == ["n001/mlx5_3/1"]


def test_a_command_that_is_missing_or_hangs_is_a_source_that_is_away() -> None:
    for command, why in (
        ("no-such-perfquery -x", "no-such-perfquery"),
        (f'{sys.executable} -c "import time;time.sleep(60)"', "no answer within 0 s"),
    ):
        made, _ = source(commands=[command], timeout_s=0.2)
        with pytest.raises(SourceError, match=why):
            asyncio.run(made.next())


def test_broken_lines_are_counted() -> None:
    bad: list[RecordError] = []
    text = EXTENDED.replace(":...............1", ":......many") + ERRORS.replace("== 14", "== x")
    ports = list(parse_counters(text, bad))
    assert [error.reason for error in bad] == ["bad_value", "bad_value"]
    assert [len(port.readings) for port in ports] == [4, 1, 1]


def test_it_keeps_the_contract_of_sources(tmp_path: Path) -> None:
    (tmp_path / "errors").write_text(ERRORS)
    check_source(lambda: source(files=[str(tmp_path / "errors")])[0], batches=1, replays=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"files": ["n1=x"]}, {"files": ["n 1/d=x", ""]}, {"commands": ['a "b']}, {"files": ["x"], "interval_s": 0}],
)
def test_bad_options_are_refused_at_the_start(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="perfquery"):
        source(**options)


@pytest.mark.skipif(not (DATA / "telemetry").is_dir(), reason="needs FLEETCAST_DATA")
def test_real_outputs_are_read_without_a_bad_line() -> None:
    folder = DATA / "telemetry" / "ib-perfquery"
    bad: list[RecordError] = []
    ports = [
        port
        for path in (*sorted(folder.glob("fixtures/perfquery/*.out")), folder / "ibqueryerrors_samples.txt")
        for port in parse_counters(path.read_text(), bad)
    ]
    assert not bad
    assert len(ports) >= 10
    assert ports[0].readings["PortXmitData"] == 178791657177235.0
