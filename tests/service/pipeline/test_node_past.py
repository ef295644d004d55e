"""What is kept of a node's past: changes only, bounded, and as it was after a restart."""

from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from fleetcast.fleet.events import Finished, Resized, Started
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeRecord
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, Action, Reason, RiskScores
from fleetcast.service.pipeline.node_past import (
    MOST_POINTS,
    MOST_SPELLS,
    MOST_STAYS,
    MOST_STEPS,
    RETENTION_MS,
    SECTION,
    NodePasts,
    PublishedTimeline,
)
from fleetcast.service.pipeline.tick import Tick
from tests.service.ticks import tick_of

NOW_MS = 1_789_000_000_000
TICK_MS = 10_000
NODES = ("n1", "n2")


def tick(
    at: int = 0,
    p: float = 0.01,
    value: float | None = None,
    running: tuple[JobAttempt, ...] = (),
    ended: tuple[JobAttempt, ...] = (),
) -> Tick:
    """The tick of number `at`: n1 has this probability, and a reason of this value; n2 has nothing."""
    n = len(NODES)
    values = np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), n), 0.01)
    values[0, :, 0] = p
    clock = Reason("sm_clock_mhz", "n1/3", value or 0.0, 1980.0, "MHz", 0.7, NOW_MS, "slow clock")
    reasons = {0: (clock,)} if value is not None else {}
    actions = {0: Action("avoid", "Avoid it.")} if value is not None else {}
    risk = RiskScores(values, reasons, actions, np.zeros(n, bool), "rules")
    topology = Topology.build([NodeSpec(name, 8) for name in NODES])
    return tick_of(NOW_MS + at * TICK_MS, topology, ScoredFleet(risk, {}), running, ended=ended)


def attempt(job: str = "a", nodes: tuple[str, ...] = ("n1",)) -> JobAttempt:
    row = JobAttempt(job, 1)
    ranks = tuple(RankPlacement(rank, name, (0, 1)) for rank, name in enumerate(nodes))
    row.fold(Started(job=job, sequence=1, time_ms=NOW_MS - 5000, ranks=ranks))
    return row


def shown(pasts: NodePasts, at: Tick, node: int = 0) -> PublishedTimeline | None:
    """What a tick publishes of a node; None where it publishes nothing."""
    sections = {section.name: section.data for section in pasts.make_sections(at)}
    if not sections:
        return None
    blob, offsets = sections[SECTION], sections[f"{SECTION}.offsets"]
    assert isinstance(blob, bytes)
    assert isinstance(offsets, np.ndarray)
    return msgspec.json.decode(blob[offsets[node] : offsets[node + 1]], type=PublishedTimeline)


def again(pasts: NodePasts) -> NodePasts:
    loaded = NodePasts()
    loaded.load(None, pasts.dump()[1])
    return loaded


def test_what_is_known_moves_with_a_clock_that_is_set_back() -> None:
    pasts, by_ms = NodePasts(), -3_600_000
    for at, value in enumerate((None, 990.0, 600.0)):
        pasts.make_sections(tick(at, value=value, p=0.01 + 0.2 * at))
    before = again(pasts).of["n1"]
    pasts.shift_times(by_ms)
    after = pasts.of["n1"]
    assert after.began_ms == before.began_ms + by_ms
    assert after.steps == [(time_ms + by_ms, step) for time_ms, step in before.steps]
    assert after.signals[0].points == [(time_ms + by_ms, value) for time_ms, value in before.signals[0].points]
    set_back = replace(tick(3, p=0.01), now_ms=NOW_MS + 3 * TICK_MS + by_ms)
    published = shown(pasts, set_back)
    assert published is not None
    times = [time_ms for time_ms, _ in published.steps]
    assert times == sorted(times)
    assert times[-1] == set_back.now_ms


def test_a_tick_that_changes_nothing_publishes_nothing() -> None:
    pasts = NodePasts()
    assert shown(pasts, tick(0)) is not None
    assert shown(pasts, tick(1, p=0.012)) is None
    assert shown(pasts, tick(2, p=0.5)) is not None


def test_scores_are_steps_where_a_probability_moved() -> None:
    pasts = NodePasts()
    for at, p in enumerate((0.01, 0.011, 0.3, 0.31, 0.0)):
        pasts.make_sections(tick(at, p))
    steps = pasts.of["n1"].steps
    assert [(time_ms - NOW_MS, p[0]) for time_ms, p in steps] == [(0, 0.01), (20_000, 0.3), (40_000, 0.01)]
    assert len(pasts.of["n2"].steps) == 1


def test_of_a_node_of_which_nothing_is_known_the_step_says_so() -> None:
    pasts, blind = NodePasts(), tick(0)
    blind.fleet.risk.values[:, :, 0] = np.nan
    pasts.make_sections(blind)
    assert pasts.of["n1"].steps == [(NOW_MS, [None, None])]


def test_a_signal_is_a_spell_with_its_values_and_the_action_goes_with_it() -> None:
    pasts = NodePasts()
    for at, value in enumerate((None, 990.0, 995.0, 600.0, None)):
        pasts.make_sections(tick(at, value=value))
    [spell] = pasts.of["n1"].signals
    assert (spell.began_ms, spell.ended_ms) == (NOW_MS, NOW_MS + 40_000)
    assert [(time_ms - NOW_MS, value) for time_ms, value in spell.points] == [(10_000, 990.0), (30_000, 600.0)]
    [action] = pasts.of["n1"].actions
    assert (action.code, action.began_ms, action.ended_ms) == ("avoid", NOW_MS + 10_000, NOW_MS + 40_000)


def test_an_age_that_only_grows_is_told_as_often_as_it_doubles() -> None:
    pasts, published = NodePasts(), 0
    for at in range(64):
        now = tick(at)
        now.fleet.risk.reasons[0] = (Reason("silent_s", "n1/3", 10.0 * (at + 1), None, "s", 0.9, NOW_MS, "vanished"),)
        published += bool(pasts.make_sections(now))
    [spell] = pasts.of["n1"].signals
    values = [value for _, value in spell.points]
    assert values[0] == 10.0
    assert all(later > 2 * sooner for sooner, later in pairwise(values))
    assert published == len(values)


def test_a_signal_that_flaps_is_one_spell() -> None:
    pasts = NodePasts()
    for at in range(9):
        pasts.make_sections(tick(at, value=990.0 if at % 2 else None))
    assert len(pasts.of["n1"].signals) == 1


def test_jobs_stay_from_their_start_to_their_end() -> None:
    pasts, row = NodePasts(), attempt(nodes=("n1", "n2"))
    pasts.make_sections(tick(0, running=(row,)))
    row.fold(Finished(job="a", sequence=2, time_ms=NOW_MS + 7000))
    pasts.make_sections(tick(1, ended=(row,)))
    for name in NODES:
        [stay] = pasts.of[name].stays
        assert (stay.job, stay.gpus, stay.outcome) == ("a", 2, "finished")
        assert (stay.began_ms, stay.ended_ms) == (NOW_MS - 5000, NOW_MS + 7000)


def test_a_job_that_came_and_went_between_two_ticks_was_there_once() -> None:
    pasts, row = NodePasts(), attempt()
    row.fold(Finished(job="a", sequence=2, time_ms=NOW_MS + 3000))
    for at in (0, 1):
        pasts.make_sections(tick(at, ended=(row,)))
    assert [(stay.began_ms, stay.ended_ms) for stay in pasts.of["n1"].stays] == [(NOW_MS - 5000, NOW_MS + 3000)]


def test_a_job_that_is_resized_leaves_one_node_and_comes_to_another() -> None:
    pasts, row = NodePasts(), attempt(nodes=("n1",))
    pasts.make_sections(tick(0, running=(row,)))
    row.fold(Resized(job="a", sequence=2, time_ms=NOW_MS, ranks=(RankPlacement(0, "n2", (0,)),)))
    pasts.make_sections(tick(1, running=(row,)))
    assert [(stay.outcome, stay.ended_ms) for stay in pasts.of["n1"].stays] == [("moved", NOW_MS + TICK_MS)]
    assert [(stay.outcome, stay.ended_ms) for stay in pasts.of["n2"].stays] == [("", None)]


def test_a_restart_goes_on_where_it_was() -> None:
    straight, row = NodePasts(), attempt()
    for at in range(3):
        straight.make_sections(tick(at, p=0.4, value=990.0, running=(row,)))
    stopped = again(straight)
    assert stopped.of == straight.of
    for at in (3, 4):
        for pasts in (straight, stopped):
            pasts.make_sections(tick(at, p=0.01))
    one, other = straight.of["n1"], stopped.of["n1"]
    assert (one.signals, one.actions, one.stays) == (other.signals, other.actions, other.stays)
    assert all(row.ended_ms is not None for row in (*other.signals, *other.stays))


def test_of_the_time_in_which_nobody_looked_nothing_is_known() -> None:
    def drained(at: int) -> Tick:
        world = tick(at, p=0.4)
        nodes = {name: NodeRecord(name, drained=True) for name in NODES}
        return replace(world, events=replace(world.events, nodes=nodes))

    before = NodePasts()
    before.make_sections(drained(0))
    pasts, down_ms, up_ms = again(before), NOW_MS + TICK_MS, NOW_MS + 60 * TICK_MS
    pasts.record_gap(down_ms)
    pasts.make_sections(drained(60))
    past = pasts.of["n1"]
    assert [(row.code, row.began_ms, row.ended_ms) for row in past.states] == [
        ("drained", NOW_MS, down_ms),
        ("unknown", down_ms, up_ms),
        ("drained", up_ms, None),
    ]
    assert [(time_ms, p[0]) for time_ms, p in past.steps] == [(NOW_MS, 0.4), (down_ms, None), (up_ms, 0.4)]


def test_what_is_kept_of_a_node_is_bounded() -> None:
    pasts = NodePasts()
    for at in range(400):
        now = tick(at * 7, p=0.9 if at % 2 else 0.1, value=100.0 + 40 * at, running=(attempt(f"j{at}"),))
        now.fleet.risk.reasons[0] += (Reason("xid", f"n1/{at}", 79.0, None, "code", 0.1, NOW_MS, "XID 79"),)
        pasts.make_sections(now)
    past = pasts.of["n1"]
    assert len(past.steps) <= MOST_STEPS
    assert past.steps[0][0] == NOW_MS  # sparser with age, and as long as before
    assert len(past.signals) <= MOST_SPELLS
    assert len(past.signals[0].points) <= MOST_POINTS
    assert len(past.stays) <= MOST_STAYS
    assert pasts.dump()[1]["pasts"].nbytes < 40_000


def test_a_long_job_stays_however_many_come_and_go_beside_it() -> None:
    pasts, long = NodePasts(), attempt("long")
    for at in range(2 * MOST_STAYS):
        pasts.make_sections(tick(at, running=(long, attempt(f"j{at}"))))
    stays = pasts.of["n1"].stays
    assert len(stays) == MOST_STAYS
    assert [stay.job for stay in stays if stay.ended_ms is None] == ["long", f"j{2 * MOST_STAYS - 1}"]


def test_what_was_over_a_week_ago_is_forgotten() -> None:
    pasts = NodePasts()
    for at, value in enumerate((990.0, None)):
        pasts.make_sections(tick(at, value=value))
    pasts.make_sections(replace(tick(2, p=0.5), now_ms=NOW_MS + RETENTION_MS + 60_000))
    assert pasts.of["n1"].signals == []


def test_a_damaged_dump_is_refused() -> None:
    with pytest.raises(msgspec.MsgspecError):
        NodePasts().load(None, {"pasts": np.frombuffer(b"\x81\xa2n1\xc0", np.uint8)})


def test_a_stay_begins_after_an_error_though_no_attempt_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    pasts, first = NodePasts(), tick(running=(attempt(),))
    first = replace(first, events=replace(first.events, remembered=RunningPlaces(first.events.running)))

    def fail(*_: object) -> set[str]:
        raise ValueError("a bug")

    with monkeypatch.context() as broken:
        broken.setattr(pasts, "_begin_attempt_stays", fail)
        with pytest.raises(ValueError, match="a bug"):
            pasts.make_sections(first)
    pasts.make_sections(replace(first, now_ms=NOW_MS + TICK_MS))
    assert [stay.job for stay in pasts.of["n1"].stays] == ["a"]
