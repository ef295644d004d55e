"""A simulated year of a fleet, which shows how much a site's own risk fit improves predictions.

The year has node events and daily rule levels. Parts of a node wear out. A wearing part shows signs on
some days, and in the end it breaks or recovers. Other parts break without a sign, and some signs
appear where nothing wears. Repairs replace parts. A repaired node fails less often for a while,
unless the repair did not help. The seed draws the rates, the signs, the nodes that always fail more
often (lemons), and the repairs. They differ from those that the shipped fit was made from.

Rule levels replace telemetry, because rendering a year of scrapes would take too long. Events go
through the code that serves.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.rules import ROW, RULES
from fleetcast.models.risk.score import FleetMoment, FoldedEvents, update_fleet_evidence
from fleetcast.models.risk.state import RiskState
from fleetcast.training.sites.site_days import DAY_MS, SiteDays, SiteRecorder

Array = NDArray[np.float64]

EPOCH_MS = 1_767_225_600_000  # 2026-01-01
HOUR_MS = 3_600_000
CHECK = "burn-in"


@dataclass(frozen=True, slots=True)
class Wear:
    """One way in which parts of nodes wear out, in episodes.

    begins: episodes per node and day. days: the mean length of an episode. breaks: the share of episodes that end in
    a fault. signs: the rules that fire on a share `shown` of an episode's days. false: the share of days on which
    these rules fire without an episode. warned: the share of an episode's days with a warning, after which an
    operator may drain the node.
    """

    begins: float
    days: float
    breaks: float
    signs: tuple[str, ...]
    shown: float
    false: float
    warned: float = 0.0


@dataclass(frozen=True, slots=True)
class YearPlan:
    """The size of a simulated site, and the rates at which its nodes wear, fail and are drained.

    sudden: faults without a warning sign, per node and day. drains: planned drains, per node and day.
    """

    nodes: int
    days: int
    seed: int
    wears: tuple[Wear, ...]
    sudden: float
    drains: float
    lemons: float  # share of the nodes
    lemon_times: float
    repair_times: float  # of a node's rates, for REPAIRED_DAYS after a repair that helped
    unhelped: float  # share of the repairs after which it wears on


REPAIRED_DAYS = 45


def draw_plan(nodes: int = 400, days: int = 365, seed: int = 1, faults: float = 1.0) -> YearPlan:
    """Return the size and the rates of a site. The rates are drawn with the seed.

    faults: a factor on the number of faults.
    """
    rng = np.random.default_rng(seed)

    def vary(value: float, spread: float = 1.6) -> float:
        """Return a random value that is at most `spread` times larger or smaller than `value`."""
        return float(value * spread ** rng.uniform(-1, 1))

    wears = (
        Wear(vary(8e-4) * faults, vary(9), 0.75, ("ecc_corrected_few", "row_remapped"), 0.6, vary(1e-3)),
        Wear(vary(7e-4) * faults, vary(5), 0.5, ("link_errors_few", "link_flap"), 0.7, vary(2.5e-2)),
        Wear(vary(1e-3) * faults, vary(12), 0.3, ("gpu_hot", "gpu_hot_for_its_load"), 0.8, vary(6e-3), 0.25),
        Wear(vary(3e-4) * faults, vary(6), 0.0, ("scrape_slow", "pcie_replays"), 0.5, vary(4e-2)),
    )
    return YearPlan(nodes, days, seed, wears, vary(3e-4) * faults, vary(5e-4), 0.06, vary(6.0), vary(0.3), vary(0.15))


@dataclass(slots=True)
class _Fleet:
    """The true state of each node in the simulation.

    left: (wear, node) days until a wear ends, 0 if there is none. ends: (wear, node) whether the wear ends in
    a fault.
    """

    plan: YearPlan
    rng: np.random.Generator = field(init=False)
    rate: Array = field(init=False)
    left: Array = field(init=False)
    ends: NDArray[np.bool_] = field(init=False)
    repaired: Array = field(init=False)  # (node,) day of the last repair that helped
    away: Array = field(init=False)  # (node,) day on which it returns
    sequence: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.rng = np.random.default_rng((plan.seed, 1))
        lemon = self.rng.random(plan.nodes) < plan.lemons
        self.rate = np.where(lemon, plan.lemon_times, 1.0)
        self.left = np.zeros((len(plan.wears), plan.nodes))
        self.ends = np.zeros((len(plan.wears), plan.nodes), np.bool_)
        self.repaired = np.full(plan.nodes, -np.inf)
        self.away = np.zeros(plan.nodes)

    def simulate_day(self, day: int) -> tuple[Array, list[NodeEvent]]:
        """Simulate a day. Returns (node, rule) levels at its end, and the events of the day."""
        plan, rng = self.plan, self.rng
        here = self.away <= day
        better = np.where(day - self.repaired < REPAIRED_DAYS, plan.repair_times, 1.0)
        levels, events = np.zeros((plan.nodes, len(RULES))), list[NodeEvent]()
        broken = here & (rng.random(plan.nodes) < plan.sudden * self.rate * better)
        for number, wear in enumerate(plan.wears):
            left, wears = self.left[number], self.left[number] > 0
            left[wears & here] -= 1
            over = wears & here & (left <= 0)
            broken |= over & self.ends[number]
            left[over] = 0
            begins = here & ~wears & (rng.random(plan.nodes) < wear.begins * self.rate * better)
            left[begins] = np.ceil(rng.exponential(wear.days, int(begins.sum())))
            self.ends[number, begins] = rng.random(int(begins.sum())) < wear.breaks
            self._add_signs(levels, wear, left > 0, here)
            warned = here & (left > 0) & (rng.random(plan.nodes) < wear.warned)
            events += [
                self._make_event(int(node), day, "health", severity="warning") for node in np.flatnonzero(warned)
            ]
            drained = warned & (rng.random(plan.nodes) < 0.15) & ~broken
            events += [event for node in np.flatnonzero(drained) for event in self._make_drain_events(int(node), day)]
        planned = here & ~broken & (self.away <= day) & (rng.random(plan.nodes) < plan.drains)
        events += [event for node in np.flatnonzero(planned) for event in self._make_drain_events(int(node), day)]
        events += [event for node in np.flatnonzero(broken & here) for event in self._make_fault_events(int(node), day)]
        return levels, events

    def _add_signs(self, levels: Array, wear: Wear, wears: NDArray[np.bool_], here: NDArray[np.bool_]) -> None:
        """Raise the levels of the rules that show a wear, and of the same rules on some nodes where nothing wears."""
        rng, nodes = self.rng, self.plan.nodes
        for rule in wear.signs:
            shown = here & (rng.random(nodes) < np.where(wears, wear.shown, wear.false))
            strength = np.where(wears, rng.uniform(0.3, 1.0, nodes), rng.uniform(0.1, 0.8, nodes))
            levels[:, ROW[rule]] = np.maximum(levels[:, ROW[rule]], np.where(shown, strength, 0.0))

    def _make_fault_events(self, node: int, day: int) -> Iterator[NodeEvent]:
        """Yield the events of a fault: the node is lost or unhealthy, is drained, and returns to service.

        The node returns repaired, unless the repair did not help.
        """
        at = float(self.rng.uniform(0.05, 0.7))
        takes = float(np.exp(self.rng.normal(np.log(0.6), 0.8)))
        yield self._make_event(node, day + at, "lost" if self.rng.random() < 0.6 else "health", severity="fatal")
        yield self._make_event(node, day + at + 0.04, "drain")
        yield self._make_event(node, day + at + takes, "returned")
        yield self._make_event(node, day + at + takes, "health", severity="ok")
        yield self._make_event(node, day + at + takes, "undrain")
        self.away[node] = np.ceil(day + at + takes)
        if self.rng.random() < self.plan.unhelped:
            self.left[0, node], self.ends[0, node] = np.ceil(self.rng.exponential(4)), True
        else:
            self.left[:, node], self.repaired[node] = 0, self.away[node]

    def _make_drain_events(self, node: int, day: int) -> Iterator[NodeEvent]:
        at, takes = float(self.rng.uniform(0.1, 0.6)), float(self.rng.uniform(0.1, 1.5))
        yield self._make_event(node, day + at, "drain")
        yield self._make_event(node, day + at + takes, "undrain")
        self.away[node] = np.ceil(day + at + takes)

    def _make_event(self, node: int, at_day: float, type: str, severity: str | None = None) -> NodeEvent:
        self.sequence += 1
        check = CHECK if type == "health" else ""
        return NodeEvent(
            node=format_node_name(int(node)),
            source="year",
            sequence=self.sequence,
            time_ms=EPOCH_MS + round(at_day * DAY_MS),
            type=type,  # type: ignore[arg-type]
            check=check,
            severity=severity if check else None,  # type: ignore[arg-type]
        )


def format_node_name(node: int) -> str:
    return f"n{node:04d}"


def simulate_year(plan: YearPlan) -> SiteDays:
    """Simulate a year day by day, and return a row for each node and day.

    Events are processed as in a service. Simulated rule levels replace the levels from telemetry.
    """
    topology = Topology.build([NodeSpec(format_node_name(node), gpus=8) for node in range(plan.nodes)])
    fleet, nodes, state, recorder = _Fleet(plan), NodeTable(), RiskState(), SiteRecorder(topology.names)
    waiting = list[NodeEvent]()
    for day in range(plan.days):
        levels, events = fleet.simulate_day(day)
        waiting = sorted([*waiting, *events], key=lambda event: (event.time_ms, event.sequence))
        end_ms = EPOCH_MS + (day + 1) * DAY_MS
        for event in [event for event in waiting if event.time_ms <= end_ms]:
            nodes.apply(event)
            recorder.record_event(event)
            _fold_evidence(topology, nodes, state, event.time_ms)
        waiting = [event for event in waiting if event.time_ms > end_ms]
        levels = np.maximum(levels, _fold_evidence(topology, nodes, state, end_ms))
        state.days.record_levels(levels, topology.names, end_ms)
        recorder.record_moment(state, nodes.nodes, levels, end_ms)
    return recorder.make_site_days(state.faults, EPOCH_MS + plan.days * DAY_MS)


def _fold_evidence(topology: Topology, nodes: NodeTable, state: RiskState, now_ms: int) -> Array:
    """Process the node events so far. Returns (node, rule) levels at this moment."""
    moment = FleetMoment(now_ms, topology, [], FoldedEvents(running=(), ended=(), nodes=nodes.nodes))
    return update_fleet_evidence(moment, state).signals.compute_levels(len(topology))
