"""The typed client: what it asks, how often, and what goes wrong."""

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.sdk.door import Door, opened

from fleetcast_client import ApiError, Client, NotAllowed, NotFound, Unreachable  # isort: skip


@pytest.fixture
def door() -> Iterator[Door]:
    with opened(Door(answer={"rows": [], "as_of_ms": 1})) as made:
        yield made


def test_every_function_asks_its_route(door: Door) -> None:
    client = Client(door.url + "/", token="t")
    client.risk(horizon_s=86400, least=0.2, rack="r 1")
    client.node("n/1")
    client.fleet()
    client.demand(pool="train", job_class="training")
    client.demand_record(target="queued")
    client.demand_model(pool="train")
    client.models()
    client.jobs(state="running", limit=5)
    client.job("team/a")
    client.stragglers("team/a")
    client.estimate({"request_id": "a"})
    client.queue()
    client.queues()
    client.why("a/b")
    client.charges(by="user")
    client.wait({"request_id": "a"})
    client.leave("a/b")
    client.place({"request_id": "a"})
    client.release("a/b")
    client.events([{"job": "a"}])
    assert door.paths == [
        "GET /v1/risk/nodes?horizon_s=86400&min=0.2&rack=r+1",
        "GET /v1/nodes/n%2F1",
        "GET /v1/fleet",
        "GET /v1/demand?pool=train&class=training",
        "GET /v1/demand/record?pool=all&target=queued&class=all",
        "GET /v1/demand/model?pool=train",
        "GET /v1/models",
        "GET /v1/jobs?state=running&limit=5",
        "GET /v1/jobs/team/a",
        "GET /v1/jobs/team/a/stragglers",
        "POST /v1/jobs/estimate",
        "GET /v1/queue",
        "GET /v1/queues",
        "GET /v1/queue/a%2Fb/why",
        "GET /v1/charges?by=user",
        "POST /v1/queue",
        "DELETE /v1/queue/a%2Fb",
        "POST /v1/placements",
        "DELETE /v1/placements/a%2Fb",
        "POST /v1/events",
    ]
    assert set(door.tokens) == {"Bearer t"}


@pytest.mark.parametrize(("status", "kind"), [(401, NotAllowed), (403, NotAllowed), (404, NotFound), (422, ApiError)])
def test_problems_are_errors_with_the_services_words(door: Door, status: int, kind: type[ApiError]) -> None:
    door.script = [status]
    with pytest.raises(kind) as caught:
        Client(door.url).node("x")
    assert (caught.value.status, caught.value.code, caught.value.detail) == (status, "told", "as told")
    assert len(door.paths) == 1


def test_a_service_that_is_away_is_asked_again(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("fleetcast_client.client.time", SimpleNamespace(sleep=pauses.append))
    door.script = [503, 502]
    assert Client(door.url).jobs()["rows"] == []
    assert len(door.paths) == 3
    door.script = [503, 503, 503]
    with pytest.raises(ApiError):
        Client(door.url).place({"request_id": "a"})
    assert len(door.paths) == 6
    assert pauses == [0.2, 0.4] * 2


def test_giving_back_is_tried_once(door: Door) -> None:
    door.script = [503]
    with pytest.raises(ApiError):
        Client(door.url).release("a")
    assert len(door.paths) == 1


def test_nobody_there_is_unreachable() -> None:
    with pytest.raises(Unreachable, match="does not answer"):
        Client("http://127.0.0.1:9", tries=1).fleet()


def test_a_hanging_service_is_given_up(door: Door) -> None:
    door.opens = threading.Event()
    with pytest.raises(Unreachable):
        Client(door.url, timeout_s=0.05, tries=1).fleet()
    door.opens.set()


def test_no_token_follows_a_redirect(door: Door) -> None:
    door.script = [302]
    door.answer = {"detail": "elsewhere"}
    with pytest.raises(ApiError) as caught:
        Client(door.url, token="t").fleet()
    assert caught.value.status == 302
    assert len(door.paths) == 1


@pytest.mark.parametrize("url", ["", "fleetcast:8080", "ftp://x"])
def test_a_bad_url_is_said_at_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLEETCAST_URL", raising=False)
    with pytest.raises(ValueError, match="expected something like"):
        Client(url)


def test_an_answer_that_is_no_json_is_no_answer(monkeypatch: pytest.MonkeyPatch, door: Door) -> None:
    monkeypatch.setattr(json, "dumps", lambda value: "<html>")
    with pytest.raises(Unreachable, match="no JSON"):
        Client(door.url, tries=1).fleet()
