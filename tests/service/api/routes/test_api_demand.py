"""The demand routes on a hand-made board."""

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from fleetcast.service.api.routes import demand_examples
from fleetcast.service.board.board import BoardWriter
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from tests.service import api_world
from tests.service.api.test_api import Client, client, problem  # noqa: F401
from tests.service.api_world import NOW_MS, demand_row


def of(body: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(row["queue"], row["class"], row["group"]) for row in body["series"]]


@pytest.fixture
def parts(tmp_path: Path, client: Client) -> Client:  # noqa: F811
    """A board with classes and groups."""
    rows = [
        structs.replace(demand_row("train", "wanted"), class_=class_, group=group)
        for class_, group in (("all", "all"), ("training", "all"), ("all", "g1"), ("all", "other"))
    ]
    writer = BoardWriter(tmp_path / "board")
    writer.publish(api_world.sections(NOW_MS) + make_demand_sections(rows, {}, [], NOW_MS), NOW_MS)
    return client


def test_series_are_chosen_by_class_and_group(parts: Client) -> None:
    assert len(parts.get("/v1/demand").json()["series"]) == 4
    assert of(parts.get("/v1/demand?class=training").json()) == [("train", "training", "all")]
    assert of(parts.get("/v1/demand?queue=train&group=g1&horizon_s=600").json()) == [("train", "all", "g1")]
    assert of(parts.get("/v1/demand?class=batch").json()) == []


def test_a_pool_is_one_of_machines_and_a_queue_has_a_parameter_of_its_own(
    tmp_path: Path,
    client: Client,  # noqa: F811
) -> None:
    """Queues are `all`, `train` and `serve`, pools of machines `h100` and `train`."""
    rows = [demand_row(queue, "wanted") for queue in ("all", "train", "serve")]
    pools = [structs.replace(demand_row("all", "wanted"), pool=pool, now=3.0) for pool in ("h100", "train")]
    fans = {name: {"history": [], "forecast": [], "old": []} for name in ("serve|wanted", "all|wanted|all|h100")}
    writer = BoardWriter(tmp_path / "board")
    sections = api_world.sections(NOW_MS) + make_demand_sections([*rows, *pools], fans, [], NOW_MS)
    writer.publish(sections, NOW_MS)

    def ask(query: str) -> list[tuple[str, str, float]]:
        found = client.get(f"/v1/demand?{query}").json()["series"]
        return [(row["queue"], row["pool"], row["now"]) for row in found]

    assert len(ask("")) == 5
    assert ask("pool=all") == ask("queue=all") == [("all", "all", 8.0)]
    assert ask("pool=h100") == [("all", "h100", 3.0)]
    assert ask("pool=train") == [("all", "train", 3.0)]
    assert ask("queue=train") == [("train", "all", 8.0)]
    assert "note" not in client.get("/v1/demand?pool=h100").json()
    assert "set `queue` or `pool`" in str(problem(client.get("/v1/demand?queue=train&pool=h100"), 422))
    old = client.get("/v1/demand?pool=serve&horizon_s=600").json()
    assert [(row["queue"], row["pool"], row["horizons_s"]) for row in old["series"]] == [("serve", "serve", [600])]
    assert "set queue=serve" in old["note"]
    assert "h100" in problem(client.get("/v1/demand?pool=nowhere"), 404)["detail"]
    record = client.get("/v1/demand/record?pool=h100&target=wanted").json()
    assert (record["queue"], record["pool"], "note" in record) == ("all", "h100", False)
    record = client.get("/v1/demand/record?pool=serve&target=wanted").json()
    assert (record["queue"], record["pool"], "note" in record) == ("serve", "serve", True)


@pytest.mark.parametrize(
    ("query", "status", "named"),
    [
        ("class=weather", 422, "inference"),
        ("target=weather", 422, "request_rate"),
        ("horizon_s=7", 422, "600, 3600"),
        ("group=nobody", 404, "g1"),
        ("pool=nowhere", 404, "train"),
        ("queue=nowhere", 404, "train"),
        ("groups=g1", 422, "horizon_s"),
    ],
)
def test_an_unknown_value_is_named_with_what_there_is(parts: Client, query: str, status: int, named: str) -> None:
    told = problem(parts.get(f"/v1/demand?{query}"), status)
    assert query.partition("=")[2 if "groups" not in query else 0] in str(told)
    assert named in str(told)


def test_the_demand_model_is_served_by_queue_and_class(client: Client) -> None:  # noqa: F811
    body = client.get("/v1/demand/model").json()
    assert body == {"as_of_ms": NOW_MS, "rows": demand_examples.MODEL["rows"]}
    assert client.get("/v1/demand/model?queue=serve&class=inference").json() == body
    assert client.get("/v1/demand/model?class=all").json()["rows"] == []
    old = client.get("/v1/demand/model?pool=serve").json()
    assert ([row["pool"] for row in old["rows"]], "queue=serve" in old["note"]) == (["serve"], True)
    assert "serve" in problem(client.get("/v1/demand/model?queue=x"), 404)["detail"]
    assert "serve" in problem(client.get("/v1/demand/model?pool=x"), 404)["detail"]
    assert "expected one of all" in str(problem(client.get("/v1/demand/model?class=x"), 422))
