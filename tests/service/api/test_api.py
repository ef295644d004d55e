"""The API over a hand-made board: every answer has its age, every error is a problem, nothing bad is a 500."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.ingest.inbox.event_body import decode_body
from fleetcast.ingest.inbox.inbox import read_newest_events
from fleetcast.service.api.app import create_app
from fleetcast.service.api.recent import RecentIdentities
from fleetcast.service.api.routes import events, risk
from fleetcast.service.api.routes.all import ROWS
from tests.service.api_world import NOW_MS, Client, FakePlacer, config, publish, running

AGE_S = 7


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    """A board that is 7.9 s old, and no placer."""
    publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS + 7_900))) as client:
        yield client


@pytest.fixture
def boardless(tmp_path: Path) -> Iterator[Client]:
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        yield client


def problem(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["status"] == status
    assert body["type"].startswith("urn:fleetcast:problem:")
    assert body["detail"]
    return body


@pytest.mark.parametrize(
    "path",
    [
        "/v1/nodes/n002",
        "/v1/risk/nodes",
        "/v1/demand",
        "/v1/demand/record",
        "/v1/jobs",
        "/v1/jobs/team/a",
        "/v1/jobs/team/a/stragglers",
        "/v1/fleet",
        "/v1/ingestion",
    ],
)
def test_every_body_about_the_fleet_says_how_old_it_is(client: Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert response.json()["as_of_ms"] == NOW_MS
    assert response.headers["age"] == str(AGE_S)
    assert response.headers["x-fleetcast-board"] == "1"


@pytest.mark.parametrize(
    "path", ["/v1/nodes/n002", "/v1/risk/nodes", "/v1/demand", "/v1/jobs", "/v1/fleet", "/v1/board"]
)
def test_without_a_board_the_answer_is_warming(boardless: Client, path: str) -> None:
    response = boardless.get(path)
    assert problem(response, 503)["type"].endswith("warming")
    assert response.headers["retry-after"] == "5"


def test_a_node_is_its_prebuilt_bytes(client: Client) -> None:
    assert client.get("/v1/nodes/n002").json() == {"node": "n002", "as_of_ms": NOW_MS, "state": "ok"}


def test_an_unknown_node_is_named(client: Client) -> None:
    body = problem(client.get("/v1/nodes/n999"), 404)
    assert "n999" in body["detail"]
    assert body["instance"] == "/v1/nodes/n999"


def ranking(client: Client, query: str = "") -> list[tuple[str, float | None, str | None]]:
    rows = client.get(f"/v1/risk/nodes{query}").json()["rows"]
    return [(row["node"], row["p"], row["kind"]) for row in rows]


def test_the_ranking_is_riskiest_first_and_the_unknown_come_last(client: Client) -> None:
    assert ranking(client) == [("n002", 0.6, "slow"), ("n001", 0.2, "fail"), ("n003", None, None)]


def test_the_ranking_by_one_kind_orders_by_that_kind(client: Client) -> None:
    assert ranking(client, "?kind=fail") == [("n001", 0.2, "fail"), ("n002", 0.1, "fail"), ("n003", None, None)]


def test_the_ranking_looks_as_far_ahead_as_asked(client: Client) -> None:
    assert ranking(client, "?horizon_s=604800&limit=1") == [("n002", 0.9, "slow")]


def test_a_minimum_leaves_out_the_unknown(client: Client) -> None:
    assert [node for node, _, _ in ranking(client, "?min=0")] == ["n002", "n001"]
    assert [node for node, _, _ in ranking(client, "?min=0.5")] == ["n002"]


def test_a_rack_that_does_not_exist_is_named_beside_those_that_do(client: Client) -> None:
    assert [node for node, _, _ in ranking(client, "?rack=r01")] == ["n002", "n001"]
    detail = problem(client.get("/v1/risk/nodes?rack=r99"), 404)["detail"]
    assert "r99" in detail
    assert "r01" in detail


def test_a_ranking_is_made_in_slices_and_whole_for_all_who_ask_meanwhile(tmp_path: Path) -> None:
    publish(tmp_path)
    app = create_app(config(tmp_path), ManualClock(NOW_MS))
    cache = app.state.context.cache
    board = cache.get_board()

    async def rank() -> tuple[int, list[bytes]]:
        work = asyncio.ensure_future(risk._rank_nodes(cache, board, 3600, None))
        turns = 0
        while not work.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, (await work).rows

    turns, rows = asyncio.run(rank())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(risk, "ROWS_AT_A_TIME", 1)
        sliced_turns, sliced_rows = asyncio.run(rank())
    assert sliced_rows == rows
    assert sliced_turns >= turns + 2


@pytest.mark.parametrize(
    ("path", "field", "words"),
    [
        ("/v1/risk/nodes?horizon_s=60", "horizon_s", "3600, 18000, 86400, 604800"),
        ("/v1/risk/nodes?kind=explode", "kind", "fail, drain, slow"),
        ("/v1/risk/nodes?min=nan", "min", "from 0 to 1"),
        ("/v1/risk/nodes?limit=0", "limit", "from 1"),
        ("/v1/risk/nodes?limit=x", "limit", "whole number"),
        ("/v1/risk/nodes?limit=1&limit=2", "limit", "once"),
        ("/v1/risk/nodes?horizon=60", "horizon", "horizon_s"),
        ("/v1/nodes/n001?x=1", "x", "no parameters"),
        ("/v1/demand?horizon_s=7", "horizon_s", "600, 3600"),
        ("/v1/demand?target=weather", "target", "arriving"),
        ("/v1/jobs?state=asleep", "state", "queued"),
    ],
)
def test_a_bad_parameter_is_named_with_what_is_allowed(client: Client, path: str, field: str, words: str) -> None:
    body = problem(client.get(path), 422)
    assert body["errors"][0]["field"] == field
    assert words in body["errors"][0]["expected"]


def test_demand_is_filtered_and_cut_to_a_horizon(client: Client) -> None:
    series = client.get("/v1/demand?pool=all&target=running&horizon_s=3600").json()["series"]
    assert [(row["pool"], row["horizons_s"], row["values"]) for row in series] == [
        ("all", [3600], [[6.0], [8.0], [10.0]])
    ]
    assert client.get("/v1/demand?class=inference").json()["series"] == []
    problem(client.get("/v1/demand?pool=nowhere"), 404)


def test_the_record_of_an_unknown_series_names_the_known_ones(client: Client) -> None:
    assert client.get("/v1/demand/record?pool=all&target=running").json()["history"] == [[NOW_MS, 8.0]]
    assert "all|running" in problem(client.get("/v1/demand/record?pool=x"), 404)["detail"]


def test_jobs_are_listed_and_found_by_names_with_slashes(client: Client) -> None:
    assert [row["job"] for row in client.get("/v1/jobs").json()["rows"]] == ["team/a", "b", "c"]
    assert [row["job"] for row in client.get("/v1/jobs?state=queued").json()["rows"]] == ["b"]
    assert client.get("/v1/jobs/team%2Fa").json()["placement"][0]["node"] == "n001"
    problem(client.get("/v1/jobs/nobody"), 404)


def test_a_job_without_a_score_is_not_said_to_be_fast(client: Client) -> None:
    assert client.get("/v1/jobs/team/a/stragglers").json()["slow"] is True
    assert client.get("/v1/jobs/b/stragglers").json()["slow"] is None
    problem(client.get("/v1/jobs/nobody/stragglers"), 404)


def test_the_board_is_served_whole_and_once(client: Client, tmp_path: Path) -> None:
    response = client.get("/v1/board")
    assert response.content == (tmp_path / "board" / "board").read_bytes()
    assert client.get("/v1/board", headers={"if-none-match": response.headers["etag"]}).status_code == 304
    assert client.get("/v1/board?part=urgent").status_code == 204


def test_unknown_paths_and_methods_are_problems(client: Client) -> None:
    problem(client.get("/v1/nothing"), 404)
    problem(client.request("POST", "/v1/webhooks/nothing"), 404)
    response = client.request("PUT", "/v1/placements")
    problem(response, 405)
    assert response.headers["allow"] == "GET, HEAD, POST"


def test_head_answers_without_a_body(client: Client) -> None:
    for path in ("/v1/fleet", "/v1/stream"):
        response = client.request("HEAD", path)
        assert (response.status_code, response.content) == (200, b"")


def test_openapi_documents_every_route_with_examples_of_their_types(client: Client) -> None:
    document = client.get("/openapi.json").json()
    for row in ROWS:
        operation = document["paths"][row.path.replace(":path}", "}")][row.method.lower()]
        assert operation["summary"]
        if row.example is not None:
            content = operation["responses"][str(row.status)]["content"][row.media_type]
            assert content["example"] == json.loads(msgspec.json.encode(row.example))
            if row.answer not in (str, bytes, dict):
                msgspec.convert(row.example, row.answer)
    references = set(_references(document))
    assert references <= {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert "#/components/schemas/PlacementRequest" in references


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for part in value.values():
            yield from _references(part)
    elif isinstance(value, list):
        for part in value:
            yield from _references(part)


def test_a_built_route_has_an_example(client: Client) -> None:
    silent = [row.path for row in ROWS if row.example is None and row.answer is not None]
    assert silent == ["/v1/board"]


def test_the_console_is_served_without_outside_assets(client: Client) -> None:
    for path in ("/", "/docs"):
        response = client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "//" not in response.text.replace("http://www.w3.org", "") or path == "/"
    tag = client.get("/").headers["etag"]
    assert client.get("/", headers={"if-none-match": tag}).status_code == 304


@pytest.mark.parametrize("path", ["/%2e%2e/api.py", "/..%2fapi.py", "/console.py", "/%00", "//etc/passwd", "/a" * 5000])
def test_nothing_outside_the_console_is_served(client: Client, path: str) -> None:
    problem(client.get(path), 404)


def test_metrics_tell_of_the_api_the_pipeline_and_the_placer(tmp_path: Path) -> None:
    publish(tmp_path)
    page = b"# TYPE fleetcast_ledger_rows gauge\nfleetcast_ledger_rows 5\n# TYPE fleetcast_ticks_total counter\nx 1\n"
    clock = ManualClock(NOW_MS + 2_000)
    with (
        running(FakePlacer(body=page, content_type="text/plain")) as placer,
        Client(create_app(config(tmp_path, placer.port), clock)) as client,
    ):
        client.get("/v1/nodes/n001")
        client.get("/v1/nodes/n404")
        lines = client.get("/metrics").text.splitlines()
    assert 'fleetcast_http_requests_total{method="GET",route="/v1/nodes/{node}",status="404"} 1.0' in lines
    assert 'fleetcast_bad_records_total{reason="not_a_number"} 3.0' in lines
    assert "fleetcast_samples_total 1234.0" in lines
    assert "fleetcast_board_age_seconds 2.0" in lines
    assert "fleetcast_board_stale_after_seconds 60.0" in lines
    assert 'fleetcast_gpus{state="free"} 8' in lines  # as the pipeline rendered it
    assert 'fleetcast_tick_seconds{quantile="0.99"} 0.09' in lines
    assert "fleetcast_ledger_rows 5" in lines
    assert sum(line.startswith("# TYPE fleetcast_ticks_total") for line in lines) == 1


def test_metrics_answer_without_board_and_placer(boardless: Client) -> None:
    assert "fleetcast_placer_up 0" in boardless.get("/metrics").text


def test_a_bug_is_a_500_with_an_id_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publish(tmp_path)
    app = create_app(config(tmp_path), ManualClock(NOW_MS))
    with Client(app) as client:
        monkeypatch.setattr(app.state.context.cache, "get_board", lambda: 1 / 0)
        body = problem(client.get("/v1/fleet"), 500)
    assert body["id"] in caplog.text


def step(sequence: int, **more: Any) -> dict[str, Any]:
    return {"job": "a", "sequence": sequence, "time_ms": NOW_MS, "type": "finished"} | more


def test_events_are_on_disk_when_they_are_acknowledged(boardless: Client, tmp_path: Path) -> None:
    response = boardless.post("/v1/events", json=[step(1), step(2), step(2), {"job": "b"}])
    assert response.status_code == 202
    body = response.json()
    assert (body["accepted"], body["duplicates"]) == (2, 1)
    assert [row["index"] for row in body["rejected"]] == [3]
    assert [event.sequence for event in read_newest_events(tmp_path / "inbox", 100)] == [1, 2]


ALL_REFUSED = {
    "one": [{"job": "b"}],
    "several": [{"job": "b"}, step(-1), step(1, colour="red")],
    "not events": [5, "a", None],
}


@pytest.mark.parametrize("name", ALL_REFUSED)
def test_a_body_whose_records_are_all_refused_is_no_success(boardless: Client, tmp_path: Path, name: str) -> None:
    records = ALL_REFUSED[name]
    body = problem(boardless.post("/v1/events", json=records), 422)
    assert (body["accepted"], body["duplicates"]) == (0, 0)
    assert [row["index"] for row in body["rejected"]] == list(range(len(records)))
    assert body["rejected"][0]["reason"] in body["detail"]
    assert list(read_newest_events(tmp_path / "inbox", 100)) == []


def test_one_good_or_known_record_makes_a_body_a_success(boardless: Client) -> None:
    assert boardless.post("/v1/events", json=[{"job": "b"}, step(1)]).status_code == 202
    again = boardless.post("/v1/events", json=[{"job": "b"}, step(1)])
    assert (again.status_code, again.json()["accepted"], again.json()["duplicates"]) == (202, 0, 1)


@pytest.mark.parametrize("kind", ["structured", "batch", "binary", "lines"])
def test_a_refused_event_is_no_success_in_any_form(boardless: Client, kind: str) -> None:
    envelope = {"specversion": "1.0", "id": "1", "source": "/s", "type": "job", "data": {"job": "b"}}
    content, headers = {
        "structured": (json.dumps(envelope), {"content-type": "application/cloudevents+json"}),
        "batch": (json.dumps([envelope] * 2), {"content-type": "application/cloudevents-batch+json"}),
        "binary": ('{"job": "b"}', {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "job"}),
        "lines": ('{"job": "b"}\n{"job": \n', {"content-type": "application/x-ndjson"}),
    }[kind]
    problem(boardless.post("/v1/events", content=content, headers=headers), 422)


def test_a_second_delivery_is_a_duplicate_across_a_restart(tmp_path: Path) -> None:
    for accepted in (1, 0):
        with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
            body = client.post("/v1/events", json=step(1)).json()
            assert (body["accepted"], body["duplicates"]) == (accepted, 1 - accepted)
    assert len(list(read_newest_events(tmp_path / "inbox", 100))) == 1


@pytest.mark.parametrize("coding", ["gzip", "deflate", "raw"])
def test_compressed_events_are_inflated(boardless: Client, coding: str) -> None:
    data = json.dumps(step(1)).encode()
    raw = zlib.compressobj(wbits=-15)
    body = {
        "gzip": gzip.compress(data, mtime=0),
        "deflate": zlib.compress(data),
        "raw": raw.compress(data) + raw.flush(),
    }[coding]
    headers = {"content-encoding": "gzip" if coding == "gzip" else "deflate"}
    assert boardless.post("/v1/events", content=body, headers=headers).json()["accepted"] == 1


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"", {}, 422),
        (b" \n", {}, 422),
        (gzip.compress(b"{}" * 100, mtime=0)[:-9], {"content-encoding": "gzip"}, 400),
        (b"plain", {"content-encoding": "gzip"}, 400),
        (b"plain", {"content-encoding": "deflate"}, 400),
        (b"x", {"content-encoding": "br"}, 415),
        (b"x", {"content-type": "multipart/form-data; boundary=x"}, 415),
        (b" " * (2**20 + 1), {}, 413),
        (gzip.compress(b" " * 2**24, mtime=0), {"content-encoding": "gzip"}, 413),
    ],
)
def test_a_body_that_cannot_be_read_is_a_problem(
    boardless: Client, content: bytes, headers: dict[str, str], status: int
) -> None:
    problem(boardless.post("/v1/events", content=content, headers=headers), status)


def test_a_body_in_chunks_is_not_read_beyond_a_bound(boardless: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.service.http.request_body.DISCARD_BYTES", 2**20)
    taken = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal taken
        for _ in range(100):
            taken += 2**16
            yield b" " * 2**16

    problem(boardless.post("/v1/events", content=chunks()), 413)
    assert taken <= 2**21 + 2**17


def test_a_full_disk_acknowledges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(file: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            response = client.post("/v1/events", json=step(1))
        assert "No space left" in problem(response, 503)["detail"]
        assert client.post("/v1/events", json=step(1)).json()["accepted"] == 1


def test_a_body_of_many_records_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RECORDS_A_TURN", 10)
    rows = [{"job": "a", "sequence": n, "time_ms": 5, "type": "finished"} for n in range(100)]
    decoded = decode_body(json.dumps(rows).encode(), now_ms=10)

    async def turns() -> int:
        work = asyncio.ensure_future(events.filter_new_records(decoded.records, RecentIdentities()))
        count = 0
        while not work.done():
            await asyncio.sleep(0)
            count += 1
        assert len(await work) == 100
        return count

    assert asyncio.run(turns()) >= 10
