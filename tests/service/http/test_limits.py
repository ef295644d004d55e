"""Bounds on names at the door: 429 says which one was met; what is known always goes on."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.ingest.inbox.inbox import read_newest_events
from fleetcast.service.api.app import create_app
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.config import Config, LimitsConfig
from fleetcast.service.http.access import Access, parse_tokens
from tests.service import api_world
from tests.service.api_world import NOW_MS, Client

HOLD_S = 0.01
LIMITS = LimitsConfig(live_jobs=4, unknown_nodes=2, names_per_minute=60, names_at_once=8)
TOKENS = "ada events aaaaaaaaaaaaaaaaaaaa\nbob events bbbbbbbbbbbbbbbbbbbb"
ADA, BOB = ({"authorization": f"Bearer {letter * 20}"} for letter in "ab")


def config(folder: Path, limits: LimitsConfig = LIMITS) -> Config:
    return msgspec.structs.replace(api_world.config(folder), limits=limits)


def publish(folder: Path, as_of_ms: int, live: Sequence[str], unknown: int = 0) -> None:
    """A board of a fleet where these attempts wait, run or ended lately, and so many nodes are of no topology."""
    limits = {"live_jobs": {"used": len(live), "most": 4}, "unknown_nodes": {"used": unknown, "most": 2}}
    ingestion = {**api_world.documents()["doc.ingestion"], "limits": limits}
    rows = {
        "names.live": "\n".join(live).encode(),
        "names.node": b"n001\nn002\nn003.cluster.example",
        "doc.ingestion": msgspec.json.encode(ingestion),
    }
    sections = [Section(name, data, as_of_ms) for name, data in rows.items()]
    BoardWriter(folder / "board").publish([*api_world.sections(as_of_ms), *sections], as_of_ms)
    time.sleep(2 * HOLD_S)  # an api that has just looked at the board looks again


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def client(tmp_path: Path, clock: ManualClock) -> Iterator[Client]:
    publish(tmp_path, NOW_MS, ["1 old", "1 other"])
    with Client(create_app(config(tmp_path), clock, access=Access())) as made:
        yield made


def submitted(*jobs: str, sequence: int = 1) -> list[dict[str, Any]]:
    return [{"job": job, "sequence": sequence, "time_ms": NOW_MS, "type": "submitted"} for job in jobs]


def drained(*nodes: str) -> list[dict[str, Any]]:
    return [{"node": node, "source": "s", "sequence": 1, "time_ms": NOW_MS, "type": "drain"} for node in nodes]


def kept(folder: Path) -> list[str]:
    return [
        getattr(event, "job", "") or getattr(event, "node", "") for event in read_newest_events(folder / "inbox", 1000)
    ]


def refused(answer: httpx.Response) -> dict[str, int]:
    """New names by the bound that refused them."""
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    problem = answer.json()
    assert problem["type"].endswith("too_many_names")
    assert all(f"limits.{bound} = " in problem["detail"] for bound in problem["limits"])
    limits: dict[str, int] = problem["limits"]
    return limits


def test_new_jobs_beyond_the_bound_are_refused_and_what_is_known_goes_on(client: Client, tmp_path: Path) -> None:
    end = {"job": "old", "sequence": 9, "time_ms": NOW_MS, "type": "finished"}
    body = [*submitted("a", "b", "c"), *submitted("c", sequence=2), end]
    answer = client.post("/v1/events", json=body)
    assert refused(answer) == {"live_jobs": 1}
    assert answer.json()["detail"].startswith("limits.live_jobs = 4, 4 are used: 1 new name was refused")
    assert answer.json()["accepted"] == 3
    assert kept(tmp_path) == ["a", "b", "old"], "no event of the refused job is kept, nor one of the others lost"
    assert client.post("/v1/events", json=[{**end, "sequence": 10}]).status_code == 202
    assert client.post("/v1/events", json=submitted("a", sequence=7)).status_code == 202


def test_a_body_sent_again_loses_nothing_and_keeps_nothing_twice(client: Client, tmp_path: Path) -> None:
    body = submitted("a", "b", "c")
    assert refused(client.post("/v1/events", json=body)) == {"live_jobs": 1}
    assert refused(client.post("/v1/events", json=body)) == {"live_jobs": 1}
    publish(tmp_path, NOW_MS + 1000, ["1 a", "1 b", "1 other"])
    again = client.post("/v1/events", json=body)
    assert (again.status_code, again.json()["accepted"], again.json()["duplicates"]) == (202, 1, 2)
    assert kept(tmp_path) == ["a", "b", "c"]


def test_a_name_that_no_board_shows_makes_room_after_a_minute(client: Client, tmp_path: Path) -> None:
    assert client.post("/v1/events", json=submitted("a", "b")).status_code == 202
    publish(tmp_path, NOW_MS + 59_000, ["1 old", "1 other"])
    assert refused(client.post("/v1/events", json=submitted("c"))) == {"live_jobs": 1}
    publish(tmp_path, NOW_MS + 61_000, ["1 old", "1 other"])
    assert client.post("/v1/events", json=submitted("c")).status_code == 202


def test_unknown_nodes_are_bounded_and_known_ones_go_by_all_their_names(client: Client, tmp_path: Path) -> None:
    known = ("n001", "n002.cluster.example", "n003", "n003.cluster.example")
    answer = client.post("/v1/events", json=drained("x", "y", "z", *known))
    assert refused(answer) == {"unknown_nodes": 1}
    assert kept(tmp_path) == ["x", "y", *known]
    lines = "2025-10-09T08:00:00+0000 {} kernel: NVRM: Xid (PCI:0000:9b:00): 79, GPU has fallen off the bus."
    assert refused(client.post("/v1/kernel-log", content=lines.format("w"))) == {"unknown_nodes": 1}
    assert client.post("/v1/kernel-log", content=lines.format("n001")).status_code == 202


def test_a_caller_has_so_many_new_names_a_minute(tmp_path: Path, clock: ManualClock) -> None:
    publish(tmp_path, NOW_MS, ["1 old"])
    limits = msgspec.structs.replace(LIMITS, live_jobs=1000)
    app = create_app(config(tmp_path, limits), clock, access=Access(parse_tokens(TOKENS, "here")))
    with Client(app) as client:
        many = submitted(*(f"j{n}" for n in range(12)))
        answer = client.post("/v1/events", json=many, headers=ADA)
        assert refused(answer) == {"names_per_minute": 4}
        assert app.state.context.names.compute_wait_s("ada", 4) == 4.0, "one name a second"
        assert client.post("/v1/events", json=submitted("bobs"), headers=BOB).status_code == 202
        assert client.post("/v1/events", json=submitted("old", sequence=5), headers=ADA).status_code == 202
        clock.advance(3)
        assert refused(client.post("/v1/events", json=many, headers=ADA)) == {"names_per_minute": 1}
        clock.advance(1)
        assert client.post("/v1/events", json=many, headers=ADA).json()["accepted"] == 1


def test_slurm_is_not_told_that_all_is_well(client: Client) -> None:
    record = {"state": "RUNNING", "@submit": "2025-10-09T08:00:00", "@start": "2025-10-09T08:00:00", "nodes": "n001"}
    rows = [{**record, "jobid": number, "tres_alloc": "node=1,gres/gpu=1"} for number in range(1, 6)]
    answers = [client.post("/v1/webhooks/slurm-jobcomp", json=row) for row in rows]
    assert [answer.status_code for answer in answers] == [200, 200, 429, 429, 429]
    assert refused(answers[-1]) == {"live_jobs": 1}


def test_each_bound_has_its_metrics(client: Client) -> None:
    client.post("/v1/events", json=[*submitted("a", "b", "c"), *drained("x", "y", "z")])
    page = client.get("/metrics").text
    assert 'fleetcast_limit{limit="live_jobs"} 4.0' in page
    assert 'fleetcast_limit_used{limit="unknown_nodes"} 0.0' in page
    assert 'fleetcast_limit_refused_total{limit="live_jobs"} 1.0' in page
    assert 'fleetcast_limit_refused_total{limit="unknown_nodes"} 1.0' in page
    assert 'fleetcast_api_events_total{outcome="limited"} 2.0' in page
