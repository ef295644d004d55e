import numpy as np

from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import Failed, Finished, JobEvent, NodeEvent, Resized, Started, Step, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.service.config import LimitsConfig
from fleetcast.service.pipeline.state import MAX_REASONS, FleetState, align_topology

POWER = find_metric_row(EntityKind.GPU, "power_w")
MINUTE = 60_000


def empty_state(nodes: list[NodeSpec] | None = None, limits: LimitsConfig | None = None) -> FleetState:
    entities = Entities()
    return FleetState(entities, WindowStore(entities), Topology.build(nodes or []), limits)


def power(state: FleetState, node: str, gpu: int, time_ms: int, watts: float = 500.0) -> Batch:
    row = state.entities.add_to_node(EntityKind.GPU, node, gpu)
    return Batch(samples=(SampleBatch.from_rows(EntityKind.GPU, [(POWER, row, time_ms, watts)]),))


def test_a_host_that_no_topology_names_becomes_an_unplaced_node_with_its_gpus() -> None:
    state = empty_state([NodeSpec("a", gpus=2)])
    state.apply(power(state, "stranger", 3, MINUTE), MINUTE)
    state.refresh_topology({"stranger": "L40S"})
    assert state.topology.names == ("a", "stranger")
    assert state.topology.placed.tolist() == [True, False]
    assert state.topology.gpus.tolist() == [2, 4]
    assert state.topology.nodes[1].gpu_model == "L40S"
    assert state.find_gpu_rows().tolist() == [[-1, -1, -1, -1], [-1, -1, -1, 0]]


def test_a_refresh_without_news_keeps_the_generation() -> None:
    state = empty_state([NodeSpec("a", gpus=2)])
    state.apply(power(state, "b", 0, MINUTE), MINUTE)
    state.refresh_topology({})
    generation = state.topology.generation
    state.apply(power(state, "b", 0, 2 * MINUTE), 2 * MINUTE)
    state.refresh_topology({})
    assert state.topology.generation == generation


def test_applying_a_batch_twice_changes_nothing_but_counters() -> None:
    state = empty_state()
    ranks = (RankPlacement(0, "a", (0,)),)
    batch = Batch(
        samples=power(state, "a", 0, MINUTE).samples,
        events=(
            Submitted(job="j", sequence=0, time_ms=1),
            Started(job="j", sequence=1, time_ms=2, ranks=ranks),
            Finished(job="j", sequence=2, time_ms=3),
        ),
        node_events=(NodeEvent(node="a", source="admin", sequence=0, time_ms=5, type="drain"),),
    )
    assert len(state.apply(batch, MINUTE)) == 1
    once = (state.counts.samples, state.counts.events, state.jobs.position)
    assert state.apply(batch, MINUTE) == []
    assert (state.counts.samples, state.counts.events, state.jobs.position) == once
    assert state.counts.duplicates == 4
    assert state.counts.late == 1


def test_bad_records_are_counted_by_reason_and_the_good_ones_are_kept() -> None:
    state = empty_state()
    batch = power(state, "a", 0, MINUTE)
    bad = (RecordError("bad_value", "n/a"), RecordError("bad_value", "x"), RecordError("bad_line", "{"))
    state.apply(Batch(samples=batch.samples, bad=bad), MINUTE)
    assert state.counts.bad == {"bad_value": 2, "bad_line": 1}
    assert state.counts.bad_examples["bad_line"] == "{"
    assert state.counts.samples == 1


def test_reasons_that_senders_make_up_are_bounded() -> None:
    state = empty_state()
    state.apply(Batch(bad=tuple(RecordError(f"reason {number}", "") for number in range(1_000))), MINUTE)
    assert len(state.counts.bad) == MAX_REASONS + 1
    assert state.counts.bad.total() == 1_000


def test_a_sample_far_ahead_of_the_clock_is_a_bad_record() -> None:
    state = empty_state()
    state.apply(power(state, "a", 0, 10 * MINUTE), MINUTE)
    assert state.counts.bad["future"] == 1
    assert state.counts.samples == 0


def test_the_topology_follows_the_order_of_rows_that_a_snapshot_fixed() -> None:
    entities = Entities()
    entities.find_or_add_node("z")
    entities.find_or_add_node("gone")
    aligned = align_topology(Topology.build([NodeSpec("a", gpus=1), NodeSpec("z", gpus=2)]), entities)
    assert aligned.names == ("z", "gone", "a")
    assert aligned.placed.tolist() == [True, False, True]
    assert np.array_equal(aligned.gpus, [2, 0, 1])


def test_a_node_that_no_file_describes_grows_with_what_its_exporter_tells() -> None:
    state = empty_state([NodeSpec("a", gpus=2)])
    state.apply(power(state, "new", 0, MINUTE), MINUTE)
    state.refresh_topology({})
    assert state.topology.gpus.tolist() == [2, 1]
    state.apply(power(state, "new", 3, MINUTE), MINUTE)
    state.apply(power(state, "a", 5, MINUTE), MINUTE)
    state.refresh_topology({})
    assert state.topology.gpus.tolist() == [2, 4]  # what a file states stays


def test_a_gpu_model_that_is_told_after_the_gpus_is_taken() -> None:
    # as after a restart: the snapshot brings the GPUs back, the first scrape their model
    state = empty_state()
    state.apply(power(state, "new", 0, MINUTE), MINUTE)
    state.refresh_topology({})
    state.refresh_topology({"new": "H100"})
    assert state.topology.nodes[0].gpu_model == "H100"
    generation = state.topology.generation
    state.refresh_topology({"new": "H100"})
    assert state.topology.generation == generation


def test_events_that_spell_a_known_node_with_its_domain_mean_that_node() -> None:
    state = empty_state([NodeSpec("a", gpus=2), NodeSpec("b", gpus=2)])
    ranks = (RankPlacement(0, "a.example.org", (0,)), RankPlacement(1, "elsewhere.org", (0,)))
    batch = Batch(
        events=(
            Started(job="j", sequence=1, time_ms=2, ranks=ranks),
            Started(job="k", sequence=1, time_ms=2, nodes=("a",)),
            Resized(job="k", sequence=2, time_ms=3, nodes=("b.example.org",)),
            Failed(job="l", sequence=2, time_ms=3, category="hardware", node="b.example.org"),
        ),
        node_events=(NodeEvent(node="a.example.org", source="admin", sequence=0, time_ms=5, type="drain"),),
    )
    assert [event.node for event in state.apply(batch, MINUTE)] == ["a"]
    assert state.nodes.nodes["a"].drained
    assert [row.hosts for row in state.jobs.list_running()] == [("a", "elsewhere.org"), ("b",)]
    failed = state.jobs.get("l")
    assert failed is not None
    assert failed.failure is not None
    assert failed.failure.node == "b"
    state.refresh_topology({})
    assert state.topology.names == ("a", "b")


def test_more_nodes_than_a_fleet_has_are_counted_and_left_out() -> None:
    state = empty_state([NodeSpec("a")], LimitsConfig(unknown_nodes=1))
    events = [NodeEvent(node=f"n{n}", source="s", sequence=n, time_ms=5, type="health") for n in range(5)]
    assert len(state.apply(Batch(node_events=tuple(events)), MINUTE)) == 1
    assert state.counts.bad == {"unknown_nodes": 4}


def test_an_attempt_whose_end_was_never_told_leaves_the_demand_when_the_next_starts() -> None:
    state = empty_state([NodeSpec("a", gpus=8)])
    events = [
        event
        for attempt in (1, 2)
        for event in (
            Submitted(job="j", attempt=attempt, sequence=0, time_ms=attempt * MINUTE, gpus_per_node=8),
            Started(job="j", attempt=attempt, sequence=1, time_ms=attempt * MINUTE, nodes=("a",)),
        )
    ]
    state.apply(Batch(events=tuple(events)), 3 * MINUTE)
    assert state.demand.read_series("all", "running", 3 * MINUTE, 60, 1).tolist() == [8.0]


def test_what_was_told_does_not_change_when_more_is_told() -> None:
    state = empty_state()

    def tell(*events: JobEvent, nodes: tuple[NodeEvent, ...] = ()) -> None:
        state.apply(Batch(events=events, node_events=nodes), MINUTE)

    tell(Started(job="j", sequence=0, time_ms=MINUTE, nodes=("n1",)), Submitted(job="k", sequence=0, time_ms=MINUTE))
    tell(nodes=(NodeEvent(node="n1", source="a", sequence=1, time_ms=MINUTE, type="drain"),))
    first, again = state.copy_events(0), state.copy_events(0)
    tell(Step(job="j", sequence=1, time_ms=MINUTE, step=1, duration_s=1.0))
    tell(Started(job="k", sequence=1, time_ms=MINUTE, nodes=("n1",)))
    tell(Started(job="j", attempt=2, sequence=0, time_ms=MINUTE, nodes=("n1",)))
    tell(nodes=(NodeEvent(node="n1", source="a", sequence=2, time_ms=MINUTE + 1, type="undrain"),))
    later = state.copy_events(0)
    assert [row.job for row in first.running + first.queued] == ["j", "k"]
    assert first.running[0].steps == []
    assert first.nodes["n1"].drained
    assert again.running is first.running  # copied once, while nothing is told of any attempt
    assert later.running is not first.running
    assert [(row.job, row.attempt) for row in later.running] == [("k", 1), ("j", 2)]
    assert not later.nodes["n1"].drained
    assert (first.position, later.position) == (3, 7)


def test_an_attempt_waits_again_once_the_later_attempts_of_its_job_are_dropped() -> None:
    state, now_ms = empty_state(), 30 * 24 * 60 * MINUTE
    later = Started(job="j", attempt=2, sequence=0, time_ms=2, nodes=("a",))
    ended = Finished(job="j", attempt=2, sequence=1, time_ms=3)
    state.apply(Batch(events=(Submitted(job="j", sequence=0, time_ms=1), later, ended)), now_ms)
    assert state.copy_events(now_ms).queued == []
    state.pack_old_jobs(now_ms, history_days=1)
    assert [(row.job, row.attempt) for row in state.copy_events(now_ms).queued] == [("j", 1)]
