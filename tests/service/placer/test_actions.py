"""Actions in the placer: proposed once, sent within bounds, answered by agents, each change audited and durable."""

import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet import failpoints
from fleetcast.fleet.clock import ManualClock
from fleetcast.placement.actions.action import ActionKind, JobAction
from fleetcast.placement.actions.breaker import BreakerCapacity, BreakerLimits
from fleetcast.placement.actions.life import ActionRecord, ActionState, IllegalTransition
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.http import make_app
from fleetcast.service.placer.metrics import PlacerMetrics
from tests.fuzz.bounds import examples
from tests.placement.actions.action_world import make_action
from tests.service.placer.test_own_queues import ACCESS, BOSS, LEAD, USERS
from tests.service.placer.test_queues import QueueWorld
from tests.service.placer_world import NOW_MS, World

S = ActionState
BIG = {"job": "big", "attempt": 1}


def due(job: str = "big", gpus: float = 1.0, in_s: float = 600.0, **changes: Any) -> JobAction:
    return make_action(job, gpus=gpus, by_ms=NOW_MS + round(1000 * in_s), **changes)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = World(tmp_path)
    world.board.publish()
    world.service.view.observe_fleet()
    yield world
    world.close()
    assert verify_ledger(world.config.ledger).is_intact


def propose(world: World, *actions: JobAction) -> list[str]:
    return [row.action_id for row in world.service.actions.propose(actions, world.clock.now_ms()).opened]


def send(world: World, *ids: str) -> list[str]:
    return [row.action_id for row in world.service.actions.send(ids, world.clock.now_ms())]


def state_of(world: World, action_id: str) -> tuple[str, str]:
    record = world.service.actions.get_action(action_id)
    return record.state.value, record.why


def reply(world: World, action_id: str, verb: str = "accept", status: int = 200, **changes: Any) -> Any:
    answer = world.ask("POST", f"/actions/{action_id}/{verb}", {**BIG, **changes})
    assert answer.status_code == status, answer.text
    return answer.json()


# -- proposing


def test_the_same_proposal_twice_is_one_action_also_after_a_restart(world: World) -> None:
    (first,) = propose(world, due())
    world.restart()
    again = world.service.actions.propose([due(in_s=900.0)], NOW_MS + 5)
    assert (again.opened, [row.action_id for row in again.unchanged], again.declined) == ([], [first], [])
    assert len(world.service.ledger.read_audit_trail(10)) == 1


def test_a_job_has_one_open_action(world: World) -> None:
    (first,) = propose(world, due())
    other = due(kind=ActionKind.SHRINK)
    found = world.service.actions.propose([other, due("another")], NOW_MS)
    assert [row.action.job for row in found.opened] == ["another"]
    assert found.declined == [(other, f"action {first} on big is open")]


def test_what_an_executor_refused_is_not_proposed_again_and_what_was_withdrawn_is(world: World) -> None:
    control = world.service.actions
    (first,) = propose(world, due())
    control.withdraw(first, "the request was cancelled", NOW_MS)
    (second,) = propose(world, due())
    assert second == first[:-1] + "2"
    send(world, second)
    reply(world, second, "refuse", why="no checkpoint")
    found = control.propose([due()], NOW_MS)
    assert found.declined == [(due(), f"action {second} was refused before: no checkpoint")]
    assert propose(world, due(payer="another")), "for another request it is another wish"


def test_what_was_refused_is_remembered_however_often_other_proposals_were_withdrawn(world: World) -> None:
    control = world.service.actions
    (refused,) = propose(world, due())
    send(world, refused)
    reply(world, refused, "refuse", why="no checkpoint")
    for _ in range(30):
        (other,) = propose(world, due(payer="another"))
        control.withdraw(other, "the last pass does not propose it", NOW_MS)
    changed = [row.changed for row in control.list_last_of("big")]
    assert changed == sorted(changed)
    assert len(changed) == 21
    assert control.list_last_of("big")[0].action_id == refused
    assert control.has_failed(ActionKind.PREEMPT, "big", 1)


def test_a_proposal_with_an_impossible_amount_stores_nothing(world: World) -> None:
    with pytest.raises(Exception, match="gpus = nan"):
        propose(world, due("fine"), due(gpus=float("nan")))
    assert world.service.actions.list_open() == []


# -- an agent's replies


def test_an_agent_reads_accepts_and_the_action_is_seen(world: World) -> None:
    (action_id,) = propose(world, due())
    assert reply(world, action_id, status=409)["detail"].endswith("is proposed: it cannot become accepted")
    send(world, action_id)
    (row,) = world.ask("GET", "/actions?job=big&state=sent").json()["rows"]
    assert (row["action_id"], row["grace_s"], row["ranks"][1]["node"]) == (action_id, 120.0, "n2")
    accepted = reply(world, action_id)
    assert accepted == reply(world, action_id), "twice is once"
    world.clock.advance(30)
    world.service.actions.record_seen(action_id, world.clock.now_ms())
    assert reply(world, action_id)["state"] == "seen"
    body = world.ask("GET", f"/actions/{action_id}").json()
    assert [(step["state"], step["time_ms"] - NOW_MS) for step in body["life"]] == [
        ("proposed", 0), ("sent", 0), ("accepted", 0), ("seen", 30_000),
    ]  # fmt: skip
    assert (body["cost"]["lost"], body["cost"]["restart"], body["cost_gpu_s"]) == (1200.0, 300.0, 1500.0)
    assert body["rejected"] == [{"jobs": ["other"], "gpus": 4.0, "cost_gpu_s": 9000.0, "code": "dearer"}]
    assert body["numbers"] == {"guaranteed": 8.0, "held": 4.0}


@pytest.mark.parametrize("verb", ["accept", "refuse"])
def test_a_reply_for_another_job_or_attempt_is_forbidden(world: World, verb: str) -> None:
    (action_id,) = propose(world, due())
    send(world, action_id)
    for changes in ({"job": "other"}, {"attempt": 2}):
        reply(world, action_id, verb, 403, **changes)
    assert state_of(world, action_id) == ("sent", "")


def test_a_reply_after_the_end_says_what_happened(world: World) -> None:
    (action_id,) = propose(world, due(in_s=60.0))
    send(world, action_id)
    world.clock.advance(61)
    for verb in ("accept", "refuse"):
        detail = reply(world, action_id, verb, 409)["detail"]
        assert "is expired (agents did not answer, and it was not seen to happen in time)" in detail
    world.service.actions.record_seen(action_id, world.clock.now_ms())
    assert state_of(world, action_id)[0] == "late"
    assert "is late" in reply(world, action_id, status=409)["detail"]


def test_a_refusal_may_follow_an_acceptance_and_is_the_same_twice(world: World) -> None:
    (action_id,) = propose(world, due())
    send(world, action_id)
    reply(world, action_id)
    first = reply(world, action_id, "refuse", why="the disk is full")
    assert first == reply(world, action_id, "refuse", why="another reason")
    assert first["why"] == "the disk is full"
    assert "is refused (the disk is full)" in reply(world, action_id, status=409)["detail"]


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{}", 422), (b"[", 400), (msgspec.json.encode({**BIG, "why": "x" * 1001}), 422), (b'{"job":1}', 422)],
)
def test_a_bad_reply_is_refused(world: World, body: bytes, status: int) -> None:
    (action_id,) = propose(world, due())
    send(world, action_id)
    assert world.ask("POST", f"/actions/{action_id}/refuse", body).status_code == status
    assert world.ask("POST", "/actions/nothing-1/accept", BIG).status_code == 404
    assert state_of(world, action_id) == ("sent", "")


def test_what_telemetry_contradicts_counts_as_refused_and_is_late_if_it_happens(world: World) -> None:
    control = world.service.actions
    (action_id,) = propose(world, due())
    send(world, action_id)
    reply(world, action_id)
    control.record_contradiction(action_id, "4 GPUs of n1 work", NOW_MS)
    assert state_of(world, action_id) == ("refused", "4 GPUs of n1 work")
    control.record_seen(action_id, NOW_MS)
    assert state_of(world, action_id)[0] == "late"


# -- time


def test_an_action_that_nobody_sent_expires_and_may_be_proposed_again(world: World) -> None:
    (action_id,) = propose(world, due(in_s=10.0))
    world.clock.advance(10)
    assert [row.action_id for row in world.service.actions.expire(world.clock.now_ms())] == [action_id]
    assert state_of(world, action_id) == ("expired", "it was not sent in time")
    assert propose(world, due(in_s=10.0))
    with pytest.raises(IllegalTransition, match="is expired"):
        world.service.actions.record_seen(action_id, NOW_MS)


@pytest.mark.parametrize("hours", [-5, 5])
def test_an_action_keeps_the_rest_of_its_time_when_the_clock_is_set(world: World, hours: int) -> None:
    (action_id,) = propose(world, due(in_s=60.0))
    world.clock.time_ms += hours * 3_600_000
    control = world.service.actions
    assert control.expire(world.clock.now_ms()) == []
    assert control.compute_by_ms(control.get_action(action_id)) == NOW_MS + 60_000 + hours * 3_600_000
    world.clock.advance(60)
    assert len(control.expire(world.clock.now_ms())) == 1


def test_a_step_of_the_worker_expires_what_is_due(world: World) -> None:
    (action_id,) = propose(world, due(in_s=10.0))
    world.clock.advance(10)
    world.step()
    assert state_of(world, action_id)[0] == "expired"


def test_a_ledger_that_cannot_be_written_does_not_end_the_worker(world: World) -> None:
    (action_id,) = propose(world, due(in_s=10.0))
    world.clock.advance(10)

    def fail(point: str) -> float:
        if point == "ledger.before_commit":
            raise sqlite3.OperationalError("database or disk is full")
        return 1.0

    failpoints.set_hook(fail)
    try:
        world.step()
    finally:
        failpoints.set_hook(None)
    assert state_of(world, action_id)[0] == "proposed"
    world.clock.advance(10)
    world.step()
    assert state_of(world, action_id)[0] == "expired"


# -- bounds and switches


def test_the_breaker_opens_at_a_twentieth_of_the_fleet_and_stays_open(world: World) -> None:
    """The fleet has 128 GPUs: 6.4 of them within an hour."""
    ids = propose(world, *(due(f"j{number}", 3.0, 1e6) for number in range(4)))
    assert world.service.actions.explain_excess(due(gpus=7.0), NOW_MS)
    assert [send(world, id_) for id_ in ids] == [[ids[0]], [ids[1]], [], []]
    switches = world.ask("GET", "/actions").json()["switches"]
    bound = "9 GPUs of the fleet within an hour are more than 5.0% of its 128 (placer.taken_fleet_share)"
    assert switches["why"] == bound
    world.clock.advance(7200)
    world.restart()
    world.board.as_of_ms = world.clock.now_ms()
    world.board.publish()
    world.service.view.observe_fleet()
    assert send(world, ids[2]) == []
    assert world.ask("POST", "/actions/reset").json()["opened_ms"] is None
    assert send(world, ids[2]) == [ids[2]]
    words = [row["action"] for row in world.service.ledger.read_audit_trail(20)]
    assert words.count("actions_stopped") == words.count("actions_reset") == 1


def test_a_pause_stops_sending_and_survives_a_restart(world: World) -> None:
    world.board.jobs = {"j0": [0], "j1": [1]}
    world.board.publish()
    ids = propose(world, due("j0", in_s=1e6), due("j1", in_s=1e6))
    assert send(world, ids[0])
    first = world.ask("POST", "/actions/pause").json()
    world.restart()
    world.service.view.observe_fleet()
    assert world.ask("POST", "/actions/pause").json() == first
    assert send(world, ids[1]) == []
    assert reply(world, ids[0], job="j0")["state"] == "accepted", "what was sent is followed"
    world.ask("POST", "/actions/resume")
    world.ask("POST", "/actions/resume")
    assert send(world, ids[1]) == [ids[1]]
    words = [row["action"] for row in world.service.ledger.read_audit_trail(20)]
    assert words.count("actions_paused") == words.count("actions_resumed") == 1


def test_nothing_is_sent_without_a_board(tmp_path: Path) -> None:
    world = World(tmp_path)
    (action_id,) = propose(world, due())
    assert send(world, action_id) == []
    world.close()


class Bounded:
    """A control over a fleet of 100 GPUs with queues of 50 and 30, on a clock that may be set."""

    LIMITS = BreakerLimits(0.2, 0.15)

    def __init__(self, path: Path) -> None:
        self.clock, self.path = ManualClock(NOW_MS), path
        self.ledger = Ledger(path)
        self.open()
        self.sent: list[tuple[float, str, float]] = []  # true second, queue, GPUs
        self.true_s = 0.0

    def open(self) -> None:
        capacity = BreakerCapacity(100.0, {"a": 50.0, "b": 30.0})
        self.control = ActionControl(self.ledger, self.clock, self.LIMITS, lambda: capacity, PlacerMetrics().actions)

    def restart(self) -> None:
        self.ledger.close()
        self.ledger = Ledger(self.path)
        self.open()

    def step(self, number: int, step_s: int, queue: str, gpus: float, set_s: int, restarts: bool) -> None:
        self.clock.advance(step_s)
        self.true_s += step_s
        self.clock.time_ms += 1000 * set_s
        self.control.list_open()
        if restarts:
            self.restart()
        now_ms = self.clock.now_ms()
        action = make_action(f"j{number}", gpus=gpus, queue=queue, by_ms=now_ms + 10**9)
        ids = [row.action_id for row in self.control.propose([action], now_ms).opened]
        before: list[ActionRecord] = self.control.send(ids, now_ms)
        self.sent += [(self.true_s, queue, gpus) for _ in before]
        if number % 5 == 4 and self.control.switches.breaker.is_open:
            self.control.reset_breaker(now_ms, "ada")
            self.sent.clear()


@examples(100)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2000),
            st.sampled_from(["a", "b"]),
            st.sampled_from([1.0, 2.5, 4.0]),
            st.sampled_from([0, 0, 0, 9000, -9000]),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_the_bounds_hold_over_any_hour_restarts_and_clocks_that_are_set(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, str, float, int, bool]]
) -> None:
    world = Bounded(tmp_path_factory.mktemp("bounded") / "l")
    for number, step in enumerate(steps):
        world.step(number, *step)
        hour = [row for row in world.sent if row[0] > world.true_s - 3600]
        assert sum(row[2] for row in hour) <= 15.0
        assert sum(row[2] for row in hour if row[1] == "a") <= 10.0
        assert sum(row[2] for row in hour if row[1] == "b") <= 6.0
    world.ledger.close()
    assert verify_ledger(world.path).is_intact


# -- lists


def pages(world: World, query: str, limit: int = 1000) -> list[str]:
    found, after = list[str](), 0
    while True:
        body = world.ask("GET", f"/actions?limit={limit}&after={after}{query}").json()
        if not body["rows"]:
            return found
        found += [row["action_id"] for row in body["rows"]]
        after = body["cursor"]


def test_filters_and_pages(world: World) -> None:
    ids = propose(world, *(due(f"j{number}", queue="a/x" if number % 2 else "b") for number in range(7)))
    assert pages(world, "", 3) == ids
    assert pages(world, "&queue=a", 2) == pages(world, "&queue=a/x") == ids[1::2]
    assert pages(world, "&queue=a/") == []
    send(world, ids[0])
    assert pages(world, "&state=sent") == [ids[0]]
    assert pages(world, "&state=open") == [*ids[1:], ids[0]], "in the order of their last changes"
    assert pages(world, "&job=j3") == [ids[3]]
    assert world.ask("GET", "/actions?state=gone").status_code == 422
    (row,) = world.ask("GET", "/actions?after=7").json()["rows"]
    assert row["action_id"] == ids[0], "whoever polls sees the change, and nothing twice"


def test_many_open_actions_are_listed_page_by_page(world: World) -> None:
    count = 8_000
    propose(world, *(due(f"j{number}", in_s=1e6) for number in range(count)))
    assert len(world.service.actions.list_open()) == count
    assert len(set(pages(world, "&state=open"))) == count
    world.restart()
    assert len(world.service.actions.list_open()) == count


# -- who may do what


@pytest.fixture
def tenants(tmp_path: Path) -> Any:
    world = QueueWorld(tmp_path)
    world.board.publish()
    for number in range(3):
        world.wait(f"foreign-{number}", "b")
    world.wait("own-request", "a")
    world.app = make_app(world.service, access=ACCESS)
    yield world
    world.close()


def propose_for_tenants(world: QueueWorld) -> dict[str, str]:
    jobs = {
        "own": due("own", queue="a", payer="foreign-0"),
        "own-2": due("own-2", queue="a", payer="own-request"),
        "foreign": due("foreign", queue="b", payer="own-request"),
        "deep": due("deep", queue="c/users/ada", payer=""),
    }
    return {row.action.job: row.action_id for row in world.service.actions.propose(jobs.values(), NOW_MS).opened}


def test_a_bound_token_sees_the_actions_of_its_queues_and_no_name_of_others(tenants: QueueWorld) -> None:
    ids = propose_for_tenants(tenants)
    body = tenants.ask("GET", "/actions", headers=LEAD)
    assert [row["job"] for row in body["rows"]] == ["own", "own-2"]
    assert [row["payer"] for row in body["rows"]] == ["", "own-request"]
    assert "foreign" not in msgspec.json.encode(body).decode()
    assert [row["changed"] for row in body["rows"]] == [2, 3], "its own lines: the request and two actions"
    assert tenants.ask("GET", "/actions?after=2", headers=LEAD)["rows"][0]["job"] == "own-2"
    assert [row["job"] for row in tenants.ask("GET", "/actions", headers=USERS)["rows"]] == ["deep"]
    assert len(tenants.ask("GET", "/actions", headers=BOSS)["rows"]) == 4
    details = tenants.ask("GET", f"/actions/{ids['own']}", headers=LEAD)
    assert (details["numbers"], details["rejected"], details["cost"]["lost"]) == ({}, [], 1200.0)
    for other in (ids["foreign"], ids["deep"], "nothing-1"):
        assert tenants.ask("GET", f"/actions/{other}", 404, headers=LEAD)["detail"] == f"no action {other!r}"


def test_a_bound_token_reads_the_audit_lines_of_its_actions(tenants: QueueWorld) -> None:
    ids = propose_for_tenants(tenants)
    tenants.service.actions.withdraw(ids["own"], "foreign-0 was cancelled", NOW_MS)
    rows = tenants.ask("GET", "/audit?after=0", headers=LEAD)["rows"]
    assert [(row["request_id"], row["sentence"]) for row in rows] == [
        ("own-request", "queued"),
        (ids["own"], "proposed"),
        (ids["own-2"], "proposed"),
        (ids["own"], "withdrawn"),
    ]
    assert {row["decision_id"] for row in rows[1:]} == {""}
    (row,) = tenants.ask("GET", "/actions?job=own", headers=LEAD)["rows"]
    assert (row["state"], row["why"]) == ("withdrawn", "")


def test_the_switches_are_for_operators_and_replies_for_agents(tenants: QueueWorld) -> None:
    ids = propose_for_tenants(tenants)
    for path in ("/actions/pause", "/actions/resume", "/actions/reset", f"/actions/{ids['own']}/accept"):
        assert tenants.ask("POST", path, 403, headers=LEAD)
    assert tenants.ask("POST", "/actions/pause", headers=BOSS)["paused_by"] == "boss"
    body = tenants.ask("GET", "/actions", headers=LEAD)["switches"]
    assert (body["paused_ms"], body["paused_by"]) == (NOW_MS, "")
    assert tenants.service.ledger.read_audit_trail(1)[0]["caller"] == "boss"


def test_metrics_count_actions_and_show_the_switches(world: World) -> None:
    ids = propose(world, due("j0"), due("j1"))
    send(world, ids[0])
    world.clock.advance(30)
    world.ask("POST", "/actions/pause")
    text = world.ask("GET", "/metrics").text
    for line in (
        'fleetcast_actions_open{kind="preempt",state="proposed"} 1.0',
        'fleetcast_actions_open{kind="preempt",state="sent"} 1.0',
        'fleetcast_action_oldest_seconds{executor="agents"} 30.0',
        "fleetcast_actions_paused 1.0",
        "fleetcast_actions_breaker_open 0.0",
    ):
        assert line in text
    reply(world, ids[0], "refuse", job="j0")
    assert 'fleetcast_actions_failed_total{executor="agents"} 1.0' in world.ask("GET", "/metrics").text


def test_the_newest_actions_are_read_first_when_asked(world: World) -> None:
    ids = propose(world, due("a"), due("b"), due("c"))
    world.clock.advance(1)
    send(world, ids[0])
    body = world.ask("GET", "/actions?order=newest&limit=2").json()
    assert [(row["job"], row["state"], row["since_ms"]) for row in body["rows"]] == [
        ("c", "proposed", NOW_MS),
        ("a", "sent", NOW_MS + 1000),
    ]
    assert world.ask("GET", f"/actions?after={body['cursor']}").json()["rows"] == []
    assert world.ask("GET", "/actions?order=random").status_code == 422
