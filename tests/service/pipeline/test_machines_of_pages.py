"""A machine is who its boards are: names that repeat, change or say nothing make no machine and lose none."""

from pathlib import Path

import pytest

from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.machines import is_generic_name
from tests.field.scraped_world import ScrapedWorld

FIELD = Path(__file__).parents[2] / "field"
FIRST, SECOND = ((FIELD / f"01-hostname-localhost-{letter}.prom").read_bytes() for letter in "ab")
OLD_POD, NEW_POD = ((FIELD / f"40-hostname-is-the-pod-{letter}.prom").read_bytes() for letter in "ab")
A, B = "http://10.0.0.1:9400/metrics", "http://10.0.0.2:9400/metrics"


def named(page: bytes, name: str) -> bytes:
    """The page under another Hostname."""
    was = page.split(b'Hostname="')[1].split(b'"')[0]
    return page.replace(b'Hostname="' + was + b'"', f'Hostname="{name}"'.encode())


def machines(world: ScrapedWorld) -> dict[str, int]:
    """Node → GPUs, of those that have any."""
    return {name: len(node["gpus"]) for name, node in world.nodes().items() if node["gpus"]}


@pytest.mark.parametrize("name", ["localhost", "localhost.localdomain", "3f2a9c0b1d4e", "nvidia-dcgm-exporter-x7k2p"])
def test_two_hosts_that_say_nothing_are_two_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    world = ScrapedWorld(tmp_path, [A, B], monkeypatch)
    world.run(60, {A: named(FIRST, name), B: named(SECOND, name)})
    assert machines(world) == {"10.0.0.1": 4, "10.0.0.2": 4}


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ([A, B], {"10.0.0.1", "10.0.0.2"}),
        (["http://127.0.0.1:9401/metrics", "http://127.0.0.1:9402/metrics"], {"127.0.0.1:9401", "127.0.0.1:9402"}),
    ],
)
@pytest.mark.parametrize("name", ["gpu-host", "localhost"])
def test_two_machines_of_one_name_get_the_names_of_their_targets_and_the_clash_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str], names: set[str], name: str
) -> None:
    world = ScrapedWorld(tmp_path, targets, monkeypatch)
    world.run(90, {targets[0]: named(FIRST, name), targets[1]: named(SECOND, name)})
    assert machines(world) == dict.fromkeys(names, 4)
    if name == "gpu-host" or "127.0.0.1" in targets[0]:
        assert world.scraper.health()["noted"]["node_clash"] == 1
    xid = world.pipeline.state.store.ring(EntityKind.GPU)
    assert xid.size >= 8


def test_a_name_that_the_configuration_fixes_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = ScrapedWorld(tmp_path, [f"{A} gpu-a", f"{B} gpu-b"], monkeypatch)
    world.run(60, {A: FIRST, B: SECOND})
    assert machines(world) == {"gpu-a": 4, "gpu-b": 4}


def test_an_exporter_whose_pod_is_new_is_the_machine_that_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ScrapedWorld(tmp_path, [A], monkeypatch)
    world.run(75, {A: OLD_POD})
    world.run(75, {A: NEW_POD})
    assert machines(world) == {"10.0.0.1": 4}


@pytest.mark.parametrize("restart", [False, True])
def test_a_renamed_machine_takes_its_boards_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restart: bool
) -> None:
    world = ScrapedWorld(tmp_path, [A], monkeypatch)
    world.run(75, {A: named(OLD_POD, "old-name")})
    assert machines(world) == {"old-name": 4}
    world.run(75, {A: named(OLD_POD, "new-name")})
    if restart:
        world.save()
        world.restart()
        world.run(30)
    assert machines(world) == {"new-name": 4}
    board = world.tick()
    assert board.json("doc.fleet")["gpus"]["total"] == 4
    assert not any(row["flagged"] for row in board.json("doc.fleet")["nodes"])
    placed = world.decide(gang=1, gpus_per_node=4)
    assert {rank.node for rank in placed.ranks} == {"new-name"}
    world.run(75, {A: named(OLD_POD, "old-name")})
    assert machines(world) == {"old-name": 4}, "and back again"


def test_two_exporters_of_one_machine_under_two_names_are_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = A.replace("9400", "9500")
    world = ScrapedWorld(tmp_path, [A, other], monkeypatch)
    world.run(90, {A: named(FIRST, "gpu-07"), other: named(FIRST, "machine-7")})
    assert machines(world) == {"gpu-07": 4}


def test_a_swapped_board_and_a_new_order_of_boards_are_no_clash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = A.replace("9400", "9500")
    world = ScrapedWorld(tmp_path, [A, other], monkeypatch)
    first = named(FIRST, "gpu-07")
    turned = first.replace(b"GPU-a-0", b"GPU-x").replace(b"GPU-a-1", b"GPU-a-0").replace(b"GPU-x", b"GPU-a-1")
    world.run(60, {A: first, other: turned})
    assert machines(world) == {"gpu-07": 4}
    world.run(60, {A: first.replace(b"GPU-a-2", b"GPU-new"), other: None})
    assert machines(world) == {"gpu-07": 4}
    assert "node_clash" not in world.scraper.noted


@pytest.mark.parametrize("name", ["node-7", "b7", "ip-10-0-0-7", "gpu-agent", "dcgm01", "deadbeef", "cafe-1"])
def test_names_of_machines_say_something(name: str) -> None:
    assert not is_generic_name(name)


def host_page(name: str, started_s: float, memory: float) -> bytes:
    """A page of node_exporter whose kernel has this name."""
    return (
        f'node_uname_info{{nodename="{name}",machine="x86_64"}} 1\n'
        f"node_memory_MemTotal_bytes {memory}\n"
        f"node_boot_time_seconds {started_s}\n"
        f'node_infiniband_state_id{{device="mlx5_0",port="1"}} 4\n'
    ).encode()


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        (["http://10.0.0.1:9100/metrics", "http://10.0.0.2:9100/metrics"], {"10.0.0.1", "10.0.0.2"}),
        (["http://127.0.0.1:9101/metrics", "http://127.0.0.1:9102/metrics"], {"127.0.0.1:9101", "127.0.0.1:9102"}),
    ],
)
@pytest.mark.parametrize("name", ["ubuntu", "gpu-host"])
def test_two_hosts_whose_kernels_have_one_name_are_two_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str], names: set[str], name: str
) -> None:
    """Images of clouds leave their host name, and node_exporter prints it. When a kernel started tells them apart."""
    world = ScrapedWorld(tmp_path, targets, monkeypatch)
    first, second = host_page(name, 1.795e9, 1e11), host_page(name, 1.796e9, 2e11)
    world.run(90, dict(zip(targets, (first, second), strict=True)))
    assert names <= set(world.nodes())
    assert world.scraper.health()["noted"]["node_clash"] == 1


def test_a_host_with_two_targets_and_one_that_restarts_stay_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = ["http://10.0.0.1:9100/metrics", "http://n7.cluster:9100/metrics"]
    world = ScrapedWorld(tmp_path, targets, monkeypatch)
    world.run(60, dict.fromkeys(targets, host_page("n7", 1.795e9, 1e11)))
    world.run(60, dict.fromkeys(targets, host_page("n7", 1.796e9, 1e11)))
    assert set(world.nodes()) == {"n7"}
    assert "node_clash" not in world.scraper.health()["noted"]


def test_a_board_that_moves_between_two_live_machines_does_not_join_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine that lost the board is up and no longer lists it, and the other one has it in a slot of its own."""
    world = ScrapedWorld(tmp_path, [A, B], monkeypatch)
    first, second = named(FIRST, "n1"), named(SECOND, "n2")
    world.run(60, {A: first, B: second})
    lines = first.splitlines(keepends=True)
    rest = b"".join(line for line in lines if b'gpu="3"' not in line)
    moved = b"".join(line for line in lines if b'gpu="3"' in line).replace(b'gpu="3"', b'gpu="4"')
    world.run(60, {A: rest, B: second + moved.replace(b'"n1"', b'"n2"')})
    assert machines(world)["n2"] == 5
    assert world.scraper.health()["noted"]["gpu_moved"] == 1
    assert "node_alias" not in world.scraper.health()["noted"]


def test_two_boards_in_one_slot_of_a_page_are_refused_and_not_repeated_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of a federation has lines of several machines; those of one name cannot be told apart."""
    world = ScrapedWorld(tmp_path, [A], monkeypatch)
    both = named(FIRST, "gpu-host") + named(SECOND, "gpu-host")
    for _ in range(4):
        world.run(15, {A: both})
        batch = world.scraper.targets[A].decoder.decode(both, world.clock.now_ms() + 1)
        assert {error.reason for error in batch.bad} == {"two_boards"}
        assert batch.get_tally().refused == batch.get_tally().read
    assert machines(world) == {"gpu-host": 4}
    world.run(60, {A: named(SECOND, "gpu-host").replace(b"GPU-b", b"GPU-c")})
    assert machines(world) == {"gpu-host": 4}
    assert not world.scraper.targets[A].decoder.decode(FIRST, world.clock.now_ms() + 1).bad
