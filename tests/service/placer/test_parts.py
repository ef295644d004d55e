"""Parts of GPUs through the placer: promised, kept across a restart, seen running."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.service.placer_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    world.board.publish()
    yield world
    world.close()


def test_parts_stay_promised_across_a_restart(world: World) -> None:
    ranks = [world.place(name, gpu_share=600)["ranks"] for name in "ab"]
    assert ranks[0] == [{"rank": 0, "node": "n01", "gpus": [0], "gpu_share": 600}]
    assert ranks[1] == [{"rank": 0, "node": "n01", "gpus": [1], "gpu_share": 600}]
    world.restart()
    assert world.place("c", gpu_share=400)["ranks"][0]["gpus"] == [0]
    assert world.place("d", gpu_share=401)["ranks"][0]["gpus"] == [2]
    assert world.ask("DELETE", "/placements/a").status_code == 200
    assert world.place("e", gpu_share=600)["ranks"][0]["gpus"] == [0]


def test_what_running_jobs_leave_of_a_gpu_can_be_had_and_no_more(world: World) -> None:
    world.board.jobs = {"x": range(1, 16), "y": []}
    world.board.parts = [(0, 0, 3, 300), (1, 0, 3, 450)]
    world.board.publish()
    whole = world.place("whole", gpus_per_node=8)
    assert whole["outcome"] == "refused"
    first = world.place("fits", gpu_share=250)
    assert first["ranks"] == [{"rank": 0, "node": "n01", "gpus": [3], "gpu_share": 250}]
    assert world.place("next", gpu_share=1)["ranks"][0]["gpus"] == [0]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"gpu_share": 0}, "gpu_share"),
        ({"gpu_share": 1001}, "gpu_share"),
        ({"gpu_share": 0.5}, "gpu_share"),
        ({"gpu_share": 500, "gpus_per_node": 2}, "gpu_share"),
        ({"gpu_share": 500, "mig_profile": "1g.10gb"}, "mig_profile"),
        ({"gpus_per_node": 0}, "gpus_per_node"),
        ({"gpus_per_node": 0, "cpus": 4, "gpu_models": ["H100"]}, "gpu_models"),
        ({"gpu_models": ["H100"], "gpu_model": "A100"}, "gpu_models"),
        ({"gpu_models": "H100"}, "gpu_models"),
    ],
)
def test_nonsense_is_refused_with_its_field(world: World, body: dict[str, object], field: str) -> None:
    for door in ("/placements", "/queue"):
        response = world.ask("POST", door, {"request_id": "a", **body})
        assert response.status_code == 422
        assert [row["field"] for row in response.json()["errors"]] == [field]


def test_fragments_are_of_the_newest_requests_and_survive_a_restart(world: World) -> None:
    before = world.ask("GET", "/fragmentation").json()
    assert (before["requests"], before["rows"][0]["free_gpus"], before["rows"][0]["lost_gpus"]) == (0, 128.0, None)
    world.place("part", gpu_share=250)
    for number in range(60):
        world.place(f"p{number}", gpus_per_node=8, cpus=200)
    for _ in range(2):
        page = world.ask("GET", "/fragmentation").json()
        (row,) = page["rows"]
        assert page["requests"] >= 50
        assert (row["pool"], row["free_gpus"]) == ("train", 127.75)
        assert row["lost_gpus"] > 125, "nearly all want more CPUs than a node has"
        assert (row["largest_gang"]["node"], row["largest_gang"]["rack"]) == (8, 64)
        text = world.ask("GET", "/metrics").text
        assert 'fleetcast_largest_gang_gpus{level="node",pool="train"} 8.0' in text
        assert 'fleetcast_fragmentation_gpus{kind="free",pool="train"} 127.75' in text
        world.restart()
