"""A resolver of lines of any version of dcgm-exporter to series of GPUs and MIG instances.

    labels of       2.x to 4.x                main since May 2026       NVLink totals
    node            Hostname                  hostname                  hostname
    GPU             gpu, UUID, modelName      gpu, UUID, modelName      gpu, gpu_uuid, model_name
    MIG instance    GPU_I_ID                  GPU_I_ID

A field of the whole GPU (temperature, power) repeats on each MIG instance's line and counts for the GPU.
Links, switches and CPUs are not read. Names have no prefix here, because `DEV` and `PROF` fields do not
overlap. A field renamed in DCGM 4.6 has two names. Source: dcgm_fields.h of DCGM 3.3, 4.5 and 4.6.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import find_dcgm_row
from fleetcast.fleet.node_names import is_node_name
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.gpus import GpuFacts, GpuInventory, parse_gpu_index, record_device_names, shorten_model
from fleetcast.ingest.pages.gpu_page import GpuField
from fleetcast.ingest.pages.resolver import Resolver
from fleetcast.ingest.pages.text import Found, Target
from fleetcast.ingest.series import Form, Series
from fleetcast.ingest.tally import SkipRule

_NAMES: dict[int, tuple[str, ...]] = {
    100: ("DEV_SM_CLOCK",),
    101: ("DEV_MEM_CLOCK",),
    112: ("DEV_CLOCKS_EVENT_REASONS", "DEV_CLOCK_THROTTLE_REASONS"),
    140: ("DEV_MEMORY_TEMP", "DEV_MEMORY_TEMP_CELSIUS"),
    150: ("DEV_GPU_TEMP", "DEV_GPU_TEMP_CELSIUS"),
    155: ("DEV_POWER_USAGE", "DEV_BOARD_POWER_WATTS"),
    156: ("DEV_TOTAL_ENERGY_CONSUMPTION",),
    164: ("DEV_ENFORCED_POWER_LIMIT", "DEV_BOARD_POWER_LIMIT_ENFORCED_WATTS"),
    202: ("DEV_PCIE_REPLAY_COUNTER", "DEV_PCIE_REPLAY_TOTAL"),
    203: ("DEV_GPU_UTIL", "DEV_GPU_UTIL_RATIO"),
    204: ("DEV_MEM_COPY_UTIL", "DEV_MEM_COPY_UTIL_RATIO"),
    206: ("DEV_ENC_UTIL", "DEV_ENC_UTIL_RATIO"),
    207: ("DEV_DEC_UTIL", "DEV_DEC_UTIL_RATIO"),
    230: ("DEV_XID_ERRORS", "DEV_XID_ERROR"),
    235: ("DEV_PCIE_MAX_LINK_GEN",),
    236: ("DEV_PCIE_MAX_LINK_WIDTH",),
    237: ("DEV_PCIE_LINK_GEN",),
    238: ("DEV_PCIE_LINK_WIDTH",),
    240: ("DEV_POWER_VIOLATION",),
    241: ("DEV_THERMAL_VIOLATION",),
    250: ("DEV_FB_TOTAL",),
    251: ("DEV_FB_FREE",),
    252: ("DEV_FB_USED",),
    253: ("DEV_FB_RESERVED",),
    310: ("DEV_ECC_SBE_VOL_TOTAL",),
    311: ("DEV_ECC_DBE_VOL_TOTAL",),
    312: ("DEV_ECC_SBE_AGG_TOTAL",),
    313: ("DEV_ECC_DBE_AGG_TOTAL",),
    390: ("DEV_RETIRED_SBE", "DEV_PAGE_RETIRED_SBE_TOTAL"),
    391: ("DEV_RETIRED_DBE", "DEV_PAGE_RETIRED_DBE_TOTAL"),
    392: ("DEV_RETIRED_PENDING", "DEV_PAGE_RETIRED_PENDING"),
    393: ("DEV_UNCORRECTABLE_REMAPPED_ROWS", "DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"),
    394: ("DEV_CORRECTABLE_REMAPPED_ROWS", "DEV_ROW_REMAP_CORRECTABLE_TOTAL"),
    395: ("DEV_ROW_REMAP_FAILURE", "DEV_ROW_REMAP_FAILED"),
    409: ("DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "DEV_NVLINK_CRC_FLIT_ERROR_TOTAL"),
    419: ("DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "DEV_NVLINK_CRC_DATA_ERROR_TOTAL"),
    429: ("DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", "DEV_NVLINK_REPLAY_ERROR_TOTAL"),
    439: ("DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "DEV_NVLINK_RECOVERY_ERROR_TOTAL"),
    1001: ("PROF_GR_ENGINE_ACTIVE", "PROF_GR_ENGINE_UTIL_RATIO"),
    1002: ("PROF_SM_ACTIVE", "PROF_SM_UTIL_RATIO"),
    1003: ("PROF_SM_OCCUPANCY", "PROF_SM_OCCUPANCY_RATIO"),
    1004: ("PROF_PIPE_TENSOR_ACTIVE", "PROF_TENSOR_UTIL_RATIO"),
    1005: ("PROF_DRAM_ACTIVE", "PROF_DRAM_UTIL_RATIO"),
    1006: ("PROF_PIPE_FP64_ACTIVE", "PROF_FP64_UTIL_RATIO"),
    1007: ("PROF_PIPE_FP32_ACTIVE", "PROF_FP32_UTIL_RATIO"),
    1008: ("PROF_PIPE_FP16_ACTIVE", "PROF_FP16_UTIL_RATIO"),
    1009: ("PROF_PCIE_TX_BYTES",),
    1010: ("PROF_PCIE_RX_BYTES",),
    1011: ("PROF_NVLINK_TX_BYTES",),
    1012: ("PROF_NVLINK_RX_BYTES",),
}

FIELD_IDS = {f"DCGM_FI_{name}": field for field, names in _NAMES.items() for name in names}

# Made by the exporter, not by DCGM: windowed counts of what fields 230 and 112 tell us anyway. Ignored on purpose.
EXPORTER_ONLY = frozenset(
    {
        "DCGM_EXP_XID_ERRORS_COUNT",
        "DCGM_FI_DEV_XID_ERRORS_ACTIVE",
        "DCGM_EXP_CLOCK_EVENTS_COUNT",
        "DCGM_EXP_GPU_HEALTH_STATUS",
        "DCGM_EXP_P2P_STATUS",
    }
)

_PERCENT = frozenset({203, 204, 206, 207})
# A board that answers has a clock, a temperature, power, a link and memory, and it has used energy: 0 is how virtual
# functions say "not available".
_POSITIVE = frozenset({100, 101, 140, 150, 155, 156, 164, 235, 236, 237, 238, 250})
_RATIO = frozenset(range(1001, 1009))
_SCALE = dict.fromkeys(_PERCENT, 0.01) | {
    156: 1e-3,  # mJ
    240: 1e-9,  # ns
    241: 1e-9,
    250: 2.0**20,  # MiB
    251: 2.0**20,
    252: 2.0**20,
    253: 2.0**20,
}


@lru_cache(1024)
def _find_field(name: str) -> GpuField | None:
    """Return the field of a metric's name, or None if the catalogue lacks it."""
    field = FIELD_IDS.get(name)
    if field is None:
        return None
    metric = find_dcgm_row(EntityKind.GPU, field)
    assert metric is not None, f"field {field} has a name but no row in the catalogue"
    return GpuField(metric, find_dcgm_row(EntityKind.GPU_INSTANCE, field), *find_unit(name, field))


@lru_cache(1024)
def find_unit(name: str, field: int) -> tuple[float, Form]:
    """Return (factor to our unit, form of the number) for a metric's name and its DCGM field.

    Fields 203 to 207 are int64 in every version, so they count whole percents even where 4.6 calls them
    `_RATIO`. An int64 cannot hold a fraction below 1, so such a value is a ratio that a collector computed.
    """
    if field in _RATIO:
        return 1.0, Form.DCGM_RATIO
    if field in _PERCENT and name.endswith("_RATIO"):
        return 0.01, Form.DCGM_PERCENT
    return _SCALE.get(field, 1.0), Form.POSITIVE if field in _POSITIVE else Form.DCGM


@dataclass(frozen=True, slots=True)
class _Place:
    """The GPU that a line describes: its node, index and row, the node's row, and the line's labels."""

    node: str
    index: int
    gpu: int
    row: int
    labels: Mapping[str, str]


_OTHER_ENTITIES = frozenset({"nvlink", "nvswitch", "cpu", "cpucore"})


class DcgmResolver(Resolver):
    """A resolver of lines of dcgm-exporter to series."""

    names = frozenset({*FIELD_IDS, *EXPORTER_ONLY})

    @classmethod
    def claims(cls, name: str) -> bool:
        return name.startswith("DCGM_")

    @classmethod
    def reads(cls, name: str) -> bool:
        return name in FIELD_IDS

    def __init__(self, entities: Entities, inventory: GpuInventory) -> None:
        super().__init__(entities, inventory)
        self._devices, self._nodes = entities.devices, entities[EntityKind.NODE]
        self._state: tuple[Target, int, int] | None = None
        self._located: dict[int, _Place] = {}  # in this state, by id of the labels

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Found:
        """Resolve a line. Returns None for a field that the catalogue lacks.

        Raises RecordError `bad_label` if no label names the GPU.
        """
        if name in EXPORTER_ONLY:
            return SkipRule.REPEATED
        if (rule := self.find_label_skip_rule(labels)) is not None:
            return rule
        reading = _find_field(name)
        if reading is None:
            return None
        place = self._find_cached_place(labels, target)
        instance, metric = labels.get("GPU_I_ID", ""), reading.of_instance
        if instance and metric is not None:
            number = parse_gpu_index(instance, "GPU_I_ID")
            entity = self.entities.add_to_node(EntityKind.GPU_INSTANCE, place.node, place.index, number)
            kind = EntityKind.GPU_INSTANCE
        else:
            kind, metric, entity = EntityKind.GPU, reading.metric, place.gpu
        return Series(kind, metric, entity, place.row, place.gpu, reading.scale, reading.form)

    @staticmethod
    def find_field(name: str) -> GpuField | SkipRule | None:
        """Return the field of a DCGM name, the rule that skips it, or None for a field outside the catalogue."""
        return SkipRule.REPEATED if name in EXPORTER_ONLY else _find_field(name)

    @staticmethod
    def find_label_skip_rule(labels: Mapping[str, str]) -> SkipRule | None:
        """Return the rule that skips lines of links, switches and CPUs, or None."""
        if not _OTHER_ENTITIES.isdisjoint(labels) and any(labels.get(key) for key in _OTHER_ENTITIES):
            return SkipRule.OTHER_PART
        return None

    def place_new_gpu(self, labels: Mapping[str, str], target: Target) -> tuple[int, int]:
        """Return (row of a GPU, row of its node), for a GPU that is new or that this page has already named.

        Raises LookupError for any other GPU and for a MIG instance. Raises RecordError if the GPU is
        refused.
        """
        index = parse_gpu_index(labels.get("gpu", ""), "gpu")
        uuid = labels.get("UUID") or labels.get("gpu_uuid", "")
        node = self.find_stated_node(labels, target)
        is_repeated = self.inventory.machines.is_repeated_line(node, index, uuid, target)
        is_free = is_repeated or self.inventory.machines.is_free(node, index, uuid)
        if not is_free or labels.get("GPU_I_ID") or not is_node_name(node):
            raise LookupError(node)
        before, place = self._count_changes(), self._make_place(labels, target)
        if is_repeated and before != self._count_changes():
            raise LookupError(node)
        return place.gpu, place.row

    def _find_cached_place(self, labels: Mapping[str, str], target: Target) -> "_Place":
        """Return the GPU that the labels name, looked up once for each page.

        All fields of one GPU share their labels.
        """
        before, state = self._count_changes(), self._state
        if state is None or state[0] is not target or state[1] != target.pages or state[2] != before:
            self._state, self._located = (target, target.pages, before), {}
        known = self._located.get(id(labels))
        if known is not None:
            return known
        place = self._make_place(labels, target)
        if target.pages and before == self._count_changes():
            self._located[id(labels)] = place  # holds the labels, so that no others get their id
        return place

    def _make_place(self, labels: Mapping[str, str], target: Target) -> "_Place":
        node, index = self._locate_gpu(labels, target)
        gpu = self.entities.add_to_node(EntityKind.GPU, node, index)
        return _Place(node, index, gpu, self.entities.find_or_add_node(node), labels)

    def _count_changes(self) -> int:
        """Return a number that grows whenever a line states something new about boards or names."""
        inventory = self.inventory
        return inventory.machines.changes + inventory.changes + self._devices.learnt + self._nodes.alias_changes

    def _locate_gpu(self, labels: Mapping[str, str], target: Target) -> tuple[str, int]:
        """Return the (node, GPU index) that the labels name. Raises RecordError `bad_label`.

        A line without the label `gpu` is located by its UUID, if an earlier line stated node, index and UUID.
        """
        uuid = labels.get("UUID") or labels.get("gpu_uuid", "")
        if not labels.get("gpu"):
            slot = self.inventory.find_slot(uuid)
            if slot is None:
                raise RecordError("bad_label", f"no gpu label, and UUID {uuid!r} is unknown")
            return slot
        index = parse_gpu_index(labels["gpu"], "gpu")
        node = self.find_gpu_node(labels, target, index, uuid)
        model = shorten_model(labels.get("modelName") or labels.get("model_name", ""))
        self.inventory.record_facts(node, index, GpuFacts(model, uuid))
        record_device_names(self.entities, node, index, labels.get("pci_bus_id", ""), uuid)
        return node, index
