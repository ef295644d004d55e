"""dcgm-exporter lines → GPU and MIG-instance series, whatever version printed them.

    labels of       2.x to 4.x                main since May 2026       NVLink totals
    node            Hostname                  hostname                  hostname
    GPU             gpu, UUID, modelName      gpu, UUID, modelName      gpu, gpu_uuid, model_name
    MIG instance    GPU_I_ID                  GPU_I_ID

A field that only a whole GPU has (temperature, power) is repeated on the line of each MIG instance: it goes to the GPU.
Not ours yet: single links (`nvlink`), switches (`nvswitch`), CPUs (`cpu`, `cpucore`).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fleet.entities import Entities
from fleet.errors import RecordError
from fleet.metrics import dcgm_row
from fleet.samples import EntityKind
from ingest.dcgm_fields import EXPORTER_ONLY, FIELD_IDS, unit_of
from ingest.gpu_model import short_model
from ingest.nodes import node_name
from ingest.series import Series
from ingest.text import Target

MAX_GPUS_PER_NODE = 256
UNKNOWN_NAMES_KEPT = 1000
_OTHER_ENTITIES = ("nvlink", "nvswitch", "cpu", "cpucore")


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What labels say of a GPU; empty where they do not."""

    model: str = ""
    uuid: str = ""


class GpuInventory:
    """Which GPUs sit in a node, learnt from labels. A swapped board replaces the facts of its slot."""

    def __init__(self) -> None:
        self.nodes: dict[str, dict[int, GpuFacts]] = {}
        self._slots: dict[str, tuple[str, int]] = {}
        self._models: dict[str, str] | None = None  # until something is learnt

    def learn(self, node: str, index: int, facts: GpuFacts) -> None:
        slots = self.nodes.setdefault(node, {})
        known = slots.get(index, GpuFacts())
        if known == facts:
            return
        self._models = None
        slots[index] = GpuFacts(facts.model or known.model, facts.uuid or known.uuid)
        if facts.uuid:
            self._slots.pop(known.uuid, None)
            self._slots[facts.uuid] = (node, index)

    def slot(self, uuid: str) -> tuple[str, int] | None:
        """(node, index) of a board that some line named in full."""
        return self._slots.get(uuid)

    def models(self) -> dict[str, str]:
        """Node -> short name of the model most of its GPUs are. Nobody changes it."""
        if self._models is None:
            self._models = {
                node: Counter(models).most_common(1)[0][0]
                for node, slots in self.nodes.items()
                if (models := [facts.model for facts in slots.values() if facts.model])
            }
        return self._models


class DcgmResolver:
    """Answers what a DCGM line stands for. `unknown`: names outside the catalogue with how often they were resolved."""

    def __init__(self, entities: Entities, inventory: GpuInventory) -> None:
        self.inventory = inventory
        self.unknown: Counter[str] = Counter()
        self._entities = entities

    def __call__(self, name: str, labels: Mapping[str, str], target: Target) -> Series | None:
        """None for what is no GPU field of the catalogue; RecordError("bad_label") when the GPU cannot be told."""
        if name in EXPORTER_ONLY or any(labels.get(key) for key in _OTHER_ENTITIES):
            return None
        field = FIELD_IDS.get(name)
        if field is None:
            if name in self.unknown or len(self.unknown) < UNKNOWN_NAMES_KEPT:
                self.unknown[name] += 1
            return None
        node, index = self._locate(labels, target)
        scale, form = unit_of(name, field)
        gpu = self._entities.of_node(EntityKind.GPU, node, index)
        kind, entity = EntityKind.GPU, gpu
        instance = labels.get("GPU_I_ID", "")
        if instance and dcgm_row(EntityKind.GPU_INSTANCE, field) is not None:
            number = _index(instance, "GPU_I_ID")
            kind, entity = (
                EntityKind.GPU_INSTANCE,
                self._entities.of_node(EntityKind.GPU_INSTANCE, node, index, number),
            )
        metric = dcgm_row(kind, field)
        assert metric is not None, f"field {field} has a name but no row in the catalogue"
        return Series(kind, metric, entity, self._entities.node(node), gpu, scale, form)

    def _locate(self, labels: Mapping[str, str], target: Target) -> tuple[str, int]:
        """(node, GPU index); a line without `gpu` is found by its UUID if another line named that in full."""
        uuid = labels.get("UUID") or labels.get("gpu_uuid", "")
        if not labels.get("gpu"):
            slot = self.inventory.slot(uuid)
            if slot is None:
                raise RecordError("bad_label", f"no gpu label, and UUID {uuid!r} is unknown")
            return slot
        index = _index(labels["gpu"], "gpu")
        stated = "" if target.fixed else labels.get("Hostname") or labels.get("hostname", "")
        node = node_name(stated or target.node, self._entities)
        model = short_model(labels.get("modelName") or labels.get("model_name", ""))
        self.inventory.learn(node, index, GpuFacts(model, uuid))
        for device in (labels.get("pci_bus_id", ""), uuid):
            if device:
                self._entities.devices.learn(node, device, index)
        return node, index


def _index(text: str, label: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and int(text) < MAX_GPUS_PER_NODE):
        raise RecordError("bad_label", f"{label}={text[:40]!r}: expected an index below {MAX_GPUS_PER_NODE}")
    return int(text)
