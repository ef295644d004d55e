"""What a tick remembers is what it would make anew, and what did not change is not made again."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.co_runs import CoRuns
from fleetcast.fleet.events import Checkpoint, Failed, Finished, Phase, Resized, Started, Step, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, RiskScores
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.fleet_metrics import make_fleet_page
from fleetcast.service.pipeline.gpu_times import GpuTimes
from fleetcast.service.pipeline.jobs.interference import InterferenceLearner
from fleetcast.service.pipeline.jobs.isolation import make_isolation_sections
from fleetcast.service.pipeline.learnt_times import LearntJobTimes
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.publish import encode, encode_job_details, make_job_rows, make_score_sections
from fleetcast.service.pipeline.run_times.record import IssuedRunTime
from fleetcast.service.pipeline.site_metrics import make_site_page
from fleetcast.service.pipeline.tick import Tick
from fleetcast.service.pipeline.tick_memory import AttemptRows, TickCache
from tests.fuzz.bounds import examples
from tests.service.ticks import tick_of

T0 = 1_700_000_000_000
TOPOLOGIES = [Topology.build([NodeSpec("a", gpus=8), NodeSpec("b", gpus=gpus)]) for gpus in (8, 4)]
RISK = RiskScores(np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), 2), 0.01), {}, {}, np.zeros(2, bool), "rules")
NOBODY = {"kind": "nobody", "name": None}
KINDS = (
    "submit",
    "start",
    "start on nodes",
    "start again",
    "resize",
    "step",
    "steps",
    "phase",
    "checkpoint",
    "finish",
    "fail",
    "nothing",
)
STEPS = 10  # enough of them to measure a pace
TICKS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.sampled_from("xyz"),
        st.lists(st.sampled_from("ab"), min_size=1, max_size=2, unique=True),
        st.sampled_from([0, 0, 0, 1]),  # the topology of the tick
        st.booleans(),  # x is slow
        st.sampled_from([None, 600.0, 900.0]),  # the forecast of x
    ),
    max_size=16,
)


def apply(table: JobTable, kind: str, job: str, nodes: list[str], sequence: int, now_ms: int) -> None:
    attempt = table.latest.get(job, 1) + (kind == "start again")
    about = {"job": job, "attempt": attempt, "sequence": STEPS * sequence, "time_ms": now_ms}
    ranks = tuple(RankPlacement(rank, node, (0, 1)) for rank, node in enumerate(nodes))
    if kind == "submit":
        table.apply(Submitted(**about, gang=len(nodes), gpus_per_node=2, user="ada", cpus=4))
    elif kind in ("start", "start again"):
        table.apply(Started(**about, ranks=ranks))
    elif kind == "start on nodes":
        table.apply(Started(**about, nodes=tuple(nodes)))
    elif kind == "resize":
        table.apply(Resized(**about, ranks=ranks))
    elif kind == "steps":
        for number in range(STEPS):
            one = {"sequence": STEPS * sequence + number, "time_ms": now_ms - 1000 * (STEPS - number)}
            table.apply(Step(**about | one, step=STEPS * sequence + number, duration_s=2.0))
    elif kind == "step":
        table.apply(Step(**about, step=sequence, duration_s=2.0))
    elif kind == "phase":
        table.apply(Phase(**about, name="evaluation"))
    elif kind == "checkpoint":
        table.apply(Checkpoint(**about, edge="end"))
    elif kind == "finish":
        table.apply(Finished(**about))
    elif kind == "fail":
        table.apply(Failed(**about, category="hardware", message="x"))


def issued(left_s: float) -> IssuedRunTime:
    levels = np.full(3, left_s)
    about = {
        "limit_s": None,
        "model": "m",
        "in_time": True,
        "quantiles": {"p50": left_s, "p90": 2 * left_s, "p99": 9e9},
    }
    return IssuedRunTime(run_s=levels, similar_s=levels, **about, left=(left_s, 2 * left_s), left_ms=T0)


def made_of(tick: Tick) -> dict[str, object]:
    pages = {"details": encode(encode_job_details(tick)), "page": make_fleet_page(tick), "site": make_site_page(tick)}
    return plain((*make_score_sections(tick), *make_isolation_sections(tick))) | pages


def plain(sections: Iterable[Section]) -> dict[str, object]:
    data = {section.name: section.data for section in sections}
    return {name: repr(part if isinstance(part, bytes) else part.tolist()) for name, part in data.items()}


def played(ticks) -> Iterator[tuple[Tick, Tick]]:
    """Yield each tick of a history twice: with what the ticks before it remember, and without any memory."""
    table, memory, placements = JobTable(), TickCache(), RunningPlaces(())
    copies: dict[tuple[str, int], JobAttempt] = {}
    views: list[JobAttempt] = []
    forecasts = {left_s: issued(left_s) for left_s in (600.0, 900.0)}
    for sequence, (kind, job, nodes, topology, is_slow, left_s) in enumerate(ticks):
        now_ms = T0 + 15_000 * sequence
        apply(table, kind, job, nodes, sequence, now_ms)
        if kind != "nothing":
            copies = {key: row for key, row in copies.items() if row.job != job}
        for row in table.attempts.values():
            copies.setdefault((row.job, row.attempt), row.copy())
        views_before, views = views, [copies[row.job, row.attempt] for row in table.list_running()]
        if list(map(id, views)) == list(map(id, views_before)):
            views = views_before  # as `FleetState.copy_events` does
        placements = RunningPlaces.from_running(views, placements)
        fleet = ScoredFleet(RISK, {"x": {"slow": is_slow, "cause": "unknown", "culprit": NOBODY}})
        queued = [copies[row.job, row.attempt] for row in table.list_queued()]
        ended = [row for row in copies.values() if row.over_ms is not None]
        tick = tick_of(now_ms, TOPOLOGIES[topology], fleet, running=views, queued=queued, ended=ended)
        tick = replace(tick, run_times={("x", table.latest.get("x", 1)): forecasts[left_s]} if left_s else {})
        remembered = replace(tick.events, remembered=placements)
        yield replace(tick, events=remembered, memory=memory), replace(tick, memory=TickCache())


@given(TICKS)
@examples(100)
def test_a_tick_that_remembers_publishes_what_one_without_memory_does(ticks) -> None:
    for remembering, other in played(ticks):
        assert made_of(remembering) == made_of(other)


@given(TICKS)
@examples(100)
def test_capabilities_publish_the_same_whether_placements_are_remembered_or_not(ticks) -> None:
    co_runs, same_co_runs = CoRuns(), CoRuns()
    pairs = [
        (InterferenceLearner(co_runs), InterferenceLearner(same_co_runs)),
        *((make(), make()) for make in (NodePasts, GpuTimes, LearntJobTimes)),
    ]
    for remembering, other in played(ticks):
        for capability, same in pairs:
            assert plain(capability.make_sections(remembering)) == plain(same.make_sections(other))
        for saved, expected in ((co_runs, same_co_runs), *pairs[1:]):
            assert repr(saved.dump()) == repr(expected.dump())


def test_rows_are_made_again_only_for_attempts_with_news() -> None:
    made: list[str] = []

    def make(attempt: JobAttempt) -> str:
        made.append(attempt.job)
        return f"row of {attempt.job}"

    rows, topology, forecast = AttemptRows[str](), object(), object()
    x, y = JobAttempt("x", 1), JobAttempt("y", 1)
    assert rows.get_rows([x, y], make, (topology,)) == ["row of x", "row of y"]
    assert rows.get_rows([y, x], make, (topology,)) == ["row of y", "row of x"]
    assert made == ["x", "y"]
    rows.get_rows([x.copy(), y], make, (topology,))
    assert made == ["x", "y", "x"]
    rows.get_rows([y], make, (topology,), {("y", 1): forecast})
    assert made == ["x", "y", "x", "y"]
    rows.get_rows([y], make, (object(),), {("y", 1): forecast})
    assert made == ["x", "y", "x", "y", "y"]


def test_a_result_is_recalled_until_an_object_that_it_depends_on_is_another_one() -> None:
    memory, topology, placements = TickCache(), object(), object()
    first = memory.get_or_make("holders", (topology, placements), lambda: msgspec.Raw(b"1"))
    assert memory.get_or_make("holders", (topology, placements), lambda: msgspec.Raw(b"2")) is first
    assert bytes(memory.get_or_make("holders", (topology, object()), lambda: msgspec.Raw(b"2"))) == b"2"


def test_the_rows_of_jobs_follow_the_clock_though_nothing_was_received() -> None:
    table, memory = JobTable(), TickCache()
    apply(table, "start", "x", ["a"], 0, T0)
    views = table.list_running()
    placements = RunningPlaces(views)
    for now_ms, left_s in ((T0 + 60_000, 540.0), (T0 + 120_000, 480.0)):
        tick = tick_of(now_ms, TOPOLOGIES[0], ScoredFleet(RISK, {}), running=views)
        events = replace(tick.events, remembered=placements)
        (row,) = make_job_rows(replace(tick, events=events, run_times={("x", 1): issued(600.0)}, memory=memory))
        assert row.remaining_s is not None
        assert row.remaining_s.p50 == left_s


def test_a_value_is_the_same_object_until_it_changes() -> None:
    memory = TickCache()
    first = memory.share_equal_values("held", {"x": {"a": 1}, "y": {"a": 2}, "w": {"a": 1, "b": 1}})
    again = memory.share_equal_values("held", {"y": {"a": 3}, "x": {"a": 1}, "z": {"a": 1}, "w": {"b": 1, "a": 1}})
    assert again == {"y": {"a": 3}, "x": {"a": 1}, "z": {"a": 1}, "w": {"a": 1, "b": 1}}
    assert list(again["w"]) == ["b", "a"]
    assert again["x"] is first["x"]
    assert again["z"] is not first["x"]
