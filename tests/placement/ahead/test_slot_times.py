"""The finder of places answers as if it read the whole calendar for each gang."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.ahead import calendars, slot_times
from fleetcast.placement.ahead.calendars import Calendar, PlaceFinder, RoomCache
from fleetcast.placement.ahead.searches import Searches
from tests.fuzz.bounds import examples
from tests.placement.ahead import slow_calendars
from tests.placement.conftest import build
from tests.placement.plan.test_plan import OPTIONS

PATHS = 3
levels = st.sampled_from([None, "node", "rack", "rail_group"])
gangs = st.fixed_dictionaries(
    {"gang": st.integers(1, 4), "gpus_per_node": st.sampled_from([1, 3, 4, 8]), "topology": levels},
    optional={"spread": st.booleans(), "avoid_nodes": st.sampled_from([("n001",), ("n002", "n003")])},
)
racks = st.lists(st.integers(1, 4), max_size=4)
counts = st.integers(0, 3)


def empty_calendar(rng: np.random.Generator, nodes: int) -> Calendar:
    shape = PATHS, nodes, 8
    free_s = np.sort(600 * rng.integers(0, 6, shape), axis=-1).astype(np.float32)
    never = np.full(shape, np.inf, np.float32)
    return Calendar(free_s, never, -never, np.full(shape, -1, np.int32))


@examples(150)
@given(
    racks,
    counts,
    st.lists(gangs, min_size=1, max_size=30),
    st.integers(0, 99),
    st.sampled_from([1, 32]),
    st.booleans(),
    st.deferred(lambda: st.sampled_from(slow_calendars.list_searches())),  # compiled ones load within the test
)
def test_places_are_those_of_a_reading_of_the_whole_calendar(
    sizes: list[int],
    unplaced: int,
    drawn: list[Any],
    seed: int,
    shapes: int,
    is_never_outdated: bool,
    searches: Searches,
) -> None:
    """Equal times are frequent, so that every choice among equals counts. Some nodes have no domain."""
    rng = np.random.default_rng(seed)
    view = build({f"r{rack}": [8] * size for rack, size in enumerate(sizes)}, unplaced=[8] * unplaced)
    rooms, calendar = RoomCache(view, OPTIONS), empty_calendar(rng, len(view))
    finder = PlaceFinder(rooms, searches.slot_times)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calendars, "MAX_FOLLOWED_SHAPES", shapes)
        patch.setattr(slot_times, "MOST_STALE_SHARE", np.inf if is_never_outdated else 0.25)
        for number, columns in enumerate(drawn):
            level = TopologyConstraint(columns["topology"])
            request = PlacementRequest(request_id=f"q{number}", **(columns | {"topology": level}))
            place = finder.find_place(request, calendar)
            plain = slow_calendars.earliest(
                request, calendar.free_s, None, rooms.count_members_per_node(request), rooms
            )
            for column in ("start_s", "nodes", "gpus"):
                assert getattr(place, column).tolist() == getattr(plain, column).tolist(), (number, column)
            run_s = 600 * rng.integers(1, 5, PATHS).astype(np.float32)
            finder.record_changes(searches.record_gang_hold(calendar, place, run_s, number))


def follow_one_shape(nodes: int = 40) -> tuple[PlaceFinder, Calendar, PlacementRequest]:
    rooms, calendar = RoomCache(build({"r0": [8] * nodes}), OPTIONS), empty_calendar(np.random.default_rng(0), nodes)
    finder, request = PlaceFinder(rooms), PlacementRequest(request_id="a", gang=2, gpus_per_node=4)
    finder.find_place(request, calendar)
    return finder, calendar, request


def test_changes_that_no_gang_asks_for_do_not_accumulate() -> None:
    finder, calendar, request = follow_one_shape()
    (times,) = finder._times.values()
    for _ in range(1000):
        finder.record_changes(np.arange(5))
    assert sum(map(len, times._stale)) <= slot_times.MOST_STALE_SHARE * PATHS * 40
    assert times.is_outdated
    finder.find_place(request, calendar)
    assert not next(iter(finder._times.values())).is_outdated


@pytest.mark.parametrize(("shapes_that_fit", "followed"), [(0.5, 0), (1, 1), (2.5, 2)])
def test_followed_shapes_are_limited_by_bytes(
    monkeypatch: pytest.MonkeyPatch, shapes_that_fit: float, followed: int
) -> None:
    finder, calendar, request = follow_one_shape()
    (times,) = finder._times.values()
    monkeypatch.setattr(calendars, "MAX_FOLLOWED_BYTES", int(shapes_that_fit * times.times_s.nbytes))
    finder._times.clear()
    finder.find_place(request, calendar)
    spread = PlacementRequest(request_id="b", gang=2, gpus_per_node=4, spread=True)
    finder.find_place(spread, calendar)
    assert len(finder._times) == followed


def test_one_place_reads_the_calendar_without_a_copy() -> None:
    _, calendar, request = follow_one_shape()
    shape = slot_times.GangShape.from_request(request, np.full(40, 2))
    times = slot_times.SlotTimes.from_calendar(calendar.free_s, shape, np.arange(40)[None], is_followed=False)
    assert np.shares_memory(times.times_s, calendar.free_s)
    followed = slot_times.SlotTimes.from_calendar(calendar.free_s, shape, np.arange(40)[None], is_followed=True)
    assert not np.shares_memory(followed.times_s, calendar.free_s)
