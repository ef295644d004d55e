"""Histories of a small fleet, ways to deliver them, and what a state comes down to whatever the way was.

history      what was said, in some order: samples, job events, node events
reordered    another order that keeps each series' own (events have none)
deliveries   the history cut into batches, each with the time at which it arrives
essence      rings, features, jobs, nodes and demand by name, so that the order of rows does not matter
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
from hypothesis import strategies as st

from fleetcast.features.demand_series import TARGETS
from fleetcast.features.extract import Frames, extract_frames
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import (
    Checkpoint,
    Failed,
    Finished,
    JobEvent,
    NodeEvent,
    NodeLost,
    Phase,
    Preempted,
    Queued,
    Resized,
    Started,
    Step,
    Submitted,
)
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.inbox.job_events import identify_event
from fleetcast.ingest.source import Batch
from fleetcast.service.pipeline.state import FleetState
from tests.features.oracle import whole

T0 = 1_700_000_400_000  # a multiple of 15 s and of 10 min
END = T0 + 92_100_000
AHEAD_MS = 60_000
KINDS = (EntityKind.GPU, EntityKind.PORT, EntityKind.NODE)


@dataclass(frozen=True, slots=True)
class Reading:
    """One sample. `parts` names the entity on its node."""

    kind: EntityKind
    metric: str
    node: str
    parts: tuple[object, ...]
    time_ms: int
    value: float

    @property
    def series(self) -> tuple[object, ...]:
        return self.metric, self.node, self.parts


Told = Reading | JobEvent | NodeEvent


def topology() -> Topology:
    """Two nodes of two GPUs in one rack; n9 is nowhere until somebody speaks of it."""
    return Topology.build([NodeSpec(name, 2, domains={Level.RACK: "r1"}) for name in ("n1", "n2")])


def new_state() -> FleetState:
    entities = Entities()
    return FleetState(entities, WindowStore(entities), topology())


# -- what is said ---------------------------------------------------------------------------------------------------

SECONDS = st.integers(0, 5400) | st.integers(90_000, 92_000)  # a day apart: the fine ring holds half an hour
TIMES = SECONDS.map(lambda second: T0 + second * 1000)
NODES = st.sampled_from(("n1", "n2", "n9"))
SPELT = st.sampled_from(("n1", "n1.example", "n2", "n9"))  # a launcher says more than the topology
SMALL = st.integers(0, 6).map(float)
# Where counters stick, wrap and fall, and what is no number.
EDGES = st.sampled_from((65_534.0, 65_535.0, 2.0**32 - 2, 2.0**32 - 1, 4 * 2.0**32 - 4, float("nan"), 1e31, -1.0))


SERIES = (
    *((EntityKind.GPU, name, (0,)) for name in ("power_w", "energy_j", "ecc_sbe_volatile", "pcie_replays")),
    *((EntityKind.PORT, name, ("mlx5_0", 1)) for name in ("rx_bytes", "symbol_errors")),
    (EntityKind.NODE, "scrape_up", ()),
)
STEPS_S = st.sampled_from((15, 15, 15, 5, 60, 700, 0, -15))  # now and then twice, or back


@st.composite
def readings(draw: st.DrawFn) -> list[Told]:
    """One series: readings a scrape apart, more or less, within half an hour of the start or of the end."""
    (kind, metric, parts), node = draw(st.sampled_from(SERIES)), draw(st.sampled_from(("n1", "n9")))
    time_ms, rows = T0 + draw(st.sampled_from((0, 600, 90_600))) * 1000, list[Told]()
    for step_s, value in draw(st.lists(st.tuples(STEPS_S, SMALL | SMALL | EDGES), min_size=2, max_size=12)):
        time_ms = min(time_ms + step_s * 1000, END)
        rows.append(Reading(kind, metric, node, parts, time_ms, value))
    return rows


_COMMON = {
    "job": st.sampled_from("ab"),
    "attempt": st.integers(1, 2),
    "sequence": st.integers(0, 40),
    "time_ms": TIMES,
}
_PLACES = st.lists(st.builds(RankPlacement, st.integers(0, 3), SPELT, st.sampled_from(((), (0,), (1,), (0, 1)))))
_RANKS = {"ranks": _PLACES.map(lambda places: tuple(places[:2])), "nodes": st.lists(SPELT, max_size=2).map(tuple)}
JOB_EVENTS: st.SearchStrategy[JobEvent] = st.one_of(
    st.builds(
        Submitted,
        **_COMMON,
        queue=st.sampled_from(("", "train", "all")),
        gang=st.integers(1, 3),
        gpus_per_node=st.integers(0, 2),
    ),
    st.builds(Queued, **_COMMON, reason=st.sampled_from(("", "no room"))),
    st.builds(Started, **_COMMON, **_RANKS),
    st.builds(Resized, **_COMMON, **_RANKS),
    st.builds(Phase, **_COMMON, name=st.sampled_from(("warmup", "steady")), rank=st.none() | st.just(1)),
    st.builds(Step, **_COMMON, step=st.integers(0, 9), duration_s=SMALL),
    st.builds(Checkpoint, **_COMMON, edge=st.sampled_from(("begin", "end"))),
    st.builds(NodeLost, **_COMMON, node=SPELT),
    st.builds(Failed, **_COMMON, category=st.just("hardware"), node=SPELT),
    st.builds(Preempted, **_COMMON),
    st.builds(Finished, **_COMMON),
)
_NODE_TYPES = st.sampled_from(("drain", "undrain", "lost", "returned", "xid", "health", "withhold", "release"))
NODE_EVENTS: st.SearchStrategy[NodeEvent] = st.builds(
    NodeEvent,
    node=NODES,
    source=st.sampled_from(("nhc", "admin")),
    sequence=st.integers(0, 9),
    time_ms=TIMES,
    type=_NODE_TYPES,
    code=st.none() | st.just(79),
    message=st.sampled_from(("", "fan")),
)


@st.composite
def histories(draw: st.DrawFn, *, contradict: bool = False) -> list[Told]:
    """`contradict`: two events of one identity may say different things, of which the first one delivered counts."""
    once: Callable[[Any], Any] | None = None if contradict else identify_event
    least = draw(st.sampled_from((0, 5, 30)))  # else most lists are short
    events: list[Told] = draw(
        st.lists(st.one_of(JOB_EVENTS, JOB_EVENTS, NODE_EVENTS), min_size=least, max_size=50, unique_by=once)
    )
    series = draw(st.lists(readings(), min_size=least // 5, max_size=8))
    told = [*events, *(row for rows in series for row in rows)]
    if draw(st.booleans()):
        return sorted(told, key=lambda row: row.time_ms)
    return reordered(told, draw(st.randoms(use_true_random=False)))


# -- how it arrives -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    told: tuple[Told, ...]
    now_ms: int


def reordered(history: Sequence[Told], random: Random) -> list[Told]:
    """Any order that keeps each series' own."""
    shuffled = list(history)
    random.shuffle(shuffled)
    queues: dict[object, list[Reading]] = {}
    for told in reversed(history):
        if isinstance(told, Reading):
            queues.setdefault(told.series, []).append(told)
    return [queues[told.series].pop() if isinstance(told, Reading) else told for told in shuffled]


def deliveries(history: Sequence[Told], random: Random) -> list[Delivery]:
    """Cut at random, now and then late, and never so early that a sample lies too far ahead."""
    cuts = sorted(random.sample(range(len(history) + 1), min(len(history), random.randint(0, 8))))
    arrived, now_ms = [], T0
    for first, last in zip([0, *cuts], [*cuts, len(history)], strict=True):
        told = tuple(history[first:last])
        newest = max((row.time_ms for row in told if isinstance(row, Reading)), default=T0)
        now_ms = min(END, max(now_ms, newest - AHEAD_MS) + random.choice((0, 0, 7_000, 200_000, 4_000_000)))
        arrived.append(Delivery(told, max(now_ms, newest - AHEAD_MS)))
    return arrived


def batch_of(told: Iterable[Told], entities: Entities) -> Batch:
    """One batch: at most one SampleBatch a kind, in the order told."""
    rows: dict[EntityKind, list[tuple[int, int, int, float]]] = {}
    events: list[JobEvent] = []
    node_events: list[NodeEvent] = []
    for row in told:
        if isinstance(row, Reading):
            if row.kind is EntityKind.NODE:
                entity = entities.find_or_add_node(row.node)
            else:
                entity = entities.add_to_node(row.kind, row.node, *row.parts)
            sample = (find_metric_row(row.kind, row.metric), entity, row.time_ms, row.value)
            rows.setdefault(row.kind, []).append(sample)
        elif isinstance(row, NodeEvent):
            node_events.append(row)
        else:
            events.append(row)
    samples = tuple(SampleBatch.from_rows(kind, columns) for kind, columns in rows.items())
    return Batch(samples=samples, events=tuple(events), node_events=tuple(node_events))


def told_to(state: FleetState, arrived: Iterable[Delivery]) -> FleetState:
    for delivery in arrived:
        state.apply(batch_of(delivery.told, state.entities), delivery.now_ms)
    return state


# -- what it comes down to ------------------------------------------------------------------------------------------


def essence(state: FleetState, now_ms: int = END) -> dict[str, Any]:
    """Everything the laws speak of; moves the state's clock to `now_ms`."""
    for kind in KINDS:
        state.store.ring(kind)
    state.store.advance(now_ms)
    frames = extract_frames(state.store, now_ms)
    parts = {f"{kind} {name}": value for kind in KINDS for name, value in _ring(state, kind, frames).items()}
    jobs = state.jobs
    live = {name: {(row.job, row.attempt) for row in getattr(jobs, f"list_{name}")()} for name in ("running", "queued")}
    attempts = {(row.job, row.attempt): row for row in jobs}
    parts |= {"attempts": attempts, "latest": {job: jobs.get(job) for job, _ in attempts}, **live}
    parts |= {"positions": (jobs.position, state.nodes.position)}
    parts |= {f"node {record.node}": (record, seen) for record, seen in state.nodes.dump()}
    return parts | _demand(state, now_ms)


def _ring(state: FleetState, kind: EntityKind, frames: Frames) -> dict[str, Any]:
    table, ring = state.entities[kind], state.store.ring(kind)
    order = sorted(range(len(table)), key=lambda row: table.names[row])
    spoken = [row for row in order if (ring.time_ms[:, row] >= 0).any()]  # a name that only events know has no samples
    slots = np.arange(ring.head - ring.span.slots + 1, ring.head + 1) % ring.span.slots
    names = ("time_ms", "raw", "changed_ms", "rate", "first_seen_ms")
    parts: dict[str, Any] = {name: getattr(ring, name)[..., spoken] for name in names}
    parts |= {name: whole(ring, name)[:, slots][..., spoken] for name in ("fine", "events")}
    parts |= {f"day {name}": ring.read_day_means(name)[:, spoken] for name in ring.layout.days}
    frame = getattr(frames, kind.value)
    about = {f"about {name}": frame.column(name)[spoken] for name in frame.names}
    return parts | about | {"names": [table.names[row] for row in spoken], "head": ring.head}


def _demand(state: FleetState, now_ms: int) -> dict[str, Any]:
    demand = state.demand
    spans: tuple[tuple[Literal[60, 600], int], ...] = ((60, 1500), (600, 200))
    series = {
        f"{target} of {pool} by {bin_s} s": demand.read_series(pool, target, now_ms, bin_s, bins)
        for pool in demand.list_queues()
        for target in TARGETS
        for bin_s, bins in spans
    }
    return {**series, "durations": demand.compute_duration_quantiles(), "queues": demand.list_queues()}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal, NaN to NaN; what is summed over windows may round otherwise."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if " about " in name:
            np.testing.assert_allclose(value, other[name], rtol=1e-4, atol=1e-3, err_msg=name)
        elif isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, other[name], err_msg=name)
        else:
            assert value == other[name], name
