"""Placements, queue and audit are the placer's own words; random bodies never make a 5xx that is not documented."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from tests.fuzz.bounds import examples
from tests.service.api_world import NOW_MS, Client, FakePlacer, config, publish, running


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, FakePlacer]]:
    folder = tmp_path_factory.mktemp("state")
    publish(folder)
    with (
        running(FakePlacer()) as placer,
        Client(create_app(config(folder, placer.port), ManualClock(NOW_MS))) as client,
    ):
        yield client, placer


def test_bytes_and_status_are_the_placers(world: tuple[Client, FakePlacer]) -> None:
    client, placer = world
    placer.status, placer.content_type = 422, "application/problem+json"
    response = client.post("/v1/placements", content=b'{"request_id":  "x"}')
    placer.status, placer.content_type = 200, "application/json"
    assert response.status_code == 422
    assert response.content == placer.body
    assert response.headers["content-type"] == "application/problem+json"
    assert placer.asked[-1] == ("POST", "/placements", b'{"request_id":  "x"}')


@pytest.mark.parametrize(
    ("method", "path", "asked"),
    [
        ("GET", "/v1/placements?after=17&limit=5", "/placements?after=17&limit=5"),
        ("GET", "/v1/placements/team%2Fa%201", "/placements/team%2Fa%201"),
        ("DELETE", "/v1/placements/x", "/placements/x"),
        ("GET", "/v1/queue", "/queue"),
        ("DELETE", "/v1/queue/x", "/queue/x"),
        ("GET", "/v1/audit?limit=1", "/audit?limit=1"),
    ],
)
def test_paths_and_queries_go_on_as_they_came(
    world: tuple[Client, FakePlacer], method: str, path: str, asked: str
) -> None:
    client, placer = world
    assert client.request(method, path).status_code == 200
    assert placer.asked[-1][:2] == (method, asked)


def test_a_placer_that_is_away_is_a_503_that_says_when_to_ask_again(tmp_path: Path) -> None:
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS))) as client:
        response = client.post("/v1/placements", json={"request_id": "x"})
    assert response.status_code == 503
    assert response.json()["type"] == "urn:fleetcast:problem:placer_away"
    assert int(response.headers["retry-after"]) >= 1


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@examples(150)
@given(body=json_values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=100))
def test_no_body_makes_an_undocumented_5xx(world: tuple[Client, FakePlacer], body: bytes) -> None:
    client, _ = world
    for path in ("/v1/events", "/v1/placements", "/v1/queue", "/v1/risk/gang"):
        assert client.post(path, content=body).status_code in (200, 202, 400, 422)


@examples(150)
@given(name=st.text(min_size=1, max_size=40), value=st.text(max_size=20))
def test_no_path_and_no_query_makes_a_500(world: tuple[Client, FakePlacer], name: str, value: str) -> None:
    client, _ = world
    query: dict[str, Any] = {"limit": value, "horizon_s": value}
    for path in ("/v1/risk/nodes", "/v1/demand", "/v1/jobs"):
        assert client.get(path, params=query).status_code in (200, 404, 422)
    for path in ("/v1/nodes/", "/v1/jobs/", "/"):
        assert client.get(path + quote(name, safe="")).status_code in (200, 404)
