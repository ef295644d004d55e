"""A caller who is bound to queues reads what is theirs from the placer, and learns nothing of others."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.service.http.access import Access, load_access, parse_subjects, parse_tokens
from fleetcast.service.placer import own_numbers
from fleetcast.service.placer.http import make_app
from tests.service.placer.test_queues import QueueWorld

TOKENS = """
boss admin 0123456789abcdefgh
lead read 123456789abcdefghi queues=a
users read 23456789abcdefghij queues=c
"""
ACCESS = Access(parse_tokens(TOKENS, "test"))
BOSS, LEAD, USERS = (
    {"authorization": f"Bearer {token}"} for token in ("0123456789abcdefgh", "123456789abcdefghi", "23456789abcdefghij")
)


@pytest.fixture
def world(tmp_path: Path) -> Any:
    world = QueueWorld(tmp_path)
    world.board.publish()
    for number in range(2):
        world.wait(f"a{number}", "a", job=f"own-{number}")
    for number in range(6):
        world.wait(f"foreign-{number}", "b", job=f"foreign-job-{number}")
    world.wait("c0", "c/users", user="ada")
    world.pass_()
    world.beat(60_000)
    world.wait("a-waits", "a", gang=16)
    world.wait("c-waits", "c/users", user="ada", gang=15)
    world.pass_()
    world.app = make_app(world.service, access=ACCESS)
    yield world
    world.close()


def test_queues_charges_requests_and_audit_are_his_alone(world: QueueWorld) -> None:
    def names(path: str, key: str, who: dict[str, str]) -> list[str]:
        return sorted({row[key] for row in world.ask("GET", path, headers=who)["rows"]})

    assert names("/queues", "queue", LEAD) == ["a"]
    assert names("/queues", "queue", USERS) == ["c", "c/users", "c/users/ada"]
    assert names("/charges", "name", LEAD) == ["a"]
    assert names("/charges?by=pool", "name", LEAD) == ["train"]
    own = world.ask("GET", "/charges?by=pool", headers=LEAD)["rows"][0]["promised_gpu_s"]
    assert 0 < own < world.ask("GET", "/charges?by=pool", headers=BOSS)["rows"][0]["promised_gpu_s"]
    assert names("/placements", "request_id", LEAD) == ["a0", "a1"]
    assert names("/queue", "request_id", LEAD) == ["a-waits"]
    assert names("/audit", "request_id", LEAD) == ["a-waits", "a0", "a1"]
    assert "foreign-0" in names("/audit", "request_id", BOSS)
    assert world.ask("GET", "/placements/a0", headers=LEAD)["outcome"] == "placed"


@pytest.mark.parametrize("path", ["/placements/foreign-0", "/queue/foreign-5/why", "/queue/c-waits/why"])
def test_what_is_of_others_is_as_absent_as_what_nobody_sent(world: QueueWorld, path: str) -> None:
    other = world.ask("GET", path, 404, headers=LEAD)
    nobody = world.ask("GET", path.replace("foreign-", "nobody").replace("c-waits", "nobody"), 404, headers=LEAD)
    assert other["title"] == nobody["title"]
    assert other["detail"].startswith("no request ")
    assert world.ask("GET", path, headers=BOSS)


def test_no_answer_names_a_request_a_job_or_a_user_of_others(world: QueueWorld) -> None:
    for path in ("/queues", "/charges", "/queue", "/queue/a-waits/why", "/placements", "/audit"):
        text = msgspec.json.encode(world.ask("GET", path, headers=LEAD)).decode()
        for foreign in ("foreign", '"b"', "'b'", "ada", "c-waits", "c/users"):
            assert foreign not in text, path
    why = world.ask("GET", "/queue/a-waits/why", headers=LEAD)
    assert "waits for 128 GPUs" in [step["sentence"] for step in why["ladder"]]


@pytest.mark.parametrize("path", ["/fragmentation", "/metrics"])
def test_what_tells_of_the_whole_fleet_is_refused(world: QueueWorld, path: str) -> None:
    assert "lead reads of a alone" in world.ask("GET", path, 403, headers=LEAD)["detail"]


def test_a_certificate_is_bound_in_the_same_way_and_the_api_says_so() -> None:
    (caller,) = parse_subjects({"lead.example": ["read", "queues=research/nlp,b"]}).values()
    assert (caller.queues, caller.may_read_queue("research/nlp/ada"), caller.may_read_queue("research")) == (
        ("research/nlp", "b"),
        True,
        False,
    )
    told = {"authorization": "Bearer the-link", "x-fleetcast-caller": "read lead.example"}
    placer = Access(subjects={"lead.example": caller}, link="the-link", heeds_link=True)
    raw = [(name.encode(), value.encode()) for name, value in {**told, "x-fleetcast-queues": "research/nlp,b"}.items()]
    assert placer.authorize("GET", raw, None, by_queue=True) == caller
    with pytest.raises(Exception, match="expected some of the scopes"):
        load_access("127.0.0.1", {}, {"x": ["queues=a"]})


class Tenants:
    """The same requests of tenant `a` in two worlds: alone, and among others whose number a seed chooses."""

    def __init__(self, folder: Path, seed: int, others: bool) -> None:
        folder.mkdir()
        self.world = QueueWorld(folder)
        self.world.board.jobs = {"old": range(16)}  # no GPU is free: what is placed depends on nobody
        self.world.board.publish()
        draw = random.Random(seed)
        for number in range(9):
            for foreign in range(draw.randint(0, 4)):
                queue, waits = draw.choice(["b", "c/users"]), draw.random() < 0.5
                if others:
                    self._one(f"x{number}-{foreign}", queue, waits)
            self._one(f"a{number}", "a", False)
        self.world.pass_()
        if others:
            self.world.wait("x-late", "b", gang=4, priority=9)
        self.world.wait("a-late", "a", gang=16)
        self.world.wait("a-later", "a", gang=16)
        if others:
            self.world.wait("x-last", "c/users", user="ada", gang=15, priority=9)
        self.world.pass_()
        self.world.app = make_app(self.world.service, access=ACCESS)

    def _one(self, name: str, queue: str, waits: bool) -> None:
        """A request that holds no GPU: refused at once, or withdrawn while it waits."""
        if waits:
            self.world.wait(name, queue, user="ada", priority=3)
            self.world.ask("DELETE", f"/queue/{name}")
            return
        body = {"request_id": name, "queue": queue, "user": "ada", "gpus_per_node": 9}
        self.world.ask("POST", "/placements", json=body)

    def pages(self, path: str, key: str, limit: int) -> list[list[Any]]:
        """All pages, by the cursor of each, as (number, request) of their rows."""
        found, after = [], 0
        while True:
            answer = self.world.ask("GET", f"{path}?limit={limit}&after={after}", headers=LEAD)
            found.append([[row[key], row["request_id"], row.get("sentence")] for row in answer["rows"]])
            if not answer["rows"]:
                return [*found, [answer.get("cursor"), answer.get("head")]]
            after = answer["rows"][-1][key]
            assert answer.get("cursor", after) == after

    def answers(self) -> dict[str, Any]:
        """All that the lead of `a` reads, but for times and what forecasts and nodes say."""
        ask = self.world.ask
        found: dict[str, Any] = {}
        for limit in (1, 2, 3, 100):
            found[f"placements {limit}"] = self.pages("/placements", "cursor", limit)
            found[f"audit {limit}"] = self.pages("/audit", "audit_id", limit)
            newest = ask("GET", f"/audit?limit={limit}", headers=LEAD)
            found[f"newest {limit}"] = [[row["audit_id"], row["request_id"], row["hash"]] for row in newest["rows"]]
        found["one"] = [row["audit_id"] for row in ask("GET", "/audit?request_id=a3&after=1", headers=LEAD)["rows"]]
        queue = ask("GET", "/queue", headers=LEAD)
        found["queue"] = [[row["request_id"], row["position"], row["why"]] for row in queue["rows"]]
        found["sums"] = {key: value for key, value in queue.items() if key not in ("as_of_ms", "rows")}
        why = ask("GET", "/queue/a-later/why", headers=LEAD)
        found["why"] = [why["position"], why["position_in_queue"], why["ladder"]]
        found["reply"] = ask("GET", "/placements/a-late", headers=LEAD)["sentence"]
        for row in ask("GET", "/queues", headers=LEAD)["rows"]:
            found[f"queue {row['queue']}"] = [row["waiting"], row["running"], row["share_7d"], row["share_days"]]
        return found


@pytest.mark.parametrize("seed", range(6))
def test_a_bound_caller_reads_the_same_with_and_without_other_tenants(tmp_path: Path, seed: int) -> None:
    alone, among = (Tenants(tmp_path / name, seed, others) for name, others in (("alone", False), ("among", True)))
    try:
        seen, expected = among.answers(), alone.answers()
        for name, answer in expected.items():
            assert seen[name] == answer, name
        assert len(among.world.ask("GET", "/audit?limit=1000", headers=BOSS)["rows"]) > len(
            alone.world.ask("GET", "/audit?limit=1000", headers=BOSS)["rows"]
        )
    finally:
        alone.world.close()
        among.world.close()


def test_a_bound_caller_gets_as_many_rows_of_its_own_as_it_asks_for(world: QueueWorld) -> None:
    for path, key in (("/audit", "audit_id"), ("/placements", "cursor")):
        rows = world.ask("GET", f"{path}?limit=2&after=0", headers=LEAD)["rows"]
        assert [(row["request_id"], row[key]) for row in rows] == [("a0", 1), ("a1", 2)]
    newest = world.ask("GET", "/audit?limit=1", headers=LEAD)["rows"]
    assert [row["request_id"] for row in newest] == ["a-waits"]


def test_own_rows_are_found_in_batches_and_followed(world: QueueWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_numbers, "BATCH", 3)

    def names() -> list[str]:
        return [row["request_id"] for row in world.ask("GET", "/audit?after=0&limit=1000", headers=LEAD)["rows"]]

    before = names()
    for number in range(7):
        for name, queue in ((f"new-{number}", "a"), (f"foreign-new-{number}", "b")):
            body = {"request_id": name, "queue": queue, "gpus_per_node": 8}
            world.ask("POST", "/queue", 202, json=body, headers=BOSS)
    assert names() == [*before, *(f"new-{number}" for number in range(7))]
