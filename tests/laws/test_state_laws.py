"""What a pipeline knows depends on what was said, not on how often, in which batches or how late it arrived."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetcast.fleet.topology import Topology
from fleetcast.ingest.inbox.job_events import identify_event
from fleetcast.service.pipeline.occupancy import compute_occupancy
from fleetcast.service.pipeline.state import FleetState
from tests.fuzz.bounds import examples
from tests.laws.histories import (
    END,
    JOB_EVENTS,
    NODE_EVENTS,
    Delivery,
    Told,
    assert_same,
    deliveries,
    essence,
    histories,
    new_state,
    reordered,
    told_to,
)

randoms = st.randoms(use_true_random=False)
events_once = st.lists(st.one_of(JOB_EVENTS, JOB_EVENTS, NODE_EVENTS), max_size=80, unique_by=identify_event)


@examples(30)
@given(histories(contradict=True), randoms)
def test_twice_is_once(history: list[Told], random: Random) -> None:
    once, again = (deliveries(history, random) for _ in range(2))
    assert_same(essence(told_to(new_state(), [*once, *again])), essence(told_to(new_state(), once)))


@examples(30)
@given(histories(), randoms)
def test_any_batches_that_keep_each_series_order_end_in_the_same_state(history: list[Told], random: Random) -> None:
    one, other = (deliveries(order, random) for order in (history, reordered(history, random)))
    assert_same(essence(told_to(new_state(), one)), essence(told_to(new_state(), other)))


@examples(30)
@given(histories(), randoms)
def test_looking_at_it_in_between_changes_nothing(history: list[Told], random: Random) -> None:
    looked, straight, arrived = new_state(), new_state(), deliveries(history, random)
    for delivery in arrived:
        told_to(looked, [delivery])
        essence(looked, delivery.now_ms)
    assert_same(essence(looked), essence(told_to(straight, arrived)))


@examples(30)
@given(events_once, randoms)
def test_the_jobs_hold_the_same_gpus_in_any_order_of_events(events: list[Told], random: Random) -> None:
    one, other = (told_to(new_state(), deliveries(order, random)) for order in (events, reordered(events, random)))
    assert_same(essence(one), essence(other))
    assert held(one) == held(other)


def held(state: FleetState) -> dict[str, set[tuple[str, int]]]:
    """GPUs by job, of jobs that name theirs: who gets which of those that nobody names is for the first to say."""
    topology: Topology = state.topology
    running = sorted(state.jobs.list_running(), key=lambda row: (row.job, row.attempt))
    seen = compute_occupancy(running, topology, {name: row for row, name in enumerate(topology.names)})
    named = {row.job for row in running if row.ranks and all(place.gpus for place in row.ranks)}
    holders: dict[str, set[tuple[str, int]]] = {}
    for node, gpus in zip(topology.names, seen.holder.tolist(), strict=True):
        for gpu, number in enumerate(gpus):
            if number >= 0 and seen.jobs[number] in named:
                holders.setdefault(seen.jobs[number], set()).add((node, gpu))
    return holders


REACHED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a rate": lambda parts: np.nanmax(parts["gpu rate"], initial=0) > 0,
    "an event count": lambda parts: parts["gpu events"].any(),
    "a missed scrape": lambda parts: parts["node events"].any(),
    "a mean of ten minutes": lambda parts: np.isfinite(parts["gpu day power_w"][:-1]).any(),
    "a job that runs": lambda parts: parts["running"],
    "a job that waits": lambda parts: parts["queued"],
    "an attempt that another ended": lambda parts: any(row.superseded_ms for row in parts["attempts"].values()),
    "a queue": lambda parts: len(parts["queues"]) > 1,
    "a run time": lambda parts: parts["durations"]["all"],
}


def test_the_histories_reach_what_the_laws_are_about() -> None:
    reached: set[str] = set()

    @settings(max_examples=40, derandomize=True)  # the same for every seed
    @given(histories())
    def collect(history: list[Told]) -> None:
        parts = essence(told_to(new_state(), [Delivery(tuple(history), END)]))
        reached.update(name for name, is_in in REACHED.items() if is_in(parts))

    collect()
    assert reached == REACHED.keys()
