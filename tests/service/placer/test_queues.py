"""The placer with a file of queues: order, limits, refusals at the door, reload, charges."""

import hashlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.queues.charges import Charge, HeldGpus
from fleetcast.service.config import PlacerConfig
from fleetcast.service.placer import queue_file
from fleetcast.service.placer.queue_desk import QueueAdmin
from fleetcast.service.placer.queue_week import summarise_queue_week
from tests.service.placer_world import NOW_MS, World

HOUR_MS = 3_600_000
FILE = """
[policy]
order = "fifo"
[queue.a]
weight = 40
[queue.b]
weight = 40
limit = {gpu = 32}
[queue.c]
weight = 20
guaranteed = {gpu = 16}
[queue."c/users"]
per_user = true
"""


class QueueWorld(World):
    """A world with a file of queues."""

    placer = PlacerConfig()

    def __init__(self, folder: Path, text: str = FILE) -> None:
        self.file = folder / "queues.toml"
        self.file.write_text(text)
        super().__init__(folder)

    def start(self) -> None:
        replace = msgspec.structs.replace
        self.config = replace(self.config, placer=replace(self.placer, queues=str(self.file)))
        super().start()

    def rewrite(self, text: str) -> None:
        new = self.file.with_name("new")
        new.write_text(text)
        new.replace(self.file)

    def ask(self, method: str, path: str, status: int = 200, **more: Any) -> Any:
        async def go(client: Any) -> Any:
            return await client.request(method, path, **more)

        answer = self.run(go)
        assert answer.status_code == status, answer.text
        return answer.json() if "json" in answer.headers["content-type"] else answer.text

    def wait(self, name: str, queue: str, status: int = 202, **fields: Any) -> Any:
        body = {"request_id": name, "queue": queue, "gpus_per_node": 8, **fields}
        return self.ask("POST", "/queue", status, json=body)

    def order(self) -> list[str]:
        return [row["request_id"] for row in self.ask("GET", "/queue")["rows"]]

    def pass_(self) -> int:
        return self.service.backlog.run_pass()

    def beat(self, after_ms: int = 5000, **board: Any) -> None:
        """Later, with another board."""
        self.clock.advance(after_ms / 1000)
        for name, value in board.items():
            setattr(self.board, name, value)
        self.board.as_of_ms = self.clock.now_ms()
        self.board.publish()


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = QueueWorld(tmp_path)
    world.board.publish()
    yield world
    world.close()


def test_queues_take_turns_by_weight_and_the_guaranteed_is_first(world: QueueWorld) -> None:
    for number in range(4):
        for queue in ("a", "b"):
            world.wait(f"{queue}{number}", queue)
    world.wait("c0", "c/users", user="ada")
    assert world.pass_() == 9
    assert world.ask("GET", "/queue")["rows"] == []


def test_the_queue_is_listed_in_the_order_of_the_pass(world: QueueWorld) -> None:
    world.beat(jobs={"old": range(16)})
    for number in range(2):
        for queue in ("a", "b"):
            world.wait(f"{queue}{number}", queue)
    world.wait("c0", "c/users", user="ada")
    assert world.pass_() == 0
    assert world.order() == ["c0", "a0", "b0", "a1", "b1"]


def test_a_limit_holds_in_the_pass_and_at_the_other_door(world: QueueWorld) -> None:
    for number in range(6):
        world.wait(f"b{number}", "b")
    assert world.pass_() == 4
    why = world.ask("GET", "/queue")["rows"][0]["why"]
    assert why == "queue 'b' is at its limit: 32 of 32 GPUs held, 8 wanted"
    direct = world.ask("POST", "/placements", json={"request_id": "d", "queue": "b", "gpus_per_node": 8})
    assert direct["sentence"] == f"refused: {why}"


@pytest.mark.parametrize(
    ("fields", "field", "why"),
    [
        ({"queue": "aa"}, "queue", "no queue 'aa'; the nearest are 'a'"),
        ({"queue": "c"}, "queue", "name one of them, such as 'c/users'"),
        ({"queue": "c/users"}, "user", "name the user"),
        ({"queue": "a", "tenant": "b"}, "tenant", "no queue 'b/a'"),
        ({"queue": "b", "gang": 5}, "gang", "may hold 32 at most: it could wait for ever"),
        ({"queue": "a", "deadline_ms": -1}, "deadline_ms", "must lie in"),
        ({"queue": "a", "tolerated_wait_s": -1}, "tolerated_wait_s", "must lie in"),
    ],
)
def test_requests_that_no_queue_can_serve_are_refused_at_the_door(
    world: QueueWorld, fields: dict[str, Any], field: str, why: str
) -> None:
    body = {"request_id": "x", "gpus_per_node": 8, **fields}
    for path in ("/queue", "/placements"):
        problem = world.ask("POST", path, 422, json=body)
        assert why in problem["detail"]
        assert problem["errors"][0]["field"] == field


def test_an_overdue_request_goes_first_in_its_queue(world: QueueWorld) -> None:
    world.beat(jobs={"old": range(16)})
    world.wait("first", "a", priority=5)
    world.wait("waits", "a", tolerated_wait_s=60)
    world.wait("late", "a", deadline_ms=NOW_MS + 2 * HOUR_MS)
    world.pass_()
    assert world.order() == ["first", "late", "waits"]
    world.beat(61_000)
    world.pass_()
    assert world.order() == ["waits", "first", "late"]
    world.beat(HOUR_MS)
    world.pass_()
    assert world.order() == ["late", "waits", "first"]


def test_what_a_file_honours_is_not_ignored(world: QueueWorld) -> None:
    said = world.ask(
        "POST", "/placements", json={"request_id": "p", "queue": "a", "class": "batch", "preemptible": True}
    )
    assert said["ignored"] == ["preemptible"]


def test_another_file_serves_when_it_is_good_and_the_old_one_when_it_is_not(world: QueueWorld) -> None:
    before = world.service.queues.file.generation
    world.rewrite("[queue.a]\nweigth = 3\n")
    world.beat()
    world.wait("b0", "b")
    assert world.service.queues.file.generation == before
    world.pass_()
    line = next(row for row in world.service.ledger.read_audit_trail(9) if row["action"] == "queues")
    assert "was refused" in line["sentence"]
    assert "line 2: queue.a.weigth" in line["sentence"]
    assert before in line["sentence"]
    world.rewrite("[queue.a]\n")
    world.beat()
    world.pass_()
    assert world.service.queues.file.generation != before
    assert (
        "serves, before it"
        in next(r for r in world.service.ledger.read_audit_trail(9) if r["action"] == "queues")["sentence"]
    )


def test_a_queue_that_is_gone_drains_and_takes_no_more(world: QueueWorld) -> None:
    for number in range(5):
        world.wait(f"b{number}", "b")
    assert world.pass_() == 4
    world.rewrite("[queue.a]\n")
    world.beat()
    world.pass_()
    (row,) = world.ask("GET", "/queue")["rows"]
    assert row["why"] == "queue 'b' takes no requests any more: it waits until the file names it again"
    world.wait("b9", "b", 422)
    held = {charge.leaf: charge.gpus for charge in world.service.ledger.charges.list_open_charges().values()}
    assert held == {"b": 8.0}
    assert len(world.service.ledger.charges.list_open_charges()) == 4


def test_a_bad_file_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 2: queue.a.weight: is -1"):
        QueueWorld(tmp_path, "[queue.a]\nweight = -1\n")


def test_reserved_and_closed_nodes_are_for_nobody_else(tmp_path: Path) -> None:
    windows = """
[queue.a]
[queue.b]
[[reservation]]
queue = "b"
nodes = {rack = "r01"}
from = 2020-05-12T19:30:00Z
to = 2020-05-13T00:00:00Z
[[maintenance]]
nodes = ["n09"]
from = 2020-05-12T18:00:00Z
to = 2020-05-13T00:00:00Z
"""
    world = QueueWorld(tmp_path, windows)
    world.board.publish()
    for number in range(9):
        world.wait(f"a{number}", "a", limit_s=HOUR_MS / 1000)
    world.wait("short", "a", limit_s=600)
    world.wait("b0", "b", limit_s=HOUR_MS / 1000)
    world.pass_()
    decided = {row["request_id"]: row for row in world.ask("GET", "/placements")["rows"]}
    nodes = {name: row["ranks"][0]["node"] for name, row in decided.items()}
    assert sum(name.startswith("a") for name in nodes) == 7
    assert all("n10" <= node <= "n16" for name, node in nodes.items() if name.startswith("a"))
    assert nodes["b0"] <= "n08"
    assert nodes["short"] <= "n08"
    world.close()


def test_the_queues_say_how_they_stand(world: QueueWorld) -> None:
    for number in range(5):
        world.wait(f"b{number}", "b")
    world.wait("c0", "c/users", user="ada")
    world.pass_()
    answer = world.ask("GET", "/queues")
    rows = {row["queue"]: row for row in answer["rows"]}
    assert list(rows) == ["a", "b", "c", "c/users", "c/users/ada"]
    assert answer["capacity"] == {"gpu": 128.0, "H100": 128.0}
    assert (rows["b"]["held"]["gpu"], rows["b"]["waiting"], rows["b"]["running"]) == (32.0, 1, 4)
    assert rows["b"]["borrowed"] == {"gpu": 32.0}
    assert (rows["c"]["lent"], rows["c"]["share"]) == ({}, 0.0)  # 112 GPUs are guaranteed to nobody
    assert rows["c/users/ada"]["parent"] == "c/users"
    assert rows["b"]["wait_s"] == {"p50": 0.0, "p90": 0.0}
    for number in range(11):
        world.wait(f"a{number}", "a")
    world.pass_()
    rows = {row["queue"]: row for row in world.ask("GET", "/queues")["rows"]}
    assert (rows["a"]["held"]["gpu"], rows["c"]["lent"]) == (88.0, {"gpu": 8.0})


def test_a_week_of_queues_is_told_by_day() -> None:
    day_ms = 86_400_000
    now_ms = 10 * day_ms

    def charge(leaf: str, begin_day: float, end_day: float | None, gpus: float) -> Charge:
        held_ms, ended_ms = round(begin_day * day_ms), None if end_day is None else round(end_day * day_ms)
        return Charge(1, "r", leaf, 1, leaf, "", "", (HeldGpus("p", "H100", gpus),), None, held_ms - 5000, held_ms,
                      held_ms, ended_ms)  # fmt: skip

    week = summarise_queue_week([charge("a", 3.5, 5, 8), charge("b/x", 4, 5, 8), charge("b/y", 8, None, 4)], now_ms)
    assert week.by_day["a"] == [1.0, 0.5, None, None, None, 0.0, 0.0]
    assert week.by_day["b"] == [0.0, 0.5, None, None, None, 1.0, 1.0]
    assert week.by_day["b/y"] == [0.0, 0.0, None, None, None, 1.0, 1.0]
    assert week.shares == {"a": 0.4286, "b": 0.5714, "b/x": 0.5, "b/y": 0.5}
    assert week.waits["b"] == {"p50": 5.0, "p90": 5.0}


def test_without_a_file_all_wait_in_one_line(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.board.publish()
    answer = QueueAdmin(world.service).answer_queues()
    assert answer.generation == ""
    assert "one line" in answer.notes[0]
    world.close()


def test_another_file_is_put_with_the_generation_of_the_one_before(world: QueueWorld) -> None:
    generation = world.ask("GET", "/queues")["generation"]
    text = FILE.replace("weight = 20", "weight = 30") + "[queue.d]\n"
    world.ask("PUT", "/queues", 422, content=text)
    stale = world.ask("PUT", "/queues", 409, content=text, headers={"if-match": "0123"})
    assert generation in stale["detail"]
    bad = world.ask("PUT", "/queues", 422, content="[queue.a]\nweight = -1", headers={"if-match": generation})
    assert bad["errors"][0]["field"] == "queue.a.weight"
    too_much = "[queue.a]\nguaranteed = {gpu = 129}\n"
    assert (
        "the fleet has 128" in world.ask("PUT", "/queues", 422, content=too_much, headers={"if-match": "*"})["detail"]
    )
    dry = world.ask("PUT", "/queues?dry_run=true", content=text, headers={"if-match": f'"{generation}"'})
    assert (dry["applied"], dry["added"], dry["changed"], dry["removed"]) == (False, ["d"], ["c"], [])
    assert world.ask("GET", "/queues")["generation"] == generation
    done = world.ask("PUT", "/queues", content=text, headers={"if-match": f'"{generation}"'})
    assert done["generation"] == dry["generation"] == world.ask("GET", "/queues")["generation"]
    assert world.file.read_text() == text
    world.restart()
    assert world.service.queues.file.generation == done["generation"]


def test_the_ladder_says_who_is_before_it_and_what_is_short(world: QueueWorld) -> None:
    for number in range(6):
        world.wait(f"b{number}", "b")
    world.pass_()
    world.beat(60_000, jobs={"old": range(16)})
    world.wait("a0", "a", gang=16, priority=1)
    world.wait("a1", "a")
    world.pass_()
    why = world.ask("GET", "/queue/a1/why")
    assert [step["code"] for step in why["ladder"]][:1] == ["before"]
    assert why["ladder"][0]["requests"] == ["a0"]
    assert (why["queue"], why["position_in_queue"]) == ("a", 2)
    limited = world.ask("GET", "/queue/b5/why")
    assert "limit" in [step["code"] for step in limited["ladder"]]
    assert any("no larger share: 'b' (share" in step["sentence"] for step in why["ladder"])
    world.ask("GET", "/queue/none/why", 404)


def test_charges_follow_the_job_events_and_survive_a_restart(world: QueueWorld) -> None:
    world.wait("a0", "a", job="j")
    world.pass_()
    node = int(world.ask("GET", "/placements/a0")["ranks"][0]["node"][1:]) - 1
    world.beat(20_000, jobs={"j": [node], "other": [15]})
    world.pass_()
    world.restart()
    world.beat(40_000, jobs={"other": [15]}, ended=[("j", 1, NOW_MS + 50_000)])
    world.pass_()
    rows = {row["name"]: row for row in world.ask("GET", "/charges")["rows"]}
    assert rows["a"]["jobs"] == 1
    assert rows["a"]["granted_gpu_s"] == 8 * 60.0
    assert rows[""]["granted_gpu_s"] == 8 * 60.0
    (closed,) = [
        charge for charge in world.service.ledger.charges.read_charges_between(0, NOW_MS * 2) if charge.leaf == "a"
    ]
    assert (closed.request_id, closed.user, closed.ended_ms) == ("a0", "", NOW_MS + 60_000)
    csv = world.ask("GET", "/charges?by=pool&format=csv").splitlines()
    assert csv[0].startswith("pool,jobs,granted_gpu_s")
    assert csv[1].startswith("train,2,")
    world.ask("GET", "/charges?from=5&to=5", 422)
    world.ask("GET", "/charges?by=planet", 422)


def test_a_promise_that_nobody_keeps_is_charged_until_it_expires(world: QueueWorld) -> None:
    world.wait("a0", "a")
    world.pass_()
    world.beat(400_000)
    world.pass_()
    (charge,) = world.service.ledger.charges.read_charges_between(0, NOW_MS * 2)
    assert (charge.outcome, charge.started_ms, charge.ended_ms) == ("expired", None, NOW_MS + 400_000)
    (row,) = world.ask("GET", "/charges")["rows"]
    assert (row["granted_gpu_s"], row["promised_gpu_s"]) == (0.0, 8 * 400.0)


def test_credits_are_kept_to_the_same_bytes_over_a_restart(tmp_path: Path) -> None:
    text = "[queue.a]\nguaranteed = {gpu = 64}\ncredits = {rate = 0.5, cap_gpu_h = 1000}\n[queue.b]\n"
    world = QueueWorld(tmp_path, text)
    world.board.publish()
    world.beat(HOUR_MS)
    world.wait("a0", "a")
    world.pass_()
    world.beat(HOUR_MS)
    before = world.ask("GET", "/queues")
    world.restart()
    assert world.ask("GET", "/queues") == before
    (banked,) = [row["banked"] for row in before["rows"] if row["queue"] == "a"]
    assert 0.9 < banked / (0.5 * (64 + 56) * 3600) < 1.0
    assert before["notes"] == []
    world.close()


def test_shortest_goes_by_gpus_times_limit_and_fifo_by_arrival(world: QueueWorld) -> None:
    world.beat(jobs={"old": range(16)})
    world.wait("wide", "a", gang=4, limit_s=600)
    world.beat()
    world.wait("long", "a", limit_s=6000)
    world.beat()
    world.wait("short", "a", limit_s=600)
    world.pass_()
    assert world.order() == ["wide", "long", "short"]
    world.rewrite(FILE.replace("fifo", "shortest"))
    world.beat()
    world.pass_()
    assert world.order() == ["short", "wide", "long"]


def test_a_queue_takes_no_more_than_may_wait(world: QueueWorld) -> None:
    world.rewrite("[queue.a]\nmax_waiting = 1\n[queue.b]\n")
    world.beat(jobs={"old": range(16)})
    world.pass_()
    world.wait("a0", "a")
    full = world.wait("a1", "a", 429)
    assert "queue 'a' has 1 request waiting, at most 1" in full["detail"]
    assert world.wait("a0", "a")["outcome"] == "queued"
    world.wait("b0", "b")


BAD = {
    "a cycle": ('[queue.a]\nparent = "b"\n[queue.b]\nparent = "a"\n', "line 4: queue.b.parent: is a cycle"),
    "too much": ("[queue.a]\nguaranteed = {gpu = 129}\n", "line 2: queue.a.guaranteed: the queues are guaranteed 129"),
    "negative": ("[queue.a]\nlimit = {gpu = -1}\n", "line 2: queue.a.limit: gpu is -1"),
    "no number": ("[queue.a]\nweight = nan\n", "line 2: queue.a.weight: is nan"),
    "infinite": ("[queue.a]\nguaranteed = {gpu = inf}\n", "line 2: queue.a.guaranteed: gpu is inf"),
    "many": ("".join(f"[queue.q{number}]\n" for number in range(10_001)), "there are 10,001 queues, at most 10,000"),
    "a million": ("[queue.a]\n" * 500_000, "at most 4,194,304 are read"),
    "no TOML": ("[queue.a\n", "no valid TOML"),
    "twice": ("[queue.a]\n[queue.a]\n", "no valid TOML"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_whole_by_both_doors_and_the_audit_has_both_hashes(world: QueueWorld, name: str) -> None:
    text, why = BAD[name]
    before = world.ask("GET", "/queues")
    serving = world.service.queues.file.tree
    assert serving is not None
    digest = hashlib.sha256(text.encode()).hexdigest()
    put = world.ask("PUT", "/queues", 422, content=text, headers={"if-match": before["generation"]})
    world.rewrite(text)
    world.beat()
    world.wait("a0", "a")
    answer = world.ask("GET", "/queues")
    assert why in answer["refused"]
    assert [row["queue"] for row in answer["rows"]] == ["a", "b", "c", "c/users"]
    assert (answer["generation"], world.service.queues.file.tree) == (before["generation"], serving)
    lines = [row["sentence"] for row in world.service.ledger.read_audit_trail(9) if row["action"] == "queues"]
    refused = [line for line in lines if digest in line and serving.digest in line and "was refused" in line]
    assert len(refused) == 2
    assert why in put["detail"]


def test_a_subtree_that_is_gone_is_told_and_its_jobs_run_on(world: QueueWorld) -> None:
    world.wait("c0", "c/users", user="ada")
    assert world.pass_() == 1
    world.rewrite("[queue.a]\nguaranteed = {gpu = 8}\n")
    world.beat()
    world.wait("a0", "a")
    world.pass_()
    world.beat()
    answer = world.ask("GET", "/queues")
    assert "a" in [row["queue"] for row in answer["rows"] if row["parent"] is None]
    assert {row["name"]: row["jobs"] for row in world.ask("GET", "/charges")["rows"]} == {"a": 1, "c/users/ada": 1}
    assert world.ask("GET", "/queue/a0/why", 404)
    world.restart()
    world.beat()
    assert world.ask("GET", "/queues")["rows"]


def test_guarantees_above_a_fleet_that_came_later_are_noted(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path, "[queue.a]\nguaranteed = {gpu = 200}\n")  # nobody knows the fleet yet
    world.board.publish()
    (note,) = world.ask("GET", "/queues")["notes"]
    assert note.startswith("line 2: queue.a.guaranteed: the queues are guaranteed 200 GPUs, the fleet has 128")
    world.close()


def test_a_file_that_another_process_writes_is_read_once_it_has_stood_still(
    world: QueueWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(queue_file, "monotonic", lambda: now_s)
    world.step()
    for text in ("", "[queue.a]\n[que", "[queue.a]\n[queue.b]\n"):  # as a writer in place leaves it for moments
        world.file.write_text(text)
        for _ in range(2):
            now_s += queue_file.STILL_S / 3
            world.step()
        assert world.service.queues.file.text == FILE
    now_s += queue_file.STILL_S
    world.step()
    assert world.service.queues.file.text == text
    assert not any("refused" in row["sentence"] for row in world.service.ledger.read_audit_trail(100))


def test_a_gpu_that_is_out_today_makes_no_file_of_queues_wrong(tmp_path: Path) -> None:
    text = "[queue.a]\nguaranteed = {gpu = 128}\n"
    world = QueueWorld(tmp_path, text)
    world.board.broken = [(3, 5)]
    world.board.publish()
    before = world.ask("GET", "/queues")
    assert (before["notes"], before["capacity"]["gpu"]) == ([], 127.0)
    world.ask("PUT", "/queues", content=f"{text}weight = 2\n", headers={"if-match": before["generation"]})
    world.close()


def test_who_is_guaranteed_any_gpus_borrows_none_of_a_model(tmp_path: Path) -> None:
    world = QueueWorld(tmp_path, "[queue.a]\nguaranteed = {gpu = 16}\n[queue.b]\nguaranteed = {H100 = 8}\n")
    world.board.publish()
    for number in range(3):
        world.wait(f"a{number}", "a")
        world.wait(f"b{number}", "b")
    world.pass_()
    rows = {row["queue"]: row["borrowed"] for row in world.ask("GET", "/queues")["rows"]}
    assert rows == {"a": {"gpu": 8.0}, "b": {"H100": 16.0}}
    world.close()
