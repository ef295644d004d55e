"""Each sample line of a page is read, refused, ignored by a rule, or unread. A page with nothing read says so."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.page_state import MAX_NAMES
from fleetcast.ingest.pages.text import MAX_BAD_LINES, MAX_LINES
from fleetcast.ingest.pages.unread import describe_unread_page
from fleetcast.ingest.tally import RecordTally, SkipRule
from tests.fuzz.bounds import examples
from tests.ingest.exporter_pages import Desk, labels, page

FIELD = Path(__file__).parents[2] / "field"
POWER = "DCGM_FI_DEV_POWER_USAGE"
IB = '{device="mlx5_0",port="1"}'
AMD = '{gpu_id="0",serial_number="1",card_model="0x74a1",hostname="n2",clock_type="x"}'
NAMES = [
    *(f"{name}{labels(gpu)}" for gpu in range(3) for name in (POWER, "dcgm_fi_dev_gpu_temp", "DCGM_FI_DEV_NEW_FIELD")),
    *(f"DCGM_FI_DEV_GPU_UTIL{labels(0, pod=pod, namespace='ml')}" for pod in ("a", "b")),
    f"DCGM_EXP_CLOCK_EVENTS_COUNT{labels(0)}",
    f"DCGM_FI_DEV_GPU_TEMP{labels(0, nvlink='3')}",
    *(f"node_infiniband_{name}{IB}" for name in ("port_data_received_bytes_total", "symbol_error_total", "info")),
    "node_infiniband_link_downed_total",
    *(f'node_network_receive_errs_total{{device="{device}"}}' for device in ("eth0", "eth1", "lo", "bond0")),
    *(f'node_cpu_seconds_total{{cpu="0",mode="{mode}"}}' for mode in ("idle", "user", "steal")),
    "node_load1",
    'node_uname_info{nodename="n9"}',
    *(f"{name}{AMD}" for name in ("amd_gpu_power_usage", "gpu_gtt", "gpu_new", "gpu_clock", "gpu_total_gtt")),
    *(f'sglang:{name}{{model_name="m",tp_rank="{rank}"}}' for rank in (0, 1) for name in ("num_running_reqs", "new")),
    *(f'vllm:time_to_first_token_seconds_{end}{{model_name="m",le="0.25"}}' for end in ("bucket", "sum", "created")),
    "go_threads",
    "up",
    'nvidia_smi_power_draw_watts{uuid="1"}',
    "made:up",
    "not a name",
    "0name",
    'open{label="',
]
VALUES = ["1", "400.5", "NaN", "+Inf", "2147483632", "9223372036854775794", "0", "-1", "x", "", "1 2", "[N/A]"]
TAILS = ["", "", "", "", " 1000", " 999999999999999", " soon", " 1 2"]
LINES = st.one_of(
    st.builds("{} {}{}".format, st.sampled_from(NAMES), st.sampled_from(VALUES), st.sampled_from(TAILS)),
    st.builds("{} 1".format, st.sampled_from(NAMES)),
    st.sampled_from(["", "   ", "\t", "# HELP a b", "  # TYPE a gauge", "# EOF", '#{x="1"} 3']),
    st.text(max_size=20).filter(lambda text: "\n" not in text),
)


def sample_lines(text: bytes) -> int:
    """What the law's right side is, counted without the decoder."""
    return sum(1 for line in text.split(b"\n") if line.strip(b" \t\r") and not line.strip(b" \t\r").startswith(b"#"))


@given(
    st.lists(st.lists(LINES, max_size=12), min_size=1, max_size=4),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1000, 1_795_648_400_000]),
)
@examples(150)
def test_what_became_of_each_line_adds_up(pages: list[list[str]], ends: bool, open_metrics: bool, now_ms: int) -> None:
    desk = Desk()
    for moment, lines in enumerate([*pages, pages[-1], pages[-1], pages[0]]):
        text = "\n".join(lines).encode() + (b"\n" if ends else b"")
        batch = desk.decoder.decode(text, now_ms + 1000 * moment, open_metrics=open_metrics)
        tally = batch.tally
        assert tally is not None
        assert tally.all == sample_lines(text), tally
        assert min([tally.read, tally.refused, tally.unread, *tally.ignored.values()], default=0) >= 0
        assert tally.refused <= sum(error.count for error in batch.bad), "what is refused is a bad record"
        assert bool(tally.names) == bool(tally.unread)
        assert len(batch) <= tally.read


def test_an_abandoned_page_and_one_with_too_many_lines_add_up() -> None:
    for text in (
        page(*["broken x"] * (MAX_BAD_LINES + 5), "# a comment", f"{POWER}{labels(0)} 1"),
        page(*["up 1"] * (MAX_LINES + 7)) + b"up",
    ):
        tally = Desk().decoder.decode(text, 1000).tally
        assert tally is not None
        assert tally.all == sample_lines(text)
        assert tally.refused >= 6


def test_a_repeated_page_has_the_same_tally_without_reading_its_lines() -> None:
    desk = Desk()
    lines = page(f"{POWER}{labels(0)} 400", f"{POWER}{labels(1)} 2147483632", "go_threads 7", "made:up 1", "made:up2 1")
    first, second = (desk.decoder.decode(lines, now_ms).tally for now_ms in (1000, 2000))
    assert first == second == RecordTally(1, 0, {SkipRule.EXPORTER: 1, SkipRule.NO_DATA: 1}, 2, ("made:up", "made:up2"))
    broken = desk.decoder.decode(lines.replace(b" 400", b" x"), 3000).tally
    assert broken is not None
    assert dataclasses.replace(broken, ignored={}) == RecordTally(0, 1, {}, 2, ("made:up", "made:up2"))
    assert desk.decoder.decode(lines, 4000).tally == first


def test_names_that_differ_in_case_only_are_read() -> None:
    desk = Desk()
    batch = desk.decoder.decode((FIELD / "02-lower-case-names.prom").read_bytes(), 1000)
    assert desk.words(batch) == {
        f"{metric} gpu-0/{gpu}": value
        for gpu in (0, 1)
        for metric, value in (("graphics_active", 0.91), ("gpu_temp_c", 61.0), ("xid", 79.0))
    }
    assert batch.tally == RecordTally(read=6)
    assert desk.resolver.inventory.get_gpu_models() == {"gpu-0": "A100"}
    assert desk.entities.devices.find_gpu("gpu-0", "GPU-1") == 1


@pytest.mark.parametrize("change", [str.lower, str.upper, str.title])
def test_case_is_not_what_a_name_says(change: "type[str]") -> None:
    """Ports, hosts and engines are read however an agent writes their names and labels."""
    desk = Desk()
    for name, value in (
        ("node_infiniband_port_data_received_bytes_total" + IB, 1.0),
        ("node_memory_MemTotal_bytes", 2.0),
        ('vllm:num_requests_running{model_name="m"}', 3.0),
        ("amd_gpu_power_usage" + AMD, 4.0),
    ):
        head, brace, tail = name.partition("{")
        written = change(head) + brace + "".join(change(part) if "=" not in part else part for part in [tail])
        batch = desk.decoder.decode(page(f"{written} {value}"), 1000)
        assert [samples.value.tolist() for samples in batch.samples] == [[value]], written
    assert {kind for kind in EntityKind if desk.names(kind)} >= {EntityKind.PORT, EntityKind.SERVED_MODEL}


@pytest.mark.parametrize(
    ("file", "has", "reads"),
    [
        ("41-nvidia-smi-exporter.prom", "nvidia_smi_gpu_info", "dcgm-exporter"),
        ("43-infiniband-exporter.prom", "infiniband_port_transmit_data_bytes_total", "node_exporter"),
    ],
)
def test_a_page_of_which_nothing_is_read_says_what_would_be(file: str, has: str, reads: str) -> None:
    desk = Desk()
    text = (FIELD / file).read_bytes()
    for now_ms in (1000, 2000):
        tally = desk.decoder.decode(text, now_ms).tally
        assert tally is not None
        assert (tally.unread, tally.read) == (sample_lines(text), 0)
        assert has in desk.decoder.why_unread
        assert reads in desk.decoder.why_unread
    desk.decoder.decode(page(f"{POWER}{labels(0)} 1"), 3000)
    assert desk.decoder.why_unread == ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("k8s_DCGM_FI_DEV_GPU_TEMP", "let dcgm-exporter print them as DCGM_FI_"),
        ("accelerator_nvidia_temperature_current_celsius", "add the source gpud"),
        ("HostGPUMemoryUsage", "HAMi's scheduler and device plugin); scrape dcgm-exporter"),
        ("rdma_hw_counters_out_of_sequence", "source sysfs or perfquery"),
        ("dynamo_component_inflight_requests", "the page of the engine behind it"),
        ("npu_chip_info_utilization", "Ascend NPUs"),
        ("kube_pod_info", "source kubernetes"),
        ("slurm_nodes_alloc", "source slurm"),
        ("hw_gpu_utilization_ratio", "dcgm-exporter"),
        ("DCGM_FI_DEV_UNHEARD_OF", "DCGM_FI_…"),
        ("habanalabs_power_mW", "Gaudi is not"),
        ("my_app_requests_total", "expected dcgm-exporter"),
        ("go_goroutines", "it has go_goroutines"),
    ],
)
def test_the_sentence_names_what_the_page_has(name: str, words: str) -> None:
    desk = Desk()
    desk.decoder.decode(page(f"{name} 1", "process_cpu_seconds_total 1"), 1000)
    assert name in desk.decoder.why_unread
    assert words in desk.decoder.why_unread


def test_many_names_are_cut() -> None:
    desk = Desk()
    tally = desk.decoder.decode(page(*(f"made_up_{number} 1" for number in range(100))), 1000).tally
    assert tally is not None
    assert tally.names == tuple(f"made_up_{number}" for number in range(MAX_NAMES))
    assert "made_up_2, …;" in describe_unread_page(tally.names)


def test_a_page_without_samples_or_with_bad_lines_alone_is_not_called_unread() -> None:
    desk = Desk()
    for text in (b"", b"# HELP a b\n", page(f"{POWER}{labels(0)} x")):
        desk.decoder.decode(text, 1000)
        assert desk.decoder.why_unread == ""
