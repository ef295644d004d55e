"""The answer of `GET /plan`: what is done, what starts, what is promised and what comes next."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.service.http.access import Access, Caller, Scope, parse_tokens
from fleetcast.service.placer.http import make_app
from fleetcast.service.placer.http_actions import limit_policy
from tests.service.placer.test_act import ACT, ACT_LATE_S, ActWorld
from tests.service.placer.test_reclaim import OLD_S

TOKENS = """
boss admin 0123456789abcdefgh
owner read 123456789abcdefghi queues=owed
lender read 23456789abcdefghij queues=lender
batch read 3456789abcdefghijk queues=batch
"""
BOSS, OWNER, LENDER, BATCH = (
    {"authorization": f"Bearer {token}"}
    for token in ("0123456789abcdefgh", "123456789abcdefghi", "23456789abcdefghij", "3456789abcdefghijk")
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ActWorld]:
    world = ActWorld(tmp_path, ACT)
    yield world
    world.close()


def stop_one(world: ActWorld) -> None:
    """Let a pass stop job a for request p, which then waits for its GPUs. Request r is the next one."""
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.board.more = {"a": {"checkpoint_ms": world.clock.now_ms() + 1000 * (OLD_S - 10)}}
    world.wait_for("p", "owed", 4, job="paid")
    world.wait_for("r", "lender", 4)
    world.agents_pass_at(OLD_S)


def bind(world: ActWorld) -> None:
    world.app = make_app(world.service, access=Access(parse_tokens(TOKENS, "test")))


def test_before_the_first_pass_there_is_no_plan(world: ActWorld) -> None:
    body = world.ask("GET", "/plan")
    assert (body["pass_ms"], body["next"]) == (None, None)
    assert body["actions"] == body["starts"] == body["promised"] == []
    assert body["switches"]["opened_ms"] is None


def test_a_stop_its_cost_and_the_promise_for_its_payer_are_in_one_plan(world: ActWorld) -> None:
    stop_one(world)
    body, now_ms = world.ask("GET", "/plan"), world.clock.now_ms()
    (action,) = body["actions"]
    assert (action["kind"], action["job"], action["state"], action["payer"]) == ("preempt", "a", "sent", "p")
    assert action["cost"]["lost"] == pytest.approx(32 * 10)
    assert action["cost_gpu_s"] == pytest.approx(sum(action["cost"].values()))
    (promised,) = body["promised"]
    assert (promised["request_id"], promised["job"], promised["queue"], promised["number"]) == ("p", "paid", "owed", 1)
    assert (promised["actions"], promised["until_ms"]) == ([action["action_id"]], now_ms + 1000 * ACT_LATE_S)
    assert {rank["node"] for rank in promised["ranks"]} == {"n05", "n06", "n07", "n08"}
    assert (body["pass_ms"], body["stalled"], body["starts"], body["has_more"]) == (now_ms, "", [], False)


def test_the_next_request_is_named_with_what_was_found_for_it(world: ActWorld) -> None:
    stop_one(world)
    world.pass_at(10)
    head = world.ask("GET", "/plan")["next"]
    assert (head["request_id"], head["queue"], head["ranks"]) == ("r", "lender", [])
    assert head["start_ms"] > world.clock.now_ms()
    assert head["waits_for"] in ("own", "a", "b")
    assert head["sentence"].startswith("stops no job")
    world.ask("DELETE", "/queue/r")
    assert world.ask("GET", "/plan")["next"] is None


def test_a_request_that_the_last_pass_placed_starts(world: ActWorld) -> None:
    stop_one(world)
    world.end("a")
    world.pass_at(10)
    body = world.ask("GET", "/plan")
    (start,) = body["starts"]
    assert (start["request_id"], start["job"], start["queue"]) == ("p", "paid", "owed")
    assert {rank["node"] for rank in start["ranks"]} == {"n05", "n06", "n07", "n08"}
    assert start["until_ms"] > world.clock.now_ms()
    assert (body["actions"], body["promised"]) == ([], [])
    world.pass_at(10)
    assert world.ask("GET", "/plan")["starts"] == []


def test_promises_are_in_the_plan_before_the_first_pass_after_a_restart(world: ActWorld) -> None:
    stop_one(world)
    before = world.ask("GET", "/plan")["promised"]
    world.restart()
    body = world.ask("GET", "/plan")
    assert (body["pass_ms"], body["promised"]) == (None, before)
    assert len(body["actions"]) == 1


def test_a_bound_token_sees_its_own_rows_and_no_name_of_others(world: ActWorld) -> None:
    stop_one(world)
    bind(world)
    owner = world.ask("GET", "/plan", headers=OWNER)
    assert (owner["actions"], owner["next"]) == ([], None)
    (promised,) = owner["promised"]
    assert (promised["request_id"], promised["actions"]) == ("p", [])
    lender = world.ask("GET", "/plan", headers=LENDER)
    (action,) = lender["actions"]
    assert (action["job"], action["payer"], lender["promised"], lender["next"]) == ("a", "", [], None)
    assert "paid" not in msgspec.json.encode(lender).decode()
    batch = world.ask("GET", "/plan", headers=BATCH)
    assert [batch[name] for name in ("actions", "starts", "promised", "next")] == [[], [], [], None]
    assert len(world.ask("GET", "/plan", headers=BOSS)["promised"]) == 1
    world.ask("GET", "/plan", 401)


@pytest.mark.parametrize(
    ("policy", "boss", "owner"),
    [
        ('"off"', ("off", []), ("off", [])),
        ('"advise"', ("advise", []), ("advise", [])),
        ('"act"', ("act", []), ("act", [])),
        ('"act"\nact_in = ["lender", "owed"]', ("act", ["lender", "owed"]), ("act", ["owed"])),
        ('"act"\nact_in = ["lender"]', ("act", ["lender"]), ("advise", [])),
    ],
)
def test_the_switches_say_where_actions_are_sent(tmp_path: Path, policy: str, boss: object, owner: object) -> None:
    world = ActWorld(tmp_path, ACT.replace('"act"', policy))
    world.board.publish()
    bind(world)
    for path in ("/plan", "/actions"):
        for caller, expected in ((BOSS, boss), (OWNER, owner)):
            switches = world.ask("GET", path, headers=caller)["switches"]
            assert (switches["mode"], switches["act_in"]) == expected
    assert world.ask("POST", "/actions/pause", headers=BOSS)["mode"] == boss[0]  # type: ignore[index]
    world.close()


def test_a_caller_below_a_queue_of_act_in_sees_its_own_queue() -> None:
    policy = ReclaimPolicy(mode="act", act_in=("research",))
    for own, expected in (
        ("research/nlp", ("act", ("research/nlp",))),
        ("research", ("act", ("research",))),
        ("search", ("advise", ())),
    ):
        caller = Caller("team", frozenset({Scope.READ}), queues=(own,))
        assert limit_policy(policy, caller) == expected


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "NaN", "inf", "1e3", "x", ""])
def test_an_impossible_limit_is_refused_with_the_reason(world: ActWorld, limit: str) -> None:
    answer: Any = world.ask("GET", f"/plan?limit={limit}", 422)
    assert "limit" in answer["detail"]


def test_older_actions_than_the_limit_are_left_out(world: ActWorld) -> None:
    world.fill(own=("owed", 4), a=("lender", 2), b=("lender", 2), c=("lender", 8))
    old_ms = world.clock.now_ms() + 1000 * (OLD_S - 10)
    world.board.more = {"a": {"checkpoint_ms": old_ms}, "b": {"checkpoint_ms": old_ms}}
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(OLD_S)
    whole, part = world.ask("GET", "/plan?limit=2"), world.ask("GET", "/plan?limit=1")
    assert (len(whole["actions"]), whole["has_more"]) == (2, False)
    assert (part["actions"], part["has_more"]) == (whole["actions"][1:], True)
