"""POST /v1/risk/gang over a small board."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.service.api.app import create_app
from fleetcast.service.api.routes import gang_risk
from tests.service.api_world import NODES, NOW_MS, Client, config, publish


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    publish(tmp_path)
    with Client(create_app(config(tmp_path), ManualClock(NOW_MS + 3000))) as found:
        yield found


def ask(client: Client, *nodes: str, duration_s: float = 3600) -> dict[str, Any]:
    response = client.post("/v1/risk/gang", json={"nodes": nodes, "duration_s": duration_s})
    assert response.status_code == 200, response.text
    assert response.headers["age"] == "3"
    msgspec.convert(response.json(), gang_risk.GangAnswer)
    body: dict[str, Any] = response.json()
    return body


def test_a_gang_is_as_risky_as_its_nodes_and_what_they_share(client: Client) -> None:
    one, two = ask(client, "n001"), ask(client, "n001", "n002")
    assert one["p_interrupted"] == pytest.approx(0.2, abs=1e-3)
    assert two["p_interrupted"] > 1 - 0.8 * 0.9  # their own, and the rack
    assert [(row["level"], row["name"], row["nodes"]) for row in two["domains"]] == [("rack", "r01", 2)]
    assert two["p_slow"] == pytest.approx(1 - 0.99 * 0.4, abs=1e-3)
    assert "rack r01" in two["sentence"]


def test_the_weakest_is_of_the_larger_risk_and_the_sentence_says_both(client: Client) -> None:
    one, two = ask(client, "n001"), ask(client, "n001", "n002")
    assert (one["weakest"]["node"], one["weakest"]["risk"]) == ("n001", "interruption")
    assert (
        "without interruption with 80 %, without a slow node with 99 %; the weakest is n001 (inter" in one["sentence"]
    )
    assert (two["weakest"]["node"], two["weakest"]["risk"]) == ("n002", "slowness")  # slow with .6, interrupts with .1
    assert two["weakest"]["p"] == pytest.approx(0.6, abs=1e-3)
    assert "without a slow node with 39.6 %; the weakest is n002 (slow with 60 %)" in two["sentence"]


def test_the_risk_grows_with_nodes_and_time(client: Client) -> None:
    sizes = [ask(client, *NODES[:n])["p_interrupted"] for n in (1, 2, 3)]
    times = [ask(client, *NODES, duration_s=s)["p_interrupted"] for s in (60, 3600, 40_000, 86_400, 2e6)]
    assert sizes == sorted(sizes)
    assert times == sorted(times)
    assert times[0] < times[-1]


def test_a_node_without_scores_is_named_as_unknown(client: Client) -> None:
    assert ask(client, "n001", "n003")["unknown"] == ["n003"]


@pytest.mark.parametrize(
    ("body", "status", "named"),
    [
        ({"nodes": ["n001", "n9"], "duration_s": 60}, 404, "'n9'"),
        ({"nodes": ["n001", "n001"], "duration_s": 60}, 422, "n001"),
        ({"nodes": [f"n{n}" for n in range(4)], "duration_s": 60}, 422, "3 nodes of the fleet"),
        ({"nodes": [], "duration_s": 60}, 422, "nodes"),
        ({"nodes": ["n001"], "duration_s": 0}, 422, "duration_s"),
        ({"nodes": ["n001"], "duration_s": 1e12}, 422, "duration_s"),
        ({"nodes": ["n001"], "duration_s": "long"}, 422, "duration_s"),
        ({"nodes": ["n001"]}, 422, "duration_s"),
        ({"nodes": ["n001"], "duration_s": 60, "rack": "r1"}, 422, "rack"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(client: Client, body: Any, status: int, named: str) -> None:
    response = client.post("/v1/risk/gang", json=body)
    assert response.status_code == status
    assert named in response.text


class Counted(str):
    """A name that counts how often it is compared."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return str.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = str.__hash__


def test_many_names_are_not_compared_each_with_each() -> None:
    names = [Counted(f"n{n}") for n in range(500)]
    assert gang_risk.find_repeated_name(names) is None
    assert gang_risk.find_repeated_name([*names, Counted("n7")]) == "n7"
    assert Counted.compared < 5000
