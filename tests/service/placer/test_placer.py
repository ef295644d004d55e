import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.requests import Decision
from fleetcast.placement.ledger.chain import NO_HASH
from fleetcast.placement.ledger.ledger import LedgerError
from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.service.config import Config, PlacerConfig
from fleetcast.service.placer.http import MAX_BODY_BYTES
from fleetcast.service.placer.role import log_audit_head_daily, open_service, serve
from fleetcast.service.plugins import load_functions
from tests.fuzz.asgi import Asked, ask
from tests.placement.ledger.ledger_world import edit
from tests.ports import free_port
from tests.service.placer_world import NOW_MS, World, rack_of_64


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.board.publish()
    yield world
    world.close()


def lawful(decision: dict[str, Any]) -> dict[str, Any]:
    assert decision["nodes"] == decision["candidates"] + sum(decision["rejected"].values())
    return decision


def nodes(decision: dict[str, Any]) -> list[str]:
    return sorted({rank["node"] for rank in decision["ranks"]})


def test_scattered_gpus_are_refused_and_one_rack_is_filled_once_its_blocker_ends(world: World) -> None:
    # 64 GPUs are free: seven nodes of r01, one of r02
    world.board.jobs = {"blocker": [3], "other": range(9, 16)}
    world.board.publish()
    refused = lawful(world.place(**rack_of_64("first")))
    assert refused["outcome"] == "refused"
    assert "the best rack r01 has 56 free; 64 free GPUs are scattered over 2 racks" in refused["sentence"]
    world.board.jobs = {"other": range(9, 16)}
    world.board.ended = [("blocker", 1, NOW_MS)]
    world.board.publish()
    placed = lawful(world.place(**rack_of_64("second")))
    assert placed["outcome"] == "placed"
    assert nodes(placed) == [f"n{index:02d}" for index in range(1, 9)]
    assert placed["topology_level"] == "rack"
    assert placed["models"] == {"risk": "rules"}


def test_the_same_request_gets_the_same_bytes_after_a_restart_refusals_too(world: World) -> None:
    world.board.jobs = {"blocker": [3], "other": range(9, 16)}
    world.board.publish()
    bodies = [rack_of_64("big"), {"request_id": "small", "gang": 2}]
    before = [world.ask("POST", "/placements", body).content for body in bodies]
    world.board.jobs = {}
    world.board.publish()
    world.restart()
    assert [world.ask("POST", "/placements", body).content for body in bodies] == before
    assert world.ask("GET", "/placements/big").content == before[0]
    # another order of keys and more white space is the same body
    text = b' { "gang" : 2, "request_id": "small" } '
    assert world.ask("POST", "/placements", text).content == before[1]


def test_another_body_under_a_known_id_is_a_422_that_names_the_field(world: World) -> None:
    world.place("a")
    response = world.ask("POST", "/placements", {"request_id": "a", "gang": 2})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["errors"][0]["field"] == "request_id"


def test_two_decisions_on_one_board_do_not_overlap(world: World) -> None:
    first = world.place("a", gang=8, gpus_per_node=8)
    second = world.place("b", gang=8, gpus_per_node=8)
    assert not set(nodes(first)) & set(nodes(second))
    world.restart()
    assert world.place("c", gang=1)["outcome"] == "refused"


def test_a_retry_while_the_first_is_in_flight_gets_the_same_bytes(world: World) -> None:
    async def both(client: httpx.AsyncClient) -> list[httpx.Response]:
        posts = [client.post("/placements", content=b'{"request_id": "a", "gang": 3}') for _ in range(5)]
        return list(await asyncio.gather(*posts))

    replies = world.run(both)
    assert len({reply.content for reply in replies}) == 1
    assert len(world.ask("GET", "/placements").json()["rows"]) == 1


def test_an_intent_ends_when_the_job_is_seen_and_when_it_ends(world: World) -> None:
    world.place("a", gang=16, gpus_per_node=8)
    assert world.place("b")["outcome"] == "refused"
    world.board.jobs = {"a": range(16)}
    world.board.publish()
    assert world.place("c")["outcome"] == "refused"
    assert world.service.ledger.list_active_intents() == []
    world.board.jobs, world.board.ended = {}, [("a", 1, NOW_MS)]
    world.board.publish()
    assert world.place("d")["outcome"] == "placed"


def test_an_intent_that_nobody_starts_expires(world: World) -> None:
    decision = world.place("a", gang=16, gpus_per_node=8)
    assert decision["expires_ms"] == NOW_MS + 300_000
    world.clock.advance(301)
    world.board.as_of_ms += 301_000
    world.board.publish()
    assert world.place("b")["outcome"] == "placed"
    assert "did not start in time" in world.ask("GET", "/audit").json()["rows"][1]["sentence"]
    assert world.ask("DELETE", "/placements/a").status_code == 409


def test_many_small_steps_of_the_clock_do_not_end_an_intent(world: World) -> None:
    world.place("a", gang=16, gpus_per_node=8)
    for _ in range(100):
        world.clock.time_ms += 4000
        world.board.as_of_ms += 4000
        world.board.publish()
        world.step()
    assert world.place("b")["outcome"] == "refused"
    world.clock.advance(301)
    world.board.as_of_ms += 301_000
    world.board.publish()
    assert world.place("c")["outcome"] == "placed"


def test_cancelling_gives_the_gpus_back_once_and_for_all(world: World) -> None:
    world.place("a", gang=16, gpus_per_node=8)
    for _ in range(2):
        assert world.ask("DELETE", "/placements/a").json()["state"] == "cancelled"
    assert world.place("b", gang=16, gpus_per_node=8)["outcome"] == "placed"
    assert world.place("c")["outcome"] == "refused"
    assert world.ask("DELETE", "/placements/c").status_code == 409
    assert world.ask("DELETE", "/placements/nobody").status_code == 404


def test_a_dry_run_leaves_no_trace(world: World) -> None:
    assert world.place("a", gang=16, gpus_per_node=8, dry_run=True)["outcome"] == "placed"
    assert world.ask("GET", "/placements/a").status_code == 404
    assert world.place("a", gang=2)["outcome"] == "placed"
    assert world.place("a", gang=3, dry_run=True)["outcome"] == "placed"


def test_a_throttling_node_is_avoided_and_the_answer_says_so(world: World) -> None:
    world.board.risk = {0: (0.9, "SM clock 990 MHz, usual 1,980 (thermal slowdown)")}
    world.board.publish()
    decision = lawful(world.place("a", gang=4, gpus_per_node=8, topology={"required": "rack"}))
    assert "n01" not in nodes(decision)
    assert decision["sentence"].endswith("avoided n01: SM clock 990 MHz, usual 1,980 (thermal slowdown)")


def test_a_new_topology_generation_is_taken_over(world: World) -> None:
    assert world.place("a")["generation"] == 1
    world.board.generation = 2
    world.board.publish()
    assert world.place("b")["generation"] == 2


def test_without_a_board_and_on_a_stale_one_the_answer_is_503(tmp_path: Path) -> None:
    world = World(tmp_path)
    response = world.ask("POST", "/placements", {"request_id": "a"})
    assert response.status_code == 503
    assert "warming" in response.json()["detail"]
    assert response.headers["retry-after"]
    assert world.ask("GET", "/healthz").json()["warming"]
    world.board.publish()
    world.clock.advance(61)
    assert "61 s old" in world.ask("POST", "/placements", {"request_id": "a"}).json()["detail"]
    # waiting needs no board
    assert world.ask("POST", "/queue", {"request_id": "q"}).status_code == 202
    world.step()
    assert "nothing is decided now: the board is 61 s old" in world.ask("GET", "/queue").json()["rows"][0]["why"]
    world.close()


@pytest.mark.parametrize(
    ("body", "status", "fields"),
    [
        (b"{", 400, None),
        (b"\xff\xfe", 400, None),
        (b"[" * 100_000, 400, None),
        (b"[]", 422, None),
        (b'{"gang": 1}', 422, ["request_id"]),
        (b'{"request_id": "a", "gpus": 8, "zone": "x"}', 422, ["gpus", "zone"]),
        (b'{"request_id": "a", "gang": {"min": 1, "desired": 2, "max": 3}}', 422, ["gang.max"]),
        (b'{"request_id": "a", "topology": {"required": "shelf"}}', 422, ["topology.required"]),
        (b'{"request_id": "a", "gang": 0}', 422, ["gang"]),
        (b'{"request_id": "a", "gpu_share": 0.5}', 422, ["gpu_share"]),
        (b'{"request_id": "a", "max_risk": NaN}', 400, None),
        (b'{"request_id": "' + b"x" * MAX_BODY_BYTES + b'"}', 413, None),
    ],
)
def test_a_bad_body_is_a_problem_that_names_what_is_wrong(
    world: World, body: bytes, status: int, fields: list[str] | None
) -> None:
    for door in ("/placements", "/queue"):
        response = world.ask("POST", door, body)
        problem = response.json()
        assert (response.status_code, problem["status"]) == (status, status)
        assert problem["title"]
        assert problem["detail"]
        if fields:
            assert [row["field"] for row in problem["errors"]] == fields


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("PUT", "/placements", 405),
        ("GET", "/placements?limit=many", 422),
        ("GET", "/placements?limit=100000", 422),
        ("GET", "/placements?after=-1", 422),
        ("DELETE", "/queue/nobody", 404),
    ],
)
def test_other_bad_requests_are_problems_too(world: World, method: str, path: str, status: int) -> None:
    response = world.ask(method, path)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"


def test_placements_are_polled_by_cursor(world: World) -> None:
    for name in ("a", "b", "c"):
        world.place(name, job=f"job-{name}", attempt=2)
    first = world.ask("GET", "/placements?limit=2").json()
    assert [row["request_id"] for row in first["rows"]] == ["a", "b"]
    assert first["rows"][0]["job"] == "job-a"
    assert first["rows"][0]["attempt"] == 2
    assert first["rows"][0]["time_ms"] == NOW_MS
    assert first["rows"][1]["cursor"] == first["cursor"]
    second = world.ask("GET", f"/placements?after={first['cursor']}").json()
    assert [row["request_id"] for row in second["rows"]] == ["c"]
    last = world.ask("GET", f"/placements?after={second['cursor']}").json()
    assert last["rows"] == []
    assert last["cursor"] == second["cursor"]


def test_the_audit_says_who_asked_for_what(world: World) -> None:
    world.place("a")
    world.place("b", user="ada", gang=999)
    rows = world.ask("GET", "/audit").json()["rows"]
    assert [(row["caller"], row["action"]) for row in rows] == [("ada", "refuse"), ("unknown", "place")]
    assert set(rows[0]) == {
        *("audit_id", "time_ms", "caller", "action", "request_id", "decision_id", "board_as_of_ms", "models"),
        *("sentence", "stored", "previous", "hash"),
    }


def test_the_audit_gives_the_head_of_its_chain_whatever_rows_are_asked_for(world: World) -> None:
    assert world.ask("GET", "/audit").json()["head"] == {"audit_id": 0, "hash": "0" * 64}
    world.place("a")
    world.place("b")
    newest = world.ask("GET", "/audit").json()["rows"][0]
    for query in ("", "?request_id=a", "?after=2", "?limit=1"):
        head = world.ask("GET", f"/audit{query}").json()["head"]
        assert head == {"audit_id": 2, "hash": newest["hash"]}
    assert verify_ledger(world.config.ledger, newest["hash"]).held == 2


def test_the_head_is_logged_now_and_once_a_day(world: World, caplog: pytest.LogCaptureFixture) -> None:
    class Days(ManualClock):
        async def sleep(self, fleet_s: float) -> None:
            assert fleet_s == 86_400
            world.service.ledger.record_acceptance("a day went by", world.clock.now_ms(), "ada")
            if world.service.ledger.position == 2:
                raise asyncio.CancelledError

    world.service.clock = Days()
    caplog.set_level("INFO", "fleetcast.service.placer.role")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(log_audit_head_daily(world.service))
    heads = [record.getMessage() for record in caplog.records if "head" in record.getMessage()]
    newest = world.service.ledger.read_audit_trail(1, after=0)[0]["hash"]
    assert heads == [f"the audit trail's head: {line}" for line in (f"0:{NO_HASH}", f"1:{newest}")]
    assert "fleetcast_placer_audit_position 2.0" in world.ask("GET", "/metrics").text


def test_metrics_count_decisions_by_outcome(world: World) -> None:
    world.place("a")
    world.place("a")
    world.place("b", gang=999)
    text = world.ask("GET", "/metrics").text
    assert 'fleetcast_placer_decisions_total{door="placements",outcome="placed"} 1.0' in text
    assert 'fleetcast_placer_decisions_total{door="placements",outcome="refused"} 1.0' in text
    assert "fleetcast_placer_intents 1.0" in text


def test_a_ledger_that_is_damaged_while_it_is_open_is_told_and_nothing_is_promised(world: World) -> None:
    world.place("a")
    edit(world.config.ledger, "UPDATE intents SET ranks = replace(ranks, '0', '1')")
    world.service.ledger._drop_cache()  # as after a transaction that failed: what is kept in memory is read again
    for answer in (world.ask("GET", "/healthz"), world.ask("POST", "/placements", {"request_id": "b"})):
        assert answer.status_code == 503
        assert "is damaged (the intent of request 'a' is not what was written" in answer.json()["detail"]


def test_a_stored_reply_that_was_changed_is_not_served_and_the_others_are(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.place("a")
    reply = world.ask("GET", "/placements/a").content
    world.place("b")
    edit(world.config.ledger, "UPDATE decisions SET reply = replace(reply, 'n0', 'n1') WHERE request_id = 'b'")
    for method, path, body in (
        ("GET", "/placements/b", None),
        ("POST", "/placements", {"request_id": "b"}),
        ("GET", "/placements", None),
    ):
        answer = world.ask(method, path, body)
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:fleetcast:problem:unavailable")
        assert "the decision of request 'b' is not what was written" in answer.json()["detail"]
    (row,) = [row for row in caplog.records if "is not what was written" in row.getMessage()]
    assert row.levelname == "ERROR", "the operator hears of it, once"
    assert world.ask("GET", "/placements/a").content == reply
    assert world.ask("GET", "/healthz").status_code == 200


def test_a_damaged_ledger_refuses_to_start_and_names_the_file(tmp_path: Path) -> None:
    config = Config(state=str(tmp_path))
    config.ledger.write_bytes(b"scribble" * 1000)
    with pytest.raises(LedgerError, match=r"ledger\.sqlite"):
        open_service(config)


def test_operators_functions_are_loaded_by_import_path() -> None:
    ((name, function),) = load_functions("placer.filters", ("fleetcast.placement.machines.filters:drained",))
    assert name == "drained"
    assert callable(function)
    for path in ("fleetcast.placement.machines.filters:nothing", "nowhere:x", "plain"):
        with pytest.raises(ConfigError, match=r"placer\.filters"):
            load_functions("placer.filters", (path,))
    assert PlacerConfig().filters == ()


def test_it_serves_on_loopback_until_it_is_told_to_stop(tmp_path: Path) -> None:
    port = free_port()
    config = Config(state=str(tmp_path), placer=PlacerConfig(port=port))

    async def talk_and_stop() -> dict[str, Any]:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            while True:
                try:
                    answer: dict[str, Any] = (await client.get("/healthz")).json()
                    break
                except httpx.ConnectError:
                    await asyncio.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
        return answer

    async def main() -> dict[str, Any]:
        async with asyncio.timeout(60):
            answer, _ = await asyncio.gather(talk_and_stop(), serve(config))
        return answer

    assert asyncio.run(main())["warming"] is True
    assert config.ledger.exists()


def test_the_reply_is_a_decision(world: World) -> None:
    reply = world.ask("POST", "/placements", {"request_id": "a"}).content
    assert msgspec.json.decode(reply, type=Decision).outcome == "placed"


def test_an_attempt_that_runs_has_ended_or_is_promised_gpus_is_not_placed_again(world: World) -> None:
    # its intent would be settled by events that are not its own, and the GPUs given to the next one
    world.place("a", job="train", gpus_per_node=8)
    promised = world.ask("POST", "/placements", {"request_id": "b", "job": "train", "gpus_per_node": 8})
    world.board.jobs, world.board.ended = {"runs": [0], "train": [1]}, [("ended", 1, NOW_MS)]
    world.board.publish()
    running = world.ask("POST", "/placements", {"request_id": "c", "job": "train"})
    ended = world.ask("POST", "/placements", {"request_id": "d", "job": "ended"})
    assert [row.status_code for row in (promised, running, ended)] == [409, 409, 409]
    assert "runs already" in running.json()["detail"]
    assert world.place("e", job="train", attempt=2)["outcome"] == "placed"
    assert world.place("a", job="train", gpus_per_node=8)["outcome"] == "placed"  # the same bytes as before
    assert world.place("f", job="train", dry_run=True)["outcome"] == "placed"


def test_a_waiting_attempt_that_was_started_elsewhere_leaves_the_queue(world: World) -> None:
    world.board.jobs = {"other": range(16)}
    world.board.publish()
    assert world.ask("POST", "/queue", {"request_id": "q", "job": "train"}).status_code == 202
    assert world.ask("POST", "/queue", {"request_id": "r", "job": "train"}).status_code == 409
    world.board.jobs = {"train": [3]}
    world.board.publish()
    world.step()
    assert world.service.ledger.list_queue_entries() == []
    assert "runs already" in world.ask("GET", "/placements/q").json()["sentence"]


def test_a_board_of_another_clock_is_not_decided_upon(world: World) -> None:
    world.board.as_of_ms = NOW_MS + 86_400_000
    world.board.publish()
    response = world.ask("POST", "/placements", {"request_id": "a"})
    assert response.status_code == 503
    assert "ahead of the clock" in response.json()["detail"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"request_id": "a", "attempt": 9223372036854775808}', 422),
        (b'{"request_id": "a", "cpus": 1' + b"0" * 400 + b"}", 422),
        (b'{"request_id": "a\\n"}', 422),
        (b'{"request_id": "\xed\xa0\x80"}', 400),
    ],
)
def test_what_the_ledger_cannot_hold_is_refused_at_both_doors(world: World, body: bytes, status: int) -> None:
    for door in ("/placements", "/queue"):
        response = world.ask("POST", door, body)
        assert response.status_code == status
        assert response.json()["instance"] == "/v1" + door
    world.step()
    assert world.service.ledger.list_queue_entries() == []


def test_what_the_placer_tells_of_itself_is_as_of_now(world: World) -> None:
    for path in ("/queue", "/audit", "/placements"):
        response = world.ask("GET", path)
        assert response.headers["age"] == "0"
        assert response.json()["as_of_ms"] == NOW_MS


def test_a_ledger_that_cannot_be_written_leaves_the_placer_alive(world: World) -> None:
    world.place("a")
    world.board.jobs = {"a": [0]}
    world.board.publish()
    assert world.ask("POST", "/queue", {"request_id": "q"}).status_code == 202
    world.service.ledger._db.execute("PRAGMA query_only = ON")
    world.step()
    assert world.ask("POST", "/placements", {"request_id": "b"}).status_code == 503
    world.service.ledger._db.execute("PRAGMA query_only = OFF")
    world.clock.advance(6)
    world.step()
    assert world.ask("GET", "/placements/q").json()["outcome"] == "placed"


FACTS = {"preemptible": True, "queue": "nosuchqueue", "tenant": "t", "class": "batch", "checkpoint_cost_s": 30.0}


def test_facts_that_changed_nothing_stand_in_every_decision(world: World) -> None:
    named = sorted(FACTS)
    dry = world.place("x", gang=2, dry_run=True, **FACTS)
    placed = world.place("x", gang=2, **FACTS)
    refused = world.place("y", gang=1000, **FACTS)
    queued = world.ask("POST", "/queue", {"request_id": "z", "queue": "nosuchqueue"}).json()
    (row,) = world.ask("GET", "/queue").json()["rows"]
    assert [dry["outcome"], placed["outcome"], refused["outcome"], queued["outcome"]] == [
        *("placed", "placed", "refused", "queued")
    ]
    assert dry["ignored"] == placed["ignored"] == refused["ignored"] == named
    assert queued["ignored"] == row["ignored"] == ["queue"]
    assert world.place("plain")["ignored"] == []
    world.restart()
    assert world.place("x", gang=2, **FACTS)["ignored"] == named
    world.ask("DELETE", "/queue/z")
    assert world.ask("GET", "/placements/z").json()["ignored"] == ["queue"]


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_what_a_decision_names_as_ignored_changes_nothing_in_it(world: World, fact: str) -> None:
    """Until it does: then it is taken from `FACTS_WITHOUT_EFFECT`."""
    world.board.risk = {0: (0.2, "hot"), 9: (0.1, "slow")}
    world.board.publish()
    plain = world.place("x", gang=3, gpus_per_node=4, limit_s=7200, dry_run=True)
    told = world.place("x", gang=3, gpus_per_node=4, limit_s=7200, dry_run=True, **{fact: FACTS[fact]})
    assert plain | {"ignored": [fact]} == told


@pytest.mark.parametrize("path", ["/placements", "/queue", "/estimate"])
def test_a_client_that_goes_away_within_its_body_is_no_error_of_ours(world: World, path: str) -> None:
    asyncio.run(ask(world.app, Asked("POST", path, chunks=(b'{"request_id": "a"',), leaves=True)))
    assert world.ask("GET", "/placements").json()["rows"] == []


def test_a_slash_too_many_is_a_problem_and_no_redirect(world: World) -> None:
    response = world.ask("GET", "/audit/")
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


def test_a_bug_is_answered_with_a_problem_and_its_number_is_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: Any) -> Any:
        raise ZeroDivisionError("planted")

    world.service.scorers = (("breaks", breaks),)
    response = world.ask("POST", "/placements", {"request_id": "a"})
    assert response.status_code == response.json()["status"] == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["id"] in caplog.text
    assert "ZeroDivisionError: planted" in caplog.text
    world.service.scorers = ()
    assert world.place("a")["outcome"] == "placed"
