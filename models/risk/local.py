"""Scoring of one pipeline's own entities: it turns feature frames into evidence about nodes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.clock_reasons import BRAKE, THERMAL
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import Topology
from fleetcast.models.risk.detectors import FeatureColumns, compute_newest_age_s, detect_signals
from fleetcast.models.risk.gpu_signals import GpuView, find_loaded_gpus, read_reason_bits
from fleetcast.models.risk.heat import SlotTemperatures
from fleetcast.models.risk.memory import RaisedSignals
from fleetcast.models.risk.node_signals import NODE_SILENT_S, NodeView, SilentTimes
from fleetcast.models.risk.port_peers import describe_port_place
from fleetcast.models.risk.port_signals import PortView
from fleetcast.models.risk.rules import OF_KIND
from fleetcast.models.risk.signals import Mask, Signals
from fleetcast.models.risk.state import RiskState
from fleetcast.models.stragglers.gang import GangColumns

if TYPE_CHECKING:
    from fleetcast.features.extract import Frames

GPU, PORT, NODE = EntityKind.GPU, EntityKind.PORT, EntityKind.NODE
CHANGED_W = 50.0  # between the mean powers of 2 and 30 minutes: its temperature still follows


@dataclass(frozen=True, slots=True)
class LocalEvidence:
    """The evidence of one pipeline, and the columns by which gang members are compared.

    The rows are the pipeline's own nodes. own: (node,) whether this pipeline receives telemetry of the node itself.
    newest_sample_ms: (2, node) the time of the newest sample of its GPUs, and of its ports, in Unix ms.
    """

    time_ms: int
    nodes: tuple[str, ...]
    known: NDArray[np.bool_]  # (node,) something was ever heard of it
    own: NDArray[np.bool_]
    newest_sample_ms: NDArray[np.int64]  # 0 never
    signals: Signals
    gpu: GangColumns
    port: GangColumns


def score_own_nodes(
    frames: "Frames", entities: Entities, topology: Topology, state: RiskState, now_ms: int
) -> LocalEvidence:
    """Return the evidence of a pipeline about all nodes that it has telemetry of.

    Updates `rules`, `clocks`, `slots`, `links` and `scrapes` of `state`.
    """
    names = tuple(entities[NODE].names)
    nodes = len(names)
    gpu, port, node = map(FeatureColumns, (frames.gpu, frames.port, _pad_rows(frames.node, nodes)))
    quiet = SilentTimes.from_columns(gpu, port, node)
    view = _make_gpu_view(gpu, nodes, state, entities, topology)
    signals = [
        _make_gpu_signals(view, entities, state, now_ms),
        _make_port_signals(port, entities, topology, state, now_ms),
        _make_node_signals(node, gpu, quiet, topology, state, now_ms, names),
    ]
    newest_age_s = np.stack([compute_newest_age_s(gpu, nodes), compute_newest_age_s(port, nodes)])
    known = np.isfinite(quiet.any_s) | np.isfinite(node["gpus_reported"])
    return LocalEvidence(
        time_ms=now_ms,
        nodes=names,
        known=known,
        own=np.ones(nodes, bool),
        newest_sample_ms=np.where(np.isfinite(newest_age_s), now_ms - np.nan_to_num(newest_age_s) * 1000, 0).astype(
            np.int64
        ),
        signals=Signals.concat(signals),
        gpu=GangColumns.from_gpus(gpu, view, tuple(entities[GPU].names[: gpu.rows])),
        port=GangColumns.from_ports(port, tuple(entities[PORT].names[: port.rows]), state.links.was_speed[: port.rows]),
    )


def _make_gpu_view(
    gpu: FeatureColumns, nodes: int, state: RiskState, entities: Entities, topology: Topology
) -> GpuView:
    bits, has_bits = read_reason_bits(gpu)
    loaded, idle = find_loaded_gpus(gpu, bits)
    clock = gpu["sm_clock_mhz"]
    ceiling = gpu["max_sm_clock_mhz"]
    usual = state.clocks.learn_clocks(clock, ceiling, loaded & ((bits & (THERMAL | BRAKE)) == 0))
    names, alike = entities[GPU].names[: gpu.rows], state.alike
    alike.refresh_groups(names, gpu.node, entities.traits, entities.traits_learnt + entities[GPU].moves)
    peers = alike.groups.compute_member_medians(usual)
    slot = state.slots.find_slots(names, gpu.node, topology, entities.traits)
    above = _compute_excess_temperature(gpu, nodes, loaded, state.slots, slot, state.interval_s)
    return GpuView(
        gpu, nodes, state.interval_s, bits, has_bits, loaded, idle, clock, np.fmax(usual, peers), above, alike
    )


def _compute_excess_temperature(
    gpu: FeatureColumns, nodes: int, loaded: Mask, slots: SlotTemperatures, slot: NDArray[np.int64], interval_s: float
) -> NDArray[np.float64]:
    """Return (gpu,) the °C above the usual temperature of the GPU's slot at its power.

    Updates the usual temperatures.
    """
    power = gpu["power_w_mean_2m"]
    steady = ~(np.abs(power - gpu["power_w_mean_30m"]) > CHANGED_W)
    temp = np.where(loaded & steady, gpu["gpu_temp_c_mean_2m"], np.nan)
    above = slots.compute_residuals(temp, power, gpu.node, nodes, slot)
    slots.learn_round(temp, power, slot, gpu.now_ms, interval_s)
    return above


def _make_gpu_signals(view: GpuView, entities: Entities, state: RiskState, now_ms: int) -> Signals:
    found = detect_signals(GPU, view, view.columns.rows)
    raised = state.rules[GPU].apply_detections(found, view["age_s"], now_ms, state.interval_s)
    return _make_signals(GPU, raised, entities[GPU].names, view.columns.node)


def _make_port_signals(
    port: FeatureColumns, entities: Entities, topology: Topology, state: RiskState, now_ms: int
) -> Signals:
    names = entities[PORT].names
    peers = state.links.find_peers(names[: port.rows], port.node, topology, entities.traits)
    view = PortView.from_columns(port, state.links, peers)
    raised = state.rules[PORT].apply_detections(
        detect_signals(PORT, view, port.rows), port["age_s"], now_ms, state.interval_s
    )
    signals = _make_signals(PORT, raised, names, port.node)
    words = (
        _describe_port(name, row, topology) for name, row in zip(signals.entity, signals.node.tolist(), strict=True)
    )
    return replace(signals, words=tuple(words))


def _describe_port(port: str, node: int, topology: Topology) -> str:
    """Describe in words the rail and the GPU of a port."""
    device = port.split("/")[1]
    devices = topology.find_devices(node) if node < len(topology) else ()
    return describe_port_place(port, next((found for found in devices if found.name == device), None))


def _make_node_signals(
    node: FeatureColumns,
    gpu: FeatureColumns,
    quiet: SilentTimes,
    topology: Topology,
    state: RiskState,
    now_ms: int,
    names: tuple[str, ...],
) -> Signals:
    stated = np.zeros(node.rows)
    by_source = np.where(topology.placed, topology.stated_gpus, 0)  # an index that no page ever had is not missing
    stated[: len(topology)] = by_source[: node.rows]
    view = NodeView.from_columns(node, gpu, quiet, stated, state.scrapes, state.interval_s)
    answers = ~(quiet.any_s >= NODE_SILENT_S)
    found = detect_signals(NODE, view, node.rows)
    raised = state.rules[NODE].apply_detections(found, node["age_s"], now_ms, state.interval_s, answers)
    return _make_signals(NODE, raised, names, np.arange(node.rows, dtype=np.int32))


def _make_signals(kind: EntityKind, raised: RaisedSignals, names: Sequence[str], node: NDArray[np.int32]) -> Signals:
    """Return the raised signals as columns. Entities without a node are left out."""
    owner = node[raised.entity]
    has_owner = owner >= 0
    return Signals(
        rule=np.array(OF_KIND[kind], np.int16)[raised.rule[has_owner]],
        node=owner[has_owner].astype(np.int32),
        entity=tuple(names[row] for row in raised.entity[has_owner].tolist()),
        value=raised.value[has_owner],
        usual=raised.usual[has_owner],
        strength=raised.strength[has_owner],
        since_ms=raised.since_ms[has_owner],
        seen_ms=raised.seen_ms[has_owner],
        firm=raised.firm[has_owner],
    )


def _pad_rows(frame: FeatureFrame, rows: int) -> FeatureFrame:
    """Return the node frame with unknown rows added for nodes that joined after the frame was extracted."""
    more = rows - len(frame.values)
    if more <= 0:
        return frame
    return replace(
        frame,
        values=np.pad(frame.values, ((0, more), (0, 0)), constant_values=np.nan),
        since_ms=np.pad(frame.since_ms, ((0, more), (0, 0))),
        node=np.arange(rows, dtype=np.int32),
    )
