"""Scoring: a frame to local evidence, and the evidence of all pipelines to the fleet's scores.

`score_local` runs in every pipeline on its own entities; `score_fleet` runs in one place, because a gang may span
pipelines. Both are functions of their arguments and of a RiskMemory that only they write.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from features.frame import FeatureFrame
from fleet.entities import Entities
from fleet.jobs import JobAttempt
from fleet.nodes import NodeRecord
from fleet.samples import EntityKind
from fleet.topology import Topology
from models.gang import GangColumns, Gangs, gangs_of
from models.gang_signals import gang_signals
from models.gpu_signals import BRAKE, GPU_SIGHTS, THERMAL, GpuView, load_of, reason_bits
from models.memory import Raised, RiskMemory
from models.node_events import drained_before, event_signals
from models.node_risk import RiskFit, score_nodes, shipped_fit
from models.peers import group_median, spread
from models.port_peers import PortPeers, whereabouts
from models.port_signals import Quiet, newest_s, node_sights, port_sights, unseen
from models.repairs import since_repair
from models.rules import OF_KIND, ROW, RULES
from models.scores import RISK_HORIZONS_S, RiskScores
from models.signals import Columns, Signals
from models.straggler import find_stragglers

if TYPE_CHECKING:
    from features.extract import Frames

GPU, PORT, NODE = EntityKind.GPU, EntityKind.PORT, EntityKind.NODE
BEHIND_MS = 60_000
CHANGED_W = 50.0  # between the mean powers of 2 and 30 minutes: its temperature still follows
KINDS = (GPU, PORT, NODE)
GPU_AT, PORT_AT, NODE_AT = range(len(KINDS))
KIND_AT = np.array([KINDS.index(rule.kind) for rule in RULES])
HARD_RULES = np.array([rule.hard for rule in RULES])
NO_PART = frozenset({"node_silent", "node_lost", "health_failed"})  # hard rules that name no part
AWAY = frozenset({"node_silent", "node_lost", "gpu_vanished"})  # what maintenance of a drained node looks like


@dataclass(frozen=True, slots=True)
class Local:
    """What one pipeline knows: evidence, and the columns that gangs are compared by. Rows are its own node rows.

    own: (node,) it is this pipeline that is told of the node; heard_ms: (2, node) the newest of its GPUs, of its ports.
    """

    time_ms: int
    nodes: tuple[str, ...]
    known: NDArray[np.bool_]  # (node,) something was ever heard of it
    own: NDArray[np.bool_]
    heard_ms: NDArray[np.int64]  # 0 never
    signals: Signals
    gpu: GangColumns
    port: GangColumns
    memory: RiskMemory


@dataclass(frozen=True, slots=True)
class Fleet:
    """The scores of a tick. `stragglers`: job -> the body of `/jobs/{id}/stragglers`, less `as_of_ms`."""

    risk: RiskScores
    stragglers: dict[str, dict[str, Any]]


def score_local(frames: "Frames", entities: Entities, topology: Topology, memory: RiskMemory, now_ms: int) -> Local:
    """Evidence of one moment, of one pipeline that owns all its nodes. Writes `memory`."""
    names = tuple(entities[NODE].names)
    nodes = len(names)
    gpu, port, node = Columns(frames.gpu), Columns(frames.port), Columns(_padded(frames.node, nodes))
    quiet = Quiet.of(gpu, port, node)
    view = _gpu_view(gpu, nodes, memory, entities, topology)
    signals = [
        _gpu_signals(view, entities, memory, now_ms),
        _port_signals(port, entities, topology, memory, now_ms),
        _node_signals(node, gpu, quiet, topology, memory, now_ms, names),
    ]
    heard_s = np.stack([newest_s(gpu, nodes), newest_s(port, nodes)])
    known = np.isfinite(quiet.any_s) | np.isfinite(node["gpus_reported"])
    return Local(
        time_ms=now_ms,
        nodes=names,
        known=known,
        own=np.ones(nodes, bool),
        heard_ms=np.where(np.isfinite(heard_s), now_ms - np.nan_to_num(heard_s) * 1000, 0).astype(np.int64),
        signals=Signals.concat(signals),
        gpu=GangColumns.of_gpus(gpu, view, tuple(entities[GPU].names[: gpu.rows])),
        port=GangColumns.of_ports(port, tuple(entities[PORT].names[: port.rows])),
        memory=memory,
    )


def score_fleet(
    locals: Sequence[Local],
    running: Sequence[JobAttempt],
    nodes: Mapping[str, NodeRecord],
    topology: Topology,
    now_ms: int,
    memory: RiskMemory | None = None,
    fit: RiskFit | None = None,
) -> Fleet:
    """The fleet's risk, by rows of `topology`, and its stragglers. `nodes`: what node events say, by name.

    `memory` is where gang comparisons are remembered (the first pipeline's by default), `fit` the coefficients (the
    ones that ship by default). Nodes that `topology` does not name are left out until its next generation.
    """
    memory = memory or (locals[0].memory if locals else RiskMemory())
    seen = fleet_evidence(locals, running, nodes, topology, now_ms, memory)
    _note_faults(seen.signals, topology.names, nodes, memory, now_ms)
    history = memory.faults.hazard(topology.names, RISK_HORIZONS_S, now_ms)
    risk = score_nodes(seen.signals, seen.known, now_ms, fit or shipped_fit(), history, topology)
    memory.record.step(risk.values, topology.names, memory.faults, now_ms)
    return Fleet(risk, find_stragglers(seen.gangs, seen.signals, seen.gpu, seen.port, memory, now_ms))


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that speaks for or against every node of the fleet: what models and their training see."""

    signals: Signals
    known: NDArray[np.bool_]  # (node,)
    gangs: Gangs
    gpu: GangColumns
    port: GangColumns


def fleet_evidence(
    locals: Sequence[Local],
    running: Sequence[JobAttempt],
    nodes: Mapping[str, NodeRecord],
    topology: Topology,
    now_ms: int,
    memory: RiskMemory,
) -> Evidence:
    """The pipelines' signals with those of gang comparisons and of node events. Writes `memory`."""
    names = topology.names
    rows = {name: row for row, name in enumerate(names)}
    signals, gpu, port, known = _joined(locals, rows)
    gangs = gangs_of(running, gpu, port, names)
    events = event_signals(nodes, rows, memory.faults.last_seen(), now_ms)
    known[events.node] = True
    signals = since_repair(Signals.concat([signals, events]), nodes, rows, memory, now_ms)
    lemons = Signals.of(memory.outcomes.signals(rows))
    signals = Signals.concat([signals, gang_signals(gangs, signals, gpu, port, memory, now_ms), lemons])
    return Evidence(signals, known, gangs, gpu, port)


def _joined(
    locals: Sequence[Local], rows: Mapping[str, int]
) -> tuple[Signals, GangColumns, GangColumns, NDArray[np.bool_]]:
    """Everything that the pipelines sent, with node rows of the topology."""
    known = np.zeros(len(rows), bool)
    signals, gpus, ports = [], [], []
    for local, to in zip(locals, _places(locals, rows), strict=True):
        inside = to[NODE_AT] >= 0
        known[to[NODE_AT, inside]] |= local.known[inside]
        node = to[KIND_AT[local.signals.rule], local.signals.node]
        signals.append(replace(local.signals, node=node).where(node >= 0))
        gpus.append(local.gpu.on_nodes(to[GPU_AT]))
        ports.append(local.port.on_nodes(to[PORT_AT]))
    if not locals:
        return Signals.of(()), GangColumns.none(), GangColumns.none(), known
    return Signals.concat(signals), GangColumns.concat(gpus), GangColumns.concat(ports), known


def _places(locals: Sequence[Local], rows: Mapping[str, int]) -> list[NDArray[np.int32]]:
    """For each pipeline (KINDS, node) rows of the topology, -1 where the node is not in it, or others know better.

    Of a node that is not its own a pipeline is believed for as long as nobody else has heard later of the same things:
    after the number of pipelines was changed, the one that had a node before sees it fall silent.
    """
    places = [np.array([rows.get(name, -1) for name in local.nodes], np.int32) for local in locals]
    heard = [np.vstack([local.heard_ms, local.heard_ms.max(axis=0)]) for local in locals]
    newest = np.zeros((len(KINDS), len(rows) + 1), np.int64)  # the last is of those that are not in the topology
    for told_ms, to in zip(heard, places, strict=True):
        for kind in range(len(KINDS)):
            np.maximum.at(newest[kind], to, told_ms[kind])
    return [
        np.where(local.own | (told_ms >= newest[:, to] - BEHIND_MS), to, np.int32(-1))
        for local, told_ms, to in zip(locals, heard, places, strict=True)
    ]


def _note_faults(
    signals: Signals, names: tuple[str, ...], nodes: Mapping[str, NodeRecord], memory: RiskMemory, now_ms: int
) -> None:
    """Remember which nodes have a firm hard signal, since when, and whether a part is at fault: faults come again.

    That a node went away after it was drained is no fault: it is rebooted, powered off or worked on.
    """
    hard: dict[str, tuple[int, bool]] = {}
    for at in np.flatnonzero(signals.firm & HARD_RULES[signals.rule]).tolist():
        name, rule, since_ms = names[signals.node[at]], RULES[signals.rule[at]].name, int(signals.since_ms[at])
        went_ms = since_ms + (0 if rule == "node_lost" else int(memory.interval_s * 1000))  # after its last sample
        if rule in AWAY and name in nodes and drained_before(nodes[name], went_ms):
            continue
        part = rule not in NO_PART
        known_ms, known_part = hard.get(name, (since_ms, part))
        hard[name] = min(known_ms or since_ms, since_ms or known_ms), known_part or part
    memory.faults.note(hard, len(names), now_ms)


def _gpu_view(gpu: Columns, nodes: int, memory: RiskMemory, entities: Entities, topology: Topology) -> GpuView:
    bits, has_bits = reason_bits(gpu)
    loaded, idle = load_of(gpu, bits)
    clock = gpu["sm_clock_mhz"]
    ceiling = gpu["max_sm_clock_mhz"]
    usual = memory.learn_clock(clock, ceiling, loaded & ((bits & (THERMAL | BRAKE)) == 0))
    peers = spread(group_median(usual, gpu.node, nodes)[0], gpu.node)
    above = _above_usual_c(
        gpu, nodes, loaded, memory, memory.slots.of(entities[GPU].names[: gpu.rows], gpu.node, topology)
    )
    return GpuView(gpu, nodes, memory.interval_s, bits, has_bits, loaded, idle, clock, np.fmax(usual, peers), above)


def _above_usual_c(
    gpu: Columns, nodes: int, loaded: NDArray[np.bool_], memory: RiskMemory, slot: NDArray[np.int64]
) -> NDArray[np.float64]:
    """(gpu,) °C above what its slot has at its power. What it shows now is learned for the rounds to come."""
    power = gpu["power_w_mean_2m"]
    steady = ~(np.abs(power - gpu["power_w_mean_30m"]) > CHANGED_W)
    temp = np.where(loaded & steady, gpu["gpu_temp_c_mean_2m"], np.nan)
    above = memory.slots.residual(temp, power, gpu.node, nodes, slot)
    memory.slots.learn(temp, power, slot, gpu.now_ms, memory.interval_s)
    return above


def _gpu_signals(view: GpuView, entities: Entities, memory: RiskMemory, now_ms: int) -> Signals:
    sights = [GPU_SIGHTS[RULES[row].name](view) for row in OF_KIND[GPU]]
    vanished = sights[OF_KIND[GPU].index(ROW["gpu_vanished"])].on
    raised = memory.settle(GPU, sights, view.columns.age_s, now_ms, vanished)
    return _gathered(GPU, raised, entities[GPU].names, view.columns.node)


def _port_signals(port: Columns, entities: Entities, topology: Topology, memory: RiskMemory, now_ms: int) -> Signals:
    names = entities[PORT].names
    memory.port_peers = PortPeers.of(names[: port.rows], port.node, topology, memory.port_peers)
    sights = port_sights(port, len(entities[NODE]), memory, memory.port_peers)
    ordered = [sights[RULES[row].name] for row in OF_KIND[PORT]]
    raised = memory.settle(PORT, ordered, port.age_s, now_ms, np.zeros(port.rows, bool))
    signals = _gathered(PORT, raised, names, port.node)
    words = (_where(name, row, topology) for name, row in zip(signals.entity, signals.node.tolist(), strict=True))
    return replace(signals, words=tuple(words))


def _where(port: str, node: int, topology: Topology) -> str:
    """Rail and GPU of a port, in words."""
    device = port.split("/")[1]
    devices = topology.devices(node) if node < len(topology) else ()
    return whereabouts(port, next((found for found in devices if found.name == device), None))


def _node_signals(
    node: Columns,
    gpu: Columns,
    quiet: Quiet,
    topology: Topology,
    memory: RiskMemory,
    now_ms: int,
    names: tuple[str, ...],
) -> Signals:
    stated = np.zeros(node.rows)
    stated[: len(topology)] = topology.gpus[: node.rows]
    sights = node_sights(node, gpu, quiet, stated, memory)
    nothing = unseen(node.rows)
    ordered = [sights.get(RULES[row].name, nothing) for row in OF_KIND[NODE]]
    raised = memory.settle(NODE, ordered, node.age_s, now_ms, np.zeros(node.rows, bool))
    return _gathered(NODE, raised, names, np.arange(node.rows, dtype=np.int32))


def _gathered(kind: EntityKind, raised: Raised, names: Sequence[str], node: NDArray[np.int32]) -> Signals:
    """The raised ones as columns; entities that no node owns are left out."""
    rule, entity = np.nonzero(raised.shown & (node >= 0)[None, :])
    at = (rule, entity)
    return Signals(
        rule=np.array(OF_KIND[kind], np.int16)[rule],
        node=node[entity].astype(np.int32),
        entity=tuple(names[row] for row in entity.tolist()),
        value=raised.value[at],
        usual=raised.usual[at],
        strength=raised.strength[at],
        since_ms=raised.since_ms[at],
        firm=raised.firm[at],
    )


def _padded(frame: FeatureFrame, rows: int) -> FeatureFrame:
    """The node frame with unknown rows for nodes that joined after it was extracted."""
    more = rows - len(frame.values)
    if more <= 0:
        return frame
    return replace(
        frame,
        values=np.pad(frame.values, ((0, more), (0, 0)), constant_values=np.nan),
        since_ms=np.pad(frame.since_ms, ((0, more), (0, 0))),
        node=np.arange(rows, dtype=np.int32),
    )
