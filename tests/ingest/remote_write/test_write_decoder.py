import math
import struct

import pytest

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.remote_write import decoder as write_decoder
from fleetcast.ingest.remote_write.decoder import WriteDecoder, parse_labels
from fleetcast.ingest.remote_write.request import Version
from fleetcast.ingest.source import Batch
from tests.ingest.write_requests import T0, Row, block, gpu, message_v1, message_v2, packed

MESSAGES = {Version.V1: message_v1, Version.V2: message_v2}
POWER, TEMPERATURE = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_TEMP"
STALE = struct.unpack("<d", struct.pack("<Q", 0x7FF0000000000002))[0]


class World:
    """A decoder, and samples by the names they belong to."""

    def __init__(self) -> None:
        self.entities = Entities()
        resolver = ExporterResolver(self.entities)
        self.decoder = WriteDecoder(resolver, machines=resolver.inventory.machines)

    def decode(self, rows: list[Row], version: Version = Version.V1, received_ms: int = T0) -> Batch:
        return self.decoder.decode(packed(MESSAGES[version](rows)), version, received_ms)

    def named(self, batch: Batch) -> list[tuple[str, str, int, float]]:
        """(entity, metric, time_ms, value)."""
        return [
            (self.entities[part.kind].names[entity], METRICS[part.kind][metric].name, time_ms, value)
            for part in batch.samples
            for metric, entity, time_ms, value in zip(
                part.metric.tolist(), part.entity.tolist(), part.time_ms.tolist(), part.value.tolist(), strict=True
            )
        ]


@pytest.mark.parametrize("version", Version)
def test_series_are_the_catalogues_and_values_in_our_units(version: Version) -> None:
    world = World()
    rows: list[Row] = [
        (gpu(POWER, 0), [(T0, 401.5)]),
        (gpu("DCGM_FI_DEV_GPU_UTIL", 1), [(T0, 0.0)]),
        (gpu("DCGM_FI_DEV_GPU_UTIL", 0), [(T0, 50.0)]),
        ({"__name__": "go_goroutines", "instance": "n1:9400"}, [(T0, 7.0)]),
    ]
    for _ in range(2):  # the second time from memory
        batch = world.decode(rows, version)
        assert world.named(batch) == [
            ("n1/0", "power_w", T0, 401.5),
            ("n1/1", "gpu_util", T0, 0.0),
            ("n1/0", "gpu_util", T0, 0.5),
        ]
        assert not batch.bad
    assert world.decoder.noted == {"unknown_metric": 2}


def test_both_versions_are_remembered_beside_each_other() -> None:
    world = World()
    rows: list[Row] = [(gpu(POWER, index), [(T0, float(index))]) for index in range(8)]
    first = world.named(world.decode(rows, Version.V1))
    assert world.named(world.decode(rows, Version.V2)) == first
    assert world.named(world.decode(rows[::-1], Version.V2)) == first[::-1]


def test_any_number_of_series_whose_sender_names_the_node_come_again() -> None:
    """They belong to no `instance`, so the table of instances does not grow with them."""
    world = World()
    rows: list[Row] = [(gpu(POWER, 0) | {"node": f"n{number}"}, [(T0, 1.0)]) for number in range(2000)]
    for _ in range(2):
        assert sum(map(len, world.decode(rows).samples)) == len(rows)


def test_the_same_symbols_in_another_order_are_the_same_series() -> None:
    world = World()
    world.decode([(gpu(POWER, 0), [(T0, 1.0)]), (gpu(TEMPERATURE, 1), [(T0, 2.0)])], Version.V2)
    batch = world.decode([(gpu(TEMPERATURE, 1), [(T0, 3.0)]), (gpu(POWER, 0), [(T0, 4.0)])], Version.V2)
    assert [row[:2] for row in world.named(batch)] == [("n1/1", "gpu_temp_c"), ("n1/0", "power_w")]


@pytest.mark.parametrize(
    ("labels", "node"),
    [
        ({"node": "k1", "Hostname": "pod-x"}, "k1"),
        ({"kubernetes_node": "k2"}, "k2"),
        ({"Hostname": "h1", "instance": "10.0.0.1:9400"}, "h1"),
        ({"instance": "i1:9400"}, "i1"),
        ({"instance": "https://i2:9400/metrics"}, "i2"),
        ({"node": "not a name", "instance": "i3"}, "i3"),
    ],
)
def test_a_node_is_told_by_the_sender_then_by_the_exporter_then_by_its_address(
    labels: dict[str, str], node: str
) -> None:
    world = World()
    batch = world.decode([({"__name__": POWER, "gpu": "3", **labels}, [(T0, 1.0)])])
    assert world.named(batch)[0][0] == f"{node}/3"


def test_an_address_gets_the_name_that_node_exporter_tells_whenever_it_does() -> None:
    world = World()
    meter: Row = ({"__name__": "node_hwmon_power_average_watt", "instance": "10.0.0.1:9100"}, [(T0, 1.0)])
    uname: Row = ({"__name__": "node_uname_info", "instance": "10.0.0.1:9100", "nodename": "n7"}, [(T0, 1.0)])
    assert world.named(world.decode([meter]))[0][0] == "10.0.0.1"
    assert world.named(world.decode([meter, uname]))[0][0] == "10.0.0.1"  # known by now
    assert world.named(world.decode([meter]))[0][0] == "n7"
    other = World()
    assert other.named(other.decode([meter, uname]))[0][0] == "n7"  # told in the same request, though later


def test_an_end_of_series_is_noted_and_other_numbers_that_are_none_are_bad() -> None:
    world = World()
    batch = world.decode(
        [
            (gpu(POWER, 0), [(T0, STALE)]),
            (gpu(POWER, 1), [(T0, math.nan)]),
            (gpu(POWER, 2), [(T0, math.inf)]),
            (gpu(POWER, 3), [(T0, 9223372036854775794.0)]),  # DCGM's blank
            (gpu(POWER, 4), [(T0 + 60_001, 1.0)]),
        ]
    )
    assert len(batch) == 0
    assert [error.reason for error in batch.bad] == ["not_finite", "not_finite", "future"]
    assert world.decoder.noted == {"stale": 1, "blank": 1}


@pytest.mark.parametrize("version", Version)
def test_a_sample_behind_others_of_odd_forms_hides_none(version: Version) -> None:
    world = World()
    samples = [(0, 0.0), (5, 1.0), (T0, 2.0)]
    for _ in range(2):
        batch = world.decode([(gpu(POWER, 0), samples)], version)
        assert [row[2:] for row in world.named(batch)] == samples[2:]
        assert [error.reason for error in batch.bad] == ["absurd_time"] * 2


def test_what_comes_late_or_twice_is_passed_on_as_it_came() -> None:
    world = World()
    batch = world.decode([(gpu(POWER, 0), [(T0, 2.0), (T0 - 9000, 1.0), (T0, 2.0)])])
    assert [row[2:] for row in world.named(batch)] == [(T0, 2.0), (T0 - 9000, 1.0), (T0, 2.0)]


def test_bad_labels_cost_their_own_series_each_time() -> None:
    world = World()
    rows: list[Row] = [
        ({"gpu": "1"}, [(T0, 1.0)]),
        (gpu(POWER, 999), [(T0, 1.0)]),
        (gpu(POWER, 0), [(T0, 1.0)]),
    ]
    for version in (*Version, *Version):
        batch = world.decode(rows, version)
        assert len(batch) == 1
        assert [error.reason for error in batch.bad] == ["bad_label", "bad_label"]


def test_cpus_make_one_sample_of_a_node_when_their_moment_is_over() -> None:
    world = World()
    cpu = {"__name__": "node_cpu_seconds_total", "instance": "n1:9100", "mode": "steal"}
    for scrape in range(3):
        rows: list[Row] = [({**cpu, "cpu": str(one)}, [(T0 + scrape, 10.0 * one + scrape)]) for one in range(2)]
        batch = world.decode(rows)
    assert [(part.kind, len(part)) for part in batch.samples] == [(EntityKind.NODE, 1)]
    assert world.decoder.noted["incomplete_sum"] == 1  # of the first moment nobody knows
    for scrape in range(3, 5):  # one of two is missing
        world.decode([({**cpu, "cpu": "0"}, [(T0 + scrape, 1.0)])])
    assert world.decoder.noted["incomplete_sum"] == 2


def test_memory_is_bounded_and_what_was_forgotten_is_learnt_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_decoder, "MAX_UNWANTED", 10)
    world = World()
    wanted: Row = (gpu(POWER, 0), [(T0, 1.0)])
    for number in range(50):
        junk: Row = ({"__name__": "noise", "id": str(number)}, [(T0, 1.0)])
        for version in Version:
            assert len(world.decode([wanted, junk], version)) == 1
    assert len(world.decoder._rows) < 30


def test_long_labels_are_held_up_to_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_decoder, "MAX_HELD_BYTES", 50_000)
    world = World()
    wanted: Row = (gpu(POWER, 0), [(T0, 1.0)])
    for number in range(50):
        junk: Row = ({"__name__": "noise", "id": str(number) + "x" * 5_000}, [(T0, 1.0)])
        for version in Version:
            assert len(world.decode([wanted, junk], version)) == 1
    assert sum(map(len, [*world.decoder._rows, *world.decoder._symbols])) < 70_000


def test_labels_beyond_all_measure_cost_their_own_series() -> None:
    world = World()
    rows: list[Row] = [(gpu(POWER, 0, note="x" * 70_000), [(T0, 1.0)]), (gpu(POWER, 1), [(T0, 1.0)])]
    batch = world.decode(rows, Version.V1)
    assert (len(batch), [error.reason for error in batch.bad]) == (1, ["bad_label"])


def test_labels_are_read_however_they_are_written() -> None:
    name = block(1, b"__name__") + block(2, b"a")
    swapped = block(2, b"v" * 200) + block(1, b"long")
    empty = block(1, b"nothing")
    text = block(1, name) + block(1, swapped) + block(1, empty)
    assert parse_labels(text) == {"__name__": "a", "long": "v" * 200, "nothing": ""}
    for bad in (b"", block(2, name), block(1, name)[:-1], block(1, block(1, b"\xff"))):
        with pytest.raises(RecordError, match="bad_label"):
            parse_labels(bad)


NAMES = ("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_POWER_USAGE")
Told = tuple[int, list[int], dict[int, list[str]], list[int]]  # seconds, GPUs, their jobs, divided GPUs


def labelled(at_ms: int, **labels: str) -> list[Row]:
    """Two series of a GPU under its labels, and of one that nobody holds."""
    held: list[Row] = [(gpu(name, 0, **labels), [(at_ms, 1.0)]) for name in NAMES]
    return [*held, *((gpu(name, 1), [(at_ms, 1.0)]) for name in NAMES)]


@pytest.mark.parametrize("version", list(Version))
def test_labels_tell_who_holds_a_gpu_at_each_moment(version: Version) -> None:
    decoder = WriteDecoder(ExporterResolver(Entities()))
    make = message_v1 if version is Version.V1 else message_v2

    def sights(*rows: Row) -> list[Told]:
        found = []
        for one in decoder.decode(packed(make(rows)), version, T0 + 99_000).labels:
            jobs = {at: [job.job for job in held] for at, held in one.jobs.items()}
            found.append(((one.time_ms - T0) // 1000, sorted(one.gpus), jobs, list(one.divided)))
        return found

    assert sights(*labelled(T0)) == [(0, [0, 1], {}, [])], "once: they are heard of"
    assert sights(*labelled(T0 + 15_000)) == []
    pod = {"exported_pod": "a-worker-0", "exported_namespace": "ml", "pod": "dcgm-exporter-x8k2p"}
    assert sights(*labelled(T0 + 30_000, **pod)) == [(30, [0, 1], {0: ["ml/a"]}, [])]
    both = [*labelled(T0 + 45_000, **pod), *labelled(T0 + 60_000)]
    assert sights(*both) == [(45, [0, 1], {0: ["ml/a"]}, []), (60, [0, 1], {}, [])]
    instance = gpu("DCGM_FI_PROF_SM_ACTIVE", 1, GPU_I_ID="3", hpc_job="17")
    assert sights((instance, [(T0 + 75_000, 0.5)])) == [(75, [], {}, [1])]


def board(instance: str, uuid: str, index: int = 0, host: str = "gpu-host") -> Row:
    """A reading of a GPU that an exporter at `instance` has; the watts are the last part of the address."""
    watts = float(instance.partition(":")[0].rpartition(".")[2])
    labels = {"__name__": POWER, "gpu": str(index), "Hostname": host, "instance": instance}
    return ({**labels, **({"UUID": uuid} if uuid else {})}, [(T0, watts)])


def nodes_of(
    world: World, rows: list[Row], times: int, version: Version = Version.V1, after: int = 0
) -> dict[float, str]:
    """Watts → the node that they belong to, in the last of so many requests, which come 15 s apart."""
    for at in range(after, after + times):
        named = [row for one in rows for row in world.named(world.decode([one], version, T0 + 15_000 * at))]
    return {watts: entity.partition("/")[0] for entity, _, _, watts in named}


@pytest.mark.parametrize("version", Version)
@pytest.mark.parametrize("uuids", [("GPU-a", "GPU-b"), ("", ""), ("GPU-a", "")])
def test_two_instances_whose_exporters_have_one_host_name_are_two_machines(
    version: Version, uuids: tuple[str, str]
) -> None:
    world = World()
    rows = [board("10.0.0.1:9400", uuids[0]), board("10.0.0.2:9400", uuids[1])]
    assert nodes_of(world, rows, 8, version) == {1.0: "10.0.0.1", 2.0: "10.0.0.2"}
    assert world.decoder.noted["node_clash"] == 1


def test_a_machine_that_comes_an_hour_after_its_namesake_is_another_one() -> None:
    world = World()
    first, second = board("10.0.0.1:9400", "GPU-a"), board("10.0.0.2:9400", "GPU-b")
    for at in range(240):
        world.decode([first], received_ms=T0 + 15_000 * at)
    world.decode([second], received_ms=T0 + 15_000 * 240)
    assert [row[0] for row in world.named(world.decode([first, second], received_ms=T0 + 15_000 * 241))] == [
        "10.0.0.1/0",
        "10.0.0.2/0",
    ]


@pytest.mark.parametrize("uuid", ["GPU-a", ""])
def test_an_exporter_at_a_new_address_keeps_its_node(uuid: str) -> None:
    world = World()
    assert nodes_of(world, [board("10.0.0.1:9400", uuid)], 4) == {1.0: "gpu-host"}
    assert nodes_of(world, [board("10.0.0.9:9400", uuid)], 8, after=4) == {9.0: "gpu-host"}
    assert "node_clash" not in world.decoder.noted


def test_two_ports_of_one_host_are_one_machine() -> None:
    world = World()
    rows = [board("10.0.0.1:9400", "", 0), board("10.0.0.1:9500", "", 0)]
    assert nodes_of(world, rows, 8) == {1.0: "gpu-host"}
