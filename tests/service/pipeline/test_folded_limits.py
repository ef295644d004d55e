"""Bounds on names in the fold: what is too much is counted and skipped; what is known always goes on."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from fleetcast.features.store import WindowStore
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import Finished, JobEvent, NodeEvent, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.nodes import MAX_SOURCES_PER_NODE
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.machines import MOST_LISTED
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.remote_write.request import Version
from fleetcast.ingest.source import Batch
from fleetcast.service.config import Config, LimitsConfig
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.pipeline.state import FleetState
from tests.ingest.write_requests import gpu, message_v1, packed

NOW_MS = 1_789_000_000_000


def state(nodes: Sequence[str] = ("n1",), **limits: int) -> FleetState:
    entities = Entities()
    topology = Topology.build([NodeSpec(name, gpus=8) for name in nodes])
    return FleetState(entities, WindowStore(entities), topology, LimitsConfig(**limits))


def lives(jobs: JobTable) -> set[tuple[str, int]]:
    return {(row.job, row.attempt) for row in (*jobs.list_running(), *jobs.list_queued())}


def test_the_fold_takes_no_new_job_beyond_the_bound_and_forgets_none() -> None:
    folded = state(live_jobs=2)
    first = [Submitted(job=job, sequence=1, time_ms=1) for job in ("a", "b", "c")]
    folded.apply(Batch(events=tuple(first)), 10)
    assert lives(folded.jobs) == {("a", 1), ("b", 1)}
    assert folded.counts.bad == {"too_many_jobs": 1}
    assert folded.count_used_limits()["live_jobs"] == {"used": 2, "most": 2}
    folded.apply(Batch(events=(Started(job="a", sequence=2, time_ms=2), Finished(job="a", sequence=3, time_ms=3))), 10)
    folded.apply(Batch(events=(Submitted(job="c", sequence=1, time_ms=4),)), 10)
    assert lives(folded.jobs) == {("b", 1), ("c", 1)}
    folded.apply(Batch(events=(Submitted(job="a", attempt=2, sequence=1, time_ms=4),)), 10)
    assert ("a", 2) in lives(folded.jobs), "the next attempt of a known job is no new job"


def test_what_the_api_has_acknowledged_is_folded_beyond_the_bound() -> None:
    folded = state(live_jobs=1)
    many = tuple(Submitted(job=job, sequence=1, time_ms=1) for job in ("a", "b", "c"))
    folded.apply(Batch(events=many, is_acknowledged=True), 10)
    assert lives(folded.jobs) == {("a", 1), ("b", 1), ("c", 1)}
    assert not folded.counts.bad
    folded.apply(Batch(events=(Submitted(job="d", sequence=1, time_ms=1),)), 10)
    assert folded.counts.bad == {"too_many_jobs": 1}


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
        restored.jobs.add_attempt(attempt)
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
    assert folded.count_used_limits()["unknown_nodes"] == {"used": 1, "most": 1}


def decoded(folded: FleetState, names: Sequence[tuple[str, int]]) -> tuple[int, list[str]]:
    """How many samples of these GPUs are taken, and why the others are not."""
    decoder = WriteDecoder(ExporterResolver(folded.entities))
    series = [(gpu("DCGM_FI_DEV_POWER_USAGE", index, node), [(5, 500.0)]) for node, index in names]
    written = decoder.decode(packed(message_v1(series)), Version.V1, 10)
    return sum(map(len, written.samples)), [error.reason for error in written.bad]


def test_gpus_that_no_topology_states_are_bounded_and_those_of_its_nodes_are_not() -> None:
    folded = state(("n1",), unknown_gpus=3)
    strangers = [("x", index) for index in range(5)]
    assert decoded(folded, [*strangers, ("n1", 200)]) == (3, ["unknown_gpus"] * 3)
    assert decoded(folded, [("n1", index) for index in range(16)]) == (16, [])
    assert decoded(folded, strangers[:3]) == (3, []), "what is known goes on"
    assert folded.count_used_limits()["unknown_gpus"] == {"used": 3, "most": 3}
    again = Entities.load(folded.entities.dump())
    limits = LimitsConfig(unknown_gpus=3)
    restored = FleetState(again, WindowStore(again), Topology.build([NodeSpec("n1", gpus=8)]), limits)
    assert decoded(restored, strangers) == (3, ["unknown_gpus"] * 2)


def test_ports_and_mig_instances_have_room_of_their_own() -> None:
    entities = Entities()
    entities.find_or_add_node("n1")
    entities.set_limits({"n1": 8}, 10, 1)
    for index in range(32):
        entities.add_to_node(EntityKind.PORT, "n1", f"mlx5_{index}", 1)
    assert entities.room is not None
    assert not any(entities.room.used.values())
    for index in (32, 33):
        entities.add_to_node(EntityKind.PORT, "n1", f"mlx5_{index}", 1)
    with pytest.raises(RecordError, match="unknown_gpus"):
        entities.add_to_node(EntityKind.PORT, "n1", "mlx5_34", 1)
    for number in range(2):
        entities.add_to_node(EntityKind.GPU_INSTANCE, "x", 0, number)
    with pytest.raises(RecordError, match="unknown_gpus"):
        entities.add_to_node(EntityKind.GPU_INSTANCE, "x", 0, 2)
    assert entities.add_to_node(EntityKind.GPU_INSTANCE, "n1", 7, 6) == 2


def test_a_node_has_so_many_sources_and_those_go_on() -> None:
    folded = state()
    rows = [
        NodeEvent(node="n1", source=f"s{n}", sequence=1, time_ms=1, type="health")
        for n in range(MAX_SOURCES_PER_NODE + 5)
    ]
    assert len(folded.apply(Batch(node_events=tuple(rows)), 10)) == MAX_SOURCES_PER_NODE
    assert folded.counts.bad == {"too_many_sources": 5}
    restored = state()
    restored.nodes.load(folded.nodes.dump())
    later = [msgspec.structs.replace(row, sequence=2) for row in rows]
    assert len(restored.apply(Batch(node_events=tuple(later)), 10)) == MAX_SOURCES_PER_NODE


def ended(count: int, first: int = 0) -> Batch:
    """Jobs that came, ran and ended at one moment."""
    jobs = [f"j{number}" for number in range(first, first + count)]
    rows: list[JobEvent] = [Submitted(job=job, sequence=1, time_ms=NOW_MS) for job in jobs]
    rows += [Started(job=job, sequence=2, time_ms=NOW_MS, nodes=("n1",)) for job in jobs]
    rows += [Finished(job=job, sequence=3, time_ms=NOW_MS) for job in jobs]
    return Batch(events=tuple(rows))


def test_of_jobs_that_ended_so_many_are_held_in_full_and_so_many_at_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("fleetcast.features.ended_jobs", "fleetcast.service.pipeline.state"):
        monkeypatch.setattr(f"{module}.MOST_ENDED", 10)
    monkeypatch.setattr("fleetcast.service.pipeline.state.MOST_RESTING", 25)
    work = pipeline(tmp_path, ManualClock(NOW_MS))
    work.apply_batch(ended(30))
    assert len(work.state.watch.ended.list_recent(NOW_MS)) == 10
    asyncio.run(work.save())
    assert (len(work.state.jobs.attempts), len(work.state.jobs.resting)) == (10, 20)
    work.apply_batch(ended(20, first=30))
    asyncio.run(work.save())
    assert (len(work.state.jobs.attempts), len(work.state.jobs.resting)) == (10, 25)
    work.apply_batch(Batch(events=(Finished(job="j15", sequence=3, time_ms=NOW_MS),)))
    assert work.state.counts.duplicates == 1, "what is at rest is known"


def test_names_of_jobs_that_ended_are_forgotten_in_their_time_and_leave_nothing(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    work = pipeline(tmp_path, clock)
    work.apply_batch(ended(200))
    asyncio.run(work.tick())
    assert work.state.count_used_limits()["live_jobs"]["used"] == 0
    clock.advance(3 * 3600)
    asyncio.run(work.save())
    asyncio.run(work.tick())
    jobs = work.state.jobs
    assert (len(jobs.attempts), len(jobs.resting), len(work.state.watch.ended.list_recent(clock.now_ms()))) == (
        0,
        200,
        0,
    )
    clock.advance(36 * 86_400)
    asyncio.run(work.save())
    asyncio.run(work.tick())
    left = [jobs.attempts, jobs.latest, jobs.resting, jobs._started, jobs._live, jobs._live_of]
    assert not any(left)
    assert not any([work.state._copies, work.state.demand._known, work.state.runs._live])


def pipeline(folder: Path, clock: ManualClock) -> Pipeline:
    return Pipeline(Config(state=str(folder)), clock, Topology.build([NodeSpec("n1", gpus=8)]), lambda _: [])


def page_of(node: str, gpus: int) -> bytes:
    labels = (f'{{gpu="{index}",UUID="GPU-{node}-{index}",Hostname="{node}"}}' for index in range(gpus))
    return "".join(f"DCGM_FI_DEV_POWER_USAGE{each} 400\n" for each in labels).encode()


def scraped(folded: FleetState, target: Target, *pages: bytes) -> tuple[int, Counter[str]]:
    """How many samples of a target's pages are read, and why the others are not."""
    decoder = PageDecoder(ExporterResolver(folded.entities), target)
    batches = [decoder.decode(page, NOW_MS + number) for number, page in enumerate(pages)]
    return sum(map(len, batches)), Counter(error.reason for batch in batches for error in batch.bad)


def test_targets_that_the_operator_lists_are_under_no_bound_of_senders() -> None:
    folded = state(("n1",), unknown_nodes=1, unknown_gpus=2)
    for number in range(50):
        host = f"host-{number}"
        assert scraped(folded, Target(host, is_listed=True), page_of(host, 8)) == (8, {})
    assert (
        folded.count_used_limits()["unknown_nodes"]["used"] == folded.count_used_limits()["unknown_gpus"]["used"] == 0
    )
    assert decoded(folded, [("stranger", index) for index in range(3)]) == (2, ["unknown_gpus"])
    assert decoded(folded, [("other", 0)]) == (0, ["unknown_nodes"])
    assert folded.count_used_limits()["unknown_nodes"] == {"used": 1, "most": 1}


def test_a_listed_target_has_room_for_a_hosts_gpus_and_for_some_hosts() -> None:
    """One target that names any number of hosts, such as a federating Prometheus, is bounded as a sender is."""
    folded = state(("n1",), unknown_nodes=2, unknown_gpus=3)
    assert scraped(folded, Target("big", is_listed=True), page_of("big", 40)) == (16 + 3, {"unknown_gpus": 21})
    pages = b"".join(page_of(f"f{number}", 1) for number in range(MOST_LISTED + 10))
    federated = scraped(folded, Target("federate", is_listed=True), pages)
    assert federated == (MOST_LISTED, {"unknown_nodes": 8, "unknown_gpus": 2})


def test_listed_hosts_leave_the_room_of_senders_after_a_restart() -> None:
    folded = state(("n1",), unknown_nodes=2, unknown_gpus=4)
    scraped(folded, Target("host", is_listed=True), page_of("host", 8))
    again = Entities.load(folded.entities.dump())
    limits = LimitsConfig(unknown_nodes=2, unknown_gpus=4)
    restored = FleetState(again, WindowStore(again), Topology.build([NodeSpec("n1", gpus=8)]), limits)
    assert restored.count_used_limits()["unknown_gpus"]["used"] == 8
    assert scraped(restored, Target("host", is_listed=True), page_of("host", 8)) == (8, {})
    assert (
        restored.count_used_limits()["unknown_gpus"]["used"]
        == restored.count_used_limits()["unknown_nodes"]["used"]
        == 0
    )


def test_nodes_of_a_connected_scheduler_are_under_no_bound_of_senders() -> None:
    folded = state(("n1",), unknown_nodes=1, unknown_gpus=1)
    stated = {f"s{number}": NodeSpec(f"s{number}", gpus=8, source="slurm") for number in range(5)}
    folded.refresh_topology({}, {}, stated)
    assert not folded.counts.bad
    assert len(folded.topology) == 6
    assert decoded(folded, [("s1", index) for index in range(8)]) == (8, [])
    assert folded.count_used_limits()["unknown_nodes"] == {"used": 0, "most": 1}


def test_gpus_beyond_the_bound_are_read_from_the_next_page_on_after_a_scheduler_lists_their_node() -> None:
    folded = state(("n1",), unknown_nodes=3, unknown_gpus=2)
    decoder = PageDecoder(ExporterResolver(folded.entities), Target("federate"))
    pages = page_of("s1", 3) + page_of("s2", 3)
    for number in range(3):
        assert len(decoder.decode(pages, NOW_MS + number)) == 2
    folded.refresh_topology({}, {}, {name: NodeSpec(name, gpus=3, source="slurm") for name in ("s1", "s2")})
    batch = decoder.decode(pages, NOW_MS + 3)
    assert (len(batch), batch.bad) == (6, ())
