"""A resolver of lines of AMD's device metrics exporter to the same GPU series as DCGM's.

    gpu_power_usage{gpu_id="0",serial_number="…",card_model="…",hostname="n1"}

docs/sources/amd.md lists the metrics. Their names and units come from the exporter's list of metrics and its
source, versions 1.0 to 1.5, with or without `amd_`. A partition counts as a GPU, with the exporter's number. Only
totals are read. The RAS blocks that an ECC total sums up are skipped, and so are raw profiler counters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fleetcast.fleet import clock_reasons as reasons
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpus import GpuFacts, parse_gpu_index, record_device_names, shorten_model
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.ingest.pages.text import Found, Target
from fleetcast.ingest.series import Fold, Form, Series, hash_part
from fleetcast.ingest.tally import SkipRule

PREFIX = "amd_"
_OURS = ("gpu_", "pcie_")
_MARKS = ("serial_number", "card_model")  # one of these is on every line of the exporter
_PASSED = re.compile(  # known, and not read
    r"gpu_(ecc_|xgmi_nbr_|prof_|violation_|m(in|ax)_clock$|nodes_total$|health$|afid_errors$|hbm_temperature$)"
    r"|gpu_\w*(_visible_vram|_gtt|voltage|_instantaneous|(mma|vcn|jpeg)_activity)$|pcie_"
)
_PARTS = ("clock_index", "clock_type", "link_index")  # labels that split a sum
_BLANK = 65_535.0  # "not available" in fields of 16 bits; those of 31 and 64 bits are among DCGM's blanks
_INSTINCT = re.compile(r"MI\d{3}[A-Z]?")
# PCI device ids (amdgpu.ids), where a driver knows no name.
_DEVICES = {
    **{"0x738c": "MI100", "0x740f": "MI210", "0x7408": "MI250X", "0x740c": "MI250X", "0x74a0": "MI300A"},
    **{"0x74a1": "MI300X", "0x74a2": "MI308X", "0x74a5": "MI325X", "0x75a0": "MI350X", "0x75a3": "MI355X"},
}


@dataclass(frozen=True, slots=True)
class _Reading:
    metric: int
    scale: float = 1.0
    fold: Fold = Fold.WHOLE
    form: Form = Form.PLAIN
    ceiling: float = float("nan")


def _make_gauge_reading(metric: str, scale: float = 1.0) -> _Reading:
    return _Reading(find_metric_row(EntityKind.GPU, metric), scale, Fold.WHOLE, Form.DCGM, _BLANK)


def _make_amount_reading(metric: str, scale: float) -> _Reading:
    """Return the reading of an amount that is never 0, such as a board's memory or its used energy."""
    return _Reading(find_metric_row(EntityKind.GPU, metric), scale, Fold.WHOLE, Form.POSITIVE)


def _make_sensor_reading(metric: str, fold: Fold = Fold.WHOLE) -> _Reading:
    """Return the reading of a gauge that is never 0. Virtual functions print 0 for unknown values."""
    return _Reading(find_metric_row(EntityKind.GPU, metric), 1.0, fold, Form.POSITIVE, _BLANK)


def _make_total_reading(metric: str, scale: float = 1.0, fold: Fold = Fold.WHOLE) -> _Reading:
    return _Reading(find_metric_row(EntityKind.GPU, metric), scale, fold, Form.DCGM)


def _make_throttling_reading(bit: int) -> _Reading:
    return _Reading(find_metric_row(EntityKind.GPU, "clock_event_reasons"), bit, Fold.SUM, Form.FLAG, _BLANK)


THROTTLING = {
    f"gpu_violation_{name}_residency_percentage": _make_throttling_reading(bit)
    for name, bit in (
        ("processor_hot", reasons.SLOWDOWN),
        ("ppt", reasons.POWER_CAP),
        ("socket_thermal", reasons.SOFTWARE_THERMAL),
        ("vr_thermal", reasons.HARDWARE_THERMAL),
        ("hbm_thermal", reasons.MEMORY_THERMAL),
    )
}
_CLOCKS = {
    "system": _make_sensor_reading("sm_clock_mhz", Fold.MEAN),
    "memory": _make_sensor_reading("mem_clock_mhz", Fold.MEAN),
}
_MIB = 2.0**20
# Of several names of one series the first on a page counts: older drivers and cards have others.
READINGS = {
    "gpu_gfx_activity": _make_gauge_reading("gpu_util", 0.01),
    "gpu_umc_activity": _make_gauge_reading("mem_copy_util", 0.01),
    "gpu_prof_sm_active": _make_gauge_reading("sm_active", 0.01),
    "gpu_prof_tensor_active_percent": _make_gauge_reading("tensor_active", 0.01),
    "gpu_prof_occupancy_percent": _make_gauge_reading("sm_occupancy", 0.01),
    "gpu_prof_gui_util_percent": _make_gauge_reading("graphics_active", 0.01),
    "gpu_power_usage": _make_sensor_reading("power_w"),
    "gpu_package_power": _make_sensor_reading("power_w"),
    "gpu_average_package_power": _make_sensor_reading("power_w"),
    "gpu_junction_temperature": _make_sensor_reading("gpu_temp_c"),
    "gpu_edge_temperature": _make_sensor_reading("gpu_temp_c"),
    "gpu_memory_temperature": _make_sensor_reading("memory_temp_c"),
    "gpu_total_vram": _make_amount_reading("fb_total_bytes", _MIB),
    "gpu_used_vram": _make_total_reading("fb_used_bytes", _MIB),
    "gpu_free_vram": _make_total_reading("fb_free_bytes", _MIB),
    "gpu_energy_consumed": _make_amount_reading("energy_j", 1e-6),
    "gpu_ecc_correct_total": _make_total_reading("ecc_sbe_volatile"),
    "gpu_ecc_uncorrect_total": _make_total_reading("ecc_dbe_volatile"),
    "gpu_xgmi_link_rx": _make_total_reading("nvlink_rx_bytes_per_s", 1024.0, Fold.RATE),
    "gpu_xgmi_link_tx": _make_total_reading("nvlink_tx_bytes_per_s", 1024.0, Fold.RATE),
    "pcie_replay_count": _make_total_reading("pcie_replays"),
    **THROTTLING,
}


class AmdResolver(Resolver):
    """A resolver of lines of AMD's exporter to series."""

    names = frozenset(prefix + name for prefix in ("", PREFIX) for name in (*READINGS, "gpu_clock"))
    together = frozenset(prefix + name for prefix in ("", PREFIX) for name in THROTTLING)

    @classmethod
    def claims(cls, name: str) -> bool:
        return name.removeprefix(PREFIX).startswith(_OURS)

    @classmethod
    def reads(cls, name: str) -> bool:
        bare = name.removeprefix(PREFIX)
        return bare in READINGS or bare == "gpu_clock"

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        """Resolve a line. Returns None for unknown names and for lines of other exporters.

        Raises RecordError `bad_label` if no label names a GPU or a node.
        """
        if not any(mark in labels for mark in _MARKS):
            return None
        bare = name.removeprefix(PREFIX)
        reading = _CLOCKS.get(_parse_clock_type(labels)) if bare == "gpu_clock" else READINGS.get(bare)
        if reading is None:
            if bare == "gpu_clock":
                return SkipRule.OTHER_PART
            return None if _PASSED.match(bare) is None else SkipRule.NOT_USED
        index = parse_gpu_index(labels.get("gpu_id", ""), "gpu_id")
        uuid = labels.get("gpu_uuid", "")  # the serial number is one for all partitions
        uuid = uuid if uuid.strip("0-") else ""  # of a virtual function all digits are 0
        node = self.find_gpu_node(labels, target, index, uuid)
        self.inventory.record_facts(node, index, GpuFacts(_parse_model(labels), uuid))
        record_device_names(self.entities, node, index, uuid)
        gpu = self.entities.add_to_node(EntityKind.GPU, node, index)
        return Series(
            EntityKind.GPU,
            reading.metric,
            gpu,
            self.entities.find_or_add_node(node),
            gpu,
            reading.scale,
            reading.form,
            reading.ceiling,
            reading.fold,
            part=hash_part(bare, *(labels.get(label, "") for label in _PARTS)) if reading.fold else 0,
        )


def _parse_clock_type(labels: Mapping[str, str]) -> str:
    return labels.get("clock_type", "").lower().removeprefix("gpu_clock_type_")


def _parse_model(labels: Mapping[str, str]) -> str:
    """Return the GPU's short model name, by its series, model or PCI device id, or "" if none names it.

    >>> _parse_model({"card_model": "0x74a1"})
    'MI300X'
    >>> _parse_model({"card_series": "AMD INSTINCT MI300X OAM", "card_model": "102-G30218"})
    'MI300X'
    """
    series, model = labels.get("card_series", ""), labels.get("card_model", "")
    if found := _INSTINCT.search(f"{series} {model}".upper()):
        return found[0]
    if model.lower() in _DEVICES:
        return _DEVICES[model.lower()]
    return next((shorten_model(name) for name in (series, model) if name[:1].isalpha()), "")
