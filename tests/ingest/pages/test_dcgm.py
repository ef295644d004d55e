import csv
import os
from pathlib import Path

import pytest

from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpus import GpuFacts, GpuInventory
from fleetcast.ingest.pages.dcgm import FIELD_IDS
from fleetcast.ingest.tally import SkipRule
from tests.ingest.exporter_pages import Desk, labels, page, reasons

DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))


def test_every_dcgm_metric_of_the_catalogue_has_a_field_name() -> None:
    named = set(FIELD_IDS.values())
    assert {metric.dcgm_id for metric in METRICS[EntityKind.GPU] if metric.dcgm_id is not None} == named


def test_field_ids_agree_with_the_header_of_dcgm() -> None:
    path = DATA / "telemetry" / "dcgm-fields" / "dcgm_fields.csv"
    if not path.exists():
        pytest.skip(f"no {path}")
    with path.open(newline="") as file:
        header = {row["field"]: int(row["id"]) for row in csv.DictReader(file)}
    ours = {name: field for name, field in FIELD_IDS.items() if name in header}
    assert ours == {name: header[name] for name in ours}
    wanted = set(FIELD_IDS.values())
    assert {name for name, field in header.items() if field in wanted} <= set(FIELD_IDS)


@pytest.mark.parametrize(
    ("old", "new", "value", "word"),
    [
        ("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS", "412.5", "power_w"),
        ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR", "79", "xid"),
        ("DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO", "0.64", "sm_active"),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO", "0.19", "tensor_active"),
        ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL", "3", "pcie_replays"),
        ("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", "DCGM_FI_DEV_CLOCKS_EVENT_REASONS", "4", "clock_event_reasons"),
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_ROW_REMAP_FAILED", "1", "row_remap_failure"),
        ("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS", "61", "gpu_temp_c"),
    ],
)
def test_a_renamed_field_is_the_same_series(old: str, new: str, value: str, word: str) -> None:
    desk = Desk()
    before = desk.decode(f"{old}{labels(3)} {value}")
    after = desk.decode(f"{new}{labels(3)} {value}")
    assert before == after == {f"{word} n001/3": float(value)}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("DCGM_FI_DEV_GPU_UTIL{} 97", 0.97),
        ("DCGM_FI_DEV_GPU_UTIL{} 1", 0.01),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO{} 97", 0.97),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO{} 0.97", 0.97),
        ("DCGM_FI_DEV_GPU_UTIL_RATIO{} 0", 0.0),
        ("DCGM_FI_PROF_SM_ACTIVE{} 0.5", 0.5),
        ("DCGM_FI_PROF_SM_UTIL_RATIO{} 0.5", 0.5),
        ("DCGM_FI_PROF_SM_ACTIVE{} 1.002", 1.0),
        ("DCGM_FI_PROF_SM_ACTIVE{} 64", 0.64),
        ("DCGM_FI_DEV_FB_USED{} 2", 2 * 2**20),
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{} 319159391", 319_159.391),
        ("DCGM_FI_DEV_THERMAL_VIOLATION{} 2500000000", 2.5),
        ("DCGM_FI_PROF_NVLINK_TX_BYTES{} 50000000000", 5e10),
    ],
)
def test_units_are_converted_once_at_the_door(line: str, value: float) -> None:
    (decoded,) = Desk().decode(line.replace("{}", labels(0))).values()
    assert decoded == pytest.approx(value)


@pytest.mark.parametrize(
    "blank",
    [
        "2147483632",
        "2147483635",
        "9223372036854775792",
        "9223372036854775794",
        "140737488355328.000000",
        "140737488355330.000000",
    ],
)
def test_blanks_are_missing_and_not_bad(blank: str) -> None:
    desk = Desk()
    lines = page(f"DCGM_FI_DEV_MEMORY_TEMP{labels(0)} {blank}", f"DCGM_FI_DEV_GPU_TEMP{labels(0)} 31")
    for _ in range(2):
        batch = desk.decoder.decode(lines, 1000)
        assert desk.words(batch) == {"gpu_temp_c n001/0": 31.0}
        assert batch.bad == ()
    assert desk.decoder.noted["blank"] == 2


def test_a_large_counter_is_no_blank() -> None:
    assert Desk().decode(f"DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{labels(0)} 2147484000") != {}


@pytest.mark.parametrize(
    ("text", "gpu"),
    [
        ('gpu="0",UUID="GPU-1",device="nvidia0",Hostname="n7"', "n7/0"),
        (
            'gpu="1",UUID="GPU-1",pci_bus_id="00000000:1B:00.0",device="nvidia1",modelName="NVIDIA H100",Hostname="n7",'
            'container="c",namespace="s",pod="p",pod_uid=""',
            "n7/1",
        ),
        ('gpu="2",UUID="GPU-1",device="nvidia2",modelName="NVIDIA L40S",hostname="n7"', "n7/2"),
        ('gpu="3",gpu_uuid="GPU-1",model_name="NVIDIA H100 80GB HBM3",hostname="n7"', "n7/3"),
        ('gpu="4",UUID="GPU-1"', "host/4"),
        ('gpu="5", UUID="GPU-1"', "host/5"),
        ('gpu="6",UUID="GPU-1",Hostname=""', "host/6"),
        ('gpu="7",UUID="GPU-1",Hostname="n7",DCGM_FI_PROCESS_NAME="/usr/bin/dcgm-exporter",hpc_job="77"', "n7/7"),
    ],
)
def test_every_generation_of_labels_names_the_gpu(text: str, gpu: str) -> None:
    assert Desk().decode(f"DCGM_FI_DEV_POWER_USAGE{{{text}}} 70.5") == {f"power_w {gpu}": 70.5}


def test_the_configured_node_wins_over_the_label() -> None:
    desk = Desk("gpu-9", fixed=True)
    assert desk.decode(f"DCGM_FI_DEV_POWER_USAGE{labels(0, 'dcgm-exporter-wwwjh')} 70") == {"power_w gpu-9/0": 70.0}


def test_a_full_host_name_finds_the_node_the_topology_calls_by_its_first_part() -> None:
    desk = Desk()
    desk.entities.find_or_add_node("n001")
    assert desk.decode(f"DCGM_FI_DEV_POWER_USAGE{labels(0, 'n001.cluster.example')} 70") == {"power_w n001/0": 70.0}
    assert desk.decode(f"DCGM_FI_DEV_POWER_USAGE{labels(0, 'n002.cluster.example')} 70") == {
        "power_w n002.cluster.example/0": 70.0
    }


def test_mig_instances_are_entities_of_their_own() -> None:
    desk = Desk()
    values = desk.decode(
        f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{labels(0, GPU_I_PROFILE='1g.10gb', GPU_I_ID='7')} 0.25",
        f"DCGM_FI_PROF_GR_ENGINE_ACTIVE{labels(0, GPU_I_PROFILE='1g.10gb', GPU_I_ID='8')} 0.5",
        f"DCGM_FI_DEV_GPU_TEMP{labels(0, GPU_I_PROFILE='1g.10gb', GPU_I_ID='7')} 40",
        f"DCGM_FI_DEV_GPU_TEMP{labels(0, GPU_I_PROFILE='1g.10gb', GPU_I_ID='8')} 40",
    )
    assert values == {
        "graphics_active n001/0/7": 0.25,
        "graphics_active n001/0/8": 0.5,
        "gpu_temp_c n001/0": 40.0,
    }
    assert desk.decoder.reported[0].gpus == 1
    table = desk.entities[EntityKind.GPU_INSTANCE]
    assert table.node.tolist() == [0, 0]


def test_the_xid_gauge_keeps_its_raw_code_whatever_its_labels_say() -> None:
    desk = Desk()
    line = f"DCGM_FI_DEV_XID_ERRORS{labels(0, err_code='{code}', err_msg='{message}')} {{code}}"
    quiet = line.replace("{code}", "0").replace("{message}", "No Error")
    assert desk.decode(quiet) == {"xid n001/0": 0.0}
    loud = line.replace("{code}", "79").replace("{message}", "GPU has fallen off the bus, reset it")
    for _ in range(2):
        assert desk.decode(loud) == {"xid n001/0": 79.0}


def test_windowed_counts_of_the_exporter_are_ignored_without_a_complaint() -> None:
    desk = Desk()
    values = desk.decode(
        f"DCGM_EXP_XID_ERRORS_COUNT{labels(0, window_size_in_ms='300000', xid='42')} 1",
        f"DCGM_FI_DEV_XID_ERRORS_ACTIVE{labels(0, window_size_in_ms='300000', xid='42')} 1",
        f"DCGM_EXP_CLOCK_EVENTS_COUNT{labels(0, clock_event='gpu_idle')} 1",
    )
    assert values == {}
    assert desk.tally.ignored == {SkipRule.REPEATED: 3}


def test_single_links_switches_and_cpus_are_not_gpus() -> None:
    desk = Desk()
    batch = desk.decoder.decode(
        page(
            'DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_TOTAL{nvlink="3",gpu="0",gpu_uuid="GPU-1",hostname="n1"} 4',
            'DCGM_FI_DEV_NVSWITCH_TEMPERATURE_CURRENT{nvswitch="nvswitch0",hostname="n1"} 41',
            'DCGM_FI_DEV_CPU_UTIL_TOTAL{cpu="0",Hostname="n1"} 0.3',
        ),
        1000,
    )
    assert len(batch) == 0
    assert batch.bad == ()


def test_a_line_without_a_gpu_label_is_found_by_its_uuid() -> None:
    desk = Desk()
    desk.decode(f"DCGM_FI_DEV_POWER_USAGE{labels(3)} 70")
    known, unknown = 'UUID="GPU-00000000-n001-3"', 'UUID="GPU-else"'
    batch = desk.decoder.decode(
        page(f"DCGM_FI_DEV_GPU_TEMP{{{known}}} 40", f"DCGM_FI_DEV_GPU_TEMP{{{unknown}}} 40"), 2000
    )
    assert desk.words(batch) == {"gpu_temp_c n001/3": 40.0}
    assert reasons(batch) == ["bad_label"]


def test_the_inventory_knows_models_and_follows_a_swapped_board() -> None:
    inventory = GpuInventory()
    for index in range(4):
        inventory.record_facts("n1", index, GpuFacts("H100", f"old-{index}"))
    inventory.record_facts("n1", 0, GpuFacts("H200", "new-0"))
    assert inventory.get_gpu_models() == {"n1": "H100"}
    assert inventory.find_slot("new-0") == ("n1", 0)
    assert inventory.find_slot("old-0") is None
    inventory.record_facts("n1", 0, GpuFacts())  # a line that says less takes nothing away
    assert inventory.nodes["n1"][0] == GpuFacts("H200", "new-0")
    for index in range(1, 4):
        inventory.record_facts("n1", index, GpuFacts("H200", f"new-{index}"))
    assert inventory.get_gpu_models() == {"n1": "H200"}


def test_models_come_from_either_spelling_of_the_label() -> None:
    desk = Desk()
    desk.decode(
        f"DCGM_FI_DEV_POWER_USAGE{labels(0)} 70",
        'DCGM_FI_DEV_POWER_USAGE{gpu="0",gpu_uuid="GPU-2",model_name="NVIDIA A100-SXM4-80GB",hostname="n002"} 70',
    )
    assert desk.resolver.inventory.get_gpu_models() == {"n001": "H100", "n002": "A100"}


def test_real_captures_decode_without_a_bad_record() -> None:
    paths = sorted((DATA / "telemetry").glob("dcgm-*/*.prom"))
    if not paths:
        pytest.skip(f"no captures in {DATA}")
    desk = Desk()
    for path in paths:
        batch = desk.decoder.decode(path.read_bytes(), 1000)
        assert [reason for reason in reasons(batch) if reason != "duplicate"] == [], path
        assert len(batch) >= 10, path
