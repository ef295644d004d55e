"""Scoring of the fleet: it turns the evidence of all pipelines into risk, reasons and stragglers.

`fleetcast.models.risk.local.score_own_nodes` runs in every pipeline on its own entities.
`score_fleet` runs in one place, because a gang may span pipelines. Both are functions of their
arguments and of a RiskState. Each writes its own parts of that state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import Topology
from fleetcast.models.risk.detectors import check_rules_have_detectors
from fleetcast.models.risk.fault_rate import has_warning
from fleetcast.models.risk.local import LocalEvidence
from fleetcast.models.risk.node_events import make_event_signals, was_drained_before
from fleetcast.models.risk.node_risk import RiskFit, load_shipped_fit, score_nodes
from fleetcast.models.risk.record import RiskRecord
from fleetcast.models.risk.rules import RULES, STOPPED
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, RiskScores
from fleetcast.models.risk.signals import Signals
from fleetcast.models.risk.site_risk import SiteHazard, SiteRisk
from fleetcast.models.risk.state import RiskState
from fleetcast.models.stragglers.gang import GangColumns, GangMembers
from fleetcast.models.stragglers.gang_signals import make_gang_signals
from fleetcast.models.stragglers.straggler import find_stragglers

GPU, PORT, NODE = EntityKind.GPU, EntityKind.PORT, EntityKind.NODE
BEHIND_MS = 60_000
KINDS = (GPU, PORT, NODE)
GPU_AT, PORT_AT, NODE_AT = range(len(KINDS))
KIND_AT = np.array([KINDS.index(rule.kind) for rule in RULES])
FAIL, HOUR, DAY = RISK_KINDS.index("fail"), RISK_HORIZONS_S.index(3600), RISK_HORIZONS_S.index(86_400)
HARD_RULES = np.array([rule.hard for rule in RULES])

check_rules_have_detectors()  # the imports above register the function of every rule


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedEvents:
    """The state of jobs and nodes that follows from their events.

    ended: attempts that ended within the last hour. nodes: node name -> record. remembered: the places of
    `running` if the caller already has them, else None.
    """

    running: Sequence[JobAttempt]
    ended: Sequence[JobAttempt]
    nodes: Mapping[str, NodeRecord]
    remembered: RunningPlaces | None = None

    @property
    def placements(self) -> RunningPlaces:
        """The places of the attempts in `running`: the remembered ones, or new ones if there are none.

        The remembered places are the same object until an attempt starts, ends or moves.
        """
        return RunningPlaces(self.running) if self.remembered is None else self.remembered


@dataclass(frozen=True, slots=True)
class FleetMoment:
    """The input for the scores of one moment. locals: the evidence of each pipeline of the fleet."""

    now_ms: int
    topology: Topology
    locals: Sequence[LocalEvidence]
    events: FoldedEvents


@dataclass(frozen=True, slots=True)
class ScoredFleet:
    """The scores of a tick. `stragglers`: job -> the body of `/jobs/{id}/stragglers` without `as_of_ms`."""

    risk: RiskScores
    stragglers: dict[str, dict[str, Any]]


def score_fleet(
    moment: FleetMoment,
    state: RiskState,
    fit: RiskFit | None = None,
    site: SiteRisk | None = None,
    shadow: SiteRisk | None = None,
) -> ScoredFleet:
    """Return the risk of the fleet by topology rows, and its stragglers.

    fit: None for the shipped coefficients. site: a site's own fit. shadow: a fit whose risks are only
    recorded for comparison. Nodes that are not in the topology have no risk. Updates `record`, `rate`,
    `shadow` and `paces` of `state`, and the parts that `update_fleet_evidence` updates.
    """
    topology, nodes, now_ms = moment.topology, moment.events.nodes, moment.now_ms
    names = topology.names
    seen = update_fleet_evidence(moment, state)

    def compute_hazard(risk: SiteRisk | None) -> SiteHazard | None:
        return None if risk is None else risk.compute_hazard(state.faults, state.days, nodes, names, now_ms)

    expected = state.faults.compute_hazard(names, RISK_HORIZONS_S, now_ms)
    history = expected * (state.rate.times if state.faults.fit is None else 1.0)  # a site's own fit has its rate
    given = seen.signals, seen.known, now_ms, fit or load_shipped_fit(), history
    risk = score_nodes(*given, topology, compute_hazard(site))
    if site is not None:
        risk = replace(risk, model=site.name)
    warned = has_warning(risk.values[FAIL, HOUR], history[HOUR])
    state.rate.record_tick(expected[DAY], warned, names, state.faults, now_ms, seen.known)
    state.record.record_tick(risk.values, names, state.faults, now_ms)
    if shadow is not None:
        state.shadow = state.shadow if state.shadow.model == shadow.name else RiskRecord(model=shadow.name)
        state.shadow.record_tick(score_nodes(*given, None, compute_hazard(shadow)).values, names, state.faults, now_ms)
    return ScoredFleet(risk, find_stragglers(seen.gangs, seen.signals, seen.gpu, seen.port, state.paces, now_ms))


def update_fleet_evidence(moment: FleetMoment, state: RiskState) -> "Evidence":
    """Collect the evidence of the fleet, and record each node's faults and the recent strength of each rule.

    Updates `faults` and `days` of `state`, and the parts that `collect_fleet_evidence` updates.
    """
    names, nodes, now_ms = moment.topology.names, moment.events.nodes, moment.now_ms
    seen = collect_fleet_evidence(moment, state)
    state.faults.record_signals(_find_hard_faults(seen.signals, names, nodes, state.interval_s), len(names), now_ms)
    state.days.record_levels(seen.signals.compute_levels(len(names)), names, now_ms)
    return seen


@dataclass(frozen=True, slots=True)
class Evidence:
    """The evidence for or against every node of the fleet. Scores and training use it."""

    signals: Signals
    known: NDArray[np.bool_]  # (node,)
    gangs: GangMembers
    gpu: GangColumns
    port: GangColumns


def collect_fleet_evidence(moment: FleetMoment, state: RiskState) -> Evidence:
    """Return the pipelines' signals together with those of gangs, node events and ended jobs.

    The outcome of a job counts only once. Updates `outcomes`, `repairs`, `witnesses` and `streaks` of
    `state`.
    """
    nodes, now_ms, names = moment.events.nodes, moment.now_ms, moment.topology.names
    state.outcomes.count_ended(moment.events.ended, now_ms)
    rows = {name: row for row, name in enumerate(names)}
    signals, gpu, port, known = _join_locals(moment.locals, rows)
    gangs = state.gangs.find_members(moment.events.running, moment.events.placements, gpu, port, names)
    events = make_event_signals(nodes, rows, state.faults.find_last_fault_times(), now_ms)
    known[events.node] = True
    signals = state.repairs.drop_repaired_signals(Signals.concat([signals, events]), nodes, rows, state.streaks, now_ms)
    signals = state.witnesses.confirm_vanished_gpus(signals, names, gangs, gpu, moment.events.ended, now_ms)
    lemons = Signals.from_signals(state.outcomes.make_signals(rows))
    signals = Signals.concat([signals, make_gang_signals(gangs, signals, gpu, port, state.streaks, now_ms), lemons])
    return Evidence(signals, known, gangs, gpu, port)


def _join_locals(
    locals: Sequence[LocalEvidence], rows: Mapping[str, int]
) -> tuple[Signals, GangColumns, GangColumns, NDArray[np.bool_]]:
    """Join the pipelines' signals and gang columns, with node rows of the topology.

    Also returns (node,) whether any pipeline knows the node.
    """
    known = np.zeros(len(rows), bool)
    signals, gpus, ports = [], [], []
    for local, to in zip(locals, _map_node_rows(locals, rows), strict=True):
        inside = to[NODE_AT] >= 0
        known[to[NODE_AT, inside]] |= local.known[inside]
        node = to[KIND_AT[local.signals.rule], local.signals.node]
        signals.append(replace(local.signals, node=node).select_rows(node >= 0))
        gpus.append(local.gpu.translate_nodes(to[GPU_AT]))
        ports.append(local.port.translate_nodes(to[PORT_AT]))
    if not locals:
        return Signals.from_signals(()), GangColumns.make_empty(), GangColumns.make_empty(), known
    return Signals.concat(signals), GangColumns.concat(gpus), GangColumns.concat(ports), known


def _map_node_rows(locals: Sequence[LocalEvidence], rows: Mapping[str, int]) -> list[NDArray[np.int32]]:
    """Return for each pipeline (KINDS, node) the row of each of its nodes in the topology.

    A row is -1 if the node is not in the topology, or if another pipeline has newer telemetry of it. When the
    number of pipelines changes, nodes move to other pipelines, and look silent to their former ones. So a
    pipeline may report on a foreign node only if no other pipeline has newer telemetry of the same kind.
    """
    places = [np.array([rows.get(name, -1) for name in local.nodes], np.int32) for local in locals]
    newest_sample_ms = [np.vstack([local.newest_sample_ms, local.newest_sample_ms.max(axis=0)]) for local in locals]
    newest = np.zeros((len(KINDS), len(rows) + 1), np.int64)  # the last is of those that are not in the topology
    for newest_ms, to in zip(newest_sample_ms, places, strict=True):
        for kind in range(len(KINDS)):
            np.maximum.at(newest[kind], to, newest_ms[kind])
    return [
        np.where(local.own | (newest_ms >= newest[:, to] - BEHIND_MS), to, np.int32(-1))
        for local, newest_ms, to in zip(locals, newest_sample_ms, places, strict=True)
    ]


def _find_hard_faults(
    signals: Signals, names: tuple[str, ...], nodes: Mapping[str, NodeRecord], interval_s: float
) -> dict[str, tuple[int, bool]]:
    """Return node → (when its firm hard signal began, in Unix ms, and whether a part is at fault).

    Nodes without a firm hard signal are left out. A node that goes away after it was drained has no fault. It is
    being rebooted, switched off or repaired.
    """
    hard: dict[str, tuple[int, bool]] = {}
    for at in np.flatnonzero(signals.firm & HARD_RULES[signals.rule]).tolist():
        name, rule, since_ms = names[signals.node[at]], RULES[signals.rule[at]], int(signals.since_ms[at])
        went_ms = since_ms + (0 if rule.name == "node_lost" else int(interval_s * 1000))  # after its last sample
        if rule.blames is STOPPED and name in nodes and was_drained_before(nodes[name], went_ms):
            continue
        known_ms, known_part = hard.get(name, (since_ms, rule.names_part))
        hard[name] = min(known_ms or since_ms, since_ms or known_ms), known_part or rule.names_part
    return hard
