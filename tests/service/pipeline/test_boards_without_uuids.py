"""Pages whose lines have no UUIDs: the hosts of targets and readings of boards say which targets are one machine."""

import re
from pathlib import Path

import pytest

from fleetcast.ingest.board_readings import BoardReadings, have_same_boards
from tests.field.scraped_world import ScrapedWorld, without

FIELD = Path(__file__).parents[2] / "field"
PAGE = re.sub(
    rb'UUID="[^"]*",', b"", (FIELD / "01-hostname-localhost-a.prom").read_bytes().replace(b'"localhost"', b'"gpu-host"')
)
DAY_J = 8.64e6 * 4
A, B, A_TOO = (f"http://10.0.0.{host}:{port}/metrics" for host, port in ((1, 9400), (2, 9400), (1, 9500)))
PORTS = ["http://127.0.0.1:9401/metrics", "http://127.0.0.1:9402/metrics"]


def page(energy_j: float | None = None, used_mib: int = 70_000, gpus: str = "0123", name: str = "gpu-host") -> bytes:
    """A page without UUIDs. energy_j: that of each board, and a thousandth more with each index."""
    found = PAGE.replace(b"} 70000", f"}} {used_mib}".encode()).replace(b"gpu-host", name.encode())
    if energy_j is not None:
        found += b"".join(
            f'DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{gpu="{gpu}",Hostname="{name}"}} '
            f"{energy_j * 1000 * (1 + 0.001 * gpu):.0f}\n".encode()
            for gpu in range(4)
        )
    return without(found, *(gpu for gpu in range(4) if str(gpu) not in gpus))


def machines(world: ScrapedWorld) -> dict[str, int]:
    """Node → GPUs, of those that have any."""
    return {name: len(node["gpus"]) for name, node in world.nodes().items() if node["gpus"]}


def world_of(tmp_path: Path, patch: pytest.MonkeyPatch, pages: dict[str, bytes], for_s: float = 90) -> ScrapedWorld:
    world = ScrapedWorld(tmp_path, list(pages), patch)
    world.run(for_s, dict(pages))
    return world


@pytest.mark.parametrize("energy_j", [None, 0.0, 3600.0])
def test_targets_of_two_hosts_are_two_machines_and_the_clash_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, energy_j: float | None
) -> None:
    """Pages that agree prove nothing: idle boards read alike, and those that started just now have used as much."""
    world = world_of(tmp_path, monkeypatch, {A: page(energy_j), B: page(energy_j)})
    assert machines(world) == {"10.0.0.1": 4, "10.0.0.2": 4}
    assert world.scraper.health()["noted"]["node_clash"] == 1
    fleet = world.tick().json("doc.fleet")
    assert fleet["gpus"]["total"] == 8


def test_two_hosts_whose_boards_count_the_same_energy_are_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, monkeypatch, {A: page(DAY_J), "http://gpu-host.cluster:9400/metrics": page(DAY_J + 900)})
    assert machines(world) == {"gpu-host": 4}
    assert "node_clash" not in world.scraper.health()["noted"]


def test_two_hosts_whose_boards_count_other_energy_are_two_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, monkeypatch, {A: page(DAY_J), B: page(2 * DAY_J)})
    assert machines(world) == {"10.0.0.1": 4, "10.0.0.2": 4}


@pytest.mark.parametrize("pages", [(page(), page()), (page(DAY_J), page()), (page(gpus="01"), page(gpus="0123"))])
def test_two_exporters_of_one_host_are_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: tuple[bytes, bytes]
) -> None:
    world = world_of(tmp_path, monkeypatch, dict(zip((A, A_TOO), pages, strict=True)), 180)
    assert machines(world) == {"gpu-host": 4}
    assert "node_clash" not in world.scraper.health()["noted"]


@pytest.mark.parametrize("pages", [(page(DAY_J), page(2 * DAY_J)), (page(), page(used_mib=4))])
def test_two_machines_behind_the_ports_of_one_host_are_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: tuple[bytes, bytes]
) -> None:
    world = world_of(tmp_path, monkeypatch, dict(zip(PORTS, pages, strict=True)), 150)
    assert machines(world) == {"127.0.0.1:9401": 4, "127.0.0.1:9402": 4}


def test_a_job_that_starts_between_the_pages_of_one_host_parts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, monkeypatch, {A: page(used_mib=4), A_TOO: page(used_mib=4)})
    for used in (60_000, 4, 60_000):
        world.run(15, {A: page(used_mib=used)})
        world.run(45, {A_TOO: page(used_mib=used)})
    assert machines(world) == {"gpu-host": 4}


def test_an_exporter_that_moves_to_another_address_stays_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod of a DaemonSet is made anew: its old address stays in the list of targets for a while, and is silent."""
    world = ScrapedWorld(tmp_path, [A, B], monkeypatch)
    world.run(60, {A: page(), B: None})
    world.run(90, {A: None, B: page()})
    assert machines(world) == {"gpu-host": 4}


def test_exporters_of_other_gpus_of_one_machine_are_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of(tmp_path, monkeypatch, {A: page(gpus="01"), B: page(gpus="23")})
    assert machines(world) == {"gpu-host": 4}


def test_machines_that_swap_their_names_are_two_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(tmp_path, monkeypatch, {A: page(name="n1"), B: page(name="n2")})
    world.run(90, {A: page(name="n2"), B: page(name="n1")})
    assert machines(world) == {"n1": 4, "n2": 4}
    assert "node_clash" not in world.scraper.health()["noted"]


def test_a_node_that_the_configuration_gives_to_two_targets_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ScrapedWorld(tmp_path, [f"{A} n1", f"{B} n1"], monkeypatch)
    world.run(90, {A: page(), B: page()})
    assert machines(world) == {"n1": 4}


def test_one_page_with_uuids_and_one_without_are_two_machines_on_two_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proven = (FIELD / "01-hostname-localhost-b.prom").read_bytes().replace(b'"localhost"', b'"gpu-host"')
    world = world_of(tmp_path, monkeypatch, {A: proven, B: page()})
    assert machines(world) == {"10.0.0.1": 4, "10.0.0.2": 4}


def test_energies_prove_nothing_while_they_are_small_or_of_no_board_in_common() -> None:
    def read(*energy_j: float, time_ms: int = 0) -> BoardReadings:
        return BoardReadings(time_ms, dict(enumerate(energy_j)))

    assert have_same_boards(read(), read(DAY_J)) is None
    assert have_same_boards(read(900.0), read(900.0)) is None
    assert have_same_boards(read(DAY_J, 2 * DAY_J), read(2 * DAY_J + 5000, DAY_J + 5000, time_ms=15_000)) is True
    assert have_same_boards(read(DAY_J, 2 * DAY_J), read(2 * DAY_J)) is True, "a page may lack some of the boards"
    assert have_same_boards(read(DAY_J), read(DAY_J + 1e5, time_ms=15_000)) is False
