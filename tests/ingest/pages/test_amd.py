"""AMD's device metrics exporter fills the series that DCGM fills."""

import pytest

from fleetcast.clients.prometheus import MatrixRow
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.remote_write.backfill import make_write_request
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.tally import SkipRule
from tests.ingest.amd_pages import HOT, LINKS, amd_labels, amd_lines, amd_page
from tests.ingest.exporter_pages import Desk, reasons

SOCKET, HBM = (f"gpu_violation_{part}_thermal_residency_percentage" for part in ("socket", "hbm"))


def test_a_page_is_read_in_our_units() -> None:
    desk = Desk()
    desk.decode(*amd_lines(2), now_ms=1000)
    read = desk.decode(*amd_lines(2, changed={"link": 1e9 + 5}), now_ms=6000)
    assert read == {
        "gpu_util m001/2": pytest.approx(0.97),
        "mem_copy_util m001/2": pytest.approx(0.41),
        "power_w m001/2": 612.0,
        "gpu_temp_c m001/2": 71.0,
        "memory_temp_c m001/2": 58.0,
        "energy_j m001/2": pytest.approx(8.25e6),
        "fb_total_bytes m001/2": 196592 * 2**20,
        "fb_used_bytes m001/2": 151000 * 2**20,
        "fb_free_bytes m001/2": 45592 * 2**20,
        "ecc_sbe_volatile m001/2": 3.0,
        "ecc_dbe_volatile m001/2": 0.0,
        "pcie_replays m001/2": 2.0,
        "clock_event_reasons m001/2": 0.0,
        "sm_clock_mhz m001/2": 2105.0,
        "mem_clock_mhz m001/2": 1300.0,
        "nvlink_rx_bytes_per_s m001/2": LINKS * 5 * 1024 / 5,
        "nvlink_tx_bytes_per_s m001/2": LINKS * 5 * 1024 / 5,
    }
    assert desk.tally.unread == 0


def test_each_reading_fills_a_metric_of_the_catalogue_that_dcgm_has_too() -> None:
    names = {metric.name for metric in METRICS[EntityKind.GPU] if metric.dcgm_id is not None}
    desk = Desk()
    changed = {f"gpu_prof_{name}": 50.0 for name in ("sm_active", "tensor_active_percent", "occupancy_percent")}
    read = {name.split()[0]: value for name, value in desk.decode(*amd_lines(0, changed=changed)).items()}
    assert set(read) <= names
    assert [read[name] for name in ("sm_active", "tensor_active", "sm_occupancy")] == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("prefix", ["", "amd_"])
def test_older_cards_and_the_prefix_fill_the_same_series(prefix: str) -> None:
    lines = [
        f"{prefix}gpu_average_package_power{amd_labels(0)} 300",
        f"{prefix}gpu_edge_temperature{amd_labels(0)} 44",
        f"{prefix}gpu_clock{amd_labels(0, clock_index='0', clock_type='GPU_CLOCK_TYPE_SYSTEM')} 1700",
    ]
    assert Desk().decode(*lines) == {"power_w m001/0": 300, "gpu_temp_c m001/0": 44, "sm_clock_mhz m001/0": 1700}


def test_throttling_is_a_mask_of_reasons() -> None:
    desk = Desk()
    numbers = {f"gpu_violation_{part}_residency_percentage": float(at) for at, part in enumerate(HOT)}
    read = desk.decode(*amd_lines(0, changed=numbers))
    assert read["clock_event_reasons m001/0"] == 0x4 | 0x20 | 0x40 | 0x10000
    assert desk.decode(*amd_lines(0, changed={SOCKET: 0.4}))["clock_event_reasons m001/0"] == 0x20


def test_a_page_of_the_same_shape_reads_as_the_lines_do() -> None:
    """The second page takes the fast path; rates, masks and means with it."""
    fast, slow = Desk(), Desk()
    pages = [amd_page({0: {"link": 1e9 + 100 * at, HBM: float(at % 2)}}) for at in range(4)]
    for at, page in enumerate(pages):
        words = fast.words(fast.decoder.decode(page, 1000 * at))
        slow.decoder._shape = None
        assert words == slow.words(slow.decoder.decode(page + b"\n" * at, 1000 * at))
    assert fast.decoder._shape is not None


def test_link_rates_begin_at_the_second_page_and_survive_a_driver_that_restarts() -> None:
    desk = Desk()
    rates = [
        desk.decode(*amd_lines(0, changed={"link": link}), now_ms=at * 1000).get("nvlink_tx_bytes_per_s m001/0")
        for at, link in enumerate((1e9, 1e9 + 7, 5.0, 9.0))
    ]
    assert rates == [None, LINKS * 7 * 1024, None, LINKS * 4 * 1024]


def test_a_clock_that_is_set_back_costs_one_link_rate() -> None:
    desk = Desk()
    rates = [
        desk.decode(*amd_lines(0, changed={"link": 1e9 + at}), now_ms=now_ms).get("nvlink_tx_bytes_per_s m001/0")
        for at, now_ms in enumerate((9_000_000, 9_001_000, 1_000_000, 1_001_000))
    ]
    assert rates == [None, LINKS * 1024, None, LINKS * 1024]


def test_what_a_driver_prints_for_not_available_is_missing() -> None:
    read = Desk().decode(*amd_lines(0, changed={"gpu_power_usage": 65535, "clock": 65535, "gpu_umc_activity": 65535}))
    assert not {"power_w m001/0", "sm_clock_mhz m001/0", "mem_copy_util m001/0"} & set(read)
    assert "gpu_util m001/0" in read


def test_malformed_lines_are_counted_and_the_rest_is_read() -> None:
    desk = Desk()
    page = "\n".join(
        [
            *amd_lines(0),
            f"gpu_power_usage{amd_labels(0, gpu_id='-1')} 5",
            f"gpu_power_usage{amd_labels(0, gpu_id='')} 5",
            f"gpu_power_usage{amd_labels(0, gpu_id='9999')} 5",
            f"gpu_power_usage{amd_labels(1, node='a/b')} 5",
            f"gpu_junction_temperature{amd_labels(1)} warm",
            'gpu_gfx_activity{gpu_id="1" 4',
            f"gpu_gfx_activity{amd_labels(1)} NaN",
            f"gpu_used_vram{amd_labels(1)}",
            "",
        ]
    )
    batch = desk.decoder.decode(page.encode(), 1000)
    assert sorted(reasons(batch)) == [*["bad_label"] * 5, "bad_line", "bad_value", "not_finite"]
    assert desk.words(batch)["power_w m001/0"] == 612.0


def test_unknown_names_are_counted_and_known_ones_that_are_not_read_are_not() -> None:
    desk = Desk()
    passed = (
        "gpu_ecc_deferred_umc",
        "gpu_nodes_total",
        "gpu_voltage",
        "gpu_used_gtt",
        "pcie_bandwidth",
        "gpu_max_clock",
    )
    more = ("gpu_xgmi_nbr_0_nop_tx", "gpu_prof_sq_waves", "gpu_afid_errors", "gpu_vcn_busy_instantaneous", "gpu_health")
    lines = [f"{name}{amd_labels(0)} 1" for name in (*passed, *more, "gpu_new_thing")]
    assert desk.decode(*lines, "gpu_power_usage 7", 'gpu_temperature{gpu="0"} 55') == {}, "others have such names too"
    assert desk.tally.names == ("gpu_new_thing", "gpu_power_usage", "gpu_temperature")
    assert desk.tally.ignored == {SkipRule.NOT_USED: len(passed) + len(more)}


@pytest.mark.parametrize(
    ("labels", "model"),
    [
        ({"card_model": "0x74a1"}, "MI300X"),
        ({"card_model": "0x740F"}, "MI210"),
        ({"card_series": "AMD INSTINCT MI325X", "card_model": "102-G35401-0C"}, "MI325X"),
        ({"card_model": "AMD Instinct MI355X OAM"}, "MI355X"),
        ({"card_model": "AMD Radeon AI Pro R9700S"}, "Radeon AI Pro R9700S"),
        ({"card_model": "0xffff"}, None),
        ({"card_model": "102-G30211-00"}, None),
    ],
)
def test_the_model_of_a_card_has_its_short_name(labels: dict[str, str], model: str | None) -> None:
    desk = Desk()
    desk.decode(f"gpu_power_usage{amd_labels(0, **labels)} 5")
    assert desk.resolver.inventory.get_gpu_models() == ({} if model is None else {"m001": model})


def test_a_target_that_the_configuration_names_keeps_its_name() -> None:
    desk = Desk("n7", fixed=True)
    assert desk.decode(f"gpu_power_usage{amd_labels(0)} 5") == {"power_w n7/0": 5}


def test_a_reported_gpu_counts_as_one_of_its_node() -> None:
    desk = Desk()
    desk.decoder.decode(amd_page(), 1000)
    (seen,) = desk.decoder.reported.values()
    assert (seen.gpus, seen.ports) == (4, 0)


def test_remote_writes_and_backfill_read_the_same() -> None:
    """The moments between the first and the last, which sums of parts wait for."""
    pages = [amd_page({1: {"link": 1e9 + 50 * at, SOCKET: 3.0 * (at > 1)}}, gpus=2) for at in range(4)]
    desk = Desk("m001")
    told = [desk.words(desk.decoder.decode(page, 1000 * at)) for at, page in enumerate(pages)]
    entities = Entities()
    batch = WriteDecoder(ExporterResolver(entities)).decode_request(make_write_request(_matrix(pages)), 10_000)
    assert not batch.bad
    written: dict[tuple[str, int], float] = {}
    for samples in batch.samples:
        columns = (samples.metric, samples.entity, samples.time_ms, samples.value)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for metric, entity, time_ms, value in rows:
            name = f"{METRICS[samples.kind][metric].name} {entities[samples.kind].names[entity]}"
            written.setdefault((name, time_ms), value)
    for name in ("power_w m001/1", "clock_event_reasons m001/1", "sm_clock_mhz m001/0", "energy_j m001/0"):
        assert written[name, 2000] == told[2][name]
    assert written["clock_event_reasons m001/1", 2000] == 0x20
    assert written["nvlink_tx_bytes_per_s m001/1", 2000] == LINKS * 50 * 1024 == told[2]["nvlink_tx_bytes_per_s m001/1"]


def _matrix(pages: list[bytes]) -> list[MatrixRow]:
    """The pages, a second apart, as a Prometheus would have recorded them."""
    from prometheus_client.parser import text_string_to_metric_families

    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    for at, page in enumerate(pages):
        for family in text_string_to_metric_families(page.decode()):
            for sample in family.samples:
                labels = {**sample.labels, "__name__": sample.name, "instance": "m001:5000"}
                series.setdefault(tuple(sorted(labels.items())), []).append((float(at), sample.value))
    return [MatrixRow(dict(labels), points) for labels, points in series.items()]
