"""Bounds on names in the fold: what is too much is counted and skipped; what is known always goes on."""

from collections.abc import Sequence

from features.store import WindowStore
from fleet.entities import Entities
from fleet.events import Finished, JobEvent, NodeEvent, Started, Submitted
from fleet.jobs import JobTable
from fleet.topology import NodeSpec, Topology
from ingest.exporters import ExporterResolver
from ingest.remote_write import Version
from ingest.source import Batch
from ingest.write_decoder import WriteDecoder
from service.config import LimitsConfig
from service.state import FleetState
from tests.ingest.write_requests import gpu, message_v1, packed


def state(nodes: Sequence[str] = ("n1",), **limits: int) -> FleetState:
    entities = Entities()
    topology = Topology.build([NodeSpec(name, gpus=8) for name in nodes])
    return FleetState(entities, WindowStore(entities), topology, LimitsConfig(**limits))


def lives(jobs: JobTable) -> set[tuple[str, int]]:
    return {(row.job, row.attempt) for row in (*jobs.running(), *jobs.queued())}


def test_the_fold_takes_no_new_job_beyond_the_bound_and_forgets_none() -> None:
    folded = state(live_jobs=2)
    first = [Submitted(job=job, sequence=1, time_ms=1) for job in ("a", "b", "c")]
    folded.apply(Batch(events=tuple(first)), 10)
    assert lives(folded.jobs) == {("a", 1), ("b", 1)}
    assert folded.counts.bad == {"too_many_jobs": 1}
    assert folded.used()["live_jobs"] == {"used": 2, "most": 2}
    folded.apply(Batch(events=(Started(job="a", sequence=2, time_ms=2), Finished(job="a", sequence=3, time_ms=3))), 10)
    folded.apply(Batch(events=(Submitted(job="c", sequence=1, time_ms=4),)), 10)
    assert lives(folded.jobs) == {("b", 1), ("c", 1)}
    folded.apply(Batch(events=(Submitted(job="a", attempt=2, sequence=1, time_ms=4),)), 10)
    assert ("a", 2) in lives(folded.jobs), "the next attempt of a known job is no new job"


def test_attempts_of_one_job_do_not_grow_beyond_the_bound() -> None:
    folded = state(live_jobs=1)
    many = [Submitted(job="a", attempt=number, sequence=1, time_ms=1) for number in range(1, 50)]
    folded.apply(Batch(events=tuple(many)), 10)
    assert folded.jobs.live == 2
    assert folded.counts.bad == {"too_many_jobs": 47}


def test_the_bound_is_of_what_was_folded_and_not_of_how() -> None:
    """Batches of any size, and a table that a snapshot brought back, end in the same jobs."""
    events: list[JobEvent] = []
    for number in range(40):
        events.append(Submitted(job=f"j{number}", sequence=1, time_ms=number))
        if number % 3 == 0:
            events.append(Finished(job=f"j{number // 2}", sequence=2, time_ms=number))
    whole = state(live_jobs=5)
    whole.apply(Batch(events=tuple(events)), 100)
    one_by_one = state(live_jobs=5)
    for event in events:
        one_by_one.apply(Batch(events=(event,)), 100)
    half = state(live_jobs=5)
    half.apply(Batch(events=tuple(events[:25])), 100)
    restored = state(live_jobs=5)
    for attempt in half.jobs:
        restored.jobs.put(attempt)
    restored.apply(Batch(events=tuple(events[25:])), 100)
    expected = {(row.job, row.state) for row in whole.jobs}
    assert whole.counts.bad["too_many_jobs"] > 0
    for other in (one_by_one, restored):
        assert {(row.job, row.state) for row in other.jobs} == expected


def test_unknown_nodes_are_skipped_wherever_they_come_from_and_those_of_the_topology_are_not() -> None:
    folded = state(("n1", "n2"), unknown_nodes=1)
    rows = [NodeEvent(node=name, source="s", sequence=1, time_ms=1, type="drain") for name in ("x", "y", "n2", "n1")]
    fresh = folded.apply(Batch(node_events=tuple(rows)), 10)
    assert [event.node for event in fresh] == ["x", "n2", "n1"]
    decoder = WriteDecoder(ExporterResolver(folded.entities))
    series = [(gpu("DCGM_FI_DEV_POWER_USAGE", 0, node), [(5, 500.0)]) for node in ("z", "n1", "x")]
    written = decoder.decode(packed(message_v1(series)), Version.V1, 10)
    assert sum(map(len, written.samples)) == 2
    assert [error.reason for error in written.bad] == ["unknown_nodes"]
    assert folded.used()["unknown_nodes"] == {"used": 1, "most": 1}
