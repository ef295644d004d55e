"""RunningPlaces are remembered while nothing moves, and are those of the attempts at any time."""

from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import Failed, Finished, Phase, Queued, Resized, Started, Step, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from tests.fuzz.bounds import examples

NODES = ("n0", "n1", "n2")
JOBS = ("a", "b", "c")


def ranks_on(nodes):
    return tuple(RankPlacement(rank, node, (0, 1)) for rank, node in enumerate(nodes))


def event_of(kind, job, sequence, nodes):
    about = {"job": job, "sequence": sequence, "time_ms": 1_000 + sequence}
    return {
        "submit": lambda: Submitted(**about, gang=len(nodes) or 1, gpus_per_node=2),
        "queue": lambda: Queued(**about, reason="priority"),
        "start": lambda: Started(**about, ranks=ranks_on(nodes)),
        "start on nodes": lambda: Started(**about, nodes=tuple(nodes)),
        "resize": lambda: Resized(**about, ranks=ranks_on(nodes)),
        "step": lambda: Step(**about, step=sequence, duration_s=1.0, rank=0, node=nodes[0] if nodes else ""),
        "phase": lambda: Phase(**about, name="steady"),
        "finish": lambda: Finished(**about),
        "fail": lambda: Failed(**about, category="hardware", message="x"),
    }[kind]()


KINDS = ("submit", "queue", "start", "start on nodes", "resize", "step", "phase", "finish", "fail")
EVENTS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from(JOBS), st.lists(st.sampled_from(NODES), max_size=3)), max_size=25
)


def jobs_on(running):
    """Node → the jobs there, by a look at every job's nodes: the plain form of the index."""
    return {node: [at for at, row in enumerate(running) if node in row.hosts] for node in NODES}


@given(EVENTS)
@examples(300)
def test_remembered_placements_are_those_of_the_attempts(events):
    table, placements = JobTable(), RunningPlaces(())
    for sequence, (kind, job, nodes) in enumerate(events):
        table.apply(event_of(kind, job, sequence, nodes))
        running = [row.copy() for row in table.list_running()]
        placements = RunningPlaces.from_running(running, placements)
        assert placements.hosts == tuple(row.hosts for row in running)
        assert placements.gpus == tuple(row.gpus for row in running)
        assert placements.keys == [(row.job, row.attempt) for row in running]
        assert {node: placements.jobs_on.get(node, []) for node in NODES} == jobs_on(running)


VALUES = ("state", "source", "eligible_ms", "gpus", "hosts")


@given(EVENTS)
@examples(300)
def test_a_copy_has_the_values_that_its_attempt_had(events):
    table, before = JobTable(), []
    for sequence, (kind, job, nodes) in enumerate(events):
        table.apply(event_of(kind, job, sequence, nodes))
        for row in table.attempts.values():
            before.append((row.copy(), [getattr(row, name) for name in VALUES]))
    for copy, values in before:
        assert [getattr(copy, name) for name in VALUES] == values  # computed now
        assert [getattr(copy, name) for name in VALUES] == values  # remembered


@given(EVENTS)
@examples(300)
def test_the_lists_of_attempts_are_those_of_their_states(events):
    table = JobTable()
    for sequence, (kind, job, nodes) in enumerate(events):
        table.apply(event_of(kind, job, sequence, nodes))
    rows = list(table.attempts.values())
    assert table.list_running() == [row for row in rows if row.state == "running"]
    assert table.list_queued() == [row for row in rows if row.state == "queued" and row.submission is not None]


def test_steps_leave_placements_and_a_move_does_not():
    table = JobTable()
    table.apply(event_of("start", "a", 0, ("n0", "n1")))
    placements = RunningPlaces.from_running([row.copy() for row in table.list_running()])
    table.apply(event_of("step", "a", 1, ("n0",)))
    table.apply(event_of("phase", "a", 2, ()))
    assert RunningPlaces.from_running([row.copy() for row in table.list_running()], placements) is placements
    table.apply(event_of("resize", "a", 3, ("n0",)))
    moved = RunningPlaces.from_running([row.copy() for row in table.list_running()], placements)
    assert moved is not placements
    assert moved.hosts == (("n0",),)


def test_a_submission_that_arrives_later_changes_the_gpus():
    table = JobTable()
    table.apply(event_of("start on nodes", "a", 0, ("n0",)))
    placements = RunningPlaces.from_running(table.list_running())
    table.apply(event_of("submit", "a", 1, ("n0",)))
    assert RunningPlaces.from_running(table.list_running(), placements).gpus == (2,)


def test_an_event_that_makes_a_training_loops_job_one_of_a_scheduler_changes_them():
    table = JobTable()
    table.apply(event_of("step", "a", 0, ("n0",)))
    placements = RunningPlaces.from_running(table.list_running())
    table.apply(event_of("queue", "a", 1, ()))
    assert RunningPlaces.from_running(table.list_running(), placements) is not placements
