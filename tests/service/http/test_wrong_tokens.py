"""Wrong tokens are counted and slowed by address; right ones are never held up."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from fleetcast.service.api.hot_path import HotPath
from fleetcast.service.http import access as door
from fleetcast.service.http.access import Access, parse_tokens
from fleetcast.service.http.wrong_tokens import BURST, LATE_S, MOST_ADDRESSES, REFILL_S, WrongTokens
from tests.service.api_world import NOW_MS, config, publish

TOKEN = "0123456789abcdef"
RIGHT, WRONG = {"authorization": f"Bearer {TOKEN}"}, {"authorization": "Bearer fedcba9876543210"}


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long whoever guesses was held up; it takes no time."""
    seconds: list[float] = []

    async def sleep(wait_s: float) -> None:
        seconds.append(wait_s)

    monkeypatch.setattr(door.asyncio, "sleep", sleep)
    return seconds


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    publish(tmp_path)
    access = Access(parse_tokens(f"reader read {TOKEN}", "the test"))
    access.wrong_tokens = WrongTokens(lambda: 0.0)
    return create_app(config(tmp_path), ManualClock(NOW_MS), access=access)


def ask(app: FastAPI, *requests: tuple[str, dict[str, str]], path: str = "/v1/fleet") -> list[httpx.Response]:
    """The answers to requests from the addresses and with the headers given, one after the other."""

    async def work() -> list[httpx.Response]:
        answers = []
        for host, headers in requests:
            transport = httpx.ASGITransport(app, client=(host, 1234))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                answers.append(await client.get(path, headers=headers))
        return answers

    return asyncio.run(work())


def counts(app: FastAPI) -> Iterator[tuple[str, int]]:
    for line in app.state.context.metrics.make_page().splitlines():
        if line.startswith("fleetcast_api_auth_failures_total"):
            yield line.split('"')[1], round(float(line.split()[-1]))


def test_some_wrong_tokens_are_forgiven_and_then_each_is_told_late(app: FastAPI, slept: list[float]) -> None:
    answers = ask(app, *[("10.0.0.7", WRONG)] * (int(BURST) + 3))
    assert [answer.status_code for answer in answers] == [401] * int(BURST) + [429] * 3
    assert answers[-1].headers["retry-after"] == f"{REFILL_S:.0f}"
    assert answers[-1].json()["type"] == "urn:fleetcast:problem:too_many_tokens"
    assert slept == [LATE_S] * 3
    assert dict(counts(app)) == {"missing": 0, "unknown": BURST, "slowed": 3, "subject": 0, "scope": 0}


def test_a_right_token_from_the_same_address_is_never_held_up(app: FastAPI, slept: list[float]) -> None:
    ask(app, *[("10.0.0.7", WRONG)] * 50)
    slept.clear()
    right, other = ask(app, ("10.0.0.7", RIGHT), ("10.0.0.8", WRONG))
    assert (right.status_code, other.status_code, slept) == (200, 401, [])


def test_who_has_no_token_or_not_the_scope_guesses_nothing(app: FastAPI, slept: list[float]) -> None:
    answers = ask(app, *[("10.0.0.7", {})] * 30) + ask(app, *[("10.0.0.7", RIGHT)] * 30, path="/v1/audit")
    assert [answer.status_code for answer in answers] == [401] * 30 + [403] * 30
    assert slept == []
    assert dict(counts(app)) == {"missing": 30, "unknown": 0, "slowed": 0, "subject": 0, "scope": 30}


def test_the_hot_path_counts_nothing_twice(app: FastAPI) -> None:
    head = b"GET /v1/nodes/n002 HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer fedcba9876543210\r\n\r\n"
    assert HotPath(app.state.context).answer_request(head) is None
    assert dict(counts(app))["unknown"] == 0


def test_a_route_added_with_decorators_counts_too(app: FastAPI, slept: list[float]) -> None:
    app.get("/v1/extra")(lambda: {"fine": True})
    app.router.routes.insert(0, app.router.routes.pop())
    answers = ask(app, *[("10.0.0.7", WRONG)] * 12, path="/v1/extra")
    assert [answer.status_code for answer in answers] == [401] * 10 + [429] * 2


def test_what_was_taken_flows_back_with_time() -> None:
    now_s = [0.0]
    wrong = WrongTokens(lambda: now_s[0])
    assert [wrong.count_wrong_token("10.0.0.7") for _ in range(12)] == [None] * 10 + [REFILL_S] * 2
    now_s[0] = 2.5 * REFILL_S
    assert [wrong.count_wrong_token("10.0.0.7") for _ in range(3)] == [None, None, REFILL_S / 2]
    now_s[0] = 1e9
    assert [wrong.count_wrong_token("10.0.0.7") for _ in range(11)] == [None] * 10 + [REFILL_S]


def test_the_table_is_bounded_and_forgets_who_was_heard_of_longest_ago() -> None:
    wrong = WrongTokens(lambda: 0.0)
    for _ in range(11):
        wrong.count_wrong_token("10.0.0.7")
    for number in range(3 * MOST_ADDRESSES):
        wrong.count_wrong_token(f"11.{number >> 16}.{number >> 8 & 255}.{number & 255}")
        if number % 1000 == 0:
            assert wrong.count_wrong_token("10.0.0.7") is not None  # it goes on, so it is not forgotten
    assert len(wrong) == MOST_ADDRESSES
