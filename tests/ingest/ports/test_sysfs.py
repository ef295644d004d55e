import asyncio
import os
from pathlib import Path

import pytest

from fleetcast.checks import check_source
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.ports.sysfs import SysfsSource, parse_leading_number
from fleetcast.ingest.source import Batch

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))
PORT = {
    "state": "4: ACTIVE\n",
    "phys_state": "5: LinkUp\n",
    "rate": "400 Gb/sec (4X NDR)\n",
    "link_layer": "InfiniBand\n",
    "counters/port_rcv_data": "1000\n",
    "counters/link_downed": "255\n",
    "counters/symbol_error": "3\n",
    "counters/port_xmit_wait": "N/A (no PMA)\n",
    "hw_counters/np_cnp_sent": "12\n",
    "hw_counters/lifespan": "10\n",
}


def tree(root: Path, device: str = "mlx5_0", port: str = "1", **files: str) -> Path:
    for name, text in {**PORT, **files}.items():
        path = root / device / "ports" / port / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def source(*paths: str, **more: object) -> tuple[SysfsSource, Entities]:
    entities = Entities()
    return SysfsSource(entities, ManualClock(1_000_000), {"paths": list(paths), **more}), entities


def words(batch: Batch, entities: Entities) -> dict[str, float]:
    return {
        f"{METRICS[samples.kind][metric].name} {entities[samples.kind].names[entity]}": value
        for samples in batch.samples
        for metric, entity, value in zip(samples.metric, samples.entity, samples.value, strict=True)
    }


def test_a_port_is_read_in_our_units(tmp_path: Path) -> None:
    made, entities = source(f"n1={tree(tmp_path)}")
    assert words(asyncio.run(made.next()), entities) == {
        "state n1/mlx5_0/1": 4.0,
        "physical_state n1/mlx5_0/1": 5.0,
        "speed_bytes_per_s n1/mlx5_0/1": 5e10,
        "rx_bytes n1/mlx5_0/1": 4000.0,
        "symbol_errors n1/mlx5_0/1": 3.0,
        "cnp_sent n1/mlx5_0/1": 12.0,
        "ports_reported n1": 1.0,
    }
    assert made.health()["saturated"] == 1, "link_downed stands at its width"


def test_counters_of_64_bits_win_over_those_that_stick(tmp_path: Path) -> None:
    tree(tmp_path, counters_ext__port_rcv_data_64="9000000000\n", counters__port_rcv_data="4294967295\n")
    made, entities = source(f"n1={tmp_path}")
    assert words(asyncio.run(made.next()), entities)["rx_bytes n1/mlx5_0/1"] == 36e9
    assert made.health()["saturated"] == 1


def test_several_nodes_and_roots(tmp_path: Path) -> None:
    tree(tmp_path / "a" / "sys" / "class" / "infiniband")
    tree(tmp_path / "b", "mlx5_7")
    made, entities = source(f"n1={tmp_path / 'a'}", f"n2={tmp_path / 'b'}", f"n3={tmp_path / 'none'}", name="fabric")
    asyncio.run(made.next())
    assert entities[EntityKind.PORT].names == ["n1/mlx5_0/1", "n2/mlx5_7/1"]
    row = made.health()
    assert (row["name"], row["up"], row["down"]) == ("fabric", 2, 1)


def test_a_bad_number_is_counted_and_the_rest_is_kept(tmp_path: Path) -> None:
    made, entities = source(f"n1={tree(tmp_path, counters__symbol_error='many')}")
    batch = asyncio.run(made.next())
    assert [error.reason for error in batch.bad] == ["bad_value"]
    assert "rx_bytes n1/mlx5_0/1" in words(batch, entities)


def test_a_host_without_adapters_is_away_and_asked_again_later(tmp_path: Path) -> None:
    made, _ = source(f"n1={tmp_path}")
    with pytest.raises(SourceError) as error:
        asyncio.run(made.next())
    assert error.value.retry_after_s == 60.0
    tree(tmp_path)
    assert len(asyncio.run(made.next())) > 0


def test_rounds_keep_their_distance(tmp_path: Path) -> None:
    async def two() -> int:
        made = SysfsSource(Entities(), ManualClock(1_000_000), {"paths": [f"n1={tree(tmp_path)}"], "interval_s": 15.0})
        await made.next()
        return int((await made.next()).samples[0].time_ms[0])

    assert asyncio.run(two()) == 1_015_000


def test_it_keeps_the_contract_of_sources(tmp_path: Path) -> None:
    check_source(lambda: source(f"n1={tree(tmp_path)}")[0], batches=1, replays=False)


@pytest.mark.parametrize(
    "options", [{"paths": []}, {"paths": ["n/1=/x"]}, {"paths": ["n1="]}, {"interval_s": 0.0}, {"path": "/x"}]
)
def test_bad_options_are_refused_at_the_start(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"sysfs|no name"):
        SysfsSource(Entities(), ManualClock(0), options)


def test_numbers_of_sysfs() -> None:
    assert parse_leading_number(b"56 Gb/sec (4X FDR)\n") == 56.0
    assert parse_leading_number(b"18446744073709551615\n") == 2.0**64


@pytest.mark.skipif(not (DATA / "telemetry").is_dir(), reason="needs FLEETCAST_DATA")
def test_the_trees_of_real_hosts() -> None:
    for name, ports, saturated in (("ib-sysfs-h100", 9, 10), ("ib-procfs-fixtures", 4, 0)):
        made, entities = source(f"n1={DATA / 'telemetry' / name}")
        batch = asyncio.run(made.next())
        assert not batch.bad
        assert len(entities[EntityKind.PORT]) == ports
        assert made.health()["saturated"] == saturated
