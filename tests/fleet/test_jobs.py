from itertools import permutations
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
from fleetcast.fleet.job_steps import MAX_STEPS
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import MAX_EVENTS, JobAttempt
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.fleet.sequences import SeenSequences
from tests.fuzz.bounds import examples

EIGHT = tuple(range(8))


def rank(number: int, node: str, gpus: tuple[int, ...] = EIGHT) -> RankPlacement:
    return RankPlacement(number, node, gpus)


def submitted(job: str = "a", sequence: int = 1, time_ms: int = 10, **fields) -> Submitted:
    return Submitted(job=job, sequence=sequence, time_ms=time_ms, gpus_per_node=8, **fields)


def started(job: str = "a", sequence: int = 2, time_ms: int = 20, **fields) -> Started:
    return Started(job=job, sequence=sequence, time_ms=time_ms, **fields)


def finished(job: str = "a", sequence: int = 3, time_ms: int = 50, **fields) -> Finished:
    return Finished(job=job, sequence=sequence, time_ms=time_ms, **fields)


def attempt_of(*events: JobEvent) -> JobAttempt:
    table = JobTable()
    for event in events:
        table.apply(event)
    attempt = table.get(events[0].job)
    assert attempt is not None
    return attempt


# -- sequences ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(-5, 40)))
def test_seen_sequences_are_a_set(sequences: list[int]) -> None:
    seen, known = SeenSequences(), set()
    for sequence in sequences:
        assert seen.add(sequence) == (sequence not in known)
        known.add(sequence)
    assert {s for first, last in seen.runs for s in range(first, last + 1)} == known


@given(st.permutations(range(20)))
def test_a_gapless_attempt_costs_one_run(sequences: list[int]) -> None:
    seen = SeenSequences()
    for sequence in sequences:
        seen.add(sequence)
    assert seen.runs == [[0, 19]]


# -- one attempt ----------------------------------------------------------------------------------------------------


def test_an_attempt_waits_runs_and_ends() -> None:
    table = JobTable()
    states = []
    for event in (submitted(), started(nodes=("n1",)), finished()):
        attempt = table.apply(event)
        assert attempt is not None
        states.append((attempt.state, len(table.list_queued()), len(table.list_running())))
    assert states == [("queued", 1, 0), ("running", 0, 1), ("finished", 0, 0)]
    assert attempt.run_s == 0.03


def test_a_duplicate_changes_nothing_and_is_said_to_be_one() -> None:
    table = JobTable()
    assert table.apply(submitted()) is not None
    assert table.apply(submitted()) is None
    assert table.position == 1


def test_the_end_may_arrive_before_the_start() -> None:
    attempt = attempt_of(finished(), started(nodes=("n1",)))
    assert (attempt.state, attempt.started_ms, attempt.ended_ms) == ("finished", 20, 50)


def test_a_resize_moves_the_attempt() -> None:
    resized = Resized(job="a", sequence=5, time_ms=30, ranks=(rank(0, "n7"),))
    for events in (
        (started(ranks=(rank(0, "n1"), rank(1, "n2"))), resized),
        (resized, started(ranks=(rank(0, "n1"),))),
    ):
        attempt = attempt_of(*events)
        assert (attempt.hosts, attempt.gpus, attempt.started_ms) == (("n7",), 8, 20)


def test_a_negative_sequence_counts_like_any_other() -> None:
    assert attempt_of(submitted(sequence=-3)).submitted_ms == 10


@pytest.mark.parametrize(
    ("event", "outcome"),
    [
        (finished(), "finished"),
        (Failed(job="a", sequence=3, time_ms=50, category="hardware"), "failed"),
        (Preempted(job="a", sequence=3, time_ms=50, by="b"), "preempted"),
    ],
)
def test_the_outcome_is_that_of_the_end(event: JobEvent, outcome: str) -> None:
    attempt = attempt_of(submitted(), started(), event)
    assert attempt.state == attempt.outcome == outcome
    assert (attempt.failure is not None) == (outcome == "failed")


def test_gpus_are_those_held_or_else_those_wanted() -> None:
    assert attempt_of(submitted(gang=4)).gpus == 32
    assert attempt_of(submitted(gang=Gang(2, 4))).gpus == 32
    assert attempt_of(submitted(gang=4), started(nodes=("n1", "n2"))).gpus == 16
    assert attempt_of(submitted(gang=4), started(ranks=(rank(0, "n1", (0, 1)), rank(1, "n1", (2, 3))))).gpus == 4
    assert attempt_of(started(nodes=("n1",))).gpus == 1


def test_hosts_are_named_once_in_rank_order() -> None:
    assert attempt_of(started(ranks=(rank(0, "n2"), rank(1, "n1"), rank(2, "n2")))).hosts == ("n2", "n1")


def test_a_phase_of_one_rank_is_not_the_phase_of_the_job() -> None:
    steady = Phase(job="a", sequence=4, time_ms=30, name="steady")
    one = Phase(job="a", sequence=5, time_ms=40, name="checkpoint", rank=3)
    attempt = attempt_of(steady, one)
    assert (attempt.phase, attempt.phase_since_ms) == ("steady", 30)


def test_rank_0_tells_the_phase_of_the_job_as_the_client_library_does() -> None:
    evaluation = Phase(job="a", sequence=4, time_ms=30, name="evaluation", rank=0)
    attempt = attempt_of(evaluation)
    assert (attempt.phase, attempt.phase_since_ms) == ("evaluation", 30)


def test_only_the_newest_steps_and_events_are_kept() -> None:
    events = [Step(job="a", sequence=i, time_ms=i, step=i, duration_s=1.0) for i in range(MAX_STEPS + 50)]
    attempt = attempt_of(*reversed(events))
    assert attempt.steps == events[-MAX_STEPS:]
    assert attempt.events == events[-MAX_EVENTS:]


# -- the table ------------------------------------------------------------------------------------------------------


def test_the_latest_attempt_is_meant_unless_one_is_named() -> None:
    table = JobTable()
    for number in (2, 1, 3):
        table.apply(submitted(attempt=number, time_ms=number))
    assert [row.submitted_ms for row in (table.get("a"), table.get("a", 1)) if row] == [3, 1]
    assert table.get("nobody") is None


def test_forgetting_drops_what_ended_long_ago_only() -> None:
    table = JobTable()
    for event in (submitted(), started(), finished(), submitted("b"), finished("b", time_ms=200), submitted("c")):
        table.apply(event)
    assert table.drop_ended_before(100) == 1
    assert [row.job for row in table] == ["b", "c"]
    assert table.get("a") is None


def test_forgetting_the_latest_attempt_leaves_the_one_before_as_the_latest() -> None:
    table = JobTable()
    table.apply(submitted(attempt=1))
    table.apply(finished(attempt=2, time_ms=5))
    table.drop_ended_before(100)
    latest = table.get("a")
    assert latest is not None
    assert latest.attempt == 1


def test_an_attempt_that_was_kept_can_be_put_back() -> None:
    table, again = JobTable(), JobTable()
    for event in (submitted(), started(nodes=("n1",)), submitted("b")):
        table.apply(event)
    for attempt in table:
        again.add_attempt(attempt)
    assert [row.job for row in again.list_running()] == ["a"]
    assert [row.job for row in again.list_queued()] == ["b"]
    assert again.apply(started(nodes=("n1",))) is None


def test_a_job_that_was_over_before_is_laid_to_rest_and_still_known() -> None:
    table = JobTable()
    told = [submitted(), started(), finished(), submitted("b"), started("b"), finished("b", time_ms=200)]
    for event in told:
        table.apply(event)
    before = sorted(table, key=lambda row: row.job)
    assert [row.job for row in table.pack_old_jobs(100)] == ["a"]
    assert list(table.attempts) == [("b", 1)]
    assert sorted(table, key=lambda row: row.job) == before
    assert table.get("a") == before[0]
    assert table.get("a", 2) is None


def test_an_event_wakes_a_job_at_rest_and_a_duplicate_stays_one() -> None:
    table = JobTable()
    for event in (submitted(), started(), finished()):
        table.apply(event)
    table.pack_old_jobs(100)
    assert table.apply(started()) is None
    assert "a" not in table.resting
    assert table.apply(submitted(attempt=2, sequence=1, time_ms=70)) is not None
    latest = table.get("a")
    assert latest is not None
    assert latest.attempt == 2
    assert table.list_running() == []


def test_a_job_rests_only_when_all_its_attempts_are_over() -> None:
    table = JobTable()
    for event in (submitted(), started(), finished(), submitted(attempt=2, sequence=1, time_ms=60)):
        table.apply(event)
    assert table.pack_old_jobs(100) == []


def test_jobs_at_rest_are_forgotten_too() -> None:
    table = JobTable()
    for event in (submitted(), started(), finished(), submitted("b"), started("b"), finished("b", time_ms=200)):
        table.apply(event)
    table.pack_old_jobs(300)
    assert table.drop_ended_before(100) == 1
    assert [row.job for row in table] == ["b"]


def test_what_runs_no_more_keeps_no_steps() -> None:
    step = Step(job="a", sequence=3, time_ms=30, step=1, duration_s=1.0)
    assert attempt_of(started(), step).steps == [step]
    assert attempt_of(started(), step, finished(sequence=9)).steps == []
    assert attempt_of(started(), finished(sequence=9), step).steps == []


def test_a_copy_of_an_attempt_does_not_change_with_it() -> None:
    attempt = attempt_of(submitted(), started(nodes=("n1",)))
    copy = attempt.copy()
    attempt.fold(NodeLost(job="a", sequence=7, time_ms=40, node="n1", reason="power"))
    attempt.fold(finished(sequence=8))
    assert copy == attempt_of(submitted(), started(nodes=("n1",))).copy()


def test_what_started_without_a_submission_is_not_queued() -> None:
    table = JobTable()
    table.apply(Queued(job="a", sequence=1, time_ms=1, reason="full"))
    assert table.list_queued() == []


def waits(sequence: int, time_ms: int, blocked: bool = False, reason: str = "") -> Queued:
    return Queued(job="a", sequence=sequence, time_ms=time_ms, reason=reason, blocked=blocked)


def test_a_held_attempt_is_blocked_until_it_is_released() -> None:
    table, states = JobTable(), []
    for event in (submitted(), waits(5, 10, True, "JobHeldUser"), waits(6, 30, reason="Resources")):
        attempt = table.apply(event)
        assert attempt is not None
        states.append((attempt.state, attempt.eligible_ms, len(table.list_queued()), len(table.list_blocked())))
    assert states == [("queued", 10, 1, 0), ("blocked", None, 0, 1), ("queued", 30, 1, 0)]
    assert attempt.queued_reason == "Resources"


def test_a_reason_that_changes_moves_no_start_of_the_wait() -> None:
    attempt = attempt_of(submitted(), waits(5, 10, reason="Priority"), waits(6, 30, reason="Resources"))
    assert (attempt.queued_reason, attempt.eligible_ms) == ("Resources", 10)


def test_a_blocked_attempt_that_starts_runs() -> None:
    table = JobTable()
    for event in (submitted(), waits(9, 10, True, "Dependency"), started(sequence=3, nodes=("n1",))):
        table.apply(event)
    assert ([row.job for row in table.list_running()], table.list_blocked()) == (["a"], [])


@given(st.permutations([submitted(), waits(5, 10, True, "held"), waits(6, 30), waits(7, 40, True, "held again")]))
def test_the_latest_word_on_an_attempt_that_waits_counts_in_any_order(events: list[JobEvent]) -> None:
    assert (attempt_of(*events).state, attempt_of(*events).queued_reason) == ("blocked", "held again")


nodes = st.sampled_from(("n1", "n2", "n3"))
places = st.lists(nodes, max_size=3).map(lambda names: tuple(rank(i, name) for i, name in enumerate(names)))


def event_of(kind: str, job: str, attempt: int, sequence: int, draw) -> JobEvent:
    common = {"job": job, "attempt": attempt, "sequence": sequence, "time_ms": draw(st.integers(0, 4) | times)}
    of_rank = {"rank": draw(ranks_), "node": draw(st.just("") | nodes), "gpus": draw(gpus)} if kind in OF_RANKS else {}
    match kind:
        case "submitted":
            return Submitted(**common, queue=draw(st.sampled_from(("", "q"))), gang=draw(st.integers(1, 3)))
        case "queued":
            return Queued(**common, reason=draw(st.sampled_from(("full", "held"))), blocked=draw(st.booleans()))
        case "started":
            return Started(**common, ranks=draw(places))
        case "resized":
            return Resized(**common, ranks=draw(places))
        case "phase":
            return Phase(**common, **of_rank, name=draw(st.sampled_from(("warmup", "steady", "evaluation"))))
        case "step":
            return Step(**common, **of_rank, step=draw(st.integers(0, 3)), duration_s=draw(st.sampled_from((1.0, 2.0))))
        case "checkpoint":
            size = draw(st.none() | st.integers(0, 9))
            return Checkpoint(**common, edge=draw(st.sampled_from(("begin", "end"))), bytes=size)
        case "node_lost":
            return NodeLost(**common, node=draw(nodes), reason=draw(st.sampled_from(("power", "network"))))
        case "failed":
            return Failed(**common, category="user", message=draw(st.sampled_from(("x", "y"))))
        case "preempted":
            return Preempted(**common)
    return Finished(**common)


times = st.integers(0, 3000)
ranks_ = st.none() | st.integers(0, 2)
gpus = st.sampled_from(((), (0,), (0, 1)))
OF_RANKS = ("phase", "step")
FROM_TRAINING_LOOPS = ("phase", "step", "checkpoint", "failed")
KINDS = (
    "submitted",
    "queued",
    "started",
    "resized",
    "phase",
    "step",
    "checkpoint",
    "node_lost",
    "failed",
    "preempted",
    "finished",
)


@st.composite
def histories(draw) -> list[JobEvent]:
    """Events of a few attempts, each (job, attempt, sequence) once.

    Any type may occur anywhere, also twice. Many attempts have no start: only their training loops report them.
    Sequences below zero are those of labels and of ends that silence implied.
    """
    jobs = draw(st.sampled_from(("a", "ab")))
    keys = draw(st.sets(st.tuples(st.sampled_from(jobs), st.integers(1, 2), st.integers(-4, 12)), max_size=25))
    kinds = draw(st.sampled_from((KINDS, FROM_TRAINING_LOOPS, (*FROM_TRAINING_LOOPS, "started"))))
    return [event_of(draw(st.sampled_from(kinds)), *key, draw) for key in sorted(keys)]


def fold(events: list[JobEvent]) -> JobTable:
    table = JobTable()
    for event in events:
        table.apply(event)
    return table


def assert_same(one: JobTable, other: JobTable) -> None:
    assert one.attempts == other.attempts
    assert one.latest == other.latest
    assert one.position == other.position
    for name in ("list_running", "list_queued"):
        mine, theirs = ({(row.job, row.attempt) for row in getattr(table, name)()} for table in (one, other))
        assert mine == theirs


def phase(sequence: int, time_ms: int, **fields) -> Phase:
    return Phase(job="a", sequence=sequence, time_ms=time_ms, name="warmup", **fields)


def step_of(sequence: int, time_ms: int, **fields) -> Step:
    return Step(job="a", sequence=sequence, time_ms=time_ms, step=sequence, duration_s=1.0, **fields)


def silent_end(sequence: int, time_ms: int) -> Failed:
    return Failed(job="a", sequence=sequence, time_ms=time_ms, category="unknown")


@examples(1250)
@given(histories(), st.randoms(use_true_random=False))
@example([phase(0, 0), phase(1, 1)], Random(0))
@example([phase(0, 1, rank=0, node="n1"), phase(1, 0, rank=0, node="n2")], Random(0))
@example([silent_end(-1, 10), step_of(0, 9), step_of(1, 11)], Random(0))
@example([silent_end(-2, 20), silent_end(-1, 10), step_of(0, 15)], Random(0))
@example([silent_end(-1, 10), step_of(0, 11), started(sequence=1)], Random(0))
def test_any_order_gives_the_same_table(events: list[JobEvent], random) -> None:
    shuffled = list(events)
    random.shuffle(shuffled)
    straight = fold(events)
    assert_same(fold(shuffled), straight)
    assert_same(fold(events[::-1]), straight)


@examples(125)
@given(histories(), st.integers(0, 25), st.integers(0, 100))
def test_rest_changes_nothing_that_anybody_sees(events: list[JobEvent], cut: int, before_ms: int) -> None:
    table = fold(events[:cut])
    table.pack_old_jobs(before_ms)
    for event in events[cut:]:
        table.apply(event)
    straight = fold(events)
    key = lambda row: (row.job, row.attempt)  # noqa: E731
    assert sorted(table, key=key) == sorted(straight, key=key)
    assert table.position == straight.position
    assert [table.get(job) for job in "ab"] == [straight.get(job) for job in "ab"]
    assert sorted(map(key, table.list_running())) == sorted(map(key, straight.list_running()))


@examples(125)
@given(histories())
def test_twice_is_once(events: list[JobEvent]) -> None:
    assert_same(fold(events + events), fold(events))


@examples(125)
@given(histories(), st.data())
def test_a_snapshot_and_an_overlapping_replay_equal_a_straight_run(events: list[JobEvent], data) -> None:
    cut = data.draw(st.integers(0, len(events)))
    overlap = data.draw(st.integers(0, cut))
    before, table = fold(events[:cut]), JobTable()
    for attempt in before:
        table.add_attempt(attempt)
    table.position = before.position
    for event in events[overlap:]:
        table.apply(event)
    assert_same(table, fold(events))


# -- nodes ----------------------------------------------------------------------------------------------------------


def node_event(type_: str, sequence: int, time_ms: int, source: str = "slurm", node: str = "n1") -> NodeEvent:
    return NodeEvent(node=node, source=source, sequence=sequence, time_ms=time_ms, type=type_, message=f"at {time_ms}")


def test_the_later_of_drain_and_undrain_wins() -> None:
    table = NodeTable()
    for event in (node_event("undrain", 2, 20), node_event("drain", 1, 10)):
        table.apply(event)
    assert not table.nodes["n1"].drained
    table.apply(node_event("drain", 3, 30))
    assert (table.nodes["n1"].drained, table.nodes["n1"].drain_message) == (True, "at 30")


def test_a_lost_node_returns() -> None:
    table = NodeTable()
    table.apply(node_event("lost", 1, 10))
    assert table.nodes["n1"].lost
    table.apply(node_event("returned", 2, 20))
    assert not table.nodes["n1"].lost


def test_sources_count_their_own_sequences() -> None:
    table = NodeTable()
    assert table.apply(node_event("xid", 1, 10, "kernel")) is not None
    assert table.apply(node_event("xid", 1, 10, "slurm")) is not None
    assert table.apply(node_event("xid", 1, 10, "slurm")) is None


node_histories = st.sets(
    st.tuples(
        st.sampled_from(("n1", "n2")),
        st.sampled_from(("s", "t")),
        st.integers(0, 9),
    ),
    max_size=20,
).flatmap(
    lambda keys: st.tuples(
        *(
            st.tuples(st.just(key), st.sampled_from(("drain", "undrain", "lost", "returned", "xid")), st.integers(0, 9))
            for key in sorted(keys)
        )
    )
)


@examples(125)
@given(node_histories, st.randoms(use_true_random=False))
def test_any_order_and_repetition_give_the_same_nodes(rows, random) -> None:
    events = [node_event(type_, seq, time, source, node) for (node, source, seq), type_, time in rows]
    shuffled = events * 2
    random.shuffle(shuffled)
    tables = []
    for order in (events, shuffled):
        table = NodeTable()
        for event in order:
            table.apply(event)
        tables.append(table)
    assert tables[0].nodes == tables[1].nodes
    assert tables[0].position == tables[1].position


@examples(125)
@given(node_histories)
def test_a_kept_node_table_goes_on_as_before(rows) -> None:
    events = [node_event(type_, seq, time, source, node) for (node, source, seq), type_, time in rows]
    table, again = NodeTable(), NodeTable()
    for event in events:
        table.apply(event)
    again.load(table.dump())
    assert again.nodes == table.nodes
    assert [again.apply(event) for event in events] == [None] * len(events)


# -- attempts of one job --------------------------------------------------------------------------------------------


def later_attempts() -> list[JobEvent]:
    return [
        submitted(attempt=1),
        started(attempt=1, nodes=("n1",)),
        submitted(attempt=2, time_ms=30),
        started(attempt=2, time_ms=40, nodes=("n2",)),
        started(attempt=3, time_ms=60, nodes=("n3",)),
    ]


@given(st.permutations(later_attempts()))
def test_the_latest_attempt_that_started_is_the_one_that_runs_in_any_order(events: list[JobEvent]) -> None:
    table = JobTable()
    for event in events:
        table.apply(event)
    assert [row.attempt for row in table.list_running()] == [3]
    assert table.list_queued() == []
    assert [(row.attempt, row.over_ms) for row in sorted(table, key=lambda row: row.attempt)] == [
        (1, 40),
        (2, 60),
        (3, None),
    ]


def test_a_next_attempt_that_only_waits_ends_nothing() -> None:
    table = JobTable()
    for event in later_attempts()[:3]:
        table.apply(event)
    assert [row.attempt for row in table.list_running()] == [1]
    assert [row.attempt for row in table.list_queued()] == [2]


def test_an_end_that_is_told_late_counts_more_than_the_next_start() -> None:
    table = JobTable()
    for event in later_attempts():
        table.apply(event)
    table.apply(finished(attempt=1, time_ms=35))
    first = table.get("a", 1)
    assert first is not None
    assert (first.state, first.over_ms) == ("finished", 35)
    assert table.drop_ended_before(50) == 1
    assert table.find_previous_attempt(table.attempts["a", 2]) is None


T0 = 1_789_000_000_000


def told(sequence: int, at_s: int, **fields: Any) -> Step:
    return Step(job="j", sequence=sequence, time_ms=T0 + at_s * 1000, step=at_s, duration_s=1.0, **fields)


def silent(at_s: int) -> Failed:
    return Failed(job="j", sequence=at_s - 10_000, time_ms=T0 + at_s * 1000, category="unknown")


def test_a_step_of_an_attempt_that_nobody_said_started_makes_it_run_where_its_ranks_say() -> None:
    table = JobTable()
    for event in (told(9, 20, rank=1, node="n2", gpus=(3,)), told(7, 10, rank=0, node="n1", gpus=(0,)), told(8, 30)):
        table.apply(event)
    (row,) = table.list_running()
    assert (row.source, row.started_ms, row.last_sign_ms, row.hosts) == ("sdk", T0 + 10_000, T0 + 30_000, ("n1", "n2"))
    assert [(rank.rank, rank.node, rank.gpus) for rank in row.ranks] == [(0, "n1", (0,)), (1, "n2", (3,))]


def test_a_real_start_takes_over_what_steps_implied_in_any_order() -> None:
    started = Started(job="j", sequence=3, time_ms=T0 + 5000, nodes=("n9",))
    ended = Finished(job="j", sequence=4, time_ms=T0 + 60_000)
    step = told(9, 20, rank=0, node="n1", gpus=(0,))
    for order in permutations((started, step, ended)):
        table = JobTable()
        for event in order:
            table.apply(event)
        row = table.get("j")
        assert row is not None
        assert (row.source, row.started_ms, row.hosts, row.run_s) == ("events", T0 + 5000, ("n9",), 55.0)


def test_an_end_by_silence_gives_way_to_a_later_step_and_to_a_real_end() -> None:
    table = JobTable()
    for event in (told(9, 20), silent(20)):
        table.apply(event)
    assert [row.state for row in table] == ["failed"]
    table.apply(told(8, 15))
    assert table.list_running() == [], "an older step revives nothing"
    table.apply(told(10, 4000))
    assert [row.source for row in table.list_running()] == ["sdk"]
    table.apply(Finished(job="j", sequence=11, time_ms=T0 + 4_001_000))
    table.apply(silent(4000))
    assert [(row.state, row.source) for row in table] == [("finished", "events")]
