"""A caller who is bound to queues reads what is theirs from the placer, and learns nothing of others."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.http.access import Access, load_access, parse_subjects, parse_tokens
from service.placer.http import make_app
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
    assert (caller.queues, caller.sees("research/nlp/ada"), caller.sees("research")) == (
        ("research/nlp", "b"),
        True,
        False,
    )
    told = {"authorization": "Bearer the-link", "x-fleetcast-caller": "read lead.example"}
    placer = Access(subjects={"lead.example": caller}, link="the-link", heeds_link=True)
    raw = [(name.encode(), value.encode()) for name, value in {**told, "x-fleetcast-queues": "research/nlp,b"}.items()]
    assert placer.check("GET", raw, None, by_queue=True) == caller
    with pytest.raises(Exception, match="expected some of the scopes"):
        load_access("127.0.0.1", {}, {"x": ["queues=a"]})
