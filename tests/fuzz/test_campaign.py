"""The campaign of requests: a piece of it, that it can be repeated and resumed, and that it finds what is planted."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fleetcast.service.http.problems import MEDIA_TYPE
from fleetcast.service.placer.http import ROWS
from tests.fuzz import campaign
from tests.fuzz.asgi import Answered, Asked, Unlawful, ask
from tests.fuzz.asked import PLACER
from tests.fuzz.bounds import EFFORT
from tests.fuzz.campaign import Progress, ask_one, requests_of, run_epoch, watch_memory
from tests.fuzz.house import House
from tests.fuzz.law import check

GET, POST = Asked("GET", "/v1/fleet"), Asked("POST", "/v1/placements")
JSON = {"content-type": "application/json"}


def test_no_request_gets_an_unlawful_answer() -> None:
    progress = Progress(seed=3)
    asked = asyncio.run(run_epoch(progress, epoch=0, upto=round(5000 * EFFORT)))
    assert asked == round(5000 * EFFORT)
    assert not progress.findings
    assert {"200", "202", "404", "422"} <= progress.statuses.keys()


def test_every_route_of_the_placer_is_asked() -> None:
    made = {(row.method, re.sub(r"{.*}", "{name}", row.path)) for row in ROWS}
    assert {(known.method, known.path) for known in PLACER if known.path != "/nowhere"} == made


def first(seed: int, epoch: int, count: int = 200) -> list[Asked]:
    return [asked for asked, _ in zip(requests_of(seed, epoch), range(count), strict=False)]


def test_a_seed_and_an_epoch_make_the_same_requests_again() -> None:
    assert first(1, 0) == first(1, 0)
    assert first(1, 0) != first(1, 1)
    assert first(1, 0) != first(2, 0)


def test_a_campaign_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, epochs = tmp_path / "var" / "fuzz.json", list[tuple[int, int]]()

    async def asked(progress: Progress, epoch: int, upto: int, until_s: float) -> int:
        epochs.append((epoch, upto))
        return min(upto, 10_000)

    monkeypatch.setattr(campaign, "run_epoch", asked)
    for upto in (15_000, 35_000, 35_000):
        campaign.campaign(Progress.load(kept, 1), upto, 60, kept)
    assert [epoch for epoch, _ in epochs] == [0, 1, 2, 3]
    assert Progress.load(kept, 1).requests == 35_000
    assert Progress.load(kept, 2).requests == 0


def problem(status: int, /, **more: Any) -> bytes:
    title = {404: "Not Found", 429: "Too Many Requests", 503: "Service Unavailable", 500: "Internal Server Error"}[
        status
    ]
    told = {"type": "urn:fleetcast:problem:x", "title": title, "status": status, "detail": "d", "instance": "/"}
    return json.dumps(told | more).encode()


TYPED = {"content-type": MEDIA_TYPE}
PLACED = {"nodes": 2, "candidates": 1, "rejected": {"busy": 1}, "outcome": "placed"}
TWICE = [{"rank": 0, "node": "a", "gpus": [0]}, {"rank": 1, "node": "a", "gpus": [0]}]


@pytest.mark.parametrize(
    ("asked", "answered", "word"),
    [
        (GET, Answered(500, TYPED, problem(500)), "status 500"),
        (GET, Answered(307, {"location": "/x"}), "status 307"),
        (GET, Answered(404, JSON, problem(404)), "of type"),
        (GET, Answered(404, TYPED, b"nothing"), "no JSON"),
        (GET, Answered(404, TYPED, problem(404, status=200)), "no problem of status 404"),
        (GET, Answered(404, TYPED, problem(404, detail="")), "without type, detail"),
        (GET, Answered(404, TYPED, problem(404, detail="x" * 30_000)), "a problem of"),
        (GET, Answered(503, TYPED, problem(503)), "without retry-after"),
        (GET, Answered(429, TYPED, problem(429)), "without retry-after"),
        (GET, Answered(200, JSON, b'{"p": NaN}'), "no JSON"),
        (GET, Answered(200, JSON, b'"\xff"'), "no JSON"),
        (GET, Answered(200, JSON | {"content-length": "3"}, b"{}", is_whole=True), "content-length 3"),
        (GET, Answered(200, JSON | {"x": "a\r\nb"}, b"{}"), "header x"),
        (GET, Answered(204, {}, b"{}"), "a 204 with"),
        (POST, Answered(200, JSON, json.dumps(PLACED | {"nodes": 3}).encode()), "3 nodes"),
        (POST, Answered(200, JSON, json.dumps(PLACED | {"ranks": TWICE}).encode()), "a GPU twice"),
    ],
)
def test_the_law_can_be_broken(asked: Asked, answered: Answered, word: str) -> None:
    with pytest.raises(Unlawful, match=word):
        check(asked, answered)


def test_what_is_right_is_lawful() -> None:
    for asked, answered in (
        (GET, Answered(404, TYPED, problem(404))),
        (GET, Answered(503, TYPED | {"retry-after": "2"}, problem(503))),
        (GET, Answered(200, JSON | {"content-length": "2"}, b"{}", is_whole=True)),
        (Asked("HEAD", "/"), Answered(200, JSON | {"content-length": "9"}, b"", is_whole=True)),
        (POST, Answered(200, JSON, json.dumps(PLACED | {"ranks": TWICE[:1]}).encode())),
        (GET, Answered()),
    ):
        check(asked, answered)


async def raises(scope: Any, receive: Any, send: Any) -> None:
    raise KeyError("planted")


async def silent(scope: Any, receive: Any, send: Any) -> None:
    return


async def twice(scope: Any, receive: Any, send: Any) -> None:
    for _ in range(2):
        await send({"type": "http.response.start", "status": 200, "headers": []})


async def hangs(scope: Any, receive: Any, send: Any) -> None:
    while True:
        sum(range(10_000))


class Planted:
    """A service whose api has a bug."""

    def __init__(self, api: Any) -> None:
        self.api = self.placer = api


@pytest.mark.parametrize(
    ("app", "kind"), [(raises, "KeyError"), (silent, "no whole"), (twice, "answered twice"), (hangs, "Hangs")]
)
def test_a_planted_bug_is_found_once_and_told_where(app: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "CPU_S", 0.2)
    progress = Progress(1)

    async def both() -> None:
        for index in range(2):
            await ask_one(progress, f"1:0:{index}", Planted(app), GET)  # type: ignore[arg-type]

    with campaign._ended_when_it_hangs():
        asyncio.run(both())
    (found,) = progress.findings
    assert kind in found.kind
    assert found.place == "1:0:0"
    assert "/v1/fleet" in found.asked


def test_memory_that_grows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(1)
    watch_memory(progress)
    assert not progress.findings
    monkeypatch.setattr(campaign, "peak_bytes", lambda: progress.base_bytes + 2**30)
    watch_memory(progress)
    assert [found.kind for found in progress.findings] == ["memory"]


def test_what_ends_the_pipeline_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, count = House.tick, iter(range(1000))

    async def breaks_once(service: House) -> None:
        if next(count) == 1:
            raise ZeroDivisionError("planted")
        await ticks(service)

    monkeypatch.setattr(House, "tick", breaks_once)
    monkeypatch.setattr(campaign, "TICK_EVERY", 5)
    progress = Progress(1)
    asyncio.run(run_epoch(progress, 0, 6))
    (found,) = progress.findings
    assert found.kind == "tick ZeroDivisionError planted"
    assert found.place == "1:0:4"


def test_a_client_that_leaves_gets_no_answer_and_is_no_finding() -> None:
    asked = Asked("POST", "/", chunks=(b"{",), leaves=True)
    assert asyncio.run(ask(silent, asked)) == Answered()
