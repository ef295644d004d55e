"""The circuit breaker's bounds hold in every hour."""

from hypothesis import given
from hypothesis import strategies as st

from fleetcast.placement.actions.action import STOPPING, ActionKind
from fleetcast.placement.actions.breaker import (
    BUCKET_MS,
    WINDOW_MS,
    BreakerCapacity,
    BreakerLimits,
    CircuitBreaker,
)
from tests.fuzz.bounds import examples
from tests.placement.actions.action_world import make_action

CAPACITY = BreakerCapacity(1000.0, {"a": 300.0, "b": 500.0})
LIMITS = BreakerLimits()
Tries = list[tuple[int, str, float, ActionKind, int]]


def drawn_tries() -> st.SearchStrategy[Tries]:
    """A time step in ms, a queue, GPUs, a kind, and by how many ms the clock is set before it."""
    steps = st.tuples(
        st.integers(0, 900_000),
        st.sampled_from(["a", "b", "c"]),
        st.sampled_from([0.5, 1.0, 4.0, 12.0, 20.0]),
        st.sampled_from(ActionKind),
        st.sampled_from([0, 0, 0, 7_200_000, -7_200_000, 1234]),
    )
    return st.lists(steps, max_size=60)


@examples(400)
@given(drawn_tries())
def test_no_hour_has_more_than_the_bounds(tries: Tries) -> None:
    """In true time: a clock that is set changes neither the hour nor what was taken in it."""
    breaker, true_ms, ahead_ms, taken = CircuitBreaker(), 0, 0, list[tuple[int, str, float]]()
    for step_ms, queue, gpus, kind, set_by_ms in tries:
        true_ms += step_ms
        ahead_ms += set_by_ms
        breaker = breaker.shift(set_by_ms)
        action = make_action(queue=queue, gpus=gpus, kind=kind)
        if breaker.explain_excess(action, true_ms + ahead_ms, CAPACITY, LIMITS):
            continue
        breaker = breaker.count(action, true_ms + ahead_ms)
        if kind in STOPPING:
            taken.append((true_ms, queue, gpus))
    for since_ms, _, _ in taken:
        hour = [row for row in taken if since_ms <= row[0] < since_ms + WINDOW_MS]
        assert sum(row[2] for row in hour) <= 0.05 * 1000
        assert sum(row[2] for row in hour if row[1] == "a") <= 0.1 * 300
        assert sum(row[2] for row in hour if row[1] == "b") <= 0.1 * 500


def test_what_was_taken_counts_for_an_hour_and_at_most_a_minute_more() -> None:
    action = make_action(queue="a", gpus=30.0)
    breaker = CircuitBreaker().count(action, 10_000)
    small = make_action(queue="a", gpus=0.5)
    assert breaker.explain_excess(small, 10_000 + WINDOW_MS - 1, CAPACITY, LIMITS) == (
        "30.5 GPUs of queue 'a' within an hour are more than 10.0% of its 300 (placer.taken_queue_share)"
    )
    assert breaker.explain_excess(small, 10_000 + WINDOW_MS + BUCKET_MS, CAPACITY, LIMITS) == ""


def test_the_bound_is_for_the_fleet_too_and_a_queue_of_unknown_size_has_the_fleets() -> None:
    breaker = CircuitBreaker().count(make_action(queue="a", gpus=30.0), 0)
    assert breaker.explain_excess(make_action(queue="b", gpus=20.0), 0, CAPACITY, LIMITS) == ""
    assert "of the fleet" in breaker.explain_excess(make_action(queue="b", gpus=21.0), 0, CAPACITY, LIMITS)
    assert "of the fleet" in breaker.explain_excess(make_action(queue="other", gpus=21.0), 0, CAPACITY, LIMITS)


def test_a_share_of_one_is_no_limit_although_a_queue_loses_more_than_it_holds_now() -> None:
    """Jobs start again and may be stopped again, so a queue can lose more in an hour than it ever holds at once."""
    breaker = CircuitBreaker()
    for _ in range(8):
        breaker = breaker.count(make_action(queue="a", gpus=299.0), 0)
    action = make_action(queue="a", gpus=3.0)
    assert breaker.explain_excess(action, 0, CAPACITY, BreakerLimits(1.0, 1.0)) == ""
    assert breaker.explain_excess(action, 0, BreakerCapacity(1000.0, {"a": 0.0}), BreakerLimits(1.0, 1.0)) == ""
    assert "of queue 'a'" in breaker.explain_excess(action, 0, CAPACITY, BreakerLimits(0.99, 1.0))
    assert "of the fleet" in breaker.explain_excess(action, 0, CAPACITY, BreakerLimits(1.0, 0.99))
    fitting = make_action(queue="b", gpus=1.0)
    assert CircuitBreaker().explain_excess(fitting, 0, BreakerCapacity(0.0, {}), BreakerLimits(1.0, 1.0)), "no board"


def test_growth_and_placement_stop_nothing_and_do_not_count() -> None:
    breaker = CircuitBreaker()
    for kind in (ActionKind.GROW, ActionKind.PLACE):
        breaker = breaker.count(make_action(kind=kind, gpus=10_000.0), 0)
        assert breaker.explain_excess(make_action(kind=kind, gpus=10_000.0), 0, CAPACITY, LIMITS) == ""
    assert breaker == CircuitBreaker()


def test_a_capacity_that_is_no_number_admits_nothing() -> None:
    lost = BreakerCapacity(float("nan"), {})
    assert CircuitBreaker().explain_excess(make_action(gpus=0.5), 0, lost, LIMITS)


def test_sends_within_a_minute_are_one_row() -> None:
    breaker = CircuitBreaker()
    for time_ms in range(0, 600_000, 1000):
        breaker = breaker.count(make_action(queue="a", gpus=0.01), time_ms)
    assert len(breaker.taken) == 10
