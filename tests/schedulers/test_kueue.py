"""What the adapters `kueue` and `topology` wish, on fleets small enough to check by eye."""

import numpy as np
import pytest

from fleetcast.schedulers.adapter import Write
from fleetcast.schedulers.kueue import (
    ACTIVE,
    CHECK,
    GPUS,
    HELD,
    HOLD,
    JOB,
    NODES,
    NOTE,
    PENDING,
    WAITS,
    GateRule,
    WorkloadChecks,
)
from fleetcast.schedulers.nodes import THEIRS
from fleetcast.schedulers.safe_room import SafeRoom, SafeRooms
from fleetcast.schedulers.topology import TopologyLabels, make_label_value
from fleetcast.schedulers.weather import Outlook, StartOutlook, Weather
from tests.schedulers.small_fleet import NOW_MS, domains, outlook

RISKS = {"a": 0.2, "b": 0.1, "c": 0.5, "d": 0.6}  # b1 has a and b, b2 has c and d
BLOCKS = domains(block=["b1", "b1", "b2", "b2"])
MINUTE_MS = 60_000
ASKED = {HOLD: PENDING, JOB: "team/train", GPUS: "16", HELD: "0"}


def at(nodes: Outlook | None, **starts: StartOutlook) -> Weather:
    named = {f"team/{name}": start for name, start in starts.items()}
    return Weather(1, NOW_MS, NOW_MS, nodes, starts=named)


def fleet(**more: object) -> Outlook:
    return outlook(RISKS, domains=BLOCKS, **more)


def starting(p50_min: float, p90_min: float | None = None) -> StartOutlook:
    p90_ms = None if p90_min is None else NOW_MS + int(p90_min * MINUTE_MS)
    return StartOutlook(None, NOW_MS + int(p50_min * MINUTE_MS), p90_ms, 1, "no room")


def wishes(rule: GateRule, weather: Weather | None, values: dict[str, str]) -> list[Write]:
    return list(WorkloadChecks(rule).wishes(weather, {"team/one": values}))


def wish(rule: GateRule, weather: Weather | None, values: dict[str, str]) -> Write:
    (only,) = wishes(rule, weather, values)
    return only


def test_a_workload_with_its_quota_is_ready_at_once_and_told_what_is_known() -> None:
    ready = wish(GateRule(), at(fleet(), train=starting(10, 45)), ASKED)
    assert (ready.field, ready.value, ready.seen) == (HOLD, None, PENDING)
    assert ready.why == (
        "expected start 2025-10-09T09:03Z, p90 2025-10-09T09:38Z; risk 28% within 1 h in the safest block, b1"
    )
    assert wish(GateRule(), at(fleet()), ASKED).why == "risk 28% within 1 h in the safest block, b1"
    assert wish(GateRule(), at(fleet(free=0)), ASKED).why == "nothing is known of the risk of its nodes"


def test_the_nodes_that_kueue_chose_are_told_with_their_first_reason() -> None:
    ready = wish(GateRule(), at(fleet(reasons={"c": "GPU 3: XID 63"})), {**ASKED, NODES: "c d"})
    assert ready.why == "risk 80% within 1 h on its 2 nodes; c: GPU 3: XID 63"


def test_with_the_gate_it_is_held_while_every_block_is_too_risky() -> None:
    rule = GateRule(gate=True, max_risk=0.25)
    held = wish(rule, at(fleet()), ASKED)
    assert held.value == "Retry 60"
    assert held.why.endswith("in the safest block, b1; held back, since that is above 25%")
    assert wish(GateRule(gate=True, max_risk=0.3), at(fleet()), ASKED).value is None
    assert wish(rule, at(fleet()), {**ASKED, GPUS: "8"}).value is None  # b alone
    assert wish(rule, at(fleet()), {**ASKED, GPUS: "0"}).value is None  # it needs none of them
    assert wish(rule, at(fleet()), {**ASKED, GPUS: "800"}).value is None  # no block has so many: nothing is known


def test_hold_s_bounds_all_holds_of_a_workload_together() -> None:
    rule = GateRule(gate=True, max_risk=0.1, retry_s=60, hold_s=150)
    values = [wish(rule, at(fleet()), {**ASKED, HELD: str(held)}).value for held in range(4)]
    assert values == ["Retry 60", "Retry 60", "Retry 30", None]
    assert wish(rule, at(fleet()), {**ASKED, HELD: "3"}).why.endswith("; held for 150 s, which is the limit")
    assert wish(GateRule(gate=True, max_risk=0.1, hold_s=0), at(fleet()), ASKED).value is None


@pytest.mark.parametrize("rule", [GateRule(), GateRule(gate=True, max_risk=0.01)])
@pytest.mark.parametrize("held", [PENDING, "Retry 60"])
def test_nothing_is_held_without_a_forecast_or_by_who_is_withdrawn(rule: GateRule, held: str) -> None:
    for weather, says in (
        (None, "there is no forecast: Fleetcast is withdrawn"),
        (at(None), "there is no forecast now"),
    ):
        ready = wish(rule, weather, {**ASKED, HOLD: held})
        assert (ready.value, ready.seen, ready.why) == (None, held, says)


def test_a_retry_that_kueue_has_not_taken_yet_is_left_to_it() -> None:
    assert wishes(GateRule(gate=True), at(fleet()), {**ASKED, HOLD: "Retry 60"}) == []


def test_who_waits_for_quota_gets_a_note_that_changes_when_its_times_do() -> None:
    waits = {WAITS: "for quota", JOB: "team/train", HELD: "0"}
    note = wish(GateRule(), at(fleet(), train=starting(60, 120)), waits)
    assert note.value == "forecast: expected start 2025-10-09T09:53Z, p90 2025-10-09T10:53Z"
    noted = {**waits, NOTE: note.value}
    assert wishes(GateRule(), at(fleet(), train=starting(64, 110)), noted) == []
    assert wish(GateRule(), at(fleet(), train=starting(90, 120)), noted).field == NOTE
    assert wish(GateRule(), at(fleet(), train=starting(60)), noted).field == NOTE
    assert wish(GateRule(), at(fleet(), other=starting(60)), noted).value is None
    assert wishes(GateRule(), Weather(1, NOW_MS, NOW_MS, fleet()), noted) == []  # the placer is away: the note is dated


def test_who_was_held_back_is_told_how_often() -> None:
    waits = {WAITS: "for quota", JOB: "team/train", HELD: "2"}
    assert wish(GateRule(gate=True), at(fleet()), waits).value == (
        "forecast: held back, 2 so far, since every block was too risky"
    )
    assert wishes(GateRule(), at(fleet()), waits) == []


@pytest.mark.parametrize("weather", [None, at(None), at(fleet())])
def test_our_check_is_active_whatever_the_weather(weather: Weather | None) -> None:
    assert wish(GateRule(), weather, {CHECK: "ours"}).value == "True Serving"
    assert wish(GateRule(), weather, {CHECK: "ours", ACTIVE: "False Other"}).seen == "False Other"
    assert wishes(GateRule(), weather, {CHECK: "ours", ACTIVE: "True Serving"}) == []


def test_the_safest_room_is_made_of_nodes_with_free_gpus() -> None:
    rooms = SafeRooms(fleet(), "block")
    assert rooms.find_safest_block(8) == SafeRoom("b1", pytest.approx(0.1))
    assert rooms.find_safest_block(9) == SafeRoom("b1", pytest.approx(0.28))
    assert rooms.find_safest_block(17) is None
    drained = fleet(free=np.array([8, 0, 8, 8]))
    assert SafeRooms(drained, "block").find_safest_block(8) == SafeRoom("b1", pytest.approx(0.2))
    assert SafeRooms(drained, "block").find_safest_block(16) == SafeRoom("b2", pytest.approx(0.8))
    whole = SafeRooms(outlook(RISKS | {"e": np.nan}), "block")  # no topology: the whole fleet is one block
    assert whole.find_safest_block(16) == SafeRoom("of no name", pytest.approx(0.1))
    assert SafeRooms(Outlook.make_empty(), "block").find_safest_block(1) is None


def test_labels_say_where_a_node_stands() -> None:
    seen: dict[str, dict[str, str]] = {
        "a": {},
        "b": {"label fleetcast.io/block": "b0"},
        "c": {THEIRS + "label fleetcast.io/block": "x"},
        "d": {"label fleetcast.io/block": "b2"},
        "unheard of": {"label fleetcast.io/block": "b1"},
    }
    nodes = outlook(RISKS, domains=domains(block=["row 1/b1", "b1", "b2", ""]))
    found = {(one.key, one.field): one.value for one in TopologyLabels().wishes(at(nodes), seen)}
    assert found == {
        ("a", "label fleetcast.io/block"): make_label_value("row 1/b1"),
        ("b", "label fleetcast.io/block"): "b1",
        ("d", "label fleetcast.io/block"): None,
    }
    assert list(TopologyLabels().wishes(at(None), seen)) == []
    withdrawn = {one.key for one in TopologyLabels().wishes(None, seen)}
    assert withdrawn == {"b", "d", "unheard of"}


def test_no_two_names_become_one_label() -> None:
    long = "r" * 70
    values = [make_label_value(name) for name in ("a b", "a/b", "a-b", "-a-b-", long, long + "x", "///", "é")]
    assert len(set(values)) == len(values)
    for value in values:
        assert 0 < len(value) <= 63
        assert (value[0].isalnum(), value[-1].isalnum()) == (True, True)
