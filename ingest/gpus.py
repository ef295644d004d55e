"""GPU model names and indices from exporters of all vendors, and the known GPUs of each node."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.machines import MachineNames

MAX_GPUS_PER_NODE = 256
_VENDOR = re.compile(r"^(NVIDIA|Tesla|GRID|AMD|Instinct)[ \-_]+", re.IGNORECASE)
_LOWER_CASE = re.compile(r"[a-z]{1,3}\d+[a-z]?")  # as a relabelling leaves "A100"
_FAMILIES = ("RTX", "GeForce", "Quadro", "TITAN", "Radeon")


@lru_cache(256)
def shorten_model(name: str) -> str:
    """Return the model without vendor, memory size and form factor. Workstation families keep their full name.

    >>> shorten_model("NVIDIA H100 80GB HBM3"), shorten_model("NVIDIA-A100-SXM4-40GB"), shorten_model("Tesla T4")
    ('H100', 'A100', 'T4')
    >>> shorten_model("AMD Instinct MI300X OAM"), shorten_model("AMD_Instinct_MI300X_OAM")
    ('MI300X', 'MI300X')
    >>> shorten_model("nvidia a100 80gb pcie")
    'A100'
    >>> shorten_model("NVIDIA RTX 4000 Ada Generation")
    'RTX 4000 Ada Generation'
    """
    text = name.strip()
    while (bare := _VENDOR.sub("", text)) != text:
        text = bare
    if text.startswith(_FAMILIES):
        return text.replace("-", " ")
    first = re.split(r"[ \-_]", text, maxsplit=1)[0]
    return first.upper() if _LOWER_CASE.fullmatch(first) else first


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The facts that labels state about a GPU, empty if unstated. model: a name from `shorten_model`."""

    model: str = ""
    uuid: str = ""


class GpuInventory:
    """The GPUs of each node, learnt from labels. A swapped board replaces the facts of its slot."""

    def __init__(self, entities: Entities | None = None) -> None:
        self._entities = entities or Entities()
        self.machines = MachineNames(self._entities)
        self.nodes: dict[str, dict[int, GpuFacts]] = {}
        self._slots: dict[str, tuple[str, int]] = {}
        self._models: dict[str, str] | None = None  # until something is learnt
        self.changes = 0  # grows with every new fact

    def record_facts(self, node: str, index: int, facts: GpuFacts) -> None:
        slots = self.nodes.setdefault(node, {})
        known = slots.get(index, GpuFacts())
        facts = GpuFacts(facts.model or known.model, facts.uuid or known.uuid)
        if known == facts:
            return
        self._models = None
        self.changes += 1
        self._entities.record_trait(f"{node}/{index}", facts.model)
        slots[index] = facts
        if facts.uuid:
            self._slots.pop(known.uuid, None)
            self._slots[facts.uuid] = (node, index)

    def find_slot(self, uuid: str) -> tuple[str, int] | None:
        """Return the (node, index) of the GPU with this UUID, or None if unknown."""
        return self._slots.get(uuid)

    def get_gpu_models(self) -> dict[str, str]:
        """Return node → short name of the model of most of its GPUs. Callers must not change the result."""
        if self._models is None:
            self._models = {
                node: Counter(models).most_common(1)[0][0]
                for node, slots in self.nodes.items()
                if (models := [facts.model for facts in slots.values() if facts.model])
            }
        return self._models


def record_device_names(entities: Entities, node: str, index: int, *devices: str) -> None:
    """Record the names of a GPU in kernel logs and health checks: its PCI address and its UUID.

    Empty names are skipped.
    """
    for device in devices:
        if device:
            entities.devices.record_device(node, device, index)


def parse_gpu_index(text: str, label: str) -> int:
    """Return the GPU index that a label holds.

    Raises RecordError `bad_label` if the text is not a number below MAX_GPUS_PER_NODE.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and int(text) < MAX_GPUS_PER_NODE):
        raise RecordError("bad_label", f"{label}={text[:40]!r}: expected an index below {MAX_GPUS_PER_NODE}")
    return int(text)
