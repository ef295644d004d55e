"""Futures and calendars are as they are defined (`slow_play`, `slow_calendars`): equal answers, to the bit.

The array programs and, where numba is installed, the compiled loops are both compared with the plain ones.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import TopologyConstraint
from fleetcast.placement.ahead import calendars, futures, paths
from fleetcast.placement.ahead.futures import ArrivalForecast
from fleetcast.placement.ahead.paths import Hindrance, Timelines, sample_timelines
from fleetcast.placement.ahead.run_draws import PATHS, SHARED, RunTimeSample, RunTimeSource
from fleetcast.placement.ahead.start_time import compute_start_times
from fleetcast.placement.ahead.stops import SentStop, StopsAhead
from fleetcast.placement.machines.gang_room import GangAsk, Slot
from fleetcast.placement.plan.timeline import NORMAL, RunTimeQuantiles
from fleetcast.placement.queues.queues_ahead import Closure, QueueHold, QueuesAhead
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from tests.fuzz.bounds import examples
from tests.placement.ahead import slow_calendars
from tests.placement.ahead import slow_sampled_future as slow_play
from tests.placement.ahead.slow_calendars import list_searches
from tests.placement.plan.test_plan import NOW_MS, OPTIONS, TREE, free, queued, scene, turns_of

COMING = ArrivalForecast(
    np.array([600.0, 7200.0]),
    np.array([0.1, 0.5, 0.9]),
    np.array([[0.0, 2.0], [4.0, 8.0], [12.0, 30.0]]),
    np.array([1, 8, 16]),
    np.array([4.0, 2.0, 1.0]),
)
TIMES = RunTimeQuantiles({0: (600.0, 7200.0)}, {}, {1: 3, 8: 1})
HOUR_S = 3600.0
LIMITS = '[queue.a]\nlimit = {gpu = 64}\n[queue.b]\nguaranteed = {gpu = 64}\n[queue."b/x"]\n[queue.c]\n'


@examples(50)
@given(
    st.sampled_from(["", TREE]), free, queued, st.booleans(), st.sampled_from([0, paths.BACKFILLED]), st.integers(0, 3)
)
def test_start_times_are_those_of_the_plain_play(
    tree: str, nodes: Any, drawn: Any, has_arrivals: bool, backfilled: int, each: int
) -> None:
    """Each: jobs that stop for each request."""
    queue, view, jobs = scene(nodes, drawn)
    coming = COMING if has_arrivals else None
    names = [entry.request.request_id for entry in queue] if each else []
    sent = {name: SentStop(0.0, frozenset(view.jobs[at * each : (at + 1) * each])) for at, name in enumerate(names)}
    stops = StopsAhead(stop_s=600.0, sent=sent)
    sampled = partial(sample_timelines, queue, view, jobs, TIMES, OPTIONS, arrivals=coming, stops=stops)
    assert_equal(lambda: sampled(turns=turns_of(tree, view)), backfilled)


def list_all_hindrances(sampled: Timelines) -> dict[str, tuple[Hindrance, ...]]:
    return {name: before.list_hindrances() for name, before in sampled.before_start.items()}


def assert_equal(sampled: Callable[[], Timelines], backfilled: int = paths.BACKFILLED) -> None:
    """Sample with each kind of fast code and with the plain one, and compare all answers.

    backfilled: entries of the queue that may start in gaps. The finder of places serves later ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paths, "BACKFILLED", backfilled)
        answers = []
        for searches in list_searches():
            patch.setattr(paths, "choose_searches", lambda waiting, chosen=searches: chosen)
            answers.append(sampled())
        patch.setattr(paths, "choose_searches", lambda waiting: slow_play.PLAIN_SEARCHES)
        patch.setattr(paths, "PlaceFinder", slow_calendars.PlainFinder)
        patch.setattr(futures, "Future", slow_play.Future)
        patch.setattr(futures, "QueuesAhead", slow_play.PlainQueues)
        patch.setattr(calendars, "_search_slot_times", slow_calendars.earliest)
        slow = sampled()
    for fast in answers:
        assert_same_answers(fast, slow)


def assert_same_answers(fast: Timelines, slow: Timelines) -> None:
    assert fast.starts_s.keys() == slow.starts_s.keys()
    for name, start_s in slow.starts_s.items():
        assert fast.starts_s[name].tobytes() == start_s.tobytes(), name
    for (level, calendar), (slow_level, slow_calendar) in zip(fast.calendars, slow.calendars, strict=True):
        assert level == slow_level
        for column in ("free_s", "gap_s", "until_s", "holder"):
            assert getattr(calendar, column).tobytes() == getattr(slow_calendar, column).tobytes(), column
    assert list_all_hindrances(fast) == list_all_hindrances(slow)
    assert [one.tobytes() for one in fast.ends_s.values()] == [one.tobytes() for one in slow.ends_s.values()]
    assert compute_start_times(fast) == compute_start_times(slow)
    assert fast.now_ms == NOW_MS


@pytest.mark.parametrize("known", [{}, {8: (600.0, 7200.0)}, {8: (50.0, 50.0), 0: (60.0, 9e4)}])
@pytest.mark.parametrize("age_s", [0.0, 30.0, 1e5, 1e9])
@pytest.mark.parametrize("limit_s", [None, 600.0, 2e5])
def test_run_times_at_many_levels_are_those_at_each(known: Any, age_s: float, limit_s: float | None) -> None:
    times = RunTimeQuantiles(known)
    levels = np.linspace(0.001, 0.999, 21)
    mu, sigma = times._fit_log_normal(8, limit_s)
    passed = NORMAL.cdf((math.log(age_s) - mu) / sigma) if age_s else 0.0
    for level in levels.tolist():
        share = passed + level * (1 - passed)
        run_s = math.exp(mu + sigma * NORMAL.inv_cdf(share)) if share < 1 - 1e-9 else 0.0
        if limit_s is not None:
            run_s = min(run_s, limit_s)
        assert times.estimate_run_s(8, level, age_s=age_s, limit_s=limit_s) == max(run_s, age_s * 1.05)
    alone = [float(times.compute_run_times(8, levels[at : at + 1], age_s, limit_s)[0]) for at in range(len(levels))]
    assert times.compute_run_times(8, levels, age_s, limit_s).tolist() == alone


def test_run_times_drawn_together_are_those_drawn_one_by_one() -> None:
    levels = (600.0, 700.0, 800.0, 900.0, 1000.0, 2000.0, 3000.0, 4000.0)
    kinds = [(8, None, None), (1, 600.0, None), (8, None, levels), (8, 900.0, levels), (2, 2e5, None)]
    sources = [RunTimeSource(*kinds[at % 5]) for at in (0, 1, 0, 2, 3, 3, 4, 0, 2)]
    for times in (TIMES, RunTimeQuantiles({}), RunTimeQuantiles({8: (60.0, 9e4)}, {8: levels})):
        together = RunTimeSample(np.random.default_rng(3), times).draw_run_times(sources)
        sample = RunTimeSample(np.random.default_rng(3), times)
        assert together.tolist() == [sample.draw_run_times([one])[0].tolist() for one in sources]
    assert np.isinf(RunTimeSample(np.random.default_rng(3), RunTimeQuantiles({})).draw_run_times(sources)[0]).all()


def test_levels_are_those_of_the_normal_distribution() -> None:
    sample = RunTimeSample(np.random.default_rng(5), TIMES)
    rng = np.random.default_rng(5)
    mixed = np.sqrt(SHARED) * sample.shared + np.sqrt(1 - SHARED) * rng.standard_normal((50, PATHS))
    assert sample.draw_levels(50).ravel().tolist() == pytest.approx(
        [NORMAL.cdf(z) for z in mixed.ravel().tolist()], abs=0
    )


def test_the_room_of_requests_that_ask_alike_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    own = futures.FutureSampler._find_slot_with_room

    def counted(drawn: futures.FutureSampler, key: Any, room: Any) -> int | None:
        asked.append(key)
        return own(drawn, key, room)

    monkeypatch.setattr(futures.FutureSampler, "_find_slot_with_room", counted)
    columns = [{"gpus_per_node": 8, "gang": 2}, {"gpus_per_node": 4}, {"gpus_per_node": 8, "gang": 2, "spread": True}]
    queue, view, jobs = scene([[0, 0], [0, 4]], [(columns[at % 3], "a", at) for at in range(60)])
    sample_timelines(queue, view, jobs, TIMES, OPTIONS)
    assert 0 < len(asked) == len(set(asked)) <= 3


nodes_of_slot = st.tuples(st.sampled_from([1000, 2000, 4000]), st.booleans(), st.booleans())


@examples(300)
@given(st.data())
def test_room_and_places_are_those_of_the_plain_fleet(data: Any) -> None:
    """Nodes of unlike sizes and no domain, equal times, closed and kept nodes, gangs up to the largest that fits."""
    n = data.draw(st.integers(1, 24), "nodes")

    def column(values: Any) -> Any:
        return np.array(data.draw(st.lists(values, min_size=n, max_size=n)))

    gpus = column(st.sampled_from([0, 4, 8])) if data.draw(st.booleans()) else np.full(n, 8)
    domain = column(st.integers(-1, 4))
    slots = []
    for each, within, is_closed_to_some in data.draw(st.lists(nodes_of_slot, min_size=1, max_size=4)):
        most = 1000 * gpus // each * (column(st.integers(0, 1)) if is_closed_to_some else 1)
        slots.append(Slot(each, most, domain if within else None))
    first = gpus * 1000 - 1000 * np.minimum(gpus, column(st.integers(0, 8)))
    ready_s = HOUR_S * column(st.integers(0, 5))
    searches = data.draw(st.sampled_from(list_searches()), "searches")
    fleet, plain = searches.fleet(first, ready_s, slots).copy(), slow_play.Fleet(first, ready_s, slots).copy()
    for _ in range(data.draw(st.integers(1, 6), "changes")):
        nodes = np.unique(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=6)))
        more = np.minimum(1000 * gpus[nodes], 1000 * data.draw(st.integers(0, 8))) - fleet.free[nodes]
        fleet.change_free_gpus(nodes, more)
        plain.change(nodes, more)
        fleet.ready_s[nodes] = plain.ready_s[nodes] = HOUR_S * data.draw(st.integers(0, 5))
        for number, slot in enumerate(slots):
            largest = int(slow_play._by_domain(slot, slot.most).max())
            if not largest:
                continue
            ask = GangAsk(number, data.draw(st.integers(1, largest), "members"), HOUR_S)
            closed = Closure(column(st.booleans()), 0.0, HOUR_S)
            some = replace(ask, closures=(closed,) if data.draw(st.booleans(), "closed") else ())
            kept, ready = fleet.find_soonest_nodes(some)
            expected, expected_s = plain.soonest(some)
            assert ready == expected_s
            assert np.isinf(ready) or kept.tolist() == expected.tolist()
            assert fleet.fits(ask) == plain.fits(ask)
            for without in (None, expected):
                place, plain_place = fleet.choose_gang_nodes(ask, without), plain.choose(ask, without)
                assert (place is None) == (plain_place is None)
                if place is not None and plain_place is not None:
                    assert [one.tolist() for one in place] == [one.tolist() for one in plain_place]


@pytest.mark.parametrize("tree", ["", LIMITS])
@pytest.mark.parametrize("seed", range(2))
def test_a_long_queue_on_racks_starts_as_in_the_plain_play(tree: str, seed: int) -> None:
    """Many jobs compete for 24 nodes, so that the head keeps nodes of a rack nearly always."""
    rng = np.random.default_rng(seed)
    racks = [[int(gpus) for gpus in rng.choice([0, 0, 0, 4], 6)] for _ in range(4)]
    columns = [
        {"gang": 4, "gpus_per_node": 8, "topology": TopologyConstraint("rack")},
        {"gang": 3, "gpus_per_node": 4, "topology": TopologyConstraint("rail_group")},
        {"gang": 2, "gpus_per_node": 8},
        {"gpus_per_node": 1},
        {"gpus_per_node": 2, "limit_s": 900.0},
    ]
    drawn = [(columns[rng.integers(5)], "abc"[rng.integers(3)].replace("b", "b/x"), at) for at in range(90, 0, -1)]
    queue, view, jobs = scene(racks, drawn)
    assert_equal(lambda: sample_timelines(queue, view, jobs, TIMES, OPTIONS, turns=turns_of(tree, view)))


changes = st.tuples(st.booleans(), st.sampled_from(["a", "b/x/u0", "b/x/u1", "c"]), st.sampled_from([1.0, 4.0, 8.0]))


@examples(200)
@given(st.lists(changes, min_size=1, max_size=20))
def test_queues_allow_what_plain_queues_allow(drawn: Any) -> None:
    standing = QueueStanding(read_queues(TREE), {}, {"gpu": 30.0})
    holds = [QueueHold(leaf, {"gpu": gpus}) for _, leaf, gpus in drawn]
    asks = [QueueHold(leaf, {"gpu": gpus}) for leaf in ("a", "b/x/u0", "c") for gpus in (1.0, 2.0, 8.0, 20.0)]
    queues, plain = (
        QueuesAhead.from_standing(standing, {}, holds),
        slow_play.PlainQueues.from_standing(standing, {}, holds),
    )
    running: list[int] = []
    for number, ((ends, _, _), hold) in enumerate(zip(drawn, holds, strict=True)):
        if ends and running:
            ended = running.pop(0)
            queues.end_job(ended)
            plain.end_job(ended)
        if plain.allows(hold):
            queues.start_job(number, hold, waited=True)
            plain.start_job(number, hold, waited=True)
            running.append(number)
        assert [queues.allows(ask) for ask in asks] == [plain.allows(ask) for ask in asks]
