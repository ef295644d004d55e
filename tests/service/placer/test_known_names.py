"""A request that names what this installation does not have is refused with the nearest names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.service.config import FleetConfig, load_config
from tests.service.placer_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.board.publish()
    made.service.view.refresh()
    yield made
    made.close()


def named(world: World, **fleet: Any) -> None:
    config = msgspec.structs.replace(world.config, fleet=FleetConfig(**fleet))
    world.config = config
    world.restart()
    world.service.view.refresh()


@pytest.mark.parametrize("path", ["/placements", "/queue", "/estimate"])
@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"pool": "trian"}, "pool", "pool is 'trian', and there is none of that name; the nearest is train"),
        ({"pool": "zzz"}, "pool", "there is train"),
        (
            {"gpu_model": "H10O"},
            "gpu_model",
            "is 'H10O', and there is none of that name; the nearest is H100",
        ),
        (
            {"gpu_models": ["B200", "A100"]},
            "gpu_models",
            "is 'B200 or A100', and there is none of that name",
        ),
        ({"cluster": "other"}, "cluster", "set [fleet] name or [fleet] cluster"),
    ],
)
def test_an_unknown_name_is_refused(world: World, path: str, fields: dict[str, Any], field: str, says: str) -> None:
    response = world.ask("POST", path, {"request_id": "a", **fields})
    assert response.status_code == 422
    assert says in response.json()["detail"]
    assert [row["field"] for row in response.json()["errors"]] == [field]
    assert world.ask("GET", "/placements/a").status_code == 404, "nothing was decided"


@pytest.mark.parametrize(
    "fields", [{"pool": "train"}, {"gpu_model": "h100"}, {"gpu_models": ["B200", "H1"]}, {"cluster": "fleet"}, {}]
)
def test_a_known_name_is_placed(world: World, fields: dict[str, Any]) -> None:
    assert world.place("a", **fields)["outcome"] == "placed"


@pytest.mark.parametrize(
    ("fleet", "own"),
    [({"name": "east"}, ["east"]), ({"cluster": "west"}, ["west", "fleet"]), ({"cluster": ("a", "b")}, ["a", "b"])],
)
def test_a_cluster_is_the_fleet_itself(world: World, fleet: dict[str, Any], own: list[str]) -> None:
    named(world, **fleet)
    for name in own:
        assert world.place(f"in-{name}", cluster=name)["outcome"] == "placed"
    refused = world.ask("POST", "/placements", {"request_id": "b", "cluster": "other"})
    assert refused.status_code == 422
    assert "cluster is 'other', and there is none of that name; there" in refused.json()["detail"]


def test_a_model_that_the_file_of_queues_names_may_come_later(world: World, tmp_path: Path) -> None:
    queues = tmp_path / "queues.toml"
    queues.write_text("[queue.a]\nlimit = {B200 = 64}\n")
    placer = msgspec.structs.replace(world.config.placer, queues=str(queues))
    world.config = msgspec.structs.replace(world.config, placer=placer)
    world.restart()
    world.service.view.refresh()
    waits = world.ask("POST", "/queue", {"request_id": "a", "queue": "a", "gpu_model": "B200"})
    assert waits.status_code == 202
    assert world.ask("POST", "/queue", {"request_id": "b", "queue": "a", "gpu_model": "B300"}).status_code == 422


def test_without_a_board_a_name_is_not_known_to_be_wrong(tmp_path: Path) -> None:
    made = World(tmp_path)
    assert made.ask("POST", "/queue", {"request_id": "a", "pool": "later"}).status_code == 202
    assert made.ask("POST", "/queue", {"request_id": "b", "cluster": "other"}).status_code == 422
    made.close()


def test_the_answer_says_which_queue_pays_for_an_unknown_one(world: World, tmp_path: Path) -> None:
    queues = tmp_path / "queues.toml"
    queues.write_text('[policy]\nunknown_queue = "rest"\n[queue.research]\n[queue.rest]\n')
    placer = msgspec.structs.replace(world.config.placer, queues=str(queues))
    world.config = msgspec.structs.replace(world.config, placer=placer)
    world.restart()
    world.service.view.refresh()
    note = "; there is no queue 'resaerch', so queue 'rest' is charged"
    assert world.place("a", queue="resaerch")["sentence"].endswith(note)
    assert note not in world.place("b", queue="research")["sentence"]
    assert world.ask("POST", "/queue", {"request_id": "c", "queue": "resaerch"}).json()["sentence"].endswith(note)
    world.step()
    assert world.ask("GET", "/placements/c").json()["sentence"].endswith(note)


def test_the_key_takes_one_name_or_several(tmp_path: Path) -> None:
    for text, names in (('"east"', ("fleet", "east")), ('["east", "e"]', ("fleet", "east", "e")), ("[]", ("fleet",))):
        (tmp_path / "c.toml").write_text(f"[fleet]\ncluster = {text}\n")
        assert load_config(tmp_path / "c.toml").fleet.clusters == names
