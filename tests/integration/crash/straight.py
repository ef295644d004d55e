"""The same input once more, uninterrupted and in one process; and what two runs must have in common.

    job table, node table, demand series   every field of every attempt and node, from the same events, equal
    rings                                  of the nodes whose pages are recorded: newest samples, rates, every slot and
                                           bucket that the last half hour and the last day hold, equal to the last bit
    ledger                                 the same requests with the same outcome, job, shape, audited steps and end

Which of the free GPUs a job gets depends on the board of that moment, so nodes are not compared between the runs: that
none is handed out twice is checked on the killed run itself.
"""

import asyncio
import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.inbox.job_events import NO_FUTURE_LIMIT_MS, decode_event
from fleetcast.ingest.source import Batch
from fleetcast.ingest.topology.load import load_topology
from fleetcast.placement.ledger.ledger import IntentState, Ledger
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.service import PlacementService
from tests.features.oracle import whole
from tests.integration.crash.load import Entry
from tests.integration.crash.recorded import NODES, PunctualReplay

RING_STATE = ("time_ms", "raw", "changed_ms", "rate", "bucket_total", "bucket_count")
DAY_BINS = 1440
HELD = {IntentState.SEEN: "started", IntentState.ENDED: "started"}


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What a snapshot holds. `pages_until_ms`: the newest recorded moment in it."""

    state: FleetState
    pages_until_ms: int


def reload(config: Config, pages: Path, now_ms: int) -> Reloaded:
    """The state as a pipeline would go on with it."""
    sources: list[PunctualReplay] = []

    def make(entities: Any) -> list[PunctualReplay]:
        sources.append(PunctualReplay(entities, pages, ManualClock(now_ms)))
        return sources

    pipeline = Pipeline(config, ManualClock(now_ms), load_topology(Path(config.fleet.topology)), make)
    pipeline.state.store.advance(now_ms)
    return Reloaded(pipeline.state, sources[0].position()["after_ms"])


def run_straight(config: Config, entries: Iterable[Entry], pages: Path, until_ms: int, now_ms: int) -> FleetState:
    """Every page and every request in the order in which they were acknowledged, none of them twice."""
    clock = ManualClock(0)
    pipeline = Pipeline(config, clock, load_topology(Path(config.fleet.topology)), lambda _: [])
    replay = PunctualReplay(pipeline.state.entities, pages, clock)
    service = PlacementService(config, clock, Ledger(config.ledger), PlacerMetrics())
    moments = iter(sorted(int(path.name) for path in pages.iterdir() if int(path.name) <= until_ms))
    moment = next(moments, None)
    for entry in entries:
        while moment is not None and moment <= entry.at_ms:
            clock.time_ms = moment
            pipeline.apply_batch(asyncio.run(replay.next()))
            moment = next(moments, None)
        clock.time_ms = entry.at_ms
        _repeat(entry, pipeline, service)
    while moment is not None:
        clock.time_ms = moment
        pipeline.apply_batch(asyncio.run(replay.next()))
        moment = next(moments, None)
    clock.time_ms = now_ms
    asyncio.run(pipeline.tick())
    service.view.observe_fleet()
    service.ledger.close()
    pipeline.state.store.advance(now_ms)
    return pipeline.state


def _repeat(entry: Entry, pipeline: Pipeline, service: PlacementService) -> None:
    if entry.kind == "events":
        pipeline.apply_batch(_batch(entry.body))
        return
    asyncio.run(pipeline.tick())
    match entry.kind:
        case "place":
            service.place(msgspec.convert(entry.body, PlacementRequest), "")
        case "queue":
            service.enqueue(msgspec.convert(entry.body, PlacementRequest), "")
            assert service.backlog.run_pass() == 1
        case "cancel":
            service.cancel(entry.body, "")


def _batch(events: list[dict[str, Any]]) -> Batch:
    decoded = [decode_event(json.dumps(event).encode(), 0, NO_FUTURE_LIMIT_MS) for event in events]
    return Batch(
        events=tuple(event for event in decoded if not isinstance(event, NodeEvent)),
        node_events=tuple(event for event in decoded if isinstance(event, NodeEvent)),
    )


def forget_withdrawn(state: FleetState) -> None:
    """Remove the demand of requests that no event names: it depends on which boards saw them wait."""
    of_events = {(row.job, row.attempt) for row in state.jobs}
    for key in state.demand._known.keys() - of_events:
        state.demand._replace_contribution(key, None)


def check_tables(killed: FleetState, straight: FleetState) -> None:
    """Jobs, nodes and demand of both runs are equal, and no event counted twice."""
    jobs, expected = ({(row.job, row.attempt): row for row in state.jobs} for state in (killed, straight))
    assert jobs.keys() == expected.keys()
    for key, row in jobs.items():
        assert row == expected[key]
    assert killed.jobs.position == straight.jobs.position
    assert killed.nodes.position == straight.nodes.position
    assert killed.nodes.nodes == straight.nodes.nodes
    assert sorted(killed.demand.list_queues()) == sorted(straight.demand.list_queues())
    now_ms = max(row.ended_ms or 0 for row in jobs.values())
    for state in (killed, straight):
        forget_withdrawn(state)
    for pool in straight.demand.list_queues():
        for target in ("arriving", "arriving_jobs", "running", "queued", "wanted"):
            series = [state.demand.read_series(pool, target, now_ms, 60, DAY_BINS) for state in (killed, straight)]
            np.testing.assert_array_equal(*series, err_msg=f"{pool} {target}")


def check_rings(killed: FleetState, straight: FleetState, nodes: Collection[str] = NODES) -> int:
    """Rings of the nodes' GPUs are equal; returns how many slots hold a value."""
    ring, expected = killed.store.ring(EntityKind.GPU), straight.store.ring(EntityKind.GPU)
    assert (ring.head, ring.closed, ring.layout.values) == (expected.head, expected.closed, expected.layout.values)
    names = [name for name in straight.entities[EntityKind.GPU].names if name.partition("/")[0] in nodes]
    here, there = (_rows(state, names) for state in (killed, straight))
    for name in RING_STATE:
        np.testing.assert_array_equal(getattr(ring, name)[:, here], getattr(expected, name)[:, there], err_msg=name)
    np.testing.assert_array_equal(ring.first_seen_ms[here], expected.first_seen_ms[there])
    for name in ("fine", "events", "coarse"):
        mine, theirs = whole(ring, name)[:, :, here], whole(expected, name)[:, :, there]
        np.testing.assert_array_equal(mine, theirs, err_msg=name)
    return int((~np.isnan(whole(ring, "fine")[:, :, here])).sum())


def _rows(state: FleetState, names: list[str]) -> list[int]:
    rows = {name: row for row, name in enumerate(state.entities[EntityKind.GPU].names)}
    return [rows[name] for name in names]


def account(path: Path) -> dict[str, tuple[Any, ...]]:
    """What a ledger says of each request: outcome, job, shape, what was audited, and what became of its GPUs."""
    ledger = Ledger(path)
    audited: dict[str, list[str]] = {}
    for row in ledger.read_audit_trail(10**9, after=0):
        audited.setdefault(row["request_id"], []).append(row["action"])
    lines = {}
    for request_id, decision, job, attempt in _decisions(ledger):
        state = ledger.read_intent_state(request_id)
        shape = sorted(len(rank.gpus) for rank in decision.ranks)
        lines[request_id] = (decision.outcome, job, attempt, shape, audited[request_id], HELD.get(state, state))
    assert not ledger.list_queue_entries()
    assert not ledger.list_active_intents()
    ledger.close()
    return lines


def _decisions(ledger: Ledger) -> Iterator[tuple[str, Decision, str, int]]:
    for row in ledger.read_decisions_after(0, 10**9):
        yield row.request_id, msgspec.json.decode(row.reply, type=Decision), row.job, row.attempt


def check_replies(path: Path, replies: dict[str, bytes]) -> None:
    """The ledger holds exactly the decisions that clients were told, byte for byte."""
    ledger = Ledger(path)
    stored = {row.request_id: row.reply for row in ledger.read_decisions_after(0, 10**9)}
    ledger.close()
    assert stored == replies


def check_no_gpu_was_promised_twice(path: Path, released_ms: dict[str, int]) -> int:
    """A GPU is promised again only after its holder may have been known to be done; returns how often one was reused.

    held      |request a ───────────── a's end is sent|
    refused          |b may not have the same GPU|
    allowed                                           |c may|
    """
    ledger = Ledger(path)
    holders: dict[tuple[str, int], tuple[str, int]] = {}
    reused = 0
    for row in ledger.read_decisions_after(0, 10**9):
        for rank in msgspec.json.decode(row.reply, type=Decision).ranks:
            for gpu in rank.gpus:
                holder, until_ms = holders.get((rank.node, gpu), ("", 0))
                assert row.time_ms >= until_ms, f"{rank.node}/{gpu}: {row.request_id} got what {holder} held"
                reused += bool(holder)
                holders[rank.node, gpu] = row.request_id, released_ms[row.request_id]
    ledger.close()
    return reused
