"""Who came to the api with a certificate is known to the placer, since the api vouches for him, and to nobody else."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConfigError
from fleetcast.service.api.app import create_app
from fleetcast.service.api.wiring import make_api_access
from fleetcast.service.config import AccessConfig, ApiConfig, Config, PlacerConfig
from fleetcast.service.http.access import Access, Caller, Scope, load_access, parse_subjects, parse_tokens
from fleetcast.service.http.certificates import NAMES
from fleetcast.service.http.link_key import read_link_key
from fleetcast.service.placer import role as placer
from fleetcast.service.placer.http import make_app
from tests.service.api_world import NOW_MS, FakePlacer, publish, running
from tests.service.placer_world import World

SUBJECTS = {"keda.example": ("read", "place"), "spiffe://site/reader": ("read",)}
TOKEN = "0123456789abcdef"


def ask(app: Any, method: str, path: str, names: tuple[str, ...] = (), **more: Any) -> httpx.Response:
    """A request over a connection whose certificate has these names."""

    async def with_names(scope: Any, receive: Any, send: Any) -> None:
        await app(scope | {NAMES: names}, receive, send)

    async def work() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(with_names), base_url="http://127.0.0.1") as client:
            answer = await client.request(method, path, **more)
        await app.state.context.placer.close()  # its sockets are of this loop
        return answer

    return asyncio.run(work())


def config_of(folder: Path, port: int) -> Config:
    return Config(state=str(folder), access=AccessConfig(SUBJECTS), placer=PlacerConfig(port=port))


def test_the_placer_decides_for_whom_the_api_vouches_and_audits_his_name(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.board.publish()
    world.app = make_app(world.service, access=placer.make_access(config_of(tmp_path, 1)))
    with running(FakePlacer()) as told:
        publish(tmp_path / "api")
        (tmp_path / "api" / "placer.key").write_text(read_link_key(tmp_path))
        app = create_app(config_of(tmp_path / "api", told.port), ManualClock(NOW_MS))
        body = {"request_id": "a", "user": "mallory"}
        assert ask(app, "POST", "/v1/placements", ("keda.example",), json=body).status_code == 200
        vouched = {name: told.headers[name] for name in ("authorization", "x-fleetcast-caller")}
        assert vouched["x-fleetcast-caller"] == "place,read keda.example"
        assert ask(app, "GET", "/metrics", ("spiffe://site/reader",)).status_code == 200
        assert told.headers["x-fleetcast-caller"] == "read spiffe://site/reader"
        assert ask(app, "POST", "/v1/placements", ("spiffe://site/reader",), json=body).status_code == 403
    assert world.ask("POST", "/placements", body, headers=vouched).status_code == 200
    assert world.ask("GET", "/audit", headers=vouched).status_code == 403
    assert [row["caller"] for row in world.service.ledger.read_audit_trail(10)] == ["keda.example"]
    world.close()


def test_the_placer_listens_to_nobody_else(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.board.publish()
    world.app = make_app(world.service, access=placer.make_access(config_of(tmp_path, 1)))
    key = {"authorization": f"Bearer {read_link_key(tmp_path)}"}
    admin = {"x-fleetcast-caller": "admin root"}
    for headers in ({}, admin, key, admin | {"authorization": f"Bearer {TOKEN}"}):
        assert world.ask("GET", "/queue", headers=headers).status_code == 401
    for told in ("", "admin", " root", "root admin", "king root"):
        assert world.ask("GET", "/queue", headers=key | {"x-fleetcast-caller": told}).status_code == 401
    assert world.ask("GET", "/queue", headers=key | admin).status_code == 200
    world.close()


def test_nobody_vouches_for_himself_at_the_api(tmp_path: Path) -> None:
    publish(tmp_path)
    with running(FakePlacer()) as told:
        app = create_app(config_of(tmp_path, told.port), ManualClock(NOW_MS))
        headers = {"authorization": f"Bearer {read_link_key(tmp_path)}", "x-fleetcast-caller": "admin root"}
        assert ask(app, "GET", "/v1/audit", headers=headers).status_code == 401
        claimed = {"x-fleetcast-caller": "admin root"}
        assert ask(app, "GET", "/v1/placements", ("keda.example",), headers=claimed).status_code == 200
        assert told.headers["x-fleetcast-caller"] == "place,read keda.example"


def test_a_replica_vouches_for_nobody(tmp_path: Path) -> None:
    api = ApiConfig(board="http://127.0.0.1:9/v1/board")
    access = make_api_access(Config(state=str(tmp_path), api=api, access=AccessConfig(SUBJECTS)))
    request: Any = type("Request", (), {"scope": {"fleetcast.admitted": Caller("a", frozenset({Scope.READ}), True)}})
    assert access.make_caller_headers(request) == {}
    assert not (tmp_path / "placer.key").exists()


def test_the_key_is_made_once_whoever_comes_first_and_is_ours_alone(tmp_path: Path) -> None:
    keys: list[str] = []
    threads = [threading.Thread(target=lambda: keys.append(read_link_key(tmp_path / "var"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(keys)) == 1
    assert len(keys[0]) >= 32
    assert os.listdir(tmp_path / "var") == ["placer.key"]
    assert (tmp_path / "var" / "placer.key").stat().st_mode & 0o777 == 0o600


# -- what the configuration says


def test_certificates_close_the_door_as_tokens_do() -> None:
    access = load_access("0.0.0.0", {}, SUBJECTS)
    assert not access.is_open
    assert access.authorize("GET", [], Scope.PLACE, ("x", "keda.example")).name == "keda.example"
    both = load_access("127.0.0.1", {"FLEETCAST_TOKENS": f"ada read {TOKEN}"}, SUBJECTS)
    assert both.list_names() == ["ada", *SUBJECTS]


def test_without_subjects_a_certificate_changes_nothing() -> None:
    assert Access().authorize("GET", [], Scope.READ, ("keda.example",)).name == ""
    tokens = Access(parse_tokens(f"ada read {TOKEN}", "the test"))
    with pytest.raises(Exception, match="no name of your certificate is in"):
        tokens.authorize("GET", [], Scope.READ, ("keda.example",))


@pytest.mark.parametrize(
    ("subjects", "says"),
    [
        ({"a": ["write"]}, "'a' = \\['write'\\]: expected some of the scopes read, events, place, admin"),
        ({"a": []}, "expected some of the scopes"),
        ({"": ["read"]}, "expected a common or alternative name"),
        ({" a": ["read"]}, "expected a common or alternative name"),
        ({"a\nb": ["read"]}, "expected a common or alternative name"),
    ],
)
def test_bad_subjects_are_refused(subjects: dict[str, list[str]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_subjects(subjects)
