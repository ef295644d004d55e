"""What past starts and resizes say of the next one: medians by group, and nothing of events that cannot be."""

from itertools import permutations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.job_changes import (
    FEWEST,
    LONGEST_S,
    MAX_OBSERVATIONS,
    GroupMedians,
    JobChanges,
    measure_pause_s,
    measure_start_s,
)
from fleetcast.fleet.events import Checkpoint, JobEvent, Phase, Resized, Started, Step, Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import Gang

T0 = 1_789_000_000_000
ELASTIC = Gang(2, 8, 2)


def at(seconds: float) -> int:
    return T0 + round(1000 * seconds)


def attempt(*events: JobEvent, job: str = "a", number: int = 1, user: str = "ada", gang: Gang | int = 1) -> JobAttempt:
    """An attempt that was submitted and started at T0; the events come after it in this order."""
    found = JobAttempt(job, number)
    same = {"job": job, "attempt": number}
    nodes = tuple(f"n{k}" for k in range(4))
    found.fold(Submitted(**same, sequence=0, time_ms=T0, user=user, queue="train", gang=gang))
    found.fold(Started(**same, sequence=1, time_ms=T0, nodes=nodes))
    for sequence, event in enumerate(events, 2):
        found.fold(msgspec.structs.replace(event, job=job, attempt=number, sequence=sequence))
    return found


def step(end_s: float, number: int = 0, duration_s: float = 2.0, **more: object) -> Step:
    return Step(job="", sequence=0, time_ms=at(end_s), step=number, duration_s=duration_s, **more)  # type: ignore[arg-type]


def steps(first_s: float, count: int, duration_s: float, number: int = 0, **more: object) -> list[Step]:
    return [step(first_s + duration_s * (k + 1), number + k, duration_s, **more) for k in range(count)]


def resized(time_s: float, *nodes: str) -> Resized:
    return Resized(job="", sequence=0, time_ms=at(time_s), nodes=nodes)


def phase(name: str, time_s: float) -> Phase:
    return Phase(job="", sequence=0, time_ms=at(time_s), name=name)  # type: ignore[arg-type]


def test_a_start_lasts_until_the_first_step_began() -> None:
    assert measure_start_s(attempt(step(142))) == 140
    assert measure_start_s(attempt(phase("loading", 5), phase("steady", 90), step(142))) == 90
    assert measure_start_s(attempt(phase("loading", 5))) is None


def test_in_any_order_of_the_events_a_start_is_the_same() -> None:
    events = [phase("steady", 130), step(142, 0), step(144, 1), step(144, 1)]
    assert {measure_start_s(attempt(*order)) for order in permutations(events)} == {130.0}


def test_a_start_that_nobody_reported_or_a_wrong_clock_says_nothing() -> None:
    inferred = JobAttempt("a", 1)
    inferred.fold(msgspec.structs.replace(step(142), job="a"))
    assert inferred.started_ms is not None
    assert measure_start_s(inferred) is None
    assert measure_start_s(attempt(step(-30))) is None
    late = attempt(*steps(100, 400, 1.0))
    assert measure_start_s(late) is None, "the first steps were dropped"
    after = attempt(Checkpoint(job="", sequence=0, time_ms=at(500), edge="end"), phase("steady", 510))
    assert measure_start_s(after) is None, "steady again after a checkpoint is no start"


def test_the_own_job_then_its_owner_then_all_jobs_decide() -> None:
    changes = JobChanges()
    for number, start_s in enumerate((100, 110, 300), 1):
        changes.record(attempt(step(start_s + 2), job="own", number=number))
    for number in range(FEWEST):
        changes.record(attempt(step(22), job=f"same {number}"))
        changes.record(attempt(step(12), job=f"other {number}", user="eve"))
    assert changes.find_restart_s(attempt(job="own", number=4)) == 110
    assert changes.find_restart_s(attempt(job="new")) == 60, "the median of six starts of ada"
    assert changes.find_restart_s(attempt(job="new", user="bob")) == 20
    assert changes.find_restart_s(attempt(job="new", user="eve")) == 10


def test_few_starts_say_nothing_and_an_absurd_one_is_none() -> None:
    changes = JobChanges()
    for number in range(FEWEST - 1):
        changes.record(attempt(step(102), job=f"j{number}"))
    changes.record(attempt(step(LONGEST_S + 3), job="slow"))
    assert changes.find_restart_s(attempt(job="new")) is None
    changes.record(attempt(step(102), job="one more"))
    assert changes.find_restart_s(attempt(job="new")) == 100


def test_a_repeat_changes_nothing_and_an_earlier_step_that_comes_late_does() -> None:
    changes = JobChanges()
    for number in range(FEWEST):
        for _ in range(3):
            changes.record(attempt(step(102), job=f"j{number}"))
    assert len(changes.starts.dump()) == FEWEST
    for number in range(FEWEST):
        changes.record(attempt(step(102), step(52), job=f"j{number}"))
        changes.record(attempt(step(102), job=f"j{number}"))
    assert changes.find_restart_s(attempt(job="new")) == 50


def test_a_pause_is_the_time_without_a_step_around_a_resize() -> None:
    before = steps(100, 10, 2.0)  # the last ends at 120 s
    assert measure_pause_s(attempt(*before, resized(125, "n0", "n1"), step(204, 10, 4.0), gang=ELASTIC)) == 80
    assert measure_pause_s(attempt(*before, resized(125, "n0", "n1"), step(224, 15, 4.0), gang=ELASTIC)) == 80
    assert measure_pause_s(attempt(*before, gang=ELASTIC)) is None
    assert measure_pause_s(attempt(*before, resized(125, "n0"), gang=ELASTIC)) is None
    assert measure_pause_s(attempt(resized(125, "n0"), step(204, 10, 4.0), gang=ELASTIC)) is None
    assert measure_pause_s(attempt(*before, resized(-5, "n0"), step(204, 10, 4.0), gang=ELASTIC)) is None


def test_pauses_count_for_elastic_jobs_only() -> None:
    changes, events = JobChanges(), [*steps(100, 10, 2.0), resized(125, "n0", "n1"), step(204, 10, 4.0)]
    for number in range(FEWEST):
        changes.record(attempt(*events, job=f"j{number}"))
    assert changes.find_pause_s(attempt(job="new", gang=ELASTIC)) is None
    for number in range(FEWEST):
        changes.record(attempt(*events, job=f"e{number}", gang=ELASTIC))
    assert changes.find_pause_s(attempt(job="new", gang=ELASTIC)) == 80
    assert changes.find_pause_s(attempt(job="new")) is None


def test_step_times_at_two_sizes_are_compared_by_the_token_or_not_at_all() -> None:
    same_batch = [*steps(100, 20, 1.0), resized(125, "n0", "n1"), *steps(200, 20, 1.8, 20)]
    changes = JobChanges()
    for end in range(len(same_batch) + 1):
        changes.record(attempt(*same_batch[:end], gang=ELASTIC))
    assert changes.find_size_times("a") == {2: 1.8, 4: 1.0}
    member_batch = [*steps(100, 20, 1.0, tokens=400), resized(125, "n0", "n1"), *steps(200, 20, 1.1, 20, tokens=200)]
    for end in range(len(member_batch) + 1):
        changes.record(attempt(*member_batch[:end], job="b", gang=ELASTIC))
        changes.record(attempt(*[_without_tokens(event) for event in member_batch[:end]], job="c", gang=ELASTIC))
    assert changes.find_size_times("b") == pytest.approx({2: 1.1 / 200, 4: 1.0 / 400})
    assert changes.find_size_times("c") == {2: 1.1, 4: 1.0}
    even = [*steps(100, 20, 1.0), resized(125, "n0", "n1"), *steps(200, 20, 1.02, 20)]
    for end in range(len(even) + 1):
        changes.record(attempt(*even[:end], job="d", gang=ELASTIC))
    assert changes.find_size_times("d") == {}, "each member may have its own batch"
    assert changes.find_size_times("unknown") == {}


def _without_tokens(event: JobEvent) -> JobEvent:
    return msgspec.structs.replace(event, tokens=None) if isinstance(event, Step) else event


def test_it_survives_a_restart() -> None:
    changes, events = JobChanges(), [*steps(100, 20, 1.0), resized(125, "n0", "n1"), *steps(200, 20, 1.8, 20)]
    for number in range(FEWEST):
        for end in range(len(events) + 1):
            changes.record(attempt(*events[:end], job=f"e{number}", gang=ELASTIC))
    about, arrays = changes.dump()
    again = JobChanges()
    again.load(msgspec.msgpack.decode(msgspec.msgpack.encode(about)), arrays)
    new = attempt(job="new", gang=ELASTIC)
    assert again.find_restart_s(new) == changes.find_restart_s(new) == 100
    assert again.find_pause_s(new) == changes.find_pause_s(new) == 80
    assert again.find_size_times("e0") == changes.find_size_times("e0") != {}
    with pytest.raises(msgspec.ValidationError):
        JobChanges().load(about | {"starts": [["a", "x"]]}, {})


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.floats(-10, 2 * LONGEST_S)), max_size=40))
def test_a_median_lies_among_possible_values_and_needs_enough_of_them(rows: list[tuple[str, str, float]]) -> None:
    medians = GroupMedians()
    for number, (job, owner, seconds) in enumerate(rows):
        medians.record((job, number, 0), (f"job {job}", f"owner {owner}", "all"), seconds)
        known = [row[2] for row in rows[: number + 1] if 0 <= row[2] <= LONGEST_S]
        found = medians.find_median(("job new", "owner new", "all"))
        assert (found is None) == (len(known) < FEWEST)
        assert found is None or min(known) <= found <= max(known)


def test_the_oldest_durations_are_forgotten() -> None:
    medians = GroupMedians()
    for number in range(MAX_OBSERVATIONS + FEWEST):
        medians.record((f"j{number}", 1, 0), (f"job {number}", "owner", "all"), float(number % 100))
    assert len(medians.dump()) == MAX_OBSERVATIONS
    assert medians.get(("j0", 1, 0)) is None
    assert len(medians._by_group) == MAX_OBSERVATIONS + 2
